"""Bodies of the answers, as plain dicts (a Pydantic object per token would cost more than the token's own work)."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any, NotRequired, TypedDict

CHAT_OBJECT, CHAT_CHUNK_OBJECT = "chat.completion", "chat.completion.chunk"
TEXT_OBJECT = "text_completion"
DONE_EVENT = b"data: [DONE]\n\n"
FRAMED = "<text>"
"""Stands for the text in the chunk that `Envelope.frame` is given; nothing of a client's comes after it there."""


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ModelCard(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class TokenizeResponse(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


def new_id(prefix: str) -> str:
    """`chatcmpl-...` or `cmpl-...`."""
    return f"{prefix}-{uuid.uuid4().hex}"


def make_usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )


dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
"""Compact JSON; a NaN or infinity here is our bug and raises. (`json.dumps` would make an encoder for every call.)"""


@dataclass(frozen=True, slots=True)
class Frame:
    """The bytes of an event around the one string that differs from chunk to chunk."""

    head: bytes
    tail: bytes

    def around(self, text: str) -> bytes:
        return self.head + encode_basestring(text).encode() + self.tail


class Envelope:
    """The fields that every body of one answer repeats; rendered once, since a stream sends them with each chunk."""

    def __init__(self, response_id: str, model: str, fingerprint: str, objects: tuple[str, str]) -> None:
        """`objects` are the names of the whole answer and of a chunk of it."""
        self._whole, chunk = objects
        self._fields = {"created": int(time.time()), "model": model, "system_fingerprint": fingerprint}
        self._id = response_id
        self._chunk_head = dumps({"id": response_id, "object": chunk, **self._fields})[:-1]

    def chunk(self, choices: Sequence[dict[str, Any]], **more: Any) -> bytes:
        """One SSE event."""
        tail = "".join(f',"{name}":{dumps(value)}' for name, value in more.items())
        return f'data: {self._chunk_head},"choices":{dumps(choices)}{tail}}}\n\n'.encode()

    def frame(self, choice: dict[str, Any], **more: Any) -> Frame:
        """Of chunks like the one with this choice, in which a string is `FRAMED`."""
        head, _, tail = self.chunk((choice,), **more).rpartition(dumps(FRAMED).encode())
        return Frame(head, tail)

    def body(self, choices: Sequence[dict[str, Any]], usage: Usage, **more: Any) -> dict[str, Any]:
        head = {"id": self._id, "object": self._whole, **self._fields}
        return {**head, "choices": list(choices), "usage": usage, **more}


def error_event(body: dict[str, Any]) -> bytes:
    """An error inside a stream whose status line is already out; the OpenAI clients raise on it."""
    return f"data: {dumps(body)}\n\n".encode()
