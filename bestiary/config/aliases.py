"""Names of earlier versions and their names of today, so that old run directories load and old flags are answered.

A setting is keyed by the kind of its dataclass and its field. If it is nested today, its new name is dotted.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

from bestiary.errors import UserError


class Removed(NamedTuple):
    """A setting that no longer exists. Old files load while it had the value that today's code implements."""

    value: Any


# old kind -> kind of today
KINDS: dict[str, str] = {}

# kind (of today) -> {old field: new field (dotted where it is nested now), or Removed(value)}
RETURN_CONDITIONED: dict[str, str | Removed] = {
    "batch_size": "replay.batch_size",
    "window": "replay.sequence_length",
    "hold": "fixed_command",
    "redraw": "resample_command",
    "source": "command_source",
    "top": "command_episodes",
    "distinct": "distinct_returns",
    "increment": "return_increment",
    "percentile": "command_percentile",
    "peak_every": "command_period",
    "keep": "replay.keep",
    "capacity": "replay.capacity",
    "moves": "replay.max_transitions",
    "best": "replay.best_episodes",
    "latest": "replay.latest_episodes",
    "best_share": "replay.best_fraction",
    "draw": "replay.sample_by",
    "adjust": "replay.start_state_baseline",
    "cut_penalty": Removed(0.0),
    "haste": "replay.length_penalty",
    "weigh": "weight_by",
    "ratio": "replay.updates_per_step",
    "per": "replay.update_unit",
    "warmup": "replay.warmup",
    "shift": "command_shift",
    "scale": "command_scale",
    "smoothing": "label_smoothing",
    "average": "ema_decay",
    "sharpen": "max_inverse_temperature",
    "sharpen_over": "inverse_temperature_steps",
    "lr_last": "final_lr_fraction",
    "critic_every": "critic_period",
}
UNIFORM: dict[str, str | Removed] = {
    "batch_size": "replay.batch_size",
    "capacity": "replay.capacity",
    "warmup": "replay.warmup",
    "ratio": "replay.updates_per_step",
    "window": "replay.sequence_length",
    "stored_state": "replay.stored_state",
    "period": "target_update_period",
    "memory_lr": "core_lr",
    "focus": "td_weight_exponent",
}
PRIORITIZED: dict[str, str | Removed] = {
    **{old: new for old, new in UNIFORM.items() if old != "focus"},
    "alpha": "replay.priority_exponent",
    "beta": "replay.importance_exponent",
    "priority_floor": "replay.priority_floor",
    "stride": "replay.stride",
    "eta": "replay.eta",
    "eviction": "replay.eviction",
    "rescale": "value_rescale_eps",
}
FIELDS: dict[str, dict[str, str | Removed]] = {
    "dqn": UNIFORM | {"rescale": "value_rescale_eps", "novelty": "count_epsilon"},
    "sac-discrete": UNIFORM,
    "apex": PRIORITIZED,
    "r2d2": PRIORITIZED,
    "udrl": RETURN_CONDITIONED,
    "rcp": RETURN_CONDITIONED,
    "evaluation": {"beside": "background"},
    "impala": {
        "batch_size": "replay.batch_size",
        "queue": "replay.capacity",
        "trusted": "reference_run",
        "trusted_cost": "reference_kl_cost",
    },
    "ray": {"patience": "timeout", "replay_at": "replay_placement"},
}

# kind (of today) -> {field: {old value: new value}}, for choices that were renamed
RETURN_CONDITIONED_VALUES: dict[str, dict[str, str]] = {
    "command": {"to-go": "return-to-go"},
    "command_source": {"spread": "uniform", "peak": "maximum"},
    "replay.sample_by": {"moves": "transitions"},
    "replay.update_unit": {"move": "step"},
    "weight_by": {"moves": "transitions"},
    "critic": {"own": "separate"},
}
VALUES: dict[str, dict[str, dict[str, str]]] = {
    "udrl": RETURN_CONDITIONED_VALUES,
    "rcp": RETURN_CONDITIONED_VALUES,
}

# column of metrics.csv, evaluations.csv and episodes.csv, and key of `Update.metrics`: old name -> new name. A name
# that ends in "_" stands for all names that begin with it.
METRICS: dict[str, str] = {
    "agreement": "accuracy",
    "asked": "desired_return",
    "asked_steps": "desired_horizon",
    "effective_batch": "effective_batch_size",
    "sharpest": "max_inverse_temperature",
    "games": "episodes",
    "game_frames": "episode_frames",
    "game_steps": "episode_length",
    "per_game_": "per_episode_",
    "replay_rows": "replay_steps",
    "trusted_kl": "reference_kl",
}

# key of a module's state_dict, or a dotted prefix of such keys: old name -> new name. It applies to the agent's weights
# and to the modules of the learner (target network, critic). A name that begins with "*." stands for the last part of
# a key, whatever comes before it.
WEIGHTS: dict[str, str] = {
    "*.heard_q": "R_q",
    "*.heard_k": "R_k",
    "*.heard_v": "R_v",
    "*.heard_beta": "r_beta",
    "centre": "obs_mean",
    "sharpest": "max_inverse_temperature",
    "spans": "obs_std",
}

