"""From deltas to OpenAI's answers: whole bodies and stream chunks, for chat and for text completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.deployments.protocol import logprobs as lp
from shoal.deployments.protocol.responses import FRAMED, Envelope, Frame, Usage
from shoal.deployments.streams import merge
from shoal.model_shards.engine.plan import TokenLogprobs
from shoal.model_shards.engine.request import RequestDelta

Entries = list[TokenLogprobs | None]


@dataclass(frozen=True, slots=True)
class StreamUsage:
    """Which usage a stream shows."""

    final: bool
    """A last chunk with the totals; every other chunk has `usage: null` then."""
    continuous: bool
    """The totals so far in every chunk."""


class Format(ABC):
    """One answer, streamed or whole."""

    def __init__(self, envelope: Envelope, stream_usage: StreamUsage) -> None:
        self._envelope = envelope
        self._stream_usage = stream_usage
        self._frames: dict[int, Frame] = {}
        """Choice -> the frame of its plain chunks, once it has begun; empty where a chunk shows more than text."""

    @property
    def shows_progress(self) -> bool:
        """`events` needs the usage so far."""
        return self._stream_usage.continuous

    def events(self, updates: dict[int, RequestDelta], usage: Usage | None) -> bytes:
        """The SSE events of what is new, by choice; maybe none. `usage` may be None unless `shows_progress`."""
        parts = []
        for index, delta in updates.items():
            frame = self._frames.get(index)
            if frame is None or delta.finish_reason is not None:
                return self._any_events(updates, usage)
            if delta.text:
                parts.append(frame.around(delta.text))
        return b"".join(parts)

    @abstractmethod
    def _any_events(self, updates: dict[int, RequestDelta], usage: Usage | None) -> bytes:
        """`events`, whatever is in the updates."""

    @abstractmethod
    def body(self, outputs: dict[int, RequestDelta], usage: Usage) -> dict[str, Any]:
        """The whole answer, of each choice's merged deltas."""

    def closing(self, usage: Usage) -> bytes:
        """What follows the last chunk of a stream."""
        return self._envelope.chunk((), usage=usage) if self._stream_usage.final else b""

    def _chunk(self, choice: dict[str, Any], usage: Usage | None) -> bytes:
        return self._envelope.chunk((choice,), **self._chunk_usage(usage))

    def _begin_frame(self, index: int, choice: dict[str, Any]) -> None:
        if not self._stream_usage.continuous:
            self._frames[index] = self._envelope.frame(choice, **self._chunk_usage(None))

    def _chunk_usage(self, usage: Usage | None) -> dict[str, Usage | None]:
        if self._stream_usage.continuous:
            return {"usage": usage}
        return {"usage": None} if self._stream_usage.final else {}


class ChatFormat(Format):
    def __init__(
        self,
        envelope: Envelope,
        stream_usage: StreamUsage,
        *,
        vocabulary: lp.Vocabulary | None,
        wants_logprobs: bool,
        wants_prompt_logprobs: bool,
    ) -> None:
        super().__init__(envelope, stream_usage)
        self._vocabulary = vocabulary
        self._wants_logprobs, self._wants_prompt_logprobs = wants_logprobs, wants_prompt_logprobs
        self._introduced: set[int] = set()

    def _any_events(self, updates: dict[int, RequestDelta], usage: Usage | None) -> bytes:
        parts = []
        for index, delta in updates.items():
            if index not in self._introduced:
                self._introduced.add(index)
                if not self._wants_logprobs:
                    self._begin_frame(index, _chat_chunk(index, {"content": FRAMED}, None, None))
                role = {"role": "assistant", "content": "", "refusal": None}
                parts.append(self._chunk(_chat_chunk(index, role, None, None), usage))
            if index in self._frames and delta.text:
                parts.append(self._frames[index].around(delta.text))
            elif delta.text or delta.logprobs:
                logprobs = self._logprobs(delta)
                parts.append(self._chunk(_chat_chunk(index, {"content": delta.text}, logprobs, None), usage))
            if delta.finish_reason is not None:
                last = _chat_chunk(index, {}, None, delta.finish_reason.value)
                parts.append(self._chunk({**last, "stop_reason": delta.stop_reason}, usage))
        return b"".join(parts)

    def body(self, outputs: dict[int, RequestDelta], usage: Usage) -> dict[str, Any]:
        choices = []
        for index, output in sorted(outputs.items()):
            assert output.finish_reason is not None
            choices.append(
                {
                    "index": index,
                    "message": {"role": "assistant", "content": output.text, "refusal": None},
                    "logprobs": self._logprobs(output),
                    "finish_reason": output.finish_reason.value,
                    "stop_reason": output.stop_reason,
                }
            )
        more = {}
        scores = outputs[0].prompt_logprobs
        if self._wants_prompt_logprobs and scores is not None and self._vocabulary is not None:
            more["prompt_logprobs"] = lp.prompt_logprobs(scores, self._vocabulary)
        return self._envelope.body(choices, usage, **more)

    def _logprobs(self, delta: RequestDelta) -> dict[str, Any] | None:
        if not self._wants_logprobs or self._vocabulary is None:
            return None
        return lp.chat_logprobs(delta.logprobs, self._vocabulary)


