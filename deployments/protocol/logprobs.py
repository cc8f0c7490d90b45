"""Logprobs in OpenAI's two formats.

A token is shown as its text where its bytes are text, and as `bytes:\\xNN...` where they are part of a character: so
shown, different tokens never look the same, which the legacy format needs (its alternatives are the keys of an object).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from shoal.model_shards.engine.plan import TokenLogprobs

FLOOR = -9999.0
"""JSON has no -inf."""


class Vocabulary:
    """The bytes of every token, as the gateway shows them. Immutable; index is the token id."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._bytes = token_bytes

    def bytes(self, token_id: int) -> bytes:
        # Logits may be wider than the tokenizer's vocabulary (padding rows): such ids have no text.
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def show(self, token_id: int) -> str:
        raw = self.bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def clamp(logprob: float) -> float:
    return max(logprob, FLOOR)


def chat_logprobs(entries: Iterable[TokenLogprobs], vocabulary: Vocabulary) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""
    return {"content": [_chat_entry(entry, vocabulary) for entry in entries], "refusal": None}


def _chat_entry(entry: TokenLogprobs, vocabulary: Vocabulary) -> dict[str, Any]:
    shown = _chat_token(entry.token_id, entry.logprob, vocabulary)
    top = [_chat_token(token_id, logprob, vocabulary) for token_id, logprob in entry.top]
    return {**shown, "top_logprobs": top}


def _chat_token(token_id: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "token": vocabulary.show(token_id),
        "logprob": clamp(logprob),
        "bytes": list(vocabulary.bytes(token_id)),
    }


class LegacyLogprobs:
    """`choices[].logprobs` of a text completion, for one choice: keeps the running `text_offset` (in characters)."""

    def __init__(self, vocabulary: Vocabulary, invisible: frozenset[int]) -> None:
        """`invisible` ids have no text in the answer (special tokens, when they are skipped)."""
        self._vocabulary = vocabulary
        self._invisible = invisible
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def echo(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], text: str) -> dict[str, Any]:
        """The prompt's tokens; call first. `text` is the prompt as it is shown: where its tokens hold more (an added
        BOS, SentencePiece's leading space), that is at the front."""
        block = self._new_block()
        ends, offset = [], 0
        for token_id, entry in zip(token_ids, entries, strict=True):
            self._append(block, token_id, entry)
            ends.append(offset)
            offset += len(self._decoder.decode(self._vocabulary.bytes(token_id)))
        surplus = max(0, offset - len(text))
        block["text_offset"] = [max(0, start - surplus) for start in ends]
        self._offset = len(text)
        self._decoder.reset()
        return block

    def block(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The next generated tokens."""
        block = self._new_block()
        for entry in entries:
            self._append(block, entry.token_id, entry)
            block["text_offset"].append(self._offset)
            if entry.token_id not in self._invisible:
                self._offset += len(self._decoder.decode(self._vocabulary.bytes(entry.token_id)))
        return block

    def _new_block(self) -> dict[str, Any]:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def _append(self, block: dict[str, Any], token_id: int, entry: TokenLogprobs | None) -> None:
        block["tokens"].append(self._vocabulary.show(token_id))
        block["token_logprobs"].append(None if entry is None else clamp(entry.logprob))
        block["top_logprobs"].append(None if entry is None else self._alternatives(entry))

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float]:
        """The k best, and the token itself where it is not among them (as OpenAI does). Of two tokens with one text
        the better stays: the list is sorted."""
        shown: dict[str, float] = {}
        if entry.top:
            for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
                shown.setdefault(self._vocabulary.show(token_id), clamp(logprob))
        return shown


def join_blocks(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {name: first[name] + second[name] for name in first}


def prompt_logprobs(
    entries: Sequence[TokenLogprobs | None], vocabulary: Vocabulary
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's format: one entry a prompt token, an object from token id to its logprob, rank and text."""
    shown: list[dict[str, dict[str, Any]] | None] = []
    for entry in entries:
        if entry is None:
            shown.append(None)
            continue
        tokens = {
            str(token_id): _ranked(token_id, logprob, rank, vocabulary)
            for rank, (token_id, logprob) in enumerate(entry.top, start=1)
        }
        tokens[str(entry.token_id)] = _ranked(entry.token_id, entry.logprob, entry.rank, vocabulary)
        shown.append(tokens)
    return shown


def _ranked(token_id: int, logprob: float, rank: int, vocabulary: Vocabulary) -> dict[str, Any]:
    return {"logprob": clamp(logprob), "rank": rank, "decoded_token": vocabulary.show(token_id)}