# entry of trainer.pt, or of replay.pt under "replay", by its dotted path: old path -> new last part. Lists add nothing
# to the path.
SNAPSHOTS: dict[str, str] = {
    "filmed_at": "video_at",
    "games": "episodes",
    "interval.games": "components",
    "interval.life_parts": "life_components",
    "interval.lives": "life_returns",
    "recent": "recent_scores",
    "row_at": "logged_at",
    "runtime.actor.after": "state",
    "runtime.actor.asked": "episode_info",
    "runtime.actor.before": "state_before",
    "runtime.actor.row": "current",
    "runtime.actor.world": "env_batch",
    "runtime.learner.peak": "max_advantage",
}

# nested dataclasses that old files do not have: (kind, field) -> the kind to write there
NESTED: dict[tuple[str, str], str] = {
    ("udrl", "replay"): "episodes",
    ("rcp", "replay"): "episodes",
    ("impala", "replay"): "fifo",
    ("dqn", "replay"): "uniform",
    ("sac-discrete", "replay"): "uniform",
    ("apex", "replay"): "prioritized",
    ("r2d2", "replay"): "prioritized",
}


# flags of commands that are not settings of an experiment: old name -> new name
FLAGS: dict[str, str] = {
    "--figures": "--measurements",
    "--games": "--episodes",
    "--max-rows": "--max-steps",
    "--runs": "--repeats",
    "--trusted": "--reference",
}


def upgrade(data: dict[str, Any], where: str) -> dict[str, Any]:
    """One encoded dataclass under the names of today; `where` is its dotted name, for messages."""
    old = data.get("kind")
    if not isinstance(old, str):
        return data
    kind = KINDS.get(old, old)
    renamed = FIELDS.get(kind, {})
    values: dict[str, Any] = {"kind": kind}
    for name, value in data.items():
        if name == "kind":
            continue
        new = renamed.get(name, name)
        if isinstance(new, Removed):
            if value != new.value:
                raise UserError(f"{where}.{name}={value} is a setting of an earlier version that no longer exists")
            continue
        if isinstance(value, str):
            value = VALUES.get(kind, {}).get(new, {}).get(value, value)
        *path, last = new.split(".")
        target = values
        for part in path:
            target = target.setdefault(part, {"kind": NESTED[kind, part]})
        target[last] = value
    return values


def upgrade_metric(name: str) -> str:
    """The name of today of a column or metric."""
    for old, new in METRICS.items():
        if name == old:
            return new
        if old.endswith("_") and name.startswith(old):
            return new + name.removeprefix(old)
    return name


def upgrade_weight(key: str) -> str:
    """The name of today of a key of a state_dict."""
    for old, new in WEIGHTS.items():
        if old.startswith("*.") and key.endswith(old[1:]):
            return key.removesuffix(old[2:]) + new
        if key == old or key.startswith(f"{old}."):
            return new + key.removeprefix(old)
    return key


def upgrade_snapshot(state: Any, path: str = "") -> Any:
    """The trainer's or replay's part of a checkpoint under the names of today; `path` is where `state` lies in it."""
    if isinstance(state, list) and state and isinstance(state[0], dict):
        return [upgrade_snapshot(entry, path) for entry in state]
    if not isinstance(state, dict):
        return state
    if path == "interval.sums":
        return {upgrade_metric(name): value for name, value in state.items()}
    module = path.startswith("runtime.learner.")  # perhaps a state_dict
    upgraded: dict[Any, Any] = {}
    for key, value in state.items():
        inner = f"{path}.{key}".removeprefix(".")
        new = upgrade_weight(key) if module and isinstance(key, str) else key
        upgraded[SNAPSHOTS.get(inner, new)] = upgrade_snapshot(value, inner)
    return upgraded


def renamed_flag(flag: str, known: Collection[str]) -> str | None:
    """What to write instead of an old flag such as --algo.ratio, in a sentence; None: the flag is not an old one.

    `known` are the flags of today, which decide where several kinds of part had a setting of the same name.
    """
    if flag in known:
        return None
    if FLAGS.get(flag) in known:
        return f"{flag} is called {FLAGS[flag]} now"
    prefix, dot, last = flag.removeprefix("--").rpartition(".")
    if not dot:
        return None
    negated = last.startswith("no-") and f"--{prefix}.{last.removeprefix('no-')}" not in known
    old = (last.removeprefix("no-") if negated else last).replace("-", "_")
    entries = [fields[old] for fields in FIELDS.values() if old in fields]
    new = {f"--{prefix}.{entry}".replace("_", "-") for entry in entries if isinstance(entry, str)}
    if names := sorted(new & set(known)):
        if negated:
            names = [".no-".join(name.rsplit(".", 1)) for name in names]
        return f"{flag} is called {' or '.join(names)} now"
    return f"{flag} no longer exists" if any(isinstance(entry, Removed) for entry in entries) else None


def renamed_value(flag: str, value: str, known: Collection[str]) -> str | None:
    """What to write instead of an old choice of a setting, in a sentence; None: the value is not an old choice."""
    field = flag.partition(".")[2].replace("-", "_")
    new = {fields[field][value] for fields in VALUES.values() if value in fields.get(field, {})}
    return f"{flag} {value} is called {flag} {' or '.join(sorted(new))} now" if new and flag in known else None


def renamed_choice(family: str, choice: str, known: Collection[str]) -> str | None:
    """What to write instead of an old choice such as core:NAME, in a sentence; None: there was no such choice."""
    new = KINDS.get(choice)
    return f"it is called {family}:{new} now" if new in known else None
