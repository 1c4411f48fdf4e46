"""The analytic bound and the simulation of a cluster agree with each other."""

import json
import math
from dataclasses import asdict, replace
from itertools import pairwise

import pytest

from bestiary.bench.scaling.model import Cluster, Measured, SharedInference, Throughput, bound, measured, read
from bestiary.bench.scaling.plot import draw, one_machine, predict, saturation, scenarios
from bestiary.bench.scaling.report import ScalingBench, main
from bestiary.cli.main import main as bestiary
from bestiary.errors import UserError

simpy = pytest.importorskip("simpy")
from bestiary.bench.scaling.events import Link, Node, Server  # noqa: E402
from bestiary.bench.scaling.simulator import long_enough, simulate  # noqa: E402

ATARI = Measured(  # IMPALA: 32 environments, unrolls of 20 steps
    envs=32,
    unroll=20,
    frames_per_step=4,
    actor_seconds=0.35,
    trajectory_bytes=4.8e6,
    weights_bytes=6.4e6,
    add_seconds=0.004,
    sample_seconds=0.004,
    update_seconds=0.25,
    batch_transitions=640,
    cores=2,
)
# every part is fast, except those that a test makes slow
FAST = replace(
    ATARI, add_seconds=1e-5, sample_seconds=1e-5, update_seconds=1e-4, trajectory_bytes=1e3, weights_bytes=1e3
)
SHARED = SharedInference(min_requests=1, max_requests=4)
UNROLL = 640 * 4  # frames


# -- analytic bound --------------------------------------------------------------------------------------------------


def test_one_actor_takes_the_time_of_all_parts_of_its_unroll():
    seconds = 0.35 + 0.004 + 4.8e6 / 1.25e9 + 1e-4 + 6.4e6 / 1.25e9 + 1e-4  # unroll, add, trajectory, weights
    assert bound(ATARI, Cluster(1)).capacity["actors"] == pytest.approx(UNROLL / seconds)


def test_capacity_is_the_inverse_of_seconds_per_unroll():
    found = bound(ATARI, Cluster(1000, shards=4)).capacity
    assert found["learner"] == pytest.approx(UNROLL / 0.25)
    assert found["replay"] == pytest.approx(4 * UNROLL / 0.008)
    assert found["network"] == pytest.approx(UNROLL * 1.25e9 / 4.8e6)
    assert found["inference"] == math.inf
    assert found["cores"] == pytest.approx(8 * UNROLL / (0.25 + 0.008))


def test_processes_on_one_node_share_its_cores_and_need_no_network():
    found = bound(replace(ATARI, learner_cores=2), Cluster(4, placement="single-node", cores=2)).capacity
    assert found["cores"] == pytest.approx(2 * UNROLL / (0.35 + 2 * 0.25 + 0.008))
    assert found["network"] == math.inf


def test_shared_inference_sends_every_observation_a_second_time():
    own, shared = (bound(ATARI, Cluster(100, inference=choice)).capacity["network"] for choice in (None, SHARED))
    assert shared == pytest.approx(own / 2)


def test_more_updates_per_step_cost_the_learner_and_the_replay():
    often = bound(replace(ATARI, updates_per_step=8 / 640), Cluster(1000)).capacity
    assert often["learner"] == pytest.approx(UNROLL / (8 * 0.25))
    assert often["replay"] == pytest.approx(UNROLL / (0.004 + 8 * 0.004))


# -- discrete-event simulation -----------------------------------------------------------------------------------------


def at_end(env, event, call):
    """Call a function when an event, or a process made of a generator, ends."""
    process = event if isinstance(event, simpy.Event) else env.process(event)
    process.callbacks.append(lambda _: call())


def test_jobs_on_too_few_cores_all_slow_down_alike():
    env, ended = simpy.Environment(), {}
    node = Node(env, Cluster(1, cores=2))
    for name, seconds, cores in (("long", 3.0, 2), ("short", 1.0, 2)):
        at_end(env, node.run(seconds, cores), lambda name=name: ended.update({name: env.now}))
    env.run(10)
    assert ended == pytest.approx({"short": 2.0, "long": 4.0})  # both at half speed, then one alone


def test_a_link_transmits_one_message_at_a_time():
    env = simpy.Environment()
    link = Link(env, 100.0)
    assert [link.transmit(50), link.transmit(50)] == [0.0, 0.5]
    env.run(0.75)
    assert link.busy_seconds() == pytest.approx(0.75)
    assert link.free_at == 1.0


def test_a_message_passes_both_links_at_the_same_time():
    env, arrived = simpy.Environment(), []
    sender, receiver = (Node(env, Cluster(1, link_bytes_per_second=100, link_latency_seconds=0.1)) for _ in range(2))
    for _ in range(2):
        at_end(env, sender.send(receiver, 50), lambda: arrived.append(env.now))
    env.run(5)
    assert arrived == pytest.approx([0.6, 1.1])


