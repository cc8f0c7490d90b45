"""Reading a request body within its limits: bytes first, then JSON, then depth."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

from shoal.configs.app import RequestLimits
from shoal.configs.errors import InvalidRequestError, RequestTooLargeError

_PARSE_INLINE_BYTES = 64 * 1024
"""Larger bodies are parsed on a thread: a megabyte of JSON takes tens of milliseconds, and other streams must flow."""


class ClientGoneError(Exception):
    """The client hung up before it was answered; there is no one to tell."""


async def read_json(request: Request, limits: RequestLimits) -> Any:
    """The decoded body. Raises InvalidRequestError or RequestTooLargeError, and ClientGoneError."""
    raw = await _read_bytes(request, limits.max_body_bytes)
    if len(raw) <= _PARSE_INLINE_BYTES:
        return _parse(raw, limits.max_json_depth)
    return await asyncio.to_thread(_parse, raw, limits.max_json_depth)


async def _read_bytes(request: Request, most: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > most:
        raise _too_large(most)
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > most:
                raise _too_large(most)
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientGoneError from None
    return b"".join(chunks)


def _too_large(most: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"The request body is larger than {most} bytes, the limit of this server.")


def _parse(raw: bytes, max_depth: int) -> Any:
    try:
        value = json.loads(raw, parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep(max_depth) from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, integers of thousands of digits
        raise InvalidRequestError(f"The request body is not valid JSON: {error}.", code="invalid_json") from None
    _check_depth(value, max_depth)
    if b"\\ud" in raw or b"\\uD" in raw:
        _check_surrogates(value)
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _check_depth(value: Any, max_depth: int) -> None:
    """Level by level and without recursion; only containers are kept, so that long lists of numbers cost little."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(max_depth):
        children = [container.values() if isinstance(container, dict) else container for container in level]
        level = [item for items in children for item in items if isinstance(item, (dict, list))]
        if not level:
            return
    raise _too_deep(max_depth)


def _check_surrogates(value: Any) -> None:
    """Half of a surrogate pair is legal JSON and no text at all: no tokenizer can encode it."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        message = "The request body holds half of a surrogate pair (\\ud800 to \\udfff alone), which is not text."
        raise InvalidRequestError(message, code="invalid_json") from None


def _too_deep(max_depth: int) -> InvalidRequestError:
    return InvalidRequestError(f"The request body nests deeper than {max_depth} levels.", code="too_deep")
