"""IMPALA (Espeholt et al. 2018): an actor-critic with many actors and V-trace off-policy correction."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bestiary.algos.base import Agent, apply_gradient, load_weights
from bestiary.algos.exploration import Explorer, FixedExploration
from bestiary.cores.base import CoreConfig
from bestiary.errors import UserError
from bestiary.nets import Net, Torso, orthogonal
from bestiary.nets.optim import LrSchedule, OptimizerConfig, RmsProp
from bestiary.ops.collective import SINGLE_PROCESS, Collective
from bestiary.ops.policy import RewardClip, clip_reward, entropy, kl, log_prob, sample
from bestiary.ops.program import Program
from bestiary.ops.returns import vtrace
from bestiary.replay.fifo import Fifo, FifoBuilder
from bestiary.types import Batch, Metrics, Snapshot, Spec, State, TimeStep, Trajectory, Update, transitions


class ImpalaAgent(Agent):
    """Policy logits and a state value (baseline) on one torso."""

    output_key = "logits"

    def __init__(self, spec: Spec, net: Net, core: CoreConfig) -> None:
        super().__init__()
        self.spec = spec
        self.torso = Torso(spec, net, core)
        self.policy = nn.Linear(self.torso.width, spec.num_actions)
        self.baseline = nn.Linear(self.torso.width, 1)
        if net.init == "orthogonal":
            orthogonal(self.policy, gain=0.01)  # the initial policy is nearly uniform
            orthogonal(self.baseline, gain=1.0)

    def initial_state(self, batch_size: int) -> State:
        return self.torso.initial_state(batch_size)

    def forward(self, step: TimeStep, state: State) -> tuple[Tensor, Tensor, State]:
        h, state = self.torso(step, state)
        return self.policy(h), self.baseline(h).squeeze(-1), state  # [T, B, A], [T, B]

    def compile_to(self, program: Program) -> int | None:
        h = self.torso.compile_to(program)
        return None if h is None else program.linear(self.policy, h)

    def act(
        self, step: TimeStep, state: State, explore: Tensor | None, rng: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor], State]:
        chunk = TimeStep(*(x[None] for x in step))  # a chunk of one time step
        logits, _, state = self(chunk, state)
        logits = logits[0]
        action = logits.argmax(-1) if explore is None else sample(logits, rng)
        return action, {"logits": logits}, state


class ImpalaLearner:
    """V-trace policy gradient, baseline and entropy losses (Espeholt et al. 2018, section 4.2)."""

    collective: Collective = SINGLE_PROCESS

    def __init__(self, cfg: "Impala", agent: ImpalaAgent, total_steps: int) -> None:
        self.cfg = cfg
        self.agent = agent
        self.optimizer = cfg.optimizer.build(agent)
        self.lr_schedule = LrSchedule(self.optimizer, total_steps if cfg.lr_decay == "linear" else None)
        self.updates = 0
        self.steps = 0  # agent steps used for learning so far; the learning rate decays with it
        self.reference: ImpalaAgent | None = None
        self.reference_frames = 0  # of training, when the reference policy's checkpoint was saved

    def load_reference(self, experiment: Any, weights: dict[str, Tensor], frames: int) -> None:
        """Load the policy of `cfg.reference_run` from that run's experiment and weights, before the first update.

        The reference policy is not trained. It must choose among the same actions, have no recurrent core, and see as
        many frames as the learner's policy, so that the frame stacks stored in trajectories serve both.
        """
        setting, spec = f"algo.reference-run={self.cfg.reference_run}", self.agent.spec
        if not isinstance(experiment.algo, Impala):
            raise UserError(f"{setting} was trained by {type(experiment.algo).__name__}: name a run of IMPALA")
        actions = len(weights["policy.weight"])
        if actions != spec.num_actions:
            raise UserError(f"{setting} chooses among {actions} actions, {spec.name} has {spec.num_actions}")
        policy = experiment.algo.agent(spec, experiment.net, experiment.core)
        if not policy.torso.memoryless or experiment.net.frame_stack != self.agent.torso.net.frame_stack:
            raise UserError(
                f"{setting} must be a run without a recurrent core (core:ff) that sees as many frames as this one: "
                f"--net.frame-stack {self.agent.torso.net.frame_stack}"
            )
        load_weights(policy, weights, f"than {self.cfg.reference_run} describes")
        self.reference = policy.to(self.agent.policy.weight.device).eval().requires_grad_(False)
        self.reference_frames = frames

    def loss(self, t: Trajectory) -> tuple[Tensor, Metrics]:
        """The loss of a batch and its metrics. With several learners, the sums over learners are the total values."""
        cfg = self.cfg
        m = transitions(t.step, cfg.discount)
        logits, value, _ = self.agent(t.step, t.state)
        logits, value, bootstrap = logits[:-1], value[:-1], value[-1].detach()
        action = t.action[:-1]

        log_pi = log_prob(logits, action)
        log_rho = (log_pi - log_prob(t.aux["logits"][:-1], action)).detach()
        v = vtrace(
            log_rho,
            m.discount,
            clip_reward(m.reward, cfg.reward_clip),
            value.detach(),
            bootstrap,
            m.valid,
            cfg.clip_rho,
            cfg.clip_pg_rho,
            cfg.trace_decay,
        )
        weight = m.valid.to(value.dtype)  # resets between episodes are not transitions
        count = self.collective.all_reduce_sum(weight.sum()).clamp(min=1)
        if cfg.reduction == "mean":
            weight = weight / count
        policy_loss = -(weight * log_pi * v.advantages).sum()
        baseline_loss = 0.5 * (weight * (v.targets - value).square()).sum()
        entropies = entropy(logits)
        entropy_loss = -(weight * entropies).sum()
        total = policy_loss + cfg.baseline_cost * baseline_loss + cfg.entropy_cost * entropy_loss
        valid = m.valid.to(value.dtype)
        extra: Metrics = {}
        if cfg.reference_run is not None:
            divergence = kl(logits, self._reference_logits(t))
            cost = 0.1 if cfg.reference_kl_cost is None else cfg.reference_kl_cost
            total = total + cost * (weight * divergence).sum()
            extra["reference_kl"] = (valid * divergence.detach()).sum() / count
        return total, extra | {
            "loss": total.detach(),
            "policy_loss": policy_loss.detach(),
            "baseline_loss": cfg.baseline_cost * baseline_loss.detach(),
            "entropy_loss": cfg.entropy_cost * entropy_loss.detach(),
            "entropy": (valid * entropies.detach()).sum() / count,
            "value": (valid * value.detach()).sum() / count,
            "rho": (valid * log_rho.exp()).sum() / count,
        }

    @torch.no_grad()
    def _reference_logits(self, t: Trajectory) -> Tensor:
        """The reference policy's logits at every step. Its state is the frame stack alone: it has no recurrent core."""
        assert self.reference is not None, "load_reference has not been called"
        leaves = len(self.reference.initial_state(1))
        return self.reference(t.step, t.state[:leaves])[0][:-1]

    def update(self, batch: Batch) -> Update:
        t = batch.trajectory
        length, streams = t.action.shape  # T + 1, B
        self.lr_schedule.at(self.steps)
        loss, metrics = self.loss(t)
        norm = apply_gradient(loss, self.agent, self.optimizer, self.cfg.grad_norm, self.updates + 1, self.collective)
        metrics = self.collective.all_reduce_sum(metrics | {"steps": torch.tensor(float((length - 1) * streams))})
        self.updates += 1
        self.steps += int(metrics.pop("steps").item())
        metrics |= {"grad_norm": norm, "learning_rate": torch.tensor(self.optimizer.param_groups[0]["lr"])}
        return Update(metrics)

    def state_dict(self) -> Snapshot:
        return {
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
            "steps": self.steps,
            "reference_frames": self.reference_frames,
        }

    def load_state_dict(self, state: Snapshot) -> None:
        # checkpoints of version 0.1 have the older name or no such entry
        known = state.get("reference_frames", state.get("trusted_frames", self.reference_frames))
        if known != self.reference_frames and known:
            raise UserError(
                f"algo.reference-run={self.cfg.reference_run} was at {known} frames when this run began and is at "
                f"{self.reference_frames} now: use a copy of the reference run that is not trained further"
            )
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates, self.steps = state["updates"], state["steps"]


