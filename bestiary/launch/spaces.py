"""Search spaces of sweeps: hyper-parameters by their dotted names, each with a range or with choices."""

import dataclasses
import itertools
import json
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from tyro.constructors import PrimitiveConstructorSpec

from bestiary.config.aliases import renamed_flag
from bestiary.config.experiment import Experiment
from bestiary.config.schema import decode, encode, fits, kebab, members
from bestiary.config.suggestions import did_you_mean
from bestiary.errors import UserError

SCALES = (0.01, 0.015, 0.02, 0.025, 0.03)
BUILTIN: dict[str, dict[str, Any]] = {
    "lr": {"algo.optimizer.lr": {"low": 1e-5, "high": 1e-2, "log": True}},
    "udrl": {  # the space of Srivastava et al. 2019, who sampled 256 points at random
        "algo.head": {"choices": [[n, *m] for n in (32, 64) for m in ([], [n], [2 * n], [2 * n] * 2, [2 * n] * 3)]},
        "algo.replay.batch_size": {"choices": [512, 768, 1024, 1536, 2048]},
        "algo.command_scale": {"choices": [[of_return, of_horizon] for of_return in SCALES for of_horizon in SCALES]},
        "algo.command_episodes": {"choices": [25, 50, 75, 100]},
        "algo.optimizer.lr": {"low": 1e-4, "high": 1e-2, "log": True},
        "algo.replay.update_unit": {"choices": ["episode"]},
        # updates per iteration / episodes per iteration: here updates follow every unroll, so only the ratio remains
        "algo.replay.updates_per_step": {
            "choices": sorted({n / m for n in range(100, 301, 50) for m in (10, 20, 30, 40)})
        },
        "algo.replay.warmup": {"choices": [10, 30, 50]},
        "algo.replay.capacity": {"choices": [300, 400, 500, 600, 700]},
    },
}
BUILTIN["udrl-repo"] = {  # the space of the published code: the same, with fewer choices, and the kind of command
    **{name: entry for name, entry in BUILTIN["udrl"].items() if name != "algo.replay.warmup"},
    "algo.command_episodes": {"choices": [25, 75]},
    "algo.command": {"choices": ["return-to-go", "return"]},
}
SEE_HELP = "`bestiary train PRESET --help` lists them"
KEYS = ("low", "high", "log", "step", "choices")


class Range(NamedTuple):
    low: float
    high: float
    log: bool = False  # sampled on a logarithmic scale
    step: float | None = None
    whole: bool = False  # integers only

    def samples(self) -> tuple[Any, ...]:
        """Values with which the whole range is checked."""
        return (self.low, self.high)


class Choices(NamedTuple):
    values: tuple[Any, ...]

    def samples(self) -> tuple[Any, ...]:
        return self.values


Space = dict[str, Range | Choices]


def load_space(which: str, experiment: Experiment) -> Space:
    """A builtin space by its name, or the space in a TOML or JSON file."""
    if which in BUILTIN:
        return read_space(BUILTIN[which], experiment)
    path = Path(which)
    if path.suffix not in (".toml", ".json"):
        raise UserError(f"there is no space {which!r}: {did_you_mean(which, BUILTIN)}, or name a .toml or .json file")
    try:
        text = path.read_text()
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except (ValueError, OSError) as e:
        raise UserError(f"{path} cannot be read: {e}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} should be a table of settings, each with low and high or with choices")
    return read_space(data, experiment)


def read_space(data: Mapping[str, Any], experiment: Experiment) -> Space:
    """Check a space against an experiment: every setting exists, and every value is valid."""
    entries = dict(_flat(data))
    if not entries:
        raise UserError("the space is empty: give at least one setting, such as algo.optimizer.lr")
    if "seed" in entries:
        raise UserError("the seed is no hyper-parameter: every trial has the same seeds, as many as --seeds-per-trial")
    if protocol := [name for name in entries if name.startswith("evaluation.")]:
        raise UserError(f"{protocol[0]} is no hyper-parameter: all trials need the same evaluation protocol")
    known = settings(experiment)
    parts = {
        name: _read(name, entries[name], known[name]) for name in entries if name in known and members(known[name])
    }
    space: Space = {}
    for name, entry in entries.items():
        for values in itertools.product(*(part.samples() for part in parts.values())):
            chosen = dict(zip(parts, values, strict=True))
            known = settings(apply(experiment, chosen))
            if name not in known:
                given = "".join(
                    f" with {part}={value}" for part, value in chosen.items() if name.startswith(f"{part}.")
                )
                hint = renamed_setting(name, known) or did_you_mean(name, known, SEE_HELP)
                raise UserError(f"there is no setting {name}{given}: {hint}")
        space[name] = _read(name, entry, known[name])
    _try_out(space, experiment)
    return space


