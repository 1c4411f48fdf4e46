"""The same experiment as processes of a cluster, with real processes that are really killed."""

import csv
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
    """A preset made small enough for a test."""
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


def same(a: Path, b: Path, name: str) -> None:
    """Two tables are equal, clocks and what only one of them knows aside."""
    mine, theirs = table(a, name), table(b, name)
    assert len(mine) == len(theirs) > 0
    for x, y in zip(mine, theirs, strict=True):
        common = (x.keys() & y.keys()) - TIMES
        assert {k: x[k] for k in common} == {k: y[k] for k in common}


# -- the same as without a cluster -------------------------------------------------------------------------


@pytest.mark.parametrize("name, frames", [("recall", 3_000), ("tmaze-r2d2", 3_000), ("rcp-a", 6_000)])
def test_one_actor_in_lockstep_trains_as_the_local_runtime_does(name, frames, cluster, tmp_path):
    e = tiny(name, frames, lockstep=True, address=cluster.address)
    e = replace(e, evaluation=replace(e.evaluation, episodes=2))
    if name == "rcp-a":
        e = replace(e, env=bestiary.preset("cartpole").env, algo=configure(e.algo, warmup=5))
    if name == "tmaze-r2d2":
        e = replace(e, algo=configure(e.algo, warmup=1_500))
    bestiary.train(e, tmp_path / "ray")
    bestiary.train(replace(e, runtime=Local(envs=8, threads=1)), tmp_path / "local")
    for file in ("metrics.csv", "episodes.csv", "evaluations.csv"):
        same(tmp_path / "local", tmp_path / "ray", file)
    here, there = (bestiary.Run(tmp_path / kind).load().weights for kind in ("local", "ray"))
    assert all(torch.equal(here[k], there[k]) for k in here)


def test_batches_of_two_players_are_those_of_their_games_side_by_side(cluster, tmp_path):
    """What a shard adds up to is what one replay would hold that was given both players' trajectories at once."""
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
    drawn = 0
    for _ in range(60):
        packed = [actor.rollout(0, weights)[1] for actor in actors]
        for number in (1, 0):  # in any order
            shard.add(number, packed[number])
        replay.add(concatenate_streams([unpack(t) for t in packed]))
        while (mine := replay.sample()) is not None:
            theirs = shard.sample().batch
            assert theirs is not None
            for a, b in zip(leaves(mine), leaves(theirs), strict=True):
                np.testing.assert_array_equal(a.numpy(), b)
            drawn += 1
        assert shard.sample().batch is None
    assert drawn > 0


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [x for k in sorted(tree) for x in leaves(tree[k])]
    if isinstance(tree, tuple | list):
        return [x for part in tree for x in leaves(part)]
    return [] if tree is None else [tree]


def test_a_run_goes_on_locally_and_on_another_number_of_actors(cluster, tmp_path):
    run = tmp_path / "run"
    bestiary.train(tiny("recall", 2_000, actors=2, address=cluster.address), run)
    local = replace(tiny("recall", 4_000), runtime=Local(envs=8, threads=1))
    bestiary.train(local, run)
    bestiary.train(tiny("recall", 6_000, actors=3, shards=2, address=cluster.address), run)
    frames = [int(row["frames"]) for row in table(run, "metrics.csv")]
    assert frames == sorted(frames)
    assert frames[-1] >= 5_400
    updates = [int(row["updates"]) for row in table(run, "metrics.csv")]
    assert updates == sorted(updates)


@pytest.mark.parametrize("name", ["tmaze", "tmaze-r2d2", "rcp-a"])  # the fourth is in most of what follows
def test_every_kind_of_replay_learns_with_several_actors_and_shards(name, cluster, tmp_path):
    e = tiny(name, 2_000)
    if name == "rcp-a":
        e = replace(e, env=bestiary.preset("cartpole").env, algo=configure(e.algo, warmup=5))
    if name == "tmaze-r2d2":
        e = replace(e, algo=configure(e.algo, warmup=1_200, capacity=8_000))
    runtime = Ray(envs=8, threads=1, actors=2, shards=2, address=cluster.address)
    for progress in bestiary.iterate(replace(e, runtime=runtime, frames=10_000_000), tmp_path / "run"):
        if progress.updates and progress.frames > 3_000 and progress.metrics.get("actors") == 2:
            break  # all play, and something is learnt from it
    assert progress.metrics.get("unroll_seconds", 1.0) > 0
    assert progress.metrics["policy_lag"] >= 0


