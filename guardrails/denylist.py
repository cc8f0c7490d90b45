r"""A deny-list: regular expressions, one a line, matched without regard to case, in whole texts and in streams.

    # comments and blank lines are skipped
    \bkumquat\b
    blue[ -]?print

Why the `regex` package: it can say that the end of a text is the beginning of a possible match (a partial match), which
is exactly what a stream must hold back, and it takes a time limit. RE2 has linear time but no partial matches. What
would make the partial answer wrong is refused when the list is loaded: lookaround (it sees beyond the match), back
references, anchors, switches, and patterns that match the empty text.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import regex

from shoal.configs.app import GuardConfig
from shoal.configs.errors import ConfigError
from shoal.guardrails.rails import OutputScan, Rail
from shoal.guardrails.verdicts import ALLOWED, Verdict

MAX_FILE_BYTES = 1 << 20
MAX_PATTERNS = 2000
MAX_PATTERN_CHARS = 1000
_RELEASE_GIL_CHARS = 4096
"""Longer texts are searched without the interpreter lock (for shorter ones, getting it back costs more)."""

_NAME = "deny_list"
_TIMEOUT = Verdict(allowed=False, rail=_NAME, rule="timeout")
_TOO_LONG = Verdict(allowed=False, rail=_NAME, rule="hold-back limit")

logger = logging.getLogger("shoal.guardrails")


class DenyList(Rail):
    """The compiled list."""

    name = _NAME

    def __init__(self, patterns: dict[str, str], *, timeout_ms: float = 50.0, max_hold_back_chars: int = 512) -> None:
        """`patterns`: name of the rule -> regular expression. Raises ConfigError naming the rule."""
        self.max_hold_back_chars = max_hold_back_chars
        self._timeout_s = timeout_ms / 1000
        self._rules = list(patterns)
        whole, growing = [], []
        for index, (rule, pattern) in enumerate(patterns.items()):
            whole.append(f"(?P<r{index}>{check_pattern(rule, pattern)})")
            # At the end of a growing text nobody knows yet whether a word ends there.
            growing.append(f"(?P<r{index}>{_map_word_boundaries(pattern)})")
        self._whole = _compile("|".join(whole))
        # A match counts in a growing text when a character follows it: one that ends at the very end may still be
        # undone (by a letter where \b stood), so it is a partial match of this, and held back.
        self._growing = _compile(f"(?:{'|'.join(growing)})(?s:.)")

    @classmethod
    def load(cls, config: GuardConfig) -> DenyList:
        """Reads `config.deny_list`. Raises ConfigError naming the file and the line."""
        assert config.deny_list is not None
        patterns = _read_patterns(config.deny_list)
        return cls(patterns, timeout_ms=config.timeout_ms, max_hold_back_chars=config.max_hold_back_chars)

    def check(self, text: str) -> Verdict:
        try:
            match = self._search(self._whole, text, 0, partial=False)
        except TimeoutError:
            return _timed_out()
        return ALLOWED if match is None else self._verdict(match)

    def open_scan(self) -> _Scan:
        return _Scan(self)

    def scan_growing(self, text: str, start: int) -> tuple[int, Verdict]:
        """Searches text[start:], of which more may follow (text[:start] is context for \\b). Returns the position up
        to which no match can begin any more, or where the match begins."""
        try:
            match = self._search(self._growing, text, start, partial=True)
        except TimeoutError:
            return start, _timed_out()
        if match is None:
            return len(text), ALLOWED
        if not match.partial:
            return match.start(), self._verdict(match)
        too_long = len(text) - match.start() > self.max_hold_back_chars
        return match.start(), _TOO_LONG if too_long else ALLOWED

    def scan_rest(self, text: str, start: int) -> tuple[int, Verdict]:
        """As `scan_growing`, of a text that is complete."""
        try:
            match = self._search(self._whole, text, start, partial=False)
        except TimeoutError:
            return start, _timed_out()
        return (len(text), ALLOWED) if match is None else (match.start(), self._verdict(match))

    def _search(self, pattern: Any, text: str, start: int, *, partial: bool) -> Any:
        release_gil = len(text) > _RELEASE_GIL_CHARS
        return pattern.search(text, start, partial=partial, timeout=self._timeout_s, concurrent=release_gil)

    def _verdict(self, match: Any) -> Verdict:
        fired = next(int(name[1:]) for name, text in match.groupdict().items() if text is not None)
        return Verdict(allowed=False, rail=_NAME, rule=self._rules[fired])


class _Scan(OutputScan):
    """Keeps only the undecided end of the text and one character before it (for \\b).

    | released | context | undecided |
               ^ _start  ^ _start + len(context)
    """

    def __init__(self, deny_list: DenyList) -> None:
        self._deny_list = deny_list
        self._window = ""
        self._context = 0
        self._start = 0

    def feed(self, text: str) -> tuple[int, Verdict]:
        self._window += text
        until, verdict = self._deny_list.scan_growing(self._window, self._context)
        return self._advance(until), verdict

    def finish(self) -> tuple[int, Verdict]:
        until, verdict = self._deny_list.scan_rest(self._window, self._context)
        return self._advance(until), verdict

    def _advance(self, until: int) -> int:
        released = self._start + until
        keep_from = max(0, until - 1)
        self._window = self._window[keep_from:]
        self._context = until - keep_from
        self._start += keep_from
        return released


def _timed_out() -> Verdict:
    logger.warning("a deny-list search ran into its time limit; the text is blocked")
    return _TIMEOUT


def _read_patterns(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"The deny-list {path} is larger than {MAX_FILE_BYTES} bytes.", param="guard.deny_list")
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        message = f"The deny-list {path} cannot be read: {error.strerror}."
        raise ConfigError(message, param="guard.deny_list") from None
    except UnicodeDecodeError:
        raise ConfigError(f"The deny-list {path} is not UTF-8 text.", param="guard.deny_list") from None
    stripped = ((number, line.strip()) for number, line in enumerate(lines, start=1))
    patterns = {f"{path.name}:{number}": line for number, line in stripped if line and not line.startswith("#")}
    if not patterns:
        raise ConfigError(f"The deny-list {path} holds no pattern.", param="guard.deny_list")
    if len(patterns) > MAX_PATTERNS:
        message = f"The deny-list {path} holds {len(patterns)} patterns; {MAX_PATTERNS} is the limit."
        raise ConfigError(message, param="guard.deny_list")
    return patterns


# --- the dialect -------------------------------------------------------------------------------------------------

_ELEMENT = regex.compile(
    r"\\[pP]\{\^?\w+\}|\\.|\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]|\(\?.?|\{[^}]*\}?|.", regex.DOTALL
)
"""Splits a pattern into escapes, character classes, group heads, braces and single characters."""
_COUNT = regex.compile(r"\{\d+(,\d*)?\}|\{,\d+\}")
_ESCAPES = frozenset("bdDsSwWntrfvxuUpP")


def check_pattern(rule: str, pattern: str) -> str:
    """Returns `pattern` if it is one that can be matched in a stream. Raises ConfigError naming the rule."""
    problem = _problem(pattern)
    if problem is None:
        try:
            if _compile(pattern).search("") is not None:
                problem = "it matches the empty text, and so everything"
        except regex.error as error:
            problem = f"it is not a valid regular expression ({error})"
    if problem is not None:
        raise ConfigError(f"Deny-list pattern {pattern[:80]!r} ({rule}): {problem}.", param="guard.deny_list")
    return pattern


def _problem(pattern: str) -> str | None:
    if len(pattern) > MAX_PATTERN_CHARS:
        return f"it is longer than {MAX_PATTERN_CHARS} characters"
    for element in _ELEMENT.findall(pattern):
        if element.startswith("\\") and element[1].isalnum() and element[1] not in _ESCAPES:
            return f"{element} is not supported; of anchors and references only \\b is"
        if element.startswith("(?") and element != "(?:":
            return f"{element} is not supported; of groups (...) and (?:...) are"
        if element in ("^", "$"):
            return f"the anchor {element} is not supported; write \\{element} for the character itself"
        if element.startswith("{") and not _COUNT.fullmatch(element):
            return f"{element} is not a count; write \\{{ for the character itself"
    return None


def _map_word_boundaries(pattern: str) -> str:
    return "".join(r"(?:\b|\Z)" if element == r"\b" else element for element in _ELEMENT.findall(pattern))


def _compile(pattern: str) -> Any:
    return regex.compile(pattern, regex.IGNORECASE | regex.VERSION0)
