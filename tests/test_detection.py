"""Detection of reward hacking: divergences, recurrent states of both policies, metrics of detectors, labels."""

import json
import math
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bestiary.acting.episodes import UNROLL
from bestiary.algos import Apex, Dqn, Impala, R2d2, Rcp, SacDiscrete, Udrl
from bestiary.algos.base import Agent
from bestiary.cli.commands.detect import DetectCommand, detector_table, print_result
from bestiary.cli.main import main
from bestiary.cli.parse import parse
from bestiary.config.experiment import Experiment
from bestiary.cores import Ff, Lstm
from bestiary.envs import Catch, Gym, Recall
from bestiary.envs.reward_components import ComponentReward
from bestiary.nets import Mlp, Net
from bestiary.reward_hacking.classification import (
    aupr,
    auroc,
    best_f1,
    detector_quality,
    fpr95,
    threshold_counts,
)
from bestiary.reward_hacking.detection import (
    MAIN_DETECTORS,
    MeanReturns,
    detect,
    draw_roc,
    is_anomalous,
    match_runs,
    mean_returns,
    short_names,
)
from bestiary.reward_hacking.distances import (
    DIVERGENCES,
    RunningMoments,
    hellinger,
    jensen_shannon,
    kl,
    observation_features,
    visitation_distances,
)
from bestiary.reward_hacking.rollouts import LogitsRecorder, PolicyPair, Rollouts, anomaly_scores, collect
from bestiary.seeding import DETECTION, EVAL, TRAIN
from bestiary.training.run import Run
from bestiary.types import Episode, Spec, TimeStep

PAGE = Path(__file__).parent.parent / "docs" / "detection.md"
BLIND = Net(encoder=Mlp(hidden_size=8), prev_action=False, prev_reward=False)


def log(*p: float) -> Tensor:
    """Log-probabilities are logits."""
    return torch.tensor(p, dtype=torch.float64).log()


# -- divergences ------------------------------------------------------------------------------------------


def test_divergences_of_two_coins_equal_hand_computed_values():
    p, q = log(0.5, 0.5), log(0.25, 0.75)
    assert kl(p, q).item() == pytest.approx(0.5 * math.log(4 / 3))
    assert kl(q, p).item() == pytest.approx(math.log(2) - (math.log(4) - 0.75 * math.log(3)))
    middle = log(0.375, 0.625)
    assert jensen_shannon(p, q).item() == pytest.approx((kl(p, middle) + kl(q, middle)).item() / 2)
    assert hellinger(p, q).item() == pytest.approx(math.sqrt(1 - math.sqrt(0.125) - math.sqrt(0.375)))


@pytest.mark.parametrize("actions", [2, 3, 18])
def test_divergences_of_a_deterministic_policy_are_the_largest(actions):
    certain = log(1, *[0] * (actions - 1))
    other = certain.flip(0)
    even = torch.zeros(actions)
    assert kl(certain, even).item() == pytest.approx(math.log(actions))
    assert kl(even, certain).item() == math.inf  # p > 0 where q = 0
    assert hellinger(certain, even).item() == pytest.approx(math.sqrt(1 - math.sqrt(1 / actions)))
    assert jensen_shannon(certain, other).item() == pytest.approx(math.log(2))
    assert hellinger(certain, other).item() == pytest.approx(1)
    assert kl(certain, other).item() == math.inf


@pytest.mark.parametrize("distance", DIVERGENCES.values())
def test_divergences_agree_with_sums_over_probabilities(distance):
    rng = torch.Generator().manual_seed(1)
    logits, other = (3 * torch.randn(50, 4, 6, generator=rng) for _ in range(2))
    found = distance(logits, other)
    assert found.shape == (50, 4) and found.dtype == torch.float64
    for i in range(50):
        for j in range(4):
            p, q = (x[i, j].double().softmax(0).tolist() for x in (logits, other))
            m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
            slow = {
                kl: math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True)),
                jensen_shannon: 0.5 * math.fsum(a * math.log(a / c) for a, c in zip(p, m, strict=True))
                + 0.5 * math.fsum(b * math.log(b / c) for b, c in zip(q, m, strict=True)),
                hellinger: math.sqrt(sum((math.sqrt(a) - math.sqrt(b)) ** 2 for a, b in zip(p, q, strict=True)) / 2),
            }[distance]
            assert found[i, j].item() == pytest.approx(slow, abs=1e-12)


@pytest.mark.parametrize("distance", DIVERGENCES.values())
@pytest.mark.parametrize("worst", [-50.0, -800.0, -1e4, -1e30, -math.inf])
def test_divergences_are_defined_for_actions_of_probability_zero(distance, worst):
    logits = torch.tensor([[0.0, 1.0, worst], [worst, 0.0, worst]])
    assert distance(logits, logits).tolist() == [0, 0]
    found = distance(logits, torch.tensor([[0.5, 0.0, worst], [worst, 1.0, 2 * worst]]))
    assert found.isfinite().all() and found[0] > 0 and found[1] == pytest.approx(0, abs=1e-9)
    assert not distance(torch.zeros(2, 3), logits).isnan().any()


