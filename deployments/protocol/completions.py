"""POST /v1/completions: the request."""

from __future__ import annotations

from typing import Any

from shoal.configs.errors import InvalidRequestError
from shoal.deployments.protocol.fields import (
    GenerationFields,
    check_at_least,
    check_logprobs_count,
)

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this endpoint."""

Prompt = str | list[int]


class CompletionRequest(GenerationFields):
    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    # Beyond OpenAI, with vLLM's names.
    add_special_tokens: bool | None = None

    @property
    def token_limit(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def scores_prompt(self) -> bool:
        """The prompt's own logprobs are part of the answer: the legacy way to score a text."""
        return bool(self.echo) and self.logprobs is not None

    def check(self) -> None:
        """Raises InvalidRequestError for what a schema cannot say."""
        self.check_streaming()
        check_logprobs_count("logprobs", self.logprobs)
        check_logprobs_count("prompt_logprobs", self.prompt_logprobs)
        if not (self.echo or self.prompt_logprobs is not None):
            check_at_least("max_tokens", self.max_tokens, 1, " (0 is legal only to score a prompt: echo with logprobs)")
        check_at_least("max_tokens", self.max_tokens, 0)
        if self.best_of is not None and self.best_of != self.num_choices:
            message = "best_of other than n is not supported by this server; leave it out."
            raise InvalidRequestError(message, param="best_of", code="unsupported_parameter")

    def prompts(self, max_prompts: int) -> list[Prompt]:
        """One entry a prompt, text or token ids. Raises InvalidRequestError naming `prompt`."""
        prompt = self.prompt
        if isinstance(prompt, str) or _is_token_ids(prompt):
            prompts = [prompt]
        elif isinstance(prompt, list):
            prompts = prompt
        else:
            raise _prompt_error("must be a string, an array of strings, of token ids, or of arrays of token ids")
        if len(prompts) > max_prompts:
            raise _prompt_error(f"takes at most {max_prompts} prompts in one request; got {len(prompts)}")
        if not prompts or not all(len(p) > 0 for p in prompts if isinstance(p, (str, list))):
            raise _prompt_error("must not be empty")
        if not (all(isinstance(p, str) for p in prompts) or all(_is_token_ids(p) for p in prompts)):
            raise _prompt_error("must be a string, an array of strings, of token ids, or of arrays of token ids")
        return prompts


def _is_token_ids(value: Any) -> bool:
    # `type` and not `isinstance`: True is an int, but not a token id.
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _prompt_error(rule: str) -> InvalidRequestError:
    return InvalidRequestError(f"prompt {rule}.", param="prompt")
