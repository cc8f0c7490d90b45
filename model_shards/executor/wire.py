"""StepOutput as plain values for msgpack."""

from __future__ import annotations

from typing import Any

from shoal.model_shards.engine.plan import StepOutput, TokenLogprobs


def output_to_wire(output: StepOutput) -> list[Any]:
    return [
        output.step_id,
        output.seq_ids,
        output.generations,
        output.token_ids,
        [None if item is None else item.to_wire() for item in output.logprobs],
        [[seq_id, [item.to_wire() for item in items]] for seq_id, items in output.prompt_logprobs.items()],
        [[seq_id, reason] for seq_id, reason in output.errors.items()],
    ]


def output_from_wire(wire: list[Any]) -> StepOutput:
    step_id, seq_ids, generations, token_ids, logprobs, prompt_logprobs, errors = wire
    return StepOutput(
        step_id,
        seq_ids,
        generations,
        token_ids,
        [None if item is None else TokenLogprobs.from_wire(item) for item in logprobs],
        {seq_id: [TokenLogprobs.from_wire(item) for item in items] for seq_id, items in prompt_logprobs},
        dict(errors),
    )
