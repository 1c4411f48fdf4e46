"""A cluster on paper and played through: each holds the other."""

import json
import math
from dataclasses import asdict, replace
from itertools import pairwise

import pytest

from bestiary.bench.scaling.events import Clock, Link, Node, Server
from bestiary.bench.scaling.model import Cluster, Measured, Point, SharedInference, bound, measured, read
from bestiary.bench.scaling.plot import draw, one_machine, predict, saturation, scenarios
from bestiary.bench.scaling.report import Settings, main
from bestiary.bench.scaling.simulator import long_enough, simulate
from bestiary.cli.main import main as bestiary
from bestiary.errors import UserError

ATARI = Measured(  # IMPALA, 32 consoles, 20 moves
    envs=32,
    unroll=20,
    frames_per_move=4,
    actor_seconds=0.35,
    trajectory_bytes=4.8e6,
    weights_bytes=6.4e6,
    add_seconds=0.004,
    sample_seconds=0.004,
    update_seconds=0.25,
    batch_moves=640,
    cores=2,
)
# nothing takes long but what a test slows down
FAST = replace(
    ATARI, add_seconds=1e-5, sample_seconds=1e-5, update_seconds=1e-4, trajectory_bytes=1e3, weights_bytes=1e3
)
SHARED = SharedInference(minimum=1, maximum=4)
UNROLL = 640 * 4  # frames


# -- on paper --------------------------------------------------------------------------------------------------------


def test_one_actor_alone_takes_the_time_of_all_that_happens_to_its_unroll():
    seconds = 0.35 + 0.004 + 4.8e6 / 1.25e9 + 1e-4 + 6.4e6 / 1.25e9 + 1e-4  # play, add, trajectory, weights
    assert bound(ATARI, Cluster(1)).capacity["actors"] == pytest.approx(UNROLL / seconds)


def test_every_resource_has_the_capacity_of_its_seconds_per_unroll():
    found = bound(ATARI, Cluster(1000, shards=4)).capacity
    assert found["learner"] == pytest.approx(UNROLL / 0.25)
    assert found["replay"] == pytest.approx(4 * UNROLL / 0.008)
    assert found["network"] == pytest.approx(UNROLL * 1.25e9 / 4.8e6)
    assert found["inference"] == math.inf
    assert found["cores"] == pytest.approx(8 * UNROLL / (0.25 + 0.008))


def test_on_one_machine_all_share_its_cores_and_nothing_travels():
    found = bound(replace(ATARI, learner_cores=2), Cluster(4, placement="together", cores=2)).capacity
    assert found["cores"] == pytest.approx(2 * UNROLL / (0.35 + 2 * 0.25 + 0.008))
    assert found["network"] == math.inf


def test_shared_inference_brings_every_observation_to_the_learner_a_second_time():
    own, shared = (bound(ATARI, Cluster(100, inference=choice)).capacity["network"] for choice in (None, SHARED))
    assert shared == pytest.approx(own / 2)


def test_learning_often_from_every_move_costs_the_learner_and_the_replay():
    often = bound(replace(ATARI, updates_per_move=8 / 640), Cluster(1000)).capacity
    assert often["learner"] == pytest.approx(UNROLL / (8 * 0.25))
    assert often["replay"] == pytest.approx(UNROLL / (0.004 + 8 * 0.004))


# -- parts of the simulation -----------------------------------------------------------------------------------------


def test_processes_on_too_few_cores_slow_each_other_alike():
    clock, ended = Clock(), {}
    node = Node(clock, Cluster(1, cores=2))
    for name, seconds, cores in (("long", 3.0, 2), ("short", 1.0, 2)):
        node.run(seconds, cores, lambda name=name: ended.update({name: clock.now}))
    clock.run(10)
    assert ended == pytest.approx({"short": 2.0, "long": 4.0})  # both at half speed, then one alone


def test_messages_pass_a_link_one_after_another():
    clock = Clock()
    link = Link(clock, 100.0)
    assert [link.take(50), link.take(50)] == [0.0, 0.5]
    clock.run(0.75)
    assert link.used() == pytest.approx(0.75)
    assert link.free == 1.0


def test_a_message_flows_through_both_links_at_once():
    clock, arrived = Clock(), []
    here, there = (Node(clock, Cluster(1, link_bytes_per_second=100, link_latency_seconds=0.1)) for _ in range(2))
    for _ in range(2):
        here.send(there, 50, lambda: arrived.append(clock.now))
    clock.run(5)
    assert arrived == pytest.approx([0.6, 1.1])


