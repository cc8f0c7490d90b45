"""Fixtures of the engine's tests: tiny checkpoints, and a driver that plays scheduler for a runner or an executor."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _module(path: Path) -> ModuleType:
    """A helper module beside the tests, by path (the tests are no package)."""
    name = f"shoal_tests_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_checkpoint(family, **overrides) -> the directory of a random checkpoint; made once per arguments."""
    tiny_models = _module(Path(__file__).parent / "weights" / "tiny_models.py")
    made: dict[tuple[Any, ...], Path] = {}

    def make(family: str, **overrides: Any) -> Path:
        key = (family, *sorted((name, repr(value)) for name, value in overrides.items()))
        if key not in made:
            directory = tmp_path_factory.mktemp(family)
            made[key] = tiny_models.make_tiny_checkpoint(family, directory, **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def driver() -> ModuleType:
    """The helpers of `runner/driver.py`: settings for tiny models, and Driver, which makes step plans."""
    return _module(Path(__file__).parent / "runner" / "driver.py")


@pytest.fixture(scope="session")
def kit() -> ModuleType:
    """The helpers of `engine/kit.py`: fake ranks, a tokenizer of bytes, a sink that remembers."""
    return _module(Path(__file__).parent / "engine" / "kit.py")
