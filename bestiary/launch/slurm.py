"""A Slurm batch script: it starts Ray on every node, then the command on the first, and resumes after a requeue."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from bestiary.errors import UserError
from bestiary.launch.job import ClusterJob, at_least, cluster_job, fill, match

WARNING_SECONDS = 120  # time before the limit at which Slurm signals the job, so that it can save a checkpoint


@dataclass(frozen=True)
class Slurm:
    """Write a batch script for `sbatch`."""

    nodes: int = 1
    """number of nodes"""
    cpus: int = 8
    """CPU cores of each node that Ray uses (cpus-per-task)"""
    gpus: int = 0
    """GPUs of each node (gpus-per-node)"""
    memory: str | None = None
    """memory of each node, such as 64G; None: all of it, or with --no-exclusive Slurm's default"""
    time: str = "24:00:00"
    """time limit, as HH:MM:SS or D-HH:MM:SS; a job that has not finished by then saves a checkpoint and is requeued"""
    name: str | None = None
    """name of the job; None: the name of the preset"""
    partition: str | None = None
    """Slurm partition; None: Slurm's default"""
    account: str | None = None
    """Slurm account that is charged; None: Slurm's default"""
    output: str = "%x-%j.out"
    """file for standard output and error; Slurm replaces %x by the job's name and %j by its id"""
    exclusive: bool = True
    """keep other jobs off the nodes: a node can run one Ray only, and stopping it would stop that of another job too"""
    shared: str = "runs"
    """directory that all nodes share: it holds Ray's token while the job runs, and run directories without --run"""
    port: int = 6379
    """port of Ray's head on the first node"""
    setup: str = ""
    """shell command that the script runs first, such as "source .venv/bin/activate" """
    out: Path | None = None
    """file to write; None: standard output"""


def script(cfg: Slurm, words: list[str]) -> str:
    """The batch script that runs `bestiary WORDS` on a Ray cluster of the job's nodes."""
    job = cluster_job(words, cfg.name, cfg.shared)
    check(cfg, job)
    return fill(
        TEMPLATE,
        DIRECTIVES="\n".join(f"#SBATCH --{line}" for line in directives(cfg, job)),
        NOTES="".join(f"# {note}\n" for note in job.notes),
        SETUP=f"{cfg.setup}\n" if cfg.setup else "",
        COMMAND=shlex.join(job.command),
        SHARED=shlex.quote(cfg.shared),
        NAME=job.name,
        PORT=str(cfg.port),
    )


def check(cfg: Slurm, job: ClusterJob) -> None:
    at_least(1, nodes=cfg.nodes, cpus=cfg.cpus)
    at_least(0, gpus=cfg.gpus)
    plain = "use letters, digits, dots, dashes and underscores"
    match(r"[A-Za-z0-9][\w.-]*", plain, name=job.name, partition=cfg.partition, account=cfg.account)
    match(r"[1-9]\d*[KMGT]?", "write it as 64G", memory=cfg.memory)
    match(r"[\w./%+=@-]+", "it must be a path without spaces", output=cfg.output)
    match(r"[^\n]+", "it must be a directory that all nodes share", shared=cfg.shared)
    match(r"[^\n]*", "it must be one line of shell", setup=cfg.setup)
    if not 1024 <= cfg.port <= 65535:
        raise UserError(f"port={cfg.port} must be from 1024 to 65535")
    parts = re.fullmatch(r"(?:(\d+)-)?(\d{1,3}):([0-5]\d):([0-5]\d)", cfg.time)
    if parts is None:
        raise UserError(f"time={cfg.time!r} is not a time: write it as 24:00:00, or 2-12:00:00 for days")
    days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
    if ((days * 24 + hours) * 60 + minutes) * 60 + seconds <= 2 * WARNING_SECONDS:
        raise UserError(f"time={cfg.time} is too short: the last {WARNING_SECONDS} seconds are for a checkpoint")


