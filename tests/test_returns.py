"""V-trace, Watkins's Q(lambda), n-step returns: reference data, the sums of the papers, and resets between episodes."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bestiary.algos.impala import Impala, ImpalaLearner
from bestiary.ops.returns import VTrace, accumulate, n_step, vtrace, watkins_q_lambda
from bestiary.ops.value_rescaling import value_rescale, value_rescale_inverse
from bestiary.types import State, TimeStep, Trajectory, transitions

IMPORTANCE_CASES = [*(f"iw{i}" for i in range(11)), "f32_0", "f32_1"]
LOGITS_CASES = ["logits0", "logits1"]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def load(data: Path, case: str) -> dict[str, Any]:
    """The arrays of one case as tensors, its numbers as floats; a threshold of NaN means: do not clip."""
    with np.load(data / "vtrace.npz") as z:
        arrays = {k.removeprefix(f"{case}/"): z[k] for k in z.files if k.startswith(f"{case}/")}
    out = {k: float(v) if v.ndim == 0 else torch.from_numpy(v) for k, v in arrays.items()}
    for k in ("clip_rho", "clip_pg_rho"):
        out[k] = None if np.isnan(out[k]) else out[k]
    return out


def assert_close(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Unclipped weights returns large magnitudes: errors count relative to 1 + |value|."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    error = ((actual - expected).abs() / (1 + expected.abs())).max().item()
    limit = TOLERANCE[expected.dtype] if tolerance is None else tolerance
    assert error <= limit, f"off by {error:.2e}, allowed {limit:.0e}"


def run_case(z: dict[str, Any]) -> VTrace:
    return vtrace(
        z["log_rhos"],
        z["discounts"],
        z["rewards"],
        z["values"],
        z["bootstrap_value"],
        clip_rho=z["clip_rho"],
        clip_pg_rho=z["clip_pg_rho"],
    )


def test_every_reference_case_is_tested(data):
    with np.load(data / "vtrace.npz") as z:
        assert sorted(z["cases"].tolist()) == sorted(IMPORTANCE_CASES + LOGITS_CASES)


@pytest.mark.parametrize("case", IMPORTANCE_CASES + LOGITS_CASES)
def test_vtrace_gives_the_reference_values(data, case):
    z = load(data, case)
    out = run_case(z)
    assert_close(out.targets, z["vs"])
    assert_close(out.advantages, z["pg_advantages"])


def paper_sum(
    log_rho: np.ndarray,
    discount: np.ndarray,
    reward: np.ndarray,
    value: np.ndarray,
    clip_rho: float,
    clip_pg_rho: float,
    trace_decay: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Espeholt et al. 2018, eq. 1 with c_i of remark 2, term by term for one stream; `value` holds V(x_0) ... V(x_T).

    v_s = V(x_s) + sum_{t=s}^{T-1} gamma^{t-s} (prod_{i=s}^{t-1} c_i) delta_t V
    delta_t V = rho_t (r_t + gamma V(x_{t+1}) - V(x_t))
    """
    T = len(reward)
    v = value.copy()  # v_T = V(x_T)
    for s in range(T):
        for t in range(s, T):
            product = 1.0
            for i in range(s, t):
                product *= discount[i] * trace_decay * min(1.0, np.exp(log_rho[i]))
            delta = min(clip_rho, np.exp(log_rho[t])) * (reward[t] + discount[t] * value[t + 1] - value[t])
            v[s] += product * delta
    advantage = np.zeros(T)
    for s in range(T):
        advantage[s] = min(clip_pg_rho, np.exp(log_rho[s])) * (reward[s] + discount[s] * v[s + 1] - value[s])
    return v[:T], advantage


