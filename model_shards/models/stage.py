"""Which layers a pipeline stage holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from math import inf

from shoal.configs.errors import ConfigError
from shoal.model_shards.models.config import ModelConfig
from shoal.model_shards.models.shapes import layer_shapes


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers [start, stop) of `num_layers`. The first stage also embeds; the last also has the final norm and head."""

    start: int
    stop: int
    num_layers: int

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.stop == self.num_layers

    @property
    def layers(self) -> range:
        return range(self.start, self.stop)


def layer_parameters(config: ModelConfig, layer: int) -> int:
    """Matrix elements of one layer, over all ranks (norms and biases are under a thousandth)."""
    shapes = layer_shapes(config, layer)
    projections = chain(shapes.projections, *shapes.experts)
    matrices = [matrix for projection in projections for matrix in projection.matrices]
    matrices += shapes.unpacked + ([] if shapes.router is None else [shapes.router])
    return sum(matrix.out_features * matrix.in_features for matrix in matrices)


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """(all, those that one token visits: of a layer's experts only its choice). Matrices, embedding and head."""
    tables = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    total = sum(_layer_weights(config)) + tables
    if config.moe is None:
        return total, total
    idle = config.moe.num_experts - config.moe.experts_per_token
    expert = 3 * config.hidden_size * config.moe.expert_size
    return total, total - (config.num_layers - len(config.moe.dense_layers)) * idle * expert


def cut_stages(config: ModelConfig, pp_size: int) -> list[Stage]:
    """Contiguous stages with the heaviest as light as can be (and then all as even as can be), embedding and head
    counted as the layers they weigh."""
    if pp_size > config.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size {pp_size} is more than the model's {config.num_layers} layers; every stage needs "
            f"at least one.",
            param="pipeline_parallel_size",
        )
    stops = _even_stops(_layer_weights(config), config.vocab_size * config.hidden_size, pp_size)
    return [Stage(start, stop, config.num_layers) for start, stop in pairwise((0, *stops))]


def _layer_weights(config: ModelConfig) -> tuple[int, ...]:
    """`layer_parameters` of each; layers with experts are alike, and so are those without."""
    dense = frozenset() if config.moe is None else config.moe.dense_layers
    one_of_each = {layer in dense: layer for layer in range(config.num_layers)}
    weights = {kind: layer_parameters(config, layer) for kind, layer in one_of_each.items()}
    return tuple(weights[layer in dense] for layer in range(config.num_layers))


@lru_cache(maxsize=64)
def _even_stops(weights: tuple[int, ...], table: int, parts: int) -> tuple[int, ...]:
    """Where each part ends, such that the heaviest is as light as can be and, of those cuts, the sum of the squares is
    the least (for layers that weigh the same, each goes to the lightest part). A `table` more is in the first part and
    in the last; one stage of a tied model holds it once, which changes no cut. Of equal cuts, the one with the longer
    first parts.

    By dynamic programming from the last part to the first: which cut of layers [start, n) is best for the parts that
    are left depends on `start` alone, once the bound of the heaviest is known.
    """
    count, before = len(weights), (0, *accumulate(weights))

    def best(cost: Callable[[int], float], join: Callable[[float, float], float]) -> tuple[float, tuple[int, ...]]:
        found: list[tuple[float, tuple[int, ...]]] = [(0, ())] * (count + 1)
        for part in reversed(range(parts)):
            tables = table * ((part == 0) + (part == parts - 1)) if parts > 1 else 0
            last = part == parts - 1
            for start in range(part, count - (parts - 1 - part)):
                stops = [count] if last else range(count - (parts - 1 - part), start, -1)
                loads = ((cost(before[stop] - before[start] + tables), stop) for stop in stops)
                found[start] = min(
                    ((join(load, found[stop][0]), (stop, *found[stop][1])) for load, stop in loads),
                    key=lambda candidate: candidate[0],
                )
        return found[0]

    heaviest, _ = best(lambda load: load, max)
    _, stops = best(lambda load: load * load if load <= heaviest else inf, lambda one, rest: one + rest)
    return stops