def test_a_server_does_one_thing_after_another():
    clock, ended = Clock(), []
    server = Server(Node(clock, Cluster(1)))
    for _ in range(3):
        server.do(1.0, lambda: ended.append(clock.now))
    clock.run(2.5)
    assert ended == [1.0, 2.0]
    assert server.work == 2.0


# -- the simulation is held to the paper -----------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["together", "beside", "apart"])
def test_one_actor_does_what_the_paper_says(placement):
    cluster = Cluster(1, placement=placement)
    found = simulate(ATARI, cluster)
    assert found.frames_per_second == pytest.approx(bound(ATARI, cluster).frames_per_second, rel=0.02)
    assert found.bottleneck == bound(ATARI, cluster).bottleneck == "actors"


SLOW = {  # everything is fast but one thing
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
def test_whatever_alone_is_slow_is_the_bottleneck(name):
    found, paper = simulate(*SLOW[name]), bound(*SLOW[name])
    assert (found.bottleneck, paper.bottleneck) == (name, name)
    assert found.frames_per_second == pytest.approx(paper.frames_per_second, rel=0.05)
    used = max(value for resource, value in found.utilisation.items() if resource.startswith(name))
    assert used == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("link", ["trajectories", "weights", "batches", "requests"])
def test_each_kind_of_message_can_fill_a_link(link):
    m, c = {
        "trajectories": (
            replace(FAST, trajectory_bytes=1e8, updates_per_move=0.25 / 640),
            Cluster(16, placement="apart"),
        ),
        "weights": (replace(FAST, weights_bytes=1e9), Cluster(16)),
        "batches": (replace(FAST, trajectory_bytes=1e7, updates_per_move=8 / 640), Cluster(16, placement="apart")),
        "requests": (replace(FAST, trajectory_bytes=1e8, environment_seconds=0.1), Cluster(16, inference=SHARED)),
    }[link]
    found, paper = simulate(m, c), bound(m, c)
    assert found.bottleneck == paper.bottleneck == "network"
    assert found.frames_per_second == pytest.approx(paper.frames_per_second, rel=0.05)
    side = "network out" if link == "weights" else "network in"
    assert found.utilisation[side] > 0.95


@pytest.mark.parametrize("name", ["learner", "replay", "network"])
def test_a_thousand_actors_reach_the_bound_of_what_saturates(name):
    m, c = SLOW[name]
    c = replace(c, actors=1000)
    found = simulate(m, c, long_enough(m, c, 6))
    assert found.frames_per_second == pytest.approx(bound(m, c).frames_per_second, rel=0.05)
    assert found.bottleneck == name


CLUSTERS = scenarios(ATARI, Cluster(1)) | {
    "replay twice": (replace(ATARI, updates_per_move=2 / 640, update_seconds=0.01), Cluster(1, shards=2)),
    "batches of four": (replace(ATARI, batch_moves=4 * 640, update_seconds=0.1), Cluster(1, queue=1)),
    "two in flight": (replace(ATARI, update_seconds=0.01), Cluster(1, in_flight=2, link_bytes_per_second=1.25e8)),
    "some wake": (replace(ATARI, update_seconds=0.01), Cluster(1, wake="some")),
    "uneven": (replace(ATARI, actor_spread=0.5, update_seconds=0.01), Cluster(1)),
    "together": (ATARI, Cluster(1, placement="together", cores=2)),
    "inference": (replace(ATARI, environment_seconds=0.1, inference_seconds=0.01), Cluster(1, inference=SHARED)),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_no_simulation_beats_the_paper_and_no_move_is_lost(name):
    m, c = CLUSTERS[name]
    for actors in (1, 5, 30):
        cluster = replace(c, actors=actors)
        found = simulate(m, cluster)
        assert 0 < found.frames_per_second < 1.015 * bound(m, cluster).frames_per_second  # unrolls are of chance length
        assert found.produced == pytest.approx(found.learnt + found.waiting)
        assert found.produced > 100 * m.moves
        assert all(0 <= value <= 1 for value in found.utilisation.values())


@pytest.mark.parametrize("name", scenarios(ATARI, Cluster(1)))
def test_more_actors_never_make_less_where_they_bring_their_own_cores(name):
    m, c = scenarios(ATARI, Cluster(1, wake="some"))[name]
    rates = [row.simulated for row in predict(m, c, (1, 4, 16, 64, 256), rounds=8)]
    assert all(more > 0.9 * fewer for fewer, more in pairwise(rates)), rates
    assert rates[-1] > 1.5 * rates[0]


def test_the_same_seed_gives_the_same_figures_and_another_gives_others():
    first, again, other = (simulate(FAST, Cluster(3), 100, seed) for seed in (0, 0, 1))
    assert first == again
    assert first.frames_per_second != other.frames_per_second
    assert first.frames_per_second == pytest.approx(other.frames_per_second, rel=0.02)


# -- lag and back-pressure -------------------------------------------------------------------------------------------


def most_lag(m: Measured, c: Cluster) -> float:
    """What shards may owe, what may be in flight or on its way to the learner, and what is learnt meanwhile."""
    unrolls = c.shards * (c.queue + 1) + c.actors * c.in_flight
    slow = 2 * (m.actor_seconds + 0.1) / m.update_seconds
    return unrolls * m.moves / m.moves_per_update + c.prefetch + 1 + slow


@pytest.mark.parametrize(
    "cluster", [Cluster(32), Cluster(32, shards=4), Cluster(32, in_flight=3), Cluster(32, queue=64)]
)
def test_lag_is_small_while_the_learner_keeps_up_and_then_bounded_by_back_pressure(cluster):
    keeps_up, slow = replace(ATARI, update_seconds=0.001), replace(ATARI, update_seconds=0.1)
    little, much = simulate(keeps_up, replace(cluster, actors=2)), simulate(slow, cluster)
    assert little.lag < 3 * cluster.in_flight
    assert much.utilisation["learner"] > 0.97
    assert much.lag > 10
    assert much.lag <= much.lag_max <= most_lag(slow, cluster)


def test_a_longer_queue_means_older_data_and_no_more_frames_once_the_learner_is_busy():
    short, long = (simulate(ATARI, Cluster(16, queue=queue)) for queue in (8, 64))
    assert long.lag > short.lag + 40
    assert long.frames_per_second == pytest.approx(short.frames_per_second, rel=0.01)


def test_waking_a_few_actors_keeps_lag_from_growing_with_their_number():
    everyone, few = (simulate(ATARI, Cluster(300, wake=wake)) for wake in ("all", "some"))
    assert everyone.lag > 100
    assert few.lag < 30
    assert few.frames_per_second >= 0.99 * everyone.frames_per_second


def test_a_batch_of_more_trajectories_than_a_queue_may_hold_still_comes_together():
    found = simulate(replace(ATARI, batch_moves=10 * 640), Cluster(2, queue=1))
    assert found.learnt > 0


def test_two_unrolls_in_flight_hide_the_way_to_the_replay():
    slow = replace(ATARI, update_seconds=0.01)
    one, two = (simulate(slow, Cluster(1, in_flight=n, link_bytes_per_second=2e7)) for n in (1, 2))
    assert two.frames_per_second > 1.2 * one.frames_per_second


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_without_batches_on_their_way_the_learner_waits_for_each(prefetch):
    m = replace(FAST, update_seconds=0.1, sample_seconds=0.3)
    cluster = Cluster(16, shards=8, prefetch=prefetch)
    found, paper = simulate(m, cluster), bound(m, cluster)
    assert paper.frames_per_second == pytest.approx(UNROLL * (prefetch + 1) / 0.4)
    assert found.frames_per_second == pytest.approx(paper.frames_per_second, rel=0.02)


def test_inference_waits_for_its_minimum_no_longer_than_the_timeout():
    m = replace(FAST, environment_seconds=0.02, inference_seconds=0.001)
    one, two = (Cluster(n, inference=SharedInference(2, 16, 0.05)) for n in (1, 2))
    alone, pair = simulate(m, one, 50), simulate(m, two, 50)
    seconds = 0.02 + 20 * (0.05 + 0.001)
    assert alone.frames_per_second == pytest.approx(UNROLL / seconds, rel=0.01)
    assert bound(m, one).frames_per_second == pytest.approx(UNROLL / seconds, rel=0.01)
    assert pair.frames_per_second > 4 * alone.frames_per_second


# -- figures, table, picture -----------------------------------------------------------------------------------------


def figures(tmp_path, **more):
    path = tmp_path / "cluster.json"
    points = [{"actors": 1, "frames_per_second": 7000.0}, {"actors": 2, "frames_per_second": 8000}]
    path.write_text(json.dumps({"measured": asdict(ATARI), "points": points} | more))
    return path


def test_figures_survive_a_file(tmp_path):
    assert read(figures(tmp_path)) == (ATARI, [Point(1, 7000.0), Point(2, 8000)])
    assert measured(asdict(ATARI)) == ATARI


def changed(**more):
    return asdict(ATARI) | more


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"measured": changed(update_seconds=0)}, "update_seconds=0 must be positive"),
        ({"measured": changed(add_seconds=-1)}, "add_seconds=-1 must be at least 0"),
        ({"measured": changed(actor_seconds=float("nan"))}, "actor_seconds=nan must be positive"),
        ({"measured": changed(envs="many")}, "envs of .* cannot be 'many'"),
        ({"measured": changed(updat_seconds=1)}, "unknown figure 'updat_seconds': did you mean update_seconds"),
        ({"measured": {"envs": 32}}, "lacks unroll, frames_per_move, actor_seconds"),
        ({"measured": []}, "has no figures"),
        ({"points": [{"actors": 0, "frames_per_second": 1}]}, "positive actors and frames_per_second"),
        ({"points": [{"actors": 1}]}, "positive actors and frames_per_second"),
        ({"points": [3]}, "positive actors and frames_per_second"),
        ({"points": 3}, "positive actors and frames_per_second"),
    ],
)
def test_bad_figures_are_refused_in_one_sentence(tmp_path, more, words):
    with pytest.raises(UserError, match=words) as told:
        read(figures(tmp_path, **more))
    assert "\n" not in str(told.value)


