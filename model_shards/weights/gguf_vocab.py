"""The vocabulary that a GGUF file carries in its metadata, as typed values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from shoal.configs.errors import ModelLoadError


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Texts of control tokens that end a turn or a document. A GGUF file names only one end-of-sequence token, the chat one
# or the document one; a chat model that emits the other has ended as well.
_END_TEXTS = frozenset(
    {
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<eos>",
        "</s>",
    }
)


@dataclass(frozen=True, slots=True)
class GGUFVocab:
    """`types` and `scores` have one entry a token; `scores` is empty for byte-level BPE, `merges` for SentencePiece."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]
    bos: int | None
    eos: int | None
    unknown: int | None
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    chat_template: str | None


def read_vocab(metadata: Mapping[str, Any], where: str) -> GGUFVocab:
    """Raises ModelLoadError naming the key that is missing or malformed."""
    model = metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str):
        raise ModelLoadError(f"{where}: metadata has no tokenizer (tokenizer.ggml.model is {model!r}).")
    tokens = _items(metadata, "tokens", str, where)
    if not tokens:
        raise ModelLoadError(f"{where}: tokenizer.ggml.tokens is missing or empty.")
    types = _items(metadata, "token_type", int, where) or [int(TokenType.NORMAL)] * len(tokens)
    scores = _items(metadata, "scores", float, where)
    for name, values in (("token_type", types), ("scores", scores)):
        if values and len(values) != len(tokens):
            raise ModelLoadError(f"{where}: tokenizer.ggml.{name} has {len(values)} entries for {len(tokens)} tokens.")
    template = metadata.get("tokenizer.chat_template")
    spm = model == "llama"
    return GGUFVocab(
        model=model,
        pre=str(metadata.get("tokenizer.ggml.pre", "default")),
        tokens=tokens,
        types=types,
        scores=scores,
        merges=_items(metadata, "merges", str, where),
        bos=_token_id(metadata, "bos", len(tokens), where),
        eos=_token_id(metadata, "eos", len(tokens), where),
        unknown=_token_id(metadata, "unknown", len(tokens), where),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", spm)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        add_space_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", spm)),
        chat_template=template if isinstance(template, str) and template.strip() else None,
    )


def bos_token_id(metadata: Mapping[str, Any]) -> int | None:
    value = metadata.get("tokenizer.ggml.bos_token_id")
    return value if type(value) is int else None


def end_token_ids(metadata: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """Ids that end a generation, the file's own end-of-sequence token first: what the metadata name, and control tokens
    whose text is a known end-of-turn or end-of-document mark."""
    named = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ids = [value for value in named if type(value) is int]
    tokens = _items(metadata, "tokens", str, where)
    types = _items(metadata, "token_type", int, where)
    for token_id, (text, kind) in enumerate(zip(tokens, types, strict=False)):
        if kind == TokenType.CONTROL and text in _END_TEXTS:
            ids.append(token_id)
    return tuple(dict.fromkeys(ids))


def _items(metadata: Mapping[str, Any], name: str, kind: type, where: str) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None:
        return []
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise ModelLoadError(f"{where}: tokenizer.ggml.{name} is not an array of {kind.__name__}.")
    return values


def _token_id(metadata: Mapping[str, Any], name: str, num_tokens: int, where: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < num_tokens:
        raise ModelLoadError(f"{where}: {key} is {value!r}, outside the vocabulary of {num_tokens} tokens.")
    return value