@pytest.mark.parametrize("trace_decay", [1.0, 0.9, 0.0])
@pytest.mark.parametrize(("clip_rho", "clip_pg_rho"), [(1.0, 1.0), (2.5, 1.7), (None, None), (0.4, None)])
def test_vtrace_is_the_sum_in_the_paper(clip_rho, clip_pg_rho, trace_decay):
    rng = np.random.default_rng(3)
    T, B = 17, 6
    log_rho = rng.normal(0, 1.5, (T, B))
    discount = 0.97 * (rng.random((T, B)) > 0.15)
    reward = rng.normal(size=(T, B))
    value = rng.normal(size=(T + 1, B))
    out = vtrace(
        *(torch.from_numpy(x) for x in (log_rho, discount, reward, value[:-1], value[-1])),
        clip_rho=clip_rho,
        clip_pg_rho=clip_pg_rho,
        trace_decay=trace_decay,
    )
    for b in range(B):
        v, advantage = paper_sum(
            log_rho[:, b],
            discount[:, b],
            reward[:, b],
            value[:, b],
            np.inf if clip_rho is None else clip_rho,
            np.inf if clip_pg_rho is None else clip_pg_rho,
            trace_decay,
        )
        assert_close(out.targets[:, b], torch.from_numpy(v))
        assert_close(out.advantages[:, b], torch.from_numpy(advantage))


def test_on_policy_targets_are_discounted_returns():
    # rewards 1, 2, 4 and a bootstrap of 8 at a discount of 1/2: 4 + 4 = 8, 2 + 4 = 6, 1 + 3 = 4
    zero = torch.zeros(3, 1)
    reward = torch.tensor([[1.0], [2.0], [4.0]])
    value = torch.tensor([[5.0], [-3.0], [7.0]])
    out = vtrace(zero, zero + 0.5, reward, value, torch.tensor([8.0]))
    assert out.targets[:, 0].tolist() == [4.0, 6.0, 8.0]
    assert out.advantages[:, 0].tolist() == [-1.0, 9.0, 1.0]


def test_targets_are_constants_to_the_gradient():
    value = torch.randn(4, 2, requires_grad=True)
    out = vtrace(*torch.randn(3, 4, 2), value, torch.randn(2))
    assert not out.targets.requires_grad
    assert not out.advantages.requires_grad


class Stream:
    """Random time steps in float64, with the values of a critic."""

    def __init__(self, is_first: Tensor, is_terminal: Tensor, seed: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed)
        shape = is_first.shape

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64)

        self.value = normal(*shape)
        self.log_rho = normal(*shape)[:-1]
        self.step = TimeStep(
            obs=normal(*shape, 1),
            prev_action=torch.zeros(shape, dtype=torch.int64),
            reward=torch.where(is_first, 0, normal(*shape)),
            is_first=is_first,
            is_terminal=is_terminal,
        )

    def vtrace(self) -> VTrace:
        m = transitions(self.step, 0.9)
        return vtrace(self.log_rho, m.discount, m.reward, self.value[:-1], self.value[-1], m.valid)

    def episode(self, start: int, stop: int, b: int) -> VTrace:
        """Steps start..stop-1 of stream b alone."""
        m = transitions(TimeStep(*(x[start:stop, b : b + 1] for x in self.step)), 0.9)
        value = self.value[start:stop, b : b + 1]
        return vtrace(self.log_rho[start : stop - 1, b : b + 1], m.discount, m.reward, value[:-1], value[-1])


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)[:, None]


def test_a_time_limit_inside_a_chunk_bootstraps_from_the_last_observation():
    s = Stream(flags(1, 0, 0, 0, 1, 0, 0), flags(0, 0, 0, 0, 0, 0, 0))
    whole, first, second = s.vtrace(), s.episode(0, 4, 0), s.episode(4, 7, 0)
    for joint, before, after in zip(whole, first, second, strict=True):
        assert_close(joint[:3], before)
        assert_close(joint[4:], after)

    # by hand, the transition into the last observation: one reward and its value
    rho = s.log_rho[2, 0].exp().clamp(max=1)
    v = s.value[:, 0]
    assert whole.targets[2, 0].item() == pytest.approx((v[2] + rho * (s.step.reward[3, 0] + 0.9 * v[3] - v[2])).item())


