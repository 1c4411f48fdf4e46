"""DQN and SAC-Discrete against plain loops over time and batch, and as whole runs that are stopped and resumed."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.files import through_a_file
from helpers.learners import (
    CORE,
    HORIZON,
    NET,
    SPEC,
    after_burn_in,
    assert_close,
    count,
    episodes,
    gradients,
    sequential,
    shaken,
    windows,
)
from helpers.runs import interrupted, rows, same, tiny, weights
from helpers.settings import configure
from torch import Tensor, nn

import bestiary
from bestiary.algos import Dqn, SacDiscrete
from bestiary.algos.dqn import DqnLearner
from bestiary.algos.exploration import CountBasedExploration
from bestiary.algos.q_learning import QAgent
from bestiary.algos.sac_discrete import SacAgent, SacLearner
from bestiary.cores import Gpt, Lstm
from bestiary.envs import Recall
from bestiary.errors import UserError
from bestiary.nets import Mlp, Net, SmallCnn, Torso
from bestiary.nets.optim import Adam, RmsProp
from bestiary.replay import Uniform
from bestiary.runtime import Local, Overlap
from bestiary.runtime.start import start
from bestiary.training.display import NullDisplay
from bestiary.training.run import Run
from bestiary.training.session import Session
from bestiary.types import Batch, Spec, TimeStep, Trajectory

SMALL: dict[str, Any] = {"batch_size": 3, "head": (7,), "discount": 0.9, "capacity": 1000}


double = pytest.mark.usefixtures("_double")


# -- DQN -------------------------------------------------------------------------------------------------------------


def plain_dqn(cfg: Dqn, agent: QAgent, target: QAgent, t: Trajectory, gamma: float) -> Tensor:
    errors, weights = [], []
    for b in range(t.action.shape[1]):
        q = [sequential(agent.head, h) for h in after_burn_in(agent.torso, t, cfg.burn_in, b)]
        with torch.no_grad():
            slow = [sequential(target.head, h) for h in after_burn_in(target.torso, t, cfg.burn_in, b)]
        columns: Any = [[x[n, b].item() for n in range(cfg.burn_in, len(t.action))] for x in (*t.step[2:], t.action)]
        reward, is_first, is_terminal, action = columns

        def y(n: int) -> float:
            """The target of the transition from step n to step n+1."""
            if is_terminal[n + 1]:  # noqa: B023
                return reward[n + 1]  # noqa: B023
            best = int(q[n + 1].argmax())  # noqa: B023
            value = slow[n + 1][best].item() if cfg.double else slow[n + 1].max().item()  # noqa: B023
            goes_on = n + 2 < len(reward) and not is_first[n + 2]  # noqa: B023
            if goes_on and action[n + 1] == best:  # noqa: B023
                value = (1 - cfg.trace_decay) * value + cfg.trace_decay * y(n + 1)
            return reward[n + 1] + gamma * value  # noqa: B023

        for n in range(len(reward) - 1):
            if not is_first[n + 1]:
                error = q[n][action[n]] - y(n)
                if not cfg.huber:
                    errors.append(error**2)
                else:
                    errors.append(0.5 * error**2 if error.abs() < 1 else error.abs() - 0.5)
                weights.append(error.abs().item() ** cfg.td_weight_exponent)
    return sum(w * error for w, error in zip(weights, errors, strict=True)) / sum(weights)


def loss_of(learner: DqnLearner | SacLearner, t: Trajectory) -> tuple[Tensor, dict[str, Tensor]]:
    return learner.loss(Batch(t))[:2] if isinstance(learner, DqnLearner) else learner.loss(t)


def dqn_learner(**settings: Any) -> DqnLearner:
    cfg = configure(Dqn, **{**SMALL, "epsilon_last": 0.1, **settings})
    learner = cfg.learner(cfg.agent(SPEC, NET, CORE), 4000)
    shaken(learner.agent)
    shaken(learner.target.module, 2)
    return learner


CASES: dict[str, tuple[Callable[[int], Trajectory], dict[str, Any]]] = {
    "sequences": (windows, {"sequence_length": 8}),
    "episodes": (episodes, {}),
    "burn-in": (windows, {"sequence_length": 8, "burn_in": 3}),
    "burn-in of one step": (windows, {"sequence_length": 8, "burn_in": 1}),
    "stored state": (lambda seed: windows(seed, state=True), {"sequence_length": 8, "stored_state": True}),
    "stored state and burn-in": (
        lambda seed: windows(seed, state=True),
        {"sequence_length": 8, "burn_in": 3, "stored_state": True},
    ),
}


@double
@pytest.mark.parametrize("trace_decay", [0.0, 0.8])
@pytest.mark.parametrize(
    "rule", [{"double": True}, {"double": False}, {"huber": True}, {"td_weight_exponent": 1.5}], ids=str
)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_of_dqn_equal_those_of_a_loop(case, rule, trace_decay):
    make, settings = CASES[case]
    learner = dqn_learner(**settings, **rule, trace_decay=trace_decay)
    target = learner.target.module
    assert isinstance(target, QAgent)
    for seed in range(4):
        t = make(seed)
        loss, metrics = loss_of(learner, t)
        expected = plain_dqn(learner.cfg, learner.agent, target, t, 0.9)  # type: ignore[arg-type]
        assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
        assert metrics["loss"].item() == loss.item()
        found = gradients(loss, learner.agent)
        assert_close(found, gradients(expected, learner.agent))
        assert all(g.any() for g in found.values())


@double
def test_the_settings_of_the_cases_change_the_loss():
    """Otherwise the comparison with the loop could not fail."""
    losses = [
        loss_of(dqn_learner(**settings), windows(state=True))[0].item()
        for settings in (
            {"sequence_length": 8},
            {"sequence_length": 8, "double": False},
            {"sequence_length": 8, "huber": True},
            {"sequence_length": 8, "td_weight_exponent": 1.5},
            {"sequence_length": 8, "trace_decay": 0.8},
            {"sequence_length": 8, "burn_in": 3},
        )
    ]
    losses.append(loss_of(dqn_learner(sequence_length=8), windows())[0].item())  # without the state
    assert len({round(x, 6) for x in losses}) == 7


@double
def test_padding_changes_neither_loss_nor_gradient():
    learner = dqn_learner()
    t, alone = episodes(), []
    for b, length in enumerate((9, 4, 6)):
        step = TimeStep(*(x[:length, b : b + 1] for x in t.step))
        one = Trajectory(step, t.action[:length, b : b + 1], {}, (), t.version[:1])
        alone.append((length - 1) * loss_of(learner, one)[0])
    loss = loss_of(learner, t)[0]
    whole = torch.stack(alone).sum() / (8 + 3 + 5)
    assert loss.item() == pytest.approx(whole.item(), rel=1e-12)
    assert_close(gradients(loss, learner.agent), gradients(whole, learner.agent))


@double
def test_a_batch_without_valid_transitions_has_no_gradient():
    t = windows()
    padding = t._replace(step=t.step._replace(is_first=torch.ones_like(t.step.is_first)))
    for learner in (
        dqn_learner(),
        dqn_learner(td_weight_exponent=2.0),
        sac_learner(),
        sac_learner(td_weight_exponent=2.0),
    ):
        loss, metrics = loss_of(learner, padding)
        assert all(torch.isfinite(x) for x in metrics.values())
        assert all(not g.any() for g in gradients(loss, learner.agent).values())


# -- target networks ------------------------------------------------------------------------------------------------


def make_learner(cfg: Dqn | SacDiscrete, net: Net = NET, core: Any = CORE, total_steps: int = 4000) -> Any:
    agent = cfg.agent(SPEC, net, core)  # type: ignore[attr-defined]
    return cfg.learner(agent, total_steps)  # type: ignore[attr-defined]


def pairs(learner: Any) -> list[tuple[nn.Module, nn.Module]]:
    """(target network, online network) of a learner."""
    if isinstance(learner, DqnLearner):
        return [(learner.target.module, learner.agent)]
    found: list[tuple[nn.Module, nn.Module]] = [(learner.target.module, learner.critics)]
    return found if learner.target_torso is None else [*found, (learner.target_torso.module, learner.torso)]


TARGETS = {
    "dqn": configure(Dqn, **SMALL, epsilon_last=0.1),
    "sac": configure(SacDiscrete, **SMALL),
    "sac-encoder": configure(SacDiscrete, **SMALL, target_encoder=True),
    "sac-shared-encoder": configure(SacDiscrete, **SMALL, shared_encoder=True, target_encoder=True),
}


@double
@pytest.mark.parametrize("cfg", TARGETS.values(), ids=TARGETS)
def test_polyak_averaging_after_every_update(cfg):
    learner = make_learner(replace(cfg, tau=0.1))
    for k in range(4):
        before = [copy.deepcopy(mine.state_dict()) for mine, _ in pairs(learner)]
        learner.update(Batch(windows(k)))
        for old, (mine, theirs) in zip(before, pairs(learner), strict=True):
            for (name, p), new in zip(mine.named_parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(p, 0.9 * old[name] + 0.1 * new, rtol=1e-12, atol=1e-15)
                assert not torch.equal(p, new)


@double
@pytest.mark.parametrize("cfg", TARGETS.values(), ids=TARGETS)
def test_the_target_network_is_copied_once_per_period(cfg):
    learner = make_learner(replace(cfg, tau=None, target_update_period=3))
    for k in range(1, 8):
        before = [copy.deepcopy(list(mine.parameters())) for mine, _ in pairs(learner)]
        learner.update(Batch(windows(k)))
        for old, (mine, theirs) in zip(before, pairs(learner), strict=True):
            expected = theirs.parameters() if k % 3 == 0 else old
            assert all(torch.equal(p, e) for p, e in zip(mine.parameters(), expected, strict=True))


@double
@pytest.mark.parametrize("cfg", TARGETS.values(), ids=TARGETS)
def test_no_gradient_reaches_a_target_network(cfg):
    learner = make_learner(cfg)
    loss, _ = loss_of(learner, windows())
    for mine, theirs in pairs(learner):
        assert not any(p.requires_grad for p in mine.parameters())
        ours = {id(p) for p in mine.parameters()}
        assert not ours & {id(p) for group in learner.optimizer.param_groups for p in group["params"]}
        assert not ours & {id(p) for p in theirs.parameters()}
        mine.requires_grad_(True)
    again, _ = loss_of(learner, windows())
    assert again.item() == loss.item()
    for mine, _ in pairs(learner):
        assert not any(g.any() for g in gradients(again, mine).values())


def count_calls(modules: dict[str, nn.Module]) -> dict[str, int]:
    calls = dict.fromkeys(modules, 0)

    def hook(name: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            calls[name] += 1

        return count

    for name, module in modules.items():
        module.register_forward_hook(hook(name))
    return calls


@pytest.mark.parametrize("rule", [{}, {"double": False}, {"trace_decay": 0.8, "huber": True}], ids=str)
def test_dqn_evaluates_each_network_once_per_update(rule):
    learner = make_learner(configure(Dqn, **SMALL, epsilon_last=0.1, **rule))
    target = learner.target.module
    calls = count_calls(
        {"torso": learner.agent.torso, "head": learner.agent.head, "slow": target.torso, "slow head": target.head}
    )
    t = windows()
    learner.update(Batch(t._replace(step=t.step._replace(obs=t.step.obs.float(), reward=t.step.reward.float()))))
    assert set(calls.values()) == {1}


@double
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("slow", [True, False])
def test_sac_evaluates_each_network_once_per_update(shared, slow):
    learner = make_learner(configure(SacDiscrete, **SMALL, shared_encoder=shared, target_encoder=slow))
    modules = {"policy": learner.agent.policy, "critics": learner.critics, "slow critics": learner.target.module}
    modules |= {"torso": learner.torso, "own torso": learner.agent.torso}
    if slow:
        modules["slow torso"] = learner.target_torso.module
    if shared:
        assert modules.pop("own torso") is learner.torso
    calls = count_calls(modules)
    learner.update(Batch(windows()))
    assert set(calls.values()) == {1}


DROPOUT = Gpt(width=8, heads=2, layers=1, feedforward=8, window=9, dropout=0.5)


@double
@pytest.mark.parametrize("cfg", [TARGETS["dqn"], TARGETS["sac-encoder"]], ids=["dqn", "sac"])
def test_dropout_is_active_in_the_online_network_only(cfg):
    learner = make_learner(cfg, core=DROPOUT)
    assert all(not m.training for mine, _ in pairs(learner) for m in mine.modules())
    assert learner.agent.training
    slow, fast = pairs(learner)[-1]
    t, outputs = windows(), []
    for module in (slow, slow, fast, fast):
        torso: Any = module.torso if isinstance(module, QAgent) else module
        outputs.append(torso(t.step, torso.initial_state(3))[0])
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[2], outputs[3])
    assert loss_of(learner, t)[0].item() != loss_of(learner, t)[0].item()
    learner.update(Batch(t))
    assert all(not m.training for mine, _ in pairs(learner) for m in mine.modules())


# -- SAC ------------------------------------------------------------------------------------------------------------


def sac_learner(**settings: Any) -> SacLearner:
    learner = make_learner(configure(SacDiscrete, **(SMALL | settings)))
    shaken(learner.modules)
    for n, (mine, _) in enumerate(pairs(learner)):
        shaken(mine, 2 + n)
    return learner


def plain_sac(learner: SacLearner, t: Trajectory, alpha: float) -> tuple[Tensor, Tensor, float]:
    """Critic loss, policy loss and entropy, as the paper and the memory-RL reference write them."""
    cfg, agent, gamma = learner.cfg, learner.agent, 0.9
    critic, policy, entropy = [], [], []
    heads: Any = learner.critics.heads
    slow_heads: Any = learner.target.module.heads
    for b in range(t.action.shape[1]):
        h = after_burn_in(learner.torso, t, cfg.burn_in, b)
        mine = h if cfg.shared_encoder else after_burn_in(agent.torso, t, cfg.burn_in, b)
        slow = h
        if learner.target_torso is not None:
            slow = after_burn_in(learner.target_torso.module, t, cfg.burn_in, b)  # type: ignore[arg-type]
        reward, is_first, is_terminal = (x[cfg.burn_in :, b] for x in t.step[2:])
        action = t.action[cfg.burn_in :, b]
        for n in range(len(action) - 1):
            if is_first[n + 1]:
                continue
            # y = r + gamma (1 - d) sum_a pi(a) (min_i Q_i(a) - alpha log pi(a)), no gradient
            with torch.no_grad():
                pi = sequential(agent.policy, mine[n + 1]).softmax(0)
                q1, q2 = (sequential(head, slow[n + 1]) for head in slow_heads)
                value = sum(pi[a] * (min(q1[a], q2[a]) - alpha * pi[a].log()) for a in range(SPEC.num_actions))
                y = reward[n + 1] + gamma * (0 if is_terminal[n + 1] else 1) * value
            q1, q2 = (sequential(head, h[n]) for head in heads)
            critic.append(torch.stack([q1[action[n]] - y, q2[action[n]] - y]))
            pi = sequential(agent.policy, mine[n]).softmax(0)
            q_value = torch.minimum(q1, q2)
            if cfg.freeze_critic or not cfg.shared_encoder:
                q_value = q_value.detach()
            policy.append((pi * (alpha * pi.log() - q_value)).sum())
            entropy.append(-(pi * pi.log()).sum().item())
    losses = []
    for errors in torch.stack(critic).T:  # each critic has its own TD errors
        weights = [abs(e.item()) ** cfg.td_weight_exponent for e in errors]
        losses.append(0.5 * sum(w * e**2 for w, e in zip(weights, errors, strict=True)) / sum(weights))
    return losses[0] + losses[1], torch.stack(policy).mean(), sum(entropy) / len(entropy)


SAC = {
    "separate": {},
    "separate, slow encoder": {"target_encoder": True},
    "shared": {"shared_encoder": True},
    "shared, frozen": {"shared_encoder": True, "freeze_critic": True},
    "shared, frozen, focused": {"shared_encoder": True, "freeze_critic": True, "td_weight_exponent": 1.5},
    "shared, slow encoder": {"shared_encoder": True, "freeze_critic": True, "target_encoder": True},
}


@double
@pytest.mark.parametrize("case", ["sequences", "episodes", "stored state and burn-in"])
@pytest.mark.parametrize("kind", SAC)
def test_losses_and_gradients_of_sac_equal_those_of_a_loop(kind, case):
    make, settings = CASES[case]
    learner, t = sac_learner(**SAC[kind], **settings, temperature=0.3), make(0)
    loss, metrics = loss_of(learner, t)
    critic, policy, entropy = plain_sac(learner, t, 0.3)
    assert metrics["critic_loss"].item() == pytest.approx(critic.item(), rel=1e-10)
    assert metrics["policy_loss"].item() == pytest.approx(policy.item(), rel=1e-10)
    assert metrics["entropy"].item() == pytest.approx(entropy, rel=1e-10)
    assert loss.item() == pytest.approx((critic + policy).item(), rel=1e-10)
    found = gradients(loss, learner.modules)
    assert_close(found, gradients(critic + policy, learner.modules))
    assert all(g.any() for g in found.values())


def policy_gradient_fraction(learner: SacLearner, module: nn.Module) -> float:
    """The fraction of a module's gradient that comes from the policy loss."""
    t = windows()
    critic, _, _ = plain_sac(learner, t, learner.cfg.temperature)
    whole, own = gradients(loss_of(learner, t)[0], module), gradients(critic, module)
    return max((whole[k] - own[k]).abs().max().item() for k in whole)


