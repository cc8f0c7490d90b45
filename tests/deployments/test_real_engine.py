"""A model that computes, behind HTTP: an answer depends neither on who else is served nor on a lack of memory."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest

BLOCK_BYTES = 16 * 3 * 2 * 2 * 16 * 4
"""Tokens, layers, keys and values, heads, dimensions, bytes of the tiny model."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of three layers with a tokenizer of bytes; BOS is 256."""
    pytest.importorskip("transformers")
    source = Path(__file__).parents[1] / "model_shards" / "weights" / "tiny_models.py"
    spec = importlib.util.spec_from_file_location("shoal_tests_tiny_models_http", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Path(module.make_tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny-llama")))


def engine(checkpoint: Path, **settings: Any) -> dict[str, Any]:
    return {"model": str(checkpoint), "dtype": "float32", "num_threads": 1, "max_model_len": 128, **settings}


def prompt(number: int, length: int) -> list[int]:
    return [256, *((number * 31 + position * 7) % 250 for position in range(length - 1))]


async def stream(server: Any, **body: Any) -> tuple[str, dict[str, Any]]:
    """The joined text of a stream, and its usage."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    chunks = server.events(await server.complete(**options, **body))
    return server.text(chunks), chunks[-1]["usage"]


async def test_o15_a_seeded_request_does_not_depend_on_its_neighbours(start_server: Any, checkpoint: Path) -> None:
    mine = {"prompt": prompt(0, 9), "seed": 42, "temperature": 0.8, "max_tokens": 16, "logprobs": 0}
    mixed = [{"temperature": n / 4, "seed": 42 if n == 3 else n, "max_tokens": 3 * n, "n": 1 + n % 2} for n in range(7)]
    neighbours: list[list[dict[str, Any]]] = [[], [{}], [{"seed": 7}], [*mixed[1:], {}]]

    async def ask(server: Any, body: dict[str, Any]) -> dict[str, Any]:
        response = await server.complete(**body, ignore_eos=True)
        assert response.status_code == 200, response.text
        return dict(response.json()["choices"][0])

    answers = []
    async with start_server(engine=engine(checkpoint)) as server:
        for _ in range(4):
            for others in neighbours:
                bodies = [{"prompt": prompt(n, 5 + 6 * n), "max_tokens": 16, **body} for n, body in enumerate(others)]
                answers.append((await asyncio.gather(*(ask(server, body) for body in [*bodies, mine])))[-1])
        other_seed = await ask(server, {**mine, "seed": 43})
    assert len(answers[0]["logprobs"]["tokens"]) == 16
    assert all(answer == answers[0] for answer in answers)
    assert other_seed["text"] != answers[0]["text"]


async def test_o17_the_output_of_a_preempted_request_is_whole(start_server: Any, checkpoint: Path) -> None:
    bodies = [{"prompt": prompt(n, 40), "max_tokens": 80, "temperature": 0} for n in range(6)]
    async with start_server(engine=engine(checkpoint, kv_cache_memory=25 * BLOCK_BYTES)) as server:
        blocks = [await server.metric("shoal_kv_blocks", state=state) for state in ("free", "cached", "used")]
        assert 24 <= sum(blocks) <= 25
        assert blocks[2] == 0
        together = await asyncio.gather(*(stream(server, **body) for body in bodies))
        assert await server.metric("shoal_preemptions_total") > 0
        await server.wait_for(server.idle)
        before = await server.metric("shoal_preemptions_total")
        alone = [await stream(server, **body) for body in bodies]
        assert await server.metric("shoal_preemptions_total") == before
        assert await server.metric("shoal_kv_blocks", state="free") + await server.metric(
            "shoal_kv_blocks", state="cached"
        ) == sum(blocks)
    assert [text for text, _ in together] == [text for text, _ in alone]
    assert len({text for text, _ in alone}) == 6
    for _, usage in together + alone:
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (40, 80, 120)
