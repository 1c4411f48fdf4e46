"""A Slurm batch script: Ray on every node, the command once all have joined, and all of it again after a requeue."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from bestiary.errors import UserError
from bestiary.launch.job import Job, at_least, fill, job, match

WARNING = 120  # seconds before the time limit; time to save


@dataclass(frozen=True)
class Slurm:
    """Write a Slurm batch script to hand to sbatch."""

    nodes: int = 1
    cpus: int = 8
    """cores of each node that Ray may use"""
    gpus: int = 0
    """of each node"""
    memory: str | None = None
    """of each node, such as 64G; None: all of it, or with --no-exclusive what Slurm gives"""
    time: str = "24:00:00"
    """limit, as HH:MM:SS or D-HH:MM:SS; a job that is not done by then saves and queues again"""
    name: str | None = None
    """of the job; None: the preset's"""
    partition: str | None = None
    account: str | None = None
    output: str = "%x-%j.out"
    """file for what is printed; Slurm puts the job's name for %x and its number for %j"""
    exclusive: bool = True
    """no other job on these nodes: a second Ray on a node is refused, and stopping one stops both"""
    shared: str = "runs"
    """a directory that all nodes see: the token lies here while the job runs, and runs without --run go here"""
    port: int = 6379
    """of Ray's head on the first node"""
    setup: str = ""
    """a line of shell to begin with, such as "source .venv/bin/activate" """
    out: Path | None = None
    """file to write; None: standard output"""


def script(cfg: Slurm, words: list[str]) -> str:
    """The batch script that runs `bestiary WORDS` on a Ray cluster of the job's nodes."""
    task = job(words, cfg.name, cfg.shared)
    check(cfg, task)
    return fill(
        TEMPLATE,
        DIRECTIVES="\n".join(f"#SBATCH --{line}" for line in directives(cfg, task)),
        NOTES="".join(f"# {note}\n" for note in task.notes),
        SETUP=f"{cfg.setup}\n" if cfg.setup else "",
        COMMAND=shlex.join(task.words),
        SHARED=shlex.quote(cfg.shared),
        NAME=task.name,
        PORT=str(cfg.port),
    )


def check(cfg: Slurm, task: Job) -> None:
    at_least(1, nodes=cfg.nodes, cpus=cfg.cpus)
    at_least(0, gpus=cfg.gpus)
    plain = "use letters, digits, dots, dashes and underscores"
    match(r"[A-Za-z0-9][\w.-]*", plain, name=task.name, partition=cfg.partition, account=cfg.account)
    match(r"[1-9]\d*[KMGT]?", "write it like 64G", memory=cfg.memory)
    match(r"[\w./%+=@-]+", "a path without spaces", output=cfg.output)
    match(r"[^\n]+", "a directory that all nodes see", shared=cfg.shared)
    match(r"[^\n]*", "it is one line of shell", setup=cfg.setup)
    if not 1024 <= cfg.port <= 65535:
        raise UserError(f"port={cfg.port} must be from 1024 to 65535")
    parts = re.fullmatch(r"(?:(\d+)-)?(\d{1,3}):([0-5]\d):([0-5]\d)", cfg.time)
    if parts is None:
        raise UserError(f"time={cfg.time!r} is not a time: write it like 24:00:00, or 2-12:00:00 for days")
    days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
    if ((days * 24 + hours) * 60 + minutes) * 60 + seconds <= 2 * WARNING:
        raise UserError(f"time={cfg.time} is too short: the last {WARNING} seconds of a job are for saving")


def directives(cfg: Slurm, task: Job) -> list[str]:
    memory = cfg.memory or ("0" if cfg.exclusive else None)
    said = {
        "job-name": task.name,
        "nodes": cfg.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": cfg.cpus,
        "gpus-per-node": cfg.gpus or None,
        "mem": memory,
        "time": cfg.time,
        "partition": cfg.partition,
        "account": cfg.account,
        "output": cfg.output,
        "open-mode": "append",  # a job that is queued again goes on writing
        "signal": f"B:USR1@{WARNING}",
    }
    flags = ["requeue", *(["exclusive"] if cfg.exclusive else [])]
    return [f"{key}={value}" for key, value in said.items() if value is not None] + flags


# Who gets which signal is the point of this script. srun answers SIGTERM by killing its tasks outright, and `ray
# symmetric-run` by killing what it runs; so the warning goes to the program itself, which is on this node (the batch
# script runs on the first one) and whose number is in a file. It saves and ends with 143, then Ray is stopped. How it
# ended is in a file too, because srun's own answer may be that of a node that was slow to stop.
TEMPLATE = r"""#!/bin/bash
@DIRECTIVES@

# Hand it in with sbatch; what sbatch is told on its command line counts more than the lines above.
# Handed in again, or queued again by Slurm, it goes on where the run stood.
@NOTES@@SETUP@set -euo pipefail

command=(@COMMAND@)
port=@PORT@

mkdir -p @SHARED@
state=$(cd @SHARED@ && pwd)/.@NAME@-$SLURM_JOB_ID
clean() { rm -f "$state".{token,pid,status}; }
clean
trap clean EXIT

# Who wants to talk to this cluster needs the token. It is new for every start, and only you can read it.
(umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$state.token")
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$state.token
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=600 # seconds until all nodes must have joined
unset RAY_ADDRESS RAY_AUTH_TOKEN

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts[0]:?scontrol names no hosts}
if [ "$SLURM_JOB_NUM_NODES" -eq 1 ]; then
    head=127.0.0.1 # nothing listens beyond a single node
fi

step='' warned='' cancelled=''
stop() {
    if [ -s "$state.pid" ]; then
        kill -TERM "$(<"$state.pid")" 2>/dev/null || true # it saves; srun and ray would not let it
    elif [ -n "$step" ]; then
        kill -TERM "$step" 2>/dev/null || true # nothing to save yet
    else
        exit 143
    fi
}
trap 'warned=yes; stop' USR1        # the time is nearly up
trap 'cancelled=yes; stop' TERM INT # scancel

# On every node: only a head may be told about the dashboard, which is off.
node='[ "$SLURM_NODEID" -ne 0 ] || off=--include-dashboard=false; exec ray symmetric-run ${off-} "$@"'
# On the head, once all nodes have joined.
driver='(echo $BASHPID >"$0.pid"; exec "$@") & wait $!; status=$?; echo $status >"$0.status"; exit $status'
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
    --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 --wait=60 \
    bash -c "$node" node --address "$head:$port" --min-nodes "$SLURM_JOB_NUM_NODES" \
    --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="${SLURM_GPUS_ON_NODE:-0}" --disable-usage-stats \
    -- bash -c "$driver" "$state" "${command[@]}" &
step=$!
while kill -0 "$step" 2>/dev/null; do
    wait "$step" || true # a signal ends the waiting, not the step
done
status=1 # the command never began: symmetric-run ends with 0 where Ray does not start
wait "$step" || status=$?
if [ -s "$state.status" ]; then
    status=$(<"$state.status")
fi
trap '' USR1 TERM INT
clean

# Stopped before it was done: queue again. A job that was cancelled or has failed does not.
preempted() { scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; }
if [ "$status" -ne 0 ] && [ -z "$cancelled" ] && { [ -n "$warned" ] || [ "$status" -eq 143 ] || preempted; }; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""