@dataclass(frozen=True)
class Impala:
    """IMPALA (Espeholt et al. 2018): actor-critic with V-trace off-policy correction."""

    unroll: int = 20
    """unroll length T: transitions per trajectory, in agent steps (IMPALA: 20, TorchBeast: 80)"""
    replay: Fifo = field(default_factory=Fifo)
    discount: float = 0.99
    """discount factor gamma (IMPALA: 0.99)"""
    reward_clip: RewardClip = "abs_one"
    """reward clipping in the learner: abs_one ([-1, 1], Atari), soft_asymmetric (DMLab-30), none; scores stay raw"""
    baseline_cost: float = 0.5
    """coefficient of the value loss (IMPALA: 0.5)"""
    entropy_cost: float = 0.01
    """coefficient of the entropy bonus (IMPALA: 0.01)"""
    clip_rho: float | None = 1.0
    """V-trace clipping threshold rho-bar of the value targets (IMPALA: 1); None: no clipping"""
    clip_pg_rho: float | None = 1.0
    """V-trace clipping threshold rho-bar of the policy gradient (IMPALA: 1); None: no clipping"""
    trace_decay: float = 1.0
    """lambda of V-trace (remark 2): below 1, targets have less variance and more bias (IMPALA: 1)"""
    reduction: Literal["sum", "mean"] = "sum"
    """reduction of the losses over the T x B transitions (IMPALA and TorchBeast: sum)"""
    reference_run: str | None = None
    """directory of the IMPALA run (core:ff) whose policy is the reference of a KL penalty; None: no penalty"""
    reference_kl_cost: float | None = None
    """coefficient of KL(policy || reference policy), reduced like the other losses; 0 only logs it; None: 0.1"""
    grad_norm: float = 40.0
    """gradient clipping: maximum global norm (IMPALA: 40, for summed losses)"""
    lr_decay: Literal["linear", "none"] = "linear"
    """learning rate decay: linear to zero at the end of the frame budget (IMPALA), or none"""
    optimizer: OptimizerConfig = field(default_factory=RmsProp)
    """optimizer and its learning rate"""

    def __post_init__(self) -> None:
        if self.unroll < 1:
            raise UserError(f"algo.unroll={self.unroll} must be at least 1")
        if not 0 <= self.discount <= 1:
            raise UserError(f"algo.discount={self.discount} must lie in [0, 1]")
        if not 0 <= self.trace_decay <= 1:
            raise UserError(f"algo.trace-decay={self.trace_decay} must lie in [0, 1]")
        if self.reference_kl_cost is not None and self.reference_run is None:
            raise UserError("algo.reference-kl-cost needs a reference run: name one with --algo.reference-run RUN")
        if self.reference_kl_cost is not None and self.reference_kl_cost < 0:
            raise UserError(f"algo.reference-kl-cost={self.reference_kl_cost} must be at least 0")
        if self.grad_norm <= 0:
            raise UserError(f"algo.grad-norm={self.grad_norm} must be positive")

    def replay_builder(self, num_streams: int) -> FifoBuilder:
        return FifoBuilder(self.replay, num_streams)

    def explorer(self, num_envs: int) -> Explorer:
        return FixedExploration(torch.zeros(num_envs))  # exploration comes from sampling the policy

    def agent(self, spec: Spec, net: Net, core: CoreConfig) -> ImpalaAgent:
        return ImpalaAgent(spec, net, core)

    def learner(self, agent: Agent, total_steps: int) -> ImpalaLearner:
        assert isinstance(agent, ImpalaAgent)
        return ImpalaLearner(self, agent, total_steps)
