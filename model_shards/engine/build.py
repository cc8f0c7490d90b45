"""Puts an engine together from its configuration: model, memory plan, executor, scheduler."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.configs.errors import ConfigError
from shoal.configs.resolve import ResolvedEngine, resolve_engine
from shoal.configs.schema import SCRIPTED, EngineConfig
from shoal.kvcache.manager import KVCacheManager
from shoal.model_shards.engine.admission import AdmissionLimits
from shoal.model_shards.engine.engine import Engine, EngineSettings
from shoal.model_shards.engine.metrics import MetricsSink
from shoal.model_shards.engine.pacing import StepPacer
from shoal.model_shards.engine.parts import SchedulerParts
from shoal.model_shards.engine.policy import make_policy
from shoal.model_shards.engine.scheduler import Scheduler, SchedulerSettings
from shoal.model_shards.executor.source import RankSource, ThisMachine

if TYPE_CHECKING:
    from shoal.kvcache.planner import MemoryPlan, MemoryRequest
    from shoal.model_shards.executor.base import Executor
    from shoal.model_shards.models.config import ModelConfig
    from shoal.model_shards.quantization.schemes import WeightScheme
    from shoal.model_shards.runner.settings import RunnerSettings
    from shoal.model_shards.tokenizer.tokenizer import Tokenizer
    from shoal.model_shards.weights.checkpoint import Checkpoint
    from shoal.model_shards.weights.sources import ModelSource

logger = logging.getLogger(__name__)

_SCRIPTED_CONTEXT = 8192
"""Default context of a scripted model, which has none of its own."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What differs between a real and a scripted model."""

    name: str
    executor: Executor
    tokenizer: Tokenizer
    max_model_len: int
    num_blocks: int
    namespace: bytes
    eos_token_ids: frozenset[int]
    steps_in_flight: int = 2
    micro_batches: int = 1
    memory_plan: MemoryPlan | None = None


def build_engine(config: EngineConfig, metrics: MetricsSink | None = None, ranks: RankSource | None = None) -> Engine:
    """Loads the model and starts its ranks, on this machine unless `ranks` says where; the caller starts the engine.
    Raises ConfigError or ModelLoadError, with nothing left running."""
    ranks = ranks or ThisMachine()
    try:
        settings = resolve_engine(config, ranks.machine())
        loaded = _scripted(settings) if settings.model.startswith(SCRIPTED) else _real(settings, ranks)
    except BaseException:
        ranks.close()
        raise
    try:
        return _assemble(settings, loaded, metrics)
    except BaseException:
        loaded.executor.close()
        raise


def _assemble(settings: ResolvedEngine, loaded: _Loaded, metrics: MetricsSink | None) -> Engine:
    seq_ids = itertools.count()
    schedulers = [_make_scheduler(settings, loaded, seq_ids) for _ in range(settings.data_parallel_size)]
    return Engine(
        loaded.executor,
        schedulers[0] if len(schedulers) == 1 else SchedulerParts(schedulers),
        loaded.tokenizer,
        EngineSettings(
            model_name=settings.served_model_name or loaded.name,
            admission=AdmissionLimits(settings.max_waiting_requests, settings.max_waiting_tokens),
            step_timeout_s=settings.step_timeout_s,
            steps_in_flight=loaded.steps_in_flight,
        ),
        metrics=metrics,
        memory_plan=loaded.memory_plan,
    )


def _make_scheduler(settings: ResolvedEngine, loaded: _Loaded, seq_ids: Iterator[int]) -> Scheduler:
    """Of one data-parallel part. Between two tokens of a sequence each micro-batch runs once."""
    target_s = settings.target_itl_ms / 1e3 / loaded.micro_batches
    return Scheduler(
        SchedulerSettings(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=loaded.max_model_len,
            eos_token_ids=loaded.eos_token_ids,
            prefill_chunk_size=settings.prefill_chunk_size,
            max_partial_prefills=settings.max_partial_prefills,
            micro_batches=loaded.micro_batches,
        ),
        KVCacheManager(
            loaded.num_blocks,
            settings.tokens_per_block,
            enable_prefix_caching=settings.enable_prefix_caching,
            namespace=loaded.namespace,
        ),
        make_policy(settings.scheduling_policy),
        StepPacer(target_s) if target_s else None,
        seq_ids=seq_ids,
    )


