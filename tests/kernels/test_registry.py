"""The choice of a backend: by device, by name, explained, and with an error that teaches."""

from __future__ import annotations

import logging

import pytest
import torch

from shoal.configs.errors import ConfigError
from shoal.kernels.ops import Ops
from shoal.kernels.registry import BACKENDS, explain_selection, select_ops

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_an_unknown_backend_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'onnx'.*cpu, reference, torch_cpu, triton") as caught:
        select_ops(CPU, torch.float32, backend="onnx")
    assert caught.value.param == "backend"


@pytest.mark.parametrize("backend", ["cpu", "torch_cpu"])
def test_a_backend_that_cannot_serve_says_why(backend) -> None:
    with pytest.raises(ConfigError, match="runs on the CPU only, not on cuda"):
        select_ops(GPU, torch.float32, backend=backend)
    with pytest.raises(ConfigError, match="float32 or bfloat16 on a CPU, not float16"):
        select_ops(CPU, torch.float16, backend=backend)


def test_triton_is_not_chosen_for_a_cpu(monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="triton"):
        select_ops(CPU, torch.float32, backend="triton")


def test_the_native_unit_is_the_cpu_default(native_ops) -> None:
    assert select_ops(CPU, torch.bfloat16).name == "cpu"
    assert dict(explain_selection(CPU, torch.bfloat16))["cpu"].startswith("chosen")
    assert dict(explain_selection(GPU, torch.bfloat16))["cpu"] == "no: it runs on the CPU only, not on cuda"


def test_without_native_code_torch_serves_and_one_line_says_what_to_install(monkeypatch, caplog) -> None:
    monkeypatch.setenv("SHOAL_NATIVE", "0")
    with caplog.at_level(logging.INFO, logger="shoal"):
        ops = select_ops(CPU, torch.bfloat16)
    assert (ops.name, ops.layout) == ("torch_cpu", "canonical")
    assert len(caplog.records) == 1
    assert "SHOAL_NATIVE=0" in caplog.text


@pytest.mark.parametrize("name", ["cpu", "torch_cpu", "reference"])
def test_every_operator_is_explained(name) -> None:
    operators = set(Ops.__abstractmethods__) - {"explain", "batch_invariant"}
    assert set(BACKENDS[name].make(CPU, torch.float32).explain()) == operators
