"""Checkpoints survive crashes, are verified when they are loaded, and cannot run code."""

import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.runs import rows, tiny

import bestiary
from bestiary.cli.main import main
from bestiary.presets import preset
from bestiary.training import checkpoint
from bestiary.training.checkpoint import BadCheckpoint
from bestiary.training.run import Run

WEIGHTS = {"a": torch.randn(3, 4), "b": torch.arange(5)}
TRAINER = {"x": [1, 2.5, "three", None, torch.ones(2)], "rng": torch.get_rng_state()}


def written(path: Path, frames: int = 7) -> Path:
    checkpoint.save(path, WEIGHTS, TRAINER, {"frames": frames})
    return path


def run_with(tmp_path: Path, *frames: int) -> Run:
    run = Run.create(tmp_path / "run", preset("recall"))
    for f in frames:
        written(run.path / "checkpoints" / f"{f:012d}", f)
    return run


def test_what_is_saved_comes_back(tmp_path):
    loaded = checkpoint.load(written(tmp_path / "c"))
    assert all(torch.equal(loaded.weights[k], v) for k, v in WEIGHTS.items())
    assert loaded.trainer["x"][:4] == [1, 2.5, "three", None]
    assert loaded.meta["frames"] == 7


def test_nothing_but_the_checkpoint_is_left_behind(tmp_path):
    written(tmp_path / "c")
    written(tmp_path / "c")
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("name", ["weights.safetensors", "trainer.pt"])
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_refused(name, keep, tmp_path):
    file = written(tmp_path / "c") / name
    file.write_bytes(file.read_bytes()[: int(keep * file.stat().st_size)])
    with pytest.raises(BadCheckpoint, match="damaged or truncated"):
        checkpoint.load(tmp_path / "c")


@pytest.mark.parametrize("name", ["weights.safetensors", "trainer.pt", "meta.json"])
def test_a_missing_file_is_refused_by_name(name, tmp_path):
    (written(tmp_path / "c") / name).unlink()
    with pytest.raises(BadCheckpoint, match=name):
        checkpoint.load(tmp_path / "c")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 99}', "\x00\xff"])
def test_a_foreign_meta_file_is_refused(text, tmp_path):
    (written(tmp_path / "c") / "meta.json").write_text(text)
    with pytest.raises(BadCheckpoint):
        checkpoint.load(tmp_path / "c")


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (os.mkdir, (str(self.target),))


@pytest.mark.parametrize("name", ["weights.safetensors", "trainer.pt"])
@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_pickle_that_would_run_code_does_not_run(name, how, tmp_path):
    path = written(tmp_path / "c")
    trap = tmp_path / "executed"
    if how == "torch":
        torch.save({"runtime": Evil(trap)}, path / name)
    else:
        (path / name).write_bytes(pickle.dumps(Evil(trap)))
    with pytest.raises(BadCheckpoint):
        checkpoint.load(path)
    # correct hashes make no difference
    meta = path / "meta.json"
    files = {n: checkpoint._digest(path / n) for n in ("weights.safetensors", "trainer.pt")}
    meta.write_text(json.dumps({"format": 1, "frames": 7, "files": files}))
    with pytest.raises(BadCheckpoint):
        checkpoint.load(path)
    assert not trap.exists()


def test_a_damaged_checkpoint_is_refused_and_the_last_good_one_named(tmp_path):
    run = run_with(tmp_path, 100, 200, 300)
    for frames in (200, 300):
        (run.path / "checkpoints" / f"{frames:012d}" / "weights.safetensors").write_bytes(b"junk")
    with pytest.raises(BadCheckpoint, match="--checkpoint 100"):
        run.load()
    assert run.load("100").meta["frames"] == 100


def test_a_missing_checkpoint_is_refused_with_a_list_of_the_others(tmp_path):
    run = run_with(tmp_path, 100, 200)
    with pytest.raises(BadCheckpoint, match="it has: 100, 200"):
        run.load("150")


def test_the_latest_checkpoints_are_kept_and_older_ones_deleted(tmp_path):
    run = run_with(tmp_path)
    for frames in (1, 2, 3, 10, 11):
        run.save(frames, WEIGHTS, TRAINER, keep=2)
    assert [int(p.name) for p in run.saved()] == [10, 11]


def best(run: Run) -> list[int]:
    return [int(p.name) for p in run.saved("best")]


