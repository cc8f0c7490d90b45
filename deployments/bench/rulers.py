"""Ways to know a prompt's length in tokens, best first: the server's /tokenize, a local tokenizer, its usage."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from shoal.configs.errors import ConfigError
from shoal.deployments.bench.http_target import HttpTarget
from shoal.deployments.bench.prompts import Message, Ruler


class ChatEncoder(Protocol):
    """The part of `shoal.model_shards.tokenizer.Tokenizer` that a ruler needs."""

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]: ...


class LocalRuler(Ruler):
    """Counts with a tokenizer in this process."""

    def __init__(self, tokenizer: ChatEncoder) -> None:
        self._tokenizer = tokenizer

    def encode(self, messages: list[Message]) -> list[int]:
        """The rendered prompt's tokens."""
        return self._tokenizer.encode_chat([dict(message) for message in messages])

    async def count(self, messages: list[Message]) -> int:
        return len(self.encode(messages))


class TokenizeRuler(Ruler):
    """Asks the server's /tokenize, which knows its own chat template."""

    def __init__(self, target: HttpTarget) -> None:
        self._target = target

    async def count(self, messages: list[Message]) -> int:
        count = await self.try_count(messages)
        if count is None:
            raise ConfigError(f"{self._target.label} stopped answering /tokenize.", param="url")
        return count

    async def try_count(self, messages: list[Message]) -> int | None:
        """None when the server has no such endpoint or does not take what the API at hand sends."""
        body = {"model": self._target.model, **self._target.prompt_fields(messages)}
        status, answer = await self._target.post_json("/tokenize", body)
        count = answer.get("count") if status == 200 else None
        return count if isinstance(count, int) and count > 0 else None


class UsageRuler(Ruler):
    """Counts words, corrected by the prompt tokens that the server reported for a probe of the same structure.

    Measured prompts themselves are never sent as probes: that would warm the prefix cache.
    """

    exact = False
    _PROBE_WORDS = 40

    def __init__(self, target: HttpTarget) -> None:
        self._target = target
        self._overhead: dict[tuple[str, ...], int] = {}

    async def count(self, messages: list[Message]) -> int:
        roles = tuple(message["role"] for message in messages)
        if roles not in self._overhead:
            self._overhead[roles] = await self._probe(roles)
        return self._overhead[roles] + sum(len(message["content"].split()) for message in messages)

    async def _probe(self, roles: tuple[str, ...]) -> int:
        content = " ".join(["time"] * self._PROBE_WORDS)
        messages = [{"role": role, "content": content} for role in roles]
        fields = {"model": self._target.model, **self._target.prompt_fields(messages), "max_tokens": 1}
        path = "/v1/chat/completions" if self._target.settings.api == "chat" else "/v1/completions"
        status, answer = await self._target.post_json(path, fields)
        tokens = (answer.get("usage") or {}).get("prompt_tokens")
        if status != 200 or not isinstance(tokens, int):
            raise ConfigError(
                f"{self._target.label} answered {status} to a one-token request and reported no prompt tokens, so "
                f"prompts of a given length cannot be made. Pass --tokenizer MODEL to measure them here.",
                param="tokenizer",
            )
        return tokens - self._PROBE_WORDS * len(roles)


async def http_ruler(target: HttpTarget) -> Ruler:
    """The best ruler a server offers."""
    ruler = TokenizeRuler(target)
    if await ruler.try_count([{"role": "user", "content": "time"}]) is not None:
        return ruler
    return UsageRuler(target)


async def local_ruler(model: str) -> Ruler:
    """Counts with the tokenizer of `model` (a name, file, directory or hub id, as for `shoal serve`)."""
    from shoal.model_shards.tokenizer.tokenizer import load_tokenizer
    from shoal.model_shards.weights.sources import resolve_model

    return LocalRuler(await asyncio.to_thread(lambda: load_tokenizer(resolve_model(model))))
