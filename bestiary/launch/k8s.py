"""A RayJob manifest for KubeRay: the command runs on the head pod of a Ray cluster, and a restart resumes it."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from bestiary.errors import UserError
from bestiary.launch.job import ClusterJob, at_least, cluster_job, fill, match

RUNS = "/runs"
GRACE_SECONDS = 120  # time that a head pod gets to save a checkpoint when it is deleted
MAX_NAME = 47  # characters that KubeRay accepts in the name of a RayJob


@dataclass(frozen=True)
class K8s:
    """Write a RayJob manifest for `kubectl apply -f`. The cluster needs KubeRay 1.5.1 or newer."""

    image: str = ""
    """container image that has bestiary[ray] installed; required"""
    claim: str = ""
    """persistent volume claim with access mode ReadWriteMany, mounted at /runs in every pod; required"""
    workers: int = 1
    """number of worker pods at the start, without the head pod"""
    min_workers: int | None = None
    """least number of worker pods that Ray's autoscaler keeps; None: as many as --workers"""
    max_workers: int | None = None
    """largest number of worker pods; above --min-workers Ray's autoscaler is on; None: as many as --workers"""
    cpus: int = 4
    """CPU cores of each worker pod"""
    memory: str = "8Gi"
    """memory of each worker pod, such as 8Gi"""
    gpus: int = 0
    """NVIDIA GPUs of each worker pod"""
    head_cpus: int = 4
    """CPU cores of the head pod, which runs the command"""
    head_memory: str = "16Gi"
    """memory of the head pod, such as 16Gi"""
    head_gpus: int = 0
    """NVIDIA GPUs of the head pod"""
    name: str | None = None
    """name of the RayJob; None: the name of the preset"""
    namespace: str | None = None
    """Kubernetes namespace; None: the one that kubectl uses"""
    retries: int = 5
    """how often the command is restarted on a new cluster after it failed or its head pod was lost (backoffLimit)"""
    ray: str = "2.60.0"
    """version of Ray in the image, 2.52.0 or newer"""
    out: Path | None = None
    """file to write; None: standard output"""


def manifest(cfg: K8s, words: list[str]) -> str:
    """YAML of a ConfigMap with the command and of the RayJob that runs it."""
    job = cluster_job(words, cfg.name, RUNS)
    check(cfg, job)
    low = cfg.workers if cfg.min_workers is None else cfg.min_workers
    high = cfg.workers if cfg.max_workers is None else cfg.max_workers
    return fill(
        TEMPLATE,
        NOTES="".join(f"# {note}\n" for note in job.notes),
        NAME=quoted(job.name),
        NAMESPACE=f"\n  namespace: {quoted(cfg.namespace)}" if cfg.namespace else "",
        TRAIN=quoted(TRAIN.format(command=shlex.join(job.command))),
        STOP=quoted(STOP),
        RETRIES=str(cfg.retries),
        RAY=quoted(cfg.ray),
        ELASTIC="\n    enableInTreeAutoscaling: true" if low < high else "",
        IMAGE=quoted(cfg.image),
        CLAIM=quoted(cfg.claim),
        GRACE=str(GRACE_SECONDS),
        HEAD=resources(cfg.head_cpus, cfg.head_memory, cfg.head_gpus),
        WORKER=resources(cfg.cpus, cfg.memory, cfg.gpus),
        WORKERS=str(cfg.workers),
        LOW=str(low),
        HIGH=str(high),
        RUNS=RUNS,
    )


def check(cfg: K8s, job: ClusterJob) -> None:
    if not cfg.image:
        raise UserError("--image is missing: name a container image that has bestiary[ray] installed")
    if not cfg.claim:
        raise UserError(
            f"--claim is missing: name a persistent volume claim for {RUNS}, so that checkpoints outlive the pods"
        )
    at_least(1, workers=cfg.workers, cpus=cfg.cpus, head_cpus=cfg.head_cpus)
    at_least(0, gpus=cfg.gpus, head_gpus=cfg.head_gpus, retries=cfg.retries)
    at_least(0, min_workers=cfg.workers if cfg.min_workers is None else cfg.min_workers)
    if cfg.min_workers is not None and cfg.min_workers > cfg.workers:
        raise UserError(f"min-workers={cfg.min_workers} must be at most workers={cfg.workers}")
    if cfg.max_workers is not None and cfg.max_workers < cfg.workers:
        raise UserError(f"max-workers={cfg.max_workers} must be at least workers={cfg.workers}")
    label = "lower-case letters, digits and dashes, a letter first"
    match(rf"(?=.{{1,{MAX_NAME}}}$)[a-z]([a-z0-9-]*[a-z0-9])?", f"{label}, at most {MAX_NAME}", name=job.name)
    match(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "lower-case letters, digits and dashes", namespace=cfg.namespace)
    match(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "lower-case letters, digits, dots and dashes", claim=cfg.claim)
    match(r"[\w][\w./:@-]*", "write it as NAME:TAG", image=cfg.image)
    match(r"[1-9]\d*([KMGT]i?)?", "write it as 16Gi", memory=cfg.memory, head_memory=cfg.head_memory)
    match(r"\d+\.\d+\.\d+", "write it as 2.60.0", ray=cfg.ray)
    if tuple(map(int, cfg.ray.split("."))) < (2, 52, 0):
        raise UserError(f"ray={cfg.ray} is too old: token authentication on Kubernetes needs 2.52.0 or newer")
    if not job.run.startswith(f"{RUNS}/") or ".." in job.run.split("/"):
        raise UserError(f"--run {job.run} is not on the shared volume: write it as {RUNS}/{job.name}")


def quoted(text: str) -> str:
    """A YAML string; every JSON string is one."""
    return json.dumps(text)


def resources(cpus: int, memory: str, gpus: int) -> str:
    """Requests and limits of a pod. They are equal, so that Ray sees the resources that the pod really has."""
    amounts = {"cpu": str(cpus), "memory": memory} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    text = json.dumps(amounts)
    return f"{{requests: {text}, limits: {text}}}"


# The command is a script file, because an entrypoint passes through two shells, and each removes quotes. The script
# writes its process id to a file: Kubernetes sends SIGTERM only to the first process of the head pod, which does not
# pass it on to the command, so the preStop hook does.
TRAIN = "echo $$ >/tmp/bestiary.pid\nexec {command}\n"
STOP = """\
pid=$(cat /tmp/bestiary.pid 2>/dev/null) || exit 0
kill -TERM "$pid"
while kill -0 "$pid" 2>/dev/null; do sleep 1; done
"""

TEMPLATE = """\
# Submit it with kubectl apply. Submitted again after `kubectl delete`, the job resumes from its last checkpoint.
# Needs KubeRay 1.5.1 or newer, which creates Ray's token, keeps it in a Secret and gives it to every pod of this job.
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
      # KubeRay submits the command to the job server in Ray's dashboard, so port 8265 of the head pod is open to other
      # pods. The job server requires the token, and a ClusterIP service is visible inside the Kubernetes cluster only.
      serviceType: ClusterIP
      rayStartParams:
        dashboard-host: "0.0.0.0"
      template:
        spec:
          terminationGracePeriodSeconds: @GRACE@
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
