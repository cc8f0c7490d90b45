"""Tokenizers from Hugging Face directories, against transformers' own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import decoders

from shoal.configs.errors import InvalidRequestError, ModelLoadError
from shoal.model_shards.tokenizer.from_gguf import parts_from_gguf
from shoal.model_shards.tokenizer.from_hf import parts_from_directory
from shoal.model_shards.tokenizer.tokenizer import Tokenizer, load_tokenizer
from shoal.model_shards.weights.sources import resolve_model

TEXTS = ("hello the world", "", " ", "ünï 😀\n\n\t x", "<|im_start|>user\nhi<|im_end|>", "<|bos|>hello")


@pytest.fixture
def directory(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model"))


def _change(path: Path, **keys: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **keys}))


def _load(directory: Path) -> Tokenizer:
    return Tokenizer(parts_from_directory(directory))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_encodes_and_decodes_as_transformers(tiny_checkpoint: Callable[..., Path], text: str, special: bool) -> None:
    ours = load_tokenizer(resolve_model(str(tiny_checkpoint("llama"))))
    theirs = transformers.AutoTokenizer.from_pretrained(tiny_checkpoint("llama"))
    ids = ours.encode(text, add_special_tokens=special)
    assert ids == theirs.encode(text, add_special_tokens=special)
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_facts(tiny_checkpoint: Callable[..., Path]) -> None:
    tokenizer = _load(tiny_checkpoint("qwen2"))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (256, (257,), 280)
    assert tokenizer.special_token_ids == {256, 257, 258, 259}
    assert tokenizer.token_bytes(256) == b"<|bos|>"
    assert tokenizer.token_bytes(279) == b" wor"


@pytest.mark.parametrize("text", ["hello", "<|bos|>hello", ""])
def test_add_bos_token_of_the_config_adds_one(directory: Path, text: str) -> None:
    _change(directory / "tokenizer_config.json", add_bos_token=True)
    tokenizer = _load(directory)
    ids = tokenizer.encode(text)
    assert ids[0] == 256
    assert ids.count(256) == 1
    assert ids[1:] == _load(directory).encode(text.removeprefix("<|bos|>"), add_special_tokens=False)


def test_llama_31_template_and_a_tokenizer_that_adds_bos_give_one(directory: Path, shared_data: Path) -> None:
    """Case O-09."""
    template = (shared_data / "chat_templates" / "meta-llama-Llama-3.1-8B-Instruct.jinja").read_text()
    (directory / "chat_template.jinja").write_text(template)
    _change(directory / "tokenizer_config.json", add_bos_token=True)
    tokenizer = _load(directory)
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.render_chat(messages).startswith("<|bos|>")
    assert tokenizer.encode_chat(messages).count(256) == 1


def test_truncation_and_padding_in_the_file_do_not_cut_prompts(directory: Path) -> None:
    padding = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 257}
    padding |= {"pad_type_id": 0, "pad_token": "<|eos|>"}
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    _change(directory / "tokenizer.json", padding=padding, truncation=truncation)
    assert _load(directory).encode("x" * 10) == [87] * 10


def test_end_of_sequence_is_the_models_list_and_the_tokenizers_token(directory: Path) -> None:
    _change(directory / "generation_config.json", eos_token_id=[259, 258])
    assert _load(directory).eos_token_ids == (259, 258, 257)


def test_templates_from_each_place(directory: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    _change(directory / "tokenizer_config.json", chat_template="config {{ bos_token }}")
    assert _load(directory).render_chat(messages).startswith("<|im_start|>")
    (directory / "chat_template.jinja").unlink()
    assert _load(directory).render_chat(messages) == "config <|bos|>"
    _change(directory / "chat_template.json", chat_template="json")
    assert _load(directory).render_chat(messages) == "json"


def test_named_templates(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    _change(directory / "tokenizer_config.json", chat_template=named)
    tokenizer = _load(directory)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == "plain"
    assert tokenizer.render_chat(messages, tools=[{"type": "function", "function": {"name": "f"}}]) == "tools"
    assert tokenizer.chat_template == "plain"


def test_without_a_template_chat_is_refused(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    tokenizer = _load(directory)
    assert tokenizer.chat_template is None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])


def test_sentencepiece_tokenizer_json(shared_data: Path, tmp_path: Path) -> None:
    """The phi-3 vocabulary written as a tokenizer.json with Llama's decoder: the same ids, bytes and text."""
    parts = parts_from_gguf(shared_data / "tokenizers" / "ggml-vocab-phi-3.gguf")
    llama = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    parts.backend.decoder = decoders.Sequence(llama)
    parts.backend.save(str(tmp_path / "tokenizer.json"))
    _change(tmp_path / "tokenizer_config.json", bos_token="<s>", eos_token={"content": "<|endoftext|>"})
    ours, original = _load(tmp_path), Tokenizer(parts)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert (ours.bos_token_id, ours.eos_token_ids) == (1, (32000,))
    for text in ("Hello  world", " x", "日本語 😀", "a\nb", "<|user|>hi"):
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == original.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == original.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert [ours.token_bytes(i) for i in ids] == [original.token_bytes(i) for i in ids]


def test_what_is_missing_or_not_supported_is_named(directory: Path) -> None:
    content = json.loads((directory / "tokenizer.json").read_text())
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (directory / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match="WordPiece"):
        _load(directory)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json cannot be loaded"):
        _load(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json"):
        _load(directory)
