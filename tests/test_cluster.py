"""The Ray runtime with real processes, some of which are killed or stopped while an experiment trains."""

import csv
import ipaddress
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ray_nodes import Nodes, descendants, kill_session, processes
from helpers.settings import configure

import bestiary
from bestiary.algos import Impala
from bestiary.config.experiment import Experiment
from bestiary.config.extras import available
from bestiary.errors import ProcessLost, UserError
from bestiary.runtime import Local, Ray
from bestiary.types import Progress

pytestmark = [
    pytest.mark.skipif(not available("ray"), reason="needs the extra ray"),
    pytest.mark.xdist_group("cluster"),
    pytest.mark.timeout(180),
]
TIMES = {"seconds", "frames_per_second", "updates_per_second"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path_factory.mktemp("nodes"), cpus=4)
    before = {k: os.environ.get(k) for k in ("RAY_AUTH_MODE",)}
    os.environ |= {k: nodes.env[k] for k in before}
    yield nodes
    nodes.close()
    for k, value in before.items():
        os.environ.pop(k, None) if value is None else os.environ.__setitem__(k, value)


def tiny(name: str, frames: int, **runtime: Any) -> Experiment:
    """A small version of a preset."""
    e = bestiary.preset(name)
    small = {"batch_size": 8} if isinstance(e.algo, Impala) else {}
    return replace(
        e,
        frames=frames,
        algo=configure(e.algo, **small),
        runtime=Ray(**{"envs": 8, "threads": 1, "timeout": 60.0, **runtime}),
        log=replace(e.log, every=min(2_000, max(1, frames // 10)), tensorboard=False),
        evaluation=replace(e.evaluation, every=None, episodes=0, command=()),
    )


def table(run: Path, name: str) -> list[dict[str, str]]:
    with (run / name).open() as file:
        return list(csv.DictReader(file))


def assert_tables_equal(a: Path, b: Path, name: str) -> None:
    """Two tables are equal in all columns that both have, except those that depend on the clock."""
    first, second = table(a, name), table(b, name)
    assert len(first) == len(second) > 0
    for x, y in zip(first, second, strict=True):
        common = (x.keys() & y.keys()) - TIMES
        assert {k: x[k] for k in common} == {k: y[k] for k in common}


# -- equality with the local runtime ------------------------------------------------------------------------


@pytest.mark.parametrize("name, frames", [("recall", 3_000), ("tmaze-r2d2", 3_000), ("rcp-a", 6_000)])
def test_one_actor_in_lockstep_equals_the_local_runtime(name, frames, cluster, tmp_path):
    e = tiny(name, frames, lockstep=True, address=cluster.address)
    e = replace(e, evaluation=replace(e.evaluation, episodes=2))
    if name == "rcp-a":
        e = replace(e, env=bestiary.preset("cartpole").env, algo=configure(e.algo, warmup=5))
    if name == "tmaze-r2d2":
        e = replace(e, algo=configure(e.algo, warmup=1_500))
    bestiary.train(e, tmp_path / "ray")
    bestiary.train(replace(e, runtime=Local(envs=8, threads=1)), tmp_path / "local")
    for file in ("metrics.csv", "episodes.csv", "evaluations.csv"):
        assert_tables_equal(tmp_path / "local", tmp_path / "ray", file)
    local, ray = (bestiary.Run(tmp_path / runtime).load().weights for runtime in ("local", "ray"))
    assert all(torch.equal(local[k], ray[k]) for k in local)


def test_a_shard_of_two_actors_samples_the_same_as_one_replay():
    """That replay receives both actors' trajectories, joined along their streams."""
    from bestiary.replay.fifo import concatenate_streams
    from bestiary.runtime.ray.wire import WeightsCodec, unpack
    from bestiary.runtime.ray.workers import ActorWorker, ReplayShard, WorkerSpec

    e = tiny("tmaze", 1_000, actors=2)
    worker_spec = WorkerSpec(e.to_json(), ())
    actors = [ActorWorker(worker_spec, number, 0, 0, {}) for number in range(2)]
    spec = actors[0].env_batch.spec
    state = actors[0].actor.agent.state_dict()
    weights = WeightsCodec(state).encode(state)
    shard = ReplayShard(worker_spec, spec, 0)
    replay = e.algo.replay_builder(16).build(e.seed, spec, ())
    for actor in range(2):
        shard.join(actor)
    sampled = 0
    for _ in range(60):
        packed = [actor.rollout(0, weights)[1] for actor in actors]
        for number in (1, 0):  # in any order
            shard.add(number, packed[number])
        replay.add(concatenate_streams([unpack(t) for t in packed]))
        while (expected := replay.sample()) is not None:
            batch = shard.sample().batch
            assert batch is not None
            for a, b in zip(leaves(expected), leaves(batch), strict=True):
                np.testing.assert_array_equal(a.numpy(), b)
            sampled += 1
        assert shard.sample().batch is None
    assert sampled > 0


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [x for k in sorted(tree) for x in leaves(tree[k])]
    if isinstance(tree, tuple | list):
        return [x for part in tree for x in leaves(part)]
    return [] if tree is None else [tree]


def test_a_run_continues_locally_and_with_more_actors_and_shards(cluster, tmp_path):
    run = tmp_path / "run"
    bestiary.train(tiny("recall", 2_000, actors=1, address=cluster.address), run)
    local = replace(tiny("recall", 4_000), runtime=Local(envs=8, threads=1))
    bestiary.train(local, run)
    bestiary.train(tiny("recall", 6_000, actors=2, shards=2, address=cluster.address), run)
    frames = [int(row["frames"]) for row in table(run, "metrics.csv")]
    assert frames == sorted(frames)
    assert frames[-1] >= 5_400
    updates = [int(row["updates"]) for row in table(run, "metrics.csv")]
    assert updates == sorted(updates)


@pytest.mark.parametrize("name", ["tmaze", "tmaze-r2d2", "rcp-a"])  # most other tests use the FIFO queue
def test_every_kind_of_replay_learns_with_several_actors_and_shards(name, cluster, tmp_path):
    e = tiny(name, 2_000)
    if name == "rcp-a":
        e = replace(e, env=bestiary.preset("cartpole").env, algo=configure(e.algo, warmup=5))
    if name == "tmaze-r2d2":
        e = replace(e, algo=configure(e.algo, warmup=1_200, capacity=8_000))
    runtime = Ray(envs=8, threads=1, actors=2, shards=2, address=cluster.address)
    seconds: list[float] = []
    lag = 0.0
    for progress in bestiary.iterate(replace(e, runtime=runtime, frames=10_000_000), tmp_path / "run"):
        lag = progress.metrics.get("policy_lag", lag)
        seconds += [progress.metrics["unroll_seconds"]] if "unroll_seconds" in progress.metrics else []
        if progress.updates and progress.frames > 6_000 and progress.metrics.get("actors") == 2:
            break
    assert len(seconds) > 0 and min(seconds) > 0
    if name == "rcp-a":  # at first it only uses the episodes of the warm-up, until its critic has evaluated others
        assert 0 < lag <= progress.updates
    else:  # actors receive new weights: with the initial ones the lag would almost equal the number of updates
        assert 0 < lag < 0.7 * progress.updates


@pytest.mark.parametrize("shards", [1, 2])
def test_two_learners_sample_a_batch_each_and_make_joint_updates(shards, cluster, tmp_path):
    e = tiny("recall", 3_000, actors=shards, learners=2, shards=shards, actor_cpus=0.5, learner_cpus=0.5)
    e = replace(e, runtime=replace(e.runtime, address=cluster.address), algo=configure(e.algo, batch_size=4))
    bestiary.train(e, tmp_path / "run")
    last = table(tmp_path / "run", "metrics.csv")[-1]
    collected, learned = int(last["steps"]), int(last["updates"]) * 2 * 4 * e.algo.unroll
    assert 0.7 * collected < learned <= collected  # an update takes a batch of each; a trajectory is used once


# -- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"actors": 0}, r"runtime\.actors=0 must be at least 1"),
        ({"shards": 2}, r"runtime\.shards=2 must be at most runtime\.actors=1"),
        ({"actors": 2, "min_actors": 3}, r"runtime\.min-actors=3 must lie between 1 and runtime\.actors=2"),
        ({"min_batch": 9, "max_batch": 8}, r"runtime\.max-batch=8 must be at least runtime\.min-batch=9"),
        (
            {"lockstep": True, "inference": "shared"},
            r"runtime\.lockstep needs runtime\.inference=actor",
        ),
        ({"timeout": 0}, r"runtime\.timeout must be positive"),
    ],
)
def test_invalid_settings_are_refused_in_one_sentence(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        Ray(**settings)


def test_an_address_that_does_not_answer_is_refused_soon(tmp_path):
    e = tiny("recall", 1_000, address="127.0.0.1:1")
    started = time.monotonic()
    with pytest.raises(UserError, match=r"no Ray cluster answers at 127\.0\.0\.1:1"):
        bestiary.train(e, tmp_path / "run")
    assert time.monotonic() - started < 30
    assert not (tmp_path / "run").exists()


def test_an_address_is_a_host_and_a_port(tmp_path):
    with pytest.raises(UserError, match=r"runtime\.address='nowhere' should be HOST:PORT"):
        bestiary.train(tiny("recall", 1_000, address="nowhere"), tmp_path / "run")


@pytest.mark.parametrize(
    "settings, sentence",
    [
        (
            {"actors": 64},
            r"64 actors with 1 cores each .* do not fit on 4 cores .*lower --runtime\.actors to 3",
        ),
        ({"gpus": 2.0}, r"the learner needs 1 cores, 2 GPUs and 0\.0 GiB on one node; available: "),
    ],
)
def test_resources_beyond_the_cluster_are_refused_with_a_suggestion(settings, sentence, cluster, tmp_path):
    with pytest.raises(UserError, match=sentence):
        bestiary.train(tiny("recall", 1_000, address=cluster.address, **settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_error_in_the_settings_is_reported_as_by_the_local_runtime(cluster, tmp_path):
    e = tiny("recall", 1_000, address=cluster.address)
    e = replace(e, algo=replace(e.algo, reference_run=str(tmp_path / "no-run")))
    with pytest.raises(UserError, match=r"no-run is not a run: it has no experiment\.json"):
        bestiary.train(e, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_other_versions_on_a_node_are_refused(cluster, monkeypatch, tmp_path):
    from bestiary.runtime.ray import cluster as ray_cluster

    versions = ray_cluster.versions()
    monkeypatch.setattr(ray_cluster, "versions", lambda: versions | {"torch": "1.0"})
    with pytest.raises(UserError, match=r"has torch \S+, this machine 1\.0: install the same version everywhere"):
        bestiary.train(tiny("recall", 1_000, address=cluster.address), tmp_path / "run")


# -- faults ------------------------------------------------------------------------------------------------


def watch(e: Experiment, run: Path, steps: list[Callable[[], bool]]) -> list[str]:
    """Train, and call each step after every progress until it returns True; then the next step. Returns all notes."""
    notes: list[str] = []
    remaining = list(steps)
    progress: Progress
    for progress in bestiary.iterate(e, run):
        notes += progress.notes
        if remaining and remaining[0]():
            remaining.pop(0)
        if not remaining and progress.metrics:
            break
    assert not remaining, f"{len(remaining)} steps were not reached"
    return notes


def kill(cluster: Nodes, name: str, count: int | None = None) -> int:
    pids = cluster.named(name)[:count]
    assert pids, f"no process is called {name}"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return len(pids)


def test_lost_actors_shards_and_evaluators_are_replaced(cluster, tmp_path):
    e = tiny("catch", 10_000_000, actors=2, shards=2, actor_cpus=0.5, learner_cpus=0.5, address=cluster.address)
    e = replace(e, evaluation=replace(e.evaluation, every=2_000, episodes=100))

    def kill_actors(count: int) -> bool:
        """Kill `count` actors as soon as both collect."""
        if len(cluster.named("ray::ActorWorker.")) < 2 or len(cluster.named("ray::ActorWorker.__init__")) > 0:
            return False
        return kill(cluster, "ray::ActorWorker", count) == count

    def kill_one(name: str) -> bool:
        return bool(cluster.named(name)) and kill(cluster, name, 1) == 1

    evaluations, events = tmp_path / "run" / "evaluations.csv", tmp_path / "run" / "events.txt"
    notes = watch(
        e,
        tmp_path / "run",
        [
            lambda: kill_actors(1),
            lambda: kill_actors(2),
            lambda: kill_one("ray::ReplayShard"),
            lambda: kill_one("ray::EvaluatorWorker"),
            lambda: "repeating it" in events.read_text(),
            lambda: len(evaluations.read_text().splitlines()) > 1,
            lambda: events.read_text().count("restarted with new episodes") == 3,
        ],
    )
    lost = [note for note in notes if "was lost (its process or node died); restarting it" in note]
    restarted = [note for note in notes if "restarted with new episodes" in note]
    assert len(lost) == len(restarted) == 1 + 2
    assert sum("was lost with its contents; an empty one replaces it" in note for note in notes) == 1
    assert all(note in events.read_text() for note in notes)
    rows = table(tmp_path / "run", "metrics.csv")
    assert all(int(b["updates"]) > int(a["updates"]) for a, b in itertools.pairwise(rows))


def test_an_inference_server_that_dies_and_a_hanging_shard_are_replaced(cluster, tmp_path):
    """One inference server computes the actions of both actors, and keeps the recurrent state that R2D2 stores."""
    runtime: dict[str, Any] = {"inference": "shared", "min_batch": 16, "timeout": 5.0, "actor_cpus": 0.5}
    e = tiny("tmaze-r2d2", 10_000_000, actors=2, address=cluster.address, **runtime)
    e = replace(e, algo=configure(e.algo, warmup=1_200, capacity=8_000))
    events, metrics = tmp_path / "run" / "events.txt", tmp_path / "run" / "metrics.csv"

    def reported(note: str) -> bool:
        return events.exists() and note in events.read_text()

    def has_learned() -> bool:
        rows = table(tmp_path / "run", "metrics.csv") if metrics.exists() else []
        return any(0 < float(row["policy_lag"]) < 0.7 * int(row["updates"]) for row in rows if int(row["updates"]) > 60)

    def stop_the_shard() -> bool:
        os.kill(cluster.named("ray::ReplayShard")[0], signal.SIGSTOP)
        return True

    watch(
        e,
        tmp_path / "run",
        [
            has_learned,  # with initial weights in the server, the lag would almost equal the number of updates
            lambda: kill(cluster, "ray::InferenceServer") == 1,
            lambda: reported("the inference server was lost with the recurrent state of all actors; restarting it"),
            lambda: reported("restarted with new episodes"),
            stop_the_shard,
            lambda: reported("replay shard 0 was lost with its contents; an empty one replaces it"),
        ],
    )


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_actors_of_a_node_that_joins_late_are_replaced_when_it_fails(fault, cluster, tmp_path):
    """In a ring-buffer replay, whose streams advance together, the other actors do not wait for the lost one.

    Before it fails, the node is slow.
    """
    second = cluster.add(2)  # enough for one actor; the learner and two actors fill the first node
    e = tiny("tmaze", 100_000_000, actors=3, actor_cpus=1.5, min_actors=2, timeout=20.0, address=cluster.address)
    notes: list[str] = []
    failed_at, frames = 0.0, 0
    try:
        for progress in bestiary.iterate(e, tmp_path / "run"):
            notes += progress.notes
            if not failed_at and len(cluster.named("ray::ActorWorker")) == 3:
                for _ in range(3):  # slow: the node is stopped most of the time
                    kill_session(second.pid, signal.SIGSTOP)
                    time.sleep(0.5)
                    kill_session(second.pid, signal.SIGCONT)
                    time.sleep(0.1)
                kill_session(second.pid, fault)
                failed_at = time.monotonic()
            elif failed_at and any("restarting it" in note for note in notes):
                frames = frames or progress.frames
                if progress.frames > frames + 10_000:
                    break  # training continues without the node
            assert not failed_at or time.monotonic() - failed_at < 100
    finally:
        kill_session(second.pid)
    assert failed_at


def test_a_hanging_actor_is_replaced_and_a_hanging_evaluation_skipped(cluster, tmp_path, monkeypatch):
    """The actor is replaced after the timeout. The evaluation is repeated once and then skipped.

    An evaluation may take long: only one that makes no progress, here because it is stopped, is given up.
    """
    monkeypatch.setattr("bestiary.runtime.ray.evaluation.START_TIMEOUT", 12.0)
    e = tiny("recall", 10_000_000, actors=1, timeout=3.0, actor_cpus=0.5, address=cluster.address)
    e = replace(e, evaluation=replace(e.evaluation, every=2_000, episodes=2_000_000))
    events = tmp_path / "run" / "events.txt"
    stopped_at: dict[int, float] = {}
    started_at: dict[int, float] = {}

    def stop(pid: int) -> bool:
        os.kill(pid, signal.SIGSTOP)
        stopped_at[pid] = time.monotonic()
        return True

    def stop_the_evaluator() -> bool:
        """Stop an evaluator that has run for a while, because the timeout before its first progress is longer."""
        for pid in cluster.named("ray::EvaluatorWorker"):
            started = started_at.setdefault(pid, time.monotonic())
            if pid not in stopped_at and time.monotonic() - started > 3:
                return stop(pid)
        return False

    def is_replaced() -> bool:
        (at,) = stopped_at.values()
        replaced = events.exists() and "actor 0 did not answer within 3 seconds; restarting it" in events.read_text()
        assert not replaced or time.monotonic() - at > 2.5
        return replaced

    watch(
        e,
        tmp_path / "run",
        [
            lambda: stop(cluster.named("ray::ActorWorker")[0]),
            is_replaced,
            stop_the_evaluator,
            lambda: "it made no progress for 3 seconds); repeating it" in events.read_text(),
            stop_the_evaluator,
            lambda: "it made no progress for 3 seconds); skipping it" in events.read_text(),
        ],
    )


def test_a_node_that_dies_with_one_of_two_learners_ends_the_driver(cluster, tmp_path):
    """The driver then raises `ProcessLost`, and the supervisor restarts it from the last checkpoint."""
    second = cluster.add(4)
    until(lambda: cluster.started(second))
    e = tiny("recall", 100_000_000, actors=1, learners=2, actor_cpus=0.25, learner_cpus=2.5, timeout=20.0)
    e = replace(e, runtime=replace(e.runtime, address=cluster.address), algo=configure(e.algo, batch_size=4))
    killed = False
    try:
        with pytest.raises(ProcessLost, match="lost"):
            for progress in bestiary.iterate(e, tmp_path / "run"):
                if not killed and progress.updates > 5:
                    kill_session(second.pid)
                    killed = True
        assert killed
    finally:
        kill_session(second.pid)


def test_actors_avoid_a_node_with_other_versions_that_joins_late(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("bestiary.runtime.ray.driver.versions", lambda: {"torch": "0.1"})
    e = tiny("recall", 100_000, actors=1, address=cluster.address)
    for progress in bestiary.iterate(e, tmp_path / "run"):
        if progress.notes:
            break
    assert "was placed on a node with python" in progress.notes[0]
    assert progress.frames == 0


FRAMES = 10_000_000


def command(run: Path, cluster: Nodes, *more: str) -> list[str]:
    words = ["train", "recall", "--algo.replay.batch-size", "8", "runtime:ray", "--runtime.actors", "1"]
    words += ["--runtime.envs", "8", "--runtime.actor-cpus", "0.5", "--runtime.address", cluster.address]
    words += ["--frames", str(FRAMES), "--checkpoint.frames", "4000", "--evaluation.episodes", "0"]
    words += ["--log.no-tensorboard", "--plain", "--run", str(run), *more]
    return [sys.executable, "-m", "bestiary", *words]


def until(condition: Callable[[], Any], seconds: float = 90.0) -> Any:
    """Wait for a condition, and return its value."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError("the condition was not met in time")


def checkpoints(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").glob("[0-9]*"))


def test_a_run_survives_a_lost_learner_and_driver_and_ends_at_sigterm(cluster, tmp_path):
    """The run restarts from the last checkpoint. After SIGTERM no process remains."""
    run, output = tmp_path / "run", tmp_path / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(command(run, cluster), stdout=file, stderr=subprocess.STDOUT)
    try:
        until(lambda: checkpoints(run))
        kill(cluster, "ray::LearnerWorker")
        until(lambda: "continues at" in output.read_text())
        assert "lost the learner; restarting from the last checkpoint (2 more restarts)" in output.read_text()
        first = checkpoints(run)[-1]
        until(lambda: checkpoints(run)[-1] > first)
        drivers = [one.pid for one in processes() if str(run) in one.command and one.pid != process.pid]
        assert len(drivers) == 1
        os.kill(drivers[0], signal.SIGKILL)
        until(lambda: output.read_text().count("continues at") == 2)
        assert "was ended by SIGKILL; restarting from the last checkpoint (1 more restart)" in output.read_text()
        second = checkpoints(run)[-1]
        until(lambda: checkpoints(run)[-1] > second)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    finally:
        process.kill()
    assert f"continue with: bestiary resume {run}" in output.read_text()
    until(
        lambda: (
            not any(
                cluster.named(f"ray::{kind}")
                for kind in ("ActorWorker", "LearnerWorker", "ReplayShard", "EvaluatorWorker")
            )
        ),
        30,
    )
    assert not [one for one in processes() if str(run) in one.command]
    rows = [int(row["frames"]) for row in table(run, "metrics.csv")]
    assert rows == sorted(set(rows))
    assert "the learner or the replay was lost" in (run / "events.txt").read_text()


FAILING_ENV = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv


class FailingCartPole(CartPoleEnv):
    def step(self, action):
        raise ArithmeticError("the pole broke")


gymnasium.register("FailingCartPole-v0", entry_point=FailingCartPole)
"""


def test_an_error_on_every_actor_ends_the_run_with_its_traceback(cluster, tmp_path):
    plugin = tmp_path / "faulty.py"
    plugin.write_text(FAILING_ENV)
    words = [sys.executable, "-m", "bestiary", "train", "cartpole", "--env.id", "FailingCartPole-v0", "runtime:ray"]
    words += ["--plugin", str(plugin)]
    words += ["--runtime.actors", "2", "--runtime.actor-cpus", "0.5", "--runtime.address", cluster.address, "--plain"]
    done = subprocess.run([*words, "--run", str(tmp_path / "run")], capture_output=True, text=True, timeout=150)
    assert done.returncode == 1
    assert "ArithmeticError: the pole broke" in done.stderr
    assert "in step" in done.stderr


# -- a cluster started by the run ---------------------------------------------------------------------------


def test_a_private_cluster_is_local_and_ends_with_its_run(tmp_path, monkeypatch):
    """The cluster listens on loopback only, requires a token, and has no dashboard."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    run = tmp_path / "run"
    words = [sys.executable, "-m", "bestiary", "train", "recall", "runtime:ray", "--frames", "1G", "--plain"]
    words += ["--runtime.envs", "8", "--algo.replay.batch-size", "8", "--log.every", "1000", "--log.no-tensorboard"]
    words += ["--evaluation.episodes", "0"]
    process = subprocess.Popen([*words, "--run", str(run)], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        until(lambda: (run / "metrics.csv").exists() and (run / "metrics.csv").read_text())
        children = descendants(process.pid)
        assert len(children) > 5
        sockets = listening(children)
        assert sockets
        assert {address for address, _ in sockets} <= {"127.0.0.1", "::1"}
        assert 8265 not in {port for _, port in sockets}  # the dashboard
        assert (tmp_path / ".ray" / "auth_token").exists()
        for pid in (process.pid, *(one.pid for one in processes() if one.parent == process.pid)):
            os.kill(pid, signal.SIGINT)  # as Ctrl-C in a terminal does
        assert process.wait(60) == 130
    finally:
        process.kill()
    until(lambda: not children & {one.pid for one in processes()}, 30)


def listening(pids: set[int]) -> set[tuple[str, int]]:
    """(address, port) of every socket on which the processes listen."""
    inodes: set[str] = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found: set[tuple[str, int]] = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                found.add((readable(address), int(port, 16)))
    return found


def readable(digits: str) -> str:
    """An address in hexadecimal, as /proc/net shows it, in the usual notation."""
    raw = b"".join(bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8))
    found = ipaddress.ip_address(raw)
    return str(getattr(found, "ipv4_mapped", None) or found)
