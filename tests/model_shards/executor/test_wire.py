"""Outputs of several sampling ranks as one."""

from __future__ import annotations

from shoal.model_shards.engine.plan import StepOutput, TokenLogprobs
from shoal.model_shards.executor.wire import merge_outputs, output_from_wire, output_to_wire

SCORE = TokenLogprobs(7, -0.5, 1, [(7, -0.5)])
FIRST = StepOutput(3, [1, 4], [0, 2], [70, 71], [None, SCORE], {1: [SCORE]}, {9: "NaN"})
IDLE = StepOutput(3)
LAST = StepOutput(3, [2], [0], [72], [None], {}, {5: "too long"})


def test_columns_follow_each_other_in_the_order_of_the_parts() -> None:
    parts = [output_from_wire(output_to_wire(part)) for part in (FIRST, IDLE, LAST)]
    assert merge_outputs(parts) == StepOutput(
        3,
        [1, 4, 2],
        [0, 2, 0],
        [70, 71, 72],
        [None, SCORE, None],
        {1: [SCORE]},
        {9: "NaN", 5: "too long"},
    )


def test_the_output_of_one_part_is_itself() -> None:
    assert merge_outputs([LAST]) is LAST