@double
def test_the_policy_loss_changes_the_critics_unless_they_are_frozen():
    free, frozen = (sac_learner(shared_encoder=True, freeze_critic=f) for f in (False, True))
    assert policy_gradient_fraction(free, free.critics) > 1e-3
    assert policy_gradient_fraction(frozen, frozen.critics) < 1e-12
    assert policy_gradient_fraction(frozen, frozen.torso) > 1e-3  # through the policy head
    assert policy_gradient_fraction(frozen, frozen.agent.policy) > 1e-3
    for freeze in (False, True):
        apart = sac_learner(freeze_critic=freeze)
        assert policy_gradient_fraction(apart, apart.critics) < 1e-12
        assert policy_gradient_fraction(apart, apart.torso) < 1e-12
        assert policy_gradient_fraction(apart, apart.agent) > 1e-3


@double
def test_with_a_frozen_critic_the_core_gets_no_gradient_through_it():
    """The policy is constant here, so the core could get a gradient of the policy loss through the critics only."""
    shares = {}
    for freeze in (False, True):
        learner = sac_learner(shared_encoder=True, freeze_critic=freeze)
        last: Any = learner.agent.policy[-1]
        nn.init.zeros_(last.weight)  # the policy does not depend on the core
        shares[freeze] = policy_gradient_fraction(learner, learner.torso)
    assert shares[False] > 1e-3
    assert shares[True] < 1e-12


