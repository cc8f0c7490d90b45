"""From logits to tokens: the one chain that SamplingParams describes, over all sequences of a step at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from shoal.kernels.draws import WORDS
from shoal.kernels.ops import Ops
from shoal.model_shards.engine.plan import TokenLogprobs
from shoal.model_shards.sampling.device_sampler import DeviceSampler
from shoal.model_shards.sampling.draw import FAILED, Draws, draw
from shoal.model_shards.sampling.drawn import Drawn
from shoal.model_shards.sampling.logprobs import BAD_LOGITS, prompt_logprobs, token_logprobs
from shoal.model_shards.sampling.processors import apply_edits, edits_logits
from shoal.model_shards.sampling.state import SamplerState
from shoal.model_shards.sampling.vocab_rows import IdArray, VocabRows, vocab_rows

__all__ = ["SampleResult", "Sampler", "SamplerState", "prompt_logprobs"]

ALL_MASKED = "the request's constraints (bad_words, allowed_token_ids, min_tokens) leave no token to choose"


@dataclass(slots=True)
class SampleResult:
    """Columns over the rows. A row in `errors` drew nothing: its token id is -1, its logprobs None."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: dict[int, str] = field(default_factory=dict)
    """row -> why it has no token; the other rows are not affected."""


class Sampler:
    """eos_token_ids: the model's ends of sequence; they are masked while a sequence is shorter than its min_tokens.
    ops: those of the device that holds the logits; tokens are drawn there if they can (`Ops.device_sampling`), or by a
    native pass over the host's memory (`Ops.host_sampling`), else in numpy."""

    def __init__(self, eos_token_ids: Sequence[int] = (), ops: Ops | None = None) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._host = ops if ops is not None and ops.host_sampling else None
        self._device = None
        if ops is not None and ops.device_sampling:
            self._device = DeviceSampler(ops, self._eos_token_ids)

    def sample(self, logits: torch.Tensor, states: Sequence[SamplerState]) -> SampleResult:
        """One token for each sequence. logits: fp32 [len(states), vocab], row i for states[i]; they are consumed (may
        be overwritten). The states are not changed: the caller appends the token when it commits it.

        The token of a row depends on its logits and its state only; on the CPU to the last bit.
        """
        assert logits.shape[0] == len(states), "one row of logits a state"
        if self._host is not None and not any(state.may_edit or state.params.logprobs is not None for state in states):
            return _sample_plainly(self._host, logits, states)
        if self._device is not None:
            drawn = self._device.launch(logits, states).collect()
        else:
            drawn = self._draw_on_host(logits, states)
        errors = dict(drawn.errors)
        for row in np.flatnonzero(drawn.token_ids == FAILED).tolist():
            errors.setdefault(row, ALL_MASKED if row in drawn.edited else BAD_LOGITS)
        result = SampleResult(drawn.token_ids.tolist(), [None] * len(states), errors)
        if drawn.raw is not None:
            _add_logprobs(result, drawn.raw, drawn.asked, states)
        return result

    def sum_error(self, vocab_size: int) -> float:
        """By how much, relatively, a draw on the host may be wrong about the sum of a row's weights: fp32 sums of 32
        terms in the native pass, of an eighth of the row in torch's softmax; both with room for the exponentials."""
        terms = 32 if self._host is not None else vocab_size // 8
        return 1e-5 + terms * 2.0**-24

    def _draw_on_host(self, logits: torch.Tensor, states: Sequence[SamplerState]) -> Drawn:
        rows = vocab_rows(logits := logits.contiguous())
        asked = [row for row, state in enumerate(states) if state.params.logprobs is not None]
        raw = rows.select(np.array(asked)) if asked else None
        edited = [row for row, state in enumerate(states) if edits_logits(state, self._eos_token_ids)]
        errors = self._edit(rows, edited, states)
        if self._host is not None:
            tokens = _draw_natively(self._host, logits, states)
        else:
            tokens = _draw_in_numpy(rows, states)
        tokens[list(errors)] = FAILED
        return Drawn(tokens, errors, edited, asked, raw)

    def _edit(self, rows: VocabRows, edited: list[int], states: Sequence[SamplerState]) -> dict[int, str]:
        """Applies penalties, bias and masks; returns the rows that had no distribution even before (a mask would hide
        a NaN)."""
        if not edited:
            return {}
        _, largest = rows.argmax(np.array(edited))
        apply_edits(rows, edited, states, self._eos_token_ids)
        return {row: BAD_LOGITS for row, value in zip(edited, largest, strict=True) if not np.isfinite(value)}


