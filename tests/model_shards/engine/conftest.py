"""Ranks that compute nothing, a tokenizer of bytes, and a sink that remembers: what the engine's tests need."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def kit() -> ModuleType:
    """The helpers of `kit.py`."""
    name = "shoal_tests_engine_kit"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "kit.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
