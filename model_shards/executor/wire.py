"""StepOutput as plain values for msgpack, and the outputs of several ranks as one."""

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


def merge_outputs(parts: list[StepOutput]) -> StepOutput:
    """What the sampling ranks of one step's data-parallel parts gave, in the order of the parts. Their sequences are
    different ones."""
    first = parts[0]
    if len(parts) == 1:
        return first
    assert all(part.step_id == first.step_id for part in parts)
    merged = StepOutput(first.step_id)
    for part in parts:
        merged.seq_ids += part.seq_ids
        merged.generations += part.generations
        merged.token_ids += part.token_ids
        merged.logprobs += part.logprobs
        merged.prompt_logprobs |= part.prompt_logprobs
        merged.errors |= part.errors
    return merged
