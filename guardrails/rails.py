"""What a rail is: a check of whole texts, and a scan of texts that grow."""

from __future__ import annotations

from abc import ABC, abstractmethod

from shoal.guardrails.verdicts import Verdict


class OutputScan(ABC):
    """One growing text under one rail. Not thread-safe; one per choice of a response."""

    @abstractmethod
    def feed(self, text: str) -> tuple[int, Verdict]:
        """Adds `text`. Returns how many characters may go out, counted from the beginning of everything fed so far,
        and the verdict. Once it blocks, the count stays where the forbidden part begins and the scan is over."""

    @abstractmethod
    def finish(self) -> tuple[int, Verdict]:
        """The text is complete: nothing is undecided any more. Returns as `feed` does."""


class Rail(ABC):
    """One rule pack. Immutable and thread-safe; what is learned of one text lives in its scan."""

    name: str

    @abstractmethod
    def check(self, text: str) -> Verdict:
        """The verdict on a whole text. Must agree with a scan that is fed the same text in any pieces."""

    @abstractmethod
    def open_scan(self) -> OutputScan:
        """Begins to watch one text that grows."""