def test_a_terminal_step_inside_a_chunk_bootstraps_zero():
    s = Stream(flags(1, 0, 0, 0, 1, 0, 0), flags(0, 0, 0, 1, 0, 0, 0))
    whole = s.vtrace()
    rho = s.log_rho[2, 0].exp().clamp(max=1)
    v = s.value[:, 0]
    assert whole.targets[2, 0].item() == pytest.approx((v[2] + rho * (s.step.reward[3, 0] - v[2])).item())
    assert whole.advantages[2, 0].item() == pytest.approx((rho * (s.step.reward[3, 0] - v[2])).item())


def test_where_there_is_no_transition_the_target_is_the_value_itself():
    s = Stream(flags(1, 0, 1, 1, 1, 0), flags(0, 0, 0, 0, 0, 0))
    out = s.vtrace()
    assert torch.equal(out.targets[1:4], s.value[1:4])


def test_any_pattern_of_resets_equals_the_episodes_alone():
    rng = torch.Generator().manual_seed(11)
    T, B = 30, 8
    is_first = torch.rand(T + 1, B, generator=rng) < 0.25
    is_terminal = (torch.rand(T + 1, B, generator=rng) < 0.2) & ~is_first
    s = Stream(is_first, is_terminal, seed=12)
    whole = s.vtrace()
    for b in range(B):
        starts = [0, *(t for t in range(1, T + 1) if is_first[t, b]), T + 1]
        for start, stop in pairwise(starts):
            if stop - start < 2:
                continue  # a single step holds no transition
            alone = s.episode(start, stop, b)
            for joint, single in zip(whole, alone, strict=True):
                assert_close(joint[start : stop - 1, b : b + 1], single)


def test_nothing_leaks_backwards_across_a_reset():
    is_first, is_terminal = flags(1, 0, 0, 1, 0, 0), flags(0, 0, 0, 0, 0, 0)
    calm, wild = Stream(is_first, is_terminal), Stream(is_first, is_terminal)
    wild.value[3:] *= 1e9
    wild.log_rho[2:] += 50
    wild.step.reward[4:] = 1e9
    for x, y in zip(calm.vtrace(), wild.vtrace(), strict=True):
        assert torch.equal(x[:2], y[:2])


class Scripted(nn.Module):
    """An agent whose outputs are its parameters."""

    def __init__(self, logits: Tensor, value: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)
        self.value = nn.Parameter(value)

    def forward(self, step: TimeStep, state: State) -> tuple[Tensor, Tensor, State]:
        return self.logits, self.value, state


def with_last(x: Tensor) -> Tensor:
    """One more step, whose content must not matter."""
    return torch.cat([x, x[-1:]])


def scripted_case(z: dict[str, Any], **settings: Any) -> tuple[ImpalaLearner, Scripted, Trajectory]:
    """The transitions of a reference case as T+1 steps, and a learner with its settings."""
    T, B = z["actions"].shape
    none = torch.zeros(1, B, dtype=torch.bool)
    step = TimeStep(
        obs=torch.zeros(T + 1, B, 1),
        prev_action=torch.cat([torch.zeros(1, B, dtype=torch.int64), z["actions"]]),
        reward=torch.cat([torch.zeros(1, B, dtype=torch.float64), z["rewards"]]),
        is_first=torch.zeros(T + 1, B, dtype=torch.bool),
        is_terminal=torch.cat([none, z["done"]]),
    )
    aux = {"logits": with_last(z["behavior_logits"])}
    trajectory = Trajectory(step, with_last(z["actions"]), aux, (), torch.zeros(B))
    cfg = Impala(
        discount=z["gamma"],
        reward_clip="none",
        baseline_cost=z["baseline_cost"],
        entropy_cost=z["entropy_cost"],
        clip_rho=z["clip_rho"],
        clip_pg_rho=z["clip_pg_rho"],
        **settings,
    )
    agent = Scripted(with_last(z["target_logits"]), torch.cat([z["values"], z["bootstrap_value"][None]]))
    return ImpalaLearner(cfg, agent, total_steps=1), agent, trajectory  # type: ignore[arg-type]


