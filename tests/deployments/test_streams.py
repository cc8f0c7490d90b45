"""Merging of deltas, and the choice that a rail guards."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.configs.errors import EngineDeadError
from shoal.deployments.generation import GuardedChoice
from shoal.deployments.http.formats import ChatFormat, Format, StreamUsage, TextFormat, TextOptions
from shoal.deployments.protocol.responses import FRAMED, Envelope, make_usage
from shoal.deployments.streams import LiveRequest, LoopSink, RequestStream, StreamHub, merge
from shoal.guardrails.denylist import DenyList
from shoal.guardrails.pipeline import RailPipeline
from shoal.model_shards.engine.plan import TokenLogprobs
from shoal.model_shards.engine.request import FinishReason, Request, RequestDelta
from shoal.model_shards.sampling.params import SamplingParams


def delta(text: str, *, index: int = 0, done: bool = False, request: str = "r") -> RequestDelta:
    entry = TokenLogprobs(len(text), -1.0, 1, [])
    return RequestDelta(
        request, index, text, [len(text)], [entry], FinishReason.STOP if done else None, num_output_tokens=1
    )


def live(name: str, stream: RequestStream, first_choice: int = 0, n: int = 1) -> LiveRequest:
    return LiveRequest(Request(name, [1], SamplingParams(n=n), seed=0), stream, first_choice)


def test_two_deltas_merge_to_what_both_say() -> None:
    merged = merge([delta("ab"), delta("cde", done=True)])
    assert (merged.text, merged.token_ids, merged.finish_reason) == ("abcde", [2, 3], FinishReason.STOP)
    assert len(merged.logprobs) == 2


async def test_a_reader_that_lags_finds_few_deltas_a_choice() -> None:
    stream = RequestStream()
    for number in range(1000):
        stream.push(0, RequestDelta("r", 0, f"{number},", [number], num_output_tokens=number + 1))
        stream.push(1, RequestDelta("r", 1, "x"))
    pending = await stream.next(1.0)
    assert len(pending[0]) < 40
    merged = merge(pending[0])
    assert merged.text == "".join(f"{number}," for number in range(1000))
    assert (merged.token_ids, merged.num_output_tokens) == (list(range(1000)), 1000)
    assert merge(pending[1]).text == "x" * 1000
    assert await stream.next(0.01) == {}


async def test_a_patient_reader_is_woken_by_ends_and_errors_only() -> None:
    stream = RequestStream()
    stream.be_patient()
    stream.push(0, RequestDelta("r", 0, "a"))
    assert await stream.next(0.01) == {}
    reading = asyncio.create_task(stream.next(5.0))
    await asyncio.sleep(0)
    stream.push(0, RequestDelta("r", 0, "b"))
    await asyncio.sleep(0.01)
    assert not reading.done()
    stream.push(0, RequestDelta("r", 0, "c", finish_reason=FinishReason.STOP))
    assert merge((await reading)[0]).text == "abc"
    stream.push(1, RequestDelta("r", 1, "d"))
    stream.fail(EngineDeadError("gone"))
    assert (await stream.next(1.0))[1][0].text == "d"
    with pytest.raises(EngineDeadError):
        await stream.next(1.0)


async def test_deltas_with_logprobs_stay_apart() -> None:
    stream = RequestStream()
    for word in ("a", "bc"):
        stream.push(0, delta(word))
    assert [item.text for item in (await stream.next(1.0))[0]] == ["a", "bc"]


async def test_an_error_comes_after_what_had_arrived() -> None:
    stream = RequestStream()
    stream.push(0, delta("a"))
    stream.fail(EngineDeadError("gone"))
    assert (await stream.next(1.0))[0][0].text == "a"
    with pytest.raises(EngineDeadError):
        await stream.next(1.0)


async def test_the_hub_drops_what_nobody_waits_for() -> None:
    hub, stream = StreamHub(), RequestStream()
    hub.open(live("r", stream, first_choice=4, n=2))
    hub.dispatch([delta("x", request="unknown"), delta("y", index=1)])
    assert list(await stream.next(1.0)) == [5]
    hub.dispatch([delta("z", index=1, done=True)])
    assert [request.engine_id for request in hub.live] == ["r"]
    hub.dispatch([delta("z", index=0, done=True), delta("late", index=0)])
    assert hub.live == []
    assert {choice: items[0].text for choice, items in (await stream.next(1.0)).items()} == {5: "z", 4: "z"}


async def test_steps_from_another_thread_arrive_in_order() -> None:
    hub, stream = StreamHub(), RequestStream()
    hub.open(live("r", stream))
    sink = LoopSink(hub, asyncio.get_running_loop())

    def engine() -> None:
        for step in range(500):
            sink.deliver([delta(f"{step},", done=step == 499)])

    thread = threading.Thread(target=engine)
    thread.start()
    text = ""
    while True:
        updates = (await stream.next(5.0))[0]
        text += "".join(update.text for update in updates)
        if updates[-1].finish_reason is not None:
            break
    thread.join()
    assert text == "".join(f"{step}," for step in range(500))


@settings(max_examples=200, deadline=None)
@given(st.text(), st.sampled_from([{}, {"usage": None}]))
def test_a_framed_chunk_is_the_chunk(text: str, more: dict[str, None]) -> None:
    envelope = Envelope("chatcmpl-1", f'a model {FRAMED} and "quotes"', "fp_1", ("whole", "chunk"))

    def choice(content: str) -> dict[str, object]:
        return {"index": 3, "delta": {"content": content}, "logprobs": None, "finish_reason": None}

    text = text.encode("utf-8", "replace").decode()
    assert envelope.frame(choice(FRAMED), **more).around(text) == envelope.chunk((choice(text),), **more)


@pytest.mark.parametrize("usage", [StreamUsage(False, False), StreamUsage(True, False), StreamUsage(True, True)])
def test_chunks_are_the_same_framed_and_one_by_one(usage: StreamUsage) -> None:
    deltas = [RequestDelta("r", 0, text, [1], num_output_tokens=n) for n, text in enumerate(("a", "", '\n\n"', "é"), 1)]
    deltas.append(RequestDelta("r", 0, "z", [1], [], FinishReason.LENGTH, num_output_tokens=5))

    def layouts() -> list[Format]:
        envelope = Envelope("id", "m", "fp", ("whole", "chunk"))
        chat = ChatFormat(envelope, usage, vocabulary=None, wants_logprobs=False, wants_prompt_logprobs=False)
        options = TextOptions(n=1, echo=None, logprobs=False, prompt_logprobs=False, vocabulary=None)
        return [chat, TextFormat(envelope, usage, options)]

    for framed, plain in zip(layouts(), layouts(), strict=True):
        for delta in deltas:
            totals = make_usage(7, delta.num_output_tokens, 0)
            assert framed.events({0: delta}, totals) == plain._any_events({0: delta}, totals)


@pytest.mark.parametrize("whole_deltas", [False, True])
def test_tokens_wait_with_their_text(whole_deltas: bool) -> None:
    rails = RailPipeline([DenyList({"w": "kumquat"})])
    choice = GuardedChoice(rails.open_stream(), whole_deltas=whole_deltas)
    first = choice.apply(delta("a ku"))
    assert (first.text, first.token_ids) == (("", []) if whole_deltas else ("a ", []))
    second = choice.apply(delta("rd", done=True))
    assert first.text + second.text == "a kurd"
    assert second.token_ids == ([4, 2] if whole_deltas else [])
    assert len(second.logprobs) == len(second.token_ids)


def test_a_block_takes_the_logprobs_of_the_word_with_it() -> None:
    rails = RailPipeline([DenyList({"w": "kumquat"})])
    choice = GuardedChoice(rails.open_stream(), whole_deltas=True)
    outs = [choice.apply(delta(text)) for text in ("a ", "kum", "quat", "!")]
    assert [out.text for out in outs] == ["a ", "", "", ""]
    assert [len(out.logprobs) for out in outs] == [1, 0, 0, 0]
    assert outs[-1].finish_reason is FinishReason.CONTENT_FILTER
