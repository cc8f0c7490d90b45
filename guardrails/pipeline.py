"""Rails in a row.

An input rail sees whole texts before the request is admitted. An output rail sees a text as it grows: it says how many
characters may go out, and holds back the rest until it knows. The first rail that blocks decides.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.configs.app import GuardConfig
from shoal.guardrails.denylist import DenyList
from shoal.guardrails.rails import OutputScan, Rail
from shoal.guardrails.verdicts import ALLOWED, Verdict


class RailPipeline:
    """The rails of one direction."""

    def __init__(self, rails: Sequence[Rail]) -> None:
        self._rails = tuple(rails)

    def __bool__(self) -> bool:
        return bool(self._rails)

    def check(self, texts: Sequence[str]) -> Verdict:
        """The verdict on texts that arrive together (the messages of a chat, the prompts of a batch). Each is checked
        by itself and all of them joined, so that a match across two messages counts."""
        candidates = [*texts, "\n".join(texts)] if len(texts) > 1 else texts
        for rail in self._rails:
            for text in candidates:
                verdict = rail.check(text)
                if not verdict.allowed:
                    return verdict
        return ALLOWED

    def open_stream(self) -> GuardedText:
        return GuardedText([rail.open_scan() for rail in self._rails])


class GuardedText:
    """One growing text under all output rails: what comes out is what every rail has let go."""

    def __init__(self, scans: Sequence[OutputScan]) -> None:
        self._scans = scans
        self._held = ""
        self._released = 0
        self.verdict = ALLOWED

    @property
    def num_held(self) -> int:
        """Characters that are not out yet."""
        return len(self._held)

    def feed(self, text: str) -> str:
        """Adds `text`; returns what may go out now. After a block (`verdict`) nothing goes out any more."""
        return self._advance(text, final=False)

    def finish(self) -> str:
        """The text is complete; returns the rest, unless a rail blocks it."""
        return self._advance("", final=True)

    def _advance(self, text: str, *, final: bool) -> str:
        if not self.verdict.allowed:
            return ""
        self._held += text
        allowed_until = self._released + len(self._held)
        for scan in self._scans:
            until, verdict = scan.feed(text)
            if final and verdict.allowed:
                until, verdict = scan.finish()
            allowed_until = min(allowed_until, until)
            if not verdict.allowed and self.verdict.allowed:
                self.verdict = verdict
        out = self._held[: allowed_until - self._released]
        self._held = self._held[len(out) :]
        self._released += len(out)
        return out


def load_rails(config: GuardConfig) -> tuple[RailPipeline, RailPipeline]:
    """The input rails and the output rails of a configuration. Raises ConfigError for a pack that cannot be used."""
    rails: list[Rail] = []
    if config.deny_list is not None:
        rails.append(DenyList.load(config))
    return RailPipeline(rails if config.check_input else ()), RailPipeline(rails if config.check_output else ())
