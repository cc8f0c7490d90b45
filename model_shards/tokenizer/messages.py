"""Chat messages as clients send them -> the plain form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.configs.errors import InvalidRequestError

PART_JOINER = "\n"
"""Between the text parts of a message whose content is a list."""


@dataclass(frozen=True, slots=True)
class ToolCallForm:
    """How a template wants an assistant's message with tool calls (see `chat_template.tool_call_form`)."""

    arguments_as_text: bool
    """The arguments as JSON text, not as an object."""
    null_content: bool
    """Content null, not the empty string, when there is no text beside the calls."""


def normalize_messages(messages: Sequence[Mapping[str, Any]], form: ToolCallForm) -> list[dict[str, Any]]:
    """Fresh copies, so that neither the template nor a later step changes the caller's messages:

    - `content` given as a list of text parts becomes one string, the parts joined by PART_JOINER;
    - fields that are null are left out, as transformers does (templates test whether a field is there);
    - messages with tool calls are brought into `form`; arguments that are not a JSON object stay as they are.

    Raises InvalidRequestError(param="messages") for no messages, a message that is not an object with a role, and
    content parts other than text.
    """
    if not messages:
        raise InvalidRequestError("messages must hold at least one message.", param="messages")
    return [_message(message, index, form) for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], index: int, form: ToolCallForm) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"messages[{index}] must be an object with a role.", param="messages")
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content", "")
    if isinstance(content, list | tuple):
        plain["content"] = PART_JOINER.join(_part_text(part, index) for part in content)
    elif not isinstance(content, str):
        raise InvalidRequestError(
            f"messages[{index}].content must be a string or a list of text parts.", param="messages"
        )
    calls = plain.get("tool_calls", [])
    if not isinstance(calls, list | tuple):
        raise InvalidRequestError(f"messages[{index}].tool_calls must be a list.", param="messages")
    if calls:
        plain["tool_calls"] = [_tool_call(call, index, form) for call in calls]
        plain["content"] = plain.get("content") or (None if form.null_content else "")
    return plain


def _part_text(part: Any, index: int) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get(kind) if kind in ("text", "refusal") else None
    if not isinstance(text, str):
        what = f"a part of type {kind!r}" if isinstance(kind, str) and kind != "text" else "a part without text"
        raise InvalidRequestError(
            f"messages[{index}].content has {what}; this model takes text parts only "
            '({"type": "text", "text": "..."}).',
            param="messages",
        )
    return text


def _tool_call(call: Any, index: int, form: ToolCallForm) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(
            f"messages[{index}].tool_calls must hold objects with a function that has a name.", param="messages"
        )
    arguments = function.get("arguments")
    if form.arguments_as_text and isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not form.arguments_as_text and isinstance(arguments, str):
        arguments = _as_object(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _as_object(arguments: str) -> Any:
    """The object that the text is; text that is none stays text (a model may have written it)."""
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