def _chat_chunk(index: int, delta: dict[str, Any], logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    text: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What a text completion shows beside the text."""

    n: int
    """Choices a prompt."""
    echo: Sequence[EchoedPrompt] | None
    """The prompts, when they are to be repeated in front of their answers."""
    logprobs: bool
    prompt_logprobs: bool
    """In vLLM's format; the legacy format of scored prompts is `echo` with `logprobs`."""
    vocabulary: lp.Vocabulary | None
    invisible: frozenset[int] = frozenset()


class TextFormat(Format):
    def __init__(self, envelope: Envelope, stream_usage: StreamUsage, options: TextOptions) -> None:
        super().__init__(envelope, stream_usage)
        self._options = options
        self._begun: set[int] = set()
        self._legacy: dict[int, lp.LegacyLogprobs] = {}
        self._scores: dict[int, Entries] = {}
        """Prompt -> its logprobs: they come once a prompt, with the first delta of its first choice."""
        self._early: dict[int, RequestDelta] = {}
        """Deltas of other choices that came before the scores which their chunk begins with."""

    def _any_events(self, updates: dict[int, RequestDelta], usage: Usage | None) -> bytes:
        self._note_scores(updates)
        waiting, self._early = self._early, {}
        parts = []
        for index in sorted(updates.keys() | waiting.keys()):
            deltas = [source[index] for source in (waiting, updates) if index in source]
            delta = merge(deltas)
            if self._must_wait(index):
                self._early[index] = delta
                continue
            if not self._options.logprobs and index not in self._begun:
                self._begin_frame(index, _text_choice(index, FRAMED, None, None))
            text, logprobs = self._content(index, delta)
            if text or logprobs is not None:
                parts.append(self._chunk(_text_choice(index, text, logprobs, None), usage))
            if delta.finish_reason is not None:
                last = _text_choice(index, "", None, delta.finish_reason.value)
                parts.append(self._chunk({**last, "stop_reason": delta.stop_reason}, usage))
        return b"".join(parts)

    def body(self, outputs: dict[int, RequestDelta], usage: Usage) -> dict[str, Any]:
        self._note_scores(outputs)
        choices = []
        for index, output in sorted(outputs.items()):
            assert output.finish_reason is not None
            text, logprobs = self._content(index, output)
            choice = _text_choice(index, text, logprobs, output.finish_reason.value)
            choice["stop_reason"] = output.stop_reason
            if self._options.prompt_logprobs and self._options.vocabulary is not None:
                scores = self._scores.get(index // self._options.n, [])
                choice["prompt_logprobs"] = lp.prompt_logprobs(scores, self._options.vocabulary)
            choices.append(choice)
        return self._envelope.body(choices, usage)

    def _note_scores(self, deltas: dict[int, RequestDelta]) -> None:
        for index, delta in deltas.items():
            if delta.prompt_logprobs is not None:
                self._scores[index // self._options.n] = delta.prompt_logprobs

    def _must_wait(self, index: int) -> bool:
        options = self._options
        scored_echo = options.echo is not None and options.logprobs
        return scored_echo and index not in self._begun and index // options.n not in self._scores

    def _content(self, index: int, delta: RequestDelta) -> tuple[str, dict[str, Any] | None]:
        """Text and logprobs of a delta; the first one of a choice begins with the echo."""
        options = self._options
        echo = None
        if index not in self._begun:
            self._begun.add(index)
            echo = options.echo[index // options.n] if options.echo is not None else None
        text = delta.text if echo is None else echo.text + delta.text
        if not options.logprobs or options.vocabulary is None:
            return text, None
        legacy = self._legacy.get(index)
        if legacy is None:
            legacy = self._legacy[index] = lp.LegacyLogprobs(options.vocabulary, options.invisible)
        if echo is None:
            return text, legacy.block(delta.logprobs) if delta.logprobs or delta.text else None
        prompt = legacy.echo(echo.token_ids, self._scores[index // options.n], echo.text)
        return text, lp.join_blocks(prompt, legacy.block(delta.logprobs))


def _text_choice(index: int, text: str, logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