def test_one_process_may_choose_for_all_actors(cluster, tmp_path):
    e = tiny("tmaze-r2d2", 2_500, actors=2, inference="shared", min_batch=16, actor_cpus=0.5, address=cluster.address)
    e = replace(e, algo=configure(e.algo, warmup=1_200, capacity=8_000))
    bestiary.train(e, tmp_path / "run")
    last = table(tmp_path / "run", "metrics.csv")[-1]
    assert int(last["updates"]) > 0


@pytest.mark.parametrize("shards", [1, 2])
def test_two_learners_step_as_one(shards, cluster, tmp_path):
    e = tiny("recall", 3_000, actors=2, learners=2, shards=shards, actor_cpus=0.5, learner_cpus=0.5)
    e = replace(e, runtime=replace(e.runtime, address=cluster.address), algo=configure(e.algo, batch_size=4))
    bestiary.train(e, tmp_path / "run")
    last = table(tmp_path / "run", "metrics.csv")[-1]
    played, learnt = int(last["steps"]), int(last["updates"]) * 2 * 4 * e.algo.unroll
    assert 0.7 * played < learnt <= played  # an update takes a batch of each; a trajectory is learnt from once


# -- faults ------------------------------------------------------------------------------------------------


def watch(e: Experiment, run: Path, steps: list[Callable[[], bool]]) -> list[str]:
    """Train; each step is tried, once the one before is done, until it says that it is done. Returns what was told."""
    notes: list[str] = []
    waiting = list(steps)
    progress: Progress
    for progress in bestiary.iterate(e, run):
        notes += progress.notes
        if waiting and waiting[0]():
            waiting.pop(0)
        if not waiting and progress.metrics:
            break
    assert not waiting, f"{len(waiting)} steps were not reached"
    return notes


def kill(cluster: Nodes, name: str, count: int | None = None) -> int:
    pids = cluster.named(name)[:count]
    assert pids, f"nobody is called {name}"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return len(pids)


def test_players_a_shard_and_the_evaluator_are_replaced_and_training_goes_on(cluster, tmp_path):
    e = tiny("catch", 10_000_000, actors=4, shards=2, actor_cpus=0.5, learner_cpus=0.5, address=cluster.address)
    e = replace(e, evaluation=replace(e.evaluation, every=2_000, episodes=200))

    def players(count: int) -> bool:
        """Kill so many, once all are there."""
        if len(cluster.named("ray::ActorWorker.")) < 4 or len(cluster.named("ray::ActorWorker.__init__")) > 0:
            return False
        return kill(cluster, "ray::ActorWorker", count) == count

    def others(name: str) -> bool:
        return bool(cluster.named(name)) and kill(cluster, name, 1) == 1

    evaluated = tmp_path / "run" / "evaluations.csv"
    told = watch(
        e,
        tmp_path / "run",
        [
            lambda: players(1),
            lambda: players(2),
            lambda: players(4),
            lambda: others("ray::ReplayShard"),
            lambda: others("ray::EvaluatorWorker"),
            lambda: "repeating it" in (tmp_path / "run" / "events.txt").read_text(),
            lambda: len(evaluated.read_text().splitlines()) > 1,
            lambda: (tmp_path / "run" / "events.txt").read_text().count("restarted with new episodes") == 7,
        ],
    )
    lost = [note for note in told if "was lost (its process or node died); restarting it" in note]
    back = [note for note in told if "restarted with new episodes" in note]
    assert len(lost) == len(back) == 1 + 2 + 4
    assert sum("was lost with its contents; an empty one replaces it" in note for note in told) == 1
    events = (tmp_path / "run" / "events.txt").read_text()
    assert all(note in events for note in told)
    rows = table(tmp_path / "run", "metrics.csv")
    assert all(int(b["updates"]) > int(a["updates"]) for a, b in itertools.pairwise(rows))


