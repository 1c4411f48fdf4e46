"""Learning by doing as told: what was played shows how to reach what it reached, and commands ask for more.

Upside-Down RL and Reward-Conditioned Policies share everything here but their numbers.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from bestiary.algos.base import Agent, apply_gradient
from bestiary.algos.exploration import Explorer, Fixed
from bestiary.algos.off_policy import burn_in_state, split
from bestiary.config.compat import lerp_all
from bestiary.config.schema import Count, Counts, Numbers
from bestiary.cores.base import CoreConfig
from bestiary.errors import UserError
from bestiary.nets import Net, Torso, head, orthogonal
from bestiary.nets.optim import AdamW, LrSchedule, OptimizerConfig
from bestiary.ops.collective import SINGLE_PROCESS, Collective
from bestiary.ops.commands import Aim, aim, best, exponential_weight, reduce, zscore
from bestiary.ops.policy import entropy, sample
from bestiary.ops.returns import lambda_returns
from bestiary.replay.episodes import Episodes, Held, Survey
from bestiary.types import (
    Batch,
    Metrics,
    Snapshot,
    Spec,
    State,
    TimeStep,
    Trajectory,
    Update,
    ValueTargets,
    transitions,
)

LATEST = 20  # episodes that count as what is played now
REMEMBERED = 1_000  # batches after which old observations count less in what is normal


class Gate(nn.Module):
    """One layer of features, let through as far as the command says, then fully connected layers (Srivastava 2019)."""

    def __init__(self, width: int, command: int, hidden: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.features = nn.Linear(width, hidden[0])
        self.gate = nn.Linear(command, hidden[0])
        widths = [*hidden, outputs]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(widths))
        for layer, gain in ((self.features, 1.0), (self.gate, 1.0), *((layer, 2**0.5) for layer in self.layers[:-1])):
            orthogonal(layer, gain)

    def forward(self, x: Tensor, command: Tensor) -> Tensor:
        x = self.features(x).tanh() * self.gate(command).sigmoid()
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class Gates(nn.Module):
    """Every layer is let through as far as the command says (Kumar et al. 2019)."""

    def __init__(self, width: int, command: int, hidden: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        widths = [width, *hidden]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(widths))
        self.gates = nn.ModuleList(nn.Linear(command, o) for o in hidden)
        self.last = nn.Linear(widths[-1], outputs)

    def forward(self, x: Tensor, command: Tensor) -> Tensor:
        for layer, gate in zip(self.layers, self.gates, strict=True):
            x = F.relu(layer(x)) * gate(command).sigmoid()
        return self.last(x)


class Film(nn.Module):
    """Every layer is scaled between nothing and double by the command, which the first layer is also shown."""

    def __init__(self, width: int, command: int, hidden: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        widths = [width + command, *hidden]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(widths))
        self.scales = nn.ModuleList(nn.Linear(command, o) for o in hidden)
        self.last = nn.Linear(widths[-1], outputs)
        with torch.no_grad():
            self.last.weight.mul_(0.01)
            self.last.bias.zero_()

    def forward(self, x: Tensor, command: Tensor) -> Tensor:
        x = torch.cat([x, command], -1)
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = F.relu(layer(x)) * (1 + F.softsign(scale(command)))
        return self.last(x)


class Hyper(nn.Module):
    """Features, then layers whose weights and biases are linear in the command; the last without ReLU.

    (W0 + c1 W1 + c2 W2) x is W0 x + c1 W1 x + c2 W2 x, so no weights are ever made for single rows.
    """

    def __init__(self, width: int, command: int, hidden: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.features = nn.Linear(width, hidden[0])
        widths = [*hidden, outputs]
        self.layers = nn.ModuleList(nn.Linear(i, (1 + command) * o) for i, o in pairwise(widths))

    def forward(self, x: Tensor, command: Tensor) -> Tensor:
        x = self.features(x).tanh()
        mix = torch.cat([torch.ones_like(command[..., :1]), command], -1)[..., None]  # [..., 1 + W, 1]
        for number, layer in enumerate(self.layers):
            x = (layer(x).unflatten(-1, (mix.shape[-2], -1)) * mix).sum(-2)
            if number < len(self.layers) - 1:
                x = F.relu(x)
        return x


NETWORKS: dict[str, Callable[..., nn.Module]] = {"gate": Gate, "gates": Gates, "film": Film, "hyper": Hyper}


class CommandAgent(Agent):
    """A policy that is told what to reach.

    The command is memory: drawn where an episode begins, less by what was earned after every move. Where it is drawn
    from, what observations are normal and how boldly to act are buffers, so they travel with the weights.
    """

    pool: Tensor
    spread: Tensor
    noise: Tensor
    untrained: Tensor
    sharpest: Tensor
    centre: Tensor
    spans: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(self, cfg: "Commanded", spec: Spec, net: Net, core: CoreConfig) -> None:
        super().__init__()
        self.cfg, self.spec, self.net, self.core = cfg, spec, net, core
        self.torso = Torso(spec, net, core)
        self.policy = NETWORKS[cfg.network](self.torso.width, cfg.width, cfg.head, spec.num_actions)
        self.register_buffer("pool", torch.zeros(cfg.top if cfg.source == "episode" else 1, cfg.width))
        self.register_buffer("spread", torch.zeros(cfg.width))
        self.register_buffer("noise", torch.zeros(cfg.width))
        self.register_buffer("untrained", torch.tensor(True))  # anything goes until something has been learnt
        self.register_buffer("sharpest", torch.tensor(1.0))
        size = spec.obs_shape if cfg.normalise else (0,)
        self.register_buffer("centre", torch.zeros(size))
        self.register_buffer("spans", torch.ones(size))
        self.register_buffer("shift", torch.tensor(cfg.shift), persistent=False)
        self.register_buffer("scale", torch.tensor(cfg.scale), persistent=False)

    def initial_state(self, batch_size: int) -> State:
        like = self.pool
        return (
            like.new_zeros(batch_size, self.cfg.width),
            like.new_ones(batch_size),
            *self.torso.initial_state(batch_size),
        )

    def aim_at(self, aim: Aim) -> None:
        """Where commands come from now on; a pool that is not yet full repeats what it has."""
        at = torch.arange(len(self.pool), device=self.pool.device) % len(aim.pool)
        self.pool.copy_(aim.pool.to(at.device)[at])
        self.spread.copy_(aim.spread)
        self.noise.copy_(aim.noise)

    def set_command(self, command: tuple[float, ...]) -> None:
        if command:
            self.cfg.check_command(command)
            self.aim_at(aim(np.array(command)))

    def episode_info(self, aux: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.cfg.command_names, aux["command"].unbind(-1), strict=True))

    def seen(self, step: TimeStep) -> TimeStep:
        """With observations as the network likes them."""
        if not self.cfg.normalise:
            return step
        return step._replace(obs=((step.obs - self.centre) / self.spans).clamp(-5, 5))

    def logits(self, h: Tensor, command: Tensor) -> Tensor:
        return self.policy(h, (command - self.shift) * self.scale)

    def draw(self, explore: Tensor | None, count: int, rng: torch.Generator) -> Tensor:
        """[B, W]. More than was ever reached is asked for only while exploring."""
        lots = torch.rand(count, 2, generator=rng, device=self.pool.device)
        normal = torch.randn(count, self.cfg.width, generator=rng, device=self.pool.device)
        command = self.pool[(lots[:, 0] * len(self.pool)).long()]
        if explore is not None:
            bold = (explore > 0).to(command.dtype)[:, None]
            command = command + bold * (lots[:, 1:] * self.spread + normal * self.noise)
        reward = command[:, :1] if self.cfg.max_return is None else command[:, :1].clamp(max=self.cfg.max_return)
        return torch.cat([reward, command[:, 1:]], 1)

    def act(
        self, step: TimeStep, state: State, explore: Tensor | None, rng: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor], State]:
        """explore: where above 0, commands reach beyond what was reached, and the policy is sharpened at random."""
        cfg, (command, sharp, *memory) = self.cfg, state
        fresh = self.draw(explore, len(command), rng)
        drawn = step.is_first[:, None] | torch.tensor(cfg.redraw, device=fresh.device)
        if not cfg.hold:
            most = float("inf") if cfg.max_return is None else cfg.max_return
            if cfg.command == "to-go":
                command = reduce(command, step.reward, cfg.discount, most)
            else:  # of a whole episode only the time that is left becomes less
                command = reduce(command, torch.zeros_like(step.reward), 1.0, most)
        command = torch.where(drawn, fresh, command)
        lots = torch.rand(len(command), generator=rng, device=fresh.device)
        bold = lots if explore is None else torch.where(explore > 0, lots, 0.0)
        sharp = torch.where(step.is_first, self.sharpest**bold, sharp)
        row = TimeStep(*(x[None] for x in self.seen(step)))
        h, after = self.torso(row, tuple(memory))
        logits = self.logits(h[0], command)
        if explore is None:
            action = logits.argmax(-1)
        else:
            wild = self.untrained & (explore > 0)
            action = sample(torch.where(wild[:, None], 0.0, logits * sharp[:, None]), rng)
        return action, {"command": command}, (command, sharp, *after)


class Critic(nn.Module):
    """What a row is worth, by a memory of its own kind."""

    def __init__(self, agent: CommandAgent, hidden: Counts) -> None:
        super().__init__()
        self.torso = Torso(agent.spec, agent.net, agent.core)
        self.head = head(self.torso.width, hidden, 1, last=1e-2, init=agent.net.init)

    def forward(self, step: TimeStep, state: State) -> Tensor:
        return self.head(self.torso(step, state)[0]).squeeze(-1)


class CommandLearner:
    """Supervised learning of what was done, given what came of it.

    `agent` is what acts: with `average` a slow mean of the network that learns. A critic, where commands are
    advantages, judges all episodes now and then (`critic="own"`), or learns in the same step (`critic="joint"`).

    Of several learners each judges the episodes of its own replay, which standardises advantages among those alone, and
    hears from it where commands come from: what acts asks for what the replay of its learner has seen.
    """

    collective: Collective = SINGLE_PROCESS

    def __init__(self, cfg: "Commanded", agent: CommandAgent, total_steps: int) -> None:
        self.cfg, self.agent = cfg, agent
        self.online = agent if cfg.average is None else copy.deepcopy(agent)
        device = agent.pool.device
        self.critic = Critic(agent, cfg.critic_head).to(device) if cfg.command == "advantage" else None
        joint = cfg.critic == "joint"
        learning = nn.ModuleList([self.online])
        if self.critic is not None and joint:
            learning.append(self.critic)
        self.optimizer = cfg.optimizer.build(learning)
        self.learning = list(learning.parameters())
        self.slow, self.quick = list(agent.parameters()), list(self.online.parameters())
        self.judging = [] if self.critic is None else list(self.critic.parameters())
        budget = total_steps * cfg.ratio if cfg.per == "move" else None
        self.lr_schedule = LrSchedule(self.optimizer, budget if cfg.lr_last != 1 else None, cfg.lr_last)
        self.critic_optimizer = None if self.critic is None or joint else cfg.critic_optimizer.build(self.critic)
        self.updates = 0
        self.value_loss: Tensor | None = None  # of the rows a joint critic was shown, until the next update
        self.judged = 0  # moves in these rows
        self.peak, self.peak_std, self.peak_since = -torch.inf, 0.0, 0

    # -- the critic --------------------------------------------------------------------------------

    def values(self, step: TimeStep) -> Tensor:
        assert self.critic is not None
        return self.critic(self.online.seen(step), self.critic.torso.initial_state(step.is_first.shape[1]))

    def judge(self, t: Trajectory, value: Tensor) -> tuple[Tensor, Tensor]:
        """Value targets of all moves, [T, B], and where there is a move."""
        m = transitions(t.step, self.cfg.discount)
        reward, discount = m.reward / self.cfg.value_scale, m.discount
        if self.cfg.critic == "joint":  # the reference knows no time limit: an episode that ends is worth nothing more
            goes_on = torch.cat([m.valid[1:], torch.zeros_like(m.valid[:1])])
            discount = discount * goes_on
        return lambda_returns(reward, discount, m.valid, value[1:], self.cfg.trace_decay), m.valid

    def survey(self, t: Trajectory) -> Update:
        if self.cfg.critic == "joint":
            value = self.values(t.step)
            target, valid = self.judge(t, value.detach())
            self.value_loss, self.judged = (value[:-1] - target)[valid].square().mean(), int(valid.sum())
            return Update({})
        with torch.no_grad():
            value = self.values(t.step)
            target, _ = self.judge(t, value)
        return Update({}, value_targets=ValueTargets(target, target - value[:-1]))

    def teach_critic(self, t: Trajectory, valid: Tensor) -> Metrics:
        assert self.critic is not None and self.critic_optimizer is not None
        past, now = split(t, self.cfg.burn_in)
        torso = self.critic.torso
        value = self.critic(self.online.seen(now.step), burn_in_state(torso, self.online.seen(past), t.state))
        squares = (value - t.aux["target"])[valid].square()
        taught, rows = self.collective.all_reduce_sum(
            (valid.sum().to(squares.dtype), torch.tensor(float(value.numel())))
        )
        loss = squares.sum() / taught
        apply_gradient(loss, self.judging, self.critic_optimizer, self.cfg.grad_norm, self.updates + 1, self.collective)
        return {"value_loss": loss.detach(), "value": value.detach().sum() / rows * self.cfg.value_scale}

    # -- the policy --------------------------------------------------------------------------------

    def label(self, t: Trajectory) -> Tensor:
        """What each move reached, in the units of commands: [T, B, W]."""
        cfg, aux = self.cfg, t.aux
        if cfg.command == "to-go":
            reached = aux["to_go"]
        elif cfg.command == "return":
            reached = aux["earned"]
        elif cfg.critic == "own":
            reached = aux["advantage"]
        else:
            with torch.no_grad():
                reached = aux["to_go"] - cfg.value_scale * self.values(t.step)[cfg.burn_in :]
        return torch.stack([reached, aux["horizon"]] if cfg.horizon else [reached], -1)

    def weight(self, t: Trajectory, label: Tensor, valid: Tensor) -> Tensor:
        cfg = self.cfg
        if cfg.weighting == "none":
            return valid.to(label.dtype)
        by_move = cfg.command == "advantage" or cfg.weigh == "moves"
        z = zscore(label[..., 0] if by_move else t.aux["merit"], valid, self.collective.moments)
        return valid * exponential_weight(z, cfg.beta, cfg.weight_cap)

    def update(self, batch: Batch) -> Update:
        cfg, t = self.cfg, batch.trajectory
        if batch.is_critic_refresh:
            return self.survey(t)
        self.lr_schedule.at(self.updates)
        past, now = split(t._replace(aux={}), cfg.burn_in)
        valid = t.aux["valid"]
        self._get_used_to(now.step.obs[valid])
        label = self.label(t)
        weight = self.weight(t, label, valid)
        share = weight / self.collective.all_reduce_sum(weight.sum()).clamp(min=1e-6)
        torso = self.online.torso
        h, _ = torso(self.online.seen(now.step), burn_in_state(torso, self.online.seen(past), t.state))
        logits = self.online.logits(h, label)
        action = now.action.flatten()
        error = F.cross_entropy(logits.flatten(0, 1), action, reduction="none", label_smoothing=cfg.smoothing)
        policy_loss = (share.flatten() * error).sum()
        loss = policy_loss
        if self.critic is not None and cfg.critic == "joint":
            loss = loss + self._judgement(loss)
        norm = apply_gradient(loss, self.learning, self.optimizer, cfg.grad_norm, self.updates + 1, self.collective)
        said = {} if self.critic_optimizer is None else self.teach_critic(t, valid)
        self.updates += 1
        self._follow(batch.about, label[valid][:, 0])
        with torch.no_grad():
            undecided = (share * entropy(logits.detach())).sum()
            right = (share * (logits.argmax(-1) == now.action)).sum()
        part = self.collective.fraction
        metrics = self.collective.all_reduce_sum(
            {
                "loss": policy_loss.detach(),
                "grad_norm": part * norm,
                "entropy": undecided,
                "agreement": right,
                "effective_batch": share.square().sum(),
                "command_return": part * self.agent.pool[:, 0].mean(),
                "command_horizon": part * self.agent.pool[:, -1].mean() if cfg.horizon else torch.zeros(()),
                "sharpest": part * self.agent.sharpest,
                **said,
            }
        )
        return Update(metrics | {"effective_batch": 1 / metrics["effective_batch"].clamp(min=1e-12)})

    def _judgement(self, like: Tensor) -> Tensor:
        """What a joint critic was wrong by since the last update; 0 where it was shown nothing."""
        loss, number = self.value_loss, self.judged
        self.value_loss, self.judged = None, 0
        here = self.collective.batch_fraction(number)  # asked also where nothing was shown: others may have been
        return torch.zeros_like(like) if loss is None else here * loss

    @torch.no_grad()
    def _get_used_to(self, rows: Tensor) -> None:
        """What observations are normal: means over all batches so far, later over the last many. rows: [N, ...]"""
        if not self.cfg.normalise:
            return
        agent = self.online
        share = 1 / (1 + min(self.updates, REMEMBERED))
        here = self.collective.batch_fraction(len(rows))
        square = (rows - agent.centre).square().mean(0)  # from where the mean was: it moves by so much
        mean, square = self.collective.all_reduce_sum((here * rows.mean(0), here * square))
        variance = torch.lerp(agent.spans.square(), square, share) - (share * (mean - agent.centre)).square()
        agent.spans.copy_(variance.clamp(min=1e-4).sqrt())
        agent.centre.lerp_(mean, share)

    @torch.no_grad()
    def _follow(self, about: Metrics, label: Tensor) -> None:
        """What acts comes a little closer to what learns, and hears where commands come from."""
        cfg = self.cfg
        if self.agent is not self.online:
            # of the first updates it is a plain mean
            share = max(1 - cfg.average, 1 / self.updates) if cfg.average is not None else 1.0
            lerp_all(self.slow, self.quick, share)
            self.agent.centre.copy_(self.online.centre)
            self.agent.spans.copy_(self.online.spans)
        self.agent.untrained.fill_(False)
        if cfg.sharpen > 1:
            done = min(1.0, self.updates / max(1.0, cfg.sharpen_over * cfg.ratio))
            self.agent.sharpest.fill_(1 + (cfg.sharpen - 1) * done)
        if cfg.command == "advantage" and cfg.source == "peak":
            self._chase(label)
        else:
            self.agent.aim_at(Aim(*(about[name] for name in Aim._fields)))

    def _chase(self, label: Tensor) -> None:
        """The largest advantage of any batch in the last thousand is the command of the next, as in the reference."""
        most, std = self.collective.all_reduce_max(label.max()).item(), self.collective.moments(label).std.item()
        if most > self.peak:
            self.peak, self.peak_std = most, std
        self.peak_since += 1
        if self.updates == 1 or self.peak_since >= self.cfg.peak_every:
            self.agent.aim_at(aim(np.array([self.peak]), noise=self.peak_std))
        if self.peak_since >= self.cfg.peak_every:
            self.peak, self.peak_since = -torch.inf, 0

    # -- checkpoints -------------------------------------------------------------------------------

    def _parts(self) -> dict[str, Any]:
        """What a checkpoint needs beside the agent."""
        online = None if self.online is self.agent else self.online
        parts = {"online": online, "critic": self.critic, "critic_optimizer": self.critic_optimizer}
        return {"optimizer": self.optimizer} | {name: part for name, part in parts.items() if part is not None}

    def state_dict(self) -> Snapshot:
        state: Snapshot = {name: part.state_dict() for name, part in self._parts().items()}
        return state | {"updates": self.updates, "peak": [self.peak, self.peak_std, self.peak_since]}

    def load_state_dict(self, state: Snapshot) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self.updates = state["updates"]
        self.peak, self.peak_std, self.peak_since = state["peak"]


@dataclass(frozen=True)
class Commanded:
    """Parts to be mixed: what a command asks for, which episodes teach, how they count, where commands come from."""

    unroll: int = 32
    """moves each environment plays between two rounds of updates"""
    batch_size: int = 256
    """moves per update"""
    window: int | None = None
    """moves in a row; None: 1, or whole episodes where something is remembered"""
    burn_in: int = 0
    """rows before a window that only bring frames or memory up to date"""
    command: Literal["to-go", "return", "advantage"] = "to-go"
    """asks for what is still to be earned, for what the episode earns, or for moves better than the critic expects"""
    horizon: bool = True
    """a command also says in how many moves"""
    discount: float = 1.0
    """of what is still to be earned, and of the critic"""
    hold: bool = False
    """a command stays as it was drawn, whatever is earned"""
    redraw: bool = False
    """a command is drawn anew for every move"""
    source: Literal["spread", "episode", "percentile", "peak"] = "episode"
    """commands come from mean and deviation of the top episodes, from one of them and more, from a percentile of what
    moves reached, or from the largest return of late"""
    top: int = 100
    """best episodes from which commands come"""
    distinct: bool = False
    """among them equal returns count once"""
    increment: float = 0.5
    """how much more than a top episode is asked for at most, in their standard deviations"""
    percentile: float = 90.0
    """of labels, where commands come from there"""
    peak_every: int = 1_000
    """updates over which the largest advantage is sought"""
    max_return: float | None = None
    """no command asks for more"""
    keep: Literal["best", "recent", "mixture"] = "mixture"
    """episodes to learn from: the best there ever were, the latest, or some of the best and some of the latest"""
    capacity: Count = 1_000
    """episodes kept"""
    moves: Count | None = None
    """no more moves than these are kept; None: as many as the episodes have"""
    best: int = 200
    latest: int = 200
    best_share: float = 0.7
    """of a batch from a mixture, how much is from its best; the rest is from its latest"""
    draw: Literal["episodes", "moves"] = "episodes"
    """which are equally likely to be learnt from"""
    adjust: bool = False
    """rank and weigh episodes by how much more they earned than their first observation promised"""
    cut_penalty: float = 0.0
    """points by which an episode that a time limit cut short ranks lower: hovering is not landing"""
    haste: float = 0.0
    """points by which an episode ranks lower, and weighs less, for each of its moves: of equals, the quicker"""
    weighting: Literal["none", "exponential"] = "none"
    """exponential: what turned out better counts more"""
    weigh: Literal["episodes", "moves"] = "episodes"
    """by what the whole episode earned, or by what the move reached, as its command says; advantages are of moves"""
    beta: float = 1.0
    """the smaller, the more it does"""
    weight_cap: float = 20.0
    ratio: float = 1 / 64
    """updates per move, or per episode"""
    per: Literal["move", "episode"] = "move"
    warmup: int = 50
    """episodes at random before the first update"""
    network: Literal["gate", "gates", "film", "hyper"] = "film"
    """how the command meets what is seen: at one layer, at every layer, by scaling every layer, by making weights"""
    head: Counts = (128, 128)
    """units of the layers after memory"""
    shift: Numbers = (0.0, 0.0)
    """what is taken from a command before the network sees it"""
    scale: Numbers = (1.0, 1.0)
    """by what it is then multiplied"""
    normalise: bool = False
    """show observations in their standard deviations from their mean; not for pictures"""
    smoothing: float = 0.0
    """of what was done, share given to all actions alike"""
    average: float | None = None
    """what acts is a mean of the network over updates, of which each keeps this share; None: the network itself"""
    sharpen: float = 1.0
    """while exploring, logits are multiplied by up to this much, drawn anew for every episode"""
    sharpen_over: Count = 600_000
    """moves until it is reached; episodes where updates are counted per episode"""
    grad_norm: float | None = 1.0
    optimizer: OptimizerConfig = field(default_factory=lambda: AdamW(lr=1e-3))
    lr_last: float = 0.1
    """share of the learning rate that is left at the end of the budget; of updates per episode nobody knows when"""
    critic: Literal["own", "joint"] = "own"
    """own: an optimiser of its own and targets of all episodes at once; joint: in the policy's step, on a few"""
    critic_head: Counts = (64, 64)
    critic_optimizer: OptimizerConfig = field(default_factory=lambda: AdamW(lr=1e-3))
    critic_every: int = 128
    """updates between two times that it judges (own) or learns (joint)"""
    trace_decay: float = 0.95
    """lambda of the critic's targets"""
    value_scale: float = 100.0
    """returns are divided by this for the critic"""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        if self.unroll < 1:
            raise UserError(f"algo.unroll={self.unroll} must be at least 1")
        if self.horizon and self.command == "advantage":
            raise UserError("algo.horizon does not go with algo.command=advantage: an advantage is of a single move")
        for name in ("shift", "scale"):
            if len(getattr(self, name)) != self.width:
                raise UserError(
                    f"algo.{name}={getattr(self, name)} must have as many numbers as a command: {self.width}"
                )
        for name in ("beta", "weight_cap", "value_scale", "grad_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"algo.{name.replace('_', '-')}={value} must be positive")
        for name in ("discount", "smoothing", "average", "trace_decay", "lr_last"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise UserError(f"algo.{name.replace('_', '-')}={value} must lie in [0, 1]")
        for name in ("increment", "cut_penalty", "haste"):
            if not getattr(self, name) >= 0:
                raise UserError(f"algo.{name.replace('_', '-')}={getattr(self, name)} must be at least 0")
        if not 0 <= self.percentile <= 100:
            raise UserError(f"algo.percentile={self.percentile} must lie in [0, 100]")
        if not self.sharpen >= 1:
            raise UserError(f"algo.sharpen={self.sharpen} must be at least 1")
        if min(self.top, self.critic_every, self.peak_every) < 1:
            raise UserError("algo.top, algo.critic-every and algo.peak-every must be at least 1")
        if not self.head or min(self.head) < 1:
            raise UserError(f"algo.head={self.head} must be layers of at least one unit")
        if any(units < 1 for units in self.critic_head):
            raise UserError(f"algo.critic-head={self.critic_head} must be layers of at least one unit")
        if self.source == "percentile" and self.horizon:
            raise UserError("algo.source=percentile says nothing of moves: use --algo.no-horizon")
        if self.source == "percentile" and self.command == "advantage" and self.critic == "joint":
            raise UserError(
                "algo.source=percentile needs algo.critic=own: of a joint critic's advantages none are kept"
            )
        if self.source in ("spread", "episode") and self.command == "advantage":
            raise UserError(f"algo.source={self.source} is of returns: with advantages use percentile or peak")
        if not self.hold and self.command == "to-go" and self.discount == 0:
            raise UserError("algo.discount=0 leaves nothing to go")

    @property
    def width(self) -> int:
        """Numbers in a command."""
        return 2 if self.horizon else 1

    @property
    def command_names(self) -> tuple[str, ...]:
        return ("desired_return", "desired_horizon")[: self.width]

    def check_command(self, command: tuple[float, ...]) -> None:
        """Refuse what an agent could not be told."""
        names = ["a return" if self.command != "advantage" else "an advantage", "a number of moves"]
        if len(command) != self.width:
            wanted = " and ".join(names[: self.width])
            raise UserError(
                f"a command of this agent is {wanted}: {self.width} number{'s' * (self.width > 1)}, not {len(command)}"
            )
        if not all(math.isfinite(x) for x in command):
            raise UserError(f"a command must be made of finite numbers, not {', '.join(map(str, command))}")
        if self.max_return is not None and command[0] > self.max_return:
            raise UserError(f"no command asks for more than algo.max-return={self.max_return:g}, so not {command[0]:g}")
        if self.horizon and command[1] < 1:
            raise UserError(f"a horizon of {command[1]:g} moves is too short: ask for at least 1")

    def aim(self, held: Held, reached: NDArray[Any]) -> Aim:
        """Where commands come from, given the episodes held and, of all but whole returns, what moves reached."""
        returns = held.begun if self.command == "to-go" and self.discount < 1 else held.earned
        if self.source == "percentile":
            among = returns if self.command == "return" else reached
            return aim(np.array([np.percentile(among, self.percentile)]) if len(among) else np.zeros(1))
        if self.source == "peak":
            late = returns[-LATEST:]
            peak, std = late.max(), late.std()
            wide = [held.moves[-LATEST:].mean()] if self.horizon else []
            return aim(np.array([peak, *wide]), noise=np.array([std, *(0.0 for _ in wide)]))
        top = best(held.merit, self.top, self.distinct)
        pairs = np.stack([returns[top], held.moves[top].astype(np.float64)], 1)[:, : self.width]
        deviation = np.array([returns[top].std(), 0.0])[: self.width]
        if self.source == "spread":
            mean = pairs.mean(0)
            mean[1:] = np.round(mean[1:])
            return aim(mean, spread=deviation)
        return aim(pairs, spread=self.increment * deviation)

    def replay_builder(self, num_streams: int) -> Episodes:
        survey = None
        if self.command == "advantage":
            survey = Survey(self.critic_every, whole=self.critic == "own")
        return Episodes(
            streams=num_streams,
            batch_size=self.batch_size,
            capacity=self.capacity,
            moves=self.moves,
            keep=self.keep,
            best=self.best,
            latest=self.latest,
            best_share=self.best_share,
            draw=self.draw,
            window=self.window,
            burn_in=self.burn_in,
            ratio=self.ratio,
            per=self.per,
            warmup=self.warmup,
            discount=self.discount,
            adjust=self.adjust,
            cut_penalty=self.cut_penalty,
            haste=self.haste,
            aim=self.aim,
            by_move=self.source == "percentile" and self.command == "to-go",
            survey=survey,
        )

    def explorer(self, num_envs: int) -> Explorer:
        return Fixed(torch.ones(num_envs))

    def agent(self, spec: Spec, net: Net, core: CoreConfig) -> CommandAgent:
        if self.normalise and spec.is_image:
            raise UserError(f"algo.normalise is for vectors, but {spec.name} shows pictures")
        agent = CommandAgent(self, spec, net, core)
        whole = self.window is None and not agent.torso.memoryless
        if net.frame_stack - 1 > self.burn_in and not whole:
            raise UserError(
                f"algo.burn-in={self.burn_in} rows do not fill net.frame-stack={net.frame_stack}: "
                f"raise it to {net.frame_stack - 1}"
            )
        return agent

    def learner(self, agent: Agent, total_steps: int) -> CommandLearner:
        assert isinstance(agent, CommandAgent)
        return CommandLearner(self, agent, total_steps)
