"""Tokenizers from GGUF metadata: the ids that llama.cpp gives on its test strings, exact bytes, refusals by name."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.configs.errors import InvalidRequestError, ModelLoadError
from shoal.model_shards.tokenizer.from_gguf import parts_from_gguf
from shoal.model_shards.tokenizer.tokenizer import Tokenizer, load_tokenizer
from shoal.model_shards.weights.sources import KNOWN_MODELS, ModelSource, cache_dir

# Of the five lists of ids beside the test strings two can be checked: their vocabularies are there too.
VOCABULARIES = ("gpt-2", "phi-3")

PROPERTY = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)


@pytest.fixture(scope="module")
def vocabulary(shared_data: Path) -> Callable[[str], Tokenizer]:
    made: dict[str, Tokenizer] = {}

    def load(name: str) -> Tokenizer:
        if name not in made:
            made[name] = Tokenizer(parts_from_gguf(shared_data / "tokenizers" / f"ggml-vocab-{name}.gguf"))
        return made[name]

    return load


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2: ModelSource) -> Tokenizer:
    return load_tokenizer(smollm2)


def _strings(data: Path) -> list[str]:
    with (data / "tokenizers" / "inputs.inp").open(encoding="utf-8", newline="") as file:
        return file.read().split("\n__ggml_vocab_test__\n")


@pytest.mark.parametrize("name", VOCABULARIES)
def test_ids_of_all_46_strings_of_llama_cpp(
    name: str, vocabulary: Callable[[str], Tokenizer], shared_data: Path
) -> None:
    tokenizer = vocabulary(name)
    lines = (shared_data / "tokenizers" / f"{name}.out").read_text().splitlines()
    strings = _strings(shared_data)[: len(lines)]
    assert len(strings) == len(lines) == 46
    for text, line in zip(strings, lines, strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == [int(token_id) for token_id in line.split()], text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_qwen2_ids_of_all_46_strings_of_llama_cpp(shared_data: Path) -> None:
    """Only where the model has been fetched already: half a gigabyte is too much for a test."""
    model = KNOWN_MODELS["qwen2.5-coder-0.5b"]
    path = cache_dir() / model.file_name
    if not path.is_file():
        pytest.skip(f"{model.name} is not in the model cache")
    tokenizer = Tokenizer(parts_from_gguf(path))
    lines = (shared_data / "tokenizers" / "qwen2.out").read_text().splitlines()
    for text, line in zip(_strings(shared_data)[: len(lines)], lines, strict=True):
        assert tokenizer.encode(text) == [int(token_id) for token_id in line.split()], text


@given(text=TEXT)
@PROPERTY
@pytest.mark.parametrize("name", VOCABULARIES)
def test_bytes_of_the_tokens_joined_are_the_text(name: str, vocabulary: Callable[[str], Tokenizer], text: str) -> None:
    tokenizer = vocabulary(name)
    if name == "phi-3":
        text = text.replace("\u2581", "")  # SentencePiece itself cannot tell its space mark from a space
    ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
    prefix = " " if name == "phi-3" and text else ""
    assert joined.decode("utf-8") == prefix + text
    assert tokenizer.decode(ids) == text


@pytest.mark.real_model
@given(text=TEXT)
@PROPERTY
def test_bytes_of_smollm2_tokens_joined_are_the_text(smollm2_tokenizer: Tokenizer, text: str) -> None:
    """The vocabulary has no token for 21 of the bytes (six control characters, planes 4 to 15 of Unicode); BPE drops
    them, in transformers too."""
    known = {smollm2_tokenizer.token_bytes(token_id) for token_id in range(smollm2_tokenizer.vocab_size)}
    text = "".join(char for char in text if all(bytes([byte]) in known for byte in char.encode()))
    ids = smollm2_tokenizer.encode(text)
    assert b"".join(smollm2_tokenizer.token_bytes(token_id) for token_id in ids).decode("utf-8") == text
    assert smollm2_tokenizer.decode(ids) == text


@pytest.mark.real_model
def test_smollm2_facts(smollm2_tokenizer: Tokenizer) -> None:
    tokenizer = smollm2_tokenizer
    assert tokenizer.vocab_size == 49_152
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (2, 0)
    assert tokenizer.encode("Hello 12 world 😀<|im_end|>") == [19556, 216, 33, 34, 905, 40303, 218, 2]
    assert [tokenizer.token_bytes(token_id) for token_id in (40303, 218)] == [b" \xf0\x9f\x98", b"\x80"]
    assert tokenizer.token_text(218) == "bytes:\\x80"
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.decode([19556, 2]) == "Hello"
    assert tokenizer.decode([19556, 2], skip_special_tokens=False) == "Hello<|im_end|>"
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(49_152) == b""


@pytest.mark.real_model
def test_encoding_is_safe_in_several_threads(smollm2_tokenizer: Tokenizer) -> None:
    texts = [f"Text number {index} " * (index % 7 + 1) for index in range(400)]
    expected = [smollm2_tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(smollm2_tokenizer.encode, texts)) == expected


@pytest.mark.real_model
@pytest.mark.parametrize("text", ["\ud83d", "a\udc00b"])
def test_half_a_character_is_refused(smollm2_tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        smollm2_tokenizer.encode(text)
    with pytest.raises(InvalidRequestError, match="surrogate") as caught:
        smollm2_tokenizer.encode_chat([{"role": "user", "content": text}])
    assert caught.value.param == "messages"


def test_bos_is_added_once(vocabulary: Callable[[str], Tokenizer]) -> None:
    """Case O-09, for completions."""
    phi3 = vocabulary("phi-3")
    assert phi3.encode("Hello") == [1, 15043]
    assert phi3.encode("Hello", add_special_tokens=False) == [15043]
    assert phi3.encode("<s>Hello") == phi3.encode("Hello")
    assert phi3.encode("") == [1]
    assert vocabulary("gpt-2").encode("Hello") == [15496]


def test_bos_is_there_once_in_a_chat_whose_template_writes_it(vocabulary: Callable[[str], Tokenizer]) -> None:
    """Case O-09: the phi-3 template starts with bos_token and its tokenizer adds BOS too."""
    phi3 = vocabulary("phi-3")
    ids = phi3.encode_chat([{"role": "user", "content": "Hello"}])
    assert ids.count(1) == 1
    assert ids[0] == 1


def test_a_base_model_refuses_chat(vocabulary: Callable[[str], Tokenizer]) -> None:
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        vocabulary("gpt-2").render_chat([{"role": "user", "content": "Hello"}])
    assert caught.value.param == "messages"


LLAMA_BPE = {
    # text -> how Llama 3 cuts it before BPE, seen through a vocabulary of bytes and whole words
    "12345": ["123", "45"],
    "We'LL go": ["We", "'LL", " go"],
    "a\n\nb": ["a", "\n\n", "b"],
}


def _write_vocab(path: Path, words: list[str], *, drop: str | None = None, **keys: Any) -> Path:
    """A byte-level vocabulary of 256 bytes, two control tokens, and `words` as whole tokens (without merges)."""
    from shoal.model_shards.tokenizer.vocab_bytes import BYTE_ALPHABET

    character_of = {byte: character for character, byte in BYTE_ALPHABET.items()}
    spelled = ["".join(character_of[byte] for byte in word.encode()) for word in words]
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": [*sorted(BYTE_ALPHABET), "<bos>", "<|eot_id|>", "[PAD258]", *spelled],
        "token_type": [1] * 256 + [3, 3, 5] + [1] * len(words),
        "merges": ["h e"],
        "bos_token_id": 256,
        **keys,
    }
    if "he" not in words:
        values["merges"] = keys.get("merges", [])
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        name = f"tokenizer.ggml.{key}"
        if key == drop:
            continue
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_string(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("text", LLAMA_BPE)
def test_llama3_splits_and_takes_whole_words_without_merges(text: str, tmp_path: Path) -> None:
    words = LLAMA_BPE[text]
    tokenizer = Tokenizer(parts_from_gguf(_write_vocab(tmp_path / "v.gguf", [word for word in words if len(word) > 1])))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer.token_text(token_id) for token_id in ids] == words
    assert tokenizer.encode(text)[0] == tokenizer.bos_token_id == 256


def test_llama3_obeys_the_file_s_own_word_on_bos(tmp_path: Path) -> None:
    tokenizer = Tokenizer(parts_from_gguf(_write_vocab(tmp_path / "v.gguf", ["ab"], add_bos_token=False)))
    assert tokenizer.encode("ab") == [259]


def test_qwen2_normalizes_and_cuts_digits_singly(tmp_path: Path) -> None:
    tokenizer = Tokenizer(parts_from_gguf(_write_vocab(tmp_path / "v.gguf", ["12"], pre="qwen2", merges=["1 2"])))
    assert len(tokenizer.encode("12")) == 2
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_padding_ids_have_no_text_and_known_ends_of_turn_end(tmp_path: Path) -> None:
    tokenizer = Tokenizer(parts_from_gguf(_write_vocab(tmp_path / "v.gguf", ["ab"], eos_token_id=256)))
    assert tokenizer.token_bytes(258) == b""
    assert tokenizer.eos_token_ids == (256, 257)
    assert tokenizer.special_token_ids == {256, 257}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre": "chameleon"}, r"pre-tokenizer 'chameleon' .* Supported: .*qwen2, smollm"),
        ({"drop": "pre"}, "pre-tokenizer 'default'"),
        ({"model": "rwkv"}, "tokenizer model 'rwkv'"),
        ({"model": "llama"}, "scores is missing"),
        ({"drop": "model"}, "no tokenizer"),
        ({"drop": "tokens"}, "tokens is missing or empty"),
        ({"token_type": [1, 1]}, "token_type has 2 entries for 260 tokens"),
        ({"merges": ["ab"]}, "'ab', which is not a pair"),
        ({"merges": ["a zz"]}, "not usable"),
        ({"bos_token_id": 4000}, "bos_token_id is 4000, outside the vocabulary of 260"),
        ({"tokens": [1, 2]}, "tokens is not an array of str"),
    ],
)
def test_what_is_not_usable_is_refused_by_name(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=words):
        parts_from_gguf(_write_vocab(tmp_path / "v.gguf", ["ab"], **changes))
