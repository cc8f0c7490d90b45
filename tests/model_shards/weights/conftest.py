"""GGUF files for the tests of this folder."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="session")
def gguf_writing() -> ModuleType:
    """The helpers of `tiny_gguf.py` (the tests are no package)."""
    name = "shoal_tests_tiny_gguf"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "tiny_gguf.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


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
