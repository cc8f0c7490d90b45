"""Recording a step's operators once, to run them again without Python: what CUDA graphs are, for any backend.

Models stay plain: they run once under `Capturer.capture`, and what they asked of the operators (and of torch) is the
program. Whatever a program must see change from step to step lies in tensors that stay where they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Program(ABC, Generic[T]):
    """What one capture recorded. `result` is what the captured function returned: tensors that each `replay`
    overwrites, and that a replay of another program of the same capturer may overwrite too."""

    result: T

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory that the recording took, and by which the capturer's pool grew for it."""

    @abstractmethod
    def replay(self) -> T:
        """Does again what was captured, on what the inputs hold now; the same bits as running it anew."""


class Capturer(ABC):
    """Makes programs that share one pool of memory for what they compute, and so run one at a time."""

    @abstractmethod
    def capture(self, run: Callable[[], T]) -> tuple[T, Program[T] | None]:
        """Runs `run`, which must do the same operations whatever its inputs hold, and records it.

        Returns its result, which is as good as without capture until the pool's next use, and the program: None when
        `run` did something that cannot be repeated (`refusal` says what)."""

    refusal: str | None = None
    """Why the last capture gave no program."""