def test_the_best_by_evaluation_are_kept_newer_ones_first(tmp_path):
    run = run_with(tmp_path)
    assert run.best_score() == -float("inf")
    kept = []
    for frames, score in {1: 5.0, 2: 1.0, 3: 4.0, 4: 0.5, 5: 4.0, 6: 7.0, 7: 4.0}.items():
        run.save_best(frames, score, WEIGHTS, keep=3)
        kept.append(best(run))
    assert kept == [[1], [1, 2], [1, 2, 3], [1, 2, 3], [1, 3, 5], [1, 5, 6], [1, 6, 7]]
    assert run.best_score() == 7.0
    assert run.find("best").name == f"{6:012d}"  # not the last saved
    run.save_best(8, 7.0, WEIGHTS, keep=3)
    assert run.load("best").meta["frames"] == 8
    run.save_best(9, -1.0, WEIGHTS, keep=1)
    assert best(run) == [8]


def test_a_score_that_is_not_a_number_is_never_the_best(tmp_path):
    run = run_with(tmp_path)
    run.save_best(1, float("nan"), WEIGHTS, keep=2)
    assert best(run) == []


def test_the_same_frames_again_keep_the_better_score(tmp_path):
    """A run that is resumed from an earlier checkpoint passes the same frames again."""
    run = run_with(tmp_path)
    for score in (3.0, 2.0):
        run.save_best(1, score, WEIGHTS, keep=2)
        assert run.best_score() == 3.0
    run.save_best(1, 4.0, WEIGHTS, keep=2)
    assert (best(run), run.best_score()) == ([1], 4.0)


def test_a_damaged_best_checkpoint_is_skipped(tmp_path):
    run = run_with(tmp_path)
    for frames, score in ((1, 1.0), (2, 2.0)):
        run.save_best(frames, score, WEIGHTS, keep=2)
    (run.path / "best" / f"{2:012d}" / "meta.json").write_text("{")
    assert run.load("best").meta["frames"] == 1
    run.save_best(3, 0.0, WEIGHTS, keep=2)
    assert best(run) == [1, 3]


def test_an_interrupted_write_leaves_the_previous_checkpoint_intact(tmp_path, monkeypatch):
    run = run_with(tmp_path, 100)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "_sync", killed)
    with pytest.raises(KeyboardInterrupt):
        run.save(200, WEIGHTS, TRAINER, keep=1)
    monkeypatch.undo()
    assert run.load().meta["frames"] == 100
    run.save(200, WEIGHTS, TRAINER, keep=1)
    assert [p.name for p in (run.path / "checkpoints").iterdir()] == [f"{200:012d}"]


def test_a_full_disk_is_one_sentence_and_keeps_the_last_checkpoint(tmp_path):
    """The file size limit of a child process stands for a full disk."""
    run = run_with(tmp_path, 100)
    code = f"""
import resource, signal, torch
from bestiary.training.run import Run
from bestiary.errors import UserError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
try:
    Run({str(run.path)!r}).save(200, {{"w": torch.zeros(100_000)}}, {{}}, keep=1)
except UserError as e:
    print("refused:", e)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("refused: could not write checkpoint")
    assert len(done.stdout.strip().splitlines()) == 1
    assert run.load().meta["frames"] == 100
    assert [p.name for p in (run.path / "checkpoints").iterdir()] == [f"{100:012d}"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 10_000


def test_a_directory_that_is_not_a_run_is_not_written_into(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("chapter 1")
    with pytest.raises(ValueError, match="not empty and not a run"):
        Run.create(tmp_path / "mine", preset("recall"))


def test_a_run_is_named_by_its_own_directory_when_found_through_a_link(tmp_path):
    experiment = tiny(frames=500)
    bestiary.train(experiment, tmp_path / "one")
    assert Run(tmp_path / "latest").path == tmp_path / "one"
    assert main(["resume", str(tmp_path / "latest"), "--frames", "800", "--plain"]) == 0
    assert (tmp_path / "latest").resolve() == (tmp_path / "one").resolve()
    assert int(rows(Run(tmp_path / "one"))[-1]["frames"]) >= 800


def test_runs_latest_follows_the_newest_run_but_replaces_only_links(tmp_path):
    Run.create(tmp_path / "one", preset("recall"))
    Run.create(tmp_path / "two", preset("recall"))
    assert (tmp_path / "latest").resolve().name == "two"
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    Run.create(tmp_path / "three", preset("recall"))
    assert not (tmp_path / "latest").is_symlink()
    shutil.rmtree(tmp_path / "latest")
