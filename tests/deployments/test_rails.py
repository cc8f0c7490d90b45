"""The deny-list over HTTP, in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

FRUIT = {"default": {"pieces": ["I ", "like ", "kum", "qu", "at", " pie"]}}
LATE = {"default": {"pieces": [*["so "] * 39, "ku", "mquat", " it is"]}}


async def test_a_refused_prompt_never_reaches_the_engine(start_server: Any, deny_list: Path) -> None:
    async with start_server(guard={"deny_list": str(deny_list)}) as server:
        for response, param in (
            (await server.chat("what is a Kumquat?"), "messages"),
            (await server.complete("a kumquat", stream=True), "prompt"),
            (await server.complete(["fine", "a kumquat"]), "prompt"),
        ):
            error = server.error(response, 400)
            assert (error["code"], error["param"]) == ("content_filter", param)
        tokens = (await server.http.post("/tokenize", json={"prompt": "a kumquat"})).json()["tokens"]
        assert server.error(await server.complete(tokens), 400)["code"] == "content_filter"
        assert await server.metric("shoal_sequences_finished_total") == 0
        assert await server.metric("shoal_rail_verdicts_total", direction="input", verdict="blocked") == 4
        assert (await server.chat("a cumquat")).status_code == 200


@pytest.mark.parametrize("script", [FRUIT, LATE])
@pytest.mark.parametrize("logprobs", [False, True])
async def test_a_blocked_answer(start_server: Any, deny_list: Path, script: dict[str, Any], logprobs: bool) -> None:
    """O-24: streamed or not, no part of the word gets out, not even in logprobs."""
    fields = {"max_tokens": 200, "logprobs": logprobs}
    async with start_server(script, guard={"deny_list": str(deny_list)}) as server:
        whole = await server.chat(**fields)
        streamed = await server.chat(stream=True, **fields)
        (choice,) = whole.json()["choices"]
        chunks = server.events(streamed)
        assert choice["finish_reason"] == "content_filter"
        assert server.finish_reasons(chunks) == ["content_filter"]
        assert server.text(chunks) == choice["message"]["content"]
        assert choice["message"]["content"] in ("I like ", "so " * 39)
        for response in (whole, streamed):
            assert "ku" not in response.text
            assert "quat" not in response.text
        await server.wait_for(server.idle)


async def test_one_blocked_choice_leaves_the_others(start_server: Any, deny_list: Path) -> None:
    script = {"rules": [{"match": "fruit", "pieces": ["a kumquat!"]}], "default": {"pieces": ["ok"]}}
    async with start_server(script, guard={"deny_list": str(deny_list)}) as server:
        choices = (await server.complete(["fruit", "other"])).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["content_filter", "stop"]
    assert [choice["text"] for choice in choices] == ["a ", "ok"]


async def test_text_that_only_looks_like_a_match_comes_whole(start_server: Any, deny_list: Path) -> None:
    script = {"default": {"pieces": ["a ", "kum", "quats", " and ", "kum"]}}
    async with start_server(script, guard={"deny_list": str(deny_list)}) as server:
        chunks = server.events(await server.chat(stream=True))
        whole = (await server.chat(logprobs=True)).json()["choices"][0]
    assert server.text(chunks) == whole["message"]["content"] == "a kumquats and kum"
    joined = b"".join(bytes(entry["bytes"]) for entry in whole["logprobs"]["content"])
    assert joined.removesuffix(b"<|end|>") == b"a kumquats and kum"


async def test_directions_can_be_switched_off(start_server: Any, deny_list: Path) -> None:
    async with start_server(FRUIT, guard={"deny_list": str(deny_list), "check_output": False}) as server:
        assert "kumquat" in (await server.chat()).text
        assert (await server.chat("kumquat")).status_code == 400
    async with start_server(FRUIT, guard={"deny_list": str(deny_list), "check_input": False}) as server:
        assert (await server.chat("kumquat")).json()["choices"][0]["finish_reason"] == "content_filter"
