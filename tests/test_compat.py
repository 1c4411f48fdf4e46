"""Private interfaces of other libraries: each still exists and does what it is used for, and all are in one file."""

import ast
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bestiary.config import compat
from bestiary.config.extras import available

PACKAGE = Path(compat.__file__).parent.parent
PUBLIC = {"_replace", "_asdict", "_make", "_fields", "_field_defaults"}  # of named tuples: documented, not private
needs_ray = pytest.mark.skipif(not available("ray"), reason="needs the extra ray")


# -- they exist ----------------------------------------------------------------------------------------------


@needs_ray
def test_ray_decides_by_a_constant_whether_it_leaves_loopback():
    from ray._private import ray_constants, services

    before = ray_constants.ENABLE_RAY_CLUSTER
    assert isinstance(before, bool)
    try:
        compat.allow_ray_clusters(False)
        assert services.get_node_ip_address() == "127.0.0.1"
        compat.allow_ray_clusters(True)
        assert ray_constants.ENABLE_RAY_CLUSTER
    finally:
        compat.allow_ray_clusters(before)


@needs_ray
def test_a_ray_handle_knows_the_id_of_its_actor():
    from ray._raylet import ActorID
    from ray.actor import ActorHandle
    from ray.exceptions import RayActorError

    class Handle(ActorHandle):
        """A handle without a cluster."""

        def __init__(self, actor_id):
            self._ray_actor_id = actor_id

        def __del__(self):
            pass

    number = ActorID(b"\1" * ActorID.size())
    assert compat.ray_actor_id(Handle(number)) == number.hex()
    assert RayActorError(number.hex()).actor_id == number.hex()


def test_numba_keeps_a_stamp_in_the_cache_of_a_function(tmp_path, monkeypatch):
    (tmp_path / "compiled_once.py").write_text("import numba\n\n\n@numba.njit(cache=True)\ndef one():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        import compiled_once  # type: ignore

        before = compiled_once.one._cache._cache_file._source_stamp
        compat.extend_numba_stamp(compiled_once.one, b"more")
        assert compiled_once.one._cache._cache_file._source_stamp == before + b"more"
        assert compiled_once.one() == 1
    finally:
        sys.modules.pop("compiled_once", None)


def test_a_gloo_group_listens_at_an_address_and_has_a_timeout(tmp_path):
    group = compat.gloo_group(dist.FileStore(str(tmp_path / "store"), 1), 0, 1, "127.0.0.1", timedelta(seconds=7))
    x = torch.ones(3)
    group.allreduce([x], dist.AllreduceOptions()).wait()
    assert (group.rank(), group.size(), x.tolist()) == (0, 1, [1, 1, 1])
    assert group.options._timeout == timedelta(seconds=7)


@pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL"), reason="needs PyTorch with NCCL")
def test_the_options_of_an_nccl_group_have_a_timeout():
    assert hasattr(dist.ProcessGroupNCCL.Options(), "_timeout")  # type: ignore[attr-defined]


def test_an_unfinished_trial_of_a_study_can_be_continued():
    optuna = pytest.importorskip("optuna")
    study = optuna.create_study()
    x = study.ask().suggest_float("x", 0, 1)
    (frozen,) = study.get_trials()
    again = compat.optuna_trial(study, frozen)
    assert again.number == 0 and again.suggest_float("x", 0, 1) == x
    study.tell(again, 0.5)
    assert len(study.get_trials()) == 1 and study.best_value == 0.5


def test_all_tensors_of_a_list_are_moved_and_copied_in_place():
    targets, sources = [torch.zeros(2), torch.ones(3)], [torch.ones(2), torch.full((3,), 3.0)]
    kept = list(targets)
    compat.lerp_all(targets, sources, 0.25)
    assert [x.tolist() for x in kept] == [[0.25] * 2, [1.5] * 3]
    compat.copy_all(targets, sources)
    assert [x.tolist() for x in kept] == [x.tolist() for x in sources]


# -- they are in one file ------------------------------------------------------------------------------------


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_names() -> set[str]:
    """Private names that the package itself defines."""
    names: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and on_self(node):
                names.add(node.attr)
    return names


def on_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def private_uses(tree: ast.AST, own: set[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of every private interface of another library that a module uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own | PUBLIC:
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom | ast.Import):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                name = f"{module}.{alias.name}"
                if not name.lstrip(".").startswith("bestiary") and any(is_private(part) for part in name.split(".")):
                    yield node.lineno, name


def test_private_interfaces_are_used_in_one_file_only():
    own = own_names()
    uses = {
        f"{path.relative_to(PACKAGE)}:{line} {name}"
        for path in PACKAGE.rglob("*.py")
        if path != Path(compat.__file__)
        for line, name in private_uses(ast.parse(path.read_text()), own)
    }
    assert not uses, "move these into bestiary/config/compat.py, with the reason and the version"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from ray._private import services", "ray._private.services"),
        ("import torch._dynamo", ".torch._dynamo"),
        ("x = torch._foreach_add(a, b)", "_foreach_add"),
        ("point._replace(x=1)", None),
        ("from bestiary.envs import _own", None),
        ("self._own()", None),
    ],
)
def test_private_interfaces_are_found_however_they_are_written(source, found):
    assert [name for _, name in private_uses(ast.parse(source), {"_own"})] == ([] if found is None else [found])
