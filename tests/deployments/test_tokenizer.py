"""Where encoding happens: short texts on the event loop, long ones on threads, and no more waiting than allowed."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from shoal.configs.app import RequestLimits, TokenizerConfig
from shoal.configs.errors import ContextLengthError, OverloadedError
from shoal.deployments.stages import ChatJob, PromptsJob
from shoal.deployments.tokenizer import Tokenizer
from shoal.model_shards.tokenizer.tokenizer import Tokenizer as ModelTokenizer
from shoal.model_shards.tokenizer.tokenizer import load_tokenizer
from shoal.model_shards.weights.sources import resolve_model

SHORT, LONG = "a few words", "a great many words " * 200


class Watched:
    """A tokenizer that notes the thread of each encode, and waits there while `gate` is closed."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self.threads: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self._tokenizer = tokenizer

    def encode(self, text: str, **options: Any) -> list[int]:
        self.threads.append(threading.current_thread().name)
        assert self.gate.wait(10)
        return self._tokenizer.encode(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.fixture
def model(tiny_tokenizer: Path) -> Watched:
    return Watched(load_tokenizer(resolve_model(str(tiny_tokenizer), progress=False)))


@pytest.fixture
async def stage(model: Watched) -> Any:
    stage = Tokenizer(model, TokenizerConfig(threads=1, max_pending=2), RequestLimits(max_prompt_chars=10_000))  # type: ignore[arg-type]
    yield stage
    model.gate.set()
    stage.close()


def chat(content: str, **options: Any) -> ChatJob:
    return ChatJob([{"role": "user", "content": content}], None, True, False, {}, **options)


def prompt(text: str) -> PromptsJob:
    return PromptsJob([text], add_special_tokens=True, decode=False)


@pytest.mark.parametrize(
    ("job", "inline"),
    [
        (prompt(SHORT), True),
        (prompt(LONG), False),
        (chat(SHORT), True),
        (chat(LONG), False),
        (chat(SHORT, bad_words=["words"]), False),
        (ChatJob([{"role": "user", "content": ""}] * 100, None, True, False, {}), False),
        (ChatJob([{"role": "user", "content": SHORT}], [{"type": "function"}], True, False, {}), False),
    ],
)
async def test_only_what_is_short_is_encoded_on_the_loop(stage: Any, model: Watched, job: Any, inline: bool) -> None:
    await (stage.encode_chat(job) if isinstance(job, ChatJob) else stage.encode_prompts(job))
    here = threading.current_thread().name
    assert {thread == here for thread in model.threads} == {inline}


async def test_both_ways_give_the_same(stage: Any) -> None:
    long = (await stage.encode_prompts(prompt(LONG))).token_ids[0]
    parts = [(await stage.encode_prompts(prompt("a great many words "))).token_ids[0] for _ in range(2)]
    assert parts[0] == parts[1] == long[: len(parts[0])]


async def test_with_too_many_waiting_short_and_long_are_refused(stage: Any, model: Watched) -> None:
    model.gate.clear()
    waiting = [asyncio.create_task(stage.encode_prompts(prompt(LONG))) for _ in range(2)]
    await asyncio.sleep(0.05)
    for job in (prompt(SHORT), prompt(LONG)):
        with pytest.raises(OverloadedError):
            await stage.encode_prompts(job)
    model.gate.set()
    assert all(encoded.token_ids for encoded in await asyncio.gather(*waiting))


async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(stage: Any, model: Watched) -> None:
    with pytest.raises(ContextLengthError):
        await stage.encode_prompts(prompt("x" * 10_001))
    assert model.threads == []