def test_a_file_that_is_not_there_or_not_json_is_told_so(tmp_path):
    with pytest.raises(UserError, match=r"bestiary bench cluster --json .* makes it"):
        read(tmp_path / "none.json")
    (tmp_path / "odd.json").write_text("{")
    with pytest.raises(UserError, match=r"odd\.json cannot be read"):
        read(tmp_path / "odd.json")


@pytest.mark.parametrize("wrong", [{"actors": 0}, {"cores": 0}, {"link_bytes_per_second": -1.0}, {"queue": 0}])
def test_an_impossible_cluster_is_refused(wrong):
    with pytest.raises(UserError, match=f"{next(iter(wrong))}=.* must be positive"):
        Cluster(**{"actors": 1} | wrong)


def test_impossible_batching_and_no_time_are_refused():
    with pytest.raises(UserError, match="minimum=9 must be at most maximum=8"):
        SharedInference(9, 8)
    with pytest.raises(UserError, match="seconds=0 must be positive"):
        simulate(ATARI, Cluster(1), 0)
    with pytest.raises(UserError, match="rounds=0 must be at least 1"):
        main(Settings(rounds=0))


def test_measured_points_are_compared_with_a_machine_of_as_many_cores():
    m, c = one_machine(ATARI, Cluster(1, cores=8, queue=5))
    assert (c.cores, c.placement, c.queue) == (2, "together", 5)
    assert bound(m, replace(c, actors=9)).bottleneck == "cores"


