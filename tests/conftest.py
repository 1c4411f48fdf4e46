"""Fixtures for all tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.ray_nodes import Nodes


@pytest.fixture(autouse=True)
def _seed_torch() -> None:
    """Seed PyTorch's global generator before every test: networks sample their initial weights from it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data() -> Path:
    """The directory of reference data."""
    return Path(__file__).parent / "data"


@pytest.fixture
def _double() -> Iterator[None]:
    """Build networks in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """A Ray cluster of one node, in processes that a test may kill or stop."""
    nodes = Nodes(tmp_path_factory.mktemp("nodes"), cpus=4)
    before = os.environ.get("RAY_AUTH_MODE")
    os.environ["RAY_AUTH_MODE"] = nodes.env["RAY_AUTH_MODE"]
    yield nodes
    nodes.close()
    os.environ.pop("RAY_AUTH_MODE") if before is None else os.environ.__setitem__("RAY_AUTH_MODE", before)