@double
def test_a_learnt_temperature_moves_entropy_towards_its_target():
    for certain in (True, False):
        learner = make_learner(configure(SacDiscrete, **SMALL, entropy_target=0.7, optimizer=Adam(lr=1e-2)))
        with torch.no_grad():
            learner.agent.policy[-1].weight.zero_()
            learner.agent.policy[-1].bias.copy_(torch.tensor([9.0, 0, 0, 0]) if certain else torch.zeros(4))
        assert learner.log_temperature.item() == 0.0
        metrics = [learner.update(Batch(windows(k))).metrics for k in range(3)]
        assert (metrics[0]["entropy"].item() < 0.7 * math.log(4)) == certain
        temperatures = [m["temperature"].item() for m in metrics] + [learner.log_temperature.exp().item()]
        assert temperatures[0] == 1.0
        assert temperatures == sorted(temperatures, reverse=not certain)
        assert len(set(temperatures)) == 4


@double
def test_the_gradient_of_the_temperature_is_the_entropy_gap():
    learner = sac_learner(entropy_target=0.7)
    with torch.no_grad():
        learner.log_temperature.fill_(math.log(0.4))
    loss, metrics = loss_of(learner, windows())
    (found,) = torch.autograd.grad(loss, [learner.log_temperature])
    assert metrics["temperature"].item() == pytest.approx(0.4)
    assert found.item() == pytest.approx(0.4 * (metrics["entropy"].item() - 0.7 * math.log(4)), rel=1e-10)


