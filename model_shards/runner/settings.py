"""What one rank needs to know to run its part of a model. Made once, sent to every rank, never changed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.model_shards.parallel.mesh import MeshShape
from shoal.model_shards.weights.sources import ModelSource


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """Resolved: nothing here is "auto"."""

    model: ModelSource
    device: str
    """"cpu", "cuda" or "cuda:0"; with several ranks "cuda" means the rank's own GPU."""
    dtype: torch.dtype
    """Of the stored weights. What hidden states are kept in is the operators' choice."""
    kv_dtype: torch.dtype
    block_size: int
    """Tokens a page of a rank; a block has one on each context-parallel rank."""
    num_blocks: int
    """On every rank, the null block included."""
    max_num_batched_tokens: int
    """Tokens of one step at most."""
    max_num_seqs: int
    """Sequences that live on the ranks at once at most."""
    max_model_len: int
    """Tokens of one sequence at most, prompt and output."""
    weights: str = "dense"
    """"dense", "packed" or "int8", as in EngineConfig."""
    backend: str | None = None
    """Kernel backend by name; None: the fastest that serves the device and dtype."""
    num_threads: int | None = None
    """CPU threads a rank; None: the CPUs this process may use, shared out over the ranks."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_parallel: bool = False
    num_redundant_experts: int = 0
    expert_rebalance_interval: int = 0
    """Steps after which experts move to where their loads ask for; 0: never."""
    sequence_parallel_min_tokens: int = 0
    """Rows of a step from which they are scattered over the tensor-parallel ranks between layers; 0: never."""
    eos_token_ids: tuple[int, ...] = ()
    """Ends of a sequence that the tokenizer knows beyond those of the model's configuration: masked up to min_tokens
    like those."""

    @property
    def mesh(self) -> MeshShape:
        return MeshShape(
            self.tensor_parallel_size,
            self.pipeline_parallel_size,
            self.data_parallel_size,
            self.context_parallel_size,
            self.expert_parallel,
            self.num_redundant_experts,
        )

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @property
    def tokens_per_block(self) -> int:
        """In the pages of all context-parallel ranks together: what the scheduler calls a block."""
        return self.block_size * self.context_parallel_size

    @property
    def max_blocks_per_sequence(self) -> int:
        return -(-self.max_model_len // self.tokens_per_block)

    def to_wire(self) -> dict[str, Any]:
        """Plain values for msgpack."""
        wire = asdict(self)
        wire["model"] = [self.model.name, self.model.kind, str(self.model.path)]
        for name in ("dtype", "kv_dtype"):
            wire[name] = str(wire[name]).removeprefix("torch.")
        return wire

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> RunnerSettings:
        values = dict(wire)
        name, kind, path = values["model"]
        values["model"] = ModelSource(name, kind, Path(path))
        for field in ("dtype", "kv_dtype"):
            values[field] = getattr(torch, values[field])
        values["eos_token_ids"] = tuple(values["eos_token_ids"])
        return cls(**values)
