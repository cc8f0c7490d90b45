"""The engine in this process, measured through the same records. A scripted model gives it known delays."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shoal.configs.schema import parse_engine_config
from shoal.deployments.bench.offline_target import OfflineTarget
from shoal.deployments.bench.prompts import PlannedRequest, PromptMaker
from shoal.deployments.bench.workloads import Workload
from shoal.model_shards.engine.build import build_engine

if TYPE_CHECKING:
    from shoal.model_shards.weights.sources import ModelSource

pytestmark = pytest.mark.real_model  # the script's tokenizer

SCRIPT = {
    "tokenizer": "smollm2-135m",
    "rules": [{"match": "explode", "pieces": ["one ", "two "], "fail_after": 1}],
    "default": {"pieces": ["fish "], "eos": False, "delay_ms": 20},
}


@pytest.fixture
async def target(smollm2: ModelSource, tmp_path: Path) -> AsyncIterator[OfflineTarget]:
    file = tmp_path / "script.json"
    file.write_text(json.dumps(SCRIPT))
    engine = build_engine(parse_engine_config({"model": f"scripted:{file}", "max_model_len": 512}))
    engine.start()
    async with OfflineTarget(engine) as opened:
        yield opened


def ask(text: str, tokens: int) -> PlannedRequest:
    return PlannedRequest([{"role": "user", "content": text}], tokens)


async def test_tokens_and_times_are_the_engines(target: OfflineTarget) -> None:
    record = await target.send(ask("hello", 6))
    assert record.error is None
    assert (record.output_tokens, record.finish_reason) == (6, "length")
    assert record.input_tokens is not None
    assert record.input_tokens > 1
    assert len(record.token_times) == 6
    assert record.ttft >= 0.018
    assert all(gap >= 0.018 for gap in record.gaps)
    assert record.tpot is not None
    assert record.e2e == pytest.approx(record.ttft + 5 * record.tpot)


async def test_a_request_that_fails_inside_the_step_is_an_error(target: OfflineTarget) -> None:
    record = await target.send(ask("please explode", 6))
    assert record.error is not None
    assert (await target.send(ask("hello", 2))).error is None


async def test_a_request_the_engine_refuses_is_an_error(target: OfflineTarget) -> None:
    record = await target.send(ask("hello " * 600, 6))
    assert record.error is not None
    assert "512" in record.error


async def test_prompts_are_measured_with_the_engines_tokenizer(target: OfflineTarget) -> None:
    maker = PromptMaker(await target.ruler(), "seed")
    (request,) = await maker.requests(Workload("w", "", 1, input_tokens=77, output_tokens=1))
    assert (await target.send(request)).input_tokens == 77
