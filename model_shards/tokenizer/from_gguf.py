"""A tokenizer from GGUF metadata alone: byte-level BPE ("gpt2") and SentencePiece BPE with byte fallback ("llama")."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors

from shoal.configs.errors import ModelLoadError
from shoal.model_shards.tokenizer.tokenizer import TokenizerParts
from shoal.model_shards.tokenizer.vocab_bytes import SPACE_MARK, byte_level_bytes, sentencepiece_bytes
from shoal.model_shards.weights.gguf import open_gguf
from shoal.model_shards.weights.gguf_vocab import GGUFVocab, TokenType, end_token_ids, read_vocab

logger = logging.getLogger(__name__)

# Regular expressions by which the models split text before BPE, as published in their tokenizer.json files.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How `tokenizer.ggml.pre` splits. Without `split` it is GPT-2's own expression."""

    split: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    """A whole word that is in the vocabulary is one token whatever the merges say."""
    add_bos: bool = False
    """When the file does not say."""


_GPT2 = _PreTokenizer()
_LLAMA3 = _PreTokenizer(split=_LLAMA3_SPLIT, ignore_merges=True, add_bos=True)
_QWEN2 = _PreTokenizer(split=_QWEN2_SPLIT, nfc=True)
_PRE_TOKENIZERS: dict[str, _PreTokenizer] = {
    "gpt-2": _GPT2,
    "smollm": _PreTokenizer(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}

_ADDED = (TokenType.CONTROL, TokenType.USER_DEFINED)


def parts_from_gguf(path: Path) -> TokenizerParts:
    """Raises ModelLoadError for metadata that is missing, malformed, or of a kind not known here."""
    file = open_gguf(path)
    vocab = read_vocab(file.metadata, str(path))
    try:
        if vocab.model == "gpt2":
            backend, table, add_bos = _byte_level(vocab, path, "tokenizer.ggml.add_bos_token" in file.metadata)
        elif vocab.model == "llama":
            backend, table, add_bos = *_sentencepiece(vocab, path), vocab.add_bos
        else:
            raise ModelLoadError(
                f"{path}: tokenizer model {vocab.model!r} is not supported. Supported: gpt2 (byte-level BPE) and llama "
                "(SentencePiece)."
            )
        _add_tokens(backend, vocab)
        _add_post_processor(backend, vocab, add_bos)
    except ModelLoadError:
        raise
    except Exception as error:  # `tokenizers` raises plain Exception
        raise ModelLoadError(f"{path}: the tokenizer in the metadata is not usable: {error}.") from error
    special = frozenset(
        token_id for token_id, kind in enumerate(vocab.types) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)
    )
    return TokenizerParts(
        backend=backend,
        token_bytes=table,
        special_token_ids=special,
        bos_token_id=vocab.bos,
        eos_token_ids=end_token_ids(file.metadata, str(path)),
        strips_leading_space=vocab.model == "llama" and vocab.add_space_prefix,
        special_texts=_special_texts(vocab),
        chat_templates={} if vocab.chat_template is None else {"default": vocab.chat_template},
    )


def _byte_level(vocab: GGUFVocab, path: Path, says_bos: bool) -> tuple[tokenizers.Tokenizer, list[bytes], bool]:
    pre = _PRE_TOKENIZERS.get(vocab.pre)
    if pre is None:
        raise ModelLoadError(
            f"{path}: pre-tokenizer {vocab.pre!r} (tokenizer.ggml.pre) is not supported. Supported: "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}."
        )
    merges = [_pair(merge, path) for merge in vocab.merges]
    model = models.BPE(vocab=_ids(vocab), merges=merges, ignore_merges=pre.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.split is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.split), behavior="isolated"))
    prefix = vocab.add_space_prefix
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=pre.split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    table = [_byte_level_entry(token, kind) for token, kind in zip(vocab.tokens, vocab.types, strict=True)]
    return backend, table, vocab.add_bos if says_bos else pre.add_bos


def _byte_level_entry(token: str, kind: int) -> bytes:
    if kind == TokenType.UNUSED:
        return b""
    return token.encode("utf-8") if kind in _ADDED else byte_level_bytes(token)


def _sentencepiece(vocab: GGUFVocab, path: Path) -> tuple[tokenizers.Tokenizer, list[bytes]]:
    """The highest-scoring neighbours join first: BPE whose merges are ordered by the score of what they make."""
    if not vocab.scores:
        raise ModelLoadError(f"{path}: tokenizer.ggml.scores is missing; a llama tokenizer needs them.")
    byte_fallback = TokenType.BYTE in vocab.types
    unknown = None if vocab.unknown is None else vocab.tokens[vocab.unknown]
    model = models.BPE(
        vocab=_ids(vocab),
        merges=_merges_by_score(vocab),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=byte_fallback,
    )
    backend = tokenizers.Tokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE_MARK)]
    if vocab.add_space_prefix:
        steps.insert(0, normalizers.Prepend(SPACE_MARK))
    backend.normalizer = normalizers.Sequence(steps)
    table = []
    for token, kind in zip(vocab.tokens, vocab.types, strict=True):
        if kind in (TokenType.UNUSED, TokenType.CONTROL, TokenType.UNKNOWN):
            table.append(b"" if kind == TokenType.UNUSED else token.encode("utf-8"))
        else:
            table.append(sentencepiece_bytes(token, byte_fallback=kind == TokenType.BYTE))
    return backend, table


def _merges_by_score(vocab: GGUFVocab) -> list[tuple[str, str]]:
    joinable = (TokenType.NORMAL, TokenType.USER_DEFINED)
    ids = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(vocab.tokens, vocab.types, strict=True))
        if kind in joinable
    }
    found: list[tuple[float, int, str, str]] = []
    for token, token_id in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-vocab.scores[token_id], token_id, left, right))
    found.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in found]


def _ids(vocab: GGUFVocab) -> dict[str, int]:
    """By text; of two tokens with one text the first is the one that encoding makes."""
    ids: dict[str, int] = {}
    for token_id, token in enumerate(vocab.tokens):
        ids.setdefault(token, token_id)
    return ids


def _pair(merge: str, path: Path) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise ModelLoadError(f"{path}: tokenizer.ggml.merges has {merge!r:.60}, which is not a pair.")
    return left, right


def _add_tokens(backend: tokenizers.Tokenizer, vocab: GGUFVocab) -> None:
    """Control tokens and user-defined ones are matched in the text as they stand, before anything else."""
    special, plain = [], []
    for token, kind in zip(vocab.tokens, vocab.types, strict=True):
        if not token:
            continue
        if kind == TokenType.USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
        elif kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            special.append(AddedToken(token, normalized=False, special=True))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _add_post_processor(backend: tokenizers.Tokenizer, vocab: GGUFVocab, add_bos: bool) -> None:
    template, used = ["$A"], []
    if add_bos and vocab.bos is not None:
        template.insert(0, vocab.tokens[vocab.bos])
        used.append((vocab.tokens[vocab.bos], vocab.bos))
    if vocab.add_eos and vocab.eos is not None:
        template.append(vocab.tokens[vocab.eos])
        used.append((vocab.tokens[vocab.eos], vocab.eos))
    if used:
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=list(dict(used).items()))


def _special_texts(vocab: GGUFVocab) -> dict[str, str]:
    named = {"bos_token": vocab.bos, "eos_token": vocab.eos, "unk_token": vocab.unknown}
    return {name: vocab.tokens[token_id] for name, token_id in named.items() if token_id is not None}
