"""Chat templates render as in transformers, or refuse with their own words; nothing else comes out of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from shoal.configs.errors import InvalidRequestError
from shoal.model_shards.tokenizer import chat_template
from shoal.model_shards.tokenizer.chat_template import render, tool_call_form
from shoal.model_shards.tokenizer.messages import ToolCallForm

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Wetter für <Städte> & Dörfer",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Name"}},
                "required": ["city"],
            },
        },
    }
]
PLAIN = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello! "},
    {"role": "user", "content": "Grüße 😀 <b>&</b>"},
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
TOOL_USE = [
    {"role": "user", "content": "Weather in Köln?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefghi", "content": '{"t": 20}'},
    {"role": "assistant", "content": "20 degrees."},
    {"role": "user", "content": "Thanks"},
]


def _ours(template: str, messages: Any, tools: Any = None, **options: Any) -> str:
    variables = options.pop("variables", SPECIAL)
    defaults = {"add_generation_prompt": True, "continue_final_message": False}
    return render(template, messages, tools=tools, variables=variables, **{**defaults, **options})


def _theirs(template: str, messages: Any, tools: Any = None, **options: Any) -> str:
    defaults = {"add_generation_prompt": True}
    texts, _ = render_jinja_template(
        [messages], tools=tools, chat_template=template, **{**defaults, **SPECIAL, **options}
    )
    return texts[0]


def _with_argument_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As OpenAI's clients send it: the arguments are JSON text."""
    copied: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for message in copied:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return copied


def _templates(shared_data: Path) -> dict[str, str]:
    return {path.stem: path.read_text() for path in sorted((shared_data / "chat_templates").glob("*.jinja"))}


def _assert_same(name: str, template: str, messages: Any, theirs_messages: Any, tools: Any) -> None:
    expected = refusal = None
    try:
        expected = _theirs(template, theirs_messages, tools)
    except (jinja2.TemplateError, TypeError) as error:  # TypeError: the Cohere templates without tools
        refusal = str(error)
    if refusal is None:
        assert _ours(template, messages, tools) == expected, name
        return
    with pytest.raises(InvalidRequestError) as caught:
        _ours(template, messages, tools)
    assert caught.value.param == "messages"
    assert refusal in caught.value.message, name


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no-tools", "tools"])
@pytest.mark.parametrize("messages", [PLAIN, PLAIN[1:], PLAIN[1:2]], ids=["system", "no-system", "one"])
def test_every_template_gives_transformers_text_or_its_own_refusal(
    messages: Any, tools: Any, shared_data: Path
) -> None:
    templates = _templates(shared_data)
    assert len(templates) == 19
    for name, template in templates.items():
        _assert_same(name, template, messages, messages, tools)


def test_every_template_with_tool_calls(shared_data: Path) -> None:
    """Ours gets the messages as clients send them, transformers in the form that this template wants."""
    sent = _with_argument_text(TOOL_USE)
    for name, template in _templates(shared_data).items():
        form = tool_call_form(template)
        wanted = _with_argument_text(TOOL_USE) if form.arguments_as_text else json.loads(json.dumps(TOOL_USE))
        wanted[1]["content"] = None if form.null_content else ""
        for content in (None, ""):
            sent[1]["content"] = content
            _assert_same(name, template, sent, wanted, TOOLS)


def test_the_form_of_tool_calls_that_templates_want(shared_data: Path) -> None:
    forms = {name: tool_call_form(template) for name, template in _templates(shared_data).items()}
    for name in ("Qwen-Qwen2.5-7B-Instruct", "meta-llama-Llama-3.3-70B-Instruct", "google-gemma-2-2b-it"):
        assert forms[name] == ToolCallForm(arguments_as_text=False, null_content=False)
    for name in ("meetkai-functionary-medium-v3.1", "meetkai-functionary-medium-v3.2"):
        assert forms[name].arguments_as_text
    deepseek = "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"
    assert forms[deepseek] == ToolCallForm(arguments_as_text=True, null_content=True)
    text = _ours(_templates(shared_data)[deepseek], _with_argument_text(TOOL_USE)[:2])
    assert 'get_weather\n```json\n{"city": "Köln"}\n```' in text