def test_whoever_chooses_for_all_and_a_shard_that_hangs_are_replaced(cluster, tmp_path):
    e = tiny("recall", 10_000_000, actors=2, inference="shared", timeout=5.0, actor_cpus=0.5, address=cluster.address)
    events = tmp_path / "run" / "events.txt"

    def said(sentence: str) -> bool:
        return events.exists() and sentence in events.read_text()

    def stop_the_shard() -> bool:
        os.kill(cluster.named("ray::ReplayShard")[0], signal.SIGSTOP)
        return True

    watch(
        e,
        tmp_path / "run",
        [
            lambda: bool(cluster.named("ray::InferenceServer")) and kill(cluster, "ray::InferenceServer") == 1,
            lambda: said("the inference server was lost with the recurrent state of all actors; restarting it"),
            lambda: said("restarted with new episodes"),
            stop_the_shard,
            lambda: said("replay shard 0 was lost with its contents; an empty one replaces it"),
        ],
    )


def test_a_player_that_hangs_is_given_up_after_a_while(cluster, tmp_path):
    e = tiny("recall", 200_000, actors=2, timeout=3.0, actor_cpus=0.5, address=cluster.address)
    stopped: list[int] = []

    def stop() -> None:
        stopped.append(cluster.named("ray::ActorWorker")[0])
        os.kill(stopped[0], signal.SIGSTOP)

    began = 0.0
    for progress in bestiary.iterate(e, tmp_path / "run"):
        if not stopped and progress.frames > 2_000:
            stop()
            began = time.monotonic()
        if any("did not answer within 3 seconds; restarting it" in note for note in progress.notes):
            break
        assert not stopped or time.monotonic() - began < 60
    else:
        raise AssertionError("nobody noticed")


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_that_joins_brings_players_and_one_that_dies_or_hangs_costs_its_own(fault, cluster, tmp_path):
    """In a replay whose streams turn together: nobody waits for those that are gone. Before that, the node is slow."""
    second = cluster.add(3)  # the smaller one: the learner is on the other
    e = tiny("tmaze", 100_000_000, actors=6, min_actors=2, timeout=20.0, address=cluster.address)
    told: list[str] = []
    struck, frames = 0.0, 0
    try:
        for progress in bestiary.iterate(e, tmp_path / "run"):
            told += progress.notes
            # the second node is there and has taken what did not fit on the first
            if not struck and len(cluster.named("ray::ActorWorker")) == 6:
                for _ in range(3):  # slow: it stands still most of the time
                    kill_session(second.pid, signal.SIGSTOP)
                    time.sleep(0.5)
                    kill_session(second.pid, signal.SIGCONT)
                    time.sleep(0.1)
                kill_session(second.pid, fault)
                struck = time.monotonic()
            elif struck and sum("restarting it" in note for note in told) >= 3:
                frames = frames or progress.frames
                if progress.frames > frames + 20_000:
                    break  # training goes on without it
            assert not struck or time.monotonic() - struck < 100
    finally:
        kill_session(second.pid)
    assert struck


def test_an_evaluation_that_stands_still_is_played_again_and_then_left_out(cluster, tmp_path):
    """Long games are waited for, hung ones are not: a process that is stopped says nothing, whatever it plays."""
    e = tiny("recall", 10_000_000, actors=2, timeout=3.0, actor_cpus=0.5, address=cluster.address)
    e = replace(e, evaluation=replace(e.evaluation, every=2_000, episodes=2_000_000))
    seen: dict[int, float] = {}
    stopped: set[int] = set()

    def stop() -> bool:
        """Once it has played for a while: before that it may take its time."""
        for pid in cluster.named("ray::EvaluatorWorker"):
            if pid not in stopped and time.monotonic() - seen.setdefault(pid, time.monotonic()) > 4:
                os.kill(pid, signal.SIGSTOP)
                stopped.add(pid)
                return True
        return False

    events = tmp_path / "run" / "events.txt"
    watch(
        e,
        tmp_path / "run",
        [stop, stop, lambda: "it made no progress for 3 seconds); skipping it" in events.read_text()],
    )
    assert "it made no progress for 3 seconds); repeating it" in events.read_text()


