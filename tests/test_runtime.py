"""The local and overlapped runtimes: reproducible, resumable, bounded in memory, and errors are raised."""

import csv
import gc
import json
import resource
import shutil
import threading
import time
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from helpers.runs import interrupted, rows, same, tiny, weights
from helpers.settings import configure

import bestiary
from bestiary.algos import Dqn
from bestiary.config.experiment import Checkpoints, Evaluation, Experiment, Logs, family
from bestiary.cores import DeltaNet, Gpt, Lstm
from bestiary.envs import Atari, Catch, Gym, Recall, TMaze
from bestiary.nets import Net, Shallow
from bestiary.presets import preset
from bestiary.runtime import Local, Overlap, evaluation
from bestiary.runtime.start import start
from bestiary.training import checkpoint
from bestiary.training.display import NullDisplay, PlainDisplay
from bestiary.training.run import Run
from bestiary.training.session import Session
from bestiary.types import Episode

TINY_ATARI = Experiment(
    env=Atari(game="Breakout"),
    algo=configure(preset("pong").algo, unroll=5, batch_size=2),
    core=Lstm(hidden=16),
    net=Net(encoder=Shallow(hidden_size=16), frame_stack=4),
    runtime=Local(envs=3, threads=1),
    frames=4_000,
)


EXACT = {
    "recall": tiny(),
    "catch": tiny(Catch(), net=Net()),
    "cartpole": tiny(Gym("CartPole-v1"), net=Net()),
    "tmaze": tiny(TMaze(length=4, active=True)),
    "atari": replace(TINY_ATARI, evaluation=Evaluation(episodes=0), log=Logs(every=200, tensorboard=False)),
}


@pytest.mark.parametrize("name", EXACT)
def test_the_same_seed_gives_the_same_bits(name, tmp_path):
    first, second = (bestiary.train(EXACT[name], tmp_path / str(i)) for i in range(2))
    assert same(weights(first), weights(second))
    assert rows(first) == rows(second)
    assert rows(first, "episodes.csv") == rows(second, "episodes.csv")
    other = bestiary.train(replace(EXACT[name], seed=1), tmp_path / "other")
    assert not same(weights(first), weights(other))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("at", [900, 1700])
def test_half_a_run_resumed_equals_the_whole_run_bit_for_bit(name, at, tmp_path):
    whole = bestiary.train(EXACT[name], tmp_path / "whole")
    parts = interrupted(EXACT[name], tmp_path / "parts", at)
    assert same(weights(whole), weights(parts))
    assert rows(whole) == rows(parts)
    assert rows(whole, "episodes.csv") == rows(parts, "episodes.csv")


def test_every_core_survives_a_resume_exactly(tmp_path):
    for name, cls in family("core").items():
        experiment = tiny(core=cls(hidden=8) if hasattr(cls, "hidden") else cls(), frames=1_000)
        whole = bestiary.train(experiment, tmp_path / name / "whole")
        assert same(weights(whole), weights(interrupted(experiment, tmp_path / name / "parts", 400)))


def test_dropout_resumes_exactly_and_is_independent_of_evaluations(tmp_path):
    small = DeltaNet(width=8, heads=2, layers=1, feedforward=8, dropout=0.3)
    experiment = tiny(core=small, frames=1_500)
    whole = bestiary.train(experiment, tmp_path / "whole")
    assert same(weights(whole), weights(interrupted(experiment, tmp_path / "parts", 600)))
    often = replace(experiment, evaluation=Evaluation(every=300, episodes=4))
    assert same(weights(whole), weights(bestiary.train(often, tmp_path / "often")))
    without = bestiary.train(replace(experiment, core=replace(small, dropout=0.0)), tmp_path / "without")
    assert not same(weights(whole), weights(without))


def test_a_gpt_learns_from_the_core_state_of_its_actor(tmp_path):
    """Acting writes into the core state in place, but a trajectory must keep the state from which it started."""
    small = Gpt(width=8, heads=2, layers=1, feedforward=8, window=3)
    runtime = start(tiny(core=small))
    agent, rhos = runtime.learner.agent, []
    for _ in range(5):
        trajectory, _ = runtime.actor.unroll()
        with torch.no_grad():
            logits, _, _ = agent(trajectory.step, trajectory.state)
        rhos.append((logits - trajectory.aux["logits"]).abs().max())
    runtime.close()
    assert max(rhos) < 1e-5


