"""The linear layers that models are written with; with one rank they are plain (Shoeybi et al. 2019, arXiv:1909.08053).

Column layers split their output features, row layers their input features and sum over the ranks. How a weight is
stored is the business of `Ops.prepare_linear`; a layer only knows its slice.

Column layers begin with all rows of the step and row layers end with those that the rank holds: with sequence
parallelism (`StepRows`) a share of them, n stands for either below.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.model_shards.parallel.loader import WeightLoader
from shoal.model_shards.parallel.split import HeadSplit, split_evenly


class ColumnLinear:
    """Matrices [out, in] that share their input, each split by rows, run as one: x [n, in] -> [n, sum of parts].

    One name is a plain column layer; several (gate and up) give this rank's part of each, in order.
    """

    def __init__(
        self, load: WeightLoader, names: Sequence[str], out_features: int, in_features: int, *, bias: bool = False
    ) -> None:
        position = load.context.position
        rows = split_evenly(f"{names[0]}: output features", out_features, position.tp_size, position.tp_rank)
        weights = [load.matrix(f"{name}.weight", (out_features, in_features), rows) for name in names]
        biases = [load.vector(f"{name}.bias", out_features, rows) for name in names] if bias else []
        self.ops, self.context = load.ops, load.context
        self.weight = load.linear(weights, biases)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(self.context.whole_rows(x), self.weight)


class QKVLinear:
    """Query, key and value projections as one; `heads` says which heads are this rank's (KV heads may repeat)."""

    def __init__(
        self,
        load: WeightLoader,
        prefix: str,
        hidden_size: int,
        num_heads: tuple[int, int],
        head_dim: int,
        *,
        bias: bool,
    ) -> None:
        """`num_heads`: (query heads, KV heads) of the whole model. Reads `{prefix}.{q,k,v}_proj`."""
        position = load.context.position
        self.heads = HeadSplit.of_rank(*num_heads, position.tp_size, position.tp_rank)
        self.head_dim = head_dim
        weights, biases = [], []
        parts = (
            ("q", num_heads[0], self.heads.query),
            ("k", num_heads[1], self.heads.kv),
            ("v", num_heads[1], self.heads.kv),
        )
        for letter, total, mine in parts:
            rows = range(mine.start * head_dim, mine.stop * head_dim)
            weights.append(load.matrix(f"{prefix}.{letter}_proj.weight", (total * head_dim, hidden_size), rows))
            if bias:
                biases.append(load.vector(f"{prefix}.{letter}_proj.bias", total * head_dim, rows))
        self.ops, self.context = load.ops, load.context
        self.weight = load.linear(weights, biases)
        self._sizes = [self.heads.num_heads, self.heads.num_kv_heads, self.heads.num_kv_heads]

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [n, hidden] -> q [n, num_heads, head_dim], k and v [n, num_kv_heads, head_dim], views of one tensor."""
        x = self.context.whole_rows(x)
        heads = self.ops.linear(x, self.weight).view(x.shape[0], -1, self.head_dim)
        q, k, v = torch.split_with_sizes(heads, self._sizes, dim=1)
        return q, k, v


class RowLinear:
    """A matrix [out, in] split by columns: x [n, this rank's part of in] -> [n, out], summed over the ranks."""

    def __init__(
        self, load: WeightLoader, name: str, out_features: int, in_features: int, *, bias: bool = False
    ) -> None:
        position = load.context.position
        cols = split_evenly(f"{name}: input features", in_features, position.tp_size, position.tp_rank)
        weight = load.matrix(f"{name}.weight", (out_features, in_features), cols=cols)
        # Every rank reads the bias (so that every tensor is accounted for) but only one may add it to the sum.
        biases = [load.vector(f"{name}.bias", out_features)] if bias else []
        self.ops, self.context = load.ops, load.context
        self.weight = load.linear([weight], biases if position.tp_rank == 0 else [])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.context.sum_rows(self.ops.linear(x, self.weight))
