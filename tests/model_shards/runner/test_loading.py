"""Loading leaves torch as it was."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from shoal.configs.errors import ModelLoadError
from shoal.model_shards.runner import loading


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_it_runs_on_one_thread_of_torch_and_gives_the_others_back(
    tiny_checkpoint: Callable[..., Path], driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    open_checkpoint = loading.open_checkpoint

    def watched(source: object, threads: int) -> object:
        seen.append((torch.get_num_threads(), threads))
        return open_checkpoint(source, threads)  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "open_checkpoint", watched)
    driver.make_runner(tiny_checkpoint("llama"), backend="reference")
    assert seen == [(1, 3)]
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_also_when_it_fails(tiny_checkpoint: Callable[..., Path], driver: ModuleType, tmp_path: Path) -> None:
    path = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "broken")
    (path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelLoadError):
        driver.make_runner(path, backend="reference")
    assert torch.get_num_threads() == 3
