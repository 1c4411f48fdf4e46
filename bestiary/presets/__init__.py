"""Presets: named experiments, one file per paper or code base, derived from each other with dataclasses.replace."""

from importlib import import_module
from typing import TYPE_CHECKING

from bestiary.config.suggestions import did_you_mean
from bestiary.errors import UserError
from bestiary.presets.budgets import MEMORY_RL, QUICK

if TYPE_CHECKING:
    from bestiary.config.experiment import Experiment

# name -> (module, description); a table, so that listing and completing names imports no preset
PRESETS: dict[str, tuple[str, str]] = {
    "recall": ("small", "IMPALA + LSTM remembers a cue for ten steps: two minutes on two cores"),
    "tmaze": ("memory_rl", "DQN + Delta Net remembers a cue along a corridor of fifty cells: seconds"),
    **{
        f"{task}-{length}": ("memory_rl", f"{algo} + Delta Net, small and quick: {n:,} episodes, minutes")
        for task, lengths in QUICK.items()
        for length, n in lengths.items()
        for algo in ("DQN" if task.startswith("tmaze") else "SAC-Discrete",)
    },
    "catch": ("small", "IMPALA on Catch, the smallest task with images: seconds"),
    "cartpole": ("small", "IMPALA on CartPole-v1, or any Gymnasium id with --env.id"),
    "cartpole-dqn": ("small", "DQN on CartPole-v1, or any Gymnasium id with --env.id"),
    "pong": ("small", "IMPALA on Pong (or any Atari game) with settings for a small machine"),
    "riverraid": ("small", "IMPALA on Riverraid by any named reward, settings for a small machine"),
    "apex-small": ("apex_r2d2", "Ape-X on Pong (or any Atari game) with settings for a small machine"),
    "apex-paper": ("apex_r2d2", "the Ape-X paper on Asterix (or any Atari game): 360 environments"),
    "apex-rela": ("apex_r2d2", "Ape-X as in rela's code: one life, all 18 actions"),
    "r2d2-small": ("apex_r2d2", "R2D2 + LSTM on Pong (or any Atari game) with settings for a small machine"),
    "tmaze-r2d2": ("apex_r2d2", "R2D2 + Delta Net in a T-Maze of fifty cells with sequences of ten steps: a minute"),
    "r2d2-paper": ("apex_r2d2", "the R2D2 paper on Asterix (or any Atari game): 256 environments"),
    "r2d2-rela": ("apex_r2d2", "R2D2 as in rela's code: one life, all 18 actions, clipped rewards"),
    "udrl": ("udrl_rcp", "Upside-Down RL on LunarLander"),
    "udrl-sparse": (
        "udrl_rcp",
        "Upside-Down RL on LunarLander with sparse reward (the return at the last step)",
    ),
    "rcp-a": ("udrl_rcp", "Reward-Conditioned Policies on LunarLander, conditioned on advantages (RCP-A)"),
    "rcp-r": ("udrl_rcp", "Reward-Conditioned Policies on LunarLander, conditioned on return and horizon (RCP-R)"),
    "udrl-paper": ("udrl_rcp", "the Upside-Down RL paper on LunarLander, with its author's settings"),
    "udrl-repo": ("udrl_rcp", "Upside-Down RL as in its public code"),
    "rcp-r-repo": ("udrl_rcp", "RCP-R as in its public code, flaws included"),
    "rcp-a-repo": ("udrl_rcp", "RCP-A as in its public code, flaws included"),
    "impala-shallow": ("impala", "the IMPALA paper, shallow network, one Atari game"),
    "impala-deep": ("impala", "the IMPALA paper, deep residual network, one Atari game"),
    "monobeast": ("torchbeast", "MonoBeast's defaults on Pong"),
    "monobeast-45": ("torchbeast", "MonoBeast's README recipe with 45 actors"),
    "polybeast": ("torchbeast", "PolyBeast's defaults on Pong: residual network"),
    "polybeast-docker": ("torchbeast", "what PolyBeast's Docker image runs"),
    "rfwp-ff": ("recurrent_fwp", "Recurrent Fast Weight Programmers on Gopher (or any Atari game): feedforward core"),
    "rfwp-lstm": ("recurrent_fwp", "the same experiment with an LSTM core"),
    "rfwp-lt": ("recurrent_fwp", "the same experiment with a Linear Transformer"),
    "rfwp-delta-net": ("recurrent_fwp", "the same experiment with a Delta Net"),
    "rfwp-rdn": ("recurrent_fwp", "the same experiment with a Recurrent Delta Net"),
    "rfwp-delta-rnn": ("recurrent_fwp", "the same experiment with a Delta RNN"),
    **{
        f"{task}-{length}-{memory}": (
            "memory_rl",
            f"the paper of Ni et al. (2023): {algo} + {memory.upper()}, {n:,} episodes",
        )
        for task, lengths in MEMORY_RL.items()
        for length, n in lengths.items()
        for memory in ("lstm", "gpt")
        for algo in ("DQN" if task.startswith("tmaze") else "SAC-Discrete",)
    },
}


def preset(name: str) -> "Experiment":
    """The experiment of this name."""
    if name not in PRESETS:
        raise UserError(f"there is no preset {name!r}: {did_you_mean(name, PRESETS)}")
    module = import_module(f"bestiary.presets.{PRESETS[name][0]}")
    return getattr(module, name.replace("-", "_"))
