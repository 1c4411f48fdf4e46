"""One program with a few commands. Nothing heavy is imported before it is needed."""

import errno
import os
import sys
from collections.abc import Callable

from bestiary.config.suggestions import did_you_mean
from bestiary.errors import EX_TEMPFAIL, ProcessLost, UserError

HELP = """\
Reinforcement learning with memory: every algorithm, every memory, every environment.

usage: bestiary COMMAND ...

  train PRESET [part:choice ...] [--flags]   train, or continue if the run directory has a checkpoint; --seeds N: many
  resume RUN                                 continue a run from its last checkpoint
  eval RUN                                   play whole games on fresh seeds; statistics as a table and as JSON
  video RUN                                  film whole games on fresh seeds, as MP4
  sweep PRESET --space SPACE                 search for good settings: trials of several seeds, side by side
  reproduce FIGURE                           a published figure: plan its runs, make what is missing, draw
  inspect RUN                                play an episode and draw what memory holds over time
  study riverraid --proxy P,P --width N,N    reward hacking: sizes x rewards x seeds, judged under all, one page
  detect --trusted RUN RUN ...               which runs stray from a trusted one, and how well that finds reward hacking
  launch slurm|k8s -- train ...              a Slurm script or a Kubernetes manifest that runs a command on a cluster
  plot RUN ...                               learning curves of one or many runs, as PNG, SVG and CSV
  list [WHAT]                                presets, algos, cores, envs, runtimes, games
  bench NAME                                 measure speed on this machine
  doctor [core NAME|FILE.py:Class]           versions, device, extras; or whether a memory keeps its contract
  ... --plugin FILE.py                       with any command: make the parts that file registers available

examples:
  bestiary train recall                      IMPALA + LSTM on a memory task, two minutes
  bestiary train recall core:ff              the same without memory: stays at chance
  bestiary train pong --env.game Breakout --frames 10M
  bestiary eval runs/latest --episodes 100

`bestiary COMMAND --help` explains a command; `bestiary train PRESET --help` lists every setting.
"""


def main(argv: list[str] | None = None) -> int:
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if args[0] in ("-V", "--version"):
        from importlib.metadata import version

        print(f"bestiary {version('bestiary')}")
        return 0
    command = COMMANDS.get(args[0])
    if command is None:
        return fail(f"there is no command {args[0]!r}: {did_you_mean(args[0], COMMANDS)}")
    try:
        rest = args[1:]
        ours = rest[: rest.index("--")] if "--" in rest else rest  # what follows is for a command run elsewhere
        if any(word.split("=")[0] == "--plugin" for word in ours):
            from bestiary.config.plugins import load_plugin_flags

            rest = load_plugin_flags(ours) + rest[len(ours) :]
        return command(rest)
    except UserError as e:  # what a user can mend, in one sentence; anything else keeps its traceback
        return fail(str(e))
    except ProcessLost as e:
        fail(str(e))
        return EX_TEMPFAIL
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who read our output has seen enough: `bestiary list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again as it exits
        return 141
    except OSError as e:
        if e.errno != errno.ENOSPC:
            raise
        return fail(f"the disk is full ({e.filename or 'while writing'}); what was saved before is intact")


def fail(sentence: str) -> int:
    print(f"bestiary: {sentence}", file=sys.stderr)
    return 2


def _command(module: str) -> Callable[[list[str]], int]:
    def call(args: list[str]) -> int:
        from importlib import import_module

        return import_module(f"bestiary.cli.commands.{module}").main(args)

    return call


COMMANDS = {
    name: _command(name)
    for name in (
        "train",
        "resume",
        "eval",
        "video",
        "sweep",
        "reproduce",
        "inspect",
        "study",
        "detect",
        "launch",
        "plot",
        "list",
        "bench",
        "doctor",
    )
}
