"""Learning curves of tiny runs with known numbers."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.files import read_csv

from bestiary.analysis.curves import aggregate, binned, curves, distinctions, smoothed
from bestiary.analysis.plot import draw, plot, style
from bestiary.config.experiment import Experiment, Logs
from bestiary.cores import Ff, Lstm
from bestiary.envs import Catch, Recall
from bestiary.errors import UserError
from bestiary.training.run import EXPERIMENT

RECALL = Experiment(env=Recall(), core=Lstm())


def table(path: Path, columns: str, rows: list[tuple]) -> None:
    lines = [columns, *(",".join(map(str, row)) for row in rows)]
    path.write_text("".join(f"{line}\n" for line in lines))


def make(
    path: Path,
    scores: list[tuple[int, float]],
    experiment: Experiment = RECALL,
    evaluations: list[tuple[int, float]] | None = None,
    **changes: object,
) -> Path:
    """A run directory; `scores` lists episodes as (frames, score).

    There are 2 agent steps per second, 2 frames per step and an update every 4 frames.
    """
    path.mkdir(parents=True)
    (path / EXPERIMENT).write_text(replace(experiment, **changes).to_json())  # type: ignore
    table(path / "episodes.csv", "frames,slot,score,steps,success", [(f, 0, s, 11, int(s > 0)) for f, s in scores])
    metrics = [(f, f // 2, f // 4, f / 4, f / 100, "") for f in (4, 8, 12, 16, 20)]
    table(path / "metrics.csv", "frames,steps,updates,seconds,entropy,rare", metrics)
    (path / "evaluations.csv").write_text("")
    if evaluations:
        table(path / "evaluations.csv", "frames,score", evaluations)
    return path


@pytest.fixture
def seeds(tmp_path) -> list[Path]:
    """Three seeds with four episodes each, at frames 5, 10, 15 and 20."""
    scores = ([1, 2, 3, 4], [3, 4, 5, 6], [2, 6, 1, 8])
    return [
        make(tmp_path / f"lstm-{i}", [(5 * (j + 1), s) for j, s in enumerate(row)], seed=i)
        for i, row in enumerate(scores)
    ]


def test_seeds_become_one_line_with_mean_and_range(seeds, tmp_path):
    result = plot(seeds, bins=2, interval="range", out=tmp_path / "a.png")
    # episodes at 5 and 10 fall into the first half, 15 and 20 into the second: means 1.5, 3.5, 4 and 3.5, 5.5, 4.5
    assert result.files == [tmp_path / "a.png", tmp_path / "a.svg", tmp_path / "a.csv"]
    assert (tmp_path / "a.csv").read_text() == (
        "label,frames,mean,low,high,seeds\n"
        '"env=recall, core=lstm, algo=impala",10,3,1.5,4,3\n'
        '"env=recall, core=lstm, algo=impala",20,4.5,3.5,5.5,3\n'
    )


def test_the_interquartile_mean_can_be_selected(seeds, tmp_path):
    plot(seeds, bins=2, aggregate="iqm", out=tmp_path / "a.png")
    # of three, a quarter of the outer ones: (1.5 / 4 + 3.5 + 4 / 4) / 1.5
    assert [float(r["iqm"]) for r in read_csv(tmp_path / "a.csv")] == pytest.approx([3.25, 4.5])


def test_the_bootstrap_interval_lies_within_the_range_around_the_mean(seeds):
    (line,) = curves(seeds, bins=4).lines
    (full,) = curves(seeds, bins=4, interval="range").lines
    assert line.low is not None and line.high is not None and full.low is not None and full.high is not None
    assert (full.low <= line.low).all() and (line.low < line.y).all()
    assert (line.y < line.high).all() and (line.high <= full.high).all()
    # 27 resamples of three: an end of the range comes with a chance of 1/27, more than 2.5%
    np.testing.assert_allclose(line.low, full.low)
    np.testing.assert_allclose(line.high, full.high)


@pytest.mark.parametrize("statistic", ["mean", "iqm"])
def test_the_interval_of_identical_seeds_is_a_point(statistic, tmp_path):
    runs = [make(tmp_path / str(i), [(10, 0.1), (20, 0.7)], seed=i) for i in range(3)]
    (line,) = curves(runs, bins=2, statistic=statistic).lines
    np.testing.assert_allclose([line.low, line.high], [line.y, line.y])
    np.testing.assert_allclose(line.y, [0.1, 0.7])


def test_one_seed_has_no_interval(seeds, tmp_path):
    (line,) = plot(seeds[:1], bins=2, out=tmp_path / "a.png").lines
    assert line.low is line.high is None
    assert line.seeds == 1
    assert [(r["low"], r["high"]) for r in read_csv(tmp_path / "a.csv")] == [("", ""), ("", "")]


def test_no_interval_where_every_task_has_one_seed():
    assert aggregate("a", [1], [[[1.0]], [[3.0]]]).low is None
    assert aggregate("a", [1], [[[1.0]], [[3.0]]], interval="range").low == pytest.approx([1.0])
    assert aggregate("a", [1], [[[1.0], [2.0]], [[3.0]]]).low == pytest.approx([5 / 3])


def test_bootstrap_resamples_each_task_of_a_line_separately(tmp_path):
    easy = [make(tmp_path / f"easy-{i}", [(20, 1.0)], env=Recall(delay=1), seed=i) for i in range(4)]
    hard = [make(tmp_path / f"hard-{i}", [(20, 0.0)], env=Recall(delay=99), seed=i) for i in range(4)]
    (line,) = curves([*easy, *hard], bins=1, labels={"all": ["easy-*", "hard-*"]}).lines
    assert (line.low, line.y, line.high) == ([0.5], [0.5], [0.5])  # pooled, the mix of tasks would vary


def test_labels_show_the_settings_in_which_lines_differ(tmp_path):
    lines = [
        make(tmp_path / "a", [(10, 1.0)]),
        make(tmp_path / "b", [(10, 1.0)], core=Ff()),
        make(tmp_path / "c", [(10, 1.0)], core=Ff(), seed=7, log=Logs(tensorboard=False)),
    ]
    assert [(line.label, line.seeds) for line in curves(lines).lines] == [("core=lstm", 1), ("core=ff", 2)]
    delays = [make(tmp_path / str(n), [(10, 1.0)], env=Recall(delay=n)) for n in (3, 30)]
    assert [line.label for line in curves(delays).lines] == ["env.delay=3", "env.delay=30"]
    both = curves([*lines[:2], *delays]).lines
    assert [line.label for line in both] == [
        "core=lstm, env.delay=10",
        "core=ff, env.delay=10",
        "core=lstm, env.delay=3",
        "core=lstm, env.delay=30",
    ]


def test_settings_that_vary_with_the_label_are_in_a_note(tmp_path):
    runs = [
        make(tmp_path / str(n), [(10, 1.0)], env=Recall(delay=n), core=Lstm(chrono=2 * n), frames=n) for n in (3, 30)
    ]
    lines, notes, _ = curves(runs)
    assert [line.label for line in lines] == ["env.delay=3", "env.delay=30"]
    assert notes == ["the lines also differ in core.chrono, frames"]


def test_settings_are_compared_within_a_kind():
    a, b, c = {"kind": "lstm", "hidden": 64}, {"kind": "lstm", "hidden": 128}, {"kind": "ff"}
    assert distinctions([a, b, c], "core") == [
        {"core": "lstm", "core.hidden": "64"},
        {"core": "lstm", "core.hidden": "128"},
        {"core": "ff"},
    ]
    assert distinctions([a, a]) == [{}, {}]


def test_runs_can_be_labelled_by_hand(seeds, tmp_path):
    other = make(tmp_path / "other", [(20, 0.0)], env=Catch())
    labels = {"two": [str(seeds[0]), "lstm-1"], "one": [f"{tmp_path}/lstm-2"]}
    lines = curves([*seeds, other], bins=1, labels=labels).lines
    assert [(line.label, line.seeds, line.y[0]) for line in lines] == [
        ("two", 2, 3.5),
        ("one", 1, 4.25),
        ("env=catch, core=lstm, algo=impala", 1, 0.0),
    ]
    (everyone,) = curves(seeds, bins=1, labels={"all": ["lstm-*"]}).lines
    assert everyone.seeds == 3


def test_a_run_given_twice_counts_once(seeds, tmp_path):
    (tmp_path / "latest").symlink_to("lstm-0")
    (line,) = curves([*seeds, tmp_path / "latest", seeds[1]]).lines
    assert line.seeds == 3


def test_runs_of_unequal_length_are_compared_up_to_the_shortest(tmp_path):
    short = make(tmp_path / "a", [(5, 0.0), (10, 2.0)])
    long = make(tmp_path / "b", [(5, 4.0), (10, 6.0), (15, 99.0), (20, 99.0)], seed=1)
    lines, notes, _ = curves([short, long], bins=2)
    np.testing.assert_allclose([lines[0].x, lines[0].y], [[5, 10], [2.0, 4.0]])
    assert len(notes) == 1
    assert "end between 10 and 20 frames" in notes[0]


def test_last_episodes_may_end_at_slightly_different_frames(tmp_path):
    runs = [make(tmp_path / str(end), [(50, 1.0), (end, 2.0)], seed=end) for end in (100, 101, 103)]
    assert curves(runs[:2]).notes == []
    assert len(curves(runs).notes) == 1


def test_a_line_starts_where_every_seed_has_an_episode(tmp_path):
    early = make(tmp_path / "a", [(1, 0.0), (8, 4.0)])
    late = make(tmp_path / "b", [(5, 2.0), (8, 8.0)], seed=1)
    (line,) = curves([early, late], bins=4).lines  # ends at 2, 4, 6, 8
    np.testing.assert_allclose(line.x, [6, 8])
    np.testing.assert_allclose(line.y, [1.0, 6.0])  # the early one's bins without an episode repeat its 0


def test_bins_agree_with_a_plain_loop():
    rng = np.random.default_rng(0)
    x, y = np.sort(rng.integers(1, 100, 40)).astype(float), rng.normal(size=40)
    expected = []
    for b in range(7):
        inside = [v for at, v in zip(x, y, strict=True) if b * 90 / 7 < at <= (b + 1) * 90 / 7]
        expected.append(np.mean(inside) if inside else expected[-1])
    np.testing.assert_allclose(binned(x, y, 90, 7), expected)


def test_smoothing_is_a_trailing_mean():
    y = np.array([[4.0, 0.0, 2.0, 6.0], [1.0, 1.0, 1.0, 1.0]])
    np.testing.assert_allclose(smoothed(y, 2), [[4, 2, 1, 4], [1, 1, 1, 1]])
    np.testing.assert_allclose(smoothed(y, 9), [[4, 2, 2, 3], [1, 1, 1, 1]])
    np.testing.assert_array_equal(smoothed(y, 1), y)


@pytest.mark.parametrize(("clock", "end"), [("frames", 20), ("steps", 10), ("updates", 5), ("seconds", 5)])
def test_every_x_axis(seeds, clock, end, tmp_path):
    plot(seeds, x=clock, bins=2, out=tmp_path / "a.png")
    assert [float(r[clock]) for r in read_csv(tmp_path / "a.csv")] == [end / 2, end]
    assert [float(r["mean"]) for r in read_csv(tmp_path / "a.csv")] == [3, 4.5]


def test_success_and_columns_of_metrics_can_be_plotted(seeds):
    assert curves(seeds, "success", bins=1).lines[0].y == [1.0]
    np.testing.assert_allclose(curves(seeds, "entropy", bins=5).lines[0].y, [0.04, 0.08, 0.12, 0.16, 0.2])


def test_evaluations_at_the_same_frames_are_not_binned(tmp_path):
    a = make(tmp_path / "a", [(9, 0.0)], evaluations=[(8, 0.0), (16, 1.0), (24, 1.0)])
    b = make(tmp_path / "b", [(9, 0.0)], seed=1, evaluations=[(8, 0.5), (16, 0.5), (24, 1.0)])
    (line,) = curves([a, b], "eval").lines
    np.testing.assert_array_equal([line.x, line.y], [[8, 16, 24], [0.25, 0.75, 1.0]])


def test_evaluations_at_other_frames_are_interpolated(tmp_path):
    a = make(tmp_path / "a", [(9, 0.0)], evaluations=[(10, 0.0), (20, 1.0)])
    b = make(tmp_path / "b", [(9, 0.0)], seed=1, evaluations=[(5, 0.0), (15, 1.0), (20, 0.0)])
    (line,) = curves([a, b], "eval").lines
    np.testing.assert_allclose([line.x, line.y], [[10, 20], [0.25, 0.5]])


def test_an_incomplete_row_is_skipped(seeds):
    with (seeds[0] / "episodes.csv").open("a") as file:
        file.write("25,0")
    assert curves(seeds[:1], bins=2).lines[0].x[-1] == 20


def test_figures_are_written_and_equal_for_equal_options(seeds, tmp_path):
    options = {"bins": 3, "references": {"best": 8.0}, "title": "three seeds"}
    first = plot(seeds, out=tmp_path / "one" / "a.png", **options).files
    again = plot(seeds, out=tmp_path / "two" / "a.svg", **options).files
    assert [f.read_bytes() for f in first] == [f.read_bytes() for f in again]
    png, svg, _ = (f.read_bytes() for f in first)
    assert png.startswith(b"\x89PNG") and len(png) > 5_000
    assert b"<svg" in svg and len(svg) > 5_000


def plotted_references(monkeypatch, runs: list[Path], out: Path, **options) -> dict[str, float]:
    captured = []
    monkeypatch.setattr("bestiary.analysis.plot.draw", lambda *args: (captured.append(args[2]), draw(*args)))
    plot(runs, out=out, **options)
    return captured[0]


def test_reference_scores_of_an_environment_are_plotted(seeds, tmp_path, monkeypatch):
    known = {"optimal": 1.0, "without memory": 0.25}
    out = tmp_path / "a.png"
    assert plotted_references(monkeypatch, seeds, out) == known
    assert plotted_references(monkeypatch, seeds, out, references={"own": 3.0}) == known | {"own": 3.0}
    assert plotted_references(monkeypatch, seeds, out, metric="entropy") == {}
    other = make(tmp_path / "other", [(20, 0.0)], env=Recall(cues=2))
    assert plotted_references(monkeypatch, [*seeds, other], out) == {}


def test_lines_can_be_plotted_on_given_axes():
    from matplotlib.figure import Figure

    axes = Figure().subplots(1, 2)
    lines = [aggregate(name, [10, 30, 100], [[[1, 2, 3], [3, 4, 5]]]) for name in ("lstm", "ff")]
    styles = style(line.label for line in lines)
    draw(axes[0], lines, {"best": 5.0}, styles)
    draw(axes[1], lines[1:], styles=styles)
    assert [line.get_label() for line in axes[0].lines[:2]] == ["lstm", "ff"]
    assert axes[0].lines[1].get_color() == axes[1].lines[0].get_color() != axes[0].lines[0].get_color()
    assert len(axes[0].collections) == 2
    np.testing.assert_array_equal(axes[0].lines[0].get_ydata(), [2, 3, 4])


def test_styles_stay_distinct_when_colours_run_out():
    assert len({str(look) for look in style(map(str, range(24))).values()}) == 24


def error_message(call, *args, **options) -> str:
    with pytest.raises(UserError) as e:
        call(*args, **options)
    return str(e.value)


def test_every_mistake_is_answered_in_one_sentence(seeds, tmp_path):
    fresh = make(tmp_path / "fresh", [])
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.log").write_text("")
    assert error_message(plot, []) == "name at least one run"
    for path in (tmp_path / "empty", tmp_path / "a.log", tmp_path / "nowhere"):
        assert error_message(plot, [path]) == f"{path} is not a run: it has no experiment.json"
    assert error_message(plot, [fresh]) == f"{fresh} has no finished episodes yet"
    assert error_message(plot, [*seeds, fresh]) == f"{fresh} has no finished episodes yet"
    assert error_message(plot, seeds, "eval") == f"{seeds[0]} has no evaluations yet"
    assert error_message(plot, seeds, "rare") == f"{seeds[0]} has no rows in metrics.csv yet with rare"
    assert error_message(plot, seeds, "entropi") == f"{seeds[0]} has no 'entropi': did you mean entropy?"
    assert "there are: score, success, steps" in error_message(plot, seeds, "zzz")
    evaluated = make(tmp_path / "evaluated", [(9, 1.0)], evaluations=[(9, 1.0)])
    assert error_message(plot, [evaluated], "eval.scores").startswith(f"{evaluated} has no 'eval.scores': ")
    later = make(tmp_path / "later", [(9, 1.0)], seed=1, evaluations=[(20, 1.0)])
    assert "no range of frames in common in which all of them have eval" in error_message(
        plot, [evaluated, later], "eval"
    )
    assert "label 'x' names lstm-7, which matches none of the runs" in error_message(
        plot, seeds, labels={"x": ["lstm-7"]}
    )
    assert error_message(plot, seeds, bins=0) == "bins=0 and smooth=1 must be at least 1"
    assert error_message(plot, seeds, out="a.pdf") == "out=a.pdf must end in .png or .svg"


def test_an_old_run_without_success_is_refused(tmp_path):
    run = make(tmp_path / "old", [(9, 1.0)])
    table(run / "episodes.csv", "frames,score", [(9, 1.0)])
    assert error_message(plot, [run], "success").startswith(f"{run} has no 'success': ")


def test_the_tables_of_a_run_are_never_overwritten(seeds):
    before = (seeds[0] / "metrics.csv").read_text()
    assert "was not written by plot" in error_message(plot, seeds, "entropy", out=seeds[0] / "metrics.png")
    assert (seeds[0] / "metrics.csv").read_text() == before
    assert not (seeds[0] / "metrics.png").exists()


def bestiary(*args: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bestiary", "plot", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300, check=False)


def test_the_command_writes_into_the_current_directory(seeds, tmp_path):
    make(tmp_path / "ff", [(5, 0.0), (10, 0.0)], core=Ff())
    make(tmp_path / "ff-1", [(5, 1.0), (10, 1.0), (20, 1.0)], core=Ff(), seed=1)
    names = [run.name for run in seeds]
    more = ["--label", "first=lstm-0,lstm-1", "--label", "other=lstm-2", "--reference", "best=8", "--bins", 2]
    done = bestiary(*names, "ff", "ff-1", *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "written to plot.png, plot.svg, plot.csv\n"
    line = "env=recall, core=ff, algo=impala"
    assert done.stderr == f"note: the runs of {line!r} end between 10 and 20 frames; the line ends with the first\n"
    assert [(r["label"], r["frames"], r["mean"], r["seeds"]) for r in read_csv(tmp_path / "plot.csv")] == [
        ("first", "10", "2.5", "2"),
        ("first", "20", "4.5", "2"),
        ("other", "10", "4", "1"),
        ("other", "20", "4.5", "1"),
        (line, "5", "0.5", "2"),
        (line, "10", "0.5", "2"),
    ]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nowhere"], "nowhere is not a run"),
        ([], "name at least one run"),
        (["lstm-0", "--label", "lstm-0"], "--label 'lstm-0' should look like NAME=RUN,RUN"),
        (["lstm-0", "--reference", "best=high"], "'high' is not a number"),
        (["lstm-0", "--metrik", "score"], "did you mean --metric"),
    ],
)
def test_a_mistaken_command_leaves_nothing_behind(args, words, seeds, tmp_path):
    before = set(tmp_path.iterdir())
    done = bestiary(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert words in " ".join(re.sub(r"[─│╭╮╰╯]", " ", done.stderr).split())
    assert set(tmp_path.iterdir()) == before


def test_help_imports_neither_torch_nor_matplotlib():
    code = "import sys; from bestiary.cli.main import main; main(['--help']); "
    code += "print({'torch', 'matplotlib'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")
    assert "plot RUN" in done.stdout