@double
def test_a_fixed_temperature_does_not_change():
    learner = sac_learner(temperature=0.25)
    for k in range(3):
        assert learner.update(Batch(windows(k))).metrics["temperature"].item() == pytest.approx(0.25)
    assert learner.log_temperature.grad is None


# -- schedules and derived settings --------------------------------------------------------------------------------


def test_epsilon_falls_linearly_over_a_tenth_of_the_budget():
    cfg = configure(Dqn, **SMALL, updates_per_step=0.25)  # 4000 steps: a tenth is 400, or 100 updates
    learner = make_learner(cfg)
    assert learner.agent.epsilon.item() == 1.0
    for updates in (0, 1, 37, 99, 100, 101, 5000):
        learner.updates = updates
        assert learner.epsilon() == pytest.approx(1 - (1 - 1 / HORIZON) * min(1, updates / 100))


@double
def test_every_update_sets_and_reports_epsilon():
    learner = make_learner(
        configure(Dqn, **SMALL, epsilon_first=0.8, epsilon_last=0.2, epsilon_fraction=0.5, updates_per_step=0.01)
    )
    epsilons = [learner.update(Batch(windows(k))).metrics["epsilon"].item() for k in range(22)]
    assert epsilons == pytest.approx([0.8 - 0.6 * min(1, k / 20) for k in range(1, 23)])
    assert learner.agent.state_dict()["epsilon"].item() == pytest.approx(0.2)


