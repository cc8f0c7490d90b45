"""What a user may write about the engine. What was decided from it is another type: `resolve.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from shoal.configs.errors import ConfigError
from shoal.configs.units import parse_bytes

SCRIPTED = "scripted:"
"""What the name of a model that computes nothing begins with: its answers stand in a file."""

DType = Literal["auto", "float32", "bfloat16", "float16"]


def _to_bytes(value: Any) -> int:
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ValueError(error.message) from None


Bytes = Annotated[int, BeforeValidator(_to_bytes)]
"""A size: a number of bytes, or text such as "512MiB"."""


class EngineConfig(BaseModel):
    """One engine: a model, the memory it gets, and how it shares the machine out among requests."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1)
    """A known name ("smollm2-135m"), a .gguf file, a directory, a hub id, or "scripted:FILE.json"."""
    served_model_name: str | None = Field(default=None, min_length=1)
    """The name that clients use; None: the model's own."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: DType = "auto"
    """Of the stored weights. auto: bfloat16, everywhere (a CPU computes in float32 on weights stored so)."""
    weights: Literal["dense", "packed", "int8"] = "dense"
    """How matrices are kept. dense: in `dtype`. packed: what a GGUF file stores quantized stays so, the rest is dense.
    int8: all are rounded to 8 bits while loading. packed and int8 (CPU only) multiply activations of 8 bits."""
    kv_dtype: DType = "auto"
    """Of the KV cache. auto: as the weights."""
    backend: str | None = None
    """Kernel backend by name; None: the fastest that serves device and dtype."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads a rank; None: the CPUs this process may use, shared out over the ranks."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share each layer's matrices; on one node, since they talk after every matrix."""
    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Stages that share the layers out. As many micro-batches take turns in them, so that all are busy when so many
    sequences run."""
    data_parallel_size: int = Field(default=1, ge=1)
    """Parts that share the sequences out, each with KV memory and limits of its own; for models of experts, whose
    experts the parts have in common (with expert_parallel)."""
    context_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share the tokens of each sequence out: its prompt's attention and its KV cache."""
    expert_parallel: bool = False
    """Models of experts: each rank of a stage holds some experts whole, rather than a slice of each."""
    num_redundant_experts: int = Field(default=0, ge=0)
    """With expert_parallel: slots of each layer beyond one for each expert, for second copies of busy ones. Experts and
    these must divide by the ranks of a stage."""
    expert_rebalance_interval: int = Field(default=0, ge=0)
    """With expert_parallel: after every so many steps, experts move between ranks where their loads ask for it. 0:
    they stay where they are."""
    sequence_parallel_min_tokens: int | None = Field(default=None, ge=0)
    """Tokens of a step from which tensor-parallel ranks share the rows of norms and residuals out (sequence
    parallelism); on a GPU more than max_num_seqs. 0: never. None: never on a CPU, 1024 on a GPU, or what is more than
    max_num_seqs."""

    max_model_len: int | None = Field(default=None, ge=1)
    """Most tokens of one sequence, prompt and output. None: the model's context, or what the KV cache can hold."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Most sequences that run at once, in each data-parallel part. None: 64 on a CPU, 256 on a GPU."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Token budget of one step, for each data-parallel part (with stages: of one micro-batch); at least max_num_seqs.
    None: 256 on a CPU, 8192 on a GPU."""
    target_itl_ms: float | None = Field(default=None, ge=0)
    """Milliseconds between two tokens of a running sequence: pieces of prompts that join it in a step are cut so that
    the step takes no longer, as far as measured steps tell. But pieces get at least as much of a step as its decodes
    take. 0: not cut. None: 80 on a CPU, 0 on a GPU."""
    prefill_chunk_size: int | None = Field(default=None, ge=1)
    """Most prompt tokens of one sequence in a step. None: the whole budget."""
    max_partial_prefills: int = Field(default=4, ge=1)
    """Most prompts longer than a step that may be in their middle at once. In most steps the shortest rest comes first,
    so that a short prompt does not wait for the end of long ones; in every fourth, the order is the policy's."""

    block_size: int = Field(default=16, ge=1, le=1024)
    """Tokens a KV block, on each of the ranks that share a sequence (context_parallel_size)."""
    kv_cache_memory: Bytes | None = None
    """Size of the KV pool on each rank. None: what the budget leaves, but no more than max_num_seqs sequences of
    max_model_len could use, and on a CPU without a budget no more than an eighth of the available RAM."""
    memory_budget: Bytes | None = None
    """Weights, activations and KV pool of one rank together. None: `memory_fraction` of what is available."""
    memory_fraction: float | None = Field(default=None, gt=0, le=1)
    """None: 0.8 of the available RAM on a CPU, 0.9 of the free memory on a GPU."""
    enable_prefix_caching: bool = True

    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    max_waiting_requests: int = Field(default=1024, ge=1)
    """Sequences that may wait to start; more are refused with 503 (a request counts n)."""
    max_waiting_tokens: int = Field(default=1_000_000, ge=1)
    """Prompt tokens that may wait to start; more are refused with 503."""
    step_timeout_s: float = Field(default=300.0, gt=0)
    """A step that takes longer means that a rank hangs; the engine then stops."""

    @property
    def world_size(self) -> int:
        """Ranks of the model."""
        return (
            self.tensor_parallel_size
            * self.pipeline_parallel_size
            * self.data_parallel_size
            * self.context_parallel_size
        )


def parse_engine_config(values: Mapping[str, Any]) -> EngineConfig:
    """Raises ConfigError that names the first setting at fault, and lists the known ones for an unknown name."""
    try:
        return EngineConfig(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(key) for key in first["loc"])
        if first["type"] == "extra_forbidden":
            known = ", ".join(EngineConfig.model_fields)
            raise ConfigError(f"Unknown engine setting {name!r}; known settings: {known}.", param=name) from None
        raise ConfigError(f"Engine setting {name}: {first['msg']}; got {first['input']!r}.", param=name) from None