@pytest.mark.parametrize("case", LOGITS_CASES)
def test_the_learner_finds_the_reference_losses(data, case):
    z = load(data, case)
    learner, _, trajectory = scripted_case(z, reduction="sum")
    loss, metrics = learner.loss(trajectory)
    assert loss.item() == pytest.approx(z["total_loss"], rel=1e-10)
    assert metrics["policy_loss"].item() == pytest.approx(z["pg_loss"], rel=1e-10)
    assert metrics["baseline_loss"].item() == pytest.approx(z["baseline_cost"] * z["baseline_loss"], rel=1e-10)
    assert metrics["entropy_loss"].item() == pytest.approx(z["entropy_cost"] * z["entropy_loss"], rel=1e-10)


@pytest.mark.parametrize("case", LOGITS_CASES)
def test_the_learner_finds_the_reference_gradients(data, case):
    z = load(data, case)
    learner, agent, trajectory = scripted_case(z, reduction="sum")
    learner.loss(trajectory)[0].backward()
    assert_close(agent.logits.grad[:-1], z["grad_target_logits"])
    assert_close(agent.value.grad[:-1], z["grad_values"])


@pytest.mark.parametrize("case", LOGITS_CASES)
def test_the_last_step_is_bootstrapped_from_but_not_trained(data, case):
    learner, agent, trajectory = scripted_case(load(data, case))
    learner.loss(trajectory)[0].backward()
    assert not agent.logits.grad[-1].any()
    assert not agent.value.grad[-1].any()


def test_the_mean_is_the_sum_over_the_number_of_transitions(data):
    z = load(data, "logits0")
    summed, averaged = scripted_case(z, reduction="sum"), scripted_case(z, reduction="mean")
    sums, means = summed[0].loss(summed[2])[1], averaged[0].loss(averaged[2])[1]
    for name in ("loss", "policy_loss", "baseline_loss", "entropy_loss"):
        assert means[name].item() == pytest.approx(sums[name].item() / z["actions"].numel(), rel=1e-12)


def with_reset(t: Trajectory, at: int) -> Trajectory:
    """The same steps, with an episode starting at step `at` in every stream."""
    is_first = t.step.is_first.clone()
    is_first[at] = True
    return t._replace(step=t.step._replace(is_first=is_first))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_resets_between_episodes_enter_no_loss(data, reduction):
    learner, agent, trajectory = scripted_case(load(data, "logits0"), reduction=reduction)
    learner.loss(with_reset(trajectory, 5))[0].backward()
    taught = agent.logits.grad.abs().sum((1, 2)) > 0
    assert taught.tolist() == [True] * 4 + [False] + [True] * 7 + [False]
    assert not agent.value.grad[4].any()


def test_the_loss_of_two_episodes_is_the_sum_of_their_losses(data):
    learner, agent, trajectory = scripted_case(load(data, "logits0"), reduction="sum")
    whole = learner.loss(with_reset(trajectory, 5))[0].item()
    apart = 0.0
    for part_of in (slice(0, 5), slice(5, None)):
        part = Scripted(agent.logits.detach()[part_of], agent.value.detach()[part_of])
        step = TimeStep(*(x[part_of] for x in trajectory.step))
        aux = {"logits": trajectory.aux["logits"][part_of]}
        t = Trajectory(step, trajectory.action[part_of], aux, (), trajectory.version)
        apart += ImpalaLearner(learner.cfg, part, 1).loss(t)[0].item()  # type: ignore[arg-type]
    assert whole == pytest.approx(apart, rel=1e-12)


def all_padding(t: Trajectory) -> Trajectory:
    return t._replace(step=t.step._replace(is_first=torch.ones_like(t.step.is_first)))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_batch_of_padding_has_no_loss_and_no_gradient(data, reduction):
    learner, agent, trajectory = scripted_case(load(data, "logits0"), reduction=reduction)
    loss, _ = learner.loss(all_padding(trajectory))
    loss.backward()
    assert loss.item() == 0.0
    assert not agent.logits.grad.any()
    assert not agent.value.grad.any()