@pytest.mark.parametrize("explore", [0.0, 1.0])
def test_the_explorers_number_is_a_lower_bound_of_epsilon(explore):
    agent = configure(Dqn, **SMALL).agent(SPEC, NET, CORE)
    agent.epsilon.fill_(0.5)
    step = TimeStep(*(x[0, :1].expand(4000, *x.shape[2:]) for x in windows().step))
    step = step._replace(obs=step.obs.float(), reward=step.reward.float())
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        best, _, _ = agent.act(step, agent.initial_state(4000), None, rng)
        action, _, _ = agent.act(step, agent.initial_state(4000), torch.full((4000,), explore), rng)
    assert best.unique().numel() == 1
    p = 1 - max(0.5, explore) * 3 / 4
    assert (action == best).double().mean().item() == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / 4000))


@pytest.mark.parametrize("cfg", TARGETS.values(), ids=TARGETS)
def test_the_core_may_have_its_own_learning_rate(cfg):
    learner = make_learner(replace(cfg, core_lr=1e-5, optimizer=Adam(lr=1e-3)))
    everything = learner.agent if isinstance(learner, DqnLearner) else learner.modules
    memory = {id(p) for m in everything.modules() if isinstance(m, Torso) for p in m.core.parameters()}
    rates = {id(p): group["lr"] for group in learner.optimizer.param_groups for p in group["params"]}
    assert len(memory) == 4 * len({id(m) for m in everything.modules() if isinstance(m, Torso)})
    assert rates == {id(p): 1e-5 if id(p) in memory else 1e-3 for p in everything.parameters()}
    assert sum(len(group["params"]) for group in learner.optimizer.param_groups) == len(rates)
    plain = make_learner(cfg).optimizer.param_groups
    assert [len(group["params"]) for group in plain] == [len(rates)]


@double
@pytest.mark.parametrize("cfg", TARGETS.values(), ids=TARGETS)
def test_linear_decay_of_learning_rates_over_the_budget(cfg):
    cfg = configure(cfg, core_lr=1e-5, optimizer=Adam(lr=1e-3), lr_decay="linear", updates_per_step=0.01)
    learner = make_learner(cfg, total_steps=400)  # four updates

    def rates() -> list[float]:
        return [group["lr"] for group in learner.optimizer.param_groups]

    shares = []
    for _ in range(6):
        learner.update(Batch(windows()))
        assert rates()[0] == pytest.approx(100 * rates()[1])
        shares.append(rates()[0] / 1e-3)
    assert shares == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
    again = make_learner(cfg, total_steps=400)
    again.load_state_dict(learner.state_dict() | {"updates": 2})
    again.update(Batch(windows()))
    assert again.optimizer.param_groups[0]["lr"] == pytest.approx(0.5e-3)


