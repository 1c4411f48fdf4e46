"""Supervised learning of the actions that were taken, conditioned on what they achieved."""

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bestiary.algos.base import apply_gradient
from bestiary.algos.burn_in import burn_in_state, split_burn_in
from bestiary.algos.return_conditioned.agent import ReturnConditionedAgent
from bestiary.algos.return_conditioned.critic import Critic, value_targets
from bestiary.config.compat import lerp_all
from bestiary.nets.optim import LrSchedule
from bestiary.ops.collective import SINGLE_PROCESS, Collective
from bestiary.ops.commands import CommandDistribution, command_distribution, exponential_weight, zscore
from bestiary.ops.policy import entropy
from bestiary.types import Batch, Metrics, Snapshot, TimeStep, Trajectory, Update, ValueTargets, transitions

if TYPE_CHECKING:
    from bestiary.algos.return_conditioned.config import ReturnConditioned

OBS_STATS_BATCHES = 1_000  # the statistics of observations become an exponential moving average over so many batches


class ReturnConditionedLearner:
    """Weighted cross entropy of the actions taken, given the command that each transition achieved.

    `online` is the network that learns. `agent` is the network that acts: the same, or with `ema_decay` an exponential
    moving average of it. Commands that are advantages need a critic, which either has its own optimiser (`separate`)
    or adds its loss to the policy's (`joint`).

    With several learners, each computes the critic's targets for the episodes of its own replay, which standardises
    advantages among those, and each takes its command distribution from its own replay.
    """

    collective: Collective = SINGLE_PROCESS

    def __init__(self, cfg: "ReturnConditioned", agent: ReturnConditionedAgent, total_steps: int) -> None:
        self.cfg, self.agent = cfg, agent
        self.online = agent if cfg.ema_decay is None else copy.deepcopy(agent)
        device = agent.pool.device
        self.critic = Critic(agent, cfg.critic_head).to(device) if cfg.command == "advantage" else None
        joint = cfg.critic == "joint"
        trained = nn.ModuleList([self.online])
        if self.critic is not None and joint:
            trained.append(self.critic)
        self.optimizer = cfg.optimizer.build(trained)
        self.trained_parameters = list(trained.parameters())
        self.agent_parameters, self.online_parameters = list(agent.parameters()), list(self.online.parameters())
        self.critic_parameters = [] if self.critic is None else list(self.critic.parameters())
        updates = total_steps * cfg.replay.updates_per_step if cfg.replay.update_unit == "step" else None
        self.lr_schedule = LrSchedule(
            self.optimizer, updates if cfg.final_lr_fraction != 1 else None, cfg.final_lr_fraction
        )
        self.critic_optimizer = None if self.critic is None or joint else cfg.critic_optimizer.build(self.critic)
        self.updates = 0
        self.joint_loss: Tensor | None = None  # of a joint critic, to be added to the policy's next loss
        self.joint_transitions = 0  # transitions of which it is the mean
        self.max_advantage, self.max_advantage_std, self.updates_since_max = -torch.inf, 0.0, 0

    # -- the critic --------------------------------------------------------------------------------------------------

    def values(self, step: TimeStep) -> Tensor:
        """V of whole episodes, [T+1, B]."""
        assert self.critic is not None
        return self.critic(self.online.normalise(step), self.critic.torso.initial_state(step.is_first.shape[1]))

    def value_targets(self, t: Trajectory, value: Tensor) -> tuple[Tensor, Tensor]:
        """TD(lambda) targets, [T, B], and where there are transitions."""
        cfg, m = self.cfg, transitions(t.step, self.cfg.discount)
        separate = cfg.critic == "separate"
        return value_targets(m, value[1:], cfg.value_scale, cfg.trace_decay, bootstrap_truncated=separate), m.valid

    def refresh_critic(self, t: Trajectory) -> Update:
        """Whole episodes: value targets and advantages of a separate critic, or the loss of a joint one."""
        if self.cfg.critic == "joint":
            value = self.values(t.step)
            target, valid = self.value_targets(t, value.detach())
            self.joint_loss = (value[:-1] - target)[valid].square().mean()
            self.joint_transitions = int(valid.sum())
            return Update({})
        with torch.no_grad():
            value = self.values(t.step)
            target, _ = self.value_targets(t, value)
        return Update({}, value_targets=ValueTargets(target, target - value[:-1]))

    def update_critic(self, t: Trajectory, valid: Tensor) -> Metrics:
        """A gradient step of a separate critic towards the targets that the replay has stored."""
        assert self.critic is not None and self.critic_optimizer is not None
        cfg = self.cfg
        past, now = split_burn_in(t, cfg.burn_in)
        state = burn_in_state(self.critic.torso, self.online.normalise(past), t.state)
        value = self.critic(self.online.normalise(now.step), state)
        squares = (value - t.aux["value_target"])[valid].square()
        count, steps = self.collective.all_reduce_sum(
            (valid.sum().to(squares.dtype), torch.tensor(float(value.numel())))
        )
        loss = squares.sum() / count
        apply_gradient(
            loss, self.critic_parameters, self.critic_optimizer, cfg.grad_norm, self.updates + 1, self.collective
        )
        return {"value_loss": loss.detach(), "value": value.detach().sum() / steps * cfg.value_scale}

    def _take_joint_loss(self, like: Tensor) -> Tensor:
        """The joint critic's loss since the last update, once; 0 where it was given nothing."""
        loss, count = self.joint_loss, self.joint_transitions
        self.joint_loss, self.joint_transitions = None, 0
        fraction = self.collective.batch_fraction(count)  # all learners must make this call
        return torch.zeros_like(like) if loss is None else fraction * loss

    # -- the policy --------------------------------------------------------------------------------------------------

    def label(self, t: Trajectory) -> Tensor:
        """The command that each transition achieved, [T, B, W]."""
        cfg, aux = self.cfg, t.aux
        if cfg.command == "return-to-go":
            achieved = aux["return_to_go"]
        elif cfg.command == "return":
            achieved = aux["episode_return"]
        elif cfg.critic == "separate":
            achieved = aux["advantage"]
        else:
            with torch.no_grad():
                achieved = aux["return_to_go"] - cfg.value_scale * self.values(t.step)[cfg.burn_in :]
        return torch.stack([achieved, aux["horizon"]] if cfg.horizon else [achieved], -1)

    def weight(self, t: Trajectory, label: Tensor, valid: Tensor) -> Tensor:
        """Weights of transitions, [T, B], not normalised."""
        cfg = self.cfg
        if cfg.weighting == "none":
            return valid.to(label.dtype)
        by_transition = cfg.command == "advantage" or cfg.weight_by == "transitions"
        z = zscore(label[..., 0] if by_transition else t.aux["rank_score"], valid, self.collective.moments)
        return valid * exponential_weight(z, cfg.beta, cfg.weight_cap)

    def update(self, batch: Batch) -> Update:
        cfg, t = self.cfg, batch.trajectory
        if batch.is_critic_refresh:
            return self.refresh_critic(t)
        self.lr_schedule.at(self.updates)
        past, now = split_burn_in(t._replace(aux={}), cfg.burn_in)
        valid = t.aux["valid"]
        self._update_obs_stats(now.step.obs[valid])
        label = self.label(t)
        weight = self.weight(t, label, valid)
        weight = weight / self.collective.all_reduce_sum(weight.sum()).clamp(min=1e-6)
        torso = self.online.torso
        state = burn_in_state(torso, self.online.normalise(past), t.state)
        h, _ = torso(self.online.normalise(now.step), state)
        logits = self.online.logits(h, label)
        cross_entropy = F.cross_entropy(
            logits.flatten(0, 1), now.action.flatten(), reduction="none", label_smoothing=cfg.label_smoothing
        )
        policy_loss = (weight.flatten() * cross_entropy).sum()
        loss = policy_loss
        if self.critic is not None and cfg.critic == "joint":
            loss = loss + self._take_joint_loss(loss)
        update = self.updates + 1
        norm = apply_gradient(loss, self.trained_parameters, self.optimizer, cfg.grad_norm, update, self.collective)
        critic_metrics = {} if self.critic_optimizer is None else self.update_critic(t, valid)
        self.updates += 1
        self._update_agent(batch.info, label[valid][:, 0])
        with torch.no_grad():
            fraction = self.collective.fraction
            metrics = {
                "loss": policy_loss.detach(),
                "grad_norm": fraction * norm,
                "entropy": (weight * entropy(logits.detach())).sum(),
                "accuracy": (weight * (logits.argmax(-1) == now.action)).sum(),
                "effective_batch_size": weight.square().sum(),
                "command_return": fraction * self.agent.pool[:, 0].mean(),
                "command_horizon": fraction * self.agent.pool[:, -1].mean() if cfg.horizon else torch.zeros(()),
                "max_inverse_temperature": fraction * self.agent.max_inverse_temperature,
            }
            metrics = self.collective.all_reduce_sum(metrics | critic_metrics)
        # Kish's effective sample size: 1 / sum of squared weights that sum to 1
        return Update(metrics | {"effective_batch_size": 1 / metrics["effective_batch_size"].clamp(min=1e-12)})

    @torch.no_grad()
    def _update_obs_stats(self, obs: Tensor) -> None:
        """Mean and standard deviation of observations [N, ...]: at first over all batches, later over the latest."""
        if not self.cfg.normalise:
            return
        agent = self.online
        step_size = 1 / (1 + min(self.updates, OBS_STATS_BATCHES))
        fraction = self.collective.batch_fraction(len(obs))
        square = (obs - agent.obs_mean).square().mean(0)  # around the mean before this batch, corrected for below
        mean, square = self.collective.all_reduce_sum((fraction * obs.mean(0), fraction * square))
        shift = (step_size * (mean - agent.obs_mean)).square()
        variance = torch.lerp(agent.obs_std.square(), square, step_size) - shift
        agent.obs_std.copy_(variance.clamp(min=1e-4).sqrt())
        agent.obs_mean.lerp_(mean, step_size)

    # -- the network that acts ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def _update_agent(self, info: Metrics, label: Tensor) -> None:
        """Update the moving average, the inverse temperature and the command distribution of the acting network."""
        cfg, agent = self.cfg, self.agent
        if agent is not self.online:
            # a plain mean over the first updates
            step_size = max(1 - cfg.ema_decay, 1 / self.updates) if cfg.ema_decay is not None else 1.0
            lerp_all(self.agent_parameters, self.online_parameters, step_size)
            agent.obs_mean.copy_(self.online.obs_mean)
            agent.obs_std.copy_(self.online.obs_std)
        agent.untrained.fill_(False)
        if cfg.max_inverse_temperature > 1:
            updates = max(1.0, cfg.inverse_temperature_steps * cfg.replay.updates_per_step)
            progress = min(1.0, self.updates / updates)
            agent.max_inverse_temperature.fill_(1 + (cfg.max_inverse_temperature - 1) * progress)
        if cfg.command == "advantage" and cfg.command_source == "maximum":
            self._command_maximum(label)
        else:
            agent.set_command_distribution(CommandDistribution(*(info[name] for name in CommandDistribution._fields)))

    def _command_maximum(self, advantage: Tensor) -> None:
        """The largest advantage of a period is the command of the next, as in the public code."""
        largest, std = self.collective.all_reduce_max(advantage.max()).item(), self.collective.moments(advantage).std
        if largest > self.max_advantage:
            self.max_advantage, self.max_advantage_std = largest, std.item()
        self.updates_since_max += 1
        period_ends = self.updates_since_max >= self.cfg.command_period
        if self.updates == 1 or period_ends:
            pool = np.array([self.max_advantage])
            self.agent.set_command_distribution(command_distribution(pool, noise=self.max_advantage_std))
        if period_ends:
            self.max_advantage, self.updates_since_max = -torch.inf, 0

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _parts(self) -> dict[str, Any]:
        """Modules and optimisers that a checkpoint needs besides the agent."""
        online = None if self.online is self.agent else self.online
        parts = {"online": online, "critic": self.critic, "critic_optimizer": self.critic_optimizer}
        return {"optimizer": self.optimizer} | {name: part for name, part in parts.items() if part is not None}

    def state_dict(self) -> Snapshot:
        state: Snapshot = {name: part.state_dict() for name, part in self._parts().items()}
        maximum = [self.max_advantage, self.max_advantage_std, self.updates_since_max]
        return state | {"updates": self.updates, "max_advantage": maximum}

    def load_state_dict(self, state: Snapshot) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self.updates = state["updates"]
        self.max_advantage, self.max_advantage_std, self.updates_since_max = state["max_advantage"]
