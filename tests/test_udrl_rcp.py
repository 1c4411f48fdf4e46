"""Upside-Down RL and Reward-Conditioned Policies: their equations, their commands, and whole runs."""

import copy
import csv
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from helpers.files import through_a_file
from helpers.learners import CORE, NET, SPEC, after_burn_in, assert_close, count, gradients, shaken
from helpers.runs import interrupted, rows, same, tiny, weights
from helpers.settings import configure
from torch import Tensor, nn

import bestiary
from bestiary import tree
from bestiary.acting.actor import Actor
from bestiary.acting.episodes import play_episodes
from bestiary.algos import Impala, Rcp, Udrl
from bestiary.algos.exploration import FixedExploration
from bestiary.algos.return_conditioned import ReturnConditioned
from bestiary.algos.return_conditioned.agent import ReturnConditionedAgent
from bestiary.algos.return_conditioned.learner import ReturnConditionedLearner
from bestiary.algos.return_conditioned.networks import NETWORKS
from bestiary.cli import main
from bestiary.config.experiment import Evaluation, Experiment
from bestiary.config.schema import decode
from bestiary.cores import DeltaNet, Ff, Lstm
from bestiary.envs import Catch, Gym, Recall
from bestiary.errors import UserError
from bestiary.nets import Mlp, Net
from bestiary.nets.optim import Adam, AdamW, RmsProp
from bestiary.ops.commands import command_distribution
from bestiary.presets import preset
from bestiary.runtime import Local
from bestiary.training.evaluation import info_summary
from bestiary.types import Batch, Episode, Spec, TimeStep, Trajectory

double = pytest.mark.usefixtures("_double")

LANDER = Spec("lander", (8,), torch.float32, 4, horizon=1_000)
IMAGE = Spec("camera", (1, 9, 9), torch.uint8, 4, horizon=20)
BARE = Net(encoder=Mlp(num_layers=0), prev_action=False, prev_reward=False)
udrl, rcp = partial(configure, Udrl), partial(configure, Rcp)  # also take settings of the replay
DELTA = DeltaNet(width=8, heads=2, layers=1, feedforward=8)
ONE: dict[str, Any] = {"horizon": False, "command_shift": (0.0,), "command_scale": (1.0,)}  # commands without a horizon
TWO: dict[str, Any] = {"command_shift": (0.0, 0.0), "command_scale": (1.0, 1.0)}


# -- networks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "head", "width", "parameters"),
    [
        ("gate", (32, 128, 128, 128), 2, 38_148),
        ("gates", (64, 64), 1, 5_252),
    ],
)
def test_networks_have_the_published_numbers_of_parameters(network, head, width, parameters):
    cfg = udrl(network=network, head=head, **({} if width == 2 else ONE))
    assert count(cfg.agent(LANDER, BARE, Ff())) == parameters


def test_the_critic_has_the_published_number_of_parameters():
    cfg = rcp(critic_head=(128, 64))
    critic = cfg.learner(cfg.agent(LANDER, BARE, Ff()), 1).critic
    assert critic is not None and count(critic) == 9_473


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("udrl-paper", 38_148), ("udrl-repo", 38_148), ("rcp-r-repo", 5_252), ("rcp-a-repo", 5_252)],
)
def test_faithful_presets_have_the_published_numbers_of_parameters(name, parameters):
    experiment = preset(name)
    assert count(experiment.algo.agent(LANDER, experiment.net, experiment.core)) == parameters


def affine(layer: Any, x: Tensor) -> Tensor:
    return layer.weight @ x + layer.bias


def gate(net: Any, x: Tensor, c: Tensor) -> Tensor:
    x = affine(net.features, x).tanh() * affine(net.gate, c).sigmoid()
    for layer in net.layers[:-1]:
        x = affine(layer, x).relu()
    return affine(net.layers[-1], x)


def gates(net: Any, x: Tensor, c: Tensor) -> Tensor:
    for n in range(len(net.layers)):
        x = affine(net.layers[n], x).relu() * affine(net.gates[n], c).sigmoid()
    return affine(net.last, x)


def film(net: Any, x: Tensor, c: Tensor) -> Tensor:
    x = torch.cat([x, c])
    for n in range(len(net.layers)):
        s = affine(net.scales[n], c)
        x = affine(net.layers[n], x).relu() * (1 + s / (1 + s.abs()))
    return affine(net.last, x)


PLAIN: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {"gate": gate, "gates": gates, "film": film}


@double
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("hidden", [(7,), (7, 6), (5, 6, 7)])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_follows_its_equation_and_all_of_it_is_trained(name, hidden, width):
    assert set(PLAIN) == set(NETWORKS)
    net = NETWORKS[name](4, width, hidden, 3)
    shaken(net)
    x, command = torch.randn(5, 2, 4), torch.randn(5, 2, width, requires_grad=True)
    out = net(x, command)
    assert out.shape == (5, 2, 3)
    expected = torch.stack(
        [torch.stack([PLAIN[name](net, x[t, b], command[t, b]) for b in range(2)]) for t in range(5)]
    )
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    loss = (out * torch.randn(5, 2, 3)).sum()
    assert all(g.any() for g in gradients(loss, net).values())
    (to_command,) = torch.autograd.grad(loss, command)
    assert (to_command != 0).any(-1).all()


def test_the_gate_network_is_initialised_orthogonally():
    net: Any = NETWORKS["gate"](8, 2, (32, 16, 16), 4)
    for layer, gain in ((net.features, 1.0), (net.gate, 1.0), (net.layers[0], 2.0), (net.layers[1], 2.0)):
        w = layer.weight.double()
        w = w if len(w) < w.shape[1] else w.T
        torch.testing.assert_close(w @ w.T, gain * torch.eye(len(w)).double(), atol=1e-5, rtol=0)
        assert not layer.bias.any()


def test_the_film_network_is_nearly_uniform_at_first():
    net = NETWORKS["film"](8, 2, (64, 64), 4)
    assert net(torch.randn(100, 8), torch.randn(100, 2)).abs().max() < 0.05


@pytest.mark.parametrize("name", NETWORKS)
def test_the_network_sees_shifted_and_scaled_commands(name):
    scaled = udrl(network=name, head=(8,), command_shift=(100.0, 20.0), command_scale=(0.01, 0.5)).agent(
        LANDER, BARE, Ff()
    )
    plain = udrl(network=name, head=(8,)).agent(LANDER, BARE, Ff())
    plain.load_state_dict(scaled.state_dict())  # shift and scale are settings, not weights
    h = torch.randn(6, 8)
    command = torch.tensor([50.0, 30.0]).expand(6, 2)
    torch.testing.assert_close(scaled.logits(h, command), plain.logits(h, torch.tensor([-0.5, 5.0]).expand(6, 2)))


# -- the agent --------------------------------------------------------------------------------------------------------


def time_step(
    is_first: list[bool] | Tensor, reward: list[float] | Tensor | float = 0.0, spec: Spec = LANDER
) -> TimeStep:
    first = torch.as_tensor(is_first)
    size = len(first)
    return TimeStep(
        obs=torch.randn(size, *spec.obs_shape),
        prev_action=torch.zeros(size, dtype=torch.int64),
        reward=torch.as_tensor(reward, dtype=torch.float32).expand(size).clone(),
        is_first=first,
        is_terminal=torch.zeros(size, dtype=torch.bool),
    )


def agent_of(core: Any = None, cls: type = Udrl, **settings: Any) -> ReturnConditionedAgent:
    cfg = configure(cls, **({"head": (16,), "command_source": "uniform"} | settings))
    agent = cfg.agent(LANDER, BARE, core or Ff())
    agent.untrained.fill_(False)
    return agent


def aimed(pool: list[Any], spread: Any = 0.0, noise: Any = 0.0, **settings: Any) -> ReturnConditionedAgent:
    agent = agent_of(**({"command_source": "episode", "command_episodes": len(pool)} | settings))
    agent.set_command_distribution(command_distribution(np.array(pool), spread, noise))
    return agent


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def commands_of(agent: ReturnConditionedAgent, steps: list[TimeStep], explore: Tensor | None, seed: int = 0) -> Tensor:
    """Commands [T, B, W] at these time steps."""
    state, rng, commands = agent.initial_state(len(steps[0].reward)), generator(seed), []
    with torch.no_grad():
        for step in steps:
            _, aux, state = agent.act(step, state, explore, rng)
            commands.append(aux["command"])
            assert torch.equal(aux["command"], state[0])
    return torch.stack(commands)


