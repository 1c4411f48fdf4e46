"""Ape-X and R2D2: the actor's initial priorities are those of the learner, and both equal plain loops."""

import copy
import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.learners import CORE, NET, SPEC, after_burn_in, assert_close, gradients, sequential, shaken, windows
from helpers.settings import configure
from torch import Tensor, nn

from bestiary import tree
from bestiary.acting.actor import Actor
from bestiary.algos import Apex, Dqn, R2d2
from bestiary.algos.burn_in import split_burn_in
from bestiary.algos.q_learning import QAgent
from bestiary.algos.r2d2 import R2d2Learner
from bestiary.cores import DeltaNet, Ff, Gpt, Lstm
from bestiary.envs import Catch, Recall
from bestiary.envs.batched import VectorEnvBatch
from bestiary.envs.catch import CatchEnv
from bestiary.envs.env_batch import EnvBatch
from bestiary.errors import UserError
from bestiary.nets import Dueling, Net, Shallow, SmallCnn, Torso
from bestiary.nets.optim import Adam
from bestiary.replay.prioritized import PrioritizedReplay
from bestiary.types import Batch, Spec, TimeStep, Trajectory

B = 5  # environments
SMALL: dict[str, Any] = {"head": (7,), "batch_size": 16, "updates_per_step": 1.0, "capacity": 150 * B, "warmup": 500}
APEX: dict[str, Any] = SMALL | {"unroll": 10}
R2D2: dict[str, Any] = SMALL | {"unroll": 5, "sequence_length": 15, "burn_in": 5, "stored_state": True}
IMAGE_SPEC = Spec("image", (1, 6, 5), torch.uint8, 4)
ATARI = Spec("Any", (1, 84, 84), torch.uint8, 18)


double = pytest.mark.usefixtures("_double")


# -- initial priorities ----------------------------------------------------------------------------------------------


class RichEnv(CatchEnv):
    """Catch with rewards at every step, rewards beyond 1 at the end, and a time limit in one column."""

    def _step(self, action):
        reward, landed, _ = super()._step(action)
        late = (self.ball_row == 6) & (self.ball_col == 0)
        return 4 * reward + 0.5 * (self.paddle == self.ball_col), landed, late & ~landed


@dataclass(frozen=True)
class Rich:
    def make(self, num_envs: int, seed: int, stream: int, threads: int) -> EnvBatch:
        return VectorEnvBatch("Rich", RichEnv(num_envs), seed, stream)