def renamed_setting(name: str, known: Mapping[str, Any]) -> str | None:
    """What a setting of an earlier version is called now, in a sentence; None: it is not one."""
    sentence = renamed_flag(f"--{name}".replace("_", "-"), {f"--{one}".replace("_", "-") for one in known})
    return sentence and sentence.replace("--", "")


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names with underscores, from nested tables, dotted names and names with dashes."""
    for key, value in data.items():
        name = prefix + key.replace("-", "_")
        if isinstance(value, dict) and value and all(isinstance(inner, dict) for inner in value.values()):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def settings(part: Any, prefix: str = "") -> dict[str, Any]:
    """The declared type of every setting of an experiment's parts, by its dotted name."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(type(part), include_extras=True).items():
        if name not in {f.name for f in dataclasses.fields(part)}:
            continue
        value, dotted = getattr(part, name), prefix + name
        if not dataclasses.is_dataclass(value) or len(members(hint)) > 1:
            found[dotted] = hint
        if dataclasses.is_dataclass(value):
            found |= settings(value, f"{dotted}.")
    return found


def apply(experiment: Experiment, values: Mapping[str, Any]) -> Experiment:
    """The experiment with changed settings. A part is given by its kind; a new part has the defaults of its kind."""
    data = encode(experiment)
    try:
        for name in sorted(values, key=lambda name: name.count(".")):  # a part before the settings within it
            *path, last = name.split(".")
            target, cls = data, Experiment
            for step in path:
                cls = _kinds(cls, step)[target[step]["kind"]]
                target = target[step]
            new, old = encode(values[name]), target[last]
            if isinstance(old, dict) and old["kind"] != new:
                target[last] = encode(_kinds(cls, last)[new]())
            elif not isinstance(old, dict):
                target[last] = new
        return decode(Experiment, data)
    except TypeError as e:  # a part that has settings without a default
        raise UserError(f"{', '.join(f'{k}={v}' for k, v in values.items())}: {e}") from None


def _kinds(cls: type, name: str) -> dict[str, type]:
    return {kebab(kind): kind for kind in members(typing.get_type_hints(cls, include_extras=True)[name])}