def test_a_server_works_on_one_job_at_a_time():
    env, ended = simpy.Environment(), []
    server = Server(Node(env, Cluster(1)))
    for _ in range(3):
        at_end(env, server.do(1.0), lambda: ended.append(env.now))
    env.run(2.5)
    assert ended == [1.0, 2.0]
    assert server.work == 2.0


# -- the simulation agrees with the bound -----------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["single-node", "learner", "own-nodes"])
def test_one_actor_reaches_the_bound(placement):
    cluster = Cluster(1, placement=placement)
    found = simulate(ATARI, cluster)
    assert found.frames_per_second == pytest.approx(bound(ATARI, cluster).frames_per_second, rel=0.02)
    assert found.bottleneck == bound(ATARI, cluster).bottleneck == "actors"


SLOW = {  # every resource is fast except one
    "actors": (FAST, Cluster(16)),
    "learner": (replace(FAST, update_seconds=0.2), Cluster(16)),
    "replay": (replace(FAST, add_seconds=0.1, sample_seconds=0.1), Cluster(16)),
    "network": (replace(FAST, trajectory_bytes=1e8), Cluster(16)),
    "inference": (
        replace(FAST, environment_seconds=0.01, inference_seconds=0.05, inference_seconds_per_request=0.01),
        Cluster(16, inference=SHARED),
    ),
    "cores": (FAST, Cluster(16, actors_per_node=16, cores=2)),
}


@pytest.mark.parametrize("name", SLOW)
def test_the_only_slow_resource_is_the_bottleneck(name):
    found, limit = simulate(*SLOW[name]), bound(*SLOW[name])
    assert (found.bottleneck, limit.bottleneck) == (name, name)
    assert found.frames_per_second == pytest.approx(limit.frames_per_second, rel=0.05)
    used = max(value for resource, value in found.utilisation.items() if resource.startswith(name))
    assert used == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("link", ["trajectories", "weights", "batches", "requests"])
def test_each_kind_of_message_can_saturate_a_link(link):
    m, c = {
        "trajectories": (
            replace(FAST, trajectory_bytes=1e8, updates_per_step=0.25 / 640),
            Cluster(16, placement="own-nodes"),
        ),
        "weights": (replace(FAST, weights_bytes=1e9), Cluster(16)),
        "batches": (replace(FAST, trajectory_bytes=1e7, updates_per_step=8 / 640), Cluster(16, placement="own-nodes")),
        "requests": (replace(FAST, trajectory_bytes=1e8, environment_seconds=0.1), Cluster(16, inference=SHARED)),
    }[link]
    found, limit = simulate(m, c), bound(m, c)
    assert found.bottleneck == limit.bottleneck == "network"
    assert found.frames_per_second == pytest.approx(limit.frames_per_second, rel=0.05)
    side = "network out" if link == "weights" else "network in"
    assert found.utilisation[side] > 0.95


@pytest.mark.parametrize("name", ["learner", "replay", "network"])
def test_a_thousand_actors_reach_the_bound_of_the_bottleneck(name):
    m, c = SLOW[name]
    c = replace(c, actors=1000)
    found = simulate(m, c, long_enough(m, c, 6))
    assert found.frames_per_second == pytest.approx(bound(m, c).frames_per_second, rel=0.05)
    assert found.bottleneck == name


