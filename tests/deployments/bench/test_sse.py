"""Reading a recorded stream, however the network cut it."""

from __future__ import annotations

import json

import pytest

from shoal.deployments.bench.sse import StreamContents


def event(**content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def text(piece: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": piece}, "finish_reason": None}])


ROLE = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
FINISH = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
USAGE = event(choices=[], usage={"completion_tokens": 2, "prompt_tokens": 5})
DONE = b"data: [DONE]\n\n"


def test_only_events_with_text_are_tokens() -> None:
    stream = [(1.0, ROLE), (2.0, text("a")), (3.0, text("")), (4.0, text("b")), (5.0, FINISH + USAGE + DONE)]
    seen = StreamContents().read(stream)
    assert seen.token_times == [2.0, 4.0]
    assert (seen.finish_reason, seen.usage["completion_tokens"], seen.done, seen.error) == ("stop", 2, True, None)


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_events_cut_anywhere_are_the_same_events(size: int) -> None:
    whole = ROLE + text("é") + text("😀") + FINISH + USAGE + DONE
    pieces = [(float(at), whole[at : at + size]) for at in range(0, len(whole), size)]
    seen = StreamContents().read(pieces)
    assert len(seen.token_times) == 2
    assert seen.done


def test_an_event_counts_when_it_is_complete() -> None:
    first = text("a")
    assert StreamContents().read([(1.0, first[:10]), (2.0, first[10:])]).token_times == [2.0]


def test_several_events_of_one_chunk_share_its_time() -> None:
    assert StreamContents().read([(1.0, text("a") + text("b"))]).token_times == [1.0, 1.0]


def test_reasoning_and_completion_text_are_tokens_too() -> None:
    reasoning = event(choices=[{"index": 0, "delta": {"reasoning_content": "hm"}}])
    completion = event(choices=[{"index": 0, "text": "x", "finish_reason": "length"}])
    seen = StreamContents().read([(1.0, reasoning), (2.0, completion)])
    assert seen.token_times == [1.0, 2.0]
    assert seen.finish_reason == "length"


def test_comments_and_carriage_returns_are_legal() -> None:
    stream = b": ping\r\n\r\n" + text("a").replace(b"\n", b"\r\n") + b"data: [DONE]\r\n\r\n"
    seen = StreamContents().read([(1.0, stream)])
    assert seen.token_times == [1.0]
    assert seen.done


@pytest.mark.parametrize("error", [{"message": "out of blocks", "type": "server_error"}, "out of blocks"])
def test_an_error_event_is_an_error(error: object) -> None:
    assert StreamContents().read([(1.0, event(error=error))]).error == "out of blocks"


def test_garbage_is_an_error() -> None:
    error = StreamContents().read([(1.0, b"data: {broken\n\n")]).error
    assert error is not None
    assert "not JSON" in error
