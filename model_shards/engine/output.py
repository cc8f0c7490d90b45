"""The engine's output side: step results become text deltas, and each sink gets its own once a step.

Runs on the engine's thread, while the ranks compute the next step. Stop strings are found here, because only here is
there text; the scheduler is then told to end the sequence.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from shoal.model_shards.engine.detokenizer import Detokenizer, Piece, TextTable, TokenTexts
from shoal.model_shards.engine.metrics import FinishedSequence, MetricsSink
from shoal.model_shards.engine.request import FinishReason, Request, RequestDelta
from shoal.model_shards.engine.sequence import Sequence, SequenceUpdate

logger = logging.getLogger(__name__)


class DeltaSink(Protocol):
    """Where the deltas of a request go."""

    def deliver(self, deltas: list[RequestDelta]) -> None:
        """Called at most once a step, on an engine thread, with all that is new for this sink; must not block. If it
        raises, its requests are aborted."""


@dataclass(slots=True, eq=False)
class _Stream:
    """The output state of one sequence."""

    sequence: Sequence
    detokenizer: Detokenizer
    sink: DeltaSink
    num_resumed: int = 0
    """Output tokens that another engine gave before; they are counted, not delivered."""
    num_output_tokens: int = 0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    prompt_logprobs_due: bool = False

    @property
    def request(self) -> Request:
        return self.sequence.request


@dataclass(frozen=True, slots=True)
class _Ending:
    reason: FinishReason
    stop_reason: str | int | None = None
    error: str | None = None


class OutputProcessor:
    """`request_ended` is called with the id of each request whose last sequence has ended."""

    def __init__(
        self,
        tokenizer: TokenTexts,
        metrics: MetricsSink,
        clock: Callable[[], float],
        request_ended: Callable[[str], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._texts = TextTable(tokenizer)
        self._metrics = metrics
        self._clock = clock
        self._request_ended = request_ended
        self.finished: Counter[FinishReason] = Counter()
        """Sequences ended so far, by reason."""
        self._streams: dict[int, _Stream] = {}
        self._open: dict[str, int] = {}
        """Sequences not ended yet, by request."""
        self._outbox: dict[int, tuple[DeltaSink, list[RequestDelta]]] = {}

    def add(self, sequences: list[Sequence], sink: DeltaSink) -> None:
        for sequence in sequences:
            sampling = sequence.request.sampling
            detokenizer = Detokenizer(self._tokenizer, sampling, sequence.request.prompt_token_ids, self._texts)
            stream = _Stream(sequence, detokenizer, sink)
            stream.prompt_logprobs_due = sequence.index == 0 and sampling.prompt_logprobs is not None
            if sequence.num_output_tokens:
                detokenizer.replay(sequence.token_ids[sequence.num_prompt_tokens :])
                stream.num_resumed = stream.num_output_tokens = sequence.num_output_tokens
            self._streams[sequence.seq_id] = stream
        self._open[sequences[0].request.request_id] = len(sequences)

    def process(self, updates: list[SequenceUpdate]) -> list[int]:
        """Delivers what a committed step gave. Returns the sequences that a stop string (or a broken sink or tokenizer)
        ended: the scheduler must finish them."""
        now = self._clock()
        gaps: list[float] = []
        ended = []
        for update in updates:
            # A stop string may have ended the stream while this step was still under way.
            stream = self._streams.get(update.sequence.seq_id)
            if stream is None:
                continue
            self._measure(stream, update, now, gaps)
            if self._advance(stream, update, now):
                ended.append(update.sequence.seq_id)
        if gaps:
            self._metrics.inter_token(gaps)
        return ended + self.deliver()

    def end(self, sequences: Iterable[Sequence], reason: FinishReason, error: str | None = None) -> None:
        """Closes streams from outside (abort, shutdown, a dead engine); the deltas wait for the next `deliver`."""
        now = self._clock()
        for sequence in sequences:
            if stream := self._streams.get(sequence.seq_id):
                self._close(stream, stream.detokenizer.flush(), _Ending(reason, error=error), now)

    def end_all(self, error: str) -> None:
        self.end([stream.sequence for stream in list(self._streams.values())], FinishReason.ABORT, error)

    def deliver(self) -> list[int]:
        """Hands each sink what waits for it. Returns the live sequences of sinks that failed; they are forgotten."""
        outbox, self._outbox = self._outbox, {}
        orphans: list[int] = []
        for sink, deltas in outbox.values():
            try:
                sink.deliver(deltas)
            except Exception:
                logger.exception("A delta sink failed; its requests are aborted.")
                orphans += [seq_id for seq_id, stream in self._streams.items() if stream.sink is sink]
        for seq_id in orphans:
            self._forget(self._streams[seq_id], FinishReason.ABORT, self._clock())
        return orphans

    # One sequence ---------------------------------------------------------------------------------------------------

    def _advance(self, stream: _Stream, update: SequenceUpdate, now: float) -> bool:
        """True when the sequence is over (a stop string) and the scheduler still thinks it alive."""
        try:
            if self._advance_plainly(stream, update):
                return False
            piece = self._read(stream, update)
        except Exception as error:  # a fault of the tokenizer with these tokens: the other sequences go on
            logger.exception("A token of request %s could not be made text.", stream.request.request_id)
            reason = f"A token could not be made text ({type(error).__name__})."
            self._close(stream, Piece(), _Ending(FinishReason.ERROR, error=reason), now)
            return update.finish_reason is None
        if piece.stop is not None:
            self._close(stream, piece, _Ending(FinishReason.STOP, piece.stop), now)
            return update.finish_reason is None
        if update.finish_reason is not None:
            self._close(stream, piece, _Ending(update.finish_reason, update.stop_token_id, update.error), now)
        elif piece.token_ids or self._prompt_logprobs_ready(stream):
            self._delta(stream, piece)
        return False

    def _advance_plainly(self, stream: _Stream, update: SequenceUpdate) -> bool:
        """What nearly every update is: one token more in the middle of an answer, of which nothing is asked but its
        text, and whose text can be shown. A third of the time of the general way. False, and nothing done, when it is
        not so."""
        if update.finish_reason is not None or stream.prompt_logprobs_due:
            return False
        if len(update.token_ids) != 1 or update.logprobs[0] is not None:
            return False
        token_id = update.token_ids[0]
        text = stream.detokenizer.feed_plain(token_id)
        if text is None:
            return False
        stream.num_output_tokens += 1
        sequence = stream.sequence
        # By position: this is made once a token.
        delta = RequestDelta(
            *(sequence.request.request_id, sequence.index, text, [token_id], [], None, None, None),
            *(stream.num_output_tokens, sequence.num_cached_tokens),
        )
        self._post(stream, delta)
        return True

    def _read(self, stream: _Stream, update: SequenceUpdate) -> Piece:
        """The text that the update completes; all that is left when it is the last one."""
        piece = Piece()
        last = len(update.token_ids) - 1
        for position, token_id in enumerate(update.token_ids):
            ends = position == last and update.finish_reason is FinishReason.STOP
            shown = update.stop_token_id is not None and stream.request.sampling.include_stop_str_in_output
            piece.extend(stream.detokenizer.feed(token_id, update.logprobs[position], hidden=ends and not shown))
            if piece.stop is not None:
                return piece
        if update.finish_reason is not None:
            piece.extend(stream.detokenizer.flush())
        return piece

    def _delta(self, stream: _Stream, piece: Piece) -> RequestDelta:
        """Makes a delta of a piece and posts it."""
        stream.num_output_tokens += len(piece.token_ids)
        delta = RequestDelta(
            request_id=stream.request.request_id,
            index=stream.sequence.index,
            text=piece.text,
            token_ids=piece.token_ids,
            logprobs=piece.logprobs,
            num_output_tokens=stream.num_output_tokens,
            num_cached_tokens=stream.sequence.num_cached_tokens,
        )
        if self._prompt_logprobs_ready(stream):
            delta.prompt_logprobs = stream.sequence.prompt_logprobs
            stream.prompt_logprobs_due = False
        self._post(stream, delta)
        return delta

    def _post(self, stream: _Stream, delta: RequestDelta) -> None:
        """Puts a delta where it waits for the next `deliver`."""
        waiting = self._outbox.get(id(stream.sink))
        if waiting is None:
            waiting = self._outbox[id(stream.sink)] = (stream.sink, [])
        waiting[1].append(delta)

    def _prompt_logprobs_ready(self, stream: _Stream) -> bool:
        return stream.prompt_logprobs_due and not stream.sequence.wants_prompt_logprobs

    def _close(self, stream: _Stream, piece: Piece, ending: _Ending, now: float) -> None:
        delta = self._delta(stream, piece)
        delta.finish_reason = ending.reason
        delta.stop_reason = ending.stop_reason
        delta.error = ending.error
        self._forget(stream, ending.reason, now)

    def _forget(self, stream: _Stream, reason: FinishReason, now: float) -> None:
        sequence, request = stream.sequence, stream.request
        del self._streams[sequence.seq_id]
        self.finished[reason] += 1
        self._metrics.sequence_finished(
            FinishedSequence(
                reason=reason,
                index=sequence.index,
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_cached_tokens=sequence.num_cached_tokens,
                num_output_tokens=stream.num_output_tokens - stream.num_resumed,
                e2e_s=now - request.arrival_time,
                decode_s=now - stream.first_token_at if stream.first_token_at else 0.0,
            )
        )
        self._open[request.request_id] -= 1
        if self._open[request.request_id] == 0:
            del self._open[request.request_id]
            self._request_ended(request.request_id)

    def _measure(self, stream: _Stream, update: SequenceUpdate, now: float, gaps: list[float]) -> None:
        if not update.token_ids:
            return
        if stream.first_token_at:
            gaps.append(now - stream.last_token_at)
        else:
            stream.first_token_at = now
            if not stream.num_resumed:
                self._metrics.first_token(now - stream.request.arrival_time)
        stream.last_token_at = now
