"""POST /v1/completions: prompts in every form, echo, logprobs."""

from __future__ import annotations

from typing import Any

import pytest


async def test_an_answer_has_openais_fields(start_server: Any) -> None:
    async with start_server() as server:
        body = (await server.complete("hi")).json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("Hello, world!", "stop", None)


async def test_sixteen_tokens_without_a_limit(start_server: Any) -> None:
    async with start_server({"default": {"pieces": ["a"], "eos": False}}) as server:
        assert (await server.complete()).json()["usage"]["completion_tokens"] == 16


async def test_prompts_in_every_form(start_server: Any) -> None:
    script = {"rules": [{"match": "cat", "pieces": ["meow"]}], "default": {"pieces": ["ok"]}}
    async with start_server(script) as server:
        ids = {
            text: (await server.http.post("/tokenize", json={"prompt": text})).json()["tokens"]
            for text in ("a cat", "a dog")
        }
        forms = {
            "text": ("a cat", ["meow"]),
            "texts": (["a cat", "a dog"], ["meow", "ok"]),
            "ids": (ids["a cat"], ["meow"]),
            "lists of ids": ([ids["a dog"], ids["a cat"]], ["ok", "meow"]),
        }
        for prompt, answers in forms.values():
            body = (await server.complete(prompt)).json()
            assert [choice["text"] for choice in body["choices"]] == answers
            assert [choice["index"] for choice in body["choices"]] == list(range(len(answers)))


async def test_prompts_times_n(start_server: Any) -> None:
    script = {"rules": [{"match": "cat", "pieces": ["meow"]}], "default": {"pieces": ["ok"]}}
    async with start_server(script) as server:
        body = (await server.complete(["a cat", "a dog"], n=2)).json()
        single = (await server.complete(["a cat", "a dog"])).json()
        chunks = server.events(await server.complete(["a cat", "a dog"], n=2, stream=True))
    assert [choice["text"] for choice in body["choices"]] == ["meow", "meow", "ok", "ok"]
    assert body["usage"]["prompt_tokens"] == single["usage"]["prompt_tokens"]
    assert [server.text(chunks, index) for index in range(4)] == ["meow", "meow", "ok", "ok"]
    assert all(len(server.finish_reasons(chunks, index)) == 1 for index in range(4))


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_scoring(start_server: Any, max_tokens: int, as_ids: bool, stream: bool) -> None:
    """O-08: what lm-eval's loglikelihood needs."""
    text = "the quick brown fox"
    async with start_server() as server:
        tokens = (await server.http.post("/tokenize", json={"prompt": text})).json()["tokens"]
        prompt = tokens if as_ids else text
        response = await server.complete(prompt, echo=True, logprobs=1, max_tokens=max_tokens, stream=stream)
        if stream:
            chunks = server.events(response)
            shown = server.text(chunks)
            blocks = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
            logprobs = {name: [item for block in blocks for item in block[name]] for name in blocks[0]}
        else:
            (choice,) = response.json()["choices"]
            shown, logprobs = choice["text"], choice["logprobs"]
            assert response.json()["usage"]["completion_tokens"] == max_tokens
    assert shown.startswith("<s>" + text if as_ids else text)
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert len(logprobs[name]) == len(tokens) + max_tokens
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    for token, offset in list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))[1:]:
        assert shown[offset : offset + len(token)] == token


async def test_echo_alone_repeats_the_prompt(start_server: Any) -> None:
    async with start_server() as server:
        (choice,) = (await server.complete("Say it: ", echo=True)).json()["choices"]
        assert choice["text"] == "Say it: Hello, world!"
        (choice,) = (await server.complete("Say it: ", echo=True, max_tokens=0)).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("Say it: ", "length")


async def test_echo_with_n_scores_each_choice(start_server: Any) -> None:
    async with start_server() as server:
        whole = (await server.complete("hi", echo=True, logprobs=1, n=2)).json()["choices"]
        chunks = server.events(await server.complete("hi", echo=True, logprobs=1, n=2, stream=True))
    assert whole[0]["logprobs"] == whole[1]["logprobs"]
    assert [server.text(chunks, index) for index in (0, 1)] == ["hiHello, world!"] * 2


async def test_scoring_ignores_a_warm_cache(start_server: Any) -> None:
    """O-16: cached positions have no logits; all are computed again."""
    prompt = "the quick brown fox " * 12
    async with start_server() as server:
        cold = (await server.complete(prompt + "a", echo=True, logprobs=1, max_tokens=1)).json()
        await server.complete(prompt + "b")
        warm = (await server.complete(prompt + "a", echo=True, logprobs=1, max_tokens=1)).json()
    assert cold["choices"] == warm["choices"]
    assert len(warm["choices"][0]["logprobs"]["tokens"]) == warm["usage"]["prompt_tokens"] + 1


async def test_alternatives_are_keyed_by_text_and_hold_the_token(start_server: Any) -> None:
    async with start_server() as server:
        (choice,) = (await server.complete("hi", logprobs=2)).json()["choices"]
    block = choice["logprobs"]
    assert all(token in top for token, top in zip(block["tokens"], block["top_logprobs"], strict=True))


async def test_half_a_character_is_shown_as_bytes(start_server: Any) -> None:
    async with start_server({"default": {"pieces": ["é"]}}) as server:
        (choice,) = (await server.complete("hi", logprobs=0)).json()["choices"]
    assert choice["text"] == "é"
    assert choice["logprobs"]["tokens"][:2] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert choice["logprobs"]["text_offset"][:2] == [0, 0]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [99999999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": -1, "echo": True}, "max_tokens"),
        ({"prompt": "a", "logprobs": 25}, "logprobs"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
async def test_what_is_wrong_is_named(start_server: Any, body: dict[str, Any], param: str) -> None:
    async with start_server() as server:
        assert server.error(await server.http.post("/v1/completions", json=body), 400)["param"] == param
        assert (await server.complete(max_tokens=5)).status_code == 200
