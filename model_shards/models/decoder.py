"""What all decoders share: embed, run this stage's layers, and turn hidden states into logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from shoal.kernels.ops import AttentionMetadata
from shoal.kernels.page_format import KVPages
from shoal.model_shards.models.config import ModelConfig
from shoal.model_shards.models.rotary import rotary_table
from shoal.model_shards.models.shapes import layer_shapes
from shoal.model_shards.models.stage import Stage
from shoal.model_shards.parallel.embedding import ParallelEmbedding, ParallelHead
from shoal.model_shards.parallel.loader import WeightLoader


class Layer(Protocol):
    """One layer. The residual stream is kept beside the branch so that adding it fuses with the next norm."""

    @property
    def mlp(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """What comes after attention: an MLP, or a choice of experts."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, pages: KVPages, meta: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [num_tokens, hidden], the stream so far (None before the first layer) -> (branch, stream)."""


LayerFactory = Callable[[ModelConfig, int, WeightLoader, torch.Tensor], Layer]
"""(config, layer index, loader, rotary table) -> Layer."""


class Decoder:
    """One pipeline stage of a decoder, loaded. A family is its `LayerFactory` and its `ModelConfig`."""

    def __init__(
        self, config: ModelConfig, stage: Stage, load: WeightLoader, num_positions: int, make_layer: LayerFactory
    ) -> None:
        """`num_positions`: the longest sequence that will run; sizes the rotary tables."""
        self.config = config
        self.stage = stage
        self.ops = load.ops
        tied = config.tie_embeddings
        size = (config.vocab_size, config.hidden_size)
        embedding_name, head_name = "model.embed_tokens.weight", "lm_head.weight"
        self.head = ParallelHead(load, embedding_name if tied else head_name, *size) if stage.is_last else None
        self.embedding = None
        if stage.is_first:
            self.embedding = ParallelEmbedding(load, embedding_name, *size, tied_to=self.head if tied else None)
        table = rotary_table(config, num_positions).to(load.device)
        local_table = table
        if config.rope_local_theta is not None:
            local_table = rotary_table(config, num_positions, local=True).to(load.device)
        self.layers: list[Layer] = [
            make_layer(config, layer, load, local_table if layer in config.sliding_layers else table)
            for layer in stage.layers
        ]
        if stage.is_last:
            self.final_norm = load.norm("model.norm.weight", config.hidden_size, config.norm_offset)
        # Trained in the weights' dtype, so the scale is rounded to it (Gemma: sqrt(640) is 25.25 in bf16).
        scale = config.embedding_scale
        self.embedding_scale = None if scale is None else torch.tensor(scale, dtype=load.dtype).item()

    def forward(self, inputs: torch.Tensor, pages: Sequence[KVPages], meta: AttentionMetadata) -> torch.Tensor:
        """Token ids [num_tokens] int64 on the first stage, else the previous stage's result -> the residual stream
        [held, hidden] after this stage: all rows, or this rank's share (`StepRows`). `pages`: one for each layer of
        this stage, in order."""
        x, residual = self._embed(inputs) if self.stage.is_first else inputs, None
        for layer, layer_pages in zip(self.layers, pages, strict=True):
            x, residual = layer(x, residual, layer_pages, meta)
        assert residual is not None
        return x + residual

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor | None:
        """hidden [num_tokens, hidden_size]: what the last stage's `forward` gave, or some rows of it; `rows` int64 [n]
        on its device: those that are asked for (None: all) -> fp32 [n, vocab_size] on the rank that samples, None on
        the stage's other ranks (which must call it too)."""
        assert self.head is not None, "only the last stage has a head"
        return self.head(self._final_norm(hidden, rows))

    def shard_logits(self, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Like `logits`, of this rank's shard of the vocabulary: [n, shard.padded] (see `ParallelHead`). No rank waits
        for another."""
        assert self.head is not None, "only the last stage has a head"
        return self.head.shard_logits(self._final_norm(hidden, rows))

    def _final_norm(self, hidden: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        if rows is None:
            return self.ops.rms_norm(hidden, self.final_norm, self.config.rms_eps)[0]
        return self.ops.rms_norm_rows(hidden, rows, self.final_norm, self.config.rms_eps)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        assert self.embedding is not None
        hidden = self.embedding(token_ids)
        return hidden if self.embedding_scale is None else hidden * self.embedding_scale


def checkpoint_names(config: ModelConfig, stage: Stage) -> frozenset[str]:
    """The tensors that a stage reads: what another stage's rank need not account for."""
    names = set()
    if stage.is_first or (stage.is_last and config.tie_embeddings):
        names.add("model.embed_tokens.weight")
    if stage.is_last:
        names.add("model.norm.weight")
        if not config.tie_embeddings:
            names.add("lm_head.weight")
    for layer in stage.layers:
        names.update(layer_shapes(config, layer).names())
    return frozenset(names)
