"""The budgets of one scheduling pass, in one short-lived object."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepBudget:
    """What the step being planned may still take. Every chunk goes through `grant` and `spend`."""

    tokens: int
    """Rows of the forward pass still free."""
    seats: int
    """Sequences that may still become running."""
    partial_prefills: int
    """Sequences that may still be left in the middle of their prompt by this step."""
    chunk_size: int
    """Most tokens of one sequence in one step."""

    def grant(self, wanted: int) -> int:
        """How many of a sequence's `wanted` tokens run now; 0 when it must wait for a later step."""
        granted = min(wanted, self.tokens, self.chunk_size)
        if granted < wanted and self.partial_prefills == 0:
            return 0
        return granted

    def spend(self, granted: int, wanted: int) -> None:
        assert 0 < granted <= self.tokens
        self.tokens -= granted
        if granted < wanted:
            self.partial_prefills -= 1
