"""Compiled acting: the same trajectories as the ordinary actor, for every core and algorithm that supports it."""

from typing import Any

import pytest
import torch
from torch import nn

from bestiary.acting.actor import Actor
from bestiary.algos import Apex, Dqn, Impala, R2d2, SacDiscrete
from bestiary.analysis.core_contract import check_contract
from bestiary.config.experiment import family
from bestiary.cores import DeltaNet, DeltaRnn, Ff, Gpt, Gru, LinearTransformer, Lstm, RecurrentDeltaNet
from bestiary.cores.base import Core
from bestiary.cores.rnn import GatedCore
from bestiary.envs import Catch, Recall, TMaze, VisualMatch
from bestiary.nets import Mlp, Net
from bestiary.types import Episode, State, Trajectory

B, T = 6, 23
CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"width": 16, "heads": 2, "layers": 2, "feedforward": 24}
CORES = {
    "ff": Ff(),
    "lstm": Lstm(hidden=12, layers=2),
    "gru": Gru(hidden=12, layers=2),
    "linear-transformer": LinearTransformer(**SMALL),
    "delta-net": DeltaNet(**SMALL, beta_bias=1.0),
    "recurrent-delta-net": RecurrentDeltaNet(**SMALL, feature_map="silu"),
    "delta-rnn": DeltaRnn(**SMALL, head_width=5),
}
ALGOS = {
    "impala": Impala(),
    "dqn": Dqn(head=(16,), count_epsilon=0.5),
    "apex": Apex(head=(16,), epsilon_base=0.9, epsilon_alpha=3.0),
    "r2d2": R2d2(head=(), epsilon_base=0.9),
    "sac-discrete": SacDiscrete(head=(16, 8)),
}
ENVS = {"tmaze": TMaze(4, active=True), "visual-match": VisualMatch(3), "recall": Recall(3), "catch": Catch()}


def actor(env: Any, algo: Any, core: Any, net: Net = Net()) -> Actor:  # noqa: B008
    env_batch = env.make(B, 3, 0, 1)
    torch.manual_seed(0)
    agent = algo.agent(env_batch.spec, net, core)
    with torch.no_grad():
        for p in agent.parameters():
            p.mul_(3)  # larger preferences than at the start, so that network outputs and not only the noise decide
        if isinstance(algo, Dqn):
            agent.epsilon.fill_(0.2)
    return Actor(env_batch, agent, algo.explorer(B), T, 5, CPU)


def both(*parts: Any, **options: Any) -> tuple[Actor, Actor]:
    fast, slow = actor(*parts, **options), actor(*parts, **options)
    assert fast.compiled_actor is not None
    slow.compiled_actor = None
    return fast, slow


def assert_same(fast: tuple[Trajectory, list[Episode]], slow: tuple[Trajectory, list[Episode]]) -> None:
    (x, episodes), (y, expected) = fast, slow
    names = [*y.step._fields, "action", "version"]
    for name, a, b in zip(names, [*x.step, x.action, x.version], [*y.step, y.action, y.version], strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), name
    assert x.aux.keys() == y.aux.keys()
    for a, b in zip([*x.aux.values(), *x.state], [*y.aux.values(), *y.state], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert episodes == expected


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("core", CORES)
def test_compiled_and_ordinary_unrolls_agree(env, core):
    fast, slow = both(ENVS[env], ALGOS["dqn"], CORES[core])
    for _ in range(3):
        assert_same(fast.unroll(), slow.unroll())


@pytest.mark.parametrize("algo", ALGOS)
def test_they_agree_for_every_algorithm(algo):
    return_conditioned = {"udrl", "rcp"}  # a command is sampled and updated at every step: these use the ordinary loop
    assert set(ALGOS) | return_conditioned == set(family("algo"))
    fast, slow = both(ENVS["tmaze"], ALGOS[algo], CORES["delta-net"])
    for _ in range(3):
        assert_same(fast.unroll(), slow.unroll())


@pytest.mark.parametrize(
    "net",
    [
        Net(prev_action=False, prev_reward=False),
        Net(action_units=5, reward_units=3),
        Net(encoder=Mlp(hidden_size=9, num_layers=3), prev_reward=False),
    ],
    ids=["observation alone", "layers of their own", "deeper"],
)
def test_they_agree_for_all_network_inputs(net):
    fast, slow = both(ENVS["tmaze"], ALGOS["dqn"], CORES["gru"], net=net)
    assert_same(fast.unroll(), slow.unroll())


def test_new_weights_reach_the_compiled_loop():
    fast, slow = both(ENVS["tmaze"], ALGOS["dqn"], CORES["lstm"])
    before = fast.unroll()
    assert_same(before, slow.unroll())
    weights = {k: -v if v.dim() else v for k, v in fast.agent.state_dict().items()}
    for a in (fast, slow):
        a.load(weights, version=1)
    after = fast.unroll()
    assert_same(after, slow.unroll())
    assert not torch.equal(after[0].action, before[0].action)


def test_the_ordinary_loop_can_resume_a_compiled_one():
    """Saved by the compiled loop, resumed by the ordinary one."""
    fast, slow = both(ENVS["tmaze"], ALGOS["dqn"], CORES["delta-rnn"])
    fast.unroll()
    slow.load_state_dict(fast.state_dict())
    assert_same(fast.unroll(), slow.unroll())


class DoubledCore(GatedCore):
    """Its forward pass differs from the program that it inherits."""

    def forward(self, x: torch.Tensor, is_first: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        y, state = super().forward(x, is_first, state)
        return 2 * y, state


class DoubledLstm(Lstm):
    def build(self, input_width: int) -> Core:
        return DoubledCore(nn.LSTM(input_width, 8), 2, None)


def test_a_subclass_does_not_use_its_parents_program():
    assert actor(ENVS["tmaze"], ALGOS["dqn"], DoubledLstm()).compiled_actor is None
    violations = [finding.requirement for finding in check_contract(DoubledLstm()) if finding.violation]
    assert violations == ["the compiled form of the core, if it has one, computes the same"]


def test_networks_that_cannot_be_compiled_use_the_ordinary_loop():
    assert actor(ENVS["tmaze"], ALGOS["dqn"], Gpt(width=16, heads=2, layers=1)).compiled_actor is None
    assert (
        actor(ENVS["recall"], ALGOS["dqn"], Lstm(hidden=512)).compiled_actor is None
    )  # large products are faster all at once
    assert actor(ENVS["catch"], ALGOS["dqn"], Ff(), Net(frame_stack=2)).compiled_actor is None
