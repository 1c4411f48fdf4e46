"""Ni et al. 2023, When Do Transformers Shine in RL?: every task, length and budget of its figures 3 and 6.

The paper's budgets are episodes; here the first step of an episode counts as a frame, so frames are episodes x
(horizon + 1). The paper plays one environment with a quarter of an update per step; here several are played
with the same updates per step. The paper's dropout is also active while acting and in targets; here it is not.
"""

import math
from dataclasses import replace
from typing import Any

from bestiary.algos import Dqn, SacDiscrete
from bestiary.config.experiment import Evaluation, Experiment
from bestiary.cores import CoreConfig, DeltaNet, DeltaRnn, Ff, Gpt, Gru, LinearTransformer, Lstm, RecurrentDeltaNet
from bestiary.envs import KeyToDoor, TMaze, VisualMatch
from bestiary.nets import Mlp, Net, SmallCnn
from bestiary.nets.optim import Adam
from bestiary.presets.budgets import MEMORY_RL, QUICK
from bestiary.replay import Uniform
from bestiary.runtime.config import Local

WARMUP = 10  # episodes
ENVS = 10  # so that the first round is the warm-up


def lstm(layers: int) -> Lstm:
    return Lstm(hidden=128, layers=layers, init="orthogonal")  # biases of zero


def gpt(width: int, layers: int, heads: int, horizon: int) -> Gpt:
    # without projection the input is as wide as the core; weights are initialised as in GPT-2
    return Gpt(width, layers, heads, window=horizon + 1, dropout=0.1, project=False, weight_std=0.02)


def shared_settings(horizon: int) -> dict[str, Any]:
    """Settings of both algorithms."""
    return {
        "replay": Uniform(
            batch_size=64,  # whole episodes
            capacity=max(1_000_000, 1000 * horizon),
            warmup=WARMUP * horizon,
            updates_per_step=0.25,
        ),
        "unroll": horizon + 1,  # one episode
        "discount": 0.99,
        "tau": 0.005,
        "head": (256, 256),
        "optimizer": Adam(lr=3e-4),
    }