def test_a_run_resumes_with_another_number_of_environments(tmp_path):
    interrupted(tiny(), tmp_path / "run", 900)
    wider = tiny(frames=4_000, runtime=Local(envs=8, threads=1))
    run = bestiary.train(wider, tmp_path / "run")
    assert int(rows(run)[-1]["frames"]) >= 3_800


def test_leaving_the_loop_saves_a_checkpoint(tmp_path):
    for progress in bestiary.iterate(tiny(), tmp_path / "run"):
        if progress.frames > 500:
            break
    assert Run(tmp_path / "run").load().meta["frames"] == progress.frames


def test_metrics_have_fixed_columns_and_increasing_frames(tmp_path):
    run = interrupted(tiny(), tmp_path / "run", 1_000)
    frames = [int(r["frames"]) for r in rows(run)]
    assert frames == sorted(set(frames))
    with (run.path / "metrics.csv").open() as file:
        widths = {len(line.split(",")) for line in file}
    assert len(widths) == 1


def test_success_is_written_if_the_environment_defines_it(tmp_path):
    often = Evaluation(every=1_000, episodes=4)
    both = (TMaze(2), Recall(3))
    maze, recall = (bestiary.train(tiny(e, evaluation=often), tmp_path / type(e).__name__) for e in both)
    episodes = rows(maze, "episodes.csv")
    assert {r["success"] for r in episodes} == {"0", "1"}
    assert all((r["success"] == "1") == (r["life_returns"] in ("1", "0.5")) for r in episodes)
    metrics = rows(maze)
    assert all(0 <= float(r["success"]) <= 1 for r in metrics)
    assert any(0 < float(r["success"]) < 1 for r in metrics)
    assert all(0 <= float(r["success"]) <= 1 for r in rows(maze, "evaluations.csv"))
    for name in ("episodes.csv", "metrics.csv", "evaluations.csv"):
        assert {r["success"] for r in rows(recall, name)} == {""}


def test_a_run_without_the_column_success_resumes_with_its_columns(tmp_path):
    run = bestiary.train(tiny(TMaze(2), frames=1_500), tmp_path / "run")
    for name in ("episodes.csv", "metrics.csv"):
        old = rows(run, name, without=("success",))
        with (run.path / name).open("w") as file:
            writer = csv.DictWriter(file, old[0])
            writer.writeheader()
            writer.writerows(old)
    longer = bestiary.train(tiny(TMaze(2)), run.path)
    for name in ("episodes.csv", "metrics.csv"):
        continued = rows(longer, name)
        assert int(continued[-1]["frames"]) > 2_000
        assert "success" not in continued[-1]
        assert None not in continued[-1]  # no value without a column


