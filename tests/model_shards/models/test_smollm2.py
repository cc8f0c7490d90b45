"""The real model: SmolLM2-135M, thirty layers, from its GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shoal.model_shards.weights.open import open_checkpoint

if TYPE_CHECKING:
    from shoal.model_shards.weights.sources import ModelSource

pytestmark = pytest.mark.real_model

PROMPTS = [
    "The capital of France is", "Water boils at", "def fibonacci(n):", "Once upon a time", "1, 1, 2, 3, 5, 8,",
    "The three primary colours are", "Dear Sir or Madam,", "import numpy as", "Photosynthesis is the process",
    "In 1969, Neil Armstrong", "SELECT name FROM", "The opposite of hot is", "Roses are red,", "E = mc",
    "My favourite book is", "The quick brown fox", "A haiku about the sea:", "Monday, Tuesday,", "To be or not",
    "Fish swim in shoals because",
]  # fmt: skip


@pytest.fixture(scope="module")
def oracle(smollm2: ModelSource) -> Any:
    """transformers' Llama in fp32 with the file's weights as the `gguf` package decodes them, independently of us."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = open_checkpoint(smollm2).config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            rms_norm_eps=config.rms_eps,
            rope_theta=100000.0,
            tie_word_embeddings=True,
        )
    )
    model.load_state_dict(dict(_tensors(smollm2)), strict=False)
    model.tie_weights()
    return model.eval()


def _tensors(source: ModelSource) -> Iterator[tuple[str, torch.Tensor]]:
    from gguf import GGUFReader
    from gguf.quants import dequantize

    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    for tensor in GGUFReader(source.path).tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        parts = tensor.name.split(".")
        if parts[0] != "blk":
            top = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}
            yield top[parts[0]], values
            continue
        if parts[2] in ("attn_q", "attn_k"):  # llama.cpp interleaves the two halves of each head
            heads = 9 if parts[2] == "attn_q" else 3
            values = values.view(heads, 32, 2, 576).transpose(1, 2).reshape(heads * 64, 576)
        yield f"model.layers.{parts[1]}.{names[parts[2]]}.weight", values


def test_weights_are_those_of_the_file(smollm2: ModelSource) -> None:
    checkpoint = open_checkpoint(smollm2)
    tensors = dict(_tensors(smollm2))
    assert checkpoint.names() == tensors.keys()
    for name, expected in tensors.items():
        torch.testing.assert_close(checkpoint.read(name, torch.float32), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("backend", [None, "torch_cpu"])
def test_logits_after_thirty_layers(smollm2: ModelSource, oracle: Any, driver: ModuleType, backend: str | None) -> None:
    token_ids = torch.randint(0, 49152, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    runner = driver.make_runner(smollm2.path, backend=backend)
    hidden = driver.watch_hidden(runner)
    for plan in driver.Driver(runner.settings).prefill_plans({1: token_ids}, chunk_size=64):
        runner.execute(plan)
    with torch.no_grad():
        expected = oracle(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(driver.all_logits(runner, hidden), expected, atol=1e-3, rtol=0)


def test_greedy_tokens_of_twenty_prompts_are_those_of_transformers(
    smollm2: ModelSource, oracle: Any, driver: ModuleType
) -> None:
    """A continuation is greedy when each of its tokens is the oracle's first choice after those before it."""
    from shoal.model_shards.tokenizer.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(smollm2)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    runner = driver.make_runner(smollm2.path, num_blocks=256)
    outputs = driver.generate(runner.execute, runner.settings, prompts, 16)
    for token_ids, drawn in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            logits = oracle(torch.tensor([token_ids + drawn])).logits[0]
        assert logits[len(token_ids) - 1 : -1].argmax(-1).tolist() == drawn
