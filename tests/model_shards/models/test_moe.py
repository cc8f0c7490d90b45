"""Models of experts: what a sequence gets depends on nothing but itself, with every kind of weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from shoal.kernels.cpu.grouped import PackedQuantizedGroups
from shoal.model_shards.llm import LLM
from shoal.model_shards.models.mlp import MLP
from shoal.model_shards.models.moe import MoE
from shoal.model_shards.models.routing import select_experts
from shoal.model_shards.quantization.schemes import Int8Scheme
from shoal.model_shards.runner.footprint import weights_bytes
from shoal.model_shards.runner.model_runner import ModelRunner
from shoal.model_shards.sampling.params import SamplingParams

TinyCheckpoint = Callable[..., Path]

FAMILIES = ("mixtral", "qwen3_moe")
PROMPTS = [[65, 66, 67], list(range(10, 60)), [200] * 17, [5]]


def greedy(
    driver: ModuleType, runner: ModelRunner, prompts: list[list[int]], chunk_size: int | None
) -> list[list[int]]:
    drawn: list[list[int]] = driver.generate(runner.execute, runner.settings, prompts, 16, chunk_size=chunk_size)
    return drawn


@pytest.mark.parametrize("weights", ["dense", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_draws_what_each_sequence_draws_alone(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, family: str, weights: str
) -> None:
    def make() -> ModelRunner:
        return driver.make_runner(tiny_checkpoint(family), weights=weights)  # type: ignore[no-any-return]

    expected = [greedy(driver, make(), [prompt], None)[0] for prompt in PROMPTS]
    for chunk_size in (1, 7, None):
        assert greedy(driver, make(), PROMPTS, chunk_size) == expected


def test_a_cached_prefix_gives_the_same_text(tiny_checkpoint: TinyCheckpoint) -> None:
    """Through the engine: twice the same prompts, whose beginnings the second time come out of the cache."""
    prompts = [[*range(10, 74), last] for last in range(100, 106)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    options = {"max_model_len": 128, "kv_cache_memory": "16MiB", "dtype": "float32", "max_num_batched_tokens": 64}
    with LLM(str(tiny_checkpoint("qwen3_moe")), **options) as llm:
        cold = [llm.generate([prompt], params)[0] for prompt in prompts[:1]] + llm.generate(prompts[1:], params)
        warm = llm.generate(prompts, params)
    assert [answer.outputs[0].token_ids for answer in warm] == [answer.outputs[0].token_ids for answer in cold]
    assert all(answer.num_cached_tokens >= 64 for answer in warm)


def test_experts_are_quantized_too(tiny_checkpoint: TinyCheckpoint, driver: ModuleType) -> None:
    path = tiny_checkpoint("mixtral")
    runner = driver.make_runner(path, weights="int8")
    experts = [layer.mlp.experts.slots for layer in runner.model.layers]
    assert all(isinstance(slots.gate_up, PackedQuantizedGroups) for slots in experts)
    moe = runner.config.moe
    held = sum(slots.gate_up.nbytes + slots.down.nbytes for slots in experts)
    without = replace(runner.config, moe=replace(moe, num_experts=1, experts_per_token=1))
    foretold = [weights_bytes(config, Int8Scheme(torch.float32)) for config in (runner.config, without)]
    routers = 3 * 3 * 64 * 4
    assert (foretold[0] - foretold[1] - routers) * 4 == held * 3


def test_layers_have_experts_or_a_plain_mlp_as_the_config_says(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType
) -> None:
    layers = driver.make_runner(tiny_checkpoint("qwen3_moe")).model.layers
    assert [type(layer.mlp) for layer in layers] == [MoE, MLP, MoE]


def test_the_block_is_the_weighted_sum_of_its_experts(tiny_checkpoint: TinyCheckpoint, driver: ModuleType) -> None:
    """Against every expert applied to every row, and rows of one expert only among them."""
    runner = driver.make_runner(tiny_checkpoint("qwen3_moe"), backend="reference")
    block, moe = runner.model.layers[0].mlp, runner.config.moe
    slots = block.experts.slots
    x = torch.randn(11, 64)
    x[5:] = x[5]
    expected = torch.zeros(11, 64)
    ids, weights = select_experts(block.ops.router_logits(x, block.router), None, moe)
    for expert in range(8):
        gate_up, down = (part.slot_tensors(expert)[0] for part in (slots.gate_up, slots.down))
        gate, up = (x @ gate_up.T).chunk(2, dim=1)
        share = (weights * (ids == expert)).sum(dim=1, keepdim=True)
        expected += share * ((torch.nn.functional.silu(gate) * up) @ down.T)
    torch.testing.assert_close(block(x), expected, atol=1e-5, rtol=1e-5)
    assert block(x[:0]).shape == (0, 64)


def test_small_steps_are_programs_on_a_cpu(tiny_checkpoint: TinyCheckpoint, driver: ModuleType) -> None:
    """Which experts are visited, and by how many rows, is read as a program runs."""
    runner = driver.make_runner(tiny_checkpoint("qwen3_moe"))
    greedy(driver, runner, PROMPTS, None)
    assert runner.captured.replays > 10, runner.captured._capturer