def flags(experiment: Experiment, values: Mapping[str, Any]) -> list[str]:
    """The same settings as arguments of the command line."""
    known, words = settings(apply(experiment, values)), []
    for name, value in sorted(values.items(), key=lambda item: item[0].count(".")):
        head, _, last = name.rpartition(".")
        dotted = name.replace("_", "-")
        if members(known[name]) and isinstance(value, str):
            words.append(f"{dotted}:{value}")
        elif isinstance(value, bool):
            words.append(f"--{dotted}" if value else f"--{head}.no-{last.replace('_', '-')}")
        elif isinstance(value, tuple) and _constructor(known[name]) is not None:
            words += [f"--{dotted}", ",".join(map(str, value))]
        else:
            words += [f"--{dotted}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def as_text(value: Any) -> str:
    """A value as a cell of a table."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


# -- one entry --------------------------------------------------------------------------------------------


def _read(name: str, entry: Any, hint: Any) -> Range | Choices:
    if not isinstance(entry, dict) or not entry:
        raise UserError(f"{name} should have low and high, or choices, not {entry!r}")
    for word in entry:
        if word not in KEYS:
            raise UserError(f"{name} has {word!r}: {did_you_mean(word, KEYS)}")
    if "choices" in entry:
        if len(entry) > 1:
            raise UserError(f"{name} has choices: {next(w for w in entry if w != 'choices')} cannot be used with them")
        values = entry["choices"]
        if not isinstance(values, list | tuple) or not values:
            raise UserError(f"{name}: choices={values!r} should be a list of at least one value")
        chosen = tuple(_value(name, hint, value) for value in values)
        if twice := [value for value in chosen if chosen.count(value) > 1]:
            raise UserError(f"{name}: the choice {twice[0]!r} is given twice")
        return Choices(chosen)
    if missing := [word for word in ("low", "high") if word not in entry]:
        raise UserError(f"{name} has no {missing[0]}: give low and high, or choices")
    kind = _number(hint)
    if kind is None:
        raise UserError(f"{name} is not a number: give choices instead of low and high")
    low, high = (_value(name, hint, entry[word], word) for word in ("low", "high"))
    step = None if entry.get("step") is None else _value(name, hint, entry["step"], "step")
    log = entry.get("log", False)
    if low is None or high is None or not low < high:
        raise UserError(f"{name}: low={low} must be below high={high}")
    if not isinstance(log, bool):
        raise UserError(f"{name}: log={log!r} must be true or false")
    if log and low <= 0:
        raise UserError(f"{name}: low={low} must be positive where log is true")
    if step is not None and (log or not 0 < step <= high - low):
        raise UserError(f"{name}: step={step} must lie between 0 and {high - low}, and cannot be combined with log")
    return Range(low, high, log, step, kind is int)


def _value(name: str, hint: Any, value: Any, word: str = "") -> Any:
    """A value as the experiment has it. Text is read as the command line reads it."""
    what = f"{name}: {word}={value!r}" if word else f"{name}={value!r}"
    if parts := members(hint):
        kinds = [kebab(cls) for cls in parts]
        if value not in kinds:
            raise UserError(f"there is no {name} {value!r}: {did_you_mean(str(value), kinds)}")
        return value
    if isinstance(value, str) and not fits(hint, value):
        try:
            value = _from_text(hint, value)
        except UserError as e:
            raise UserError(f"{what}: {e}") from None
    if isinstance(value, list):
        value = tuple(value)
    if _number(hint) is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if _number(hint) is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not fits(hint, value):
        raise UserError(f"{what} is not {_wanted(hint)}")
    return value


def _options(hint: Any) -> tuple[Any, ...]:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return tuple(option for arg in typing.get_args(hint) for option in _options(arg)) if union else (hint,)


def _bare(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint


def _number(hint: Any) -> type | None:
    """int or float, if the setting is a number, or a number or None."""
    kinds = {_bare(option) for option in _options(hint)} - {type(None)}
    return kinds.pop() if len(kinds) == 1 and kinds <= {int, float} else None


def _constructor(hint: Any) -> PrimitiveConstructorSpec[Any] | None:
    """How the command line reads texts such as 1M or 64,64; None: as Python does."""
    for option in _options(hint):
        for note in getattr(option, "__metadata__", ()):
            if isinstance(note, PrimitiveConstructorSpec):
                return note
    return None


def _from_text(hint: Any, text: str) -> Any:
    kinds = [_bare(option) for option in _options(hint)]
    if text in ("None", "none") and type(None) in kinds:
        return None
    if (special := _constructor(hint)) is not None:
        return special.instance_from_str([text])
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in kinds:
        try:
            if kind in (int, float):
                return kind(text)
            if typing.get_origin(kind) is tuple:
                return tuple(_from_text(typing.get_args(kind)[0], part) for part in text.split())
        except ValueError:
            continue
    return text


def _wanted(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "None"}
    return " or ".join(
        f"one of {', '.join(map(str, typing.get_args(kind)))}"
        if typing.get_origin(kind) is typing.Literal
        else names.get(kind, "a list of numbers")
        for kind in map(_bare, _options(hint))
    )


def _try_out(space: Space, experiment: Experiment) -> None:
    """Refuse a value that no experiment accepts, alone or with the first value of every other setting."""
    firsts = {name: entry.samples()[0] for name, entry in space.items()}
    parts = {name: value for name, value in firsts.items() if isinstance(value, str)}
    for name, entry in space.items():
        for value in entry.samples():
            refusals = []
            for others in (parts, firsts):
                try:
                    apply(experiment, {**others, name: value})
                    break
                except UserError as e:
                    refusals.append(str(e))
            else:
                raise UserError(f"the space has an invalid value, {name}={value!r}: {refusals[0]}")
