"""The command line program. A command is imported when it is called, so that `bestiary --help` answers at once."""

import errno
import os
import sys
from collections.abc import Callable

from bestiary.config.suggestions import did_you_mean
from bestiary.errors import EX_TEMPFAIL, ProcessLost, UserError

HELP = """\
Reinforcement learning with memory: combine any algorithm, memory core and environment.

usage: bestiary COMMAND ...

  train PRESET [part:choice ...] [--flags]   train a run, or resume it from its last checkpoint; --seeds N: several runs
  resume RUN                                 resume a run from its last checkpoint
  eval RUN                                   evaluate on seeds not used in training; statistics as a table and as JSON
  video RUN                                  record episodes on seeds not used in training, as MP4
  sweep PRESET --space SPACE                 hyper-parameter search with Optuna, in parallel, several seeds per trial
  reproduce FIGURE                           reproduce a published figure: train the missing runs, then plot
  inspect RUN                                plot the memory of an agent over the steps of an episode
  study riverraid --proxy P,P --width N,N    reward hacking: train on proxy rewards, evaluate by the true one, report
  detect --reference RUN RUN ...             detect policies that deviate from a reference policy; AUROC per detector
  launch slurm|k8s -- train ...              write a Slurm script or a Kubernetes manifest for a command
  plot RUN ...                               learning curves of one or more runs, as PNG, SVG and CSV
  list [WHAT]                                presets, algos, cores, envs, runtimes, games
  bench NAME                                 measure speed on this machine
  doctor [core NAME|FILE.py:Class]           versions, hardware and extras; or test a memory core against its contract
  ... --plugin FILE.py                       with any command: load parts that a Python file registers

examples:
  bestiary train recall                      IMPALA + LSTM on a memory task, two minutes
  bestiary train recall core:ff              the same task without memory: the score stays at chance
  bestiary train pong --env.game Breakout --frames 10M
  bestiary eval runs/latest --episodes 100

`bestiary COMMAND --help` explains a command; `bestiary train PRESET --help` lists all settings of a preset.
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
        own = rest[: rest.index("--")] if "--" in rest else rest  # the rest belongs to the command that is launched
        if any(word.split("=")[0] == "--plugin" for word in own):
            from bestiary.config.plugins import load_plugin_flags

            rest = load_plugin_flags(own) + rest[len(own) :]
        return command(rest)
    except UserError as e:  # a mistake of the user: one sentence; any other error keeps its traceback
        return fail(str(e))
    except ProcessLost as e:
        fail(str(e))
        return EX_TEMPFAIL
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has closed it: `bestiary list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python prints another error as it exits
        return 141
    except OSError as e:
        if e.errno != errno.ENOSPC:
            raise
        return fail(f"the disk is full ({e.filename or 'while writing'}); earlier checkpoints are intact")


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