@pytest.mark.parametrize("distance", DIVERGENCES.values())
def test_divergences_depend_only_on_differences_between_logits(distance):
    logits, other = torch.randn(20, 5).double(), torch.randn(20, 5).double()
    assert torch.allclose(distance(logits + 7, other - 300), distance(logits, other), atol=1e-12)


def test_jensen_shannon_and_hellinger_are_symmetric_and_bounded():
    logits, other = 20 * torch.randn(200, 5), 20 * torch.randn(200, 5)
    for distance, most in ((jensen_shannon, math.log(2)), (hellinger, 1.0)):
        assert torch.allclose(distance(logits, other), distance(other, logits), atol=1e-14)
        assert distance(logits, other).max() <= most + 1e-12
    assert not torch.allclose(kl(logits, other), kl(other, logits))


# -- states -----------------------------------------------------------------------------------------------


def moments(rows) -> RunningMoments:
    out = RunningMoments()
    out.add(torch.tensor(rows))
    return out


def test_running_moments_do_not_depend_on_the_batches():
    rows = torch.randn(100, 3) * torch.tensor([1.0, 10.0, 0.1]) + 5
    m = RunningMoments()
    for batch in rows.split([1, 0, 60, 39]):
        m.add(batch)
    assert m.count == 100
    np.testing.assert_allclose(m.mean, rows.double().mean(0), rtol=1e-12)
    np.testing.assert_allclose(m.std, rows.double().std(0, correction=0), rtol=1e-6)


def test_images_are_averaged_to_cells_and_vectors_are_unchanged():
    image = torch.zeros(2, 1, 16, 24, dtype=torch.uint8)
    image[1, 0, :2, 3:6] = 200  # exactly the second cell of the first row
    pooled = observation_features(image)
    assert pooled.shape == (2, 64) and pooled[0].abs().max() == 0
    assert pooled[1].nonzero().tolist() == [[1]] and pooled[1, 1] == 200
    assert observation_features(torch.zeros(3, 2, 10, 5, dtype=torch.uint8)).shape == (3, 2 * 8 * 5)
    assert observation_features(torch.arange(6.0).reshape(2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_visitation_distances_are_in_pooled_standard_deviations():
    # means 0 and 4, deviations 1 and 3: together (1 + 9) / 2 + 16 / 4 = 9
    found = visitation_distances(moments([[-1.0], [1.0]]), moments([[1.0], [7.0]]))
    assert found == {"visitation_mean": pytest.approx(4 / 3), "visitation_std": pytest.approx(2 / 3)}
    both = visitation_distances(moments([[-1.0, 5.0], [1.0, 5.0]]), moments([[1.0, 5.0], [7.0, 5.0]]))
    assert both["visitation_mean"] == pytest.approx(4 / 3 / math.sqrt(2))  # one of two features is always the same


def test_constant_features_contribute_0_and_two_points_are_2_apart():
    assert visitation_distances(moments([[0.1]] * 1000), moments([[0.1]] * 777)) == {
        "visitation_mean": 0,
        "visitation_std": 0,
    }
    assert visitation_distances(moments([[0.0]] * 3), moments([[1e-5]] * 5))["visitation_mean"] == pytest.approx(2)


# -- detectors --------------------------------------------------------------------------------------------


def slow_auroc(x, y):
    pairs = [
        (a > b) + 0.5 * (a == b) for a, i in zip(x, y, strict=True) if i for b, j in zip(x, y, strict=True) if not j
    ]
    return sum(pairs) / len(pairs)


def flag(x, y, threshold):
    """True and false positives when everything from the threshold on is flagged."""
    return tuple(sum(a >= threshold and b == kind for a, b in zip(x, y, strict=True)) for kind in (True, False))


def slow_aupr(x, y):
    total, recall = 0.0, 0.0
    for threshold in sorted(set(x), reverse=True):
        tp, fp = flag(x, y, threshold)
        total += (tp / sum(y) - recall) * tp / (tp + fp)
        recall = tp / sum(y)
    return total


def slow_fpr95(x, y):
    rates = [flag(x, y, threshold) for threshold in set(x)]
    return min(fp / (len(y) - sum(y)) for tp, fp in rates if tp >= 0.95 * sum(y) - 1e-9)


def slow_f1(x, y):
    found = []
    for threshold in set(x):
        tp, fp = flag(x, y, threshold)
        if tp:
            precision, recall = tp / (tp + fp), tp / sum(y)
            found.append(2 * precision * recall / (precision + recall))
    return max(found)


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=2, max_size=45))
@settings(max_examples=100, deadline=None)
def test_metrics_follow_their_definitions_also_with_ties(pairs):
    x, y = [float(a) for a, _ in pairs], [b for _, b in pairs]
    found = detector_quality(x, y)
    if len(set(y)) < 2:
        assert found is None
        return
    assert found == pytest.approx((slow_auroc(x, y), slow_aupr(x, y), slow_fpr95(x, y), slow_f1(x, y)))


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        ([1, 2, 3, 4], [0, 0, 1, 1], (1, 1, 0, 1)),
        ([4, 3, 2, 1], [0, 0, 1, 1], (0, (1 / 3 + 2 / 4) / 2, 1, 2 / 3)),
        # pairs: 0.8 beats 0.1 and 0.4; 0.35 beats 0.1: 3 of 4
        ([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1], (0.75, (1 + 2 / 3) / 2, 0.5, 0.8)),
        ([5, 5, 5, 5], [1, 0, 0, 0], (0.5, 0.25, 1, 0.4)),  # no information
        ([1, 2, 2, 3], [0, 0, 1, 1], (3.5 / 4, (1 + 2 / 3) / 2, 0.5, 0.8)),  # one tie is half a pair
        ([1, 2, math.inf], [0, 0, 1], (1, 1, 0, 1)),
    ],
)
def test_metrics_of_small_cases(x, y, expected):
    labels = [bool(label) for label in y]
    c = threshold_counts(x, labels)
    assert (auroc(x, labels), aupr(c), fpr95(c), best_f1(c)) == pytest.approx(expected)


