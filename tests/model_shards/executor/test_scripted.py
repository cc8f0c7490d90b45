"""The scripted model: says what its file says, through the engine's own scheduling, limits and stop strings."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shoal.configs.errors import ConfigError
from shoal.kvcache.manager import KVCacheManager
from shoal.model_shards.engine.admission import AdmissionLimits
from shoal.model_shards.engine.engine import Engine, EngineSettings
from shoal.model_shards.engine.policy import FirstComeFirstServed
from shoal.model_shards.engine.request import FinishReason, Request
from shoal.model_shards.engine.scheduler import Scheduler, SchedulerSettings
from shoal.model_shards.executor.script_file import encode_scripts, read_script_file
from shoal.model_shards.executor.scripted import LastUserMessage, ScriptedExecutor
from shoal.model_shards.sampling.params import SamplingParams

Serve = Callable[..., tuple[Engine, Any]]


@pytest.fixture
def serve(kit: ModuleType, tmp_path: Path) -> Iterator[Serve]:
    """serve(default=..., rules=[...]) -> (a started engine on that script, ByteTokenizer)."""
    engines = []

    def start(tokenizer: Any = None, **script: Any) -> tuple[Engine, Any]:
        path = tmp_path / "script.json"
        path.write_text(json.dumps(script))
        tokenizer = tokenizer or kit.ByteTokenizer()
        executor = ScriptedExecutor(encode_scripts(path, read_script_file(path), tokenizer), tokenizer)
        scheduler = Scheduler(
            SchedulerSettings(16, 512, 4096, frozenset(tokenizer.eos_token_ids)),
            KVCacheManager(4000, 16),
            FirstComeFirstServed(),
        )
        settings = EngineSettings("scripted", AdmissionLimits(100, 100_000), 20.0, executor.steps_in_flight)
        engines.append(Engine(executor, scheduler, tokenizer, settings))
        engines[-1].start()
        return engines[-1], tokenizer

    yield start
    for engine in engines:
        engine.shutdown()
        assert engine.stats().kv_usage == 0


def ask(kit: ModuleType, engine: Engine, prompt: str, name: str = "a", **sampling: Any) -> Any:
    sink = kit.Collector()
    params = SamplingParams(**{"max_tokens": 100, **sampling})
    engine.submit(Request(name, engine.tokenizer.encode(prompt), params, 0), sink)
    sink.wait(name, n=params.n)
    return sink


def test_pieces_then_end_of_sequence(kit: ModuleType, serve: Serve) -> None:
    engine, tokenizer = serve(default={"pieces": ["The ", "Obs", "er"]})
    sink = ask(kit, engine, "hello")
    assert sink.text("a") == "The Obser"
    assert sink.tokens("a") == [*b"The Obser", tokenizer.eos_token_ids[0]]
    assert sink.reason("a") is FinishReason.STOP


def test_each_piece_is_encoded_by_itself(kit: ModuleType, tmp_path: Path) -> None:
    class Greedy(kit.ByteTokenizer):  # type: ignore[name-defined,misc]
        """Merges "Observer" when it sees it whole."""

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [258] if text == "Observer" else super().encode(text)

    path = tmp_path / "s.json"
    path.write_text(json.dumps({"default": {"pieces": ["Observer", "Obs", "erver"]}}))
    book = encode_scripts(path, read_script_file(path), Greedy(b"Observer"))
    assert book.default.tokens == (258, *b"Obs", *b"erver", 256)


def test_a_sentencepiece_space_gets_neither_before_nor_between_pieces(kit: ModuleType, tmp_path: Path) -> None:
    class SentencePiece(kit.ByteTokenizer):  # type: ignore[name-defined,misc]
        """Puts a space before every text."""

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return super().encode(" " + text)

    path = tmp_path / "s.json"
    path.write_text(json.dumps({"default": {"pieces": ["Obs", "er", " ver"]}}))
    tokens = encode_scripts(path, read_script_file(path), SentencePiece()).default.tokens
    assert bytes(tokens[:-1]) == b"Obser ver"


def test_the_first_rule_that_matches_the_last_user_message_speaks(kit: ModuleType, serve: Serve) -> None:
    rules = [{"match": "weather", "pieces": ["rain"]}, {"match": "news", "pieces": ["none"]}]
    engine, tokenizer = serve(rules=rules, default={"pieces": ["ok"]})

    def chat(*contents: str) -> str:
        roles = ["user", "assistant"] * len(contents)
        messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
        text: str = ask(kit, engine, tokenizer.render_chat(messages)).text("a")
        return text

    assert chat("the news and the weather") == "rain"
    assert chat("the news?") == "none"
    assert chat("the news?", "none", "hm") == "ok"
    assert chat("hm", "the weather", "the news?") == "none"
    assert ask(kit, engine, "a plain prompt about the weather").text("a") == "rain"


def test_a_template_that_refuses_leaves_the_whole_prompt_to_match(kit: ModuleType) -> None:
    tokenizer = kit.ByteTokenizer()
    tokenizer.chat_template = None
    assert LastUserMessage(tokenizer).of(tokenizer.encode("all of it")) == "all of it"


def test_without_eos_the_script_starts_over_until_a_limit(kit: ModuleType, serve: Serve) -> None:
    engine, _ = serve(default={"pieces": ["ab", "c"], "eos": False})
    sink = ask(kit, engine, "x", max_tokens=8)
    assert sink.text("a") == "abcabcab"
    assert sink.reason("a") is FinishReason.LENGTH
    assert ask(kit, engine, "x", stop=("ca",)).text("a") == "ab"


def test_tokens_may_stand_for_pieces_and_split_a_character(kit: ModuleType, serve: Serve) -> None:
    engine, _ = serve(default={"tokens": [*"dž😀".encode()]})
    sink = ask(kit, engine, "x")
    assert sink.text("a") == "dž😀"
    assert all("\ufffd" not in delta.text for delta in sink.deltas)


def test_fail_after_fails_that_sequence_inside_the_step(kit: ModuleType, serve: Serve) -> None:
    engine, _ = serve(rules=[{"match": "boom", "pieces": ["abc"], "fail_after": 2}], default={"pieces": ["fine"]})
    sink = ask(kit, engine, "boom")
    assert (sink.text("a"), sink.reason("a")) == ("ab", FinishReason.ERROR)
    assert "after 2 tokens" in sink.of("a")[-1].error
    assert ask(kit, engine, "other", "b").text("b") == "fine"
    assert engine.healthy


def test_a_slow_script_does_not_delay_a_quick_one(kit: ModuleType, serve: Serve) -> None:
    slow = {"match": "slow", "pieces": ["0123456789"], "delay_ms": 30}
    engine, tokenizer = serve(rules=[slow], default={"pieces": ["q" * 40]})
    sink = kit.Collector()
    began = time.monotonic()
    engine.submit(Request("slow", tokenizer.encode("slow"), SamplingParams(max_tokens=100), 0), sink)
    ask(kit, engine, "quick", "quick")
    quick = time.monotonic() - began
    sink.wait("slow")
    assert time.monotonic() - began >= 11 * 0.03
    assert quick < 0.25
    assert sink.text("slow") == "0123456789"
    assert sink.of("slow")[-1].num_output_tokens == 11


def test_logprobs_and_prompt_logprobs_are_those_of_certainty(kit: ModuleType, serve: Serve) -> None:
    engine, _ = serve(default={"pieces": ["ab"]})
    sink = ask(kit, engine, "xyz", logprobs=1, prompt_logprobs=0)
    assert [e.token_id for d in sink.deltas for e in d.logprobs] == [*b"ab", 256]
    assert {(e.logprob, e.rank) for d in sink.deltas for e in d.logprobs} == {(0.0, 1)}
    assert [entry and entry.token_id for entry in sink.of("a")[0].prompt_logprobs] == [None, ord("y"), ord("z")]


@pytest.mark.parametrize(
    ("script", "place"),
    [
        ({"rules": []}, "$.default"),
        ({"default": {"pieces": ["ok"], "eosx": 1}}, "$.default.eosx"),
        ({"default": {"pieces": ["ok", 3]}}, "$.default.pieces[1]"),
        ({"default": {"pieces": ["ok", ""]}}, "$.default.pieces[1]"),
        ({"default": {}}, "$.default"),
        ({"default": {"pieces": ["a"], "tokens": [1]}}, "$.default"),
        ({"default": {"pieces": [], "eos": False}}, "$.default"),
        ({"default": {"tokens": [1, 9999]}}, "$.default.tokens[1]"),
        ({"default": {"pieces": ["a"], "delay_ms": -1}}, "$.default.delay_ms"),
        ({"default": {"pieces": ["a"]}, "rules": [{"pieces": ["a"]}]}, "$.rules[0].match"),
        ({"default": {"pieces": ["a"]}, "rules": [{"match": "", "pieces": ["a"]}]}, "$.rules[0].match"),
        ({"default": {"pieces": ["a"], "fail_after": -1}}, "$.default.fail_after"),
        ({"default": {"pieces": ["a"], "eos": "no"}}, "$.default.eos"),
        ([], "$"),
    ],
)
def test_a_bad_file_names_the_place(kit: ModuleType, tmp_path: Path, script: Any, place: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(script))
    with pytest.raises(ConfigError) as caught:
        encode_scripts(path, read_script_file(path), kit.ByteTokenizer())
    assert caught.value.param == place
    assert str(path) in caught.value.message
    assert place in caught.value.message


def test_a_file_that_is_not_there_or_not_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_script_file(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match="Invalid JSON"):
        read_script_file(tmp_path / "bad.json")