def _draw_in_numpy(rows: VocabRows, states: Sequence[SamplerState]) -> IdArray:
    tokens = np.full(len(states), FAILED, dtype=np.int64)
    greedy = np.array([row for row, state in enumerate(states) if state.params.greedy], dtype=np.int64)
    if len(greedy):
        ids, values = rows.argmax(greedy)
        tokens[greedy] = np.where(np.isfinite(values), ids, FAILED)
    random = [row for row, state in enumerate(states) if not state.params.greedy]
    if random:
        tokens[random] = draw(rows, _draws(random, states))
    return tokens


def _sample_plainly(ops: Ops, logits: torch.Tensor, states: Sequence[SamplerState]) -> SampleResult:
    """Where nothing is edited and no logprobs are asked for, as in most steps: as few calls as can be, for each costs
    several times more in a step, whose weights have emptied the caches, than alone."""
    token_ids, flags = ops.sample(logits, _draw_words(states)).tolist()
    errors = {}
    if any(flags):
        errors = {row: BAD_LOGITS for row, flag in enumerate(flags) if flag}
        token_ids = [FAILED if flag else token_id for token_id, flag in zip(token_ids, flags, strict=True)]
    return SampleResult(token_ids, [None] * len(states), errors)


def _draw_natively(ops: Ops, logits: torch.Tensor, states: Sequence[SamplerState]) -> IdArray:
    token_ids, flags = ops.sample(logits, _draw_words(states)).numpy()
    return np.where(flags == 0, token_ids, FAILED)


def _draw_words(states: Sequence[SamplerState]) -> torch.Tensor:
    """int64 [len(states), WORDS], as `draws.pack_draws` makes them."""
    if all(state.params.greedy for state in states):
        return _greedy_words(len(states))
    return torch.from_numpy(np.array([state.draw_words for state in states], dtype=np.int64))


@functools.lru_cache(maxsize=512)
def _greedy_words(count: int) -> torch.Tensor:
    """Temperature 0 is all zeros, and nothing else counts then. Not to be written to."""
    return torch.zeros((count, WORDS), dtype=torch.int64)


def _draws(index: list[int], states: Sequence[SamplerState]) -> Draws:
    chosen = [states[row] for row in index]
    params = [state.params for state in chosen]
    return Draws(
        np.array(index),
        np.array([p.temperature for p in params]),
        np.array([p.top_k for p in params]),
        np.array([p.top_p for p in params], dtype=np.float64),
        np.array([p.min_p for p in params], dtype=np.float64),
        np.array([state.uniforms() for state in chosen]),
    )


def _add_logprobs(result: SampleResult, raw: VocabRows, asked: list[int], states: Sequence[SamplerState]) -> None:
    """`raw` holds copies of the rows in `asked`, in that order."""
    good = [i for i, row in enumerate(asked) if row not in result.errors]
    if not good:
        return
    if len(good) < len(asked):
        raw = raw.select(np.array(good))
    chosen = [asked[i] for i in good]
    counts = [states[row].params.logprobs or 0 for row in chosen]
    entries = token_logprobs(raw, [result.token_ids[row] for row in chosen], counts)
    for row, entry in zip(chosen, entries, strict=True):
        result.logprobs[row] = entry