def test_a_batch_of_padding_does_not_poison_the_running_means(data):
    # metrics are averaged over updates: a single NaN would make the mean NaN
    learner, _, trajectory = scripted_case(load(data, "logits0"))
    _, metrics = learner.loss(all_padding(trajectory))
    assert [name for name, value in metrics.items() if not torch.isfinite(value)] == []


def test_the_learner_clips_rewards_as_configured(data):
    z = load(data, "logits1")
    by_hand, _, clipped = scripted_case({**z, "rewards": z["rewards"].clamp(-1, 1)})
    learner, agent, trajectory = scripted_case(z)
    learner = ImpalaLearner(Impala(**{**vars(learner.cfg), "reward_clip": "abs_one"}), agent, 1)  # type: ignore
    assert (z["rewards"].abs() > 1).any()
    assert learner.loss(trajectory)[0].item() == pytest.approx(by_hand.loss(clipped)[0].item(), rel=1e-12)


# -- Watkins's Q(lambda) -------------------------------------------------------------------------------------------


class Chunk:
    """Steps with rewards and flags, the value of the greedy action at each step, and whether it was taken."""

    def __init__(self, is_first: Tensor, is_terminal: Tensor, greedy: Tensor | None = None, seed: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed)
        shape = is_first.shape
        reward, self.value = torch.randn(2, *shape, generator=rng, dtype=torch.float64)
        self.greedy = torch.ones(shape, dtype=torch.bool) if greedy is None else greedy
        none = torch.zeros(shape, dtype=torch.int64)
        self.step = TimeStep(none, none, torch.where(is_first, 0, reward), is_first, is_terminal)

    @classmethod
    def random(cls, T: int, B: int, seed: int = 0) -> "Chunk":
        rng = torch.Generator().manual_seed(seed)
        is_first = torch.rand(T + 1, B, generator=rng) < 0.2
        is_terminal = (torch.rand(T + 1, B, generator=rng) < 0.2) & ~is_first
        return cls(is_first, is_terminal, torch.rand(T + 1, B, generator=rng) < 0.7, seed)

    def targets(self, trace_decay: float) -> Tensor:
        m = transitions(self.step, 0.9)
        return watkins_q_lambda(m.reward, m.discount, m.valid, self.value[1:], self.greedy[1:], trace_decay)

    def valid(self) -> Tensor:
        return transitions(self.step, 0.9).valid

    def by_definition(self, t: int, b: int, trace_decay: float) -> float:
        """The weighted mean of all n-step returns up to the first non-greedy action (Watkins 1989).

        G^n = r_t + gamma r_{t+1} + ... + gamma^n max_a Q(x_{t+n}, a)with weight (1 - lambda) lambda^(n-1); the last
        one has the remaining weight. After a terminal step the value is 0.
        """
        T = len(self.value)
        step = self.step
        longest = 1
        while (
            t + longest + 1 < T
            and not step.is_first[t + longest + 1, b]
            and not step.is_terminal[t + longest, b]
            and self.greedy[t + longest, b]
        ):
            longest += 1
        total = 0.0
        for n in range(1, longest + 1):
            g = sum(0.9**i * step.reward[t + 1 + i, b].item() for i in range(n))
            if not step.is_terminal[t + n, b]:
                g += 0.9**n * self.value[t + n, b].item()
            total += g * trace_decay ** (n - 1) * ((1 - trace_decay) if n < longest else 1)
        return total


@pytest.mark.parametrize("trace_decay", [0.0, 0.3, 0.8, 1.0])
def test_watkins_is_the_mean_of_the_returns_up_to_a_nongreedy_action(trace_decay):
    chunk = Chunk.random(30, 6, seed=4)
    out = chunk.targets(trace_decay)
    valid = chunk.valid()
    for t, b in valid.nonzero().tolist():
        assert out[t, b].item() == pytest.approx(chunk.by_definition(t, b, trace_decay), rel=1e-12, abs=1e-12)
    assert 0 < valid.sum() < valid.numel()


