"""What was decided from the user's settings and the machine: frozen, made once, nothing in it is "auto"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.configs.errors import ConfigError
from shoal.configs.schema import EngineConfig
from shoal.configs.units import format_bytes

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured, or is planned for; of several machines, the least that one of them has."""

    num_gpus: int
    """Of all machines together."""
    available_ram: int
    """Bytes that this process may still use, its container's limit included."""
    free_gpu_memory: int = 0
    """Bytes free on the fullest GPU that would be used."""
    ranks: int | None = None
    """How many share the RAM; None: all of the engine's."""


@dataclass(frozen=True, slots=True)
class _DeviceDefaults:
    max_num_seqs: int
    max_num_batched_tokens: int
    target_itl_ms: float
    memory_fraction: float
    kv_fraction: float
    sequence_parallel_min_tokens: int


_AUTO_DTYPE = "bfloat16"
"""What models are trained in. A CPU computes in float32 on weights and pages stored so: half the bytes to read."""


_DEFAULTS: dict[Device, _DeviceDefaults] = {
    # A CPU's products are nearly as fast with 16 rows as with 256, and a running stream waits for whole steps: on two
    # cores 256 tokens of a 100 M model take a third of a second, so steps are cut to a time while a sequence decodes.
    # A GPU needs thousands of rows to be busy, and takes some ten milliseconds for them.
    # The KV cache fills up with prefixes whatever is asked of it, and a laptop has other things to do: an eighth of
    # its memory. A GPU has nothing else to do.
    # Two halves of a sum send what the sum sends, but wait twice: small steps, whose norms are cheap, go without. Over
    # gloo the second wait takes more than the norms of a CPU's steps (two ranks, 256 rows of 576: 0.8 ms of CPU time
    # against 0.03 ms).
    "cpu": _DeviceDefaults(64, 256, 80.0, 0.8, 0.125, 0),
    "cuda": _DeviceDefaults(256, 8192, 0.0, 0.9, 1.0, 1024),
}


@dataclass(frozen=True, slots=True)
class ResolvedEngine:
    """One engine, decided. Byte counts are of one rank."""

    model: str
    served_model_name: str | None
    device: Device
    dtype: str
    weights: str
    kv_dtype: str
    backend: str | None
    num_threads: int | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    context_parallel_size: int
    expert_parallel: bool
    num_redundant_experts: int
    expert_rebalance_interval: int
    """Steps; 0: never."""
    sequence_parallel_min_tokens: int
    """0: never."""
    max_model_len: int | None
    """None: the planner decides, up to the model's own context."""
    max_num_seqs: int
    max_num_batched_tokens: int
    target_itl_ms: float
    """0: steps are not bounded in time."""
    prefill_chunk_size: int | None
    max_partial_prefills: int
    block_size: int
    kv_cache_memory: int | None
    memory_budget: int | None
    """None only where `kv_cache_memory` alone decides: the user gave it and no budget."""
    kv_cache_limit: int | None
    """Most that the KV pool takes of the budget of its own accord; None: all that is left, or `kv_cache_memory`."""
    enable_prefix_caching: bool
    scheduling_policy: str
    max_waiting_requests: int
    max_waiting_tokens: int
    step_timeout_s: float

    @property
    def tokens_per_block(self) -> int:
        """Of the scheduler's blocks: each has a page of `block_size` tokens on every context-parallel rank."""
        return self.block_size * self.context_parallel_size


def resolve_engine(config: EngineConfig, machine: Machine) -> ResolvedEngine:
    """Fills every gap. Raises ConfigError for settings that contradict each other or the machine."""
    device = _device(config, machine)
    defaults = _DEFAULTS[device]
    dtype = _AUTO_DTYPE if config.dtype == "auto" else config.dtype
    max_num_seqs = config.max_num_seqs or defaults.max_num_seqs
    return ResolvedEngine(
        model=config.model,
        served_model_name=config.served_model_name,
        device=device,
        dtype=dtype,
        weights=_weights(config, device),
        kv_dtype=dtype if config.kv_dtype == "auto" else config.kv_dtype,
        backend=config.backend,
        num_threads=config.num_threads,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        data_parallel_size=config.data_parallel_size,
        context_parallel_size=config.context_parallel_size,
        expert_parallel=config.expert_parallel,
        num_redundant_experts=_with_expert_parallel(config, "num_redundant_experts"),
        expert_rebalance_interval=_with_expert_parallel(config, "expert_rebalance_interval"),
        sequence_parallel_min_tokens=_sequence_parallel_min_tokens(config, defaults, device, max_num_seqs),
        max_model_len=config.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=_token_budget(config, defaults, max_num_seqs),
        target_itl_ms=defaults.target_itl_ms if config.target_itl_ms is None else config.target_itl_ms,
        prefill_chunk_size=config.prefill_chunk_size,
        max_partial_prefills=config.max_partial_prefills,
        block_size=config.block_size,
        kv_cache_memory=config.kv_cache_memory,
        memory_budget=_memory_budget(config, _available(config, machine, device), defaults),
        kv_cache_limit=_kv_cache_limit(config, _available(config, machine, device), defaults),
        enable_prefix_caching=config.enable_prefix_caching,
        scheduling_policy=config.scheduling_policy,
        max_waiting_requests=config.max_waiting_requests,
        max_waiting_tokens=config.max_waiting_tokens,
        step_timeout_s=config.step_timeout_s,
    )


