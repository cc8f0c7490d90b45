"""Chat templates: messages in OpenAI's form to one prompt, rendered as transformers renders them.

Templates come with models and are code from elsewhere, so they run in jinja's immutable sandbox, see plain data only,
and may not write more than MAX_PROMPT_CHARS. Whatever goes wrong while rendering is the request's fault as far as this
server can know, so it is an InvalidRequestError naming `messages`, with the template's own words where it has any.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoal.configs.errors import InvalidRequestError
from shoal.model_shards.tokenizer.messages import ToolCallForm, normalize_messages

logger = logging.getLogger(__name__)

MAX_PROMPT_CHARS = 16 << 20
MAX_TEMPLATE_CHARS = 1 << 20
_CUT = "\u2063shoal:continue\u2063 "
"""Marks the end of the message to be continued. Its last space tells whether the template trimmed the message."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any],
) -> str:
    """See `Tokenizer.render_chat`. `variables` are the special tokens' texts and the caller's own."""
    if continue_final_message and add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message goes on with the last message and add_generation_prompt starts a new one; use one "
            "of them.",
            param="continue_final_message",
        )
    compiled = _compile(template)
    plain = normalize_messages(messages, tool_call_form(template))
    if continue_final_message:
        _mark_final_message(plain)
    context = {
        **variables,
        "messages": plain,
        "tools": [dict(tool) for tool in tools] if tools else None,
        "documents": variables.get("documents"),
        "add_generation_prompt": add_generation_prompt,
    }
    text = _run(compiled, context)
    return _cut_at_mark(text) if continue_final_message else text


class _Refusal(jinja2.TemplateError):
    """The template called raise_exception: its message is meant for the user."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; here it is only its contents."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, which also refuses to build huge strings by repetition or huge numbers by powers."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > 1 << 32 or abs(right) > 64):
            raise OverflowError("the power is too large")
        if operator == "*" and max(_repeated_length(left, right), _repeated_length(right, left)) > MAX_PROMPT_CHARS:
            raise OverflowError("the repetition is too long")
        return super().call_binop(context, operator, left, right)


def _repeated_length(value: Any, times: Any) -> int:
    return len(value) * times if isinstance(value, str | list | tuple) and isinstance(times, int) else 0


def _raise_exception(message: Any = "") -> NoReturn:
    raise _Refusal(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own, keeps Unicode and does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _make_environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _make_environment()


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    if len(template) > MAX_TEMPLATE_CHARS:
        raise InvalidRequestError(
            f"The chat template is longer than {MAX_TEMPLATE_CHARS} characters.", param="messages"
        )
    try:
        return _ENVIRONMENT.from_string(template)
    except (jinja2.TemplateError, RecursionError) as error:
        raise InvalidRequestError(f"The chat template cannot be compiled: {error}", param="messages") from error


def _run(compiled: jinja2.Template, context: Mapping[str, Any]) -> str:
    """The rendered text. Raises InvalidRequestError for anything the template does not manage."""
    pieces: list[str] = []
    length = 0
    try:
        for piece in compiled.generate(context):
            length += len(piece)
            if length > MAX_PROMPT_CHARS:
                raise OverflowError(f"the prompt is longer than {MAX_PROMPT_CHARS} characters")
            pieces.append(piece)
    except _Refusal as refusal:
        raise InvalidRequestError(
            str(refusal) or "The chat template refuses these messages.", param="messages"
        ) from refusal
    except Exception as error:
        raise InvalidRequestError(
            f"The model's chat template cannot render these messages ({type(error).__name__}: {error}). Check that the "
            "roles and fields are ones that this model supports.",
            param="messages",
        ) from error
    return "".join(pieces)


def _mark_final_message(messages: list[dict[str, Any]]) -> None:
    content = messages[-1].get("content")
    if not isinstance(content, str) or not content:
        raise InvalidRequestError(
            "continue_final_message needs a last message with text to go on with.", param="messages"
        )
    messages[-1]["content"] = content + _CUT


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_CUT.strip())
    if at < 0:
        raise InvalidRequestError(
            "The last message cannot be continued: this model's chat template does not write it out.", param="messages"
        )
    kept = text[:at]
    return kept if text.startswith(_CUT, at) else kept.rstrip()


_PROBE = re.compile(r'"shoal_probe": ?"x"')
_FORMS = tuple(
    ToolCallForm(arguments_as_text=as_text, null_content=null) for null in (False, True) for as_text in (False, True)
)


@lru_cache(maxsize=32)
def tool_call_form(template: str) -> ToolCallForm:
    """The form in which this template writes out a tool call, found by trying.

    Clients send arguments as JSON text and often null content. Most templates want the object (they write
    `arguments | tojson`); some join the text to their own, and given an object fail or print Python's notation; some
    write the calls only where content is null, and drop them silently otherwise. The first form whose output holds the
    arguments as JSON is taken; templates that know no tool calls get the first form.
    """
    parameters = {"type": "object", "properties": {"shoal_probe": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}}
    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": '{"shoal_probe": "x"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    for form in _FORMS:
        context = {
            "bos_token": "",
            "eos_token": "",
            "messages": normalize_messages(messages, form),
            "tools": [tool],
            "documents": None,
            "add_generation_prompt": False,
        }
        with suppress(InvalidRequestError):
            if _PROBE.search(_run(_compile(template), context)):
                return form
    return _FORMS[0]
