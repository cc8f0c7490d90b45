"""What a request may ask of the sampler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from shoal.configs.errors import InvalidRequestError

MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1024
MAX_LOGPROBS = 20
MAX_N = 128
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are drawn. Immutable; `check` is called once, before the engine sees it.

    The chain is applied in this order: penalties -> logit_bias -> bad_words / allowed_token_ids / min_tokens masks
    -> temperature -> top_k -> top_p -> min_p -> draw. `temperature == 0` is greedy (argmax after the masks).
    Filters keep a prefix of one total order (larger logit first, the lower id first among equals), so `top_k=1` is
    greedy too. Reported logprobs are those of the model's own distribution (log-softmax of the raw logits).

    repetition_penalty looks at prompt and output, presence_penalty and frequency_penalty at the output. A bad word of
    several tokens is matched against prompt and output; only its last token is masked, when the others stand before
    it. Before min_tokens outputs, end-of-sequence and stop_token_ids are masked. ignore_eos masks nothing: the engine
    goes on after an end-of-sequence token.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    skip_special_tokens: bool = True

    @property
    def greedy(self) -> bool:
        """Temperatures too small to divide fp32 logits by without overflow count as 0."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalized(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def may_edit(self) -> bool:
        """Whether its logits are edited at some step; most sequences' never are."""
        listed = self.logit_bias or self.bad_words or self.allowed_token_ids is not None
        return bool(self.penalized or listed or self.min_tokens > 0)

    def check(self, vocab_size: int) -> None:
        """Raises InvalidRequestError naming the field. `vocab_size` is the width of the logits."""
        _require_range("temperature", self.temperature, 0.0, 2.0)
        _require(0.0 < self.top_p <= 1.0, "top_p", "must be in (0, 1]", self.top_p)
        _require(self.top_k >= 0, "top_k", "must be 0 (off) or a positive integer", self.top_k)
        _require_range("min_p", self.min_p, 0.0, 1.0)
        _require_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        # Logits are divided by it: what fp32 takes for zero, or scales them to infinity with, is no penalty.
        _require_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _require(1 <= self.n <= MAX_N, "n", f"must be between 1 and {MAX_N}", self.n)
        self._check_lengths()
        self._check_token_ids(vocab_size)

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            floor = 0 if self.prompt_logprobs is not None else 1
            message = "must be at least 1 (0 is legal only to score a prompt: echo with logprobs)"
            _require(self.max_tokens >= floor, "max_tokens", message, self.max_tokens)
            _require(self.min_tokens <= self.max_tokens, "min_tokens", "must not exceed max_tokens", self.min_tokens)
        _require(self.min_tokens >= 0, "min_tokens", "must not be negative", self.min_tokens)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            ok = count is None or 0 <= count <= MAX_LOGPROBS
            _require(ok, name, f"must be between 0 and {MAX_LOGPROBS}", count)
        _require(
            len(self.stop) <= MAX_STOP_STRINGS, "stop", f"takes at most {MAX_STOP_STRINGS} strings", len(self.stop)
        )
        _require(all(self.stop), "stop", "must not hold an empty string", "")
        _require(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "must fit in 64 bits", self.seed)
        _require(all(self.bad_words), "bad_words", "must not hold an empty word", "")
        total = sum(len(word) for word in self.bad_words)
        ok = len(self.bad_words) <= MAX_BAD_WORDS and total <= MAX_BAD_WORD_TOKENS
        limits = f"takes at most {MAX_BAD_WORDS} words of {MAX_BAD_WORD_TOKENS} tokens in all"
        _require(ok, "bad_words", limits, f"{len(self.bad_words)} words, {total} tokens")

    def _check_token_ids(self, vocab_size: int) -> None:
        for token_id, bias in self.logit_bias.items():
            _require_token_id("logit_bias", token_id, vocab_size)
            _require(math.isfinite(bias) and -100 <= bias <= 100, "logit_bias", "values must be in [-100, 100]", bias)
        for token_id in self.stop_token_ids:
            _require_token_id("stop_token_ids", token_id, vocab_size)
        for token_id in self.allowed_token_ids or ():
            _require_token_id("allowed_token_ids", token_id, vocab_size)
        _require(self.allowed_token_ids != (), "allowed_token_ids", "must not be empty", "[]")
        for word in self.bad_words:
            for token_id in word:
                _require_token_id("bad_words", token_id, vocab_size)

    def to_wire(self) -> dict[str, Any]:
        """Plain values for msgpack; only what differs from the defaults."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != _DEFAULTS[f.name]}

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> SamplingParams:
        values = dict(wire)
        for name in ("stop", "stop_token_ids", "allowed_token_ids"):
            if values.get(name) is not None:
                values[name] = tuple(values[name])
        if "bad_words" in values:
            values["bad_words"] = tuple(tuple(word) for word in values["bad_words"])
        return cls(**values)


def check_token_ids(field_name: str, token_ids: list[int], vocab_size: int) -> None:
    """Raises InvalidRequestError unless every id indexes the logits."""
    if token_ids and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return  # two passes in C: a long prompt is checked on its caller's event loop
    for token_id in token_ids:
        _require_token_id(field_name, token_id, vocab_size)


def _require_token_id(name: str, token_id: int, vocab_size: int) -> None:
    _require(0 <= token_id < vocab_size, name, f"token ids must be in [0, {vocab_size})", token_id)


def _require_range(name: str, value: float, low: float, high: float) -> None:
    _require(math.isfinite(value) and low <= value <= high, name, f"must be between {low:g} and {high:g}", value)


def _require(ok: bool, name: str, rule: str, value: object) -> None:
    if not ok:
        raise InvalidRequestError(f"{name} {rule}; got {value!r}.", param=name)


_DEFAULTS = {f.name: getattr(SamplingParams(), f.name) for f in fields(SamplingParams)}
