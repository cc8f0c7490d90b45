"""The experts of a Hugging Face `config.json`: Mixtral and Qwen3-MoE."""

from __future__ import annotations

from shoal.configs.errors import ModelLoadError
from shoal.model_shards.models.config import Family, MoEConfig
from shoal.model_shards.weights.hf_fields import Fields


def parse_moe(fields: Fields, family: Family, layers: int) -> MoEConfig | None:
    """None for families without experts. Raises ModelLoadError naming the key that is malformed or not supported."""
    if family == "mixtral":
        # Softmax over the chosen logits is what softmax over all and division by the chosen ones' sum give.
        return MoEConfig(
            num_experts=fields.integer("num_local_experts"),
            experts_per_token=fields.integer("num_experts_per_tok"),
            expert_size=fields.integer("intermediate_size"),
        )
    if family == "qwen3_moe":
        dense = _dense_layers(fields, layers)
        if len(dense) == layers:
            raise ModelLoadError(
                f"{fields.where}: decoder_sparse_step and mlp_only_layers leave no layer with experts."
            )
        return MoEConfig(
            num_experts=_num_experts(fields),
            experts_per_token=fields.integer("num_experts_per_tok"),
            expert_size=fields.integer("moe_intermediate_size"),
            normalize=fields.flag("norm_topk_prob"),
            dense_layers=dense,
        )
    return None


def _num_experts(fields: Fields) -> int:
    """`num_experts` in the files of transformers 4, `num_local_experts` in those of 5."""
    old, new = "num_experts", "num_local_experts"
    if fields.has(old) and fields.has(new) and fields.integer(old) != fields.integer(new):
        raise ModelLoadError(f"{fields.where}: {old} and {new} contradict each other; remove one.")
    return fields.integer(new if fields.has(new) else old)


def _dense_layers(fields: Fields, layers: int) -> frozenset[int]:
    """Layers listed, and those that are not every `decoder_sparse_step`-th."""
    step, listed = fields.integer("decoder_sparse_step"), fields.get("mlp_only_layers", [])
    if not isinstance(listed, list) or any(isinstance(item, bool) or not isinstance(item, int) for item in listed):
        raise fields.bad("mlp_only_layers", listed, "a list of layers")
    return frozenset(layer for layer in range(layers) if layer in listed or (layer + 1) % step)