def story(T: int = 30, B: int = 6, seed: int = 0) -> list[TimeStep]:
    rng = generator(seed)
    first = torch.rand(T, B, generator=rng) < 0.15
    first[0] = True
    reward = torch.randint(-8, 9, (T, B), generator=rng) / 4
    return [time_step(first[t], torch.where(first[t], 0, reward[t])) for t in range(T)]


@pytest.mark.parametrize("explore", [None, torch.zeros(6), torch.ones(6)], ids=["greedy", "sampled", "exploring"])
@pytest.mark.parametrize(("discount", "most"), [(1.0, None), (1.0, 10.0), (0.5, 12.0)])
def test_a_command_is_sampled_at_the_first_step_and_then_updated(discount, most, explore):
    agent = aimed([[9.0, 4.0], [5.0, 3.0], [2.0, 7.0]], discount=discount, max_return=most)
    steps = story()
    commands = commands_of(agent, steps, explore)
    for b in range(6):
        for t, step in enumerate(steps):
            now = commands[t, b].tolist()
            if step.is_first[b]:
                assert now in agent.pool.tolist()
            else:
                wanted, left = commands[t - 1, b].tolist()
                wanted = (wanted - step.reward[b].item()) / discount
                assert now == pytest.approx([min(wanted, most or math.inf), max(left - 1, 1)], rel=1e-5)
    assert {tuple(c) for step, c in zip(steps, commands, strict=True) for c in c[step.is_first].tolist()} == {
        (9.0, 4.0), (5.0, 3.0), (2.0, 7.0)
    }  # fmt: skip
    assert (commands[..., 1] == 1).any() and commands[..., 1].min() == 1
    if most is not None:
        assert (commands[..., 0] == most).any() and commands[..., 0].max() <= most


def test_the_desired_return_never_exceeds_the_maximum():
    agent = aimed([[9.0, 4.0]], spread=np.array([4.0, 0.0]), max_return=10.0)
    commands = commands_of(agent, [time_step([True] * 200)], torch.ones(200))[0, :, 0]
    assert commands.max() == 10.0 and (commands < 10).any() and commands.min() >= 9
    agent.set_command_distribution(command_distribution(np.array([50.0, 3.0])))
    assert commands_of(agent, [time_step([True] * 2)], None)[0].tolist() == [[10.0, 3.0]] * 2


def test_a_fixed_command_stays_as_it_was_sampled():
    commands = commands_of(aimed([[9.0, 4.0], [5.0, 3.0]], fixed_command=True), steps := story(), torch.ones(6))
    for t in range(1, len(steps)):
        on = ~steps[t].is_first
        assert torch.equal(commands[t][on], commands[t - 1][on])
    assert len({tuple(c) for c in commands.flatten(0, 1).tolist()}) == 2


@pytest.mark.parametrize("fixed", [True, False])
def test_a_command_may_be_resampled_at_every_step(fixed):
    agent = aimed([[9.0, 4.0], [5.0, 3.0]], fixed_command=fixed, resample_command=True)
    commands = commands_of(agent, [time_step([False] * 500, 3.0)], None)[0]
    assert {tuple(c) for c in commands.tolist()} == {(9.0, 4.0), (5.0, 3.0)}
    assert (commands[:, 0] == 9).float().mean().item() == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("explore", [None, torch.zeros(400)], ids=["greedy", "sampled"])
def test_evaluations_sample_from_the_pool_alone(explore):
    agent = aimed([[9.0, 4.0], [5.0, 3.0]], spread=np.array([2.0, 0.0]), noise=np.array([0.5, 0.1]))
    commands = commands_of(agent, [time_step([True] * 400)], explore)[0]
    assert {tuple(c) for c in commands.tolist()} == {(9.0, 4.0), (5.0, 3.0)}


def test_exploration_adds_spread_and_noise():
    size = 4_000
    spread = commands_of(
        aimed([[9.0, 4.0]], spread=np.array([2.0, 0.0])), [time_step([True] * size)], torch.ones(size)
    )[0]
    assert (spread[:, 1] == 4).all()
    u = (spread[:, 0].double() - 9) / 2
    assert u.min() >= 0 and u.max() < 1
    assert torch.histc(u, 10, 0, 1).tolist() == pytest.approx([400] * 10, abs=100)  # five standard deviations
    noise = commands_of(aimed([[9.0, 4.0]], noise=np.array([0.5, 0.0])), [time_step([True] * size)], torch.ones(size))[
        0
    ]
    z = (noise[:, 0].double() - 9) / 0.5
    assert z.mean().item() == pytest.approx(0, abs=0.08) and z.std().item() == pytest.approx(1, abs=0.06)
    assert (noise[:, 1] == 4).all()


def test_each_environment_has_its_own_exploration_rate():
    explore = torch.tensor([0.0, 1.0] * 50)
    commands = commands_of(aimed([[9.0, 4.0]], spread=np.array([2.0, 0.0])), [time_step([True] * 100)], explore)[
        0, :, 0
    ]
    assert (commands[explore == 0] == 9).all() and (commands[explore == 1] > 9).all()


def test_a_smaller_pool_is_repeated():
    agent = agent_of(command_source="episode", command_episodes=7)
    agent.set_command_distribution(command_distribution(np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])))
    assert agent.pool[:, 0].tolist() == [1.0, 3.0, 5.0, 1.0, 3.0, 5.0, 1.0]
    agent.set_command((8.0, 9.0))
    assert agent.pool.tolist() == [[8.0, 9.0]] * 7


def actions_of(agent: ReturnConditionedAgent, explore: Tensor | None, size: int, seed: int = 0) -> Tensor:
    """Actions in so many environments with the same observation."""
    step = time_step([True] * size)._replace(obs=torch.linspace(-1, 1, 8).expand(size, -1))
    with torch.no_grad():
        return agent.act(step, agent.initial_state(size), explore, generator(seed))[0]


def test_an_untrained_agent_explores_uniformly():
    agent = aimed([[9.0, 4.0]])
    shaken(agent.policy)
    agent.untrained.fill_(True)
    greedy = actions_of(agent, None, 1).item()
    assert actions_of(agent, None, 50).eq(greedy).all()
    share = actions_of(agent, torch.ones(4_000), 4_000).bincount(minlength=4) / 4_000
    assert share.tolist() == pytest.approx([0.25] * 4, abs=0.035)
    agent.untrained.fill_(False)
    learnt = actions_of(agent, torch.ones(4_000), 4_000).bincount(minlength=4) / 4_000
    assert (learnt - 0.25).abs().max() > 0.1
    agent.untrained.fill_(True)  # not in evaluations
    sampled = actions_of(agent, torch.zeros(4_000), 4_000).bincount(minlength=4) / 4_000
    assert sampled.tolist() == pytest.approx(learnt.tolist(), abs=0.05)


def test_the_inverse_temperature_is_log_uniform_per_episode():
    agent = aimed([[9.0, 4.0]])
    agent.max_inverse_temperature.fill_(4.0)
    size = 2_000
    state, rng = agent.initial_state(size), generator()
    with torch.no_grad():
        _, _, state = agent.act(time_step([True] * size), state, torch.ones(size), rng)
        factor = state[1]
        assert factor.min() >= 1 and factor.max() <= 4
        uniform = factor.log() / math.log(4)  # log-uniform
        assert torch.histc(uniform, 10, 0, 1).tolist() == pytest.approx([200] * 10, abs=75)
        again = torch.arange(size) % 3 == 0
        _, _, state = agent.act(time_step(again), state, torch.ones(size), rng)
        assert torch.equal(state[1][~again], factor[~again]) and (state[1][again] != factor[again]).all()
        _, _, plain = agent.act(time_step([True] * size), state, torch.zeros(size), rng)
        assert (plain[1] == 1).all()  # 1 without exploration


def test_actions_follow_the_policy_at_its_inverse_temperature(monkeypatch):
    agent = aimed([[9.0, 4.0]])
    logits = torch.tensor([0.5, 0.2, 0.0, -0.4])
    monkeypatch.setattr(agent, "logits", lambda h, command: logits.expand(len(h), 4))
    agent.max_inverse_temperature.fill_(3.0)
    size = 20_000
    share = actions_of(agent, torch.zeros(size), size).bincount(minlength=4) / size
    torch.testing.assert_close(share, logits.softmax(-1), atol=0.02, rtol=0)  # without exploration: 1
    assert (share - (3 * logits).softmax(-1)).abs().max() > 0.1  # the difference is large enough to be seen
    bold = actions_of(agent, torch.ones(size), size).bincount(minlength=4) / size
    factors = 3.0 ** torch.linspace(0, 1, 1_001)[:, None]
    torch.testing.assert_close(bold, (factors * logits).softmax(-1).mean(0), atol=0.02, rtol=0)
    assert (bold - share).abs().max() > 0.05
    assert actions_of(agent, None, 3).eq(0).all()


