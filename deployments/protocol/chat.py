"""POST /v1/chat/completions: the request."""

from __future__ import annotations

import json
from typing import Any, Literal

from shoal.configs.errors import InvalidRequestError
from shoal.deployments.protocol.fields import (
    ApiModel,
    GenerationFields,
    check_at_least,
    check_logprobs_count,
)

_TEXT_PARTS = {"text": "text", "refusal": "refusal"}
"""Types of content parts that are text, and the key that holds it."""

_RESERVED_TEMPLATE_NAMES = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "template", "tokenize"}
)


class ChatMessage(ApiModel):
    """One turn. `content` is checked by `to_template`, which can name what is wrong with a part."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # Clients send back what they were sent.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    def to_template(self, position: int) -> dict[str, Any]:
        """The message as a chat template takes it. Text parts are joined without a separator: split or not, the
        same text gives the same prompt. `developer` is today's name for `system`, and templates know the latter."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        content = self._text(position)
        if content is None and not self.tool_calls:
            raise InvalidRequestError(f"messages[{position}].content is missing.", param="messages")
        message["content"] = content
        for key in ("name", "tool_call_id", "reasoning_content"):
            value = getattr(self, key)
            if value is not None:
                message[key] = value
        if self.tool_calls:
            message["tool_calls"] = [_tool_call(call, position) for call in self.tool_calls]
        return message

    def _text(self, position: int) -> str | None:
        if self.content is None:
            return self.refusal
        if isinstance(self.content, str):
            return self.content
        texts = []
        for index, part in enumerate(self.content):
            kind = part.get("type")
            key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
            where = f"messages[{position}].content[{index}]"
            if key is None:
                message = f"{where} has type {kind!r}; this model takes only text parts."
                raise InvalidRequestError(message, param="messages")
            text = part.get(key)
            if not isinstance(text, str):
                raise InvalidRequestError(f"{where}.{key} must be a string.", param="messages")
            texts.append(text)
        return "".join(texts)


class ChatCompletionRequest(GenerationFields):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    # Beyond OpenAI, with vLLM's names.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    echo: Literal[False] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def token_limit(self) -> int | None:
        """`max_completion_tokens` is the current field, `max_tokens` its deprecated name: the former wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives a position reports; None for no logprobs at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def template_kwargs(self) -> dict[str, Any]:
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", self.reasoning_effort)
        return kwargs

    def check(self) -> None:
        """Raises InvalidRequestError for what a schema cannot say."""
        self.check_streaming()
        if not self.messages:
            raise InvalidRequestError("messages must hold at least one message.", param="messages")
        for name in ("max_completion_tokens", "max_tokens"):
            check_at_least(name, getattr(self, name), 1)
        check_logprobs_count("top_logprobs", self.top_logprobs)
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
        self._check_tools()
        if self.continue_final_message:
            if self.add_generation_prompt:
                message = "continue_final_message and add_generation_prompt exclude each other."
                raise InvalidRequestError(message, param="continue_final_message")
            if self.messages[-1].role != "assistant":
                message = "continue_final_message needs a last message of role assistant."
                raise InvalidRequestError(message, param="continue_final_message")
        check_template_kwargs(self.chat_template_kwargs)

    def _check_tools(self) -> None:
        """Tools are shown to the model by its template; calls are not parsed out of the text yet, so a request that
        relies on getting one is refused."""
        if self.tool_choice in (None, "none", "auto"):
            return
        message = "A tool_choice that forces a call is not supported by this server yet; use auto or none."
        raise InvalidRequestError(message, param="tool_choice", code="unsupported_parameter")


def check_template_kwargs(kwargs: dict[str, Any] | None) -> None:
    """Variables of the template that have request fields of their own must be set there."""
    reserved = _RESERVED_TEMPLATE_NAMES & (kwargs or {}).keys()
    if reserved:
        message = f"chat_template_kwargs must not set {sorted(reserved)[0]}."
        raise InvalidRequestError(message, param="chat_template_kwargs")


def _tool_call(call: dict[str, Any], position: int) -> dict[str, Any]:
    """OpenAI carries arguments as a JSON string, chat templates take the object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        message = f"messages[{position}].tool_calls: every call needs function.name."
        raise InvalidRequestError(message, param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            message = f"messages[{position}].tool_calls: function.arguments is not JSON."
            raise InvalidRequestError(message, param="messages") from None
    return {**call, "function": {**function, "arguments": arguments}}
