"""Bytes a token against the published figures, and against what the pages really take."""

import pytest
import torch

from shoal.kernels.page_format import PageFormat
from shoal.kvcache.spec import KVCacheSpec, bytes_per_token, decoder_specs, kv_heads_per_rank


@pytest.mark.parametrize(
    ("model", "layers", "kv_heads", "head_dim", "expected"),
    [
        ("Llama-2-7B", 32, 32, 128, 524_288),
        ("Llama-2-70B", 80, 8, 128, 327_680),
        ("Llama-3.1-8B", 32, 8, 128, 131_072),
        ("Mistral-7B-v0.3", 32, 8, 128, 131_072),
        ("Qwen2.5-0.5B", 24, 2, 64, 12_288),
        ("Qwen2.5-7B", 28, 4, 128, 57_344),
        ("Qwen3-0.6B (head_dim is not hidden / heads)", 28, 8, 128, 114_688),
        ("Qwen3-32B", 64, 8, 128, 262_144),
        ("SmolLM2-135M", 30, 3, 64, 23_040),
    ],
)
def test_bytes_per_token_in_16_bit(model: str, layers: int, kv_heads: int, head_dim: int, expected: int) -> None:
    assert KVCacheSpec.heads(layers, kv_heads, head_dim, 2).bytes_per_token == expected


def test_latent_attention_stores_one_vector_for_all_heads() -> None:
    """DeepSeek-V3: 61 layers, latent 512, rotary key 64."""
    assert KVCacheSpec.latent(61, 512, 64, 2).bytes_per_token == 70_272


def test_layers_are_grouped_by_window_and_a_window_bounds_what_is_read() -> None:
    """Gemma 3 270M: 18 layers, 1 KV head of 256, every sixth layer global, window 512."""
    windows = [None if (layer + 1) % 6 == 0 else 512 for layer in range(18)]
    sliding, full = decoder_specs(windows, 1, 256, 2)
    assert (sliding.num_layers, sliding.window, full.num_layers, full.window) == (15, 512, 3, None)
    assert bytes_per_token((sliding, full)) == 18 * 2 * 256 * 2
    assert sliding.bytes_read(10_000) == 512 * sliding.bytes_per_token
    assert sliding.bytes_read(100) == 100 * sliding.bytes_per_token
    assert full.bytes_read(10_000) == 10_000 * full.bytes_per_token


@pytest.mark.parametrize(("heads", "ranks", "expected"), [(8, 1, 8), (8, 2, 4), (8, 8, 1), (8, 16, 1), (3, 2, 2)])
def test_every_rank_has_at_least_one_kv_head(heads: int, ranks: int, expected: int) -> None:
    assert kv_heads_per_rank(heads, ranks) == expected


@pytest.mark.parametrize("layout", ["canonical", "cpu_packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_takes_what_its_pages_take(layout: str, dtype: torch.dtype) -> None:
    page_format = PageFormat(layout, 16, 3, 64, dtype)  # type: ignore[arg-type]
    pages = [page_format.allocate(5, torch.device("cpu")) for _ in range(4)]
    spec = KVCacheSpec.heads(4, 3, 64, dtype.itemsize)
    assert 5 * spec.bytes_per_block(16) == sum(p.k.nbytes + p.v.nbytes for p in pages)
