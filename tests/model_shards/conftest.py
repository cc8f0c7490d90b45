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
def thread_ranks() -> ModuleType:
    """The helpers of `parallel/thread_ranks.py`: context-parallel ranks as threads."""
    return _module(Path(__file__).parent / "parallel" / "thread_ranks.py")


@pytest.fixture(scope="session")
def kit() -> ModuleType:
    """The helpers of `engine/kit.py`: fake ranks, a tokenizer of bytes, a sink that remembers."""
    return _module(Path(__file__).parent / "engine" / "kit.py")


@pytest.fixture(scope="session")
def sim() -> ModuleType:
    """The helpers of `engine/simulation.py`: the real scheduler on a simulated machine."""
    return _module(Path(__file__).parent / "engine" / "simulation.py")


@pytest.fixture(scope="session")
def gguf_writing() -> ModuleType:
    """The helpers of `weights/tiny_gguf.py`."""
    return _module(Path(__file__).parent / "weights" / "tiny_gguf.py")


@pytest.fixture
def tiny_gguf(
    gguf_writing: ModuleType, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> Callable[..., tuple[Path, Path]]:
    """tiny_gguf(family, matrices=..., extra_metadata=..., **overrides) -> (GGUF file, the directory it was made of)."""

    def make(family: str, *, matrices: Any = None, extra_metadata: Any = None, **overrides: Any) -> tuple[Path, Path]:
        directory = tiny_checkpoint(family, **overrides)
        options: dict[str, Any] = {"extra_metadata": extra_metadata}
        if matrices is not None:
            options["matrices"] = matrices
        return gguf_writing.convert_to_gguf(directory, tmp_path / f"{family}.gguf", **options), directory

    return make
