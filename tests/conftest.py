"""What the tests share."""

from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_weights_every_time() -> None:
    """Networks draw their weights from PyTorch's global stream: start it anew for every test."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data() -> Path:
    """Where the reference data lies."""
    return Path(__file__).parent / "data"
