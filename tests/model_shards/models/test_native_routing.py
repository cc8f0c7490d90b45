"""The CPU's choice of experts is the one that `select_experts` makes (whose oracle is in test_routing.py)."""

from __future__ import annotations

import pytest
import torch

from shoal.configs.errors import ConfigError
from shoal.kernels.ops import Ops
from shoal.kernels.registry import select_ops
from shoal.model_shards.models.config import MoEConfig
from shoal.model_shards.models.routing import select_experts

CONFIGS = {
    "mixtral": MoEConfig(8, 2, 16),
    "qwen3-moe": MoEConfig(128, 8, 16, normalize=False),
    "scaled": MoEConfig(6, 6, 16, scale=2.5),
    "deepseek-v3": MoEConfig(
        64, 8, 16, scoring="sigmoid", selection_bias=True, num_groups=8, groups_per_token=4, scale=2.5
    ),
    "groups of one": MoEConfig(4, 1, 16, scoring="sigmoid", selection_bias=True, num_groups=4, groups_per_token=2),
}


@pytest.fixture(scope="module")
def ops() -> Ops:
    try:
        table = select_ops(torch.device("cpu"), torch.float32, backend="cpu")
    except ConfigError as error:
        pytest.skip(str(error))
    return table if table.name == "cpu" else pytest.skip("there is no native unit here")


def inputs(config: MoEConfig, rows: int, *, coarse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`coarse`: logits of few values, so that many experts are equal."""
    logits = torch.randn(rows, config.num_experts) * 2
    bias = torch.randn(config.num_experts) - 1 if config.selection_bias else None
    if coarse:
        logits, bias = logits.round(), None if bias is None else bias.round()
    return logits, bias


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_experts_and_weights(ops: Ops, name: str, coarse: bool) -> None:
    config = CONFIGS[name]
    logits, bias = inputs(config, 2000, coarse=coarse)
    choice = ops.choose_experts(logits, bias, config)
    assert choice is not None
    ids, weights = choice
    expected_ids, expected_weights = select_experts(logits, bias, config)
    differing = (ids != expected_ids).any(dim=1)
    # Scores of different experts may round to the same number in one of the two and not in the other.
    assert differing.float().mean() <= (0.01 if coarse and config.scoring == "softmax" else 0.001)
    torch.testing.assert_close(weights[~differing], expected_weights[~differing], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_does_not_depend_on_the_others(ops: Ops, name: str) -> None:
    config = CONFIGS[name]
    logits, bias = inputs(config, 50, coarse=False)
    together = ops.choose_experts(logits, bias, config)
    alone = ops.choose_experts(logits[7:8], bias, config)
    assert together is not None
    assert alone is not None
    assert all(torch.equal(whole[7:8], row) for whole, row in zip(together, alone, strict=True))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", CONFIGS)
def test_ids_are_valid_whatever_the_logits_hold(ops: Ops, name: str, value: float) -> None:
    config = CONFIGS[name]
    logits, bias = inputs(config, 3, coarse=False)
    logits[0], logits[1, ::2] = value, value
    choice = ops.choose_experts(logits, bias, config)
    assert choice is not None
    for row in choice[0].tolist():
        assert len(set(row)) == config.experts_per_token
        assert all(0 <= expert < config.num_experts for expert in row)
