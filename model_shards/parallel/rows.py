"""Where the rows of one step are, between its layers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepRows:
    """The tokens of one step, as rows of hidden states on the ranks of a tensor-parallel group.

    Plain tensor parallelism has all of them on every rank. With sequence parallelism (Korthikanti et al. 2022,
    arXiv:2205.05198) they are scattered: rank i holds rows i * held : (i + 1) * held, the last of them padding (zeros,
    whatever the layers make of them) where `total` does not divide.
    """

    total: int
    held: int
    """On this rank."""

    @classmethod
    def of_step(cls, total: int, tp_size: int, scatter_from: int) -> StepRows:
        """Scattered when there are at least `scatter_from` (0: never), and so many that each rank has some."""
        if scatter_from == 0 or total < max(scatter_from, tp_size) or tp_size == 1:
            return cls(total, total)
        return cls(total, -(-total // tp_size))

    @property
    def scattered(self) -> bool:
        return self.held < self.total
