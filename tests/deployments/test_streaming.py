"""Streams: chunks, usage, held-back text, errors, keep-alive, slow readers."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest


@pytest.mark.parametrize("pieces", [["Hello", ", ", "world"], ["ďábelské ", "😀 ", "中文 ", "👩‍👩‍👧"]])
async def test_a_stream_says_what_the_whole_answer_says(start_server: Any, pieces: list[str]) -> None:
    """O-06: characters split over tokens come whole."""
    async with start_server({"default": {"pieces": pieces}}) as server:
        whole = (await server.chat()).json()["choices"][0]["message"]["content"]
        chunks = server.events(await server.chat(stream=True))
        text_chunks = server.events(await server.complete(stream=True, max_tokens=64))
    assert whole == "".join(pieces)
    assert server.text(chunks) == server.text(text_chunks) == whole
    assert all("\ufffd" not in json.dumps(chunk, ensure_ascii=False) for chunk in chunks)


async def test_the_role_comes_first_and_the_head_is_the_same_in_every_chunk(start_server: Any) -> None:
    async with start_server() as server:
        chunks = server.events(await server.chat(stream=True))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    heads = [
        {key: chunk[key] for key in ("id", "object", "created", "model", "system_fingerprint")} for chunk in chunks
    ]
    assert all(head == heads[0] for head in heads)
    assert heads[0]["object"] == "chat.completion.chunk"


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_no_usage_unless_asked(start_server: Any, options: Any) -> None:
    """O-04."""
    extra = {} if options is None else {"stream_options": options}
    async with start_server() as server:
        for response in (await server.chat(stream=True, **extra), await server.complete(stream=True, **extra)):
            assert "usage" not in response.text


async def test_usage_in_one_last_chunk(start_server: Any) -> None:
    """O-04."""
    async with start_server() as server:
        chunks = server.events(await server.chat(stream=True, stream_options={"include_usage": True}))
        whole = (await server.chat()).json()["usage"]
    assert [bool(chunk["choices"]) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["usage"]["completion_tokens"] == whole["completion_tokens"]


async def test_usage_in_every_chunk(start_server: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with start_server() as server:
        chunks = server.events(await server.chat(stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] > 0


async def test_each_choice_finishes_once_and_the_key_is_always_there(start_server: Any) -> None:
    """O-05."""
    async with start_server({"default": {"pieces": ["a"], "eos": False}}) as server:
        chunks = server.events(await server.chat(stream=True, n=3, max_tokens=6, temperature=1, seed=7))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert all("finish_reason" in choice for choice in choices)
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        assert [choice["finish_reason"] for choice in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == "length"


async def test_nothing_that_may_become_a_stop_string_leaks(start_server: Any) -> None:
    """O-07."""
    script = {
        "rules": [
            {"match": "alphabet", "pieces": ["DEF", "GH", "IJ", "KL"]},
            {"match": "other", "pieces": ["DEF", "X"]},
        ],
        "default": {"pieces": ["ok"]},
    }
    async with start_server(script) as server:
        chunks = server.events(await server.complete("alphabet: ABC", stop=["DEFGHIJ"], stream=True))
        assert (server.text(chunks), server.finish_reasons(chunks)) == ("", ["stop"])
        whole = (await server.complete("alphabet: ABC", stop=["DEFGHIJ"])).json()["choices"][0]
        assert (whole["text"], whole["finish_reason"]) == ("", "stop")
        chunks = server.events(await server.complete("other", stop=["DEFGHIJ"], stream=True))
        assert server.text(chunks) == "DEFX"


async def test_logprobs_of_a_stream_join_to_those_of_the_whole(start_server: Any) -> None:
    async with start_server() as server:
        whole = (await server.chat(logprobs=True, top_logprobs=1)).json()["choices"][0]["logprobs"]["content"]
        chunks = server.events(await server.chat(logprobs=True, top_logprobs=1, stream=True))
        legacy = (await server.complete(logprobs=1)).json()["choices"][0]["logprobs"]
        legacy_chunks = server.events(await server.complete(logprobs=1, stream=True))
    blocks = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    assert [entry for block in blocks for entry in block["content"]] == whole
    blocks = [choice["logprobs"] for chunk in legacy_chunks for choice in chunk["choices"] if choice["logprobs"]]
    assert {name: [item for block in blocks for item in block[name]] for name in legacy} == legacy


async def test_a_failure_before_the_first_token_has_its_status(start_server: Any) -> None:
    async with start_server({"default": {"pieces": ["a"], "fail_after": 0}}) as server:
        for stream in (False, True):
            error = server.error(await server.chat(stream=stream), 500)
            assert error["code"] == "generation_failed"
        assert await server.idle()


async def test_a_failure_in_the_middle_is_an_error_event_and_done(start_server: Any) -> None:
    script = {
        "rules": [{"match": "fail", "pieces": ["a ", "b ", "c "], "fail_after": 3}],
        "default": {"pieces": ["ok"]},
    }
    async with start_server(script) as server:
        *chunks, last = server.events(await server.chat("fail", stream=True))
        assert server.text(chunks).startswith("a")
        assert last["error"]["code"] == "generation_failed"
        assert (await server.chat()).status_code == 200


async def test_a_silent_stream_sends_comments(start_server: Any) -> None:
    script = {"default": {"pieces": ["a", "b"], "delay_ms": 400}}
    async with start_server(script, gateway={"keep_alive_s": 0.1}) as server:
        response = await server.chat(stream=True)
    assert ": waiting" in response.text
    assert server.text(server.events(response)) == "ab"


async def test_a_request_that_runs_too_long_is_ended(start_server: Any) -> None:
    script = {"default": {"pieces": ["a"], "eos": False, "delay_ms": 50}}
    async with start_server(script, gateway={"request_timeout_s": 0.5, "heartbeat_s": 0.05}) as server:
        assert server.error(await server.chat(), 408)["code"] == "request_timeout"
        *chunks, last = server.events(await server.chat(stream=True))
        assert server.text(chunks).startswith("a")
        assert last["error"]["code"] == "request_timeout"
        await server.wait_for(server.idle)


async def test_a_slow_reader_gets_fewer_larger_chunks(start_server: Any) -> None:
    """What it does not take is merged, so that what the server keeps for it is the text and not a queue of chunks."""
    script = {"default": {"pieces": ["some words "], "eos": False}}
    async with start_server(script, engine={"max_model_len": 8192}) as server:
        host, port = server.url.removeprefix("http://").split(":")
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
        body = json.dumps({"prompt": "x", "max_tokens": 8000, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        # Take nothing until the engine has finished: socket buffers fill, the gateway's writer waits.
        await server.wait_for(server.idle, timeout_s=30.0)
        received = b""
        while piece := await reader.read(1 << 16):
            received += piece
        writer.close()
    events = [line for line in received.decode().splitlines() if line.startswith("data: {")]
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in events)
    assert text == ("some words " * 8000)[: len(text)]
    assert len(text) >= 8000
    # Far fewer than tokens: most of the answer came in one chunk, once the reader had begun to read.
    assert len(events) < 4000
