"""Private interfaces of other libraries, in one place, each with the reason and the version it was checked with.

A new version of a library may rename any of them. `tests/test_compat.py` fails for the ones that are missing.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any


def allow_ray_clusters(allowed: bool) -> None:
    """Choose whether Ray listens on all network interfaces (True) or on loopback only (False).

    Reason: `ray.init` has no option for the interface. Ray stays on loopback only where it believes that the operating
    system does not support clusters, and this constant is that belief. Checked with Ray 2.60.
    """
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = allowed


def ray_actor_id(handle: Any) -> str:
    """The hexadecimal id of a Ray actor, as `RayActorError.actor_id` reports it.

    Reason: a handle offers its id only as a private attribute. Checked with Ray 2.60.
    """
    return handle._actor_id.hex()


def extend_numba_stamp(function: Any, stamp: bytes) -> None:
    """Add bytes to the stamp by which Numba decides whether the cached machine code of a function is current.

    Reason: Numba's own stamp covers only the file that defines the function, not the functions it calls, and there is
    no option for more. Checked with Numba 0.68.
    """
    function._cache._cache_file._source_stamp += stamp


def gloo_group(store: Any, rank: int, size: int, address: str, timeout: timedelta) -> Any:
    """A Gloo process group that listens at one address.

    Reason: `torch.distributed.init_process_group` has one default group per process and no option for the address; the
    options of the class that it builds are private. Checked with PyTorch 2.13.
    """
    import torch.distributed

    gloo: Any = torch.distributed.ProcessGroupGloo  # type: ignore[attr-defined]
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timeout
    return gloo(store, rank, size, options)


def nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """An NCCL process group with a timeout, apart from the default group of `torch.distributed`.

    Reason: as for Gloo; the timeout is a private attribute of the options. Checked with PyTorch 2.13, without a GPU.
    """
    import torch.distributed

    nccl: Any = torch.distributed.ProcessGroupNCCL  # type: ignore[attr-defined]
    options = nccl.Options()
    options._timeout = timeout
    return nccl(store, rank, size, options)


def lerp_all(targets: Sequence[Any], sources: Sequence[Any], weight: float) -> None:
    """Move every tensor of `targets` in place towards its source: target += weight (source - target).

    Reason: one call for all tensors is several times faster than a loop, and PyTorch has only the private function.
    Checked with PyTorch 2.13.
    """
    import torch

    torch._foreach_lerp_(targets, sources, weight)  # type: ignore[attr-defined]


def copy_all(targets: Sequence[Any], sources: Sequence[Any]) -> None:
    """Copy every source into the tensor of `targets` at the same index, in place. Reason and version: as `lerp_all`."""
    import torch

    torch._foreach_copy_(targets, sources)  # type: ignore[attr-defined]


def optuna_trial(study: Any, frozen: Any) -> Any:
    """The running trial of a study that an earlier process left unfinished, from its frozen description.

    Reason: Optuna offers no other way to continue a trial, and a trial's id is private. Checked with Optuna 5.0.
    """
    import optuna

    return optuna.Trial(study, frozen._trial_id)