@pytest.mark.parametrize("T", [1, 2, 3, 8, 9, 100])
def test_the_parallel_scan_equals_a_loop(T):
    x, keep = torch.randn(2, T, 3, dtype=torch.float64)
    after, expected = torch.zeros(3, dtype=torch.float64), []
    for t in reversed(range(T)):
        after = x[t] + keep[t] * after
        expected.insert(0, after)
    assert_close(accumulate(x, keep), torch.stack(expected))


def test_with_lambda_zero_a_target_is_a_one_step_return():
    chunk = Chunk.random(30, 6)
    m = transitions(chunk.step, 0.9)
    expected = m.reward + m.discount * chunk.value[1:]
    assert_close(chunk.targets(0.0)[m.valid], expected[m.valid])


def test_with_lambda_one_greedy_targets_are_discounted_returns():
    chunk = Chunk(flags(1, 0, 0, 0), flags(0, 0, 0, 1))
    chunk.step.reward[:, 0] = torch.tensor([0.0, 1.0, 2.0, 4.0])
    # 4, 2 + 0.9 * 4, 1 + 0.9 * 5.6
    assert chunk.targets(1.0)[:, 0].tolist() == pytest.approx([6.04, 5.6, 4.0])


def test_a_trace_is_cut_at_a_nongreedy_action():
    greedy = flags(1, 1, 0, 1, 1)
    chunk = Chunk(flags(1, 0, 0, 0, 0), flags(0, 0, 0, 0, 0), greedy)
    calm = chunk.targets(1.0)
    chunk.step.reward[3:] = 1e6  # rewards of the action at step 2 and later
    chunk.value[3:] = -1e6
    wild = chunk.targets(1.0)
    assert torch.equal(calm[:2], wild[:2])
    assert not torch.equal(calm[2:], wild[2:])
    r, v = chunk.step.reward[:, 0], chunk.value[:, 0]
    assert calm[1, 0].item() == pytest.approx((r[2] + 0.9 * v[2]).item())
    assert calm[0, 0].item() == pytest.approx((r[1] + 0.9 * calm[1, 0]).item())


def test_the_corrected_transition_itself_need_not_be_greedy():
    # Q(x, a) is a target for any action taken: only the later actions must be greedy
    starts, ends = flags(1, 0, 0, 0), flags(0, 0, 0, 0)
    chunk, other = Chunk(starts, ends, flags(1, 1, 1, 1)), Chunk(starts, ends, flags(0, 1, 1, 1))
    assert torch.equal(chunk.targets(0.8), other.targets(0.8))


@pytest.mark.parametrize("trace_decay", [0.0, 0.5, 1.0])
def test_truncation_bootstraps_from_the_last_step_termination_does_not(trace_decay):
    limit = Chunk(flags(1, 0, 0, 1, 0), flags(0, 0, 0, 0, 0))
    end = Chunk(flags(1, 0, 0, 1, 0), flags(0, 0, 1, 0, 0))
    r, v = limit.step.reward[:, 0], limit.value[:, 0]
    assert limit.targets(trace_decay)[1, 0].item() == pytest.approx((r[2] + 0.9 * v[2]).item())
    assert end.targets(trace_decay)[1, 0].item() == pytest.approx(r[2].item())


@pytest.mark.parametrize("trace_decay", [0.0, 0.8, 1.0])
def test_what_happens_in_one_episode_never_returnses_another(trace_decay):
    for seed in range(5):
        chunk = Chunk.random(20, 4, seed=seed)
        calm, valid = chunk.targets(trace_decay), chunk.valid()
        episode = chunk.step.is_first.cumsum(0)  # [T+1, B] the episode of each step
        for number in range(int(episode.max()) + 1):
            other = Chunk.random(20, 4, seed=seed)
            inside = episode == number
            other.step.reward[inside] = 1e9
            other.value[inside] = -1e9
            other.greedy[inside] ^= True
            kept = valid & ~inside[1:]
            assert torch.equal(other.targets(trace_decay)[kept], calm[kept])


