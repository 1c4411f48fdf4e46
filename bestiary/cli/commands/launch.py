"""bestiary launch slurm|k8s -- train ...: write a Slurm batch script or a Kubernetes manifest for a command."""

import dataclasses
from collections.abc import Callable
from typing import Any

import tyro

from bestiary.config.suggestions import did_you_mean
from bestiary.errors import UserError
from bestiary.launch import K8s, Slurm, manifest, script

USAGE = """\
usage: bestiary launch slurm|k8s [--flags] -- train PRESET runtime:ray --runtime.actors 16 ...

Writes the job file with which a cluster runs the command after the two dashes (train, sweep or study). It contacts no
cluster.

  bestiary launch slurm --nodes 4 --cpus 16 --out job.sh -- train pong runtime:ray --runtime.actors 60
  sbatch job.sh                              a Ray cluster on four nodes; saves, is requeued and resumes

  bestiary launch k8s --image IMAGE --claim CLAIM --workers 4 --out job.yaml -- train pong runtime:ray
  kubectl apply -f job.yaml                  a RayJob on a cluster that has KubeRay

`bestiary launch slurm --help` and `bestiary launch k8s --help` list the flags."""

KINDS: dict[str, tuple[type, Callable[[Any, list[str]], str]]] = {"slurm": (Slurm, script), "k8s": (K8s, manifest)}


def main(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if args else 2
    if args[0] not in KINDS:
        raise UserError(f"there is no cluster {args[0]!r}: {did_you_mean(args[0], KINDS)}")
    cls, write = KINDS[args[0]]
    at = args.index("--") if "--" in args else len(args)
    cfg = read(cls, args[1:at], f"bestiary launch {args[0]}")
    if at == len(args):
        raise UserError("two dashes are missing before the command: write it as -- train PRESET runtime:ray")
    text = write(cfg, args[at + 1 :])
    if cfg.out is None:
        print(text, end="")
        return 0
    try:
        cfg.out.write_text(text)
    except OSError as e:
        raise UserError(f"--out {cfg.out} cannot be written: {e.strerror}") from e
    print(f"written to {cfg.out}: submit it with {'sbatch' if cls is Slurm else 'kubectl apply -f'} {cfg.out}")
    return 0


def read(cls: type, args: list[str], prog: str) -> Any:
    """Like `cli.parse.parse`, which imports PyTorch; this must not."""
    cfg, unknown = tyro.cli(cls, prog=prog, args=args, return_unknown_args=True)
    if unknown:
        flags = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(cls)]
        hint = did_you_mean(unknown[0].split("=")[0], flags, f"see `{prog} --help`")
        if unknown[0].startswith("-"):
            raise UserError(f"there is no flag {unknown[0]}: {hint}")
        raise UserError(f"what is {unknown[0]!r}? the command comes after two dashes: -- train PRESET runtime:ray")
    return cfg
