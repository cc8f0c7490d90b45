"""Bodies of the answers, as plain dicts (a Pydantic object per token would cost more than the token's own work)."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

CHAT_OBJECT, CHAT_CHUNK_OBJECT = "chat.completion", "chat.completion.chunk"
TEXT_OBJECT = "text_completion"
DONE_EVENT = b"data: [DONE]\n\n"


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


def dumps(value: Any) -> str:
    """Compact JSON; a NaN or infinity here is our bug and raises."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


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

    def body(self, choices: Sequence[dict[str, Any]], usage: Usage, **more: Any) -> dict[str, Any]:
        head = {"id": self._id, "object": self._whole, **self._fields}
        return {**head, "choices": list(choices), "usage": usage, **more}


def error_event(body: dict[str, Any]) -> bytes:
    """An error inside a stream whose status line is already out; the OpenAI clients raise on it."""
    return f"data: {dumps(body)}\n\n".encode()
