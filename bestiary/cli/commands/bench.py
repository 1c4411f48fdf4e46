"""bestiary bench NAME: measure speed on this machine."""

import json
from importlib import import_module
from pathlib import Path

from bestiary.bench import BENCHMARKS
from bestiary.cli.parse import parse
from bestiary.config.suggestions import did_you_mean
from bestiary.errors import UserError


def main(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print("usage: bestiary bench NAME [--flags] [--json FILE]\n")
        print("\n".join(f"  {name:14} {text}" for name, (_, text) in BENCHMARKS.items()))
        return 0 if args else 2
    name, rest = args[0], args[1:]
    if name not in BENCHMARKS:
        raise UserError(f"there is no benchmark {name!r}: {did_you_mean(name, BENCHMARKS)}")
    out = None
    if "--json" in rest:
        at = rest.index("--json")
        if at + 1 == len(rest):
            raise UserError("--json needs a file name after it")
        out = Path(rest[at + 1])
        rest = rest[:at] + rest[at + 2 :]
    place, _, settings = BENCHMARKS[name][0].partition(":")
    module = import_module(f"bestiary.bench.{place}")
    results = module.main(parse(getattr(module, settings), rest, f"bestiary bench {name}"))
    if out is not None:
        out.write_text(json.dumps(results, indent=2) + "\n")
    return 0
