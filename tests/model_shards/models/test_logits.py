"""Logits of every family against transformers on the same random weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

MOE_FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", *MOE_FAMILIES)
BACKENDS = (None, "reference", "torch_cpu")
TOLERANCE = 1e-4
"""Of fp32 logits of size 10 or so; the first release's promise for real models is 1e-3."""

LENGTH = 90
"""Longer than the tiny models' sliding windows (16 and 24) several times over."""

TinyCheckpoint = Callable[..., Path]


def prompt(length: int = LENGTH, seed: int = 0) -> list[int]:
    return torch.randint(0, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def oracle_logits(path: Path, token_ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].float()


def our_logits(
    driver: ModuleType, path: Path, token_ids: list[int], chunk_size: int | None = None, **changes: Any
) -> torch.Tensor:
    """Of every position; the sequence goes through the cache in chunks."""
    runner = driver.make_runner(path, **changes)
    hidden = driver.watch_hidden(runner)
    for plan in driver.Driver(runner.settings).prefill_plans({1: token_ids}, chunk_size):
        assert runner.execute(plan).errors == {}
    return driver.all_logits(runner, hidden)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, family: str, backend: str | None
) -> None:
    path = tiny_checkpoint(family)
    expected = oracle_logits(path, prompt())
    torch.testing.assert_close(our_logits(driver, path, prompt(), backend=backend), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_tied_and_untied_embeddings(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, family: str, tied: bool
) -> None:
    path = tiny_checkpoint(family, tie_word_embeddings=tied)
    expected = oracle_logits(path, prompt(20))
    torch.testing.assert_close(our_logits(driver, path, prompt(20)), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("attention_bias", [True, False])
def test_biases_of_llama(tiny_checkpoint: TinyCheckpoint, driver: ModuleType, attention_bias: bool) -> None:
    path = tiny_checkpoint("llama", attention_bias=attention_bias, mlp_bias=True)
    expected = oracle_logits(path, prompt(20))
    torch.testing.assert_close(our_logits(driver, path, prompt(20)), expected, atol=TOLERANCE, rtol=0)


ROPE_SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("kind", sorted(ROPE_SCALINGS))
def test_rope_scaling_equals_transformers(tiny_checkpoint: TinyCheckpoint, driver: ModuleType, kind: str) -> None:
    path = tiny_checkpoint("llama", rope_parameters=ROPE_SCALINGS[kind])
    expected = oracle_logits(path, prompt(240))
    torch.testing.assert_close(our_logits(driver, path, prompt(240)), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_gives_the_same_logits(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, family: str, chunk_size: int
) -> None:
    path = tiny_checkpoint(family)
    invariant = driver.make_runner(path).model.ops.batch_invariant
    whole = our_logits(driver, path, prompt())
    chunked = our_logits(driver, path, prompt(), chunk_size)
    torch.testing.assert_close(chunked, whole, atol=0 if invariant else TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_does_not_see_its_neighbours(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, family: str
) -> None:
    """Decodes, prefills and chunks of several sequences in one step, against each alone."""
    path = tiny_checkpoint(family)
    prompts = {1: prompt(1, seed=1), 2: prompt(37, seed=2), 3: prompt(64, seed=3), 4: prompt(50, seed=4)}
    runner = driver.make_runner(path)
    hidden = driver.watch_hidden(runner)
    plans = driver.Driver(runner.settings).prefill_plans(prompts, 33)
    rows: dict[int, list[torch.Tensor]] = {seq_id: [] for seq_id in prompts}
    for plan in plans:
        runner.execute(plan)
        logits, start = driver.all_logits(runner, hidden[-1:]), 0
        for chunk in sorted(plan.chunks, key=lambda chunk: chunk.num_tokens > 1):
            rows[chunk.seq_id].append(logits[start : start + chunk.num_tokens])
            start += chunk.num_tokens
    for seq_id, token_ids in prompts.items():
        alone = our_logits(driver, path, token_ids)
        torch.testing.assert_close(torch.cat(rows[seq_id]), alone, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_weights(tiny_checkpoint: TinyCheckpoint, driver: ModuleType, family: str, tmp_path: Path) -> None:
    """On a CPU only the weights are rounded, so the logits are those of an fp32 model with the rounded weights. A
    transformers model that keeps its activations in bf16 too is within the rounding of its own (3 layers, 8 bits)."""
    from transformers import AutoModelForCausalLM

    path = tiny_checkpoint(family)
    ours = our_logits(driver, path, prompt(), dtype=torch.bfloat16)
    rounded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    scale = getattr(rounded.get_input_embeddings(), "embed_scale", None)
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            if "norm" not in name and not name.endswith(".gate.weight"):  # norms and routers stay fp32 here
                parameter.copy_(parameter.bfloat16())
        if scale is not None:
            scale.copy_(scale.bfloat16())
        expected = rounded(torch.tensor([prompt()])).logits[0]
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)
    all_bf16 = oracle_logits(path, prompt(), torch.bfloat16)
    near = (ours - all_bf16).abs().amax(dim=1) < 0.05 * expected.abs().max()
    # Where two experts score nearly the same, rounded activations choose the other, and the position differs by more.
    assert near.float().mean() >= (0.8 if family in MOE_FAMILIES else 1.0)


def test_o21_tied_model_that_also_ships_a_head(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Case O-21: the logits come from the embedding, the extra tensor is ignored with one line."""
    path = tiny_checkpoint("llama", tie_word_embeddings=True)
    expected = oracle_logits(path, prompt(20))
    edited = edit_tensors(path, tmp_path / "edited", {"lm_head.weight": torch.full((320, 64), 7.0)})
    with caplog.at_level(logging.INFO):
        ours = our_logits(driver, edited, prompt(20))
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)
    assert sum("lm_head.weight" in record.getMessage() for record in caplog.records) == 1


def edit_tensors(path: Path, target: Path, changes: dict[str, torch.Tensor | None]) -> Path:
    """A copy of a checkpoint with tensors added, replaced or (None) removed."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(path, target)
    tensors = load_file(target / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, r"missing \(model\.layers\.1\.mlp\.up_proj\.weight\)"),
        ({"model.layers.1.extra.weight": torch.zeros(3)}, r"unexpected \(model\.layers\.1\.extra\.weight\)"),
        (
            {"model.norm.weight": torch.zeros(63)},
            r"wrong shape \(model\.norm\.weight is \[63\], expected \[64\]\)",
        ),
        ({"lm_head.weight": None}, r"missing \(lm_head\.weight\)"),
    ],
)
def test_every_tensor_is_accounted_for(
    tiny_checkpoint: TinyCheckpoint,
    driver: ModuleType,
    tmp_path: Path,
    changes: dict[str, torch.Tensor | None],
    named: str,
) -> None:
    from shoal.configs.errors import ModelLoadError

    path = edit_tensors(tiny_checkpoint("llama"), tmp_path / "edited", changes)
    with pytest.raises(ModelLoadError, match=named):
        driver.make_runner(path)
