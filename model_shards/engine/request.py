"""What the engine is asked, and what it answers, a step at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from shoal.configs.errors import InvalidRequestError
from shoal.model_shards.engine.plan import TokenLogprobs
from shoal.model_shards.sampling.params import SamplingParams, check_token_ids


@dataclass(frozen=True, slots=True)
class ResumedOutput:
    """What one of the n sequences had given when the engine that ran it was lost."""

    token_ids: list[int]
    """All that reached the client, in order; what was drawn and held back is drawn again, and comes out the same."""
    finished: bool = False
    """Its end reached the client too: there is nothing to go on with."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it is known after tokenization; it never changes. `n > 1` makes n sequences of it."""

    request_id: str
    """Unique inside the engine (made by the gateway; the client's own id is only a label there)."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int
    """`sampling.seed`, or drawn at random by whoever made the request."""
    priority: int = 0
    """Lower runs first, like a queue number."""
    arrival_time: float = 0.0
    """Seconds on the engine's clock."""
    cache_salt: str = ""
    """Requests share cached prefixes only with equal salts; set from the tenant, never by the client alone."""
    resumed: tuple[ResumedOutput, ...] = ()
    """Empty for a new request. Else one entry a sequence: the request goes on from there as if nothing had happened,
    because a draw depends on seed, sample index and position only. The deltas begin after what is named here."""

    @property
    def open_indices(self) -> list[int]:
        """Which of the n sequences are still to be generated."""
        return [i for i in range(self.sampling.n) if not (self.resumed and self.resumed[i].finished)]

    def check_resumed(self, vocab_size: int, limit: int) -> None:
        """`limit`: most output tokens of a sequence. Raises InvalidRequestError for outputs that this request cannot
        have had."""
        if not self.resumed:
            return
        if len(self.resumed) != self.sampling.n or not self.open_indices:
            message = f"resumed must name {self.sampling.n} sequences, at least one of them not finished."
            raise InvalidRequestError(message, param="resumed")
        for index in self.open_indices:
            token_ids = self.resumed[index].token_ids
            check_token_ids("resumed", token_ids, vocab_size)
            if token_ids and len(token_ids) >= limit:
                message = f"Sequence {index} has had {len(token_ids)} of at most {limit} tokens: it is over."
                raise InvalidRequestError(message, param="resumed")

    def to_wire(self) -> list[Any]:
        return [
            self.request_id,
            self.prompt_token_ids,
            self.sampling.to_wire(),
            self.seed,
            self.priority,
            self.arrival_time,
            self.cache_salt,
            [[output.token_ids, output.finished] for output in self.resumed],
        ]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> Request:
        request_id, prompt_token_ids, sampling, seed, priority, arrival_time, cache_salt, resumed = wire
        return cls(
            request_id,
            prompt_token_ids,
            SamplingParams.from_wire(sampling),
            seed,
            priority,
            arrival_time,
            cache_salt,
            tuple(ResumedOutput(*output) for output in resumed),
        )


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    """Ended from outside: whoever asked has gone, or the engine has stopped. It could go on elsewhere."""
    ERROR = "error"
    """Failed by itself, and would again."""
    CONTENT_FILTER = "content_filter"


@dataclass(slots=True)
class RequestDelta:
    """What is new of one sequence of one request. The last one of each sequence carries `finish_reason`."""

    request_id: str
    index: int
    """Which of the request's n sequences."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per token id when asked for. Tokens whose text is held back (half a character, a possible stop string) are
    held back with it, so that text, ids and logprobs of a delta belong together."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it; None for end-of-sequence."""
    error: str | None = None
    num_output_tokens: int = 0
    """Of this sequence so far, this delta included."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """In the first delta of index 0 when asked for: one entry a prompt token, the first None."""

    def to_wire(self) -> list[Any]:
        prompt = None
        if self.prompt_logprobs is not None:
            prompt = [None if item is None else item.to_wire() for item in self.prompt_logprobs]
        return [
            self.request_id,
            self.index,
            self.text,
            self.token_ids,
            [item.to_wire() for item in self.logprobs],
            None if self.finish_reason is None else self.finish_reason.value,
            self.stop_reason,
            self.error,
            self.num_output_tokens,
            self.num_cached_tokens,
            prompt,
        ]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> RequestDelta:
        request_id, index, text, token_ids, logprobs, finish, stop_reason, error, outputs, cached, prompt = wire
        return cls(
            request_id,
            index,
            text,
            token_ids,
            [TokenLogprobs.from_wire(item) for item in logprobs],
            None if finish is None else FinishReason(finish),
            stop_reason,
            error,
            outputs,
            cached,
            None if prompt is None else [None if item is None else TokenLogprobs.from_wire(item) for item in prompt],
        )