CLUSTERS = scenarios(ATARI, Cluster(1)) | {
    "two updates per step": (replace(ATARI, updates_per_step=2 / 640, update_seconds=0.01), Cluster(1, shards=2)),
    "batches of four": (replace(ATARI, batch_transitions=4 * 640, update_seconds=0.1), Cluster(1, queue=1)),
    "two in flight": (replace(ATARI, update_seconds=0.01), Cluster(1, in_flight=2, link_bytes_per_second=1.25e8)),
    "wake some": (replace(ATARI, update_seconds=0.01), Cluster(1, wake="some")),
    "high variation": (replace(ATARI, actor_variation=0.5, update_seconds=0.01), Cluster(1)),
    "single-node": (ATARI, Cluster(1, placement="single-node", cores=2)),
    "inference": (replace(ATARI, environment_seconds=0.1, inference_seconds=0.01), Cluster(1, inference=SHARED)),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_no_simulation_exceeds_the_bound_or_loses_a_transition(name):
    m, c = CLUSTERS[name]
    for actors in (1, 5, 30):
        cluster = replace(c, actors=actors)
        found = simulate(m, cluster)
        limit = 1.015 * bound(m, cluster).frames_per_second  # the durations of unrolls are random
        assert 0 < found.frames_per_second < limit
        assert found.collected == pytest.approx(found.learned + found.waiting)
        assert found.collected > 100 * m.transitions
        assert all(0 <= value <= 1 for value in found.utilisation.values())


@pytest.mark.parametrize("name", scenarios(ATARI, Cluster(1)))
def test_more_actors_on_cores_of_their_own_never_reduce_throughput(name):
    m, c = scenarios(ATARI, Cluster(1, wake="some"))[name]
    rates = [row.simulated for row in predict(m, c, (1, 4, 16, 64, 256), rounds=8)]
    assert all(more > 0.9 * fewer for fewer, more in pairwise(rates)), rates
    assert rates[-1] > 1.5 * rates[0]


def test_equal_seeds_give_equal_results_and_other_seeds_others():
    first, again, other = (simulate(FAST, Cluster(3), 100, seed) for seed in (0, 0, 1))
    assert first == again
    assert first.frames_per_second != other.frames_per_second
    assert first.frames_per_second == pytest.approx(other.frames_per_second, rel=0.02)


# -- lag and back-pressure -------------------------------------------------------------------------------------------


def largest_lag(m: Measured, c: Cluster) -> float:
    """Updates due in shards, for unrolls in flight and for prefetched batches, and updates during an unroll."""
    unrolls = c.shards * (c.queue + 1) + c.actors * c.in_flight
    slow = 2 * (m.actor_seconds + 0.1) / m.update_seconds
    return unrolls * m.transitions / m.steps_per_update + c.prefetch + 1 + slow


@pytest.mark.parametrize(
    "cluster", [Cluster(32), Cluster(32, shards=4), Cluster(32, in_flight=3), Cluster(32, queue=64)]
)
def test_back_pressure_bounds_the_policy_lag(cluster):
    keeps_up, slow = replace(ATARI, update_seconds=0.001), replace(ATARI, update_seconds=0.1)
    unsaturated, saturated = simulate(keeps_up, replace(cluster, actors=2)), simulate(slow, cluster)
    assert unsaturated.lag < 3 * cluster.in_flight
    assert saturated.utilisation["learner"] > 0.97
    assert saturated.lag > 10
    assert saturated.lag <= saturated.lag_max <= largest_lag(slow, cluster)


def test_a_longer_queue_only_adds_lag_once_the_learner_is_saturated():
    short, long = (simulate(ATARI, Cluster(16, queue=queue)) for queue in (8, 64))
    assert long.lag > short.lag + 40
    assert long.frames_per_second == pytest.approx(short.frames_per_second, rel=0.01)


def test_waking_a_few_actors_keeps_the_lag_independent_of_their_number():
    everyone, few = (simulate(ATARI, Cluster(300, wake=wake)) for wake in ("all", "some"))
    assert everyone.lag > 100
    assert few.lag < 30
    assert few.frames_per_second >= 0.99 * everyone.frames_per_second


def test_a_batch_may_need_more_trajectories_than_the_queue_allows():
    found = simulate(replace(ATARI, batch_transitions=10 * 640), Cluster(2, queue=1))
    assert found.learned > 0


def test_two_unrolls_in_flight_hide_the_transfer_to_the_replay():
    slow = replace(ATARI, update_seconds=0.01)
    one, two = (simulate(slow, Cluster(1, in_flight=n, link_bytes_per_second=2e7)) for n in (1, 2))
    assert two.frames_per_second > 1.2 * one.frames_per_second


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_prefetched_batches_hide_sampling_from_the_learner(prefetch):
    m = replace(FAST, update_seconds=0.1, sample_seconds=0.3)
    cluster = Cluster(16, shards=8, prefetch=prefetch)
    found, limit = simulate(m, cluster), bound(m, cluster)
    assert limit.frames_per_second == pytest.approx(UNROLL * (prefetch + 1) / 0.4)
    assert found.frames_per_second == pytest.approx(limit.frames_per_second, rel=0.02)


def test_an_inference_batch_waits_no_longer_than_its_timeout():
    m = replace(FAST, environment_seconds=0.02, inference_seconds=0.001)
    one, two = (Cluster(n, inference=SharedInference(2, 16, 0.05)) for n in (1, 2))
    alone, pair = simulate(m, one, 50), simulate(m, two, 50)
    seconds = 0.02 + 20 * (0.05 + 0.001)
    assert alone.frames_per_second == pytest.approx(UNROLL / seconds, rel=0.01)
    assert bound(m, one).frames_per_second == pytest.approx(UNROLL / seconds, rel=0.01)
    assert pair.frames_per_second > 4 * alone.frames_per_second


# -- files, table, figure -----------------------------------------------------------------------------------------


def write_measurements(tmp_path, **changes):
    path = tmp_path / "cluster.json"
    points = [{"actors": 1, "frames_per_second": 7000.0}, {"actors": 2, "frames_per_second": 8000}]
    path.write_text(json.dumps({"measured": asdict(ATARI), "points": points} | changes))
    return path


def test_measurements_can_be_written_and_read(tmp_path):
    assert read(write_measurements(tmp_path)) == (ATARI, [Throughput(1, 7000.0), Throughput(2, 8000)])
    assert measured(asdict(ATARI)) == ATARI


def changed(**changes):
    return asdict(ATARI) | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"measured": changed(update_seconds=0)}, "update_seconds=0 must be positive"),
        ({"measured": changed(add_seconds=-1)}, "add_seconds=-1 must be at least 0"),
        ({"measured": changed(actor_seconds=float("nan"))}, "actor_seconds=nan must be positive"),
        ({"measured": changed(envs="many")}, "envs of .* cannot be 'many'"),
        ({"measured": changed(updat_seconds=1)}, "unknown measurement 'updat_seconds': did you mean update_seconds"),
        ({"measured": {"envs": 32}}, "lacks unroll, frames_per_step, actor_seconds"),
        ({"measured": []}, "has no measurements"),
        ({"points": [{"actors": 0, "frames_per_second": 1}]}, "positive actors and frames_per_second"),
        ({"points": [{"actors": 1}]}, "positive actors and frames_per_second"),
        ({"points": [3]}, "positive actors and frames_per_second"),
        ({"points": 3}, "positive actors and frames_per_second"),
    ],
)
def test_invalid_measurements_are_refused_in_one_sentence(tmp_path, changes, message):
    with pytest.raises(UserError, match=message) as error:
        read(write_measurements(tmp_path, **changes))
    assert "\n" not in str(error.value)


