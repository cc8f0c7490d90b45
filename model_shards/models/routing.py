"""Which experts a token visits, and how much each counts.

Softmax over all experts (Mixtral: Jiang et al. 2024, arXiv:2401.04088; Qwen3-MoE), or sigmoid scores with a bias for
the choice alone and a choice of groups before that of experts (DeepSeek-V3: DeepSeek-AI 2024, arXiv:2412.19437).

Everything is a function of a token's own logits, bit for bit: it does not depend on what other rows are in the batch.
No operation waits for the device, so that routing can be part of a captured step.
"""

from __future__ import annotations

import torch

from shoal.model_shards.models.config import MoEConfig

_EPSILON = 1e-20
"""Added to the sum of sigmoid scores before dividing, as DeepSeek's models were trained."""


def select_experts(
    logits: torch.Tensor, bias: torch.Tensor | None, config: MoEConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits fp32 [n, num_experts], bias fp32 [num_experts] exactly when `config.selection_bias` -> (expert ids int64
    [n, k], weights fp32 [n, k]), the best first. Of experts (and groups) that score the same the lowest id comes first.

    The bias takes part in the choice only: weights are the scores without it. Ids are valid whatever the logits hold.
    """
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.shape[1:] == (config.num_experts,), (logits.shape, config.num_experts)
    assert (bias is not None) == config.selection_bias
    scores = _scores(logits, config)
    ranking = scores if bias is None else scores + bias
    if config.num_groups > 1:
        ranking = _within_best_groups(ranking, config)
    ids = _best(ranking, config.experts_per_token)
    weights = scores.gather(1, ids)
    if config.normalize:
        total = weights.sum(dim=1, keepdim=True)
        weights = weights / (total if config.scoring == "softmax" else total + _EPSILON)
    return ids, weights if config.scale == 1.0 else weights * config.scale


def _scores(logits: torch.Tensor, config: MoEConfig) -> torch.Tensor:
    if config.scoring == "softmax":
        return torch.softmax(logits, dim=1)
    # In fp64, since torch's vector and scalar code for fp32 differ in the last bit: which of them computes an element
    # depends on where in the tensor it lies.
    return torch.sigmoid(logits.double()).float()


def _within_best_groups(ranking: torch.Tensor, config: MoEConfig) -> torch.Tensor:
    """-inf (biased scores may be negative, so 0 would not do) outside of the groups whose two best experts have the
    largest sums."""
    groups = ranking.view(len(ranking), config.num_groups, config.num_experts // config.num_groups)
    sums = groups.topk(min(2, groups.shape[2]), dim=2).values.sum(dim=2)
    chosen = torch.zeros_like(sums, dtype=torch.bool).scatter(1, _best(sums, config.groups_per_token), True)
    return groups.masked_fill(~chosen.unsqueeze(2), -torch.inf).flatten(1)


def _best(ranking: torch.Tensor, count: int) -> torch.Tensor:
    """ranking [n, m] -> columns [n, count] of the largest, largest first, equals in the order of their columns (which
    `topk` leaves open)."""
    return torch.sort(ranking, dim=1, descending=True, stable=True).indices[:, :count]