@pytest.mark.parametrize("core", [Ff(), Lstm(hidden=6), DELTA], ids=["ff", "lstm", "delta-net"])
def test_environments_of_a_batch_do_not_mix(core):
    agent = aimed([[9.0, 4.0]], core=core)
    steps = story(12, 5)
    logits = recorded(agent, steps)
    for b in range(5):
        alone = recorded(agent, [TimeStep(*(x[b : b + 1] for x in step)) for step in steps])
        torch.testing.assert_close(logits[:, b], alone[:, 0])


def recorded(agent: ReturnConditionedAgent, steps: list[TimeStep]) -> Tensor:
    """Logits [T, B, A] while acting greedily, step by step."""
    found: list[Tensor] = []
    hook = agent.policy.register_forward_hook(lambda module, inputs, output: found.append(output))
    commands_of(agent, steps, None)
    hook.remove()
    return torch.stack(found)


@pytest.mark.parametrize("core", [Ff(), Lstm(hidden=6), DELTA], ids=["ff", "lstm", "delta-net"])
@pytest.mark.parametrize("normalise", [True, False])
def test_acting_step_by_step_equals_the_learners_unroll(core, normalise):
    agent = aimed([[9.0, 4.0], [5.0, 3.0]], core=core, normalise=normalise, command_scale=(0.1, 0.2))
    if normalise:
        agent.obs_mean.copy_(torch.randn(8))
        agent.obs_std.copy_(torch.rand(8) + 0.5)
    steps = story(15, 4)
    found: list[Tensor] = []
    hook = agent.policy.register_forward_hook(lambda module, inputs, output: found.append(output))
    commands = commands_of(agent, steps, torch.ones(4))
    hook.remove()
    with torch.no_grad():
        h, _ = agent.torso(agent.normalise(tree.stack(steps)), agent.torso.initial_state(4))
        torch.testing.assert_close(agent.logits(h, commands), torch.stack(found), rtol=1e-4, atol=1e-5)


def test_the_command_distribution_travels_with_the_weights():
    agent = aimed([[9.0, 4.0], [5.0, 3.0]], spread=1.0, noise=0.5, normalise=True)
    agent.obs_mean.copy_(torch.randn(8))
    agent.obs_std.fill_(2.0)
    agent.max_inverse_temperature.fill_(3.0)
    other = aimed([[0.0, 0.0], [0.0, 0.0]], normalise=True)
    other.untrained.fill_(True)
    other.load_state_dict(through_a_file(agent.state_dict()))
    assert not other.untrained
    steps, explore = story(), torch.ones(6)
    assert torch.equal(commands_of(agent, steps, explore), commands_of(other, steps, explore))
    assert torch.equal(recorded(agent, steps), recorded(other, steps))


# -- the learner ------------------------------------------------------------------------------------------------------


def batch_of(
    cfg: ReturnConditioned, seed: int = 0, T: int = 6, B: int = 4, pool: list[list[float]] | None = None
) -> Batch:
    """Sequences as a replay samples them: some begin before their episode, some end after it."""
    rng = torch.Generator().manual_seed(seed)
    total, dtype = cfg.burn_in + T, torch.get_default_dtype()
    start, length = torch.randint(1 - T, 4, (B,), generator=rng), torch.randint(4, 9, (B,), generator=rng)
    number = start + torch.arange(-cfg.burn_in, T)[:, None]
    valid = ((number >= 0) & (number < length))[cfg.burn_in :]
    assert valid.any(0).all()
    first = (number <= 0) | (number > length)
    action = torch.randint(4, (total, B), generator=rng)
    step = TimeStep(
        obs=torch.randn(total, B, 3, generator=rng, dtype=dtype),
        prev_action=torch.randint(4, (total, B), generator=rng) * ~first,
        reward=torch.randn(total, B, generator=rng, dtype=dtype) * ~first,
        is_first=first,
        is_terminal=number >= length,
    )
    named = ("return_to_go", "horizon", "episode_return", "rank_score", "value_target", "advantage")
    aux = {name: torch.randn(T, B, generator=rng, dtype=dtype) for name in named}
    aux["horizon"] = (length - number)[cfg.burn_in :].clamp(min=1).to(dtype)
    info = command_distribution(np.array(pool or [[1.0, 2.0][: cfg.width]]), spread=0.5)._asdict()
    return Batch(Trajectory(step, action, {"valid": valid, **aux}, (), torch.zeros(B)), info=info)


def learner_of(cfg: ReturnConditioned, total_steps: int = 1_000, core: Any = CORE) -> ReturnConditionedLearner:
    spec = SPEC._replace(obs_dtype=torch.get_default_dtype())
    learner = cfg.learner(cfg.agent(spec, NET, core), total_steps)
    for n, module in enumerate([learner.online, learner.critic]):
        if module is not None:
            shaken(module, n)
    return learner


def plain_loss(learner: ReturnConditionedLearner, t: Trajectory) -> Tensor:
    """Weighted cross entropy of the actions, conditioned on what each valid transition achieved."""
    cfg, aux, online = learner.cfg, t.aux, learner.online
    reached = {"return-to-go": "return_to_go", "return": "episode_return", "advantage": "advantage"}[cfg.command]
    by_transition = cfg.command == "advantage" or cfg.weight_by == "transitions"
    good = reached if by_transition else "rank_score"
    chosen = aux[good][aux["valid"]].tolist()
    mean = sum(chosen) / len(chosen)
    std = math.sqrt(sum((x - mean) ** 2 for x in chosen) / (len(chosen) - 1))
    losses, total = [], 0.0
    for b in range(t.action.shape[1]):
        h = after_burn_in(online.torso, t, cfg.burn_in, b)
        for k, features in enumerate(h):
            if not aux["valid"][k, b]:
                continue
            weight = 1.0
            if cfg.weighting == "exponential":
                weight = min(math.exp((aux[good][k, b].item() - mean) / std / cfg.beta), cfg.weight_cap)
            command = torch.stack([aux[reached][k, b], aux["horizon"][k, b]][: cfg.width])
            command = (command - torch.tensor(cfg.command_shift)) * torch.tensor(cfg.command_scale)
            log_pi = PLAIN[cfg.network](online.policy, features, command).log_softmax(0)
            done = log_pi[t.action[cfg.burn_in + k, b]]
            losses.append(-weight * ((1 - cfg.label_smoothing) * done + cfg.label_smoothing * log_pi.mean()))
            total += weight
    return torch.stack(losses).sum() / total


TOY: dict[str, Any] = {"head": (7, 6), "grad_norm": None}
LOSSES: dict[str, ReturnConditioned] = {
    "udrl": udrl(**TOY, network="gate", command_scale=(0.5, 0.1)),
    "udrl, burn-in": udrl(**TOY, burn_in=3, network="film", command_shift=(0.5, 2.0), label_smoothing=0.1),
    "udrl, returns": udrl(**TOY, command="return", network="gates", weighting="exponential"),
    "udrl, start-state baseline": udrl(
        **TOY, command="return", start_state_baseline=True, weighting="exponential", beta=0.5
    ),
    "rcp-r": rcp(**TOY, command="return", network="gates", beta=0.5, weight_cap=2.0),
    "rcp-r, discounted": rcp(**TOY, command="return-to-go", command_source="maximum", network="gates"),
    "rcp-r, by transitions": rcp(
        **TOY, command="return-to-go", weight_by="transitions", start_state_baseline=True, beta=0.5
    ),
    "rcp-a": rcp(**TOY, network="gates", burn_in=2),
    "rcp-a, start-state baseline": rcp(**TOY, start_state_baseline=True, label_smoothing=0.2, weight_cap=1.5),
}


@double
@pytest.mark.parametrize("cfg", LOSSES.values(), ids=LOSSES)
def test_loss_and_gradient_equal_those_of_a_loop(cfg, monkeypatch):
    learner = learner_of(cfg)
    monkeypatch.setattr(learner.optimizer, "step", lambda: None)  # so that all gradients are at the same weights
    for seed in range(2):
        batch = batch_of(cfg, seed)
        expected = plain_loss(learner, batch.trajectory)
        wanted = gradients(expected, learner.online)
        metrics = learner.update(batch).metrics
        assert metrics["loss"].item() == pytest.approx(expected.item(), rel=1e-10)
        found = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in learner.online.named_parameters()}
        assert_close(found, wanted)
        assert all(g.any() for g in found.values())
        norm = torch.stack([g.norm() for g in wanted.values()]).norm().item()
        assert metrics["grad_norm"].item() == pytest.approx(norm, rel=1e-8)