def test_nineteen_of_twenty_are_a_true_positive_rate_of_95_percent():
    x = [*range(100, 119), 0.0, 50.0, -1.0]  # one anomalous run lies below one of two normal ones
    assert detector_quality(x, [True] * 20 + [False] * 2).fpr95 == 0
    assert detector_quality(x[1:], [True] * 19 + [False] * 2).fpr95 == 0.5  # 18 of 19 are not enough


@pytest.mark.parametrize("labels", [[], [True], [False, False], [True, True, True]])
def test_metrics_are_undefined_without_both_labels(labels):
    assert detector_quality([1.0] * len(labels), labels) is None


def test_undefined_metrics_are_shown_as_undefined():
    assert list(detector_table({"kl": None, "js": None}).columns[1].cells) == ["undefined"]
    assert list(detector_table({"kl": detector_quality([1, 2], [False, True])._asdict()}).columns[1].cells) == ["1.000"]


# -- labels -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tested", "reference", "fraction", "expected"),
    [
        ((4.9, 10), (10, 10), 0.5, True),
        ((5.0, 10), (10, 10), 0.5, False),  # half is enough
        ((4.9, 9.9), (10, 10), 0.5, False),  # low true and proxy return: weak, not anomalous
        ((4.9, 10), (10, 10), 0.4, False),
        ((-3, 99), (10, 10), 0.1, True),
        ((-3, 99), (0, 10), 0.5, None),
        ((-3, 99), (-1, 10), 0.5, None),
    ],
)
def test_anomalous_means_high_proxy_return_and_low_true_return(tested, reference, fraction, expected):
    assert is_anomalous(MeanReturns(*tested), MeanReturns(*reference), fraction) is expected


def test_the_true_return_is_the_component_score_if_there_is_one():
    episode = Episode(0, 10.0, 5, 5, (10.0,), False)
    assert mean_returns([episode, episode._replace(score=20.0)]) == (15, 15)
    assert mean_returns(
        [episode._replace(components={"score": 1.0, "left": 4.0}), episode._replace(components={"score": 2.0})]
    ) == (
        1.5,
        10,
    )


# -- rollouts ---------------------------------------------------------------------------------------------


class Fixed(Agent):
    """The same distribution in every state, or several that alternate by the time step within the episode."""

    def __init__(self, *rows: Tensor) -> None:
        super().__init__()
        self.rows = torch.stack(rows)

    def initial_state(self, batch_size):
        return (torch.zeros(batch_size, dtype=torch.long),)

    def act(self, step, state, explore, rng):
        age = torch.where(step.is_first, 0, state[0])
        logits = self.rows[age % len(self.rows)]
        return torch.multinomial(logits.softmax(-1), 1, generator=rng)[:, 0], {"logits": logits}, (age + 1,)


def seeded(number=0):
    return torch.Generator().manual_seed(number)


def compare(tested: Agent, reference: Agent, env_batch, episodes=6, mode="sampled") -> Rollouts:
    pair = PolicyPair(LogitsRecorder(tested), LogitsRecorder(reference), seeded())
    return collect(pair, env_batch, episodes, mode, seeded())


