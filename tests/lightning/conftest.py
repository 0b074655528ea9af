"""What all tests of Lightning need."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silence Lightning's hints, and use one thread."""
    warnings.filterwarnings("ignore", module="lightning")
    logger, threads = logging.getLogger("lightning.pytorch"), torch.get_num_threads()
    level = logger.level
    logger.setLevel(logging.WARNING)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    logger.setLevel(level)
