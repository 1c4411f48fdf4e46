"""A RayJob manifest for KubeRay: a head that learns, workers that come and go, and restarts that go on."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from bestiary.errors import UserError
from bestiary.launch.job import Job, at_least, fill, job, match

RUNS = "/runs"
SAVING = 120  # seconds a head that must go may take to save
LONGEST = 47  # characters KubeRay takes for the name of a RayJob


@dataclass(frozen=True)
class K8s:
    """Write a RayJob manifest to hand to kubectl. KubeRay 1.5.1 or newer must be installed in the cluster."""

    image: str = ""
    """container image with bestiary[ray] in it; there is no default"""
    claim: str = ""
    """persistent volume claim that all pods may write (ReadWriteMany), mounted at /runs; there is no default"""
    workers: int = 1
    """pods beside the head at the start"""
    min_workers: int | None = None
    """that are kept; None: as many as --workers"""
    max_workers: int | None = None
    """that there may be; more than --min-workers: Ray's autoscaler adds and removes them; None: as many as --workers"""
    cpus: int = 4
    """of each worker"""
    memory: str = "8Gi"
    """of each worker"""
    gpus: int = 0
    """of each worker"""
    head_cpus: int = 4
    """of the head, where the command runs"""
    head_memory: str = "16Gi"
    head_gpus: int = 0
    name: str | None = None
    """of the job; None: the preset's"""
    namespace: str | None = None
    retries: int = 5
    """how often a command that failed, or whose head went away, is started again on a new cluster"""
    ray: str = "2.60.0"
    """version of Ray in the image; 2.52.0 or newer"""
    out: Path | None = None
    """file to write; None: standard output"""


def manifest(cfg: K8s, words: list[str]) -> str:
    """YAML of a ConfigMap with the command and of the RayJob that runs it."""
    task = job(words, cfg.name, RUNS)
    check(cfg, task)
    low = cfg.workers if cfg.min_workers is None else cfg.min_workers
    high = cfg.workers if cfg.max_workers is None else cfg.max_workers
    return fill(
        TEMPLATE,
        NOTES="".join(f"# {note}\n" for note in task.notes),
        NAME=quoted(task.name),
        NAMESPACE=f"\n  namespace: {quoted(cfg.namespace)}" if cfg.namespace else "",
        TRAIN=quoted(TRAIN.format(command=shlex.join(task.words))),
        STOP=quoted(STOP),
        RETRIES=str(cfg.retries),
        RAY=quoted(cfg.ray),
        ELASTIC="\n    enableInTreeAutoscaling: true" if low < high else "",
        IMAGE=quoted(cfg.image),
        CLAIM=quoted(cfg.claim),
        SAVING=str(SAVING),
        HEAD=resources(cfg.head_cpus, cfg.head_memory, cfg.head_gpus),
        WORKER=resources(cfg.cpus, cfg.memory, cfg.gpus),
        WORKERS=str(cfg.workers),
        LOW=str(low),
        HIGH=str(high),
        RUNS=RUNS,
    )


def check(cfg: K8s, task: Job) -> None:
    if not cfg.image:
        raise UserError("--image is missing: name a container image with bestiary[ray] in it")
    if not cfg.claim:
        raise UserError(f"--claim is missing: name a volume claim for {RUNS}, or what was learnt goes with the pods")
    at_least(1, workers=cfg.workers, cpus=cfg.cpus, head_cpus=cfg.head_cpus)
    at_least(0, gpus=cfg.gpus, head_gpus=cfg.head_gpus, retries=cfg.retries)
    at_least(0, min_workers=cfg.workers if cfg.min_workers is None else cfg.min_workers)
    if cfg.min_workers is not None and cfg.min_workers > cfg.workers:
        raise UserError(f"min-workers={cfg.min_workers} must be at most workers={cfg.workers}")
    if cfg.max_workers is not None and cfg.max_workers < cfg.workers:
        raise UserError(f"max-workers={cfg.max_workers} must be at least workers={cfg.workers}")
    label = "lower-case letters, digits and dashes, a letter first"
    match(rf"(?=.{{1,{LONGEST}}}$)[a-z]([a-z0-9-]*[a-z0-9])?", f"{label}, at most {LONGEST}", name=task.name)
    match(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "lower-case letters, digits and dashes", namespace=cfg.namespace)
    match(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "lower-case letters, digits, dots and dashes", claim=cfg.claim)
    match(r"[\w][\w./:@-]*", "write it like NAME:TAG", image=cfg.image)
    match(r"[1-9]\d*([KMGT]i?)?", "write it like 16Gi", memory=cfg.memory, head_memory=cfg.head_memory)
    match(r"\d+\.\d+\.\d+", "write it like 2.60.0", ray=cfg.ray)
    if tuple(map(int, cfg.ray.split("."))) < (2, 52, 0):
        raise UserError(f"ray={cfg.ray} is too old: token authentication on Kubernetes needs 2.52.0 or newer")
    if not task.run.startswith(f"{RUNS}/") or ".." in task.run.split("/"):
        raise UserError(f"--run {task.run} is not on the shared volume: write it like {RUNS}/{task.name}")


