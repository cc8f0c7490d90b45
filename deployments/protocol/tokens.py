"""POST /tokenize and /detokenize: the requests."""

from __future__ import annotations

from typing import Any

from shoal.configs.errors import InvalidRequestError
from shoal.deployments.protocol.chat import ChatMessage, check_template_kwargs
from shoal.deployments.protocol.fields import ApiModel


class TokenizeRequest(ApiModel):
    """Either `prompt`, or `messages` with the options of the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("Give exactly one of prompt and messages.", param="prompt")
        if self.messages is not None and not self.messages:
            raise InvalidRequestError("messages must hold at least one message.", param="messages")
        check_template_kwargs(self.chat_template_kwargs)


class DetokenizeRequest(ApiModel):
    model: str | None = None
    tokens: list[int]
