"""What a rail says about a text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """`rule` names the rule that fired, for logs and metrics; it never holds the user's text."""

    allowed: bool
    rail: str = ""
    rule: str = ""


ALLOWED = Verdict(allowed=True)