def test_tensorboard_shows_one_continuous_curve_across_resumes(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # names of files of the same second end in a counter, and files are read by name: 10 would come before 9
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    experiment = tiny(log=Logs(every=200))
    experiment = replace(experiment, checkpoint=Checkpoints(frames=500))
    run = interrupted(experiment, tmp_path / "run", 1_000)
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    steps = [e.step for e in events.Scalars("train/loss")]
    assert steps == sorted(set(steps)) == [int(r["frames"]) for r in rows(run)]


def test_milestones_are_kept_and_never_overwritten(tmp_path):
    experiment = tiny(checkpoint=Checkpoints(milestones=(500, 1_500), keep=1))
    run = interrupted(experiment, tmp_path / "run", 1_000)
    assert [int(p.name) for p in run.saved("milestones")] == [500, 1_500]
    saved_meta = (run.path / "milestones" / f"{500:012d}" / "meta.json").read_text()
    bestiary.train(replace(experiment, frames=4_000), run.path)
    assert (run.path / "milestones" / f"{500:012d}" / "meta.json").read_text() == saved_meta
    assert len(run.saved()) == 1


def test_the_best_checkpoint_is_chosen_by_evaluation(tmp_path):
    experiment = tiny(evaluation=Evaluation(every=500, episodes=12))
    run = bestiary.train(experiment, tmp_path / "run")
    scores = [float(r["score"]) for r in rows(run, "evaluations.csv")]
    assert len(scores) >= 5
    assert run.best_score() == pytest.approx(max(scores))
    newest_first = rows(run, "evaluations.csv")[::-1]
    assert run.load("best").meta["frames"] == int(newest_first[int(np.argmax(scores[::-1]))]["frames"])


def test_several_of_the_best_checkpoints_are_kept(tmp_path):
    experiment = tiny(evaluation=Evaluation(every=300, episodes=12), checkpoint=Checkpoints(best=3))
    run = bestiary.train(experiment, tmp_path / "run")
    scored = [(float(r["score"]), int(r["frames"])) for r in rows(run, "evaluations.csv")]
    assert len(scored) > 5
    assert [int(p.name) for p in run.saved("best")] == sorted(frames for _, frames in sorted(scored)[-3:])
    assert run.load("best").meta["frames"] == max(scored)[1]
    with pytest.raises(ValueError, match=r"checkpoint.best=0 must be at least 1"):
        Checkpoints(best=0)


@pytest.mark.parametrize("background", [False, True])
def test_evaluation_does_not_change_training(background, tmp_path):
    dropout = DeltaNet(width=8, heads=2, layers=1, feedforward=8, dropout=0.3)
    for core in (Lstm(hidden=8), dropout):  # dropout samples random numbers while it learns
        experiment = tiny(core=core, frames=1_500)
        plain = bestiary.train(experiment, tmp_path / f"{core} plain")
        often = Evaluation(every=300, episodes=5, mode="sampled", epsilon=0.3, background=background)
        evaluated = bestiary.train(replace(experiment, evaluation=often), tmp_path / f"{core} evaluated")
        assert len(rows(evaluated, "evaluations.csv")) > 1
        assert same(weights(plain), weights(evaluated))
        assert rows(plain) == rows(evaluated)


def test_evaluations_use_the_mode_of_their_settings(tmp_path, monkeypatch):
    modes = []
    play_episodes = evaluation.play_episodes
    monkeypatch.setattr(
        evaluation, "play_episodes", lambda *args, **kw: (modes.append(args[3]), play_episodes(*args, **kw))[1]
    )
    for mode in ("greedy", "sampled"):
        bestiary.train(tiny(frames=100, evaluation=Evaluation(episodes=2, mode=mode)), tmp_path / mode)
    assert modes == ["greedy", "sampled"]


# -- background evaluation ---------------------------------------------------------------------------------------


BACKGROUND = tiny(evaluation=Evaluation(every=500, episodes=12, background=True), checkpoint=Checkpoints(best=9))


class Notes(NullDisplay):
    """Records notes, and the frames and calling thread of every evaluation."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.evaluations: list[tuple[int, str]] = []

    def activity(self, text):
        self.notes.append(text)

    def evaluation(self, frames, episodes):
        self.evaluations.append((frames, threading.current_thread().name))


def evaluating() -> bool:
    return any(t.name == "evaluation" for t in threading.enumerate())


def evaluate_slowly(monkeypatch, until) -> None:
    """Background evaluations last until a condition holds, or until they are cancelled."""
    play_episodes = evaluation.play_episodes

    def play(*args, stop, **options):
        if threading.current_thread().name == "evaluation":
            assert wait_for(lambda: until() or stop())
        return play_episodes(*args, stop=stop, **options)

    monkeypatch.setattr(evaluation, "play_episodes", play)


def wait_for(condition, seconds=60) -> bool:
    for _ in range(500 * seconds):
        if condition():
            return True
        time.sleep(0.002)
    return False


def test_a_background_evaluation_uses_the_weights_at_its_start(tmp_path, monkeypatch):
    foreground = replace(BACKGROUND, evaluation=replace(BACKGROUND.evaluation, background=False))
    expected = bestiary.train(foreground, tmp_path / "expected")
    go = threading.Semaphore(0)
    evaluate_slowly(monkeypatch, lambda: go.acquire(blocking=False) or session.runtime.frames >= BACKGROUND.frames)
    session = Session(BACKGROUND, tmp_path / "background", display := Notes())
    for progress in session:
        if session.background is not None and progress.frames >= session.background.frames + 200:
            go.release()
            assert wait_for(lambda: not session.background.running)
    assert rows(session.run, "evaluations.csv") == rows(expected, "evaluations.csv")
    assert len(display.evaluations) > 4
    assert {name for _, name in display.evaluations} == {threading.current_thread().name}
    kept = [[checkpoint.load(path) for path in run.saved("best")] for run in (session.run, expected)]
    assert len(kept[0]) > 4
    assert all(same(a.weights, b.weights) and a.meta["score"] == b.meta["score"] for a, b in zip(*kept, strict=True))
    assert not evaluating()


def test_an_evaluation_due_while_another_runs_is_skipped(tmp_path, monkeypatch):
    ended = False
    evaluate_slowly(monkeypatch, lambda: ended)
    session = Session(BACKGROUND, tmp_path / "run", display := Notes())
    for progress in session:
        ended = progress.frames >= BACKGROUND.frames
    frames = [int(r["frames"]) for r in rows(session.run, "evaluations.csv")]
    assert frames == [frames[0], session.runtime.frames] == [f for f, _ in display.evaluations]
    assert 500 <= frames[0] < 600
    skipped = [text for text in display.notes if "skipped" in text]
    assert len(skipped) >= 4
    assert skipped[0].endswith(f"skipped: the one at {frames[0]} is still running")
    assert session.finished


def test_stopping_cancels_a_background_evaluation_and_resuming_repeats_it(tmp_path, monkeypatch):
    evaluate_slowly(monkeypatch, lambda: False)
    session = Session(BACKGROUND, tmp_path / "run", NullDisplay(), lambda: session.runtime.frames > 900)
    for _ in session:
        started = session.background is not None
    assert started and not evaluating() and not session.finished
    assert rows(session.run, "evaluations.csv") == []
    monkeypatch.undo()
    frames = [int(r["frames"]) for r in rows(bestiary.train(BACKGROUND, tmp_path / "run"), "evaluations.csv")]
    assert 900 < frames[0] < 1_000


def test_stopping_while_the_end_waits_for_an_evaluation_does_not_hang(tmp_path, monkeypatch):
    evaluate_slowly(monkeypatch, lambda: False)
    calls = 0

    def stop():
        nonlocal calls
        calls += session.runtime.frames >= BACKGROUND.frames
        return calls > 5

    session = Session(BACKGROUND, tmp_path / "run", NullDisplay(), stop)
    for _ in session:
        pass
    assert not evaluating() and not session.finished
    assert rows(session.run, "evaluations.csv") == []


def test_leaving_the_loop_keeps_an_evaluation_that_has_finished(tmp_path):
    session = Session(BACKGROUND, tmp_path / "run", NullDisplay())
    for _ in session:
        if session.background is not None:
            assert wait_for(lambda: not session.background.running)
            break
    gc.collect()
    assert [int(r["frames"]) for r in rows(session.run, "evaluations.csv")] == [session.runtime.frames]
    assert session.run.load().meta["frames"] == session.runtime.frames == session.run.load("best").meta["frames"]


@pytest.mark.parametrize(
    ("runtime", "whole"),
    [(Local(envs=2, threads=1), True), (Local(envs=2, threads=1), False), (Overlap(envs=2, threads=1), False)],
)
def test_an_error_in_training_keeps_an_evaluation_only_if_it_has_finished(runtime, whole, tmp_path, monkeypatch):
    def play(*_, stop, **__):
        return [Episode(0, 1.0, 1, 1, (1.0,), False)] * 3 if whole or not wait_for(stop) else []

    monkeypatch.setattr(evaluation, "play_episodes", play)
    plan = Evaluation(every=190 if whole else 100, episodes=3, background=True)  # starts shortly before training fails
    experiment = tiny(Gym("test/Failing-v0"), net=Net(), runtime=runtime, evaluation=plan)
    with pytest.raises(ZeroDivisionError, match="own error"):
        bestiary.train(experiment, tmp_path / "run")
    assert not evaluating()
    run = Run(tmp_path / "run")
    assert run.load().meta["frames"] > 100
    assert len(rows(run, "evaluations.csv")) == whole


def test_an_error_in_a_background_evaluation_is_raised_by_training(tmp_path, monkeypatch):
    def faulty_episodes(*_, **__):
        raise ZeroDivisionError("the episodes' own error")

    monkeypatch.setattr(evaluation, "play_episodes", faulty_episodes)
    with pytest.raises(ZeroDivisionError, match="own error") as error:
        bestiary.train(BACKGROUND, tmp_path / "run")
    assert "faulty_episodes" in [entry.name for entry in error.traceback]
    assert 500 <= Run(tmp_path / "run").load().meta["frames"] < BACKGROUND.frames
    assert not evaluating()


def test_building_an_evaluations_network_leaves_training_unchanged(monkeypatch):
    """It is built in the training thread: another thread would interleave its random numbers with training's."""
    builders = []
    build_agent = evaluation.build_agent
    monkeypatch.setattr(
        evaluation, "build_agent", lambda *args: builders.append(threading.current_thread()) or build_agent(*args)
    )
    runtime = start(BACKGROUND)
    before = torch.get_rng_state()
    running = evaluation.ThreadedEvaluation(BACKGROUND, 0, runtime.weights(), runtime.device)
    running.finish(lambda: False)
    runtime.close()
    assert len(running.episodes()) == 12
    assert builders == [threading.current_thread()]
    assert torch.get_rng_state().equal(before)


def test_background_evaluation_keeps_the_number_of_training_threads():
    runtime = start(BACKGROUND)
    threads = []

    def training():  # a new thread, in which PyTorch's number of threads has not been read before
        torch.set_num_threads(2)
        evaluation.ThreadedEvaluation(BACKGROUND, 0, runtime.weights(), runtime.device).finish()
        threads.append(torch.get_num_threads())

    thread = threading.Thread(target=training)
    thread.start()
    thread.join()
    runtime.close()
    assert threads == [2]


def test_acting_learning_and_evaluating_can_all_run_in_parallel(tmp_path):
    experiment = replace(BACKGROUND, runtime=Overlap(envs=6, threads=1))
    run = bestiary.train(experiment, tmp_path / "run")
    frames = [int(r["frames"]) for r in rows(run, "evaluations.csv")]
    assert len(frames) > 1
    assert frames == sorted(set(frames))


def test_a_run_directory_holds_settings_versions_and_logs(tmp_path):
    run = bestiary.train(tiny(log=Logs(every=500)), tmp_path / "a" / "run")
    names = {p.name for p in run.path.iterdir()}
    assert {"experiment.json", "versions.json", "metrics.csv", "episodes.csv", "checkpoints", "tensorboard"} <= names
    assert (tmp_path / "a" / "latest").resolve() == run.path.resolve()
    assert Run(run.path).experiment() == tiny(log=Logs(every=500))
    assert json.loads((run.path / "versions.json").read_text())["torch"]


def test_overlapped_acting_and_learning_have_a_bounded_policy_lag(tmp_path):
    experiment = tiny(runtime=Overlap(envs=6, threads=1), frames=6_000)
    run = bestiary.train(experiment, tmp_path / "run")
    lags = [float(r["policy_lag"]) for r in rows(run)]
    # one unroll under way and one waiting; each causes at most two updates here
    assert max(lags) <= 6
    assert max(lags) > 0
    assert not any(t.name == "actor" for t in threading.enumerate())
    longer = bestiary.train(replace(experiment, frames=9_000), run.path)
    assert int(rows(longer)[-1]["frames"]) >= 8_000


class FailingEnv(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, steps_left: int = 100) -> None:
        self.steps_left = steps_left

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps_left -= 1
        if self.steps_left == 0:
            raise ZeroDivisionError("the environment's own error")
        return np.zeros(2, np.float32), 1.0, False, False, {}


gymnasium.register("test/Failing-v0", FailingEnv)


@pytest.mark.parametrize("runtime", [Local(envs=2, threads=1), Overlap(envs=2, threads=1)])
def test_an_error_in_the_environment_ends_the_run_after_saving(runtime, tmp_path):
    experiment = tiny(Gym("test/Failing-v0"), net=Net(), runtime=runtime)
    with pytest.raises(ZeroDivisionError, match="own error"):
        bestiary.train(experiment, tmp_path / "run")
    saved = Run(tmp_path / "run").load()
    assert 0 < saved.meta["frames"] <= 200
    assert saved.trainer["runtime"]["learner"]["updates"] > 0


def test_a_loss_of_nan_stops_the_run_saves_and_names_the_update(tmp_path):
    experiment = tiny()
    session = Session(experiment, tmp_path / "run", NullDisplay())
    with pytest.raises(ValueError, match=r"update \d+ gave a loss of nan"):
        for progress in session:
            if progress.updates > 5:
                with torch.no_grad():
                    session.runtime.learner.agent.policy.weight.fill_(float("nan"))
    saved = Run(tmp_path / "run").load()
    assert saved.trainer["runtime"]["learner"]["updates"] > 5


def test_a_missing_extra_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'pip install "bestiary\[wandb\]"'):
        bestiary.train(tiny(log=Logs(wandb=True)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_memory_stays_flat_over_thousands_of_updates(tmp_path):
    experiment = tiny(frames=100_000, log=Logs(every=50_000, tensorboard=False))
    sizes = []
    for progress in bestiary.iterate(experiment, tmp_path / "run"):
        if progress.updates % 500 < 2:
            gc.collect()
            sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # KiB, the peak so far
    assert progress.updates > 3_000
    early, late = sizes[len(sizes) // 4], sizes[-1]
    assert late - early < 8 * 2**10


OFF_POLICY = {"unroll": 5, "batch_size": 4, "warmup": 50, "updates_per_step": 0.02, "head": (8,)}


@pytest.mark.parametrize("algo", ["impala", "dqn", "sac-discrete"])
@pytest.mark.parametrize("runtime", [Local(envs=6, threads=1), Overlap(envs=6, threads=1)])
def test_a_run_can_start_from_the_weights_of_another(algo, runtime, tmp_path):
    chosen = tiny().algo if algo == "impala" else configure(family("algo")[algo], **OFF_POLICY)
    first = bestiary.train(tiny(TMaze(length=3), algo=chosen, frames=1_000), tmp_path / "first")
    second = tiny(TMaze(length=6), algo=chosen, runtime=runtime, init=str(first.path), seed=5)
    session = Session(second, tmp_path / "second", NullDisplay())
    learner = session.runtime.learner
    assert same(session.runtime.weights(), weights(first))
    assert learner.updates == 0 and not learner.optimizer.state  # its own schedules
    before = first.load().trainer["runtime"]["learner"]
    for name in ("target", "critics"):  # networks that are not part of the agent
        if name in before:
            assert same(learner.state_dict()[name], before[name])
    for _ in session:
        break
    shutil.rmtree(first.path)  # only the start needs it
    assert bestiary.train(second, tmp_path / "second").load().meta["frames"] >= second.frames


def test_initial_weights_that_do_not_fit_are_refused_before_writing(tmp_path):
    first = bestiary.train(tiny(frames=1_000), tmp_path / "first")
    for match, wrong in {
        "trained by impala: name a run that was trained by dqn": tiny(
            init=str(first.path), algo=configure(Dqn, **OFF_POLICY)
        ),
        "another network than this experiment's": tiny(init=str(first.path), core=Lstm(hidden=9)),
        "experiment.json": tiny(init=str(tmp_path / "nowhere")),
    }.items():
        with pytest.raises(ValueError, match=match):
            bestiary.train(wrong, tmp_path / "second")
        assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("kept", [None, True, False])
def test_the_replay_is_saved_on_request_or_if_it_is_small(kept, tmp_path, capsys):
    algo = configure(Dqn, **OFF_POLICY)
    often = Checkpoints(frames=500, keep=3, replay=kept)
    run = bestiary.train(tiny(algo=algo, checkpoint=often, frames=2_000), tmp_path / "run")
    files = [(path / "replay.pt").exists() for path in run.saved()]
    assert files == [False, False, kept is not False]
    longer = Session(tiny(algo=algo, checkpoint=often, frames=3_000), run.path, PlainDisplay())
    replay: Any = longer.runtime.replay
    output = capsys.readouterr().out
    if kept is False:
        assert "the replay was not saved" in output
        assert replay.rate_limiter.steps == 0
    else:
        assert "the replay was not saved" not in output
        assert replay.rate_limiter.steps > 1_000
    for _ in longer:
        pass
    assert longer.finished


def test_a_damaged_replay_is_refused(tmp_path):
    run = bestiary.train(tiny(algo=configure(Dqn, **OFF_POLICY), frames=1_000), tmp_path / "run")
    file = run.saved()[-1] / "replay.pt"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match="damaged or truncated"):
        bestiary.train(tiny(algo=configure(Dqn, **OFF_POLICY), frames=2_000), run.path)
    assert bestiary.evaluate(run, 4, threads=1)["greedy"]["score"]["n"] == 4  # needs no replay


def test_a_large_replay_is_saved_only_on_request(tmp_path, monkeypatch):
    monkeypatch.setattr("bestiary.training.session.SMALL_BYTES", 1_000)
    run = bestiary.train(tiny(algo=configure(Dqn, **OFF_POLICY), frames=1_000), tmp_path / "run")
    assert not (run.saved()[-1] / "replay.pt").exists()
