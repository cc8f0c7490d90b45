"""The choice of experts, against an oracle of loops and sorts, and what must hold whatever the logits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from shoal.model_shards.models.config import MoEConfig
from shoal.model_shards.models.routing import select_experts

MIXTRAL = MoEConfig(num_experts=8, experts_per_token=2, expert_size=1)
QWEN3 = MoEConfig(num_experts=128, experts_per_token=8, expert_size=1)
DEEPSEEK_V3 = MoEConfig(
    num_experts=256,
    experts_per_token=8,
    expert_size=1,
    scoring="sigmoid",
    scale=2.5,
    selection_bias=True,
    num_groups=8,
    groups_per_token=4,
)

Row = npt.NDArray[np.float32]


def best(values: Row, count: int) -> list[int]:
    return [int(column) for column in np.argsort(-values, kind="stable")[:count]]


def oracle(logits: Row, bias: Row | None, config: MoEConfig) -> tuple[list[int], list[float]]:
    """One row, as the papers say it."""
    wide = logits.astype(np.float64)
    if config.scoring == "softmax":
        exponentials = np.exp(wide - wide.max())
        scores = (exponentials / exponentials.sum()).astype(np.float32)
    else:
        scores = (1 / (1 + np.exp(-wide))).astype(np.float32)
    ranking = scores if bias is None else scores + bias
    allowed = list(range(config.num_experts))
    if config.num_groups > 1:
        size = config.num_experts // config.num_groups
        groups = [ranking[start : start + size] for start in range(0, config.num_experts, size)]
        sums = [np.sum(np.sort(group)[::-1][:2], dtype=np.float32) for group in groups]
        kept = best(np.array(sums), config.groups_per_token)
        allowed = [expert for expert in allowed if expert // size in kept]
    chosen = [allowed[column] for column in best(ranking[allowed], config.experts_per_token)]
    weights = [float(scores[expert]) for expert in chosen]
    if config.normalize:
        total = sum(weights) + (1e-20 if config.scoring == "sigmoid" else 0.0)
        weights = [weight / total for weight in weights]
    return chosen, [weight * config.scale for weight in weights]


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        (DEEPSEEK_V3, 10_000),
        (replace(DEEPSEEK_V3, num_groups=1, groups_per_token=1), 500),
        (replace(DEEPSEEK_V3, num_groups=0, groups_per_token=0, normalize=False), 500),
        (replace(DEEPSEEK_V3, selection_bias=False), 500),
        (replace(DEEPSEEK_V3, num_experts=8, experts_per_token=4, num_groups=8), 500),  # groups of one expert
        (MIXTRAL, 1000),
        (QWEN3, 500),
        (replace(QWEN3, normalize=False, scale=0.5), 500),
    ],
)
def test_choice_and_weights_are_those_of_a_loop(config: MoEConfig, rows: int) -> None:
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, config.num_experts, generator=random) * 2
    # Around -0.75, so that most biased scores are negative: whoever masks groups with 0 chooses among the masked ones.
    bias = torch.randn(config.num_experts, generator=random) * 0.2 - 0.75 if config.selection_bias else None
    ids, weights = select_experts(logits, bias, config)
    assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
    plain_bias = None if bias is None else bias.numpy()
    expected = [oracle(row, plain_bias, config) for row in logits.numpy()]
    # Scores of softmax are rounded elsewhere than the oracle's; where two are that near their order is not defined.
    agree = torch.tensor([row[0] for row in expected]) == ids
    assert agree.all() if config.scoring == "sigmoid" else agree.float().mean() > 0.999
    torch.testing.assert_close(weights, torch.tensor([row[1] for row in expected]), rtol=1e-5, atol=1e-9)


def test_a_mask_of_zero_would_choose_otherwise() -> None:
    """The rows above tell the two apart: this is what a wrong mask gives for them."""
    logits = torch.randn(100, 256, generator=torch.Generator().manual_seed(1))
    ids, _ = select_experts(logits, torch.full((256,), -2.0), DEEPSEEK_V3)
    ranking = torch.sigmoid(logits) - 2.0
    sums = ranking.view(-1, 8, 32).topk(2).values.sum(-1)
    kept = torch.zeros_like(sums, dtype=torch.bool).scatter(1, sums.topk(4).indices, True).repeat_interleave(32, 1)
    assert kept.gather(1, ids).all()
    assert not kept.gather(1, ranking.masked_fill(~kept, 0.0).topk(8).indices).any()


def test_equals_are_taken_in_the_order_of_their_ids() -> None:
    for config in (MIXTRAL, QWEN3, replace(DEEPSEEK_V3, selection_bias=False)):
        ids, weights = select_experts(torch.zeros(3, config.num_experts), None, config)
        assert ids.tolist() == [list(range(config.experts_per_token))] * 3
        torch.testing.assert_close(weights, torch.full_like(weights, config.scale / config.experts_per_token))
    scores = torch.tensor([[0.0, 0.5, -1.0, 2.0, 2.0, 0.5, 0.0, -torch.inf]])
    sigmoid = replace(MIXTRAL, scoring="sigmoid", experts_per_token=8)
    assert select_experts(scores, None, sigmoid)[0].tolist() == [[3, 4, 1, 5, 0, 6, 2, 7]]


def test_weights_are_the_scores_without_the_bias() -> None:
    config = replace(DEEPSEEK_V3, num_experts=8, experts_per_token=2, num_groups=1, groups_per_token=1, scale=1.0)
    bias = torch.zeros(8)
    bias[5] = 10.0
    ids, weights = select_experts(torch.zeros(1, 8), bias, config)
    assert ids.tolist() == [[5, 0]]
    assert weights.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("num_experts", [8, 10, 64])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_row_does_not_depend_on_the_others(scoring: str, num_experts: int) -> None:
    config = replace(MIXTRAL, num_experts=num_experts, experts_per_token=3, scoring=scoring)
    logits = torch.randn(301, num_experts, generator=torch.Generator().manual_seed(2)) * 3
    ids, weights = select_experts(logits, None, config)
    for start, stop in ((0, 1), (7, 8), (3, 10), (101, 300)):
        some_ids, some_weights = select_experts(logits[start:stop].clone(), None, config)
        assert torch.equal(some_ids, ids[start:stop])
        assert torch.equal(some_weights, weights[start:stop])


def test_no_rows_and_broken_rows() -> None:
    """Ids can be followed whatever a row holds; a request whose numbers are broken fails where its logits are seen."""
    bias = torch.zeros(256)
    ids, weights = select_experts(torch.empty(0, 256), bias, DEEPSEEK_V3)
    assert ids.shape == weights.shape == (0, 8)
    broken = torch.full((3, 256), torch.nan)
    broken[1], broken[2] = torch.inf, -torch.inf
    ids, _ = select_experts(broken, bias, DEEPSEEK_V3)
    assert ids.min() >= 0
    assert ids.max() < 256
    assert all(len(set(row)) == 8 for row in ids.tolist())
