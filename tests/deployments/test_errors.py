"""Bad requests: each is refused with OpenAI's error object naming the field, and costs others nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_model(start_server: Any, stream: bool) -> None:
    """O-02."""
    async with start_server() as server:
        for path, body in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
            streaming = {"stream": stream} if path.startswith("/v1") else {}
            response = await server.http.post(path, json={"model": "no-such-model-xyz", **body, **streaming})
            error = server.error(response, 404)
            assert (error["code"], error["param"], error["type"]) == (
                "model_not_found",
                "model",
                "invalid_request_error",
            )
        assert server.error(await server.http.get("/v1/models/no-such"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"n": 1.5}, "n"),
        ({"seed": "x"}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_use": True}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ({"logit_bias": {"99999999": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"stop_token_ids": [99999999]}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"prompt_logprobs": 99}, "prompt_logprobs"),
        ({"tempature": 1}, "tempature"),
        ({"model": 5}, "model"),
    ],
)
async def test_a_wrong_parameter_is_named(start_server: Any, fields: dict[str, Any], param: str) -> None:
    """O-03, O-14."""
    async with start_server() as server:
        for path, body in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "a"})):
            error = server.error(await server.http.post(path, json={**body, **fields}), 400)
            assert error["param"] == param
            assert error["type"] == "invalid_request_error"
        assert (await server.chat(max_tokens=5)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "pirate", "content": "arr"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "colour": "red"}]}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
async def test_a_wrong_chat_parameter_is_named(start_server: Any, fields: dict[str, Any], param: str) -> None:
    async with start_server() as server:
        body = {"messages": USER, **fields}
        assert server.error(await server.http.post(CHAT, json=body), 400)["param"] == param


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"not json",
        b'{"messages": ',
        b"[1]",
        b'"text"',
        b"null",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    ],
)
async def test_a_body_that_is_not_a_json_object(start_server: Any, raw: bytes) -> None:
    async with start_server() as server:
        server.error(await server.http.post(TEXT, content=raw, headers={"content-type": "application/json"}), 400)


async def test_a_body_that_nests_too_deeply(start_server: Any) -> None:
    async with start_server() as server:
        for depth in (40, 100_000):
            raw = b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}"
            error = server.error(await server.http.post(TEXT, content=raw), 400)
            assert error["code"] == "too_deep"


async def test_a_body_that_is_too_large(start_server: Any) -> None:
    async with start_server(gateway={"limits": {"max_body_bytes": 1000}}) as server:
        raw = json.dumps({"prompt": "x" * 2000}).encode()
        assert server.error(await server.http.post(TEXT, content=raw), 413)["code"] == "request_too_large"

        async def pieces() -> Any:
            for start in range(0, len(raw), 100):
                yield raw[start : start + 100]

        # Without a content-length, the limit is found while reading.
        assert server.error(await server.http.post(TEXT, content=pieces()), 413)["code"] == "request_too_large"
        assert (await server.complete("x")).status_code == 200


@pytest.mark.parametrize(
    ("limits", "body", "param"),
    [
        ({"max_messages": 2}, {"messages": USER * 3}, "messages"),
        ({"max_n": 2}, {"messages": USER, "n": 3}, "n"),
        ({"max_stop": 1}, {"messages": USER, "stop": ["a", "b"]}, "stop"),
        ({"max_choices": 4}, {"prompt": ["a", "b", "c"], "n": 2}, "n"),
        ({"max_prompts": 2}, {"prompt": ["a", "b", "c"]}, "prompt"),
        ({"max_prompt_chars": 10}, {"prompt": "a" * 11}, "prompt"),
    ],
)
async def test_counts_are_limited(start_server: Any, limits: dict[str, int], body: dict[str, Any], param: str) -> None:
    async with start_server(gateway={"limits": limits}) as server:
        response = await server.http.post(CHAT if "messages" in body else TEXT, json=body)
        assert server.error(response, 400)["param"] == param


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_over_the_context(start_server: Any, stream: bool) -> None:
    """O-18."""
    async with start_server(engine={"max_model_len": 64}) as server:
        long = await server.complete([5] * 65, max_tokens=1, stream=stream)
        chat = await server.chat("x" * 100, max_tokens=1, stream=stream)
        asked = await server.complete([5] * 60, max_tokens=5, stream=stream)
        for response, param in ((long, "prompt"), (chat, "messages"), (asked, "max_tokens")):
            error = server.error(response, 400)
            assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
            assert error["param"] == param
            assert "64" in error["message"]
        assert (await server.complete([5] * 60, max_tokens=4, stream=stream)).status_code == 200
        # Nothing was queued for the refused ones.
        assert await server.metric("shoal_sequences_finished_total") == 1


async def test_one_bad_prompt_refuses_the_batch(start_server: Any) -> None:
    async with start_server() as server:
        server.error(await server.complete([[5, 6], [99999999]]), 400)
        assert await server.metric("shoal_sequences_finished_total") == 0


async def test_a_full_queue_is_503_with_retry_after(start_server: Any) -> None:
    script = {"default": {"pieces": ["a"], "eos": False, "delay_ms": 20}}
    engine = {"max_num_seqs": 1, "max_waiting_requests": 1}
    async with start_server(script, engine=engine) as server:
        running = [asyncio.create_task(server.complete("x", max_tokens=100))]
        await server.wait_for(lambda: _is_one(server, "shoal_sequences_running"))
        running.append(asyncio.create_task(server.complete("x", max_tokens=1)))
        await server.wait_for(lambda: _is_one(server, "shoal_sequences_waiting"))
        for stream in (False, True):
            response = await server.complete("x", max_tokens=1, stream=stream)
            assert server.error(response, 503)["code"] == "overloaded"
            assert int(response.headers["retry-after"]) >= 1
        assert [(await task).status_code for task in running] == [200, 200]


async def _is_one(server: Any, name: str) -> bool:
    return bool(await server.metric(name) == 1)


async def test_other_paths_and_methods(start_server: Any) -> None:
    async with start_server() as server:
        assert server.error(await server.http.get("/v1/nothing"), 404)["code"] == "unknown_url"
        assert server.error(await server.http.get(CHAT), 405)["code"] == "unknown_url"


async def test_our_own_bugs_show_no_stack(start_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start_server() as server:

        async def broken(*_: Any) -> None:
            raise RuntimeError("secret detail")

        monkeypatch.setattr(server.gateway.service, "start_chat", broken)
        error = server.error(await server.chat(), 500)
        assert error["code"] == "internal_error"
        assert "secret" not in error["message"]