def test_gemma_refuses_system_and_double_users_with_its_own_words(shared_data: Path) -> None:
    """Case O-11."""
    template = _templates(shared_data)["google-gemma-2-2b-it"]
    with pytest.raises(InvalidRequestError) as caught:
        _ours(template, PLAIN)
    assert (caught.value.message, caught.value.param) == ("System role not supported", "messages")
    assert caught.value.status == 400
    with pytest.raises(InvalidRequestError, match="Conversation roles must alternate"):
        _ours(template, [PLAIN[1], PLAIN[3]])


SIMPLE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_text_parts_are_joined_by_a_newline(role: str) -> None:
    """Case O-10."""
    parts = [{"type": "text", "text": "tell me a"}, {"type": "text", "text": "riddle"}]
    assert _ours(SIMPLE, [{"role": role, "content": parts}]) == f"[{role}]tell me a\nriddle[assistant]"
    assert _ours(SIMPLE, [{"role": role, "content": parts[:1]}]) == f"[{role}]tell me a[assistant]"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "hi"}], r"messages\[0\] must be an object with a role"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be a string"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "part of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "mystery"}]}], "part of type 'mystery'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "a part without text"),
        ([{"role": "user", "content": ["hi"]}], "a part without text"),
        ([{"role": "assistant", "tool_calls": "x"}], "tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "a function that has a name"),
    ],
)
def test_messages_of_the_wrong_form_are_refused(messages: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        _ours(SIMPLE, messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content }}",
        "{{ 1 // 0 }}",
        "{{ nothing.at.all }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 'x' * 10**12 }}",
        "{{ 7 ** (10**9) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% if %}",
        "{{ strftime_now(5) }}",
        "{{ {1: 2}|tojson(indent='x'*99) }}{{ messages|tojson(sort_keys=messages.clear) }}{{ undefined_function() }}",
    ],
)
def test_whatever_a_template_does_is_a_client_error(template: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        _ours(template, PLAIN)
    assert caught.value.status == 400
    assert caught.value.param == "messages"


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_PROMPT_CHARS", 1000)
    with pytest.raises(InvalidRequestError, match="longer than 1000 characters"):
        _ours("{% for i in range(2000) %}{{ 'x' }}{% endfor %}", PLAIN)


def test_the_caller_s_messages_stay_as_they_are() -> None:
    messages = _with_argument_text(TOOL_USE)
    before = json.dumps(messages)
    _ours("{% for m in messages %}{{ m.tool_calls|default([])|tojson }}{% endfor %}", messages)
    assert json.dumps(messages) == before


def test_null_fields_are_absent_and_empty_tools_are_none() -> None:
    template = "{{ 'tool_calls' in messages[0] }} {{ tools is none }} {{ 'content' in messages[0] }}"
    message = {"role": "user", "content": None, "tool_calls": None}
    assert _ours(template, [message], []) == "False True False"


def test_arguments_that_are_no_json_stay_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{broken"}}
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert _ours(template, [{"role": "assistant", "tool_calls": [call]}]) == '"{broken"'


def test_extra_variables_reach_the_template() -> None:
    assert _ours("{{ enable_thinking }} {{ bos_token }}", PLAIN, variables={**SPECIAL, "enable_thinking": False}) == (
        "False <s>"
    )


@pytest.mark.parametrize("content", ["Hello! ", "Sure,", "a\n"])
def test_the_last_message_can_be_continued(content: str, shared_data: Path) -> None:
    messages = [*PLAIN[1:2], {"role": "assistant", "content": content}]
    templates = _templates(shared_data)
    for name in ("Qwen-Qwen2.5-7B-Instruct", "meta-llama-Llama-3.1-8B-Instruct", "gguf-SmolLM2-135M-Instruct"):
        ours = _ours(templates[name], messages, add_generation_prompt=False, continue_final_message=True)
        expected = _theirs(templates[name], messages, add_generation_prompt=False, continue_final_message=True)
        assert ours == expected, name


def test_what_cannot_be_continued_is_refused() -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(InvalidRequestError, match="does not write it out"):
        _ours("fixed", PLAIN, **options)
    with pytest.raises(InvalidRequestError, match="needs a last message with text"):
        _ours(SIMPLE, [{"role": "assistant", "tool_calls": [CALL]}], **options)
    with pytest.raises(InvalidRequestError, match="use one of them"):
        _ours(SIMPLE, PLAIN, continue_final_message=True)


def test_generation_blocks_are_only_their_contents() -> None:
    assert _ours("a{% generation %}b{{ 1 + 1 }}{% endgeneration %}c", PLAIN) == "ab2c"
