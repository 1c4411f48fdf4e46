"""Settings are frozen dataclasses: their names, their JSON, and the texts that users type for numbers."""

import dataclasses
import re
import types
import typing
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, TypeVar

import tyro

from bestiary.config.aliases import upgrade
from bestiary.errors import UserError

T = TypeVar("T")


def advanced(default: T) -> T:
    """A default of a setting that few users change: `--help` lists it apart, after the others."""
    return dataclasses.field(default=default, metadata={"advanced": True})


def kebab(cls: type) -> str:
    """The name of a class on the command line: DeltaNet -> delta-net, R2d2 -> r2d2."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", cls.__name__).lower()


def members(hint: Any) -> tuple[type, ...]:
    """The dataclasses of a union, or the dataclass itself; empty for other types."""
    hint = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(cls for arg in typing.get_args(hint) for cls in members(arg))
    return (hint,) if isinstance(hint, type) and dataclasses.is_dataclass(hint) else ()


def parse_count(text: str) -> int:
    """A whole number as people write it: 200, 50M, 1.5k, 1e6."""
    match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][0-9]{1,2})?)([kKmMbBgG]?)", text.strip())
    if match:
        scale = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}[match[2].lower()]
        value = Decimal(match[1].replace("_", "")) * scale
        if value == value.to_integral_value():
            return int(value)
    raise UserError(f"{text!r} is not a whole number; write it like 1000000, 1M or 1e6")


def parse_counts(text: str) -> tuple[int, ...]:
    return tuple(parse_count(part) for part in text.split(",") if part.strip())


Count = Annotated[
    int,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="N",
        instance_from_str=lambda args: parse_count(args[0]),
        is_instance=lambda x: isinstance(x, int),
        str_from_instance=lambda x: [str(x)],
    ),
]


def parse_numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UserError(f"{text!r} is not a list of numbers; write it like 200,300") from None


def parse_command(text: str) -> tuple[float, ...]:
    """A command such as 200,300 (desired return and horizon); `own` is (): the agent's own command distribution."""
    if text == "own":
        return ()
    numbers = parse_numbers(text)
    if not numbers:
        raise UserError("a command cannot be empty: write it like 200,300, or own for the agent's own commands")
    return numbers


def _listed(metavar: str, parse: Callable[[str], tuple[Any, ...]], empty: str = "") -> Any:
    """A tuple as one word with commas; `empty` is the word for the empty tuple."""
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda args: parse(args[0]),
        is_instance=lambda x: isinstance(x, tuple),
        str_from_instance=lambda x: [",".join(map(str, x)) or empty],
    )


Counts = Annotated[tuple[int, ...], _listed("N,N,..", parse_counts)]
Numbers = Annotated[tuple[float, ...], _listed("X,X,..", parse_numbers)]
Command = Annotated[tuple[float, ...], _listed("X,X,..|own", parse_command, "own")]
OptionalCommand = Annotated[  # one parser for all, since tyro explains a union's errors with its internals
    tuple[float, ...] | None,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="X,X,..|own|None",
        instance_from_str=lambda args: None if args[0] == "None" else parse_command(args[0]),
        is_instance=lambda x: x is None or isinstance(x, tuple),
        str_from_instance=lambda x: ["None" if x is None else ",".join(map(str, x)) or "own"],
    ),
]


def encode(value: Any) -> Any:
    """Settings as plain JSON; every dataclass is an object with its kind."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": kebab(type(value)), **fields}
    if isinstance(value, list | tuple):
        return [encode(v) for v in value]
    if isinstance(value, dict):
        return {k: encode(v) for k, v in value.items()}
    return value


def fits(hint: Any, value: Any) -> bool:
    """Whether a plain value (number, text, None, or a tuple or dict of them) has the declared type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return fits(args[0], value)
    if origin in (typing.Union, types.UnionType):
        return any(fits(arg, value) for arg in args)
    if origin is typing.Literal:
        return value in args
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(args[0], v) for v in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(args[1], v) for v in value.values())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return value is None if hint in (None, type(None)) else isinstance(hint, type) and isinstance(value, hint)


def decode(hint: Any, data: Any, where: str = "experiment") -> Any:
    """The inverse of `encode`, by the declared type. An error names the value that does not fit."""
    known = members(hint)
    if not known or (data is None and fits(hint, None)):
        value = tuple(data) if isinstance(data, list) else data
        if not fits(hint, value):
            raise UserError(f"{where} cannot be {value!r}")
        return value
    if not isinstance(data, dict):
        raise UserError(f"{where} should be an object with a kind, not {data!r}")
    data = upgrade(data, where)
    by_name = {kebab(cls): cls for cls in known}
    cls = by_name.get(data.get("kind", ""))
    if cls is None:
        known = f"known: {', '.join(by_name)}; one of your own needs --plugin FILE.py"
        raise UserError(f"{where} is of unknown kind {data.get('kind')!r}; {known}")
    hints = typing.get_type_hints(cls, include_extras=True)
    values = {k: v for k, v in data.items() if k != "kind"}
    if unknown := values.keys() - hints.keys():
        raise UserError(f"{where} has unknown fields: {', '.join(sorted(unknown))}")
    return cls(**{k: decode(hints[k], v, f"{where}.{k}") for k, v in values.items()})


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Dotted names of the settings in which two encoded settings differ, with both values."""
    if isinstance(a, dict) and isinstance(b, dict) and a.get("kind") == b.get("kind"):
        keys = [k for k in {**a, **b} if k != "kind"]
        return [d for k in keys for d in differences(a.get(k), b.get(k), f"{where}.{k}" if where else k)]
    if a == b:
        return []

    def show(x: Any) -> Any:
        return x["kind"] if isinstance(x, dict) and "kind" in x else x

    return [f"{where}: {show(a)} -> {show(b)}"]
