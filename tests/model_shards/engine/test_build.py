"""From settings to an engine: the memory plan, and what cannot be built."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shoal.configs.errors import ConfigError, ModelLoadError
from shoal.configs.resolve import Machine, ResolvedEngine, resolve_engine
from shoal.configs.schema import EngineConfig
from shoal.model_shards.engine.build import build_engine, plan_engine_memory
from shoal.model_shards.engine.machine import available_ram, measure_machine
from shoal.model_shards.engine.request import Request, RequestDelta
from shoal.model_shards.models.config import ModelConfig
from shoal.model_shards.quantization.schemes import DenseScheme
from shoal.model_shards.sampling.params import SamplingParams

if TYPE_CHECKING:
    from shoal.model_shards.weights.sources import ModelSource

MIB, GIB = 1 << 20, 1 << 30
BYTES_PER_TOKEN = 2 * 3 * 64 * 30 * 2
MODEL = ModelConfig(
    family="llama", hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, intermediate_size=1536,
    vocab_size=49152, max_position=8192, rms_eps=1e-5, rope_theta=1e5, tie_embeddings=True,
)  # fmt: skip
DENSE = DenseScheme(torch.bfloat16)


def resolved(ram: int = 16 * GIB, **settings: Any) -> ResolvedEngine:
    return resolve_engine(EngineConfig(model="m", **settings), Machine(0, ram))


def test_the_pool_is_what_the_settings_say() -> None:
    max_model_len, plan = plan_engine_memory(resolved(kv_cache_memory=512 * MIB), MODEL, DENSE)
    assert max_model_len == 8192
    assert plan.num_blocks == 512 * MIB // (16 * BYTES_PER_TOKEN)


def test_unasked_the_pool_takes_an_eighth_of_the_memory() -> None:
    max_model_len, plan = plan_engine_memory(resolved(ram=8 * GIB), MODEL, DENSE)
    assert max_model_len == 8192
    assert 0.99 * GIB < plan.kv_bytes <= GIB
    max_model_len, plan = plan_engine_memory(resolved(ram=1 * GIB), MODEL, DENSE)
    assert max_model_len == plan.num_tokens < 8192
    assert plan_engine_memory(resolved(ram=1 * GIB, max_model_len=8192), MODEL, DENSE)[1].full_sequences == 1


def test_no_more_is_taken_than_all_sequences_could_use() -> None:
    settings = resolved(ram=200 * GIB, max_num_seqs=4, max_model_len=256)
    assert plan_engine_memory(settings, MODEL, DENSE)[1].num_blocks == 4 * 16 + 1


def test_the_pool_is_what_the_budget_leaves() -> None:
    settings = resolved(memory_budget=2 * GIB)
    _, plan = plan_engine_memory(settings, MODEL, DENSE)
    assert sum(size for what, size, _ in plan.ledger if what in ("weights", "activations", "KV cache")) <= 2 * GIB
    assert plan.num_tokens * BYTES_PER_TOKEN > 0.9 * (2 * GIB - 800 * MIB)


def test_a_context_that_nobody_asked_for_shrinks_to_what_fits() -> None:
    max_model_len, plan = plan_engine_memory(resolved(kv_cache_memory=64 * MIB), MODEL, DENSE)
    assert max_model_len == plan.num_tokens < 8192
    assert plan.full_sequences == 1


def test_a_context_that_was_asked_for_is_kept_or_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=8192 tokens takes 512 blocks of 16") as caught:
        plan_engine_memory(resolved(kv_cache_memory=64 * MIB, max_model_len=8192), MODEL, DENSE)
    assert caught.value.param == "max_model_len"
    with pytest.raises(ConfigError, match=r"max_model_len=9000 is more than the model's context of 8192"):
        plan_engine_memory(resolved(max_model_len=9000), MODEL, DENSE)


def test_weights_that_do_not_fit_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"leave nothing of the memory budget of 512 MiB"):
        plan_engine_memory(resolved(memory_budget=512 * MIB), MODEL, DENSE)


def test_more_ranks_hold_less_each() -> None:
    one = plan_engine_memory(resolved(kv_cache_memory=512 * MIB), MODEL, DENSE)[1]
    for split in ({"tensor_parallel_size": 3}, {"pipeline_parallel_size": 2}):
        many = plan_engine_memory(resolved(kv_cache_memory=512 * MIB, **split), MODEL, DENSE)[1]
        assert many.bytes_per_token * (3 if "tensor_parallel_size" in split else 2) == one.bytes_per_token


def test_the_machine_is_measured() -> None:
    machine = measure_machine()
    assert 0 < machine.available_ram < 1 << 50
    assert abs(available_ram() - machine.available_ram) < 4 * GIB
    assert dataclasses.is_dataclass(machine)


@pytest.mark.parametrize("model", ["no-such-model", "./none.gguf", "scripted:./none.json"])
def test_a_model_that_is_not_there_is_told(model: str) -> None:
    with pytest.raises(ConfigError):
        build_engine(EngineConfig(model=model))


def test_a_corrupt_checkpoint_leaves_nothing_running(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(ModelLoadError):
        build_engine(EngineConfig(model=str(tmp_path / "broken.gguf")))


def test_ranks_know_the_ends_of_sequence_that_only_the_tokenizer_names(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Fine-tuned chat models often keep the base model's end in config.json: until min_tokens both are masked."""
    directory = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "tuned")
    for name in ("config.json", "generation_config.json"):
        path = directory / name
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "eos_token_id": 5}))
    engine = build_engine(EngineConfig(model=str(directory), kv_cache_memory=4 * MIB))
    prompt, sink = [65, 66, 67], _Collector()
    tokenizer_end = next(iter(set(engine.tokenizer.eos_token_ids) - {5}))
    bias = {tokenizer_end: 100.0}
    engine.start()
    engine.submit(
        Request("a", prompt, SamplingParams(temperature=0.0, max_tokens=6, min_tokens=3, logit_bias=bias), 0), sink
    )
    assert sink.ended.wait(20)
    engine.shutdown()
    assert len(sink.token_ids) == 4
    assert sink.token_ids.index(tokenizer_end) == 3


class _Collector:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.ended = threading.Event()

    def deliver(self, deltas: list[RequestDelta]) -> None:
        for delta in deltas:
            self.token_ids += delta.token_ids
            if delta.finish_reason is not None:
                self.ended.set()


@pytest.mark.real_model
def test_the_name_that_clients_use(smollm2: ModelSource, tmp_path: Path) -> None:
    script = tmp_path / "parrot.json"
    script.write_text('{"default": {"pieces": ["ok"]}, "tokenizer": "' + str(smollm2.path) + '"}')
    for given, expected in ((None, "parrot"), ("my-model", "my-model")):
        engine = build_engine(EngineConfig(model=f"scripted:{script}", served_model_name=given))
        assert engine.model_name == expected
        assert engine.max_model_len == 8192
        engine.shutdown()