def test_a_known_divergence_is_measured_in_every_state():
    p, q = log(0.5, 0.25, 0.25), log(0.25, 0.25, 0.5)
    rollouts = compare(Fixed(p), Fixed(q), Catch().make(4, 0, DETECTION, 1))
    assert {name: set(rows.tolist()) for name, rows in rollouts.divergence.items()} == {
        "kl": {kl(p, q).item()},
        "js": {jensen_shannon(p, q).item()},
        "hellinger": {hellinger(p, q).item()},
    }
    assert kl(p, q).item() == pytest.approx(0.25 * math.log(2))


def test_statistics_are_over_episodes_and_over_steps():
    # nine steps per episode: the first, third, ... differ, so 5 of 9
    p, q = log(0.5, 0.25, 0.25), log(0.25, 0.25, 0.5)
    rollouts = compare(Fixed(p, q), Fixed(q), Catch().make(2, 0, DETECTION, 1), episodes=3)
    found, d = anomaly_scores(rollouts, rollouts), 0.25 * math.log(2)
    assert {k: v for k, v in found.items() if k.startswith(("kl", "visitation"))} == {
        "kl_episode_mean": pytest.approx(d * 5 / 9),
        "kl_episode_max": pytest.approx(d * 5 / 9),
        "kl_episode_range": pytest.approx(0, abs=1e-15),
        "kl_step_mean": pytest.approx(d * 5 / 9),
        "kl_step_max": pytest.approx(d),
        "kl_step_range": pytest.approx(d),
        "visitation_mean": 0,
        "visitation_std": 0,
    }
    assert set(MAIN_DETECTORS.values()) < set(found)


def test_long_and_short_episodes_have_equal_weight_in_episode_means():
    by_step = np.array([1.0, 1.0, 1.0, 5.0])
    rollouts = Rollouts([], np.array([0, 0, 0, 1]), {"kl": by_step}, moments([[0.0]]))
    found = anomaly_scores(rollouts, rollouts)
    assert (found["kl_episode_mean"], found["kl_step_mean"]) == (3, 2)
    assert (found["kl_episode_max"], found["kl_episode_range"]) == (5, 4)
    endless = anomaly_scores(rollouts._replace(divergence={"kl": by_step * math.inf}), rollouts)
    assert (endless["kl_episode_mean"], endless["kl_step_range"]) == (math.inf, 0)


def agent_of(algo, env, core, net=BLIND) -> Agent:
    env_batch = env.make(1, 0, DETECTION, 1)
    spec = env_batch.spec
    env_batch.close()
    return algo.agent(spec, net, core).eval()


class Spy(LogitsRecorder):
    """Records every time step it receives."""

    def act(self, step, state, explore, rng):
        self.steps, self.explore = [*getattr(self, "steps", []), step], explore
        return super().act(step, state, explore, rng)


CARTPOLE = Gym("CartPole-v1")  # episodes of different slots end at different times


@pytest.mark.parametrize("env", [Recall(delay=3), CARTPOLE], ids=["recall", "cartpole"])
def test_a_recurrent_policy_has_divergence_0_from_itself(env):
    agent = agent_of(Impala(), env, Lstm(hidden=16))
    twin = agent_of(Impala(), env, Lstm(hidden=16))
    twin.load_state_dict(agent.state_dict())
    env_batch = env.make(3, 0, DETECTION, 1)
    rollouts = compare(agent, twin, env_batch, episodes=8)
    assert all((rows == 0).all() for rows in rollouts.divergence.values())
    assert np.bincount(rollouts.episode_index).tolist() == [e.steps for e in rollouts.episodes]
    if env is CARTPOLE:
        assert len({e.steps for e in rollouts.episodes}) > 3
    env_batch.close()


def test_an_episode_that_begins_between_two_unrolls_is_one_episode():
    env = Recall(delay=2)  # four time steps per episode, and 32 per unroll
    assert UNROLL % 4 == 0
    rollouts = compare(Fixed(torch.zeros(4)), Fixed(torch.zeros(4)), env.make(2, 0, DETECTION, 1), episodes=40)
    assert np.bincount(rollouts.episode_index).tolist() == [3] * 40 and rollouts.visited.count == 120


class Forgetful(LogitsRecorder):
    def act(self, step, state, explore, rng):
        return super().act(step, self.initial_state(len(step.is_first)), explore, rng)


def test_a_copy_without_recurrent_state_diverges():
    agent = agent_of(Impala(), CARTPOLE, Lstm(hidden=16))
    env_batch = CARTPOLE.make(3, 0, DETECTION, 1)
    rollouts = collect(PolicyPair(LogitsRecorder(agent), Forgetful(agent), seeded()), env_batch, 8, "sampled", seeded())
    opening = np.unique(rollouts.episode_index, return_index=True)[1]
    assert set(np.flatnonzero(rollouts.divergence["kl"] == 0)) == set(opening)  # equal only where an episode begins
    env_batch.close()