def test_a_missing_or_broken_file_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"bestiary bench cluster --json .* writes it"):
        read(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UserError, match=r"broken\.json cannot be read"):
        read(tmp_path / "broken.json")


@pytest.mark.parametrize("wrong", [{"actors": 0}, {"cores": 0}, {"link_bytes_per_second": -1.0}, {"queue": 0}])
def test_an_impossible_cluster_is_refused(wrong):
    with pytest.raises(UserError, match=f"{next(iter(wrong))}=.* must be positive"):
        Cluster(**{"actors": 1} | wrong)


def test_impossible_batch_sizes_and_durations_are_refused():
    with pytest.raises(UserError, match="min_requests=9 must be at most max_requests=8"):
        SharedInference(9, 8)
    with pytest.raises(UserError, match="seconds=0 must be positive"):
        simulate(ATARI, Cluster(1), 0)
    with pytest.raises(UserError, match="rounds=0 must be at least 1"):
        main(ScalingBench(rounds=0))


def test_measurements_are_compared_with_a_node_of_equal_cores():
    m, c = one_machine(ATARI, Cluster(1, cores=8, queue=5))
    assert (c.cores, c.placement, c.queue) == (2, "single-node", 5)
    assert bound(m, replace(c, actors=9)).bottleneck == "cores"


def test_saturation_starts_where_actors_stop_being_the_bottleneck():
    m, c = scenarios(ATARI, Cluster(1))["10 Gbit/s, learner 10x"]
    actors, limit = saturation(m, c) or (0, "")
    assert limit == bound(m, replace(c, actors=actors)).bottleneck == "learner"
    assert bound(m, replace(c, actors=actors - 1)).bottleneck == "actors"
    assert saturation(m, c, max_actors=actors - 1) is None


def test_the_command_prints_measurements_predictions_and_bottlenecks(tmp_path, capsys):
    out = tmp_path / "out.json"
    args = ["--measurements", str(write_measurements(tmp_path)), "--rounds", "2", "--json", str(out)]
    assert bestiary(["bench", "scaling", *args]) == 0
    text = capsys.readouterr().out
    line = next(line for line in text.splitlines() if "1 Gbit/s " in line and " 1,000 " in line)
    assert [cell.strip() for cell in line.split("|")][3:6] == ["10,240", "10,240", "learner"]
    machine = json.loads(out.read_text())["one machine"]
    assert [row["actors"] for row in machine] == [1, 2]
    row = next(line for line in text.splitlines() if " 7,000 " in line)
    assert f"{machine[0]['simulated'] / 7000:.2f}" in row


def test_the_figure_is_written_to_the_given_path(tmp_path):
    pytest.importorskip("matplotlib")
    found = {name: predict(*pair, (1, 1000), rounds=1) for name, pair in scenarios(ATARI, Cluster(1)).items()}
    draw(ATARI, [Throughput(1, 7000.0)], tmp_path / "new" / "scaling.png", found=found)
    assert (tmp_path / "new" / "scaling.png").stat().st_size > 10_000


def test_a_figure_of_unknown_format_is_refused_before_any_work(tmp_path):
    with pytest.raises(UserError, match=r"must end in \.png or \.svg"):
        main(ScalingBench(measurements=tmp_path / "never read", out=tmp_path / "scaling.pdf"))