def test_a_node_that_dies_with_one_of_two_learners_costs_no_more_than_the_last_checkpoint(cluster, tmp_path):
    second = cluster.add(4)
    until(lambda: cluster.started(second))
    e = tiny("recall", 100_000_000, actors=2, learners=2, actor_cpus=0.25, learner_cpus=2.5, timeout=20.0)
    e = replace(e, runtime=replace(e.runtime, address=cluster.address), algo=configure(e.algo, batch_size=4))
    struck = False
    try:
        with pytest.raises(ProcessLost, match="lost"):
            for progress in bestiary.iterate(e, tmp_path / "run"):
                if not struck and progress.updates > 20:
                    kill_session(second.pid)
                    struck = True
        assert struck
    finally:
        kill_session(second.pid)


def test_a_node_with_other_versions_that_joins_later_is_not_played_on(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("bestiary.runtime.ray.driver.versions", lambda: {"torch": "0.1"})
    e = tiny("recall", 100_000, actors=1, address=cluster.address)
    for progress in bestiary.iterate(e, tmp_path / "run"):
        if progress.notes:
            break
    assert "was placed on a node with python" in progress.notes[0]
    assert progress.frames == 0


LAST = 200_000


def command(run: Path, cluster: Nodes, *more: str) -> list[str]:
    words = ["train", "recall", "runtime:ray", "--runtime.actors", "2", "--runtime.envs", "8", "--runtime.actor-cpus"]
    words += ["0.5", "--runtime.address", cluster.address, "--frames", str(LAST), "--checkpoint.frames", "4000"]
    words += ["--evaluation.episodes", "2", "--log.no-tensorboard", "--plain", "--run", str(run), *more]
    return [sys.executable, "-m", "bestiary", *words]


def until(what: Callable[[], Any], seconds: float = 90.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError("it did not happen in time")


def saved(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").glob("[0-9]*"))


def test_a_lost_learner_a_killed_driver_and_sigterm(cluster, tmp_path):
    """The run goes on by itself after the first two, from what was saved, and leaves nothing behind after the last."""
    run, output = tmp_path / "run", tmp_path / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(command(run, cluster), stdout=file, stderr=subprocess.STDOUT)
    try:
        until(lambda: saved(run))
        kill(cluster, "ray::LearnerWorker")
        until(lambda: "continues at" in output.read_text())
        assert "lost the learner; restarting from the last checkpoint (2 more restarts)" in output.read_text()
        first = saved(run)[-1]
        until(lambda: saved(run)[-1] > first)
        drivers = [one.pid for one in processes() if str(run) in one.command and one.pid != process.pid]
        assert len(drivers) == 1
        os.kill(drivers[0], signal.SIGKILL)
        until(lambda: output.read_text().count("continues at") == 2)
        assert "was ended by SIGKILL; restarting from the last checkpoint (1 more restart)" in output.read_text()
        second = saved(run)[-1]
        until(lambda: saved(run)[-1] > second)
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


FAULTY = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv


class Faulty(CartPoleEnv):
    def step(self, action):
        raise ArithmeticError("the pole came off")


gymnasium.register("Faulty-v0", entry_point=Faulty)
"""


def test_a_fault_of_the_environment_on_every_actor_ends_the_run_with_its_traceback(cluster, tmp_path):
    plugin = tmp_path / "faulty.py"
    plugin.write_text(FAULTY)
    words = [sys.executable, "-m", "bestiary", "train", "cartpole", "--env.id", "Faulty-v0", "runtime:ray"]
    words += ["--plugin", str(plugin)]
    words += ["--runtime.actors", "2", "--runtime.actor-cpus", "0.5", "--runtime.address", cluster.address, "--plain"]
    done = subprocess.run([*words, "--run", str(tmp_path / "run")], capture_output=True, text=True, timeout=150)
    assert done.returncode == 1
    assert "ArithmeticError: the pole came off" in done.stderr
    assert "in step" in done.stderr


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
def test_settings_that_cannot_work_are_refused_in_a_sentence(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        Ray(**settings)


def test_an_address_where_nobody_answers_is_told_soon(tmp_path):
    e = tiny("recall", 1_000, address="127.0.0.1:1")
    began = time.monotonic()
    with pytest.raises(UserError, match=r"no Ray cluster answers at 127\.0\.0\.1:1"):
        bestiary.train(e, tmp_path / "run")
    assert time.monotonic() - began < 30
    assert not (tmp_path / "run").exists()


def test_an_address_must_be_one(tmp_path):
    with pytest.raises(UserError, match=r"runtime\.address='here' should be HOST:PORT"):
        bestiary.train(tiny("recall", 1_000, address="here"), tmp_path / "run")


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"actors": 64}, r"64 actors with 1 cores each, .* do not fit on 4 cores .*lower --runtime\.actors to 3"),
        ({"gpus": 2.0}, r"the learner needs 1 cores, 2 GPUs and 0\.0 GiB on one node; available: "),
    ],
)
def test_more_than_the_cluster_has_is_refused_with_what_would_fit(settings, sentence, cluster, tmp_path):
    with pytest.raises(UserError, match=sentence):
        bestiary.train(tiny("recall", 1_000, address=cluster.address, **settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_is_wrong_with_a_part_is_told_as_it_is_told_without_a_cluster(cluster, tmp_path):
    e = tiny("recall", 1_000, address=cluster.address)
    e = replace(e, algo=replace(e.algo, reference_run=str(tmp_path / "nobody")))
    with pytest.raises(UserError, match=r"nobody is not a run: it has no experiment\.json"):
        bestiary.train(e, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_other_versions_on_a_node_are_refused(cluster, monkeypatch, tmp_path):
    from bestiary.runtime.ray import cluster as ray_cluster

    mine = ray_cluster.versions()
    monkeypatch.setattr(ray_cluster, "versions", lambda: mine | {"torch": "1.0"})
    with pytest.raises(UserError, match=r"has torch \S+, this machine 1\.0: install the same version everywhere"):
        bestiary.train(tiny("recall", 1_000, address=cluster.address), tmp_path / "run")


# -- a cluster of our own ----------------------------------------------------------------------------------


def test_our_own_cluster_listens_on_loopback_only_asks_for_a_token_and_ends_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    run = tmp_path / "run"
    words = [sys.executable, "-m", "bestiary", "train", "recall", "runtime:ray", "--frames", "1G", "--plain"]
    process = subprocess.Popen([*words, "--run", str(run)], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        until(lambda: (run / "metrics.csv").exists() and (run / "metrics.csv").read_text())
        ours = descendants(process.pid)
        assert len(ours) > 5
        open_to = listening(ours)
        assert open_to
        assert set(open_to) <= {"127.0.0.1", "::1"}
        assert 8265 not in open_to.values()  # the dashboard
        assert (tmp_path / ".ray" / "auth_token").exists()
        for pid in (process.pid, *(one.pid for one in processes() if one.parent == process.pid)):
            os.kill(pid, signal.SIGINT)  # as a terminal does
        assert process.wait(60) == 130
    finally:
        process.kill()
    until(lambda: not ours & {one.pid for one in processes()}, 30)


def listening(pids: set[int]) -> dict[str, int]:
    """Addresses at which processes wait for others, and a port at each."""
    inodes: set[str] = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found: dict[str, int] = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == "0A" and parts[9] in inodes:
                where, port = parts[1].split(":")
                found[address(where)] = int(port, 16)
    return found


def address(digits: str) -> str:
    import ipaddress

    raw = b"".join(bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8))
    found = ipaddress.ip_address(raw)
    return str(getattr(found, "ipv4_mapped", None) or found)
