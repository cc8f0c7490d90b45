"""Which layers a pipeline stage holds."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.configs.errors import ConfigError
from shoal.model_shards.models.config import ModelConfig


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


def layer_parameters(config: ModelConfig) -> int:
    """Matrix elements of one layer, over all tensor-parallel ranks (norms and biases are under a thousandth)."""
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim * config.hidden_size
    return attention + 3 * config.hidden_size * config.intermediate_size


def cut_stages(config: ModelConfig, pp_size: int) -> list[Stage]:
    """Contiguous stages with the heaviest as light as can be, embedding and head counted as the layers they weigh."""
    if pp_size > config.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size {pp_size} is more than the model's {config.num_layers} layers; every stage needs "
            f"at least one.",
            param="pipeline_parallel_size",
        )
    per_layer, per_table = layer_parameters(config), config.vocab_size * config.hidden_size
    load = [per_layer] * pp_size
    load[-1] += per_table
    if pp_size > 1:  # one stage of a tied model holds the table once; that changes no cut
        load[0] += per_table
    counts = [1] * pp_size
    for _ in range(config.num_layers - pp_size):  # equal items, so giving each to the lightest stage is optimal
        lightest = min(range(pp_size), key=lambda stage: load[stage])
        counts[lightest] += 1
        load[lightest] += per_layer
    stops = [sum(counts[: i + 1]) for i in range(pp_size)]
    return [Stage(stop - count, stop, config.num_layers) for stop, count in zip(stops, counts, strict=True)]
