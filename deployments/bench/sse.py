"""Reads a recorded OpenAI event stream: which chunks carried text, and what the server said at the end."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_TEXT_FIELDS = ("content", "reasoning_content", "reasoning")


@dataclass(slots=True)
class StreamContents:
    """`token_times` are the arrival times of the network chunks that completed an event with text."""

    token_times: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    error: str | None = None
    done: bool = False
    """The stream was ended properly with `[DONE]`."""

    def read(self, chunks: Iterable[tuple[float, bytes]]) -> StreamContents:
        """Takes (arrival time, bytes) in order. Events may be split over chunks or share one."""
        rest = b""
        for when, data in chunks:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    self._event(when, line[5:].strip())
        return self

    def _event(self, when: float, data: bytes) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            self.error = self.error or f"event that is not JSON: {data[:80]!r}"
            return
        if event.get("error"):
            error = event["error"]
            self.error = str(error.get("message", error) if isinstance(error, dict) else error)
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            delta = choice.get("delta") or {}
            if choice.get("text") or any(delta.get(name) for name in _TEXT_FIELDS):
                self.token_times.append(when)
