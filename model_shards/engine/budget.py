"""The budgets of one scheduling pass, in one short-lived object."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.model_shards.engine.pacing import TimeAllowance


@dataclass(slots=True)
class StepBudget:
    """What the step being planned may still take."""

    tokens: int
    """Rows of the forward pass still free."""
    seats: int
    """Sequences that may still become running."""
    partial_prefills: int
    """Long prompts that may still be left in their middle, on top of those that already are."""
    chunk_size: int
    """Most tokens of one sequence in one step."""
    allowance: TimeAllowance | None = None
    """The time for pieces of prompts, where it is bounded."""

    def grant(self, wanted: int, start: int) -> int:
        """How many of a prompt's `wanted` tokens from position `start` on run now; 0 when it must wait for a later
        step."""
        granted = min(wanted, self.tokens, self.chunk_size)
        return granted if self.allowance is None else min(granted, self.allowance.grant(wanted, start))
