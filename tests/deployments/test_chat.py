"""POST /v1/chat/completions against OpenAI's format, with a model whose answer is known."""

from __future__ import annotations

from typing import Any

import pytest

USER = [{"role": "user", "content": "hi"}]


async def test_an_answer_has_openais_fields(start_server: Any) -> None:
    async with start_server() as server:
        response = await server.chat(model="test-model")
    assert response.status_code == 200
    body = response.json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert isinstance(body["created"], int)
    assert body["model"] == "test-model"
    assert body["system_fingerprint"].startswith("fp_")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world!", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_max_completion_tokens_is_honoured_and_wins(start_server: Any) -> None:
    """O-01."""
    async with start_server({"default": {"pieces": ["a"], "eos": False}}) as server:
        for extra in ({}, {"max_tokens": 9}):
            body = (await server.chat(max_completion_tokens=5, temperature=0, **extra)).json()
            assert body["choices"][0]["finish_reason"] == "length"
            assert body["usage"]["completion_tokens"] == 5


async def test_without_a_limit_the_context_is_the_limit(start_server: Any) -> None:
    async with start_server({"default": {"pieces": ["a"], "eos": False}}, engine={"max_model_len": 64}) as server:
        body = (await server.chat()).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == 64


async def test_n_choices(start_server: Any) -> None:
    async with start_server() as server:
        body = (await server.chat(n=3)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in body["choices"]} == {"Hello, world!"}
    assert body["usage"]["completion_tokens"] % 3 == 0


async def test_logprobs(start_server: Any) -> None:
    async with start_server() as server:
        body = (await server.chat(logprobs=True, top_logprobs=2)).json()
    entries = body["choices"][0]["logprobs"]["content"]
    text = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert text.removesuffix(b"<|end|>") == b"Hello, world!"
    assert all(entry["logprob"] <= 0 for entry in entries)
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in entries)


async def test_a_stop_string_is_left_out(start_server: Any) -> None:
    async with start_server() as server:
        (choice,) = (await server.chat(stop=[" world", "xyz"])).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello,", "stop")
        assert choice["stop_reason"] == " world"
        (choice,) = (await server.chat(stop=" world", include_stop_str_in_output=True)).json()["choices"]
        assert choice["message"]["content"] == "Hello, world"


async def test_ignored_fields_are_accepted(start_server: Any) -> None:
    fields = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True}
    idle = {"response_format": {"type": "text"}, "modalities": ["text"], "audio": None, "functions": []}
    async with start_server() as server:
        assert (await server.chat(**fields, **idle)).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("modalities", ["text", "audio"]),
        ("functions", [{"name": "f"}]),
        ("guided_json", {"type": "object"}),
        ("use_beam_search", True),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(start_server: Any, field: str, value: Any) -> None:
    async with start_server() as server:
        error = server.error(await server.chat(**{field: value}), 400)
        assert (error["param"], error["code"]) == (field, "unsupported_parameter")


async def test_content_parts_render_like_one_string(start_server: Any) -> None:
    """O-10."""
    parts = [{"type": "text", "text": "tell me a "}, {"type": "text", "text": "riddle"}]
    async with start_server() as server:
        for role in ("system", "user", "assistant", "tool"):
            ids = [
                (await server.http.post("/tokenize", json={"messages": [{"role": role, "content": content}]})).json()
                for content in (parts, "tell me a riddle")
            ]
            assert ids[0]["tokens"] == ids[1]["tokens"]


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, {"text": "x"}, {}]
)
async def test_other_content_parts_are_refused(start_server: Any, part: dict[str, Any]) -> None:
    """O-10."""
    async with start_server() as server:
        response = await server.chat(messages=[{"role": "user", "content": [part]}])
        assert server.error(response, 400)["param"] == "messages"


async def test_what_the_template_refuses_is_the_clients_error(start_server: Any) -> None:
    """O-11."""
    messages = [*USER, {"role": "system", "content": "late"}]
    async with start_server() as server:
        error = server.error(await server.chat(messages=messages), 400)
        assert error["param"] == "messages"
        assert "System must come first" in error["message"]


async def test_one_bos_and_matching_prompt_tokens(start_server: Any) -> None:
    """O-09: the template's text is encoded as it is; plain text gets the BOS that the tokenizer asks for."""
    async with start_server() as server:
        chat = (await server.http.post("/tokenize", json={"messages": USER})).json()
        text = (await server.http.post("/tokenize", json={"prompt": "hi"})).json()
        bos = text["tokens"][0]
        assert chat["tokens"].count(bos) == 0
        assert text["tokens"].count(bos) == 1
        assert (await server.chat()).json()["usage"]["prompt_tokens"] == chat["count"]
        assert (await server.complete("hi")).json()["usage"]["prompt_tokens"] == text["count"]
        bare = (await server.http.post("/tokenize", json={"prompt": "hi", "add_special_tokens": False})).json()
        assert bare["tokens"] == text["tokens"][1:]


async def test_the_last_message_can_be_continued(start_server: Any) -> None:
    messages = [*USER, {"role": "assistant", "content": "Well, "}]
    async with start_server() as server:
        body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        tokens = (await server.http.post("/tokenize", json=body)).json()["tokens"]
        text = (await server.http.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
        assert text == "<|user|>hi<|end|><|assistant|>Well, "
        assert (await server.chat(**body)).status_code == 200


async def test_a_repeated_prompt_is_reported_as_cached(start_server: Any) -> None:
    async with start_server() as server:
        question = "the quick brown fox " * 10
        first = (await server.chat(question)).json()["usage"]
        second = (await server.chat(question)).json()["usage"]
        other = (await server.chat(question, cache_salt="tenant")).json()["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] >= 16
    assert other["prompt_tokens_details"]["cached_tokens"] == 0


async def test_prompt_logprobs_in_vllms_format(start_server: Any) -> None:
    async with start_server() as server:
        body = (await server.chat(prompt_logprobs=1)).json()
    scores = body["prompt_logprobs"]
    assert len(scores) == body["usage"]["prompt_tokens"]
    assert scores[0] is None
    assert all({"logprob", "rank", "decoded_token"} == set(entry) for item in scores[1:] for entry in item.values())


async def test_a_seed_decides_the_answer_and_large_seeds_are_taken(start_server: Any) -> None:
    async with start_server() as server:
        for seed in (0, -1, 2**63, 2**64 - 1):
            assert (await server.chat(seed=seed, temperature=1.0)).status_code == 200