def test_saturation_is_where_the_paper_stops_naming_actors():
    m, c = scenarios(ATARI, Cluster(1))["10 Gbit/s, learner 10x"]
    actors, limit = saturation(m, c) or (0, "")
    assert limit == bound(m, replace(c, actors=actors)).bottleneck == "learner"
    assert bound(m, replace(c, actors=actors - 1)).bottleneck == "actors"
    assert saturation(m, c, most=actors - 1) is None


def test_the_command_prints_measured_beside_simulated_and_what_is_used_most(tmp_path, capsys):
    out = tmp_path / "out.json"
    assert bestiary(["bench", "scaling", "--figures", str(figures(tmp_path)), "--rounds", "2", "--json", str(out)]) == 0
    text = capsys.readouterr().out
    line = next(line for line in text.splitlines() if "1 Gbit/s " in line and " 1,000 " in line)
    assert [cell.strip() for cell in line.split("|")][3:6] == ["10,240", "10,240", "learner"]
    machine = json.loads(out.read_text())["one machine"]
    assert [row["actors"] for row in machine] == [1, 2]
    row = next(line for line in text.splitlines() if " 7,000 " in line)
    assert f"{machine[0]['simulated'] / 7000:.2f}" in row


def test_the_picture_is_drawn_where_it_was_asked_for(tmp_path):
    pytest.importorskip("matplotlib")
    found = {name: predict(*pair, (1, 1000), rounds=1) for name, pair in scenarios(ATARI, Cluster(1)).items()}
    draw(ATARI, [Point(1, 7000.0)], tmp_path / "new" / "scaling.png", found=found)
    assert (tmp_path / "new" / "scaling.png").stat().st_size > 10_000


def test_a_picture_that_cannot_be_is_refused_before_any_work(tmp_path):
    with pytest.raises(UserError, match=r"must end in \.png or \.svg"):
        main(Settings(figures=tmp_path / "never read", out=tmp_path / "scaling.pdf"))