def dqn(env: TMaze, horizon: int, episodes: int, core: CoreConfig, units: tuple[int, int]) -> Experiment:
    return Experiment(
        env=env,
        algo=Dqn(
            **shared_settings(horizon),
            epsilon_fraction=0.1,  # from 1 to 1 / horizon
        ),
        core=core,
        net=Net(encoder=Mlp(hidden_size=units[0]), action_units=units[1], prev_reward=False),
        runtime=Local(envs=ENVS),
        frames=(WARMUP + episodes) * (horizon + 1),
        evaluation=Evaluation(every=episodes // 50 * (horizon + 1), episodes=100),  # paper: 10 episodes every 10
    )


def sac(env: VisualMatch | KeyToDoor, horizon: int, episodes: int, core: CoreConfig) -> Experiment:
    return Experiment(
        env=env,
        algo=SacDiscrete(
            **shared_settings(horizon),
            temperature=0.1,
            shared_encoder=True,
            freeze_critic=True,
        ),
        core=core,
        net=Net(encoder=SmallCnn(hidden_size=100), prev_action=False, prev_reward=False),
        runtime=Local(envs=ENVS),
        frames=(WARMUP + episodes) * (horizon + 1),
        evaluation=Evaluation(every=episodes // 50 * (horizon + 1), episodes=100),  # paper: 20 episodes every 50
    )


def experiment(task: str, length: int, memory: str, seed: int = 0) -> Experiment:
    """A task of the paper at one of its lengths, with the settings of its published commands for each core."""
    return replace(_published(task, length, memory), seed=seed)


def _published(task: str, length: int, memory: str) -> Experiment:
    episodes = MEMORY_RL[task][length]
    if task in ("tmaze-passive", "tmaze-active"):
        active = task == "tmaze-active"
        horizon = length + (3 if active else 1)
        if memory == "lstm":
            return dqn(TMaze(length, active), horizon, episodes, lstm(layers=1), units=(32, 16))
        depth = 2 if active else 1  # layers and heads
        return dqn(TMaze(length, active), horizon, episodes, gpt(128, depth, depth, horizon), units=(64, 64))
    if task == "visual-match":
        env, horizon = VisualMatch(length), length + 30
        # one layer everywhere, also where a published command for Key-to-Door names this task by mistake
        core = lstm(layers=1) if memory == "lstm" else gpt(100, 1, 1, horizon)
    else:
        env, horizon = KeyToDoor(length), length + 25
        core = lstm(layers=2) if memory == "lstm" else gpt(100, 2, 2, horizon)
    return sac(env, horizon, episodes, core)


# -- quick to train on a laptop: small cores, larger learning rates, fewer updates ------------------------------------

SMALL: dict[str, Any] = {"width": 32, "layers": 1, "heads": 4, "feedforward": 64}
# delta rule with normalised keys: repeated observations overwrite themselves, and nothing that was seen once
KEYS: dict[str, Any] = {"feature_map": "silu", "beta_bias": 2.0}


SMALL_CORES = (
    "ff", "lstm", "gru", "gpt", "linear-transformer", "delta-net", "recurrent-delta-net", "delta-rnn",
)  # fmt: skip


def small_core(memory: str, horizon: int) -> CoreConfig:
    """A core of a few thousand weights whose memory spans the whole episode."""
    if memory in ("lstm", "gru"):
        return {"lstm": Lstm, "gru": Gru}[memory](hidden=64, chrono=2 * horizon)
    cores: dict[str, CoreConfig] = {
        "ff": Ff(),
        "gpt": Gpt(**SMALL, window=horizon + 1, positions="learned"),
        "linear-transformer": LinearTransformer(**SMALL, feature_map="silu"),
        "delta-net": DeltaNet(**SMALL, **KEYS),
        "recurrent-delta-net": RecurrentDeltaNet(**SMALL, **KEYS),
        "delta-rnn": DeltaRnn(**SMALL, **KEYS),
    }
    return cores[memory]


def quick_tmaze(length: int, active: bool = False, memory: str = "delta-net", episodes: int = 2_000) -> Experiment:
    """Settings that work for corridors of ten to thousands of cells."""
    horizon, envs = length + (3 if active else 1), 16
    frames = episodes * (horizon + 1)
    return Experiment(
        env=TMaze(length, active),  # without memory: 0.5
        algo=Dqn(
            replay=Uniform(
                batch_size=min(32, max(4, 4_000 // horizon)),  # whole episodes
                capacity=2_000 * horizon,
                warmup=envs * horizon,  # one episode of every environment
                updates_per_step=1 / horizon,  # one update per episode
            ),
            unroll=horizon + 1,  # one episode and the first step of the next
            discount=1.0,  # all episodes have the same length
            # one update carries a reward back over about sqrt(horizon) steps; over all of them the variance is too high
            trace_decay=max(0.9, 1 - 2 / math.sqrt(horizon)),
            td_weight_exponent=2.0,  # start and junction are two transitions of very many
            tau=0.1,
            epsilon_first=0.0,
            epsilon_last=0.0,
            count_epsilon=0.4,  # most episodes still reach the junction
            head=(64,),
            grad_norm=1.0,
            optimizer=Adam(lr=1e-3),
        ),
        core=small_core(memory, horizon),
        net=Net(encoder=Mlp(hidden_size=32), prev_reward=False, init="orthogonal"),
        runtime=Local(envs=envs),
        frames=frames,
        evaluation=Evaluation(every=frames // 20, episodes=100),
    )


def quick_grid(env: VisualMatch | KeyToDoor, horizon: int, memory: str, episodes: int) -> Experiment:
    envs, frames = 16, episodes * (horizon + 1)
    return Experiment(
        env=env,
        algo=SacDiscrete(
            replay=Uniform(
                batch_size=32,  # whole episodes
                capacity=max(300_000, 64 * horizon),
                warmup=envs * horizon,
                updates_per_step=min(0.01, 1 / horizon),  # at most one update per episode: long ones cost more
            ),
            unroll=horizon + 1,
            discount=None,  # 1 - 1 / horizon
            tau=0.02,
            td_weight_exponent=1.0,  # few transitions of an episode depend on what was seen long before
            temperature=0.05,
            shared_encoder=True,
            freeze_critic=True,
            head=(128,),
            grad_norm=1.0,
            optimizer=Adam(lr=2e-3),
            lr_decay="linear",
        ),
        core=small_core(memory, horizon),
        net=Net(encoder=SmallCnn(hidden_size=64), prev_reward=False, init="orthogonal"),
        runtime=Local(envs=envs),
        frames=frames,
        evaluation=Evaluation(every=frames // 10, episodes=64),
    )


def quick(task: str, length: int, memory: str = "delta-net", seed: int = 0, episodes: int | None = None) -> Experiment:
    """A task with settings that learn within minutes."""
    if task in ("tmaze-passive", "tmaze-active"):
        chosen = quick_tmaze(length, task == "tmaze-active", memory, episodes or 2_000)
    elif task == "visual-match":
        chosen = quick_grid(VisualMatch(length), length + 30, memory, episodes or 6_000)
    else:
        chosen = quick_grid(KeyToDoor(length), length + 25, memory, episodes or 6_000)
    return replace(chosen, seed=seed)


tmaze = quick_tmaze(50)

globals().update(
    {
        f"{task}-{length}".replace("-", "_"): quick(task, length, episodes=episodes)
        for task, lengths in QUICK.items()
        for length, episodes in lengths.items()
    }
    | {
        f"{task}-{length}-{memory}".replace("-", "_"): experiment(task, length, memory)
        for task, lengths in MEMORY_RL.items()
        for length in lengths
        for memory in ("lstm", "gpt")
    }
)
