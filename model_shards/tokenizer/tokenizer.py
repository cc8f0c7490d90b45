"""The tokenizer of a model: text to ids, ids to text and to exact bytes, messages to a prompt.

Built on the `tokenizers` library, from a `tokenizer.json` or from GGUF metadata. All methods are safe to call from
several threads at once; nothing changes after construction.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from shoal.configs.errors import InvalidRequestError
from shoal.model_shards.tokenizer.chat_template import render
from shoal.model_shards.weights.sources import ModelSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What a loader found out; see `from_gguf` and `from_hf`."""

    backend: tokenizers.Tokenizer
    token_bytes: list[bytes]
    """By id: the exact bytes; empty for ids without text."""
    special_token_ids: frozenset[int]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    strips_leading_space: bool = False
    """SentencePiece writes a space before the text; `decode` takes it off again."""
    special_texts: Mapping[str, str] = field(default_factory=dict)
    """`bos_token`, `eos_token`, ... as chat templates see them."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """By name; "default" is used unless there is a "tool_use" and the request has tools."""


class Tokenizer:
    """Tokenizer of one model. `vocab_size` counts the ids it knows; the model's logits may be wider (padding)."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._backend = parts.backend
        self._bytes = parts.token_bytes
        self.vocab_size = len(parts.token_bytes)
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = parts.eos_token_ids
        self.special_token_ids = parts.special_token_ids
        self.chat_template: str | None = parts.chat_templates.get("default")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt.

        Special tokens written out in the text ("<|im_end|>") become their ids, as in transformers: a completion prompt
        may be a chat rendered by the client. `add_special_tokens` adds what the tokenizer asks for (BOS, rarely EOS);
        a text that already starts with BOS does not get a second one. Raises InvalidRequestError for a text that is
        not valid Unicode (a lone surrogate).
        """
        try:
            # As a batch of one: `encode` would keep the interpreter locked, tens of milliseconds for a long text.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = encoding.ids
        except (UnicodeEncodeError, TypeError):
            if isinstance(text, str) and not _is_valid_unicode(text):
                raise InvalidRequestError(
                    "The text holds half of a surrogate pair (such as \\ud83d alone), which is not a character."
                ) from None
            raise
        bos = self.bos_token_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos]:
            return ids[1:]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the ids. Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary have no text.

        A tokenizer that writes a space before the text (SentencePiece) loses one leading space here, as in
        transformers; `token_bytes` keeps it, since the text before a generated token is not known there.
        """
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        raw = b"".join(self.token_bytes(token_id) for token_id in token_ids if token_id not in skipped)
        if self._parts.strips_leading_space:
            raw = raw.removeprefix(b" ")
        return raw.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token; those of a sequence, joined, are its text. A special token gives its literal
        text; an id without text (unused, padding, outside the vocabulary) gives nothing."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def token_text(self, token_id: int) -> str:
        """One token for display: its text, or `bytes:\\xf0\\x9f` (OpenAI's spelling) when it is part of a character."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for a chat in OpenAI's message form, by the model's template (or the given one).

        `continue_final_message` leaves the last message open so that the model goes on with it. Extra keywords become
        variables of the template (`enable_thinking`, ...). Raises InvalidRequestError(param="messages") when the
        template refuses the messages (with its own words) or cannot render them, when a message's form is wrong, and
        when the model has no template.
        """
        chosen = template or self._template_for(tools)
        variables = {**self._parts.special_texts, **kwargs}
        return render(
            chosen,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """`render_chat` (same options), then encoded without adding special tokens: the template writes BOS itself."""
        text = self.render_chat(messages, **options)
        try:
            return self.encode(text, add_special_tokens=False)
        except InvalidRequestError as error:
            raise InvalidRequestError(error.message, param="messages") from None

    def _template_for(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        templates = self._parts.chat_templates
        name = "tool_use" if tools and "tool_use" in templates else "default"
        if name not in templates:
            raise InvalidRequestError(
                "This model has no chat template (it is a base model, not a chat model). Send a plain prompt to "
                "/v1/completions instead.",
                param="messages",
            )
        return templates[name]


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer that comes with a model. Raises ModelLoadError naming the file or key that is missing or
    unknown."""
    if source.kind == "gguf":
        from shoal.model_shards.tokenizer.from_gguf import parts_from_gguf

        return Tokenizer(parts_from_gguf(source.path))
    from shoal.model_shards.tokenizer.from_hf import parts_from_directory

    return Tokenizer(parts_from_directory(source.path))


def _is_valid_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