def test_watkins_targets_are_constants_to_the_gradient():
    value = torch.randn(4, 2, requires_grad=True)
    yes = torch.ones(4, 2, dtype=torch.bool)
    assert not watkins_q_lambda(torch.randn(4, 2), torch.rand(4, 2), yes, value, yes, 0.5).requires_grad


# -- n-step returns -----------------------------------------------------------------------------------------------


def as_steps(reward: np.ndarray, terminated: np.ndarray, truncated: np.ndarray, next_value: np.ndarray, gamma: float):
    """Transitions of streams [B, T] as chunks of steps, one per stream, with the first step of each episode."""
    for b in range(len(reward)):
        steps, value, index = [(0.0, True, False)], [], []
        for t in range(reward.shape[1]):
            index.append(len(steps) - 1)
            steps.append((reward[b, t], False, bool(terminated[b, t])))
            value.append(next_value[b, t])
            if terminated[b, t] or truncated[b, t]:
                steps.append((0.0, True, False))
                value.append(1e9)  # never used
        r, first, terminal = (torch.tensor(column)[:, None] for column in zip(*steps, strict=True))
        none = torch.zeros_like(first, dtype=torch.int64)
        step = TimeStep(none, none, r.double(), first, terminal)
        yield b, index, transitions(step, gamma), torch.tensor(value, dtype=torch.float64)[:, None]


R2D2 = np.load(Path(__file__).parent / "data" / "r2d2.npz")


@pytest.mark.parametrize("case", R2D2["nstep_cases"].tolist())
def test_n_steps_match_golden(case):
    streams = [R2D2[f"{case}/{k}"] for k in ("reward", "terminated", "truncated", "next_value")]
    gamma, eps, n = (R2D2[f"{case}/{k}"].item() for k in ("gamma", "rescale_eps", "n"))
    wanted, rescaled = (torch.from_numpy(R2D2[f"{case}/{k}"]) for k in ("target", "target_rescaled"))
    for b, index, m, value in as_steps(*streams, gamma):
        returns = n_step(*m, n)
        ahead = value.gather(0, (returns.bootstrap_step - 1).clamp(min=0))  # value of the step each transition leads to
        assert_close(returns.target(ahead)[index, 0], wanted[b], 1e-10)
        rescaled_target = value_rescale(returns.target(value_rescale_inverse(ahead, eps)), eps)
        assert_close(rescaled_target[index, 0], rescaled[b], 1e-8)


def test_a_one_step_return_is_a_reward_and_a_value():
    chunk = Chunk.random(30, 6)
    m = transitions(chunk.step, 0.9)
    returns = n_step(*m, 1)
    out = returns.target(chunk.value.gather(0, returns.bootstrap_step))
    assert_close(out[m.valid], (m.reward + m.discount * chunk.value[1:])[m.valid])


def test_the_first_n_step_returns_returns_as_far_as_the_chunk():
    m = transitions(Chunk.random(30, 6).step, 0.9)
    whole, part = n_step(*m, 4), n_step(*m, 4, length=9)
    for a, b in zip(whole, part, strict=True):
        assert torch.equal(a[:9], b)


@pytest.mark.parametrize("tag", ["eps1e-3", "eps1e-2"])
def test_value_rescaling_is_inverted_to_the_last_digits(tag):
    z = {k: torch.from_numpy(R2D2[f"rescale/{tag}/{k}"]) for k in ("x", "h", "z", "h_inverse")}
    eps = float(R2D2[f"rescale/{tag}/eps"])
    torch.testing.assert_close(value_rescale(z["x"], eps), z["h"], rtol=1e-14, atol=0)
    torch.testing.assert_close(value_rescale_inverse(z["z"], eps), z["h_inverse"], rtol=1e-14, atol=0)
    x = torch.logspace(-6, 6, 100)
    for signed in (x, -x):
        torch.testing.assert_close(
            value_rescale_inverse(value_rescale(signed, eps), eps), signed, rtol=1e-6, atol=0
        )  # in float32
