"""What every generation request shares: strictness, fields that are refused by name, and the sampling parameters.

Three kinds of unknown or unsupported input are told apart. Fields of OpenAI's API that cannot change the result here
(`user`, `metadata`, ...) are dropped. Fields that would change the result and are not built yet are refused with 400
naming them, unless their value is the one that asks for nothing. Anything else is a misspelling and is refused too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.configs.app import RequestLimits
from shoal.configs.errors import InvalidRequestError
from shoal.model_shards.sampling.params import MAX_LOGPROBS, SamplingParams

IGNORED_FIELDS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "session_id",
        "spaces_between_special_tokens",
        "store",
        "user",
    }
)
"""Accepted and dropped: they label, bill or hint, but do not change what is generated."""

_ASKS_FOR_NOTHING: tuple[Any, ...] = (None, False, [], {}, "")
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "documents": (),
    "function_call": ("none",),
    "functions": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": (),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Field -> values that ask for nothing beyond the usual (besides null, false and empty)."""

Model = TypeVar("Model", bound="ApiModel")


class ApiModel(BaseModel):
    """A body as its schema says: no coercion of types, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())


class StreamOptions(ApiModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(ApiModel):
    """The fields of chat and text completions that mean the same in both."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # Beyond OpenAI, with vLLM's names.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    def check_streaming(self) -> None:
        """Raises InvalidRequestError for combinations that only one of the two modes has."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only allowed with stream: true.", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs cannot be streamed; drop stream.", param="prompt_logprobs")

    def sampling(
        self,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        bad_words: tuple[tuple[int, ...], ...],
    ) -> SamplingParams:
        """The sampler's view of this request, not yet checked against a vocabulary."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        given: dict[str, Any] = {
            "min_tokens": self.min_tokens,
            "n": self.n,
            "temperature": self.temperature,
            "top_p": self.top_p,
            # Other servers take -1 for "off"; the engine's word for it is 0.
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": parse_logit_bias(self.logit_bias),
            "seed": self.seed,
            "stop": stop,
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "ignore_eos": self.ignore_eos,
            "allowed_token_ids": None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            "skip_special_tokens": self.skip_special_tokens,
        }
        chosen = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(
            max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, bad_words=bad_words, **chosen
        )


def parse_body(model: type[Model], body: Any, limits: RequestLimits) -> Model:
    """Checks a decoded JSON body against its schema. Raises InvalidRequestError naming the field at fault."""
    if not isinstance(body, dict):
        raise InvalidRequestError(f"The request body must be a JSON object, not {_json_type(body)}.")
    fields = {}
    for name, value in body.items():
        if name in model.model_fields:
            fields[name] = value
        elif name in UNSUPPORTED_FIELDS:
            _refuse_unless_idle(name, value)
        elif name not in IGNORED_FIELDS:
            raise InvalidRequestError(f"Unrecognized request argument: {name}.", param=name, code="unknown_parameter")
    _check_counts(fields, limits)
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _named(error) from None


def parse_logit_bias(logit_bias: Mapping[str, float] | None) -> dict[int, float] | None:
    """JSON object keys are strings; token ids are integers."""
    if logit_bias is None:
        return None
    parsed = {}
    for key, bias in logit_bias.items():
        digits = key[1:] if key.startswith("-") else key
        # int() also takes blanks, underscores and other scripts' digits, and 4,300 digits of them.
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
            message = f"logit_bias keys must be token ids; got {key[:40]!r}."
            raise InvalidRequestError(message, param="logit_bias")
        parsed[int(key)] = bias
    return parsed


def check_logprobs_count(name: str, count: int | None) -> None:
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise InvalidRequestError(f"{name} must be between 0 and {MAX_LOGPROBS}; got {count}.", param=name)


def check_at_least(name: str, value: int | None, minimum: int, remark: str = "") -> None:
    if value is not None and value < minimum:
        raise InvalidRequestError(f"{name} must be at least {minimum}{remark}; got {value}.", param=name)


def _refuse_unless_idle(name: str, value: Any) -> None:
    if not any(type(value) is type(idle) and value == idle for idle in (*_ASKS_FOR_NOTHING, *UNSUPPORTED_FIELDS[name])):
        message = f"{name} is not supported by this server yet; leave it out."
        raise InvalidRequestError(message, param=name, code="unsupported_parameter")


def _check_counts(fields: Mapping[str, Any], limits: RequestLimits) -> None:
    """Long lists are refused before they are validated item by item."""
    bounds = (("messages", limits.max_messages), ("tools", limits.max_tools), ("stop", limits.max_stop))
    for name, most in bounds:
        value = fields.get(name)
        if isinstance(value, list) and len(value) > most:
            message = f"{name} takes at most {most} entries here; got {len(value)}."
            raise InvalidRequestError(message, param=name)
    n = fields.get("n")
    if type(n) is int and not 1 <= n <= limits.max_n:
        raise InvalidRequestError(f"n must be between 1 and {limits.max_n}; got {n}.", param="n")


def _named(error: ValidationError) -> InvalidRequestError:
    """The first fault, with the top-level field as `param` and the whole path in the message."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    location = [part for part in first["loc"] if not _is_union_branch(part)]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    message = f"{path}: {first['msg']}." if path else f"{first['msg']}."
    return InvalidRequestError(message, param=str(location[0]) if location else None, code="invalid_type")


def _is_union_branch(part: int | str) -> bool:
    """pydantic adds the branch of a union (`str`, `list[str]`) to the path; a client does not know those."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or "[" in part)


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
