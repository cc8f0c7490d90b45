"""Whole tiny models on the Triton table, in the interpreter: the text of the reference, to the token."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).resolve().parents[3]
PROMPTS = [[65, 66, 67], list(range(10, 40))]


def helper(relative: str) -> ModuleType:
    """A helper module of the model tests, by path (the tests are no package)."""
    spec = importlib.util.spec_from_file_location(Path(relative).stem, TESTS / relative)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
def test_greedy_text_is_the_reference_s(family: str, tmp_path: Path) -> None:
    """Chunked prefill beside decodes; Gemma 3 brings sliding windows, GELU and norms of heads,
    Qwen3-MoE experts."""
    path = helper("model_shards/weights/tiny_models.py").make_tiny_checkpoint(family, tmp_path)
    driver = helper("model_shards/runner/driver.py")
    texts = []
    for backend in ("reference", "triton"):
        runner = driver.make_runner(path, backend=backend)
        texts.append(driver.generate(runner.execute, runner.settings, PROMPTS, 3, chunk_size=16))
    assert texts[0] == texts[1]