@pytest.mark.parametrize("cfg", TARGETS.values(), ids=TARGETS)
def test_the_discount_may_follow_from_the_maximum_episode_length(cfg):
    assert make_learner(replace(cfg, discount=None)).discount == pytest.approx(1 - 1 / HORIZON)
    assert make_learner(cfg).discount == 0.9


@double
@pytest.mark.parametrize("cfg", TARGETS.values(), ids=TARGETS)
def test_gradients_are_clipped_only_if_set(cfg):
    norms = {}
    for limit in (None, 1e-3):
        torch.manual_seed(0)
        learner = make_learner(replace(cfg, grad_norm=limit))
        norms[limit] = learner.update(Batch(windows())).metrics["grad_norm"].item()
        everything = learner.agent if isinstance(learner, DqnLearner) else learner.modules
        applied = torch.stack([p.grad.norm() for p in everything.parameters() if p.grad is not None]).norm().item()
        assert applied == pytest.approx(norms[None] if limit is None else limit, rel=1e-3)
    assert norms[None] == norms[1e-3] > 1e-3  # the norm before clipping is reported


VECTOR = Spec("maze", (2,), torch.float32, 4)


def test_lstm_dqn_has_as_many_parameters_as_the_reference():
    net = Net(encoder=Mlp(hidden_size=32), action_units=16, prev_reward=False)
    assert count(Dqn().agent(VECTOR, net, Lstm(hidden=128))) == 191_156


def test_gpt_dqn_has_as_many_parameters_as_the_reference():
    net = Net(encoder=Mlp(hidden_size=64), action_units=64, prev_reward=False)
    assert count(Dqn().agent(VECTOR, net, Gpt(width=128, layers=1, heads=1, project=False))) == 298_884


def test_lstm_cnn_sac_has_as_many_parameters_as_the_reference():
    net = Net(encoder=SmallCnn(hidden_size=100), prev_action=False, prev_reward=False)
    cfg = SacDiscrete(shared_encoder=True)
    agent = cfg.agent(Spec("rooms", (3, 5, 5), torch.uint8, 4), net, Lstm(hidden=128))
    learner = cfg.learner(agent, 1)
    trained = [p for group in learner.optimizer.param_groups for p in group["params"]]
    assert sum(p.numel() for p in trained) == count(learner.modules) == 432_424


# -- saving ----------------------------------------------------------------------------------------------------------


SAVED = TARGETS | {
    "dqn-period": configure(Dqn, **SMALL, tau=None, target_update_period=4, trace_decay=0.8, core_lr=1e-4),
    "dqn-rmsprop": configure(Dqn, **SMALL, optimizer=RmsProp(momentum=0.9), grad_norm=1.0),
    "sac-shared": configure(SacDiscrete, **SMALL, shared_encoder=True, freeze_critic=True, core_lr=1e-4),
    "sac-temperature": configure(SacDiscrete, **SMALL, entropy_target=0.7, core_lr=1e-4),
    "sac-shared-temperature": configure(
        SacDiscrete, **SMALL, shared_encoder=True, entropy_target=0.7, tau=None, target_update_period=4
    ),
}


@double
@pytest.mark.parametrize("cfg", SAVED.values(), ids=SAVED)
def test_a_restored_learner_continues_bit_for_bit(cfg):
    torch.manual_seed(1)
    learner = make_learner(cfg)
    torch.manual_seed(2)
    other = make_learner(cfg)
    for k in range(3):
        learner.update(Batch(windows(k)))
    other.update(Batch(windows(9)))
    saved = through_a_file({"agent": learner.agent.state_dict(), "learner": learner.state_dict()})
    other.agent.load_state_dict(saved["agent"])
    other.load_state_dict(saved["learner"])
    for k in range(3, 7):
        metrics, again = (x.update(Batch(windows(k))).metrics for x in (learner, other))
        assert {k: v.item() for k, v in metrics.items()} == {k: v.item() for k, v in again.items()}
    assert other.updates == learner.updates == 7
    assert same(learner.agent.state_dict(), other.agent.state_dict())
    for (a, b), (c, d) in zip(pairs(learner), pairs(other), strict=True):
        assert same(dict(a.state_dict()), dict(c.state_dict()))
        assert same(dict(b.state_dict()), dict(d.state_dict()))


# -- whole runs ---------------------------------------------------------------------------------------------------

