"""The chat: history, commands, interruption, and what a failed turn leaves behind."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from aiohttp import web
from rich.console import Console

from shoal.configs.errors import ShoalError
from shoal.deployments.cli.answers import AnswerError, Answers, HttpAnswers, Message, OnText, Sampling, Turn
from shoal.deployments.cli.conversation import Conversation, describe, printable


class Scripted(Answers):
    """Answers from a list: pieces of text, or an exception to raise after them."""

    def __init__(self, *script: list[str | BaseException]) -> None:
        self.script = list(script)
        self.asked: list[list[Message]] = []

    @property
    def label(self) -> str:
        return "a script"

    async def answer(self, messages: list[Message], turn: Turn, on_text: OnText) -> None:
        self.asked.append(messages)
        for piece in self.script.pop(0):
            if isinstance(piece, BaseException):
                raise piece
            turn.take(piece)
            on_text(piece)
        turn.output_tokens, turn.finish_reason = turn.events, "stop"

    def close(self) -> None:
        pass


def conversation(answers: Answers, system: str | None = None) -> tuple[Conversation, io.StringIO]:
    out = io.StringIO()
    return Conversation(answers, Console(file=out, width=200, highlight=False), system), out


def lines(*texts: str) -> Callable[[], str]:
    source: Iterator[str] = iter(texts)

    def read() -> str:
        try:
            return next(source)
        except StopIteration:
            raise EOFError from None

    return read


def test_each_turn_sees_the_whole_conversation() -> None:
    answers = Scripted(["Hel", "lo"], ["Fish."])
    talk, out = conversation(answers, system="Be brief.")
    talk.loop(lines("hi", "", "what swims?"))
    assert answers.asked[1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "what swims?"},
    ]
    assert "Hello" in out.getvalue()
    assert "2 tokens" in out.getvalue()


def test_an_interrupted_answer_stays_as_far_as_it_came() -> None:
    answers = Scripted(["One, ", "two", KeyboardInterrupt()], ["three"])
    talk, out = conversation(answers)
    talk.loop(lines("count", "go on"))
    assert answers.asked[1][1] == {"role": "assistant", "content": "One, two"}
    assert "stopped" in out.getvalue()


def test_a_turn_stopped_before_any_text_is_forgotten() -> None:
    talk, _ = conversation(Scripted([KeyboardInterrupt()]))
    talk.say("hi")
    assert talk.history == []


@pytest.mark.parametrize("error", [AnswerError("HTTP 503: busy"), ShoalError("the engine stopped")])
def test_a_failed_turn_leaves_no_trace_and_the_chat_goes_on(error: ShoalError) -> None:
    answers = Scripted(["half", error], ["fine"])
    talk, out = conversation(answers)
    talk.loop(lines("one", "two"))
    assert error.message in out.getvalue()
    assert answers.asked[1] == [{"role": "user", "content": "two"}]


def test_a_conversation_that_is_too_long_says_how_to_go_on() -> None:
    talk, out = conversation(Scripted(["a"], [AnswerError("HTTP 400: longer than the context")]))
    talk.loop(lines("one", "two"))
    assert "/reset forgets" in out.getvalue()


def test_commands_change_the_conversation() -> None:
    answers = Scripted(["a"], ["b"], ["c"])
    talk, out = conversation(answers, system="old")
    talk.loop(lines("one", "/reset", "two", "/system new words", "three", "/stats", "/swim", "/system", "/quit", "no"))
    assert answers.asked[1] == [{"role": "system", "content": "old"}, {"role": "user", "content": "two"}]
    assert answers.asked[2] == [{"role": "system", "content": "new words"}, {"role": "user", "content": "three"}]
    assert talk.system is None
    assert len(answers.asked) == 3
    assert "No command /swim" in out.getvalue()
    assert "2 messages in the conversation" in out.getvalue()


def test_ctrl_c_at_the_prompt_does_not_end_the_chat() -> None:
    script: list[str | type[BaseException]] = [KeyboardInterrupt, "hi", EOFError]
    answers = Scripted(["hello"])

    def read() -> str:
        step = script.pop(0)
        if isinstance(step, str):
            return step
        raise step

    talk, _ = conversation(answers)
    talk.loop(read)
    assert len(answers.asked) == 1


def test_a_model_cannot_command_the_terminal() -> None:
    assert printable("a\x1b[31mred\x07\x9b1m\tb\nc\r") == "a[31mred1m\tb\nc"
    talk, out = conversation(Scripted(["\x1b]0;title\x07[bold]x[/bold]"]))
    talk.say("hi")
    assert out.getvalue().startswith("]0;title[bold]x[/bold]")


def test_speed_is_counted_after_the_first_token() -> None:
    turn = Turn(started=1.0, first=1.5, last=3.5, text="x", events=4, output_tokens=9, prompt_tokens=30)
    turn.cached_tokens, turn.finish_reason = 16, "length"
    assert turn.tokens_per_s == 4.0
    assert describe(turn) == (
        "0.50 s to first token, 9 tokens, 4.0 tokens/s, prompt 30 tokens, 16 cached, ended by the length limit."
    )
    assert describe(Turn()) == "No text came."


@pytest.fixture
async def served() -> AsyncIterator[tuple[str, list[dict[str, object]], dict[str, object]]]:
    """A server that streams two pieces; `behaviour` may make it refuse, fail inside the stream, or hang."""
    seen: list[dict[str, object]] = []
    behaviour: dict[str, object] = {}

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def chat(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        if "refuse" in behaviour:
            return web.json_response({"error": {"message": behaviour["refuse"]}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in ("é", "😀"):
            event = {"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]}
            await response.write(f": keep-alive\n\ndata: {json.dumps(event)}\n\n".encode())
        if "hang" in behaviour:
            await asyncio.sleep(60)
        if "fail" in behaviour:
            await response.write(f"data: {json.dumps({'error': {'message': behaviour['fail']}})}\n\n".encode())
            return response
        for event in (
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"completion_tokens": 5, "prompt_tokens": 9}},
        ):
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", seen, behaviour
    await runner.cleanup()


Served = tuple[str, list[dict[str, object]], dict[str, object]]


async def test_a_server_is_asked_in_openais_words(served: Served) -> None:
    url, seen, _ = served
    answers = HttpAnswers(url, None, "key", Sampling(max_tokens=7, temperature=0.0, seed=3))
    await answers.connect()
    turn, pieces = Turn(), []
    await answers.answer([{"role": "user", "content": "hi"}], turn, pieces.append)
    assert pieces == ["é", "😀"]
    assert (turn.text, turn.tokens, turn.prompt_tokens, turn.finish_reason) == ("é😀", 5, 9, "stop")
    body = seen[0]
    assert (body["model"], body["max_tokens"], body["temperature"], body["seed"]) == ("fake", 7, 0.0, 3)


async def test_unset_options_are_not_sent(served: Served) -> None:
    url, seen, _ = served
    await HttpAnswers(url, "fake", None, Sampling()).answer([], Turn(), lambda piece: None)
    assert {"max_tokens", "seed"} & set(seen[0]) == set()


async def test_a_refusal_carries_the_servers_words(served: Served) -> None:
    url, _, behaviour = served
    behaviour["refuse"] = "messages must not be empty"
    with pytest.raises(AnswerError, match="HTTP 400: messages must not be empty"):
        await HttpAnswers(url, "fake", None, Sampling()).answer([], Turn(), lambda piece: None)


async def test_an_error_inside_the_stream_is_an_error(served: Served) -> None:
    url, _, behaviour = served
    behaviour["fail"] = "the shard died"
    turn = Turn()
    with pytest.raises(AnswerError, match="the shard died"):
        await HttpAnswers(url, "fake", None, Sampling()).answer([], turn, lambda piece: None)
    assert turn.text == "é😀"


async def test_stopping_an_answer_keeps_what_came(served: Served) -> None:
    url, _, behaviour = served
    behaviour["hang"] = True
    turn, arrived = Turn(), asyncio.Event()

    def on_text(piece: str) -> None:
        if piece == "😀":
            arrived.set()

    task = asyncio.create_task(HttpAnswers(url, "fake", None, Sampling()).answer([], turn, on_text))
    await arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert turn.text == "é😀"


async def test_nobody_listening_says_what_to_do() -> None:
    with pytest.raises(AnswerError, match="shoal serve"):
        await HttpAnswers("http://127.0.0.1:1", None, None, Sampling()).connect()