@double
def test_every_setting_of_a_case_changes_the_loss():
    """Otherwise the comparison would show nothing."""
    base = LOSSES["rcp-a, start-state baseline"]
    changes = [
        {},
        {"beta": 0.3},
        {"weight_cap": 1.1},
        {"label_smoothing": 0.0},
        {"weighting": "none"},
        {"command_scale": (2.0,)},
    ]
    losses = set()
    for change in changes:
        torch.manual_seed(0)
        cfg = replace(base, **change)
        losses.add(round(learner_of(cfg).update(batch_of(cfg)).metrics["loss"].item(), 9))
    assert len(losses) == len(changes)


@double
def test_steps_outside_the_episode_do_not_change_the_loss():
    cfg = LOSSES["rcp-a"]
    results = []
    for noise in (0.0, 1e3):
        torch.manual_seed(0)
        learner, batch = learner_of(cfg), batch_of(cfg)
        t = batch.trajectory
        outside = ~t.aux["valid"]
        for name in ("return_to_go", "episode_return", "rank_score", "value_target", "advantage"):
            t.aux[name][outside] += noise
        after = t.step.is_first[2:] & outside  # padding
        t.step.obs[2:][after] += noise
        results.append({k: v.item() for k, v in learner.update(batch).metrics.items() if k != "value"})
    assert results[0] == pytest.approx(results[1], rel=1e-9)


@double
def test_metrics_describe_the_weighted_batch():
    cfg = LOSSES["rcp-a"]
    learner, batch = learner_of(cfg), batch_of(cfg)
    t = batch.trajectory
    valid = t.aux["valid"]
    weight = learner.weight(t, learner.label(t), valid)
    metrics = learner.update(batch).metrics
    kept = (weight.sum() ** 2 / weight.square().sum()).item()
    assert metrics["effective_batch_size"].item() == pytest.approx(kept, rel=1e-9)
    assert 1 < kept < valid.sum()
    assert 0 <= metrics["accuracy"] <= 1 and 0 < metrics["entropy"] <= math.log(4)
    assert metrics["command_return"].item() == 1.0 and metrics["command_horizon"].item() == 0.0
    plain = replace(cfg, weighting="none")
    even = learner_of(plain).update(batch_of(plain)).metrics["effective_batch_size"].item()
    assert even == pytest.approx(valid.sum().item(), rel=1e-9)