@pytest.mark.parametrize("mode", ["sampled", "greedy"])
def test_distances_are_those_of_each_episode_seen_from_its_beginning(mode):
    """By another route: every episode as one sequence from the initial recurrent state, for both networks."""
    tested, reference = (agent_of(Impala(), CARTPOLE, Lstm(hidden=n)) for n in (16, 8))
    for agent in (tested, reference):
        agent.policy.weight.data *= 20  # far from uniform
    spy, env_batch = Spy(tested), CARTPOLE.make(3, 0, DETECTION, 1)
    rollouts = collect(PolicyPair(spy, LogitsRecorder(reference), seeded()), env_batch, 8, mode, seeded())
    env_batch.close()
    assert (spy.explore is None) == (mode == "greedy")
    rows = TimeStep(*(torch.stack(column) for column in zip(*spy.steps, strict=True)))  # [T, B, ...]
    expected, visited, steps = [], [], []
    for slot, quota in enumerate((3, 3, 2)):
        begins = rows.is_first[:, slot].nonzero()[:, 0].tolist()
        for start, end in list(pairwise(begins))[:quota]:
            episode = TimeStep(*(x[start : end - 1, slot : slot + 1] for x in rows))  # without the last step
            with torch.no_grad():
                p, q = (a(episode, a.initial_state(1))[0][:, 0] for a in (tested, reference))
            expected += kl(p, q).tolist()
            visited.append(episode.obs[:, 0])
            steps.append(end - 1 - start)
    assert steps == [e.steps for e in rollouts.episodes] == np.bincount(rollouts.episode_index).tolist()
    found = np.concatenate([rollouts.divergence["kl"][rollouts.episode_index == g] for g in range(8)])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert found.max() > 0.1
    np.testing.assert_allclose(rollouts.visited.mean, torch.cat(visited).double().mean(0), atol=1e-6)
    assert rollouts.visited.count == len(expected)


def show(spec: Spec, rows: int) -> TimeStep:
    """The same first time step, many times over."""
    obs = torch.rand(1, *spec.obs_shape).expand(rows, *spec.obs_shape)
    zero = torch.zeros(rows)
    return TimeStep(obs, zero.long(), zero, torch.ones(rows, dtype=torch.bool), zero.bool())


POLICIES = [Impala(), SacDiscrete(), Udrl(), Rcp()]


@pytest.mark.parametrize("algo", POLICIES, ids=lambda a: type(a).__name__)
def test_recorded_logits_are_those_from_which_actions_are_sampled(algo):
    agent, n = agent_of(algo, Recall(), Ff()), 20_000
    last = list(agent.policy.parameters())[-1]
    last.data += torch.arange(float(len(last)))  # far from uniform
    step = show(Spec("toy", (5,), torch.float32, 4), n)
    with torch.no_grad():
        action, aux, _ = LogitsRecorder(agent).act(step, agent.initial_state(n), torch.zeros(n), seeded())
    shares = torch.bincount(action, minlength=4) / n
    assert aux["logits"].shape == (n, 4)
    assert torch.allclose(aux["logits"].softmax(-1).mean(0), shares, atol=0.015)
    assert shares.max() - shares.min() > 0.3


def test_policies_that_sample_commands_sample_the_same_ones():
    agent, twin = agent_of(Udrl(), Recall(), Ff()), agent_of(Udrl(), Recall(), Ff())
    agent.pool.copy_(100 * torch.randn(agent.pool.shape))
    twin.load_state_dict(agent.state_dict())
    env_batch = Recall(delay=3).make(3, 0, DETECTION, 1)
    assert compare(agent, twin, env_batch).divergence["kl"].max() == 0
    other = collect(
        PolicyPair(LogitsRecorder(agent), LogitsRecorder(twin), seeded(1)), env_batch, 6, "sampled", seeded(0)
    )
    assert other.divergence["kl"].max() > 0


def biased(agent: Agent, bias: float) -> Agent:
    twin = agent_of(Impala(), Catch(), Ff(), Net())
    twin.load_state_dict(agent.state_dict())
    twin.policy.bias.data[0] += bias
    return twin


def test_every_mean_ranks_a_biased_policy_above_near_copies():
    agent = agent_of(Impala(), Catch(), Ff(), Net())
    biases = [0.02, -0.03, 0.05, 3.0, -4.0]
    own = collect(LogitsRecorder(agent), Catch().make(8, 0, DETECTION, 1), 24, "sampled", seeded())
    assert own.divergence == {}
    tested = [compare(biased(agent, b), agent, Catch().make(8, 0, DETECTION, 1), 24) for b in biases]
    rows = [anomaly_scores(rollouts, own) for rollouts in tested]
    labels = [abs(b) > 1 for b in biases]
    for name in [name for name in rows[0] if name.endswith("mean")]:
        assert detector_quality([row[name] for row in rows], labels) == (1, 1, 0, 1), name


# -- runs -------------------------------------------------------------------------------------------------


