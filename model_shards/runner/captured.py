"""What steps give that run as programs, however these come about."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from shoal.model_shards.runner.batch import ForwardBatch

Result = tuple[torch.Tensor, torch.Tensor | None]
"""(hidden states, logits of every row or None), as a program computes them."""


@dataclass(slots=True)
class Computed:
    """What the model gave for one step. Memory of a program: valid until the next step."""

    hidden: torch.Tensor
    """[num_tokens, hidden_size]: all rows of the step. On a stage that is not the last those that the rank holds; where
    they were scattered, on the last the sampling ones alone, in the order of `sample_rows`, unless a prompt is
    scored."""
    logits: torch.Tensor | None = None
    """[num_tokens, vocab_size], when a program computed them along."""
    sample_rows: torch.Tensor | None = None
    """`ForwardBatch.sample_rows` on the device; may be None where every row samples."""


class CapturedSteps(ABC):
    """The programs of one rank. They know the model's weights, its pages and their own inputs by address."""

    replays: int
    """Steps that a program ran."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Of all recordings."""

    @abstractmethod
    def __len__(self) -> int:
        """Programs there are."""

    @abstractmethod
    def run(self, batch: ForwardBatch, received: torch.Tensor | None) -> Computed | None:
        """The step by a program, or None: it has to run by itself. `received`: the previous stage's hidden states,
        None on the first stage."""