def directives(cfg: Slurm, job: ClusterJob) -> list[str]:
    memory = cfg.memory or ("0" if cfg.exclusive else None)
    options = {
        "job-name": job.name,
        "nodes": cfg.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": cfg.cpus,
        "gpus-per-node": cfg.gpus or None,
        "mem": memory,
        "time": cfg.time,
        "partition": cfg.partition,
        "account": cfg.account,
        "output": cfg.output,
        "open-mode": "append",  # a requeued job appends to the same file
        "signal": f"B:USR1@{WARNING_SECONDS}",
    }
    flags = ["requeue", *(["exclusive"] if cfg.exclusive else [])]
    return [f"{key}={value}" for key, value in options.items() if value is not None] + flags


# On SIGTERM, srun kills its tasks at once, and `ray symmetric-run` kills its command. The script therefore sends
# SIGTERM to the program itself, which runs on this node (a batch script runs on the first node) and whose process id is
# in a file. The program saves a checkpoint and exits with code 143, and then Ray is stopped. The exit code is in a file
# too, because srun may return the code of a node that was slow to stop.
TEMPLATE = r"""#!/bin/bash
@DIRECTIVES@

# Submit it with sbatch. Options on the command line of sbatch override the lines above.
# Submitted again, or requeued by Slurm, the job resumes the run from its last checkpoint.
@NOTES@@SETUP@set -euo pipefail

command=(@COMMAND@)
port=@PORT@

mkdir -p @SHARED@
state=$(cd @SHARED@ && pwd)/.@NAME@-$SLURM_JOB_ID
clean() { rm -f "$state".{token,pid,status}; }
clean
trap clean EXIT

# Ray's token: every connection to this cluster needs it. It is new for every start, and only you can read the file.
(umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$state.token")
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$state.token
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=600 # seconds until all nodes must have joined
unset RAY_ADDRESS RAY_AUTH_TOKEN

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts[0]:?scontrol names no hosts}
if [ "$SLURM_JOB_NUM_NODES" -eq 1 ]; then
    head=127.0.0.1 # a single node listens on loopback only
fi

step='' warned='' cancelled=''
stop() {
    if [ -s "$state.pid" ]; then
        kill -TERM "$(<"$state.pid")" 2>/dev/null || true # srun and ray would kill it before it has saved
    elif [ -n "$step" ]; then
        kill -TERM "$step" 2>/dev/null || true # the program has not started: nothing to save
    else
        exit 143
    fi
}
trap 'warned=yes; stop' USR1        # the time limit is near
trap 'cancelled=yes; stop' TERM INT # scancel

# The command of every node. Only the head accepts the option that turns the dashboard off.
node='[ "$SLURM_NODEID" -ne 0 ] || off=--include-dashboard=false; exec ray symmetric-run ${off-} "$@"'
# The command of the head, once all nodes have joined.
driver='(echo $BASHPID >"$0.pid"; exec "$@") & wait $!; status=$?; echo $status >"$0.status"; exit $status'
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
    --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 --wait=60 \
    bash -c "$node" node --address "$head:$port" --min-nodes "$SLURM_JOB_NUM_NODES" \
    --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="${SLURM_GPUS_ON_NODE:-0}" --disable-usage-stats \
    -- bash -c "$driver" "$state" "${command[@]}" &
step=$!
while kill -0 "$step" 2>/dev/null; do
    wait "$step" || true # a signal interrupts `wait`, not the step
done
status=1 # for a command that never started: symmetric-run exits with 0 if Ray does not start
wait "$step" || status=$?
if [ -s "$state.status" ]; then
    status=$(<"$state.status")
fi
trap '' USR1 TERM INT
clean

# Requeue a job that was stopped before it finished, but not one that was cancelled or has failed.
preempted() { scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; }
if [ "$status" -ne 0 ] && [ -z "$cancelled" ] && { [ -n "$warned" ] || [ "$status" -eq 143 ] || preempted; }; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""