def _scripted(settings: ResolvedEngine) -> _Loaded:
    from shoal.model_shards.executor.script_file import encode_scripts, read_script_file
    from shoal.model_shards.executor.scripted import ScriptedExecutor
    from shoal.model_shards.tokenizer.tokenizer import load_tokenizer
    from shoal.model_shards.weights.sources import resolve_model

    path = Path(settings.model.removeprefix(SCRIPTED)).expanduser()
    file = read_script_file(path)
    tokenizer = load_tokenizer(resolve_model(file.tokenizer))
    executor = ScriptedExecutor(encode_scripts(path, file, tokenizer), tokenizer)
    max_model_len = settings.max_model_len or _SCRIPTED_CONTEXT
    # Blocks without pages cost nothing: enough that no sequence ever waits for one.
    blocks_per_sequence = -(-max_model_len // settings.block_size)
    return _Loaded(
        name=path.stem,
        executor=executor,
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        num_blocks=1 + settings.max_num_seqs * blocks_per_sequence,
        namespace=b"scripted",
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        steps_in_flight=executor.steps_in_flight,
    )


def _real(settings: ResolvedEngine, ranks: RankSource) -> _Loaded:
    from shoal.model_shards.tokenizer.tokenizer import load_tokenizer
    from shoal.model_shards.weights.open import open_checkpoint
    from shoal.model_shards.weights.sources import resolve_model

    source = resolve_model(settings.model)
    checkpoint = open_checkpoint(source)
    model = checkpoint.config
    max_model_len, plan = plan_engine_memory(settings, model, weight_scheme(settings, checkpoint))
    logger.info("memory of one rank for %s:\n%s", source.name, plan.render())
    # The tokenizer before the weights: it is the quicker one to find something wrong.
    tokenizer = load_tokenizer(source)
    runner = _runner_settings(settings, source, max_model_len, plan.num_blocks, tokenizer.eos_token_ids)
    return _Loaded(
        name=source.name,
        executor=ranks.start(runner, settings.step_timeout_s),
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        num_blocks=plan.num_blocks,
        namespace=_namespace(settings, source),
        memory_plan=plan,
        eos_token_ids=frozenset(model.eos_token_ids) | frozenset(tokenizer.eos_token_ids),
        micro_batches=settings.pipeline_parallel_size,
        # One more than take turns: its plan is with the first stage when the tokens that it needs come out of the last.
        steps_in_flight=settings.pipeline_parallel_size + 1,
    )


def weight_scheme(settings: ResolvedEngine, checkpoint: Checkpoint) -> WeightScheme:
    """How the matrices will be kept. Raises ConfigError when the checkpoint does not allow it."""
    import torch

    from shoal.model_shards.quantization.schemes import make_scheme

    return make_scheme(settings.weights, getattr(torch, settings.dtype), checkpoint)


def plan_engine_memory(settings: ResolvedEngine, model: ModelConfig, scheme: WeightScheme) -> tuple[int, MemoryPlan]:
    """(max_model_len, the plan). Raises ConfigError, with the arithmetic, when the settings do not fit."""
    from shoal.kvcache.planner import plan_memory

    asked = settings.max_model_len
    if asked is not None and asked > model.max_position:
        raise ConfigError(
            f"max_model_len={asked} is more than the model's context of {model.max_position} tokens.",
            param="max_model_len",
        )
    block_size = settings.tokens_per_block
    request = _memory_request(settings, model, scheme)
    largest = plan_memory(request)
    blocks = largest.num_blocks
    if settings.kv_cache_limit is not None:
        wanted = -(-(asked or 1) // block_size) + 1
        blocks = min(blocks, max(wanted, settings.kv_cache_limit // largest.bytes_per_block))
    max_model_len = asked or min(model.max_position, (blocks - 1) * block_size)
    if asked is None and max_model_len < model.max_position:
        logger.warning(
            "max_model_len is %d: the KV cache cannot hold the model's %d tokens", max_model_len, model.max_position
        )
    if settings.kv_cache_memory is None:
        blocks = min(blocks, settings.max_num_seqs * -(-max_model_len // block_size) + 1)
    pool = blocks * largest.bytes_per_block
    return max_model_len, plan_memory(replace(request, max_model_len=max_model_len, kv_bytes=pool))


def _memory_request(settings: ResolvedEngine, model: ModelConfig, scheme: WeightScheme) -> MemoryRequest:
    """For the context that was asked for; else for one block, since the planner is to say what fits."""
    import torch

    from shoal.kvcache.planner import MemoryRequest
    from shoal.model_shards.models.stage import cut_stages
    from shoal.model_shards.parallel.mesh import MeshShape
    from shoal.model_shards.runner import footprint

    dtype, kv_dtype = getattr(torch, settings.dtype), getattr(torch, settings.kv_dtype)
    activation_dtype = torch.float32 if settings.device == "cpu" else dtype
    mesh = MeshShape(
        settings.tensor_parallel_size,
        settings.pipeline_parallel_size,
        settings.data_parallel_size,
        settings.context_parallel_size,
        settings.expert_parallel,
        settings.num_redundant_experts,
    )
    layers = max((stage.layers for stage in cut_stages(model, mesh.pp_size)), key=len)
    limits = footprint.StepLimits(
        device=settings.device,
        activation_dtype=activation_dtype,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len or model.max_position,
        block_size=settings.block_size,
    )
    return MemoryRequest(
        specs=footprint.kv_specs(model, layers, kv_dtype, mesh.tp_size),
        block_size=settings.block_size,
        max_model_len=settings.max_model_len or settings.tokens_per_block,
        max_num_seqs=settings.max_num_seqs,
        weights_bytes=footprint.weights_bytes(model, scheme, mesh),
        activation_bytes=footprint.activation_bytes(model, limits, mesh),
        total_bytes=settings.memory_budget,
        kv_bytes=settings.kv_cache_memory,
        context_parallel_size=mesh.cp_size,
    )


def _runner_settings(
    settings: ResolvedEngine, source: ModelSource, max_model_len: int, num_blocks: int, eos_token_ids: tuple[int, ...]
) -> RunnerSettings:
    import torch

    from shoal.model_shards.runner.settings import RunnerSettings

    return RunnerSettings(
        model=source,
        device=settings.device,
        dtype=getattr(torch, settings.dtype),
        weights=settings.weights,
        kv_dtype=getattr(torch, settings.kv_dtype),
        block_size=settings.block_size,
        num_blocks=num_blocks,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=max_model_len,
        backend=settings.backend,
        num_threads=settings.num_threads,
        tensor_parallel_size=settings.tensor_parallel_size,
        pipeline_parallel_size=settings.pipeline_parallel_size,
        data_parallel_size=settings.data_parallel_size,
        context_parallel_size=settings.context_parallel_size,
        expert_parallel=settings.expert_parallel,
        num_redundant_experts=settings.num_redundant_experts,
        expert_rebalance_interval=settings.expert_rebalance_interval,
        sequence_parallel_min_tokens=settings.sequence_parallel_min_tokens,
        eos_token_ids=eos_token_ids,
    )


def _namespace(settings: ResolvedEngine, source: ModelSource) -> bytes:
    """Root of the prefix hashes: which weights and which KV format. A file's size and time stand for its contents."""
    parts = [source.name, settings.dtype, settings.weights, settings.kv_dtype, str(settings.block_size)]
    parts += [str(settings.context_parallel_size), settings.device]
    files = sorted(source.path.glob("*.safetensors")) if source.path.is_dir() else [source.path]
    for file in files:
        status = file.stat()
        parts += [file.name, str(status.st_size), str(status.st_mtime_ns)]
    return hashlib.sha256("\0".join(parts).encode()).digest()
