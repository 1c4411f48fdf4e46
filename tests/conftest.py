"""Fixtures for all tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


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
