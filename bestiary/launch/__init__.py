"""Launching: many runs in parallel, hyper-parameter sweeps, figures to reproduce, and job files for clusters."""

from bestiary.launch.job import ClusterJob, cluster_job
from bestiary.launch.k8s import K8s, manifest
from bestiary.launch.slurm import Slurm, script

__all__ = ["ClusterJob", "K8s", "Slurm", "cluster_job", "manifest", "script"]