def _device(config: EngineConfig, machine: Machine) -> Device:
    if config.device == "auto":
        return "cuda" if machine.num_gpus else "cpu"
    ranks = config.world_size
    if config.device == "cuda" and machine.num_gpus < ranks:
        raise ConfigError(
            f"device is cuda and {ranks} ranks need a GPU each, but {machine.num_gpus} are visible. Set device to cpu, "
            "or lower the parallel sizes.",
            param="device",
        )
    return config.device


def _weights(config: EngineConfig, device: Device) -> str:
    if config.weights != "dense" and device != "cpu":
        raise ConfigError(
            f"weights is {config.weights}, which only the CPU's operators can multiply; the device is {device}. "
            "Set weights to dense, or device to cpu.",
            param="weights",
        )
    return config.weights


def _with_expert_parallel(config: EngineConfig, name: str) -> int:
    value: int = getattr(config, name)
    if value and not config.expert_parallel:
        raise ConfigError(
            f"{name} is {value}, but expert_parallel is off: ranks then hold a slice of every expert, and none can "
            f"have a second copy or move. Set expert_parallel to true, or {name} to 0.",
            param=name,
        )
    return value


def _token_budget(config: EngineConfig, defaults: _DeviceDefaults, max_num_seqs: int) -> int:
    budget = config.max_num_batched_tokens
    if budget is None:
        return max(defaults.max_num_batched_tokens, max_num_seqs)
    if budget < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens={budget} is less than max_num_seqs={max_num_seqs}: every running sequence needs "
            "one token of a step. Raise the first or lower the second.",
            param="max_num_batched_tokens",
        )
    return budget


def _sequence_parallel_min_tokens(
    config: EngineConfig, defaults: _DeviceDefaults, device: Device, max_num_seqs: int
) -> int:
    """On a GPU decode steps are graphs, made for rows that every rank has."""
    asked = config.sequence_parallel_min_tokens
    if asked is None:
        default = defaults.sequence_parallel_min_tokens
        return max(default, max_num_seqs + 1) if default else 0
    if device == "cuda" and 0 < asked <= max_num_seqs:
        raise ConfigError(
            f"sequence_parallel_min_tokens={asked} must be more than max_num_seqs={max_num_seqs} on a GPU: steps of "
            "decodes alone are captured without it. Raise the first or set it to 0.",
            param="sequence_parallel_min_tokens",
        )
    return asked


def _available(config: EngineConfig, machine: Machine, device: Device) -> int:
    """Bytes that one rank may use."""
    if device == "cuda":
        return machine.free_gpu_memory
    return machine.available_ram // (machine.ranks or config.world_size)


def _memory_budget(config: EngineConfig, available: int, defaults: _DeviceDefaults) -> int | None:
    if config.memory_budget is not None:
        if config.memory_budget > available:
            raise ConfigError(
                f"memory_budget is {format_bytes(config.memory_budget)}, but only {format_bytes(available)} are "
                "available to a rank.",
                param="memory_budget",
            )
        return config.memory_budget
    if config.kv_cache_memory is not None and config.memory_fraction is None:
        return None
    return int(available * (config.memory_fraction or defaults.memory_fraction))


def _kv_cache_limit(config: EngineConfig, available: int, defaults: _DeviceDefaults) -> int | None:
    """Whoever sets a budget, a share or a size wants it used."""
    asked = (config.kv_cache_memory, config.memory_budget, config.memory_fraction)
    return int(available * defaults.kv_fraction) if all(value is None for value in asked) else None