def quoted(text: str) -> str:
    """JSON's strings are YAML's."""
    return json.dumps(text)


def resources(cpus: int, memory: str, gpus: int) -> str:
    """What is asked for is also the limit, so that Ray sees what it really has."""
    said = {"cpu": str(cpus), "memory": memory} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    words = json.dumps(said)
    return f"{{requests: {words}, limits: {words}}}"


# The command is a file, because an entrypoint passes two shells on its way, each of which takes quotes off. It leaves
# its number behind: a head that is told to go tells its first process only, which knows nothing of what Ray runs.
TRAIN = "echo $$ >/tmp/bestiary.pid\nexec {command}\n"
STOP = """\
pid=$(cat /tmp/bestiary.pid 2>/dev/null) || exit 0
kill -TERM "$pid"
while kill -0 "$pid" 2>/dev/null; do sleep 1; done
"""

TEMPLATE = """\
# Hand it in with kubectl apply; handed in again after `kubectl delete`, it goes on where the run stood.
# KubeRay 1.5.1 or newer. It makes the token, keeps it in a Secret and gives it to every pod of this job.
@NOTES@apiVersion: v1
kind: ConfigMap
metadata:
  name: @NAME@@NAMESPACE@
data:
  train.sh: @TRAIN@
  stop.sh: @STOP@
---
apiVersion: ray.io/v1
kind: RayJob
metadata:
  name: @NAME@@NAMESPACE@
spec:
  entrypoint: bash /etc/bestiary/train.sh
  backoffLimit: @RETRIES@
  shutdownAfterJobFinishes: true
  rayClusterSpec:
    rayVersion: @RAY@
    authOptions: {mode: token}@ELASTIC@
    headGroupSpec:
      # A RayJob is handed to the job server, which is part of Ray's dashboard: port 8265 of the head must be open to
      # other pods. It asks for the token, and the service below is for the inside of the Kubernetes cluster only.
      serviceType: ClusterIP
      rayStartParams:
        dashboard-host: "0.0.0.0"
      template:
        spec:
          terminationGracePeriodSeconds: @SAVING@
          containers:
            - name: ray-head
              image: @IMAGE@
              resources: @HEAD@
              env:
                - {name: RAY_USAGE_STATS_ENABLED, value: "0"}
              lifecycle:
                preStop:
                  exec: {command: [bash, /etc/bestiary/stop.sh]}
              ports:
                - {name: gcs-server, containerPort: 6379}
                - {name: dashboard, containerPort: 8265}
              volumeMounts:
                - {name: runs, mountPath: @RUNS@}
                - {name: command, mountPath: /etc/bestiary}
          volumes:
            - name: runs
              persistentVolumeClaim: {claimName: @CLAIM@}
            - name: command
              configMap: {name: @NAME@}
    workerGroupSpecs:
      - groupName: workers
        replicas: @WORKERS@
        minReplicas: @LOW@
        maxReplicas: @HIGH@
        rayStartParams: {}
        template:
          spec:
            containers:
              - name: ray-worker
                image: @IMAGE@
                resources: @WORKER@
                volumeMounts:
                  - {name: runs, mountPath: @RUNS@}
            volumes:
              - name: runs
                persistentVolumeClaim: {claimName: @CLAIM@}
"""
