"""What a draw over the rows of a step gives, on the host or on a device, before it becomes a SampleResult."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.model_shards.sampling.vocab_rows import IdArray, VocabRows


@dataclass(slots=True)
class Drawn:
    """Columns over the rows of the logits."""

    token_ids: IdArray
    """[n], FAILED where a row had no distribution."""
    errors: dict[int, str]
    """Rows that had none even before their edits (a mask would hide a NaN)."""
    edited: list[int]
    """Rows whose logits were edited."""
    asked: list[int]
    """Rows whose logprobs are asked for."""
    raw: VocabRows | None
    """Copies of those rows, in that order, before the edits; None if there are none."""
