"""Jobs for clusters, as files to hand in: a Slurm batch script or a RayJob manifest. Nothing here contacts anything."""

from bestiary.launch.job import Job, job
from bestiary.launch.k8s import K8s, manifest
from bestiary.launch.slurm import Slurm, script

__all__ = ["Job", "K8s", "Slurm", "job", "manifest", "script"]