@cache
def program(actor_name: str) -> tuple[QAgent, list[Trajectory]]:
    """An agent and the trajectories of its actor, which do not depend on the learner."""
    cls, settings, env, core, net = ACTORS[actor_name]
    algo, env_batch = configure(cls, **settings), env.make(B, 3, 0, 1)
    torch.manual_seed(0)
    agent = algo.agent(env_batch.spec, net, core)
    with torch.no_grad():
        for p in agent.parameters():
            p.mul_(3)  # larger differences between Q-values than at initialisation
    actor = Actor(env_batch, copy.deepcopy(agent), algo.explorer(B), algo.unroll, 5, torch.device("cpu"))
    return agent, [actor.unroll()[0] for _ in range(200 // algo.unroll)]


def learner_and_replay(actor_name: str, **changes: Any) -> tuple[R2d2Learner, PrioritizedReplay]:
    """A learner before its first update, and the wrapped-around replay of an actor with its weights."""
    cls, settings, *_ = ACTORS[actor_name]
    algo: Apex | R2d2 = configure(cls, **(settings | changes))
    agent, trajectories = program(actor_name)
    replay = algo.replay_builder(B).build(0, agent.spec, agent.initial_state(1))
    for trajectory in trajectories:
        replay.add(trajectory)
    assert replay.ring.oldest > 0
    return algo.learner(copy.deepcopy(agent), 1000), replay


def batch_of(replay: PrioritizedReplay) -> tuple[Batch, Tensor]:
    """A batch and the priorities by which it was sampled."""
    batch = replay.sample()
    assert batch is not None and batch.keys is not None
    slots = replay._slots(*np.divmod(batch.keys.numpy(), B))
    return batch, torch.from_numpy(replay.tree.weights(slots)) ** (1 / replay.cfg.priority_exponent)


DELTA = DeltaNet(width=8, heads=2, layers=1, feedforward=8)
GPT = Gpt(width=8, heads=2, layers=1, window=9)
ACTORS: dict[str, tuple[type, dict[str, Any], Any, Any, Net]] = {
    "apex": (Apex, APEX, Catch(), Ff(), Net()),
    "apex, frame stack": (Apex, APEX, Rich(), Ff(), Net(frame_stack=4)),
    "r2d2, lstm": (R2d2, R2D2, Recall(4), Lstm(hidden=6), Net()),
    "r2d2, delta-net": (R2d2, R2D2, Recall(4), DELTA, Net()),
    "r2d2, gpt": (R2d2, R2D2, Recall(12), GPT, Net()),
    "r2d2, lstm and frame stack": (R2d2, R2D2, Rich(), Lstm(hidden=6), Net(frame_stack=3)),
    "r2d2, frame stack alone": (R2d2, R2D2, Rich(), Ff(), Net(frame_stack=3)),
}
RULES: dict[str, dict[str, Any]] = {
    "plain": {"value_rescale_eps": None, "reward_clip": "none"},
    "rescaled": {"value_rescale_eps": 1e-2, "reward_clip": "none"},
    "clipped": {"value_rescale_eps": None, "reward_clip": "abs_one"},
    "rescaled and clipped": {"value_rescale_eps": 1e-3, "reward_clip": "soft_asymmetric"},
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("n_step", [1, 3, 5])
@pytest.mark.parametrize("actor_name", ACTORS)
def test_actor_and_learner_agree_on_priorities_with_equal_weights(actor_name, n_step, rule):
    learner, replay = learner_and_replay(actor_name, **rule, n_step=n_step)
    seen = []
    for _ in range(2):
        batch, initial = batch_of(replay)
        _, metrics, priorities = learner.loss(batch)
        torch.testing.assert_close(initial, priorities.double(), rtol=1e-4, atol=1e-4)
        assert metrics["q_discrepancy"] < 1e-4
        if "lstm" in actor_name or "delta" in actor_name:
            assert metrics["state_discrepancy"] < 1e-4
        seen += priorities.tolist()
    assert max(seen) > 0.1
    assert len({round(p, 4) for p in seen}) > 8


def test_the_rules_change_the_priorities():
    """Otherwise the comparison could not fail."""
    totals = set()
    for rule in RULES.values():
        for n_step in (1, 3, 5):
            totals.add(round(learner_and_replay("apex, frame stack", **rule, n_step=n_step)[1].tree.total, 3))
    assert len(totals) == 12


@pytest.mark.parametrize("actor_name", ["apex", "r2d2, lstm", "r2d2, delta-net"])
def test_discrepancies_grow_with_learning(actor_name):
    learner, replay = learner_and_replay(actor_name, optimizer=Adam(lr=1e-2))
    discrepancies = []
    for _ in range(4):
        batch, _ = batch_of(replay)
        discrepancies.append(
            {k: v.item() for k, v in learner.update(batch).metrics.items() if k.endswith("_discrepancy")}
        )
    names = {"q_discrepancy"} if actor_name == "apex" else {"q_discrepancy", "state_discrepancy"}
    assert all(found.keys() == names for found in discrepancies)
    for name in names:
        assert discrepancies[0][name] < 1e-4
        assert all(found[name] > 1e-3 for found in discrepancies[1:])


def test_discrepancies_are_relative_to_the_actors_values():
    learner, replay = learner_and_replay("r2d2, lstm")
    batch, _ = batch_of(replay)
    t = batch.trajectory
    q = t.aux["q"].clone()
    q[5] += 0.1
    actor_state = tuple(1.5 * leaf for leaf in batch.actor_state)
    metrics = learner.loss(batch._replace(trajectory=t._replace(aux={"q": q}), actor_state=actor_state))[1]
    difference = 0.1 * math.sqrt(q[5].numel())
    assert metrics["q_discrepancy"].item() == pytest.approx(difference / q[5].amax(-1).norm().item(), rel=1e-3)
    assert metrics["state_discrepancy"].item() == pytest.approx(1 / 3, rel=1e-3)


# -- the loss, as the papers write it ---------------------------------------------------------------------------------


def h(x: float, eps: float | None) -> float:
    return x if eps is None else math.copysign(math.sqrt(abs(x) + 1) - 1, x) + eps * x


def h_inverse(z: float, eps: float | None) -> float:
    if eps is None:
        return z
    root = math.sqrt(1 + 4 * eps * (abs(z) + 1 + eps))
    return math.copysign(((root - 1) / (2 * eps)) ** 2 - 1, z)


def values(agent: QAgent, h: Tensor, legal: tuple[bool, ...]) -> list[Tensor]:
    """The Q-value of each action; -inf for illegal actions."""
    if isinstance(agent.head, Dueling):
        v, a = sequential(agent.head.value, h)[0], sequential(agent.head.advantage, h)
        mean = sum(a[i] for i in range(len(legal)) if legal[i]) / sum(legal)
        q = [v + advantage - mean for advantage in a]
    else:
        q = list(sequential(agent.head, h))
    return [x if ok else torch.tensor(-math.inf) for x, ok in zip(q, legal, strict=True)]


def best_of(q: list[Tensor]) -> int:
    return max(range(len(q)), key=lambda action: q[action].item())


def plain(learner: R2d2Learner, batch: Batch) -> tuple[Tensor, list[float]]:
    """Loss and priorities: Horgan et al. 2018, section 3; Kapturowski et al. 2019, section 2.3."""
    cfg, agent, slow = learner.cfg, learner.agent, learner.target.module
    assert isinstance(slow, QAgent) and batch.weight is not None and cfg.discount is not None
    t, legal = batch.trajectory, agent.spec.legal or (True,) * agent.spec.num_actions
    loss, priorities = torch.zeros(()), []
    for b in range(t.action.shape[1]):
        q = [values(agent, h, legal) for h in after_burn_in(agent.torso, t, cfg.burn_in, b)]
        with torch.no_grad():
            beyond = [values(slow, h, legal) for h in after_burn_in(slow.torso, t, cfg.burn_in, b)]
        reward, is_first, is_terminal, action = (x[cfg.burn_in :, b].tolist() for x in (*t.step[2:], t.action))
        errors = []
        for start in range(cfg.replay.trained_length(cfg.burn_in)):
            if is_first[start + 1]:
                continue  # there is no transition between two episodes
            total, discount, step = 0.0, 1.0, start
            for _ in range(cfg.n_step):
                if is_first[step + 1]:
                    break  # truncated: bootstrap from the last observation
                step += 1
                clipped = max(-1.0, min(1.0, reward[step])) if cfg.reward_clip == "abs_one" else reward[step]
                total += discount * clipped
                discount *= 0.0 if is_terminal[step] else cfg.discount
            best = best_of(q[step] if cfg.double else beyond[step])
            value = h_inverse(beyond[step][best].item(), cfg.value_rescale_eps)
            y = h(total + discount * value, cfg.value_rescale_eps)
            error = q[start][action[start]] - y
            errors.append(abs(error.item()))
            small = not cfg.huber or errors[-1] < 1
            loss = loss + batch.weight[b] * (error**2 / 2 if small else error.abs() - 0.5)
        eta = learner.replay.eta
        priorities.append(eta * max(errors) + (1 - eta) * sum(errors) / len(errors) if errors else 0.0)
    return loss / t.action.shape[1], priorities


def learner_of(cfg: Apex | R2d2, spec: Spec = SPEC, net: Net = NET, core: Any = CORE) -> R2d2Learner:
    """A learner with random weights, and others in the target network."""
    learner = cfg.learner(cfg.agent(spec, net, core), 1000)
    shaken(learner.agent)
    shaken(learner.target.module, 2)
    return learner


def batch_for(cfg: Apex | R2d2, spec: Spec = SPEC, seed: int = 0, state: bool = False) -> Batch:
    """Episode boundaries, terminations and lost lives at random steps; random importance sampling weights."""
    t = windows(seed, T=cfg.burn_in + cfg.replay.trained_length(cfg.burn_in) + cfg.n_step, B=4, state=state)
    action = t.action if spec.legal is None else torch.where(torch.tensor(spec.legal)[t.action], t.action, 0)
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(*action.shape, spec.num_actions, generator=rng)
    weight = 0.2 + 0.8 * torch.rand(4, generator=rng)
    return Batch(t._replace(action=action, aux={"q": q}), torch.arange(4), weight)


LEGAL = SPEC._replace(legal=(True, False, True, True))
TOY: dict[str, Any] = {"head": (7,), "discount": 0.9, "unroll": 1}
LOSSES: dict[str, Apex | R2d2] = {
    "apex": configure(Apex, **TOY),
    "apex, 1 step": configure(Apex, **TOY, n_step=1, value_rescale_eps=1e-2),
    "apex, 5 steps": configure(Apex, **TOY, n_step=5, burn_in=1),
    "r2d2": configure(R2d2, **TOY, burn_in=3, sequence_length=8, stored_state=True),
    "r2d2, 1 step": configure(
        R2d2, **TOY, burn_in=3, sequence_length=8, n_step=1, stored_state=True, value_rescale_eps=None
    ),
    "r2d2, 3 steps": configure(R2d2, **TOY, burn_in=1, sequence_length=6, n_step=3, stored_state=True, eta=0.5),
    "r2d2, no burn-in": configure(R2d2, **TOY, burn_in=0, sequence_length=5, n_step=3, stored_state=True),
    "r2d2, initial state": configure(R2d2, **TOY, burn_in=3, sequence_length=8, n_step=3, stored_state=False),
}
CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "single": {"double": False},
    "huber": {"huber": True},
    "no dueling": {"dueling": False},
    "rescaled": {"value_rescale_eps": 1e-2},
    "clipped": {"reward_clip": "abs_one", "value_rescale_eps": None},
}
COMBINATIONS = [(name, "as it is") for name in LOSSES] + [(name, rule) for name in ("apex", "r2d2") for rule in CHANGES]


@double
@pytest.mark.parametrize("spec", [SPEC, LEGAL], ids=["all actions", "some actions"])
@pytest.mark.parametrize(("name", "rule"), list(dict.fromkeys(COMBINATIONS)))
def test_loss_gradient_and_priorities_equal_those_of_a_loop(name, rule, spec):
    cfg = configure(LOSSES[name], **CHANGES[rule])
    learner = learner_of(cfg, spec)
    for seed in range(2):
        batch = batch_for(cfg, spec, seed, state=bool(cfg.replay.stored_state))
        loss, metrics, priorities = learner.loss(batch)
        expected, expected_priorities = plain(learner, batch)
        assert loss.item() == metrics["loss"].item() == pytest.approx(expected.item(), rel=1e-10)
        assert priorities.tolist() == pytest.approx(expected_priorities, rel=1e-10)
        assert not priorities.requires_grad
        found = gradients(loss, learner.agent)
        assert_close(found, gradients(expected, learner.agent))
        assert all(g.any() for g in found.values())


@double
def test_the_settings_of_the_cases_change_the_loss():
    """Otherwise the comparison with the loop could not fail."""
    losses = []
    for rule in CHANGES.values():
        cfg = configure(LOSSES["r2d2"], **rule)
        losses.append(learner_of(cfg).loss(batch_for(cfg, state=True))[0].item())
    for change in ({"n_step": 1}, {"n_step": 3}, {"burn_in": 1, "sequence_length": 6}, {"discount": 0.5}):
        cfg = configure(LOSSES["r2d2"], **change)
        batch = batch_for(LOSSES["r2d2"], state=True)
        t = batch.trajectory
        count = (
            cfg.burn_in + cfg.replay.trained_length(cfg.burn_in) + cfg.n_step
        )  # the same steps without those no longer needed
        step, action, aux = tree.map(lambda x, n=count: x[:n], (t.step, t.action, t.aux))
        losses.append(learner_of(cfg).loss(batch._replace(trajectory=Trajectory(step, action, aux, *t[3:])))[0].item())
    losses.append(learner_of(LOSSES["r2d2"]).loss(batch_for(LOSSES["r2d2"]))[0].item())  # without stored state
    assert len({round(x, 8) for x in losses}) == len(losses)


@double
def test_the_loss_is_the_weighted_mean_of_the_losses_of_items():
    cfg = LOSSES["r2d2"]
    learner, batch = learner_of(cfg), batch_for(cfg, state=True)
    assert batch.weight is not None
    alone = []
    for b in range(4):
        t = batch.trajectory
        step, action, aux = tree.map(lambda x, b=b: x[:, b : b + 1], (t.step, t.action, t.aux))
        one = Trajectory(step, action, aux, tuple(s[b : b + 1] for s in t.state), t.version[:1])
        alone.append(learner.loss(Batch(one, None, torch.ones(1)))[0])
    expected = (batch.weight * torch.stack(alone)).mean()
    assert learner.loss(batch)[0].item() == pytest.approx(expected.item(), rel=1e-12)


# -- steps that are not needed are not computed ------------------------------------------------------------------------


def images(steps: int, seed: int, density: float = 0.25) -> Trajectory:
    rng = torch.Generator().manual_seed(seed)
    shape = (steps, 4)
    is_first = torch.rand(shape, generator=rng) < density
    step = TimeStep(
        obs=torch.randint(256, (*shape, *IMAGE_SPEC.obs_shape), generator=rng, dtype=torch.uint8),
        prev_action=torch.randint(4, shape, generator=rng),
        reward=torch.randn(shape, generator=rng),
        is_first=is_first,
        is_terminal=(torch.rand(shape, generator=rng) < 0.2) & ~is_first,
    )
    action = torch.randint(4, shape, generator=rng)
    return Trajectory(step, action, {"q": torch.randn(*shape, 4, generator=rng)}, (), torch.zeros(4))


@double
@pytest.mark.parametrize("rule", [{}, {"double": False}, {"value_rescale_eps": 1e-2}], ids=str)
@pytest.mark.parametrize(("length", "n_step"), [(1, 2), (1, 3), (1, 5), (2, 3), (3, 5)])
@pytest.mark.parametrize("with_state", [False, True])
def test_without_memory_few_steps_give_the_same_targets_as_all(length, n_step, rule, with_state, monkeypatch):
    cfg = configure(Apex, head=(7,), burn_in=3, n_step=n_step, **rule)
    learner = learner_of(cfg, IMAGE_SPEC, Net(encoder=SmallCnn(hidden_size=6), frame_stack=4), Ff())
    seen: list[int] = []
    learner.agent.torso.encoder.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    for seed in range(2):
        t = images(3 + length + n_step, seed)
        if with_state:
            t = t._replace(state=(t.step.obs[[2, 0, 1], :].transpose(0, 1).contiguous(),))
        assert t.step.is_first[1:].any()
        fast = learner.td_targets(t, length)
        assert seen == [4 * length, 4 * length]  # trained steps and bootstrap steps
        with monkeypatch.context() as patch:
            patch.setattr(Torso, "memoryless", False)
            slow = learner.td_targets(t, length)
        assert seen[2:] == [4 * 3, 4 * (length + n_step)]
        seen.clear()
        for name in ("value", "target", "first_q"):
            a, b = getattr(fast, name), getattr(slow, name)
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13, msg=lambda m, name=name: f"{name}: {m}")
        assert torch.equal(fast.valid, slow.valid)
        assert len(fast.state) == len(slow.state) == 1
        assert torch.equal(fast.state[0], slow.state[0])
        a, b = (gradients((j.value - j.target).square().sum(), learner.agent) for j in (fast, slow))
        assert_close(a, b)
        assert all(g.any() for g in a.values())


# -- the burn-in ------------------------------------------------------------------------------------------------------

CORES = {"lstm": CORE, "delta-net": DELTA, "gpt": GPT}
MEMORY = configure(R2d2, **TOY, burn_in=3, sequence_length=8, n_step=3, stored_state=True)


def memory_of(agent: QAgent) -> tuple[Tensor, ...]:
    """Recurrent state after some other steps."""
    step = windows(7, T=6, B=4).step
    no = torch.zeros_like(step.is_first)
    with torch.no_grad():
        return agent.torso(step._replace(is_first=no), agent.initial_state(4))[1]


@double
@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
def test_no_gradient_flows_through_the_burn_in(core):
    """The loss equals that from a recurrent state computed beforehand."""
    agent = MEMORY.agent(SPEC, NET, core)
    shaken(agent)
    with_burn_in = MEMORY.learner(agent, 1000)
    without = configure(MEMORY, burn_in=0, sequence_length=5).learner(agent, 1000)
    for seed in range(3):
        batch = batch_for(MEMORY, seed=seed)
        t = batch.trajectory._replace(state=memory_of(agent))
        past, rest = split_burn_in(t, 3)
        with torch.no_grad():
            state = agent.torso(past, t.state)[1]
        loss, _, priorities = with_burn_in.loss(batch._replace(trajectory=t))
        expected, _, again = without.loss(batch._replace(trajectory=rest._replace(state=state)))
        assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
        assert priorities.tolist() == pytest.approx(again.tolist(), rel=1e-10)
        found = gradients(loss, agent)
        assert_close(found, gradients(expected, agent))
        with torch.enable_grad():  # the gradient through the burn-in would differ
            carried = agent.torso(past, t.state)[1]
        through = gradients(without.loss(batch._replace(trajectory=rest._replace(state=carried)))[0], agent)
        assert rest.step.is_first[0].all() or any(not torch.allclose(found[k], through[k]) for k in found)


@double
@pytest.mark.parametrize("core", [*CORES.values(), Ff()], ids=[*CORES, "ff"])
def test_the_burn_in_changes_values_but_gets_no_gradient(core):
    learner = learner_of(MEMORY, core=core)
    batch = batch_for(MEMORY)
    t = batch.trajectory._replace(state=memory_of(learner.agent))
    step = t.step._replace(is_first=torch.zeros_like(t.step.is_first), obs=t.step.obs.clone().requires_grad_())
    loss, _, _ = learner.loss(batch._replace(trajectory=t._replace(step=step)))
    (slope,) = torch.autograd.grad(loss, step.obs)
    assert not slope[:3].any()
    assert slope[3:8].flatten(1).any(1).all()
    value = learner.td_targets(t._replace(step=step), 5).value
    for n in range(3):
        other = step.obs.detach().clone()
        other[n] += 0.5
        changed = learner.td_targets(t._replace(step=step._replace(obs=other)), 5).value
        assert torch.equal(value, changed) == (core == Ff())


@double
@pytest.mark.parametrize("burn_in", [1, 2])
@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
def test_target_and_online_network_have_separate_recurrent_state(core, burn_in):
    """Without gradient, a core may write a single step into the recurrent state that it is given, in place."""
    cfg = configure(MEMORY, burn_in=burn_in, sequence_length=5 + burn_in)
    learner, batch = learner_of(cfg, core=core), batch_for(cfg)
    t = batch.trajectory._replace(state=memory_of(learner.agent))
    before = [leaf.clone() for leaf in t.state]
    td = learner.td_targets(t, 5)
    assert all(torch.equal(a, b) for a, b in zip(before, t.state, strict=True))
    with torch.no_grad():
        q, _ = learner.agent(t.step, tuple(before))
    expected = q[burn_in : burn_in + 5].gather(-1, t.action[burn_in : burn_in + 5, :, None]).squeeze(-1)
    torch.testing.assert_close(td.value, expected, rtol=1e-10, atol=1e-12)


# -- values -----------------------------------------------------------------------------------------------------------


@double
@pytest.mark.parametrize("hidden", [(), (6,), (6, 5)])
@pytest.mark.parametrize("legal", [(True,) * 5, (False, True, True, False, True), (False, False, True, False, False)])
def test_dueling_heads(hidden, legal):
    head = Dueling(4, hidden, torch.tensor(legal), "torch")
    shaken(head)
    h = torch.randn(3, 2, 4)
    q = head(h)
    for t in range(3):
        for b in range(2):
            v, a = sequential(head.value, h[t, b]).item(), sequential(head.advantage, h[t, b]).tolist()
            mean = sum(x for x, ok in zip(a, legal, strict=True) if ok) / sum(legal)
            assert q[t, b].tolist() == pytest.approx([v + x - mean for x in a], rel=1e-10)


@pytest.mark.parametrize("dueling", [True, False])
def test_illegal_actions_are_never_taken(dueling):
    """However large their network outputs are."""
    spec = Spec("some", (3,), torch.float32, 6, legal=(False, True, True, False, True, False))
    agent = configure(Apex, head=(), dueling=dueling).agent(spec, Net(), Ff())
    last: Any = agent.head.advantage[-1] if isinstance(agent.head, Dueling) else agent.head[-1]  # type: ignore[index]
    with torch.no_grad():
        last.bias[[0, 3, 5]] += 100
    n, rng = 3000, torch.Generator().manual_seed(0)
    none = torch.zeros(n, dtype=torch.bool)
    step = TimeStep(torch.randn(n, 3), torch.zeros(n, dtype=torch.long), torch.zeros(n), none, none)
    for explore in (None, torch.zeros(n), torch.full((n,), 0.5), torch.ones(n)):
        action, aux, _ = agent.act(step, (), explore, rng)
        counts = torch.bincount(action, minlength=6)
        assert not counts[[0, 3, 5]].any()
        if explore is not None and explore[0] == 1:
            assert ((counts[[1, 2, 4]] - n / 3).abs() < 5 * math.sqrt(n * 2 / 9)).all()
        assert aux["q"].isneginf().any(0).tolist() == [not ok for ok in spec.legal or ()]
        assert aux["q"].isneginf().all(0).tolist() == [not ok for ok in spec.legal or ()]


@double
@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("dueling", [True, False])
def test_illegal_actions_are_never_the_next_action_of_a_target(dueling, both):
    """Their network outputs change neither targets nor gradients."""
    cfg = configure(LOSSES["r2d2"], dueling=dueling, double=both)
    learner, batch = learner_of(cfg, LEGAL), batch_for(cfg, LEGAL, state=True)
    before = learner.td_targets(batch.trajectory, 5), learner.loss(batch)
    for agent in (learner.agent, learner.target.module):
        last = agent.head.advantage[-1] if dueling else agent.head[-1]  # type: ignore
        with torch.no_grad():
            last.bias[1] += 1e3  # type: ignore
    after = learner.td_targets(batch.trajectory, 5), learner.loss(batch)
    torch.testing.assert_close(before[0].target, after[0].target, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(before[0].value, after[0].value, rtol=1e-12, atol=1e-12)
    assert all(value.isfinite() for value in after[1][1].values())
    slopes = gradients(after[1][0], learner.agent)
    assert all(g.isfinite().all() for g in slopes.values())
    name = "head.advantage.2.bias" if dueling else "head.2.bias"
    assert slopes[name][1] == 0


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_the_networks_have_as_many_parameters_as_those_of_rela():
    net = Net(encoder=Shallow(hidden_size=512), frame_stack=4, prev_action=False, prev_reward=False)
    assert size(configure(Apex, head=()).agent(ATARI, net, Ff())) == 1_693_875
    plain = replace(net, encoder=Shallow(num_layers=0))
    assert size(configure(R2d2, head=()).agent(ATARI, plain, Lstm(hidden=512))) == 7_562_931


# -- exploration ------------------------------------------------------------------------------------------------------

GOLDEN = np.load(Path(__file__).parent / "data" / "r2d2.npz")


@pytest.mark.parametrize("cfg", [Apex(), R2d2()], ids=["apex", "r2d2"])
@pytest.mark.parametrize("name", [k for k in GOLDEN.files if k.startswith("ladder/")])
def test_every_environment_has_its_epsilon_and_the_first_the_largest(cfg, name):
    wanted = torch.from_numpy(GOLDEN[name]).float()
    n = len(wanted)
    none = torch.zeros(n, dtype=torch.bool)
    epsilons = cfg.explorer(n)(TimeStep(torch.zeros(n, 3), torch.zeros(n), torch.zeros(n), none, none))
    torch.testing.assert_close(epsilons, wanted, rtol=1e-6, atol=0)
    assert epsilons[0].item() == pytest.approx(0.4)
    assert (epsilons.diff() < 0).all()


def test_the_epsilon_schedule_has_two_settings():
    none = torch.zeros(3, dtype=torch.bool)
    step = TimeStep(torch.zeros(3, 3), torch.zeros(3), torch.zeros(3), none, none)
    epsilons = configure(Apex, epsilon_base=0.5, epsilon_alpha=2.0).explorer(3)(step)
    assert epsilons.tolist() == pytest.approx([0.5, 0.25, 0.125])


@pytest.mark.parametrize("actor_name", ["apex", "r2d2, lstm"])
def test_no_epsilon_travels_with_the_weights(actor_name):
    """An epsilon that travelled with the weights would be a lower bound for all environments."""
    learner, replay = learner_and_replay(actor_name)
    assert learner.agent.epsilon.item() == 0.0
    for _ in range(3):
        update = learner.update(batch_of(replay)[0])
        assert learner.agent.epsilon.item() == update.metrics["epsilon"].item() == 0.0


# -- new priorities --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("actor_name", ["apex", "r2d2, lstm"])
def test_an_update_returns_the_priorities_from_before_the_step(actor_name):
    learner, replay = learner_and_replay(actor_name, optimizer=Adam(lr=1e-2))
    for _ in range(3):
        batch, _ = batch_of(replay)
        _, _, expected = learner.loss(batch)
        update = learner.update(batch)
        assert update.priorities is not None and batch.keys is not None
        assert torch.equal(update.priorities, expected)
        replay.update_priorities(batch.keys, update.priorities)
        slots = replay._slots(*np.divmod(batch.keys.numpy(), B))
        stored = torch.from_numpy(replay.tree.weights(slots)) ** (1 / replay.cfg.priority_exponent)
        torch.testing.assert_close(stored, expected.double().clamp(min=1e-6), rtol=1e-5, atol=0)


# -- invalid settings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "settings", "sentence"),
    [
        (
            R2d2,
            {"sequence_length": 44},
            r"algo\.burn-in=40 and algo\.n-step=5 are longer than algo\.replay\.sequence-length=44: raise that to 45",
        ),
        (
            R2d2,
            {"stride": 60},
            r"algo\.replay\.stride=60 must be a multiple of algo\.unroll=40: recurrent state is stored",
        ),
        (R2d2, {"stride": 60, "stored_state": True}, r"algo\.replay\.stride=60 must be a multiple of algo\.unroll=40"),
        (R2d2, {"sequence_length": 100}, r"algo\.replay\.stride=60 must be a multiple of algo\.unroll=40"),
        (R2d2, {"stride": 0}, r"algo\.replay\.stride=0 must be at least 1"),
        (R2d2, {"eta": 1.1}, r"algo\.replay\.eta=1\.1 must lie in \[0, 1\]"),
        (R2d2, {"eta": -0.1}, r"algo\.replay\.eta=-0\.1 must lie in \[0, 1\]"),
        (R2d2, {"discount": None}, r"algo\.discount=None is not known to a replay that computes initial"),
        (Apex, {"discount": None}, r"algo\.discount=None is not known"),
        (Apex, {"n_step": 0}, r"algo\.n-step=0 must be at least 1"),
        (R2d2, {"n_step": 0}, r"algo\.n-step=0 must be at least 1"),
        (Dqn, {"n_step": 0}, r"algo\.n-step=0 must be at least 1"),
        (Dqn, {"trace_decay": 0.8, "n_step": 3}, r"algo\.trace-decay=0\.8 and algo\.n-step=3 exclude each other: set"),
        (Apex, {"burn_in": -1}, r"algo\.burn-in=-1 must be at least 0"),
        (Apex, {"priority_exponent": 1.5}, r"algo\.replay\.priority-exponent=1\.5 must lie in \[0, 1\]"),
        (Apex, {"importance_exponent": -1.0}, r"algo\.replay\.importance-exponent=-1\.0 must lie in \[0, 1\]"),
        (Apex, {"epsilon_base": 2.0}, r"algo\.epsilon-base=2\.0 must lie in \[0, 1\]"),
        (Apex, {"priority_floor": 0.0}, r"algo\.replay\.priority-floor=0\.0 must be positive"),
        (R2d2, {"value_rescale_eps": 0.0}, r"algo\.value-rescale-eps=0\.0 must be positive, or None"),
    ],
)
def test_invalid_settings_are_refused_in_one_sentence(cls, settings, sentence):
    with pytest.raises(UserError, match=sentence) as refused:
        configure(cls, **settings)
    assert "\n" not in str(refused.value)


def test_settings_next_to_the_invalid_ones_are_valid():
    configure(R2d2, sequence_length=45, stride=40)
    configure(R2d2, stride=60, stored_state=False)
    configure(R2d2, sequence_length=100, unroll=20)
    Dqn(trace_decay=0.8, n_step=1)
    Dqn(n_step=3)


@pytest.mark.parametrize(
    "cfg",
    [configure(Apex, burn_in=2), configure(R2d2, burn_in=2, sequence_length=82, stored_state=False)],
    ids=["apex", "r2d2"],
)
def test_a_burn_in_that_does_not_fill_the_frame_stack_is_refused(cfg):
    net = Net(encoder=SmallCnn(hidden_size=6), frame_stack=4)
    with pytest.raises(UserError, match=r"algo\.burn-in=2 steps do not fill net\.frame-stack=4: raise it to 3"):
        cfg.agent(IMAGE_SPEC, net, Ff())
    cfg.agent(IMAGE_SPEC, replace(net, frame_stack=3), Ff())
    configure(cfg, burn_in=3, **({} if isinstance(cfg, Apex) else {"sequence_length": 83})).agent(IMAGE_SPEC, net, Ff())


def test_with_stored_state_no_burn_in_is_needed_for_the_frame_stack():
    net = Net(encoder=SmallCnn(hidden_size=6), frame_stack=4)
    configure(R2d2, burn_in=0, sequence_length=40, stored_state=True).agent(IMAGE_SPEC, net, Ff())


# -- stored state -----------------------------------------------------------------------------------------------------


@pytest.fixture
def _unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose free memory is unknown."""
    monkeypatch.setattr("bestiary.config.machine.free_memory", lambda: None)


unlimited = pytest.mark.usefixtures("_unlimited")


@unlimited
@pytest.mark.parametrize(
    ("core", "capacity", "stored"),
    [
        (Lstm(hidden=512), 1_000_000, True),
        (Gpt(width=64, window=128), 1_000_000, False),
        (Gpt(width=64, window=128), 100_000, True),
        (Ff(), 1_000_000, True),
    ],
    ids=["lstm", "gpt", "gpt, few steps", "ff"],
)
def test_the_state_is_stored_unless_it_takes_much_memory(core, capacity, stored):
    spec = Spec("small", (3,), torch.float32, 4)
    for setting in (None, True, False):
        cfg = configure(R2d2, stored_state=setting, capacity=capacity)
        state = cfg.agent(spec, Net(), core).initial_state(1)
        replay = cfg.replay_builder(4).build(0, spec, state)
        assert replay.cfg.stored_state == replay.ring.keep_states == (stored if setting is None else setting)
        assert Apex().replay_builder(4).build(0, spec, state).cfg.stored_state is False


@unlimited
def test_the_state_may_take_as_much_memory_as_steps_or_a_gibibyte():
    spec = Spec("small", (10,), torch.float32, 4)
    step_bytes = 10 * 4 + 4 * 4 + 8 + 8 + 8 + 4 + 1 + 1  # observation, Q-values, two actions, version, reward, flags
    for capacity, most in ((20_000_000, 40 * step_bytes), (40 * 2**10, 2**20)):
        for extra, stored in ((0, True), (1, False)):
            state = (torch.zeros(1, most + extra, dtype=torch.uint8),)
            assert configure(R2d2, capacity=capacity).replay_builder(4).build(0, spec, state).cfg.stored_state is stored


def test_the_replay_is_built_from_the_settings_of_the_algorithm():
    cfg = configure(
        R2d2,
        batch_size=5,
        sequence_length=70,
        burn_in=30,
        n_step=4,
        capacity=9000,
        warmup=1100,
        updates_per_step=0.5,
        priority_exponent=0.3,
        importance_exponent=0.2,
    )
    built = cfg.replay_builder(3)
    assert built.cfg == cfg.replay
    assert (built.streams, built.unroll, built.burn_in, built.n_step) == (3, 40, 30, 4)
    assert (built.length, built.stride, built.item_steps) == (40, 40, 74)
    apex = configure(Apex, burn_in=2, n_step=4).replay_builder(3)
    assert (apex.burn_in, apex.length, apex.n_step, apex.stride, apex.item_steps) == (2, 1, 4, 1, 7)
