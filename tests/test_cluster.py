"""The Ray runtime with real processes: equality with the local runtime, several actors and learners, refusals."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ray_runs import table, tiny
from helpers.settings import configure

import bestiary
from bestiary.config.extras import available
from bestiary.errors import UserError
from bestiary.runtime import Local, Ray

pytestmark = [
    pytest.mark.skipif(not available("ray"), reason="needs the extra ray"),
    pytest.mark.timeout(180),
]
TIMES = {"seconds", "frames_per_second", "updates_per_second"}


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
