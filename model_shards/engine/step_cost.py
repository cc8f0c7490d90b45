"""How long a step will take, learnt from how long steps took. Pure: it is told durations, it reads no clock.

    seconds = constant + decodes + their context + prompt tokens + their context        (each term times its weight)

A decode is bound by reading keys and values and a piece of a prompt by arithmetic, so each kind has weights of its own.
They are a least-squares fit that forgets, with no weight below zero (a step is never shorter for having more in it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_MEMORY = 0.97
"""Weight of all earlier steps against a new one: some thirty steps count."""
_SURPRISE = 2.0
"""A step that takes so many times what was expected, or so many times less, is a surprise."""
_FADE = 0.1
"""What is left of the memory when surprises show that it is out of date."""
_TOLERANCE = 0.1
"""As long as steps take what was expected, give or take this part, they are only added up; the fit is made when a price
is asked for (it takes some 40 microseconds, and most steps are decodes that ask for none)."""
_BASE_ROWS = 8.0
"""Errors weigh by 1 / (rows + this): noise grows with the step, and the smallest ones are dominated by the constant."""
_PRIOR_WEIGHT = 0.3
_FEATURES = 5


@dataclass(slots=True)
class StepShape:
    """What the time of a step depends on."""

    decodes: int = 0
    """Sequences that compute one token."""
    decode_context: int = 0
    """Positions that these attend to."""
    prompt_tokens: int = 0
    """Tokens in pieces of more than one."""
    prompt_context: int = 0
    """(token, position) pairs in which these attend."""

    def add(self, start: int, num_tokens: int) -> None:
        """One chunk: `num_tokens` of a sequence from position `start` on."""
        if num_tokens == 1:
            self.decodes += 1
            self.decode_context += start + 1
        else:
            self.prompt_tokens += num_tokens
            self.prompt_context += num_tokens * start + num_tokens * (num_tokens + 1) // 2

    def features(self) -> tuple[float, ...]:
        return (1.0, self.decodes, self.decode_context, self.prompt_tokens, self.prompt_context)


_PRIOR = (0.012, 0.002, 2e-6, 0.002, 1e-6)
"""Seconds: a model of 100 million parameters on few cores. Once steps are measured only its proportions count, and only
for what they leave open: when all pieces are alike, nothing else tells the price of a token from that of a step."""
_IMAGINED = (
    StepShape(decodes=1, decode_context=256),
    StepShape(decodes=8, decode_context=2048),
    StepShape(decodes=8, decode_context=4096),
    StepShape(prompt_tokens=64, prompt_context=2080),
    StepShape(prompt_tokens=32, prompt_context=33296),
)
"""Steps that took what the prior says, on a machine as fast as the one that is measured. Linearly independent, so that
the fit always has one answer."""


@dataclass(slots=True)
class _Memory:
    """Weighted sums over observed steps: of products of features, and of features and seconds."""

    products: list[list[float]] = field(default_factory=lambda: [[0.0] * _FEATURES for _ in range(_FEATURES)])
    targets: list[float] = field(default_factory=lambda: [0.0] * _FEATURES)
    surprised: bool = False
    """By the last step, which took too long."""

    def fade(self, factor: float) -> None:
        self.products = [[factor * value for value in row] for row in self.products]
        self.targets = [factor * value for value in self.targets]

    def add(self, features: tuple[float, ...], seconds: float, weight: float) -> None:
        for row, feature in enumerate(features):
            weighted = weight * feature
            if weighted:
                products = self.products[row]
                for column, other in enumerate(features):
                    products[column] += weighted * other
                self.targets[row] += weighted * seconds


class StepCostModel:
    """Predicts the seconds of a step from its shape. Deterministic given what it observed."""

    def __init__(self) -> None:
        self._decodes = _Memory()
        self._prompts = _Memory()
        """Steps with prompts are remembered apart: a thousand decodes between two prompts do not wipe them out."""
        self._prior = _Memory()
        self._weights = list(_PRIOR)
        self._fitted = True
        for shape in _IMAGINED:
            features = shape.features()
            self._prior.add(features, _dot(_PRIOR, features), _PRIOR_WEIGHT * _weight_of(shape))

    def predict(self, shape: StepShape) -> float:
        """Seconds."""
        self._fit()
        return self._expect(shape.features())

    def price_of_prompt(self) -> tuple[float, float]:
        """Seconds that a prompt's token adds to a step, and each position that it attends to."""
        self._fit()
        return self._weights[3], self._weights[4]

    def observe(self, shape: StepShape, seconds: float) -> float:
        """A step of this shape took so long. Returns how long was expected.

        One step that took much longer than expected is a stall (of the machine, of a first touch of memory) and counts
        as a slow one, no more; the second in a row is news, and so is one that took much less, which no accident does.
        """
        features = shape.features()
        memory = self._prompts if shape.prompt_tokens else self._decodes
        expected = self._expect(features)
        slow, fast = seconds > _SURPRISE * expected, seconds * _SURPRISE < expected
        if slow and not memory.surprised:
            seconds = _SURPRISE * expected
            memory.fade(_MEMORY)
        else:
            memory.fade(_FADE if slow or fast else _MEMORY)
        memory.surprised = slow
        memory.add(features, seconds, _weight_of(shape))
        self._fitted = False
        if abs(seconds - expected) > _TOLERANCE * expected:
            self._fit()
        return expected

    def _expect(self, features: tuple[float, ...]) -> float:
        return _dot(self._weights, features)

    def _fit(self) -> None:
        if self._fitted:
            return
        self._fitted = True
        every = range(_FEATURES)
        measured = _Memory(
            [[self._decodes.products[i][j] + self._prompts.products[i][j] for j in every] for i in every],
            [self._decodes.targets[i] + self._prompts.targets[i] for i in every],
        )
        slowness = _dot(_PRIOR, measured.targets) / _dot(_PRIOR, [_dot(_PRIOR, row) for row in measured.products])
        prior = self._prior
        products = [[measured.products[i][j] + prior.products[i][j] for j in every] for i in every]
        targets = [measured.targets[i] + slowness * prior.targets[i] for i in every]
        kept = list(range(_FEATURES))
        while True:
            solution = _solve([[products[i][j] for j in kept] for i in kept], [targets[i] for i in kept])
            if min(solution) >= 0:
                break
            kept = [i for i, weight in zip(kept, solution, strict=True) if weight > 0]
        self._weights = [0.0] * _FEATURES
        for i, weight in zip(kept, solution, strict=True):
            self._weights[i] = weight


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """The x of matrix x = vector, for a symmetric positive definite matrix. Scaled to a diagonal of ones first: the
    features lie six orders of magnitude apart."""
    size = len(vector)
    scale = [matrix[i][i] ** -0.5 for i in range(size)]
    rows = [[matrix[i][j] * scale[i] * scale[j] for j in range(size)] + [vector[i] * scale[i]] for i in range(size)]
    for pivot in range(size):
        for below in range(pivot + 1, size):
            factor = rows[below][pivot] / rows[pivot][pivot]
            for column in range(pivot, size + 1):
                rows[below][column] -= factor * rows[pivot][column]
    solution = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - rest) / rows[i][i]
    return [value * factor for value, factor in zip(solution, scale, strict=True)]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _weight_of(shape: StepShape) -> float:
    return (shape.decodes + shape.prompt_tokens + _BASE_ROWS) ** -2
