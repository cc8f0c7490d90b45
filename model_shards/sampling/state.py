"""What the sampler must remember of one sequence between steps."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import numpy as np

from shoal.kernels.draws import POSITION, pack_draws
from shoal.model_shards.sampling.params import SamplingParams
from shoal.model_shards.sampling.philox import uniforms
from shoal.model_shards.sampling.vocab_rows import FloatArray, IdArray

_UNIFORMS_AHEAD = 64


class TokenCounts:
    """The distinct tokens of a sequence and how often each is in its output (0: prompt only). O(1) a token."""

    __slots__ = ("_counts", "_ids", "_size", "_slots")

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        distinct = np.unique(np.asarray(prompt, dtype=np.int64))
        self._size = len(distinct)
        self._ids = np.empty(max(64, 2 * self._size), dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._ids[: self._size] = distinct
        self._slots = {token_id: slot for slot, token_id in enumerate(distinct.tolist())}
        for token_id in output:
            self.add(token_id)

    @property
    def ids(self) -> IdArray:
        return self._ids[: self._size]

    @property
    def counts(self) -> FloatArray:
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        """One more of this token in the output."""
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = self._size
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token_id
            self._size += 1
        self._counts[slot] += 1


class SamplerState:
    """One sequence as the sampler sees it: its parameters, its place in the random stream, its tokens.

    token_ids: prompt and outputs so far (copied), the first `num_prompt_tokens` of them the prompt. A sequence that
    resumes after preemption is rebuilt from its tokens and goes on exactly as if it had never stopped.
    """

    __slots__ = (
        "_ahead",
        "_ahead_start",
        "_counts",
        "_draw_words",
        "allowed_ids",
        "banned_ids",
        "banned_phrases",
        "bias_ids",
        "bias_values",
        "may_edit",
        "num_prompt_tokens",
        "params",
        "sample_index",
        "seed",
        "token_ids",
    )

    def __init__(
        self, params: SamplingParams, seed: int, sample_index: int, token_ids: Sequence[int], num_prompt_tokens: int
    ) -> None:
        self.params = params
        self.seed = seed
        self.sample_index = sample_index
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = num_prompt_tokens
        self.bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self.bias_values = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self.banned_ids = [word[0] for word in params.bad_words if len(word) == 1]
        self.banned_phrases = [(list(word[:-1]), word[-1]) for word in params.bad_words if len(word) > 1]
        self.allowed_ids: IdArray | None = None
        if params.allowed_token_ids is not None:
            self.allowed_ids = np.unique(np.array(params.allowed_token_ids, dtype=np.int64))
        self.may_edit = params.may_edit
        self._draw_words: list[int] | None = None
        self._counts: TokenCounts | None = None
        self._ahead: list[list[float]] = []
        self._ahead_start = 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def penalized(self) -> bool:
        return self.params.penalized

    @property
    def counts(self) -> TokenCounts:
        """Made when first asked for. The prompt is counted only where a penalty looks at it."""
        if self._counts is None:
            prompt = self.token_ids[: self.num_prompt_tokens] if self.params.repetition_penalty != 1.0 else ()
            self._counts = TokenCounts(prompt, self.token_ids[self.num_prompt_tokens :])
        return self._counts

    def uniforms(self) -> list[float]:
        """The two uniforms of the next output position. Made for many positions at once: a batch of one spends more on
        calling numpy than on the numbers."""
        place = self.num_output_tokens - self._ahead_start
        if not 0 <= place < len(self._ahead):
            self._ahead_start, place = self.num_output_tokens, 0
            ahead = range(self._ahead_start, self._ahead_start + _UNIFORMS_AHEAD)
            self._ahead = uniforms(self.seed, self.sample_index, ahead).tolist()
        return self._ahead[place]

    @property
    def draw_words(self) -> list[int]:
        """The next draw as a row of `draws.pack_draws`: what `Ops.sample` draws with."""
        if self._draw_words is None:
            params = self.params
            shape = np.array([[0.0 if params.greedy else params.temperature, params.top_p, params.min_p]])
            self._draw_words = pack_draws([self.seed], [(self.sample_index, 0)], [params.top_k], shape)[0].tolist()
        self._draw_words[POSITION] = self.num_output_tokens
        return self._draw_words

    def limited_to(self, count: int) -> SamplerState:
        """The next draw from the first `count` tokens of the row's order, in place of those that the filters keep. For
        this draw only: it shares the tokens of this state."""
        state = copy(self)
        state.params = replace(self.params, top_k=count, top_p=1.0, min_p=0.0)
        state._draw_words = None
        return state

    def append(self, token_id: int) -> None:
        """A token joined the output."""
        self.token_ids.append(token_id)
        if self._counts is not None:
            self._counts.add(token_id)

    def masked_ids(self, eos_token_ids: Sequence[int]) -> list[int]:
        """Tokens that must not come next: bad words that they would complete, and the ends of the sequence while it
        is shorter than min_tokens."""
        masked = list(self.banned_ids)
        for prefix, last in self.banned_phrases:
            if self.token_ids[-len(prefix) :] == prefix:
                masked.append(last)
        if self.num_output_tokens < self.params.min_tokens:
            masked += [*eos_token_ids, *self.params.stop_token_ids]
        return masked
