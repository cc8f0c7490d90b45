"""A tokenizer from a Hugging Face directory: `tokenizer.json`, `tokenizer_config.json`, `chat_template.*`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from shoal.configs.errors import ModelLoadError
from shoal.model_shards.tokenizer.tokenizer import TokenizerParts
from shoal.model_shards.tokenizer.vocab_bytes import byte_level_bytes, sentencepiece_bytes
from shoal.model_shards.weights.hf_config import end_token_ids, read_json
from shoal.model_shards.weights.hf_fields import Fields

logger = logging.getLogger(__name__)

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def parts_from_directory(directory: Path) -> TokenizerParts:
    """Raises ModelLoadError naming the file that is missing or the part of it that is not supported."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(
            f"{directory} has no tokenizer.json. If there is a tokenizer.model, convert it once: "
            "transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."
        )
    description = read_json(path)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises plain Exception
        raise ModelLoadError(f"{path} cannot be loaded: {error}.") from error
    backend.no_truncation()
    backend.no_padding()
    config = _optional_json(directory / "tokenizer_config.json")
    texts = _special_texts(directory, config)
    named = {name: backend.token_to_id(text) for name, text in texts.items()}
    _set_post_processor(backend, config, texts)
    decoders = list(_flatten_decoder(description.get("decoder")))
    eos = named.get("eos_token")
    return TokenizerParts(
        backend=backend,
        token_bytes=_byte_table(backend, description, decoders, path),
        special_token_ids=_special_ids(backend, config, named),
        bos_token_id=named.get("bos_token"),
        eos_token_ids=_end_ids(directory, eos),
        strips_leading_space=_strips_leading_space(decoders),
        special_texts=texts,
        chat_templates=_chat_templates(directory, config),
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _special_texts(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens. A token is a string or an object with `content`; older checkpoints keep them in a file
    of their own."""
    older = _optional_json(directory / "special_tokens_map.json")
    texts: dict[str, str] = {}
    for name in _NAMED:
        value = config.get(name) or older.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str) and value:
            texts[name] = value
    return texts


def _special_ids(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, int | None]
) -> frozenset[int]:
    ids = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
    ids.update(token_id for token_id in named.values() if token_id is not None)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    for text in extra.values() if isinstance(extra, dict) else extra:
        text = text.get("content") if isinstance(text, dict) else text
        token_id = backend.token_to_id(text) if isinstance(text, str) else None
        if token_id is not None:
            ids.add(token_id)
    return frozenset(ids)


def _end_ids(directory: Path, eos: int | None) -> tuple[int, ...]:
    """What ends a generation: the model's own list first, then the tokenizer's end-of-sequence token (chat fine-tunes
    often name only one of the two in each place)."""
    path = directory / "config.json"
    config_ids: tuple[int, ...] = ()
    if path.is_file():
        raw = read_json(path)
        text = raw.get("text_config")
        if raw.get("eos_token_id") is None and isinstance(text, dict):
            raw = text
        config_ids = Fields(raw, {}, str(path)).token_ids("eos_token_id")
    ids = (*end_token_ids(directory, config_ids), *(() if eos is None else (eos,)))
    return tuple(dict.fromkeys(ids))


def _set_post_processor(backend: tokenizers.Tokenizer, config: Mapping[str, Any], texts: Mapping[str, str]) -> None:
    """`add_bos_token` / `add_eos_token`, where the config has them, decide, as in transformers 4 (5 ignores them beside
    a `tokenizer.json`, which nearly always says the same); else `tokenizer.json` does."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    template, used = ["$A"], {}
    for key, name, at in (("add_bos_token", "bos_token", 0), ("add_eos_token", "eos_token", 1)):
        token_id = backend.token_to_id(texts[name]) if name in texts else None
        if config.get(key) and token_id is not None:
            template.insert(at and len(template), texts[name])
            used[texts[name]] = token_id
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=list(used.items()))


def _flatten_decoder(decoder: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return
    if decoder.get("type") == "Sequence":
        for step in decoder.get("decoders", []):
            yield from _flatten_decoder(step)
    else:
        yield decoder


def _strips_leading_space(decoders: list[dict[str, Any]]) -> bool:
    for step in decoders:
        if step.get("type") == "Strip" and step.get("content") == " " and step.get("start", 0) > 0:
            return True
        if step.get("type") == "Metaspace":
            scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
            return bool(scheme != "never")
    return False


def _byte_table(
    backend: tokenizers.Tokenizer, description: Mapping[str, Any], decoders: list[dict[str, Any]], path: Path
) -> list[bytes]:
    """By id. The decoder tells how the vocabulary writes bytes; added tokens are literal text."""
    kinds = [str(step.get("type")) for step in decoders]
    byte_level = kinds == ["ByteLevel"]
    if not byte_level and not {"Replace", "Metaspace"} & set(kinds):
        raise ModelLoadError(
            f"{path}: a decoder of {kinds or 'no kind'} is not supported. Supported: ByteLevel, and SentencePiece "
            "(Metaspace or Replace)."
        )
    if set(kinds) - {"ByteLevel", "Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}:
        raise ModelLoadError(f"{path}: a decoder of {kinds} is not supported.")
    byte_fallback = "ByteFallback" in kinds or bool(description.get("model", {}).get("byte_fallback"))
    added = backend.get_added_tokens_decoder()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        if token_id in added and (byte_level or added[token_id].special):
            table[token_id] = token.encode("utf-8")
        elif byte_level:
            table[token_id] = byte_level_bytes(token)
        else:
            table[token_id] = sentencepiece_bytes(token, byte_fallback=byte_fallback)
    return table


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name, from the place that transformers prefers: `chat_template.jinja` (and `additional_chat_templates/`), then
    `chat_template.json`, then `tokenizer_config.json`."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        named = {
            file.stem: _read_text(file) for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))
        }
        return {**named, "default": _read_text(path)}
    value = _optional_json(directory / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {str(item["name"]): str(item["template"]) for item in value if {"name", "template"} <= item.keys()}
    return {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}.") from error