SHORT: dict[str, Any] = {
    "unroll": 7,
    "batch_size": 4,
    "head": (8,),
    "capacity": 700,
    "warmup": 120,
    "updates_per_step": 0.1,
}
ALGOS = {
    "dqn": configure(Dqn, **SHORT, count_epsilon=0.5, epsilon_fraction=0.5),
    "dqn-sequences": configure(
        Dqn,
        **SHORT,
        sequence_length=5,
        burn_in=2,
        stored_state=True,
        trace_decay=0.8,
        tau=None,
        target_update_period=10,
    ),
    "sac": configure(SacDiscrete, **SHORT, entropy_target=0.5, discount=None),
    "sac-shared": configure(
        SacDiscrete, **SHORT, sequence_length=6, shared_encoder=True, freeze_critic=True, target_encoder=True
    ),
}


def short(algo: Any, **changes: Any) -> Any:
    return tiny(Recall(delay=5), algo=algo, **({"runtime": Local(envs=4, threads=1), "frames": 1_400} | changes))


@pytest.mark.parametrize("name", ALGOS)
def test_half_a_run_resumed_equals_the_whole_run_bit_for_bit(name, tmp_path):
    experiment = short(ALGOS[name])
    whole = bestiary.train(experiment, tmp_path / "whole")
    parts = interrupted(experiment, tmp_path / "parts", 700)
    assert same(weights(whole), weights(parts))
    assert rows(whole) == rows(parts)
    assert rows(whole, "episodes.csv") == rows(parts, "episodes.csv")
    last = rows(whole)[-1]
    assert int(last["updates"]) > 80
    assert float(last["updates_per_step"]) == pytest.approx(0.1, rel=0.02)


def test_epsilon_travels_with_the_weights():
    runtime = start(short(ALGOS["dqn-sequences"]))
    seen = set()
    for _ in runtime:
        learner, acting = runtime.learner, runtime.actor
        expected = 1.0
        if acting.version:
            until = 0.1 * 1_400 * 0.1
            expected = 1 - (1 - 1 / 6) * min(1.0, acting.version / until)
        assert acting.agent.epsilon.item() == pytest.approx(expected)
        assert not acting.agent.training
        assert learner.agent.training
        seen.add(acting.version)
    runtime.close()
    assert len(seen) > 10


def test_counts_survive_a_change_of_the_number_of_environments(tmp_path):
    session = Session(short(ALGOS["dqn"]), tmp_path / "run", NullDisplay())
    for progress in session:
        if progress.frames > 600:
            break
    before = session.runtime.explorer
    assert isinstance(before, CountBasedExploration)
    wider = short(ALGOS["dqn"], runtime=Local(envs=6, threads=1))
    resumed = Session(wider, tmp_path / "run", NullDisplay()).runtime
    resumed.close()
    assert isinstance(resumed.explorer, CountBasedExploration)
    assert resumed.explorer is resumed.actor.explorer
    assert resumed.explorer.counts.sum() == before.counts.sum() > 600


@pytest.mark.timeout(300)
@pytest.mark.parametrize("algo", ["dqn", "dqn-sequences"])
def test_overlap_keeps_the_updates_per_step_and_resumes_the_replay(algo, tmp_path):
    experiment = short(ALGOS[algo], runtime=Overlap(envs=4, threads=1), frames=1_400)
    session = Session(experiment, tmp_path / "run", NullDisplay())
    runtime: Any = session.runtime
    updates = 0
    for progress in session:
        updates = progress.updates
        with runtime.changed:
            ahead = 0.1 * runtime.replay.rate_limiter.steps - updates
        if progress.frames > 400:
            assert 0 <= ahead <= 0.1 * 4 * 28
    assert updates > 80
    saved = Run(tmp_path / "run").load_replay()
    longer = Session(replace(experiment, frames=2_000), tmp_path / "run", NullDisplay())
    replay: Any = longer.runtime.replay
    explorer = longer.runtime.explorer
    assert replay.ring.newest == saved["newest"]
    assert (replay.rate_limiter.steps, replay.rate_limiter.batches) == (saved["moves"], saved["batches"])
    assert replay.ring.newest >= 350
    if isinstance(explorer, CountBasedExploration):
        assert explorer.counts.sum() >= 1_400
    *_, last = longer
    assert last.frames >= 2_000
    assert last.updates > 120


@pytest.mark.timeout(300)
def test_overlap_waits_for_the_end_of_the_first_episode(tmp_path):
    algo = configure(Dqn, **SHORT | {"warmup": 0, "updates_per_step": 1.0, "unroll": 3}, epsilon_last=0.1)
    experiment = tiny(Recall(delay=30), algo=algo, runtime=Overlap(envs=2, threads=1), frames=150)
    run = bestiary.train(experiment, tmp_path / "run")
    assert run.load().trainer["runtime"]["learner"]["updates"] > 0


