"""Schemes: what is kept quantized, what it weighs, and that a model on it does not depend on batching."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import gguf
import pytest
import torch

from shoal.configs.errors import ConfigError, ModelLoadError
from shoal.kernels.cpu.quantized import PackedQuantizedWeight
from shoal.kernels.ops import HeadNorms, LinearWeight
from shoal.kernels.registry import select_ops
from shoal.model_shards.executor.multiprocess import MultiprocessExecutor
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.parallel.mesh import MeshShape
from shoal.model_shards.quantization.schemes import make_scheme
from shoal.model_shards.runner.footprint import weights_bytes
from shoal.model_shards.runner.loading import load_stage
from shoal.model_shards.runner.settings import RunnerSettings
from shoal.model_shards.weights.open import open_checkpoint
from shoal.model_shards.weights.sources import ModelSource

if TYPE_CHECKING:
    from shoal.model_shards.models.decoder import Decoder

TinyGGUF = Callable[..., tuple[Path, Path]]
Quant = gguf.GGMLQuantizationType
CPU = torch.device("cpu")
PROMPTS = [[65, 66, 67], list(range(10, 60)), [200] * 17, [5], [7, 8], list(range(100, 140)), [9], [1, 2, 3]]


@pytest.fixture(autouse=True)
def native() -> None:
    if select_ops(CPU, torch.float32).name != "cpu":
        pytest.skip("no native unit here (no C++ compiler, or SHOAL_NATIVE=0)")


def linear_weights(value: Any, found: dict[int, Any]) -> dict[int, Any]:
    """Every linear weight and tensor that a model object reaches, tables of angles apart."""
    if isinstance(value, LinearWeight | torch.Tensor):
        found[id(value)] = value
    elif isinstance(value, list):
        for item in value:
            linear_weights(item, found)
    elif isinstance(value, HeadNorms):
        linear_weights([value.q_weight, value.k_weight], found)
    elif type(value).__module__.startswith(("shoal.model_shards.models", "shoal.model_shards.parallel")):
        for name, item in getattr(value, "__dict__", {}).items():
            if name != "cos_sin":
                linear_weights(item, found)
    return found


class Agreeing(ParallelContext):
    """One rank without the others, which say what it says. Layers send nothing while they are loaded."""

    def tell_all(self, message: Any) -> list[Any]:
        return [message] * self.position.world_size


def load_rank(settings: RunnerSettings, rank: int, tp: int) -> Decoder:
    groups: Any = None if tp == 1 else object()
    return load_stage(settings, Agreeing(MeshShape(tp).position(rank), groups), CPU)


def foretold(settings: RunnerSettings, tp: int) -> int:
    checkpoint = open_checkpoint(settings.model)
    return weights_bytes(checkpoint.config, make_scheme(settings.weights, settings.dtype, checkpoint), MeshShape(tp))


@pytest.mark.parametrize("weights", ["packed", "int8"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("family", "kind", "overrides"),
    [
        ("llama", Quant.Q4_1, {}),
        ("llama", Quant.Q4_0, {"tie_word_embeddings": True}),
        ("qwen2", Quant.Q8_0, {"num_hidden_layers": 1}),
        ("qwen3", Quant.Q5_1, {"num_key_value_heads": 4}),
    ],
)
def test_bytes_foretold_are_the_bytes_held(
    tiny_gguf: TinyGGUF, driver: ModuleType, weights: str, tp: int, family: str, kind: Quant, overrides: dict[str, Any]
) -> None:
    path, _ = tiny_gguf(family, matrices=kind, **overrides)
    settings = driver.settings_for(path, weights=weights, dtype=torch.bfloat16)
    for rank in range(tp):
        held = linear_weights(load_rank(settings, rank, tp), {}).values()
        assert sum(part.nbytes for part in held) == foretold(settings, tp)
        assert not any(isinstance(part, LinearWeight) and not isinstance(part, PackedQuantizedWeight) for part in held)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", [Quant.Q4_1, Quant.Q8_0])
def test_ranks_hold_the_slices_of_the_whole(tiny_gguf: TinyGGUF, driver: ModuleType, tp: int, kind: Quant) -> None:
    path, _ = tiny_gguf("llama", matrices=kind)
    settings = driver.settings_for(path, weights="packed")
    checkpoint = open_checkpoint(settings.model)
    whole = {name: checkpoint.read(name, torch.float32) for name in checkpoint.names()}
    prefix = "model.layers.1"
    for rank in range(tp):
        layer: Any = load_rank(settings, rank, tp).layers[1]

        def held(weight: LinearWeight) -> torch.Tensor:
            return weight.rows(torch.arange(weight.out_features))

        qkv = [whole[f"{prefix}.self_attn.{name}_proj.weight"].chunk(tp)[rank] for name in "qkv"]
        assert torch.equal(held(layer.attention.qkv.weight), torch.cat(qkv))
        down = whole[f"{prefix}.mlp.down_proj.weight"].chunk(tp, dim=1)[rank]
        assert torch.equal(held(layer.mlp.down.weight), down)


def test_slices_that_cut_a_group_and_mixed_parts_are_dense(
    tiny_gguf: TinyGGUF, driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = tiny_gguf("llama", matrices=Quant.Q4_1)
    settings = driver.settings_for(path, weights="packed")
    model = load_rank(settings, 1, 4)  # 64 / 4 = 16 of the attention's columns, 128 / 4 = 32 of the MLP's
    layer: Any = model.layers[0]
    assert not isinstance(layer.attention.output.weight, PackedQuantizedWeight)
    assert isinstance(layer.mlp.down.weight, PackedQuantizedWeight)
    checkpoint = open_checkpoint(settings.model)
    packed = weights_bytes(checkpoint.config, make_scheme("packed", torch.bfloat16, checkpoint))
    usual = type(checkpoint).quant_format
    monkeypatch.setattr(type(checkpoint), "quant_format", lambda c, name: None if "up_proj" in name else usual(c, name))
    mixed = weights_bytes(checkpoint.config, make_scheme("packed", torch.bfloat16, checkpoint))
    # Gate and up are one operator, 2 * 128 x 64: when one of them is dense, both are.
    elements = 3 * 2 * 128 * 64
    assert mixed - packed == elements * 2 - elements * 20 // 32
    held = linear_weights(load_rank(replace(settings, dtype=torch.bfloat16), 0, 1), {}).values()
    assert sum(part.nbytes for part in held) == mixed


@pytest.mark.parametrize("weights", ["packed", "int8"])
def test_logits_are_near_those_of_the_numbers_held(tiny_gguf: TinyGGUF, driver: ModuleType, weights: str) -> None:
    """The reference backend multiplies the same matrices, dequantized, with activations that are not rounded."""
    path, _ = tiny_gguf("llama", matrices=Quant.Q4_1)
    logits = []
    for backend in ("cpu", "reference"):
        runner = driver.make_runner(path, weights=weights, backend=backend)
        seen = driver.watch_hidden(runner)
        driver.generate(runner.execute, runner.settings, [PROMPTS[1]], 1)
        logits.append(driver.all_logits(runner, seen))
    native_logits, expected = logits
    assert 0 < (native_logits - expected).abs().mean() < 0.05 * expected.std()


@pytest.mark.parametrize("weights", ["packed", "int8"])
@pytest.mark.parametrize("chunk_size", [1, 7, 16, None])
def test_a_batch_draws_what_each_sequence_draws_alone(
    tiny_gguf: TinyGGUF, driver: ModuleType, weights: str, chunk_size: int | None
) -> None:
    path, _ = tiny_gguf("llama", matrices=Quant.Q4_1)

    def draw(prompts: list[list[int]], chunk: int | None) -> list[list[int]]:
        runner = driver.make_runner(path, weights=weights, dtype=torch.bfloat16)
        tokens: list[list[int]] = driver.generate(runner.execute, runner.settings, prompts, 12, chunk_size=chunk)
        return tokens

    assert draw(PROMPTS, chunk_size) == [draw([prompt], None)[0] for prompt in PROMPTS]


def test_two_ranks_draw_the_tokens_of_one(tiny_gguf: TinyGGUF, driver: ModuleType) -> None:
    path, _ = tiny_gguf("llama", matrices=Quant.Q4_1)
    runner = driver.make_runner(path, weights="packed")
    expected = driver.generate(runner.execute, runner.settings, PROMPTS, 8)
    executor = MultiprocessExecutor(replace(runner.settings, tensor_parallel_size=2))
    try:
        drawn = driver.generate(lambda plan: executor.submit(plan).result(120), runner.settings, PROMPTS, 8)
    finally:
        executor.close()
    assert drawn == expected


def test_int8_of_safetensors(tiny_checkpoint: Callable[..., Path], driver: ModuleType) -> None:
    path = tiny_checkpoint("qwen2")
    settings = driver.settings_for(path, weights="int8")
    assert sum(part.nbytes for part in linear_weights(load_rank(settings, 0, 1), {}).values()) == foretold(settings, 1)
    with pytest.raises(ConfigError, match="stores no matrix quantized"):
        driver.make_runner(path, weights="packed")


@pytest.mark.parametrize("weights", ["packed", "int8"])
def test_every_tensor_is_accounted_for(
    tiny_gguf: TinyGGUF, driver: ModuleType, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    from shoal.model_shards.weights.gguf_checkpoint import GGUFCheckpoint

    path, _ = tiny_gguf("llama", matrices=Quant.Q8_0)
    start = GGUFCheckpoint.__init__

    def damaged(self: Any, file: Any, threads: int) -> None:
        start(self, file, threads)
        del self._tensors["model.layers.0.mlp.up_proj.weight"]
        self._tensors["model.layers.9.extra.weight"] = self._tensors["lm_head.weight"]
        self._tensors["model.layers.1.mlp.down_proj.weight"] = self._tensors["lm_head.weight"]

    monkeypatch.setattr(GGUFCheckpoint, "__init__", damaged)
    with pytest.raises(ModelLoadError) as caught:
        driver.make_runner(path, weights=weights)
    for part in (
        "1 tensors missing (model.layers.0.mlp.up_proj.weight)",
        "1 tensors unexpected (model.layers.9.extra.weight)",
        "1 tensors of the wrong shape (model.layers.1.mlp.down_proj.weight",
    ):
        assert part in caught.value.message


def test_numbers_that_int8_cannot_hold_are_named(
    tiny_checkpoint: Callable[..., Path], driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.model_shards.weights.safetensors_dir import SafetensorsCheckpoint

    usual = SafetensorsCheckpoint.read

    def spoiled(self: Any, name: str, *arguments: Any) -> torch.Tensor:
        values = usual(self, name, *arguments)
        return values.fill_(torch.nan) if name.endswith("1.mlp.up_proj.weight") else values

    monkeypatch.setattr(SafetensorsCheckpoint, "read", spoiled)
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.up_proj\.weight cannot be quantized"):
        driver.make_runner(tiny_checkpoint("llama"), weights="int8")


@pytest.mark.real_model
def test_smollm2_packed_is_the_same_under_every_batching(smollm2: ModelSource) -> None:
    """Alone, eight at once, in chunks, and from the prefix cache."""
    from shoal.model_shards.llm import LLM
    from shoal.model_shards.sampling.params import SamplingParams

    topics = ["volcanoes", "the sea", "bread", "prime numbers", "trains", "winter", "owls", "salt"]
    prompts = [f"Tell me in one sentence what is known about {topic} in the year 1900.\nAnswer:" for topic in topics]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    options: dict[str, Any] = {"weights": "packed", "kv_cache_memory": 64 << 20, "max_model_len": 256}

    def texts(answers: list[Any]) -> list[list[int]]:
        return [answer.outputs[0].token_ids for answer in answers]

    with LLM(str(smollm2.path), **options) as llm:
        alone = [texts(llm.generate([prompt], params))[0] for prompt in prompts]
        warm = llm.generate(prompts, params)
        assert texts(warm) == alone
        assert all(answer.num_cached_tokens >= 16 for answer in warm)
    with LLM(str(smollm2.path), prefill_chunk_size=5, enable_prefix_caching=False, **options) as llm:
        assert texts(llm.generate(prompts, params)) == alone
