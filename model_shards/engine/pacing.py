"""Steps bounded in time: whoever decodes waits for whole steps, so a piece of somebody's prompt must not be long."""

from __future__ import annotations

import math

from shoal.model_shards.engine.step_cost import StepCostModel, StepShape

SMALLEST_PIECE = 8
"""Tokens of a prompt that a step takes even when the decodes alone are longer than the target: a prompt progresses."""
_MULTIPLE = 8
"""Pieces are cut so that the step has a multiple of this many rows: the operators of a step are recorded once for each
size that comes, and few sizes should come."""


class TimeAllowance:
    """Seconds of one step that pieces of prompts may still take."""

    def __init__(self, seconds: float, token_s: float, position_s: float, rows: int = 0) -> None:
        """`token_s`: a prompt's token costs so much, and `position_s` more for each position that it attends to.
        `rows`: the step already has so many."""
        self._seconds = seconds
        self._rows = rows
        self._token_s = token_s
        self._position_s = position_s
        self._untouched = True

    def grant(self, wanted: int, start: int) -> int:
        """How many of `wanted` tokens from position `start` on fit; 0 when none. The first to ask is never refused."""
        fitting = self._fitting(start)
        if fitting >= wanted:
            return wanted
        fitting = max(0, fitting - (self._rows + fitting) % _MULTIPLE)
        return max(fitting, min(wanted, SMALLEST_PIECE)) if self._untouched else fitting

    def spend(self, count: int, start: int) -> None:
        self._untouched = False
        self._rows += count
        self._seconds -= count * (self._token_s + self._position_s * (start + (count + 1) / 2))

    def _fitting(self, start: int) -> int:
        """The largest n with n token_s + (n start + n (n + 1) / 2) position_s <= seconds."""
        if self._seconds <= 0:
            return 0
        linear, square = self._token_s + self._position_s * (start + 0.5), self._position_s / 2
        # The root in the form that is stable, and right, for a square of zero.
        divisor = linear + math.sqrt(linear * linear + 4 * square * self._seconds)
        return int(2 * self._seconds / divisor) if divisor > 0 else 1 << 62


class StepPacer:
    """Bounds steps in which sequences decode, by a target and a model of what steps cost."""

    def __init__(self, target_s: float) -> None:
        assert target_s > 0
        self.target_s = target_s
        self._cost = StepCostModel()

    def allowance(self, shape: StepShape) -> TimeAllowance | None:
        """What pieces of prompts may add to a step of this shape; None, and so any time, when nobody decodes in it. At
        least as much as the decodes take: where these nearly fill the target alone, prompts would wait for ever more
        streams to end."""
        if shape.decodes == 0:
            return None
        decodes_s, rows = self._cost.predict(shape), shape.decodes + shape.prompt_tokens
        left_s = max(self.target_s - decodes_s, decodes_s)
        return TimeAllowance(left_s, *self._cost.price_of_prompt(), rows)

    def observe(self, shape: StepShape, seconds: float) -> float:
        """A step of this shape took so long. Returns how long was expected."""
        return self._cost.observe(shape, seconds)