# -- invalid settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "settings", "sentence"),
    [
        (Dqn, {"unroll": 0}, r"algo\.unroll=0 must be at least 1"),
        (Dqn, {"discount": 1.5}, r"algo\.discount=1\.5 must lie in \[0, 1\]"),
        (SacDiscrete, {"tau": -0.1}, r"algo\.tau=-0\.1 must lie in \[0, 1\]"),
        (Dqn, {"tau": None, "target_update_period": 0}, r"algo\.target-update-period=0 must be positive, or None"),
        (Dqn, {"grad_norm": 0.0}, r"algo\.grad-norm=0\.0 must be positive, or None"),
        (SacDiscrete, {"core_lr": -1.0}, r"algo\.core-lr=-1\.0 must be positive, or None"),
        (Dqn, {"target_update_period": 10}, r"set one of algo\.tau .* and algo\.target-update-period"),
        (Dqn, {"tau": None}, r"set one of algo\.tau .* and algo\.target-update-period"),
        (
            Dqn,
            {"burn_in": -1, "sequence_length": 5},
            r"algo\.burn-in=-1 must be at least 0 and below algo\.replay\.sequence-length=5",
        ),
        (
            Dqn,
            {"burn_in": 5, "sequence_length": 5},
            r"algo\.burn-in=5 must be at least 0 and below algo\.replay\.sequence-length=5",
        ),
        (
            SacDiscrete,
            {"burn_in": 1},
            r"algo\.burn-in=1 must be at least 0 and below algo\.replay\.sequence-length=None",
        ),
        (Dqn, {"head": (256, 0)}, r"algo\.head=\(256, 0\) must be layers of at least one unit"),
        (Dqn, {"trace_decay": 1.1}, r"algo\.trace-decay=1\.1 must lie in \[0, 1\]"),
        (SacDiscrete, {"td_weight_exponent": -1.0}, r"algo\.td-weight-exponent=-1\.0 must be at least 0"),
        (Dqn, {"epsilon_first": 2.0}, r"algo\.epsilon-first=2\.0 must lie in \[0, 1\]"),
        (Dqn, {"epsilon_last": -0.5}, r"algo\.epsilon-last=-0\.5 must lie in \[0, 1\]"),
        (Dqn, {"epsilon_fraction": 10}, r"algo\.epsilon-fraction=10 must lie in \[0, 1\]"),
        (Dqn, {"count_epsilon": 1.5}, r"algo\.count-epsilon=1\.5 must lie in \[0, 1\]"),
        (SacDiscrete, {"temperature": 0.0}, r"algo\.temperature=0\.0 must be positive"),
        (SacDiscrete, {"entropy_target": 1.2}, r"algo\.entropy-target=1\.2 must lie in \[0, 1\]"),
    ],
)
def test_invalid_settings_are_refused(cls, settings, sentence):
    with pytest.raises(UserError, match=sentence):
        configure(cls, **settings)


@pytest.mark.parametrize("cls", [Dqn, SacDiscrete])
def test_samples_that_do_not_fit_the_longest_episode_are_refused(cls):
    def start(**settings):
        configure(cls, **settings).learner(configure(cls, **settings).agent(SPEC, NET, CORE), 100)

    with pytest.raises(
        UserError, match=r"algo\.replay\.sequence-length=9 is longer than any episode of toy \(8 steps\)"
    ):
        start(sequence_length=9)
    with pytest.raises(
        UserError, match=r"algo\.replay\.capacity=511 is too small for one batch: it needs 512 transitions"
    ):
        start(capacity=511)
    with pytest.raises(
        UserError, match=r"algo\.replay\.capacity=100 is too small for one batch: it needs 128 transitions"
    ):
        start(capacity=100, sequence_length=2)
    Uniform(batch_size=1, sequence_length=9, capacity=20).check_fits(SPEC._replace(horizon=None))


@pytest.mark.parametrize(
    ("cfg", "flag"),
    [(Dqn(), "epsilon-last"), (Dqn(discount=None), "discount"), (SacDiscrete(discount=None), "discount")],
    ids=["epsilon", "dqn", "sac"],
)
def test_derived_settings_need_a_maximum_episode_length(cfg, flag):
    agent = cfg.agent(SPEC._replace(horizon=None), NET, CORE)
    with pytest.raises(UserError, match=rf"toy does not say how long its episodes can be: set --algo\.{flag}"):
        cfg.learner(agent, 100)


def test_the_replay_is_built_from_the_settings_of_the_algorithm():
    replay = Uniform(5, 900, 11, updates_per_step=0.5, sequence_length=7, stored_state=True)
    built = Dqn(replay=replay, unroll=6).replay_builder(3)
    assert (built.cfg, built.streams, built.unroll) == (replay, 3, 6)


def test_count_based_exploration_is_off_by_default():
    assert Dqn().explorer(3)(windows()[0]).tolist() == [0.0, 0.0, 0.0]
    explorer = Dqn(count_epsilon=0.3).explorer(3)
    assert isinstance(explorer, CountBasedExploration)
    assert explorer.scale == 0.3


def test_learners_belong_to_their_agents():
    assert isinstance(SacDiscrete().agent(VECTOR, NET, CORE), SacAgent)
    with pytest.raises(AssertionError):
        Dqn().learner(SacDiscrete().agent(VECTOR, NET, CORE), 1)
    with pytest.raises(AssertionError):
        SacDiscrete().learner(Dqn().agent(VECTOR, NET, CORE), 1)