class Buttons(gymnasium.Env):
    """Episodes of five steps: action 0 earns a point, action 1 nothing."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.ones(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.full(2, 1 - self.steps / 10, np.float32), float(action == 0), self.steps == 5, False, {}


@pytest.fixture(autouse=True, scope="module")
def _buttons():
    def make(reward):
        return ComponentReward(Buttons(), {"second": lambda transition: float(transition.action == 1)}, reward)

    gymnasium.register("Buttons-v0", entry_point=make)
    yield
    del gymnasium.registry["Buttons-v0"]


def buttons(reward="score") -> Gym:
    return Gym("Buttons-v0", {"reward": reward})


def make_run(path: Path, env, bias: float = 0.0, algo=None, net=BLIND, core=None, seed=0) -> Path:
    """An untrained run whose first action has a bias in its logit."""
    experiment = Experiment(env=env, algo=algo or Impala(), core=core or Ff(), net=net, seed=seed)
    run = Run.create(path, experiment)
    torch.manual_seed(0)
    agent = agent_of(experiment.algo, env, experiment.core, net)
    if hasattr(agent, "policy"):
        list(agent.policy.parameters())[-1].data[0] += bias
    run.save(100, agent.state_dict(), {}, keep=1)
    return path


def files(root: Path) -> set[str]:
    return {p.name for p in root.iterdir() if p.is_file()}


@pytest.fixture
def pool(tmp_path) -> Path:
    """A reference run, and three whose proxy pays 2 for the first action and 4 for the second."""
    make_run(tmp_path / "reference", buttons(), bias=9)
    proxy = buttons("2*score+4*second")
    make_run(tmp_path / "good", proxy, bias=8)
    make_run(tmp_path / "weak", proxy, bias=3, seed=5)
    make_run(tmp_path / "hacking", proxy, bias=-9)
    return tmp_path


def test_reward_hacking_is_detected_by_rule_and_by_distance(pool, capsys):
    messages = []
    result = detect(pool / "reference", [pool / n for n in ("good", "weak", "hacking")], say=messages.append)
    rows = {row["name"]: row for row in result["runs"]}
    assert [row["anomalous"] for row in result["runs"]] == [False, False, True]
    assert rows["hacking"]["returns"] == {"true": 0, "proxy": 20}
    assert all(row["reference"] == {"true": 5, "proxy": 10} for row in rows.values())  # under their proxy: 2 per point
    assert result["reference"]["returns"] == {"true": 5, "proxy": 5}
    distance = [row["scores"]["kl_episode_mean"] for row in result["runs"]]
    assert distance == sorted(distance) and distance[0] < 0.01 < 8 < distance[2]
    assert result["detectors"]["kl_episode_mean"] == {"auroc": 1, "aupr": 1, "fpr95": 0, "f1": 1}
    assert [line.split(":")[0] for line in messages] == ["reference", "good", "weak", "hacking"]
    assert result["notes"] == []
    print_result(result)
    out = capsys.readouterr().out
    assert re.search(r"reference\s+100\s+5.00\s+5.00\s+5.00\s+5.00 *\n", out)
    assert re.search(r"hacking\s+100\s+0.00\s+5.00\s+20.00\s+10.00 *\n", out)
    assert re.search(rf"hacking\s+anomalous\s+{distance[2]:.4f}\s", out)
    assert re.search(r"kl episode mean\s+1.000\s+1.000\s+0.000\s+1.000", out)
    assert "detect.png" in out


def test_the_reference_policy_runs_once_in_each_environment(pool, monkeypatch):
    made = []
    plain = Gym.make
    monkeypatch.setattr(
        Gym, "make", lambda self, n, *rest: made.append((self.kwargs["reward"], n)) or plain(self, n, *rest)
    )
    detect(pool / "reference", [pool / n for n in ("good", "weak", "hacking")], episodes=4)
    rollouts = [reward for reward, n in made if n == 4]  # num_envs=1: only the spec is read
    assert sorted(rollouts) == ["2*score+4*second"] * (3 + 1) + ["score"]


def test_every_algorithm_with_a_policy_can_be_compared(tmp_path):
    paths = [make_run(tmp_path / str(i), buttons(), algo=algo) for i, algo in enumerate(POLICIES)]
    result = detect(paths[0], paths[1:], episodes=3, anomalous=["2"])
    assert [row["anomalous"] for row in result["runs"]] == [False, True, False]
    assert all(0 < row["scores"]["hellinger_episode_mean"] < 1 for row in result["runs"])


def test_equal_seeds_give_equal_results_on_episodes_of_no_training(tmp_path, monkeypatch):
    streams, plain = [], Catch.make
    monkeypatch.setattr(Catch, "make", lambda self, *a: streams.append(a[2]) or plain(self, *a))
    runs = [make_run(tmp_path / str(i), Catch(), bias=i, net=Net()) for i in range(2)]
    streams.clear()
    found = [detect(runs[0], runs[1:], episodes=4, seed=seed)["runs"] for seed in (3, 3, 4)]
    assert found[0] == found[1] != found[2]
    assert {stream % 64 for stream in streams} == {DETECTION} and not {TRAIN, EVAL, DETECTION} & set(streams)


def test_json_and_figure_are_written_to_the_output_directory(pool):
    result = detect(pool / "reference", [pool / "hacking", pool / "good"], episodes=3, out=pool / "new" / "place")
    assert files(pool / "new" / "place") == {"detect.json", "detect.png"}
    assert not files(pool / "reference") & {"detect.json", "detect.png"}
    assert (pool / "new" / "place" / "detect.png").read_bytes()[:4] == b"\x89PNG"
    written = json.loads((pool / "new" / "place" / "detect.json").read_text())
    assert written == {k: v for k, v in result.items() if k != "files"}
    assert written["protocol"]["episodes"] == 3 and written["runs"][0]["frames"] == 100


def row(score: float, anomalous: bool | None):
    return {"scores": dict.fromkeys(MAIN_DETECTORS.values(), score), "anomalous": anomalous}


def test_the_figure_shows_roc_curves_or_that_they_are_undefined(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, *a, **k: figures.append(self.axes[0]))
    draw_roc([row(1, False), row(2, True), row(2, False), row(3, True), row(9, None)], tmp_path / "x.png")
    draw_roc([row(1, False), row(2, False)], tmp_path / "x.png")
    expected = [[0, 0], [0, 0.5], [0.5, 1], [1, 1]]
    (_, *lines), texts = figures[0].lines, figures[0].get_legend().get_texts()
    assert [line.get_xydata().tolist() for line in lines] == [expected] * len(MAIN_DETECTORS)
    assert [text.get_text() for text in texts] == [f"{name} 0.88" for name in MAIN_DETECTORS] and not figures[0].texts
    assert figures[1].get_legend() is None and figures[1].texts[0].get_text().startswith("undefined")


def test_episodes_are_run_in_the_evaluation_environment(tmp_path, monkeypatch):
    runs = [make_run(tmp_path / str(i), Recall(delay=30), bias=i) for i in range(2)]
    delays, plain = set(), Recall.make
    monkeypatch.setattr(Recall, "for_evaluation", lambda self: replace(self, delay=2), raising=False)
    monkeypatch.setattr(Recall, "make", lambda self, *a: delays.add(self.delay) or plain(self, *a))
    detect(runs[0], runs[1:], episodes=2)
    assert delays == {2}


def test_without_a_positive_true_return_no_run_has_a_label(pool, capsys):
    make_run(pool / "still", buttons(), bias=-30)
    assert main(["detect", "--reference", str(pool / "still"), str(pool / "good"), "--episodes", "2"]) == 0
    out = capsys.readouterr().out
    assert "no run has a label: the rule needs a positive true return of the reference run, not 0.00" in out
    assert re.search(r"all detectors\s+undefined", out)
    assert json.loads((pool / "still" / "detect.json").read_text())["detectors"]["kl_episode_mean"] is None
    assert (pool / "still" / "detect.png").exists()


def test_a_reference_policy_with_rewards_as_inputs_is_noted(pool):
    shown = replace(BLIND, prev_reward=True)
    make_run(pool / "shown", buttons(), bias=9, net=shown)
    (note,) = detect(pool / "shown", [pool / "good", pool / "hacking"], episodes=2)["notes"]
    assert note.startswith("shown has rewards among its inputs") and "good, hacking" in note
    make_run(pool / "same", buttons(), bias=-9, net=shown)
    make_run(pool / "other", buttons(), bias=8, net=shown)
    runs = [pool / "same", pool / "other"]
    assert detect(pool / "shown", runs, episodes=2, anomalous=["same"])["notes"] == []


def test_runs_have_the_shortest_names_that_differ(tmp_path):
    assert short_names([Path("/a/x"), Path("/a/y")]) == ["x", "y"]
    assert short_names([Path("/a/s0"), Path("/b/s0"), Path("/b/s1")]) == ["a/s0", "b/s0", "b/s1"]


def test_anomalous_runs_are_named_by_path_name_or_pattern(tmp_path):
    paths = [tmp_path / "a" / "seed0", tmp_path / "a" / "seed1", tmp_path / "b" / "seed0"]
    assert match_runs(["b/seed0"], paths) == [False, False, True]
    assert match_runs(["seed0"], paths) == [True, False, True]
    assert match_runs([str(paths[1]), "b/*"], paths) == [False, True, True]
    assert match_runs([], paths) == [False, False, False]


# -- the command ------------------------------------------------------------------------------------------


def test_the_command_takes_runs_directories_of_seeds_and_names(pool, capsys, monkeypatch):
    for seed in range(2):
        make_run(pool / "many" / f"seed{seed}", buttons(), bias=-8, seed=seed)
    monkeypatch.chdir(pool)
    words = ["--episodes", "2", "--anomalous", "seed*,hacking", "--checkpoint", "100", "--envs", "1", "--out", "o"]
    assert main(["detect", "--reference", "reference", "good", "many", "hacking", "reference", *words]) == 0
    result = json.loads((pool / "o" / "detect.json").read_text())
    labels = {row["name"]: row["anomalous"] for row in result["runs"]}
    assert labels == {
        "good": False,
        "seed0": True,
        "seed1": True,
        "hacking": True,
    }  # the reference run itself is left out
    assert result["protocol"]["labels"] == "by hand" and result["protocol"]["envs"] == 1
    assert "written to o/detect.json, o/detect.png" in capsys.readouterr().out


VALUES = {"dqn": Dqn(), "apex": Apex(), "r2d2": R2d2()}


@pytest.fixture
def refused(tmp_path, capsys):
    def check(*words: str) -> str:
        capsys.readouterr()
        assert main(["detect", *words]) == 2
        printed = capsys.readouterr()
        assert printed.err.count("\n") == 1 and printed.out == ""
        assert not list(tmp_path.rglob("detect.*"))
        return printed.err

    return check


@pytest.mark.parametrize("algo", VALUES)
@pytest.mark.parametrize("reference", [True, False])
def test_algorithms_with_action_values_are_refused(tmp_path, refused, algo, reference):
    good, bad = (
        make_run(tmp_path / "p", Catch(), net=Net()),
        make_run(tmp_path / "v", Catch(), algo=VALUES[algo], net=Net()),
    )
    words = (str(bad), str(good)) if reference else (str(good), str(bad))
    assert f"v was trained by {algo}, which learns action values: it has no policy logits" in refused(
        "--reference", *words
    )


def test_incomparable_runs_are_refused_in_one_sentence(tmp_path, refused):
    a, b = str(make_run(tmp_path / "a", Catch(), net=Net())), str(make_run(tmp_path / "b", Recall(), net=Net()))
    wide = str(make_run(tmp_path / "wide", Catch(columns=6), net=Net()))
    assert "b has 4 actions, a 3: compare runs with the same actions" in refused("--reference", a, b)
    assert "wide observes 1x10x6 uint8, a 1x10x5 uint8: compare runs with the same observations" in refused(
        "--reference", a, wide
    )
    assert "is not a run: it has no experiment.json" in refused("--reference", a, str(tmp_path / "none"))
    assert "is not a run: it has no experiment.json" in refused("--reference", str(tmp_path), a)
    assert "has no checkpoint '7'; it has: 100" in refused("--reference", a, wide, "--checkpoint", "7")


def test_invalid_settings_are_refused_in_one_sentence(tmp_path, refused):
    a, b = (str(make_run(tmp_path / name, Catch(), net=Net())) for name in "ab")
    assert "name at least one run besides the reference run" in refused("--reference", a)
    assert "name at least one run besides the reference run" in refused("--reference", a, a)
    assert "episodes=0 and envs=16 must be at least 1" in refused("--reference", a, b, "--episodes", "0")
    assert "envs=0 must be at least 1" in refused("--reference", a, b, "--envs", "0")
    for fraction in ("0", "1.5", "nan"):
        assert f"fraction={float(fraction)} must lie above 0" in refused("--reference", a, b, "--fraction", fraction)
    assert "--anomalous names c, which is not among the runs: there are: b" in refused(
        "--reference", a, b, "--anomalous", "c"
    )
    (tmp_path / "file").touch()
    assert "file must be a directory" in refused("--reference", a, b, "--out", str(tmp_path / "file"))
    assert "there is no flag --episode" in refused("--reference", a, b, "--episode", "3")


def test_a_missing_matplotlib_is_named_before_anything_runs(tmp_path, refused, monkeypatch):
    a, b = (str(make_run(tmp_path / name, Catch(), net=Net())) for name in "ab")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert 'the extra "plot"' in refused("--reference", a, b)


# -- the page ---------------------------------------------------------------------------------------------


def test_every_command_on_the_page_is_parsed():
    lines = [x for x in PAGE.read_text().replace("\\\n", " ").splitlines() if x.startswith("bestiary detect")]
    assert len(lines) > 2
    for line in lines:
        words = re.sub(r"--plugin \S+", "", line.split(" # ")[0])
        assert parse(DetectCommand, shlex.split(words)[2:], "bestiary detect").runs


def test_the_environment_on_the_page_can_be_used(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (tmp_path / "left_catch.py").write_text(block)
    run = [sys.executable, "-m", "bestiary", "list", "envs", "--plugin", str(tmp_path / "left_catch.py")]
    assert "left-catch" in subprocess.run(run, capture_output=True, text=True, check=True).stdout
