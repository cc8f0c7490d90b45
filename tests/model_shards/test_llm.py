"""Offline use, without a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shoal.configs.errors import ConfigError, ContextLengthError, InvalidRequestError
from shoal.model_shards.engine.request import FinishReason
from shoal.model_shards.llm import LLM
from shoal.model_shards.sampling.params import SamplingParams

if TYPE_CHECKING:
    from shoal.model_shards.weights.sources import ModelSource

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def scripted(smollm2: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """scripted(default=..., rules=...) -> the model name of that script."""

    def write(**script: Any) -> str:
        path = tmp_path_factory.mktemp("script") / "parrot.json"
        path.write_text(json.dumps({"tokenizer": str(smollm2.path), **script}))
        return f"scripted:{path}"

    return write


@pytest.fixture(scope="module")
def llm(scripted: Callable[..., str]) -> Iterator[LLM]:
    rules = [
        {"match": "weather", "pieces": ["It ", "ra", "ins."]},
        {"match": "boom", "pieces": ["a", "b"], "fail_after": 1},
    ]
    with LLM(scripted(rules=rules, default={"pieces": ["ok"]}), max_model_len=64) as model:
        yield model


def test_one_prompt_or_many_as_text_or_ids(llm: LLM) -> None:
    (answer,) = llm.generate("How is the weather?")
    assert (answer.prompt, answer.outputs[0].text) == ("How is the weather?", "It rains.")
    assert answer.outputs[0].finish_reason is FinishReason.STOP
    ids = llm.tokenizer.encode("the weather")
    assert [a.outputs[0].text for a in llm.generate([ids, "hello", ids])] == ["It rains.", "ok", "It rains."]
    assert llm.generate(ids)[0].prompt_token_ids == ids
    (from_array,) = llm.generate([np.array(ids)])
    assert [(type(token), token) for token in from_array.prompt_token_ids] == [(int, token) for token in ids]
    assert llm.generate([]) == []


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "the weather?"}]
    assert llm.chat(messages)[0].outputs[0].text == "It rains."
    assert [a.outputs[0].text for a in llm.chat([messages, [{"role": "user", "content": "hi"}]])] == ["It rains.", "ok"]


def test_sampling_params_for_all_or_one_each(llm: LLM) -> None:
    both = llm.generate(["weather", "weather"], [SamplingParams(max_tokens=1), SamplingParams(n=2, stop=("ins",))])
    assert [c.text for a in both for c in a.outputs] == ["It", "It ra", "It ra"]
    assert [c.index for c in both[1].outputs] == [0, 1]
    with pytest.raises(InvalidRequestError, match="2 prompts, but 1"):
        llm.generate(["a", "b"], [SamplingParams()])


def test_scoring_a_prompt(llm: LLM) -> None:
    (answer,) = llm.generate("one two three", SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert answer.prompt_logprobs is not None
    assert len(answer.prompt_logprobs) == len(answer.prompt_token_ids)
    assert answer.outputs[0].token_ids == []


def test_a_prompt_that_fails_does_not_touch_the_others(llm: LLM) -> None:
    bad, good = llm.generate(["boom", "weather"])
    assert (bad.outputs[0].text, bad.outputs[0].finish_reason) == ("a", FinishReason.ERROR)
    assert bad.outputs[0].error is not None
    assert good.outputs[0].text == "It rains."


def test_a_batch_with_a_bad_prompt_is_refused_before_any_runs(llm: LLM) -> None:
    with pytest.raises(ContextLengthError):
        llm.generate(["fine", [1] * 65])
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.generate(["fine", []])
    assert llm.generate("hello")[0].outputs[0].text == "ok"


def test_more_prompts_than_seats(scripted: Callable[..., str]) -> None:
    with LLM(scripted(default={"pieces": ["ok"]}), max_num_seqs=2, max_model_len=64) as small:
        answers = small.generate([f"prompt {i}" for i in range(50)], use_progress_bar=True)
    assert [a.outputs[0].text for a in answers] == ["ok"] * 50


def test_a_wrong_setting_or_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="known settings"):
        LLM("smollm2-135m", max_seqs=3)
    with pytest.raises(ConfigError, match="Unknown model"):
        LLM("no-such-model")
    with pytest.raises(ConfigError, match="cannot be read"):
        LLM(f"scripted:{tmp_path}/none.json")


def test_two_pipeline_stages_say_the_same_as_one_process(smollm2: ModelSource) -> None:
    options: dict[str, Any] = {"kv_cache_memory": "64MiB", "max_model_len": 256, "num_threads": 1, "device": "cpu"}
    prompts = ["The capital of France is", "Once upon a time", "1, 2, 3,"]
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    texts = []
    for stages in (1, 2):
        with LLM(str(smollm2.path), pipeline_parallel_size=stages, **options) as model:
            texts.append([answer.outputs[0].text for answer in model.generate(prompts, greedy)])
    assert texts[0] == texts[1]
    assert texts[0][0].startswith(" Paris")
