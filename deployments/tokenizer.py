"""Tokenizer: chat templates and encoding, before anything is admitted; what takes long on threads of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shoal.configs.app import RequestLimits, TokenizerConfig
from shoal.configs.errors import ContextLengthError, InvalidRequestError, OverloadedError
from shoal.deployments.stages import ChatJob, Encoded, PromptsJob, RemoteCallable
from shoal.model_shards.sampling.params import check_token_ids
from shoal.model_shards.tokenizer.tokenizer import Tokenizer as ModelTokenizer

T = TypeVar("T")

_INLINE_CHARS = 2048
"""So much is encoded in half a millisecond, no more than what handing it to a thread and back adds to the first token;
more would hold up the other streams of the event loop."""
_MESSAGE_CHARS = 64
"""Rendering a message costs as much as encoding so many characters."""
_PLAIN_MESSAGE = {"role", "content"}


class Tokenizer(RemoteCallable):
    """The model's tokenizer behind a bounded pool of threads: no event loop waits for more than a short text."""

    def __init__(self, tokenizer: ModelTokenizer, config: TokenizerConfig, limits: RequestLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._max_pending = config.max_pending
        self._pending = 0
        self._pool = ThreadPoolExecutor(config.threads, thread_name_prefix="shoal-tokenizer")

    async def encode_chat(self, job: ChatJob) -> Encoded:
        """Renders the chat template and encodes what it gives. The template writes its own special tokens, so none are
        added. Raises InvalidRequestError with the template's own message when it refuses the messages."""
        if self._is_short(_chat_size(job)):
            return self._encode_chat(job)
        return await self._run(lambda: self._encode_chat(job))

    async def encode_prompts(self, job: PromptsJob) -> Encoded:
        """Encodes texts, or checks token ids."""
        if self._is_short(_prompts_size(job)):
            return self._encode_prompts(job)
        return await self._run(lambda: self._encode_prompts(job))

    async def decode(self, token_ids: list[int]) -> str:
        def decode() -> str:
            check_token_ids("tokens", token_ids, self._tokenizer.vocab_size)
            return self._tokenizer.decode(token_ids, skip_special_tokens=False)

        return await self._run(decode)

    async def vocabulary(self) -> tuple[list[bytes], frozenset[int]]:
        """The bytes of every token, and the ids of special tokens. Megabytes: a gateway asks once."""
        tokenizer = self._tokenizer
        table = await self._run(lambda: [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)])
        return table, tokenizer.special_token_ids

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _is_short(self, size: int) -> bool:
        """Behind others that wait for a thread even a short text has to wait."""
        return size <= _INLINE_CHARS and self._pending < self._max_pending

    async def _run(self, work: Callable[[], T]) -> T:
        if self._pending >= self._max_pending:
            message = f"{self._pending} requests wait to be tokenized already. Try again later."
            raise OverloadedError(message, retry_after_s=1.0)
        self._pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._pending -= 1

    def _encode_chat(self, job: ChatJob) -> Encoded:
        text = self._tokenizer.render_chat(
            job.messages,
            tools=job.tools,
            add_generation_prompt=job.add_generation_prompt,
            continue_final_message=job.continue_final_message,
            **job.template_kwargs,
        )
        if not text:
            raise InvalidRequestError("The chat template made an empty prompt of these messages.", param="messages")
        self._check_length("messages", text)
        token_ids = self._tokenizer.encode(text, add_special_tokens=job.add_special_tokens)
        return Encoded([token_ids], [text], self._bad_words(job.bad_words))

    def _encode_prompts(self, job: PromptsJob) -> Encoded:
        token_ids, texts = [], []
        for prompt in job.prompts:
            if isinstance(prompt, str):
                self._check_length("prompt", prompt)
                token_ids.append(self._tokenizer.encode(prompt, add_special_tokens=job.add_special_tokens))
                texts.append(prompt)
            else:
                # The engine checks against the logits' width as well; decoding needs ids that the tokenizer knows.
                check_token_ids("prompt", prompt, self._tokenizer.vocab_size)
                token_ids.append(prompt)
                texts.append(self._tokenizer.decode(prompt, skip_special_tokens=False) if job.decode else "")
        if not all(token_ids):
            raise InvalidRequestError("prompt must not be empty.", param="prompt")
        return Encoded(token_ids, texts, self._bad_words(job.bad_words))

    def _check_length(self, field: str, text: str) -> None:
        """Encoding takes time by the character; a prompt that cannot fit is refused before."""
        most = self._limits.max_prompt_chars
        if len(text) > most:
            raise ContextLengthError(f"{field} has {len(text)} characters; {most} is the limit here.", param=field)

    def _bad_words(self, words: list[str] | None) -> tuple[tuple[int, ...], ...]:
        """Each word as it is tokenized at the beginning of a text and after a space: both must be forbidden."""
        encoded: dict[tuple[int, ...], None] = {}
        for word in words or ():
            if not word:
                raise InvalidRequestError("bad_words must not hold an empty string.", param="bad_words")
            for text in (word, " " + word.lstrip()):
                encoded[tuple(self._tokenizer.encode(text, add_special_tokens=False))] = None
        return tuple(encoded)


def _chat_size(job: ChatJob) -> int:
    """Characters that the time of a job is like, roughly; large where it is not known."""
    if job.tools or job.template_kwargs or job.bad_words:
        return _INLINE_CHARS + 1
    size = _MESSAGE_CHARS * len(job.messages)
    for message in job.messages:
        if message.keys() != _PLAIN_MESSAGE:
            return _INLINE_CHARS + 1
        size += len(message["content"] or "")
    return size


def _prompts_size(job: PromptsJob) -> int:
    if job.bad_words:
        return _INLINE_CHARS + 1
    return sum(map(len, job.prompts))