def test_the_first_update_ends_uniform_exploration_and_sets_commands():
    cfg = udrl(**TOY, command_episodes=5)
    learner = learner_of(cfg)
    assert learner.agent.untrained
    learner.update(batch_of(cfg, pool=[[1.0, 2.0], [3.0, 4.0]]))
    assert not learner.agent.untrained
    assert learner.agent.pool.tolist() == [[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [3.0, 4.0], [1.0, 2.0]]
    assert learner.agent.spread.tolist() == [0.5, 0.5] and learner.agent.noise.tolist() == [0.0, 0.0]


@double
@pytest.mark.parametrize("average", [0.5, 0.9, 1.0])
def test_the_acting_network_is_a_mean_at_first_then_a_moving_average(average):
    cfg = udrl(**TOY, ema_decay=average, optimizer=Adam(lr=0.1))
    learner = learner_of(cfg)
    mean = None
    for n in range(1, 16):
        learner.update(batch_of(cfg, n))
        now = torch.cat([p.detach().flatten() for p in learner.online.parameters()])
        share = max(1 - average, 1 / n)
        mean = now if mean is None else (1 - share) * mean + share * now
        acting = torch.cat([p.detach().flatten() for p in learner.agent.parameters()])
        torch.testing.assert_close(acting, mean, rtol=1e-9, atol=1e-12)
    assert (acting - now).abs().max() > 1e-3
    plain = learner_of(replace(cfg, ema_decay=None))
    assert plain.agent is plain.online


def trained_obs(batch: Batch, cfg: ReturnConditioned) -> Tensor:
    """Observations of all transitions, [N, ...], without padding and burn-in."""
    return batch.trajectory.step.obs[cfg.burn_in :][batch.trajectory.aux["valid"]].double()


def weighted_stats(seen: list[Tensor], weight: list[float]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of observations with one weight per batch."""
    both = list(zip(weight, seen, strict=True))
    mean = torch.stack([w * x.mean(0) for w, x in both]).sum(0)
    return mean, torch.stack([w * (x - mean).square().mean(0) for w, x in both]).sum(0).sqrt()


@pytest.mark.parametrize("average", [None, 0.9])
def test_observations_are_standardised_with_running_statistics(average):
    """The features are far from zero and of different sizes. At first all batches have the same weight."""
    cfg = udrl(**TOY, normalise=True, ema_decay=average)
    learner, seen = learner_of(cfg), []
    for n in range(12):
        batch = batch_of(cfg, n)
        obs = batch.trajectory.step.obs
        obs.mul_(torch.tensor([1.0, 5.0, 0.2])).add_(torch.tensor([30.0, -4.0, 2.0]))
        seen.append(trained_obs(batch, cfg))
        learner.update(batch)
        mean, spans = weighted_stats(seen, [1 / len(seen)] * len(seen))
        for agent in {learner.agent, learner.online}:
            torch.testing.assert_close(agent.obs_mean.double(), mean, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(agent.obs_std.double(), spans, rtol=1e-2, atol=1e-3)
    step = batch.trajectory.step
    shown = learner.agent.normalise(step).obs
    torch.testing.assert_close(shown, ((step.obs - agent.obs_mean) / agent.obs_std).clamp(-5, 5))
    wild = learner.agent.normalise(step._replace(obs=1e6 * torch.ones_like(step.obs))).obs
    assert (wild == 5).all()


def test_statistics_become_a_moving_average_after_many_batches(monkeypatch):
    monkeypatch.setattr("bestiary.algos.return_conditioned.learner.OBS_STATS_BATCHES", 3)
    cfg = udrl(**TOY, normalise=True)
    learner, weight, seen = learner_of(cfg), [], []
    for n in range(10):
        batch = batch_of(cfg, n)
        batch.trajectory.step.obs.mul_(1 + n).add_(n)
        learner.update(batch)
        share = 1 / (1 + min(n, 3))
        weight = [(1 - share) * w for w in weight] + [share]
        seen.append(trained_obs(batch, cfg))
    assert sum(weight) == pytest.approx(1)
    mean, spans = weighted_stats(seen, weight)
    torch.testing.assert_close(learner.agent.obs_mean.double(), mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(learner.agent.obs_std.double(), spans, rtol=1e-2, atol=1e-3)


def test_without_normalisation_observations_are_unchanged():
    learner = learner_of(udrl(**TOY))
    batch = batch_of(learner.cfg)
    learner.update(batch)
    assert learner.agent.normalise(batch.trajectory.step) is batch.trajectory.step


def test_the_maximum_inverse_temperature_grows_over_its_schedule():
    cfg = udrl(**TOY, max_inverse_temperature=3.0, inverse_temperature_steps=40, updates_per_step=0.1)  # four updates
    learner = learner_of(cfg)
    maximum = [learner.update(batch_of(cfg)).metrics["max_inverse_temperature"].item() for _ in range(6)]
    assert maximum == pytest.approx([1.5, 2.0, 2.5, 3.0, 3.0, 3.0])
    assert learner.agent.max_inverse_temperature == 3.0
    plain = learner_of(udrl(**TOY))
    assert plain.update(batch_of(plain.cfg)).metrics["max_inverse_temperature"] == 1.0


def test_the_learning_rate_decays_to_a_fraction_over_the_budget():
    cfg = udrl(**TOY, updates_per_step=0.01, final_lr_fraction=0.2, optimizer=Adam(lr=1e-3))
    learner, rates = learner_of(cfg, total_steps=400), []
    for _ in range(6):
        learner.update(batch_of(cfg))
        rates.append(learner.optimizer.param_groups[0]["lr"] / 1e-3)
    assert rates == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    steady = learner_of(replace(cfg, final_lr_fraction=1.0), total_steps=400)
    for _ in range(6):
        steady.update(batch_of(cfg))
    assert steady.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


# -- the critic -------------------------------------------------------------------------------------------------------


def whole_episodes(
    seed: int = 0, lengths: tuple[int, ...] = (5, 3, 7), cut: tuple[bool, ...] = (False, True, True)
) -> Batch:
    """Whole episodes, one per column; `cut` says which are truncated."""
    rng = torch.Generator().manual_seed(seed)
    T, B, dtype = max(lengths) + 1, len(lengths), torch.get_default_dtype()
    number, length = torch.arange(T)[:, None], torch.tensor(lengths)
    first = (number == 0) | (number > length)
    step = TimeStep(
        obs=torch.randn(T, B, 3, generator=rng, dtype=dtype),
        prev_action=torch.randint(4, (T, B), generator=rng) * ~first,
        reward=torch.randn(T, B, generator=rng, dtype=dtype) * ~first,
        is_first=first,
        is_terminal=(number >= length) & ~torch.tensor(cut),
    )
    t = Trajectory(step, torch.zeros(T, B, dtype=torch.int64), {}, (), torch.zeros(B))
    return Batch(t, keys=torch.arange(B), info={"critic_refresh": torch.ones(())})


def plain_values(learner: ReturnConditionedLearner, t: Trajectory, b: int) -> list[Tensor]:
    critic: Any = learner.critic
    linear = [m for m in critic.head if isinstance(m, nn.Linear)]
    found = []
    for h in after_burn_in(critic.torso, t._replace(aux={}), 0, b):
        for layer in linear[:-1]:
            h = affine(layer, h).relu()
        found.append(affine(linear[-1], h)[0])
    return found


CRITIC: dict[str, Any] = TOY | {"critic_head": (6, 5), "value_scale": 10.0, "discount": 0.9, "trace_decay": 0.8}


@double
@pytest.mark.parametrize("critic", ["separate", "joint"])
def test_a_critic_refresh_gives_lambda_returns(critic):
    """Truncated episodes bootstrap from V of their last state; for a joint critic they count as terminated."""
    learner = learner_of(rcp(**CRITIC, critic=critic, command_source="maximum"))
    batch = whole_episodes()
    t, lengths, cut = batch.trajectory, (5, 3, 7), (False, True, True)
    update = learner.update(batch)
    assert update.metrics == {} and learner.updates == 0
    errors = []
    for b, length in enumerate(lengths):
        v = plain_values(learner, t, b)
        after = v[length].item() if cut[b] and critic == "separate" else 0.0
        for k in reversed(range(length)):
            ahead = after if k == length - 1 else 0.2 * v[k + 1].item() + 0.8 * after
            after = t.step.reward[k + 1, b].item() / 10 + 0.9 * ahead
            errors.append(v[k] - after)
            if critic == "separate":
                assert update.value_targets is not None
                target, advantage = (x[k, b].item() for x in update.value_targets)
                assert target == pytest.approx(after, rel=1e-10)
                assert advantage == pytest.approx(after - v[k].item(), rel=1e-10)
    if critic == "separate":
        assert update.value_targets is not None and update.priorities is None
        assert all(x.shape == (7, 3) and not x.requires_grad for x in update.value_targets)
        assert learner.joint_loss is None
    else:
        assert update.value_targets is None and learner.joint_loss is not None
        loss = torch.stack(errors).square().mean()
        assert learner.joint_loss.item() == pytest.approx(loss.item(), rel=1e-10)
        assert learner.critic is not None
        assert_close(gradients(learner.joint_loss, learner.critic), gradients(loss, learner.critic))


@double
def test_a_joint_critics_loss_is_added_to_the_next_update_only():
    cfg = rcp(**CRITIC, critic="joint", command_source="maximum", optimizer=RmsProp(lr=1e-3))
    learner = learner_of(cfg)
    assert learner.critic is not None and learner.critic_optimizer is None
    assert len(learner.trained_parameters) == len(list(learner.online.parameters())) + len(
        list(learner.critic.parameters())
    )

    def both() -> list[tuple[Tensor, ...]]:
        assert learner.critic is not None
        return [tuple(p.detach().clone() for p in m.parameters()) for m in (learner.online, learner.critic)]

    def changed(before: tuple[Tensor, ...], after: tuple[Tensor, ...]) -> bool:
        return any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))

    states = [both()]
    for kind in ("update", "refresh", "update", "update"):
        metrics = learner.update(whole_episodes() if kind == "refresh" else batch_of(cfg)).metrics
        assert not {"value", "value_loss"} & set(metrics)
        states.append(both())
    moved = [(changed(a[0], b[0]), changed(a[1], b[1])) for a, b in pairwise(states)]
    assert moved == [(True, False), (False, False), (True, True), (True, False)]


@double
def test_the_logged_loss_is_the_policys_alone(monkeypatch):
    cfg = rcp(**CRITIC, critic="joint", command_source="maximum")
    losses, norms = [], []
    for refresh in (False, True):
        torch.manual_seed(0)
        learner = learner_of(cfg)
        if refresh:
            learner.update(whole_episodes())
        metrics = learner.update(batch_of(cfg)).metrics
        losses.append(metrics["loss"].item())
        norms.append(metrics["grad_norm"].item())
    assert losses[0] == losses[1] and norms[0] < norms[1]


@double
@pytest.mark.parametrize("value_scale", [1.0, 10.0])
def test_a_joint_advantage_is_return_to_go_minus_value(value_scale):
    cfg = rcp(**CRITIC | {"value_scale": value_scale}, critic="joint", command_source="maximum", burn_in=2)
    learner = learner_of(cfg)
    t = batch_of(cfg).trajectory
    label = learner.label(t)
    assert label.shape == (6, 4, 1) and not label.requires_grad
    for b in range(4):
        v = plain_values(learner, t, b)[2:]
        for k in range(6):
            expected = t.aux["return_to_go"][k, b].item() - value_scale * v[k].item()
            assert label[k, b, 0].item() == pytest.approx(expected, rel=1e-9)


@double
def test_a_separate_critic_is_trained_on_the_stored_targets():
    cfg = rcp(**CRITIC, burn_in=2, critic_optimizer=Adam(lr=1e-3))
    learner, batch = learner_of(cfg), batch_of(cfg)
    t, errors = batch.trajectory, []
    assert learner.critic is not None and learner.critic_optimizer is not None
    before = copy.deepcopy(learner.critic)
    for b in range(4):
        v = after_burn_in(before.torso, t, 2, b)
        linear: Any = [m for m in before.head if isinstance(m, nn.Linear)]
        for k, h in enumerate(v):
            if t.aux["valid"][k, b]:
                for layer in linear[:-1]:
                    h = affine(layer, h).relu()
                errors.append(affine(linear[-1], h)[0] - t.aux["value_target"][k, b])
    loss = torch.stack(errors).square().mean()
    policy = {k: v.clone() for k, v in learner_of(cfg).online.state_dict().items()}
    metrics = learner.update(batch).metrics
    assert metrics["value_loss"].item() == pytest.approx(loss.item(), rel=1e-10)
    found = {k: p.grad for k, p in learner.critic.named_parameters() if p.grad is not None}
    assert_close(found, gradients(loss, before))
    assert all(not torch.equal(a, b) for a, b in zip(before.parameters(), learner.critic.parameters(), strict=True))
    assert policy.keys() == learner.online.state_dict().keys()


def test_the_largest_advantage_of_a_period_is_the_next_command(monkeypatch):
    """At first that of the first batch, then the largest of four batches, with that batch's standard deviation."""
    cfg = rcp(**CRITIC, command_source="maximum", command_period=4)
    learner = learner_of(cfg)
    peaks = [3.0, 9.0, 2.0, 5.0, 4.0, 1.0, 8.0, 6.0, 7.0, 2.0, 1.0, 0.0]
    aims = []
    for n, peak in enumerate(peaks):
        batch = batch_of(cfg, n)
        label = batch.trajectory.aux["advantage"]
        label.clamp_(max=-1.0).masked_fill_(~batch.trajectory.aux["valid"], 1e3)  # padding has no advantage
        place = batch.trajectory.aux["valid"].nonzero()[0]
        label[place[0], place[1]] = peak
        learner.update(batch)
        valid = label[batch.trajectory.aux["valid"]]
        aims.append((learner.agent.pool.item(), learner.agent.noise.item(), valid.std().item()))
    deviation = [std for _, _, std in aims]
    first = [(3.0, deviation[0])] * 3
    expected = first + [(9.0, deviation[1])] * 4 + [(8.0, deviation[6])] * 4 + [(7.0, deviation[8])]
    assert [(p, n) for p, n, _ in aims] == [pytest.approx(pair) for pair in expected]


# -- saving -----------------------------------------------------------------------------------------------------------

SAVED: dict[str, ReturnConditioned] = {
    "udrl": udrl(**TOY, optimizer=Adam(lr=1e-2)),
    "udrl, everything": udrl(
        **TOY, normalise=True, ema_decay=0.8, max_inverse_temperature=3.0, inverse_temperature_steps=1_000
    ),
    "rcp-r": rcp(**TOY, command="return", ema_decay=0.9),
    "rcp-a": rcp(**CRITIC, ema_decay=0.9, normalise=True),
    "rcp-a, maximum": rcp(**CRITIC, command_source="maximum", command_period=3),
    "rcp-a, joint": rcp(**CRITIC, command_source="maximum", critic="joint", optimizer=RmsProp(momentum=0.9)),
}


@double
@pytest.mark.parametrize("cfg", SAVED.values(), ids=SAVED)
def test_a_saved_learner_continues_bit_for_bit(cfg):
    learner = learner_of(cfg)
    torch.manual_seed(2)
    other = learner_of(cfg)
    for n in range(5):
        learner.update(batch_of(cfg, n))
    other.update(batch_of(cfg, 99))
    saved = through_a_file({"agent": learner.agent.state_dict(), "learner": learner.state_dict()})
    other.agent.load_state_dict(saved["agent"])
    other.load_state_dict(saved["learner"])
    for n in range(5, 12):
        both = [learner, other]
        if cfg.command == "advantage" and n % 3 == 0:
            first, second = (x.update(whole_episodes(n)).value_targets for x in both)
            assert first is None if cfg.critic == "joint" else all(map(torch.equal, first, second))  # type: ignore
        mine, theirs = (x.update(batch_of(cfg, n)).metrics for x in both)
        assert {k: v.item() for k, v in mine.items()} == {k: v.item() for k, v in theirs.items()}
    assert other.updates == learner.updates == 12
    assert same(learner.agent.state_dict(), other.agent.state_dict())
    assert same(learner.online.state_dict(), other.online.state_dict())


# -- invalid settings --------------------------------------------------------------------------------------------------


LEAST_ONE = ("unroll", "max_inverse_temperature", "command_episodes", "critic_period", "command_period")


@pytest.mark.parametrize(
    ("cls", "settings", "sentence"),
    [
        *((Rcp, {name: 0}, rf"algo\.{name.replace('_', '-')}=0 must be at least 1") for name in LEAST_ONE),
        (
            Rcp,
            {"horizon": True, **TWO},
            r"algo\.horizon does not go with algo\.command=advantage: an advantage is of a",
        ),
        (Udrl, {"command_shift": (0.0,)}, r"algo\.command-shift=\(0\.0,\) must have as many numbers as a command: 2"),
        (
            Rcp,
            {"command_scale": (1.0, 1.0)},
            r"algo\.command-scale=\(1\.0, 1\.0\) must have as many numbers as a .*: 1",
        ),
        (Rcp, {"beta": 0.0}, r"algo\.beta=0\.0 must be positive"),
        (Rcp, {"beta": -1.0}, r"algo\.beta=-1\.0 must be positive"),
        (Rcp, {"beta": float("nan")}, r"algo\.beta=nan must be positive"),
        (Rcp, {"length_penalty": float("nan")}, r"algo\.replay\.length-penalty=nan must be at least 0"),
        (Rcp, {"weight_cap": 0.0}, r"algo\.weight-cap=0\.0 must be positive"),
        (Rcp, {"value_scale": 0.0}, r"algo\.value-scale=0\.0 must be positive"),
        (Udrl, {"grad_norm": 0.0}, r"algo\.grad-norm=0\.0 must be positive"),
        (Udrl, {"discount": 1.5}, r"algo\.discount=1\.5 must lie in \[0, 1\]"),
        (Udrl, {"label_smoothing": -0.1}, r"algo\.label-smoothing=-0\.1 must lie in \[0, 1\]"),
        (Udrl, {"ema_decay": 1.1}, r"algo\.ema-decay=1\.1 must lie in \[0, 1\]"),
        (Rcp, {"trace_decay": 2.0}, r"algo\.trace-decay=2\.0 must lie in \[0, 1\]"),
        (Udrl, {"final_lr_fraction": -0.5}, r"algo\.final-lr-fraction=-0\.5 must lie in \[0, 1\]"),
        (Udrl, {"return_increment": -1.0}, r"algo\.return-increment=-1\.0 must be at least 0"),
        (Udrl, {"burn_in": -1}, r"algo\.burn-in=-1 must be at least 0"),
        (Rcp, {"command_percentile": 101.0}, r"algo\.command-percentile=101\.0 must lie in \[0, 100\]"),
        (Udrl, {"head": ()}, r"algo\.head=\(\) must be layers of at least one unit"),
        (Udrl, {"head": (8, 0)}, r"algo\.head=\(8, 0\) must be layers of at least one unit"),
        (
            Udrl,
            {"command_source": "percentile"},
            r"algo\.command-source=percentile gives no horizon: use --algo\.no-horizo",
        ),
        (
            Rcp,
            {"command_source": "uniform"},
            r"algo\.command-source=uniform is of returns: with advantages use percentile",
        ),
        (
            Rcp,
            {"command_source": "episode"},
            r"algo\.command-source=episode is of returns: with advantages use percentile",
        ),
        (Udrl, {"discount": 0.0}, r"algo\.discount=0 makes a return-to-go undefined after the first step"),
        (Rcp, {"critic": "joint"}, r"algo\.command-source=percentile needs algo\.critic=separate"),
    ],
)
def test_invalid_settings_are_refused_in_a_sentence(cls, settings, sentence):
    with pytest.raises(UserError, match=sentence) as refused:
        configure(cls, **settings)
    assert "\n" not in str(refused.value)


def test_invalid_replay_settings_are_refused():
    with pytest.raises(UserError, match=r"algo\.replay\.warmup=0 must be at least 1"):
        Experiment(algo=udrl(warmup=0))
    with pytest.raises(
        UserError,
        match=r"algo\.replay\.sequence-length=300 must lie between 1 and algo\.replay\.batch-size=256, or be None",
    ):
        Experiment(algo=rcp(sequence_length=300))


OLD_SETTINGS: dict[str, Any] = {  # as version 0.1 wrote them
    "kind": "rcp", "command": "to-go", "source": "peak", "hold": True, "redraw": True, "top": 7, "distinct": True,
    "increment": 0.25, "percentile": 80.0, "peak_every": 5, "keep": "mixture", "capacity": 50, "moves": 900, "best": 3,
    "latest": 4, "best_share": 0.5, "draw": "moves", "adjust": True, "cut_penalty": 0.0, "haste": 0.1,
    "weigh": "moves", "ratio": 2.0, "per": "episode", "warmup": 9, "window": 6, "batch_size": 48, "shift": [1.0],
    "scale": [0.5], "smoothing": 0.02, "average": 0.99, "sharpen": 1.5, "sharpen_over": 100, "lr_last": 0.3,
    "critic": "own", "critic_every": 11,
}  # fmt: skip


def test_settings_of_version_0_1_are_read_under_todays_names():
    assert decode(Rcp, OLD_SETTINGS) == rcp(
        command="return-to-go", command_source="maximum", fixed_command=True, resample_command=True,
        command_episodes=7, distinct_returns=True, return_increment=0.25, command_percentile=80.0, command_period=5,
        keep="mixture", capacity=50, max_transitions=900, best_episodes=3, latest_episodes=4, best_fraction=0.5,
        sample_by="transitions", start_state_baseline=True, length_penalty=0.1, weight_by="transitions",
        updates_per_step=2.0, update_unit="episode", warmup=9, sequence_length=6, batch_size=48,
        command_shift=(1.0,), command_scale=(0.5,), label_smoothing=0.02, ema_decay=0.99,
        max_inverse_temperature=1.5, inverse_temperature_steps=100, final_lr_fraction=0.3, critic="separate",
        critic_period=11,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"cut_penalty=1\.0 is a setting of an earlier version"):
        decode(Rcp, OLD_SETTINGS | {"cut_penalty": 1.0})
    with pytest.raises(UserError, match="network cannot be 'hyper'"):
        decode(Rcp, OLD_SETTINGS | {"network": "hyper"})


def test_images_are_not_normalised():
    with pytest.raises(UserError, match=r"algo\.normalise is for vector observations, but camera has images"):
        udrl(normalise=True).agent(IMAGE, Net(), Ff())


@pytest.mark.parametrize("window", [4, None])
def test_a_burn_in_must_fill_the_frame_stack(window):
    """Without a recurrent core a sample is a single transition, so earlier frames must come from the burn-in."""
    with pytest.raises(UserError, match=r"algo\.burn-in=1 steps do not fill net\.frame-stack=3: raise it to 2"):
        udrl(sequence_length=window, burn_in=1).agent(IMAGE, Net(frame_stack=3), Ff())
    udrl(sequence_length=window, burn_in=2).agent(IMAGE, Net(frame_stack=3), Ff())


def test_whole_episodes_need_no_burn_in_for_frames():
    udrl(sequence_length=None, burn_in=0).agent(IMAGE, Net(frame_stack=3), Lstm(hidden=4))


def test_continuous_actions_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"Pendulum-v1 has the action space .*; only Discrete is supported"):
        bestiary.train(tiny(Gym("Pendulum-v1"), algo=Udrl()), tmp_path / "run")


def test_invalid_commands_are_refused():
    with pytest.raises(UserError, match=r"a command of this agent is a return and a number of steps: 2 numbers, not 1"):
        agent_of().set_command((5.0,))
    with pytest.raises(UserError, match=r"a command of this agent is a return: 1 numbers?, not 2"):
        agent_of(**ONE).set_command((5.0, 3.0))
    with pytest.raises(UserError, match=r"a command of this agent is an advantage: 1 numbers?, not 3"):
        agent_of(cls=Rcp, command_source="maximum").set_command((5.0, 3.0, 1.0))
    with pytest.raises(UserError, match=r"a desired horizon of 0\.5 steps is too short: it must be at least 1"):
        agent_of().set_command((5.0, 0.5))
    for wild in (float("nan"), float("inf")):
        with pytest.raises(UserError, match=r"a command must be made of finite numbers, not 5\.0, (nan|inf)"):
            agent_of().set_command((5.0, wild))
    with pytest.raises(
        UserError, match=r"a desired return of 500 is above algo\.max-return=320, the highest that was trained"
    ):
        agent_of(max_return=320.0).set_command((500.0, 3.0))


def test_other_agents_refuse_commands():
    with pytest.raises(UserError, match=r"--command is for agents that follow commands \(Udrl, Rcp\); this one does"):
        Impala().agent(LANDER, BARE, Ff()).set_command((5.0,))


@pytest.mark.parametrize("cfg", [udrl(start_state_baseline=True), Rcp(), rcp(command="return", burn_in=2)])
def test_the_replay_is_built_from_the_algorithms_settings(cfg):
    builder = cfg.replay_builder(3)
    assert builder.streams == 3 and builder.cfg is cfg.replay
    assert (builder.discount, builder.burn_in) == (cfg.discount, cfg.burn_in)
    assert builder.command_distribution == cfg.command_distribution
    assert (builder.critic_refresh is None) == (cfg.command != "advantage")
    assert not builder.needs_returns_to_go and rcp(command="return-to-go").replay_builder(3).needs_returns_to_go
    assert cfg.explorer(3)(time_step([True] * 3)).tolist() == [1.0] * 3


def test_the_critic_is_refreshed_at_the_algorithms_period():
    separate, joint = (
        rcp(critic=critic, command_source="maximum", critic_period=7).replay_builder(3).critic_refresh
        for critic in ("separate", "joint")
    )
    assert separate is not None and separate.period == 7 and separate.store
    assert joint is not None and joint.period == 7 and not joint.store


def test_a_learner_refuses_another_kind_of_agent():
    with pytest.raises(AssertionError):
        Udrl().learner(Impala().agent(LANDER, BARE, Ff()), 1)


# -- commands of episodes ----------------------------------------------------------------------------------------------


class NumberedCommands(ReturnConditionedAgent):
    """Every sampled command is another number."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls = 0

    def sample_commands(self, explore: Tensor | None, count: int, rng: torch.Generator) -> Tensor:
        self.calls += 1
        return torch.stack([self.calls + torch.arange(count) / 8, torch.full((count,), 50.0)], 1)


@pytest.mark.parametrize("env", [Catch(rows=5), Gym("CartPole-v1")], ids=["catch", "cartpole"])
@pytest.mark.parametrize("explore", [True, False])
def test_an_episode_reports_the_command_of_its_first_step(env, explore):
    env_batch = env.make(4, 0, 0, 1)
    agent = NumberedCommands(udrl(head=(4,)), env_batch.spec, Net(), Ff())
    actor = Actor(env_batch, agent, FixedExploration(torch.ones(4)) if explore else None, 7, 0, torch.device("cpu"))
    expected: list[list[tuple[float, ...]]] = [[] for _ in range(4)]
    seen = [0] * 4
    updated = False
    for number in range(12):
        t, episodes = actor.unroll()
        for k in range(0 if number == 0 else 1, len(t.action)):  # the first step is the last of the previous unroll
            for b in range(4):
                command = tuple(t.aux["command"][k, b].tolist())
                if t.step.is_first[k, b]:
                    expected[b].append(command)
                else:
                    updated |= command != expected[b][-1]
        for e in episodes:
            assert tuple(e.info.values()) == expected[e.slot][seen[e.slot]]
            assert list(e.info) == ["desired_return", "desired_horizon"]
            seen[e.slot] += 1
    env_batch.close()
    assert min(seen) > 1 and updated
    assert len({a for column in expected for a in column}) == sum(map(len, expected))


def test_a_resumed_actor_remembers_the_commands():
    def actor() -> Actor:
        env_batch = Catch(rows=5).make(3, 0, 0, 1)
        torch.manual_seed(0)
        agent = aimed([[1.0, 4.0], [0.5, 3.0], [-1.0, 4.0]], spread=np.array([2.0, 0.0]))
        other = agent.cfg.agent(env_batch.spec, Net(), Ff())
        other.set_command_distribution(command_distribution(agent.pool.numpy(), agent.spread.numpy()))
        return Actor(env_batch, other, FixedExploration(torch.ones(3)), 3, 0, torch.device("cpu"))

    one, two = actor(), actor()
    one.unroll()
    two.load_state_dict(through_a_file(one.state_dict()))
    for _ in range(4):
        mine, theirs = one.unroll()[1], two.unroll()[1]
        assert mine == theirs
        assert all(len(e.info) == 2 for e in mine)


def test_evaluations_summarise_the_commands():
    blank = Episode(0, 1.0, 5, 5, (1.0,), False)
    assert info_summary([]) == info_summary([blank]) == {}
    one = info_summary([blank._replace(info={"desired_return": x}) for x in (2.0, 4.0)])
    assert one["desired_return"]["mean"] == 3.0 and set(one) == {"desired_return"}
    numbers = [{"desired_return": 2.0, "desired_horizon": 10.0}, {"desired_return": 4.0, "desired_horizon": 20.0}]
    two = info_summary([blank._replace(info=info) for info in numbers])
    assert two["desired_return"]["mean"] == 3.0 and two["desired_horizon"]["mean"] == 15.0


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_a_command_that_was_set_is_used_in_every_episode(mode):
    env_batch = Catch(rows=5).make(3, 0, 0, 1)
    agent = udrl(head=(4,)).agent(env_batch.spec, Net(), Ff())
    agent.set_command_distribution(command_distribution(np.array([[7.0, 7.0]]), spread=5.0))
    agent.set_command((0.5, 4.0))
    for epsilon in (0.0, 0.5):
        episodes = play_episodes(agent, env_batch, 7, mode, generator(), epsilon=epsilon)
        assert [e.info for e in episodes] == [{"desired_return": 0.5, "desired_horizon": 4.0}] * 7


# -- whole runs -------------------------------------------------------------------------------------------------------

SHORT: dict[str, Any] = {
    "unroll": 7, "batch_size": 32, "head": (8,), "warmup": 20, "updates_per_step": 0.05, "capacity": 60,
    "best_episodes": 20, "latest_episodes": 20,
}  # fmt: skip
ALGOS: dict[str, ReturnConditioned] = {
    "udrl": udrl(**SHORT, ema_decay=0.9, max_inverse_temperature=2.0, inverse_temperature_steps=500),
    "rcp-a": rcp(**SHORT, critic_period=8, critic_head=(8,)),
    "rcp-r": rcp(**SHORT, command="return"),
}
CORES: dict[str, Any] = {"ff": Ff(), "lstm": Lstm(hidden=8), "delta-net": DELTA}


def short(algo: ReturnConditioned, core: Any, frames: int = 1_500) -> Experiment:
    return tiny(
        Catch(rows=5, columns=3), algo=algo, core=core, net=Net(encoder=Mlp(8)), frames=frames,
        runtime=Local(envs=6, threads=1),
    )  # fmt: skip


@pytest.mark.parametrize(("name", "core"), list(zip(ALGOS, CORES, strict=True)))  # each once, as they do not interact
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(name, core, tmp_path):
    experiment = short(ALGOS[name], CORES[core])
    whole = bestiary.train(experiment, tmp_path / "whole")
    parts = interrupted(experiment, tmp_path / "parts", 800)
    assert same(weights(whole), weights(parts))
    assert rows(whole) == rows(parts)
    assert rows(whole, "episodes.csv") == rows(parts, "episodes.csv")
    last = rows(whole)[-1]
    assert int(last["updates"]) > 45
    assert float(last["updates_per_step"]) == pytest.approx(0.05, rel=0.05)
    assert not weights(whole)["untrained"] and weights(whole)["pool"].any()


OTHERS: dict[str, ReturnConditioned] = {
    "udrl, per episode": udrl(
        **SHORT | {"updates_per_step": 0.2}, update_unit="episode", command_source="uniform", keep="best"
    ),
    "udrl, sequences": udrl(
        **SHORT, sequence_length=3, burn_in=2, sample_by="transitions", command_source="maximum", max_transitions=150
    ),
    "rcp-a, joint": rcp(
        **SHORT, critic="joint", command_source="maximum", critic_period=5, resample_command=True, critic_head=(8,)
    ),
    "rcp-r, discounted": rcp(**SHORT, command="return-to-go", command_source="maximum", network="gates"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_combinations_of_settings_run_and_resume(name, tmp_path):
    experiment = short(OTHERS[name], Lstm(hidden=8), frames=1_000)
    whole = bestiary.train(experiment, tmp_path / "whole")
    assert same(weights(whole), weights(interrupted(experiment, tmp_path / "parts", 500)))
    assert int(rows(whole)[-1]["updates"]) > 30


def test_short_episodes_are_trained_on_between_two_critic_refreshes(tmp_path):
    """All episodes with labels are evicted long before the next refresh is due."""
    algo = configure(ALGOS["rcp-a"], critic_period=1_000, capacity=10)
    run = bestiary.train(short(algo, Ff(), frames=1_000), tmp_path / "run")
    assert int(rows(run)[-1]["updates"]) > 30


def test_an_evaluation_uses_the_given_command(tmp_path):
    run = bestiary.train(short(ALGOS["udrl"], Ff(), frames=400), tmp_path / "run")
    usual = bestiary.evaluate(run, 5, modes=("greedy",), threads=1)
    other_command = bestiary.evaluate(run, 5, modes=("greedy", "sampled"), threads=1, command=(0.75, 4.0))
    assert usual["protocol"]["command"] == () and other_command["protocol"]["command"] == (0.75, 4.0)
    for mode in ("greedy", "sampled"):
        desired_return = other_command[mode]["info"]["desired_return"]
        assert desired_return["min"] == desired_return["max"] == 0.75
        assert other_command[mode]["info"]["desired_horizon"]["mean"] == 4.0
    assert other_command["file"].endswith("-command0.75-4.json") and usual["file"] != other_command["file"]
    assert set(usual["greedy"]["info"]) == {"desired_return", "desired_horizon"}
    with pytest.raises(UserError, match="2 numbers, not 1"):
        bestiary.evaluate(run, 5, threads=1, command=(1.0,))
    with pytest.raises(UserError, match="a desired horizon of 0 steps is too short"):
        bestiary.evaluate(run, 5, threads=1, command=(1.0, 0.0))
    other = bestiary.train(tiny(frames=200), tmp_path / "other")
    with pytest.raises(UserError, match="--command is for agents that follow commands"):
        bestiary.evaluate(other, 5, threads=1, command=(1.0,))


def test_the_command_of_evaluations_is_part_of_an_experiment(tmp_path):
    plan = Evaluation(every=200, episodes=3, command=(0.75, 4.0))
    run = bestiary.train(replace(short(ALGOS["udrl"], Ff(), frames=400), evaluation=plan), tmp_path / "run")
    with (run.path / "evaluations.csv").open() as file:
        assert [(r["desired_return"], r["desired_horizon"]) for r in csv.DictReader(file)] == [("0.75", "4")] * 2
    usual = bestiary.evaluate(run, 5, modes=("greedy",), threads=1)
    assert usual["greedy"]["info"]["desired_return"]["mean"] == 0.75 and usual["protocol"]["command"] == (0.75, 4.0)
    assert main.main(["eval", str(run.path), "--episodes", "5", "--mode", "greedy", "--command", "own"]) == 0
    (written,) = run.path.glob("eval-*-command-own.json")
    own = json.loads(written.read_text())
    assert own["greedy"]["info"]["desired_return"]["mean"] != 0.75 and own["protocol"]["command"] == []


def test_an_invalid_command_of_evaluations_is_refused_beforehand():
    with pytest.raises(UserError, match=r"--evaluation\.command is for agents that follow commands \(Udrl, Rcp\)"):
        tiny(evaluation=Evaluation(command=(1.0,)))
    with pytest.raises(UserError, match="a return and a number of steps: 2 numbers, not 1"):
        tiny(algo=Udrl(), evaluation=Evaluation(command=(1.0,)))
    with pytest.raises(UserError, match="a desired horizon of 0 steps is too short"):
        tiny(algo=Udrl(), evaluation=Evaluation(command=(1.0, 0.0)))


def test_the_command_line_takes_a_command(tmp_path, capsys):
    run = bestiary.train(short(ALGOS["udrl"], Ff(), frames=400), tmp_path / "run")
    few = ["--episodes", "3", "--mode", "greedy", "--threads", "1"]
    assert main.main(["eval", str(run.path), *few, "--command", "0.75,4"]) == 0
    (written,) = run.path.glob("eval-*-command0.75-4.json")
    assert json.loads(written.read_text())["greedy"]["info"]["desired_return"]["mean"] == 0.75
    other = bestiary.train(tiny(frames=200), tmp_path / "other")
    capsys.readouterr()
    for path, command, sentence in (
        (run.path, "1", "a command of this agent is a return and a number of steps: 2 numbers, not 1"),
        (run.path, "1,0", "a desired horizon of 0 steps is too short: it must be at least 1"),
        (other.path, "own", "--command is for agents that follow commands (Udrl, Rcp); this one does not"),
        (other.path, "1", "--command is for agents that follow commands (Udrl, Rcp); this one does not"),
    ):
        assert main.main(["eval", str(path), *few, "--command", command]) == 2
        assert capsys.readouterr().err == f"bestiary: {sentence}\n"
    with pytest.raises(SystemExit, match="2"):
        main.main(["eval", str(run.path), *few, "--command", "much"])
    assert "'much' is not a list of numbers; write it like" in capsys.readouterr().err


def test_evaluations_during_training_log_the_command(tmp_path):
    experiment = replace(short(ALGOS["rcp-r"], Ff(), frames=400), evaluation=Evaluation(episodes=3))
    run = bestiary.train(experiment, tmp_path / "run")
    desired = float(rows(run, "evaluations.csv")[-1]["desired_return"])
    assert desired == pytest.approx(weights(run)["pool"].item(), rel=1e-4)


# -- it learns --------------------------------------------------------------------------------------------------------


def score(experiment: Experiment, path: Any) -> float:
    run = bestiary.train(experiment, path)
    return bestiary.evaluate(run, 200, modes=("greedy",), threads=1)["greedy"]["score"]["mean"]


QUICK: dict[str, Any] = {
    "unroll": 5, "batch_size": 128, "capacity": 400, "warmup": 40, "updates_per_step": 1 / 16, "head": (64,),
    "optimizer": AdamW(lr=3e-3),
}  # fmt: skip
LEARNERS: dict[str, ReturnConditioned] = {
    "udrl": udrl(**QUICK),
    "rcp-r": rcp(**QUICK, command="return"),
    "rcp-a": rcp(**QUICK, critic_period=16, critic_head=(32,), value_scale=1.0, critic_optimizer=AdamW(lr=3e-3)),
}
CATCH = tiny(Catch(rows=6), net=BARE, core=Ff(), runtime=Local(envs=16, threads=1), frames=8_000)


@pytest.mark.learns
@pytest.mark.parametrize("name", LEARNERS)
def test_it_learns_to_catch(name, tmp_path):
    assert score(replace(CATCH, algo=LEARNERS[name]), tmp_path / "run") > 0.9  # a random policy: -0.6
    if name == "rcp-a":  # a low desired advantage gives bad actions
        result = bestiary.evaluate(tmp_path / "run", 200, modes=("greedy",), threads=1, command=(-2.0,))
        assert result["greedy"]["score"]["mean"] < 0.5


RECALL = replace(CATCH, env=Recall(delay=3, cues=3), algo=udrl(**QUICK | {"head": (32,)}), frames=8_000)


@pytest.mark.learns
def test_udrl_with_an_lstm_recalls(tmp_path):
    assert score(replace(RECALL, core=Lstm(hidden=32)), tmp_path / "run") > 0.9


@pytest.mark.learns
def test_udrl_without_memory_stays_at_chance_on_recall(tmp_path):
    assert score(RECALL, tmp_path / "run") < 0.48  # chance is a third, 200 episodes
