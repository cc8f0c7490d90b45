"""Health, metrics, models, tokens, request ids, logs."""

from __future__ import annotations

import asyncio
import json
import logging
from concurrent.futures import Future
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shoal.deployments.logs import JsonFormatter
from shoal.deployments.metrics import TABLE


async def test_ready_and_alive(start_server: Any) -> None:
    async with start_server() as server:
        assert (await server.http.get("/health/live")).json() == {"status": "alive"}
        assert (await server.http.get("/health/ready")).json() == {"status": "ready"}
        assert "version" in (await server.http.get("/version")).json()


async def test_while_draining_nothing_new_is_taken_and_the_old_ends(start_server: Any) -> None:
    script = {"default": {"pieces": ["a"], "eos": False, "delay_ms": 20}}
    async with start_server(script, gateway={"drain_s": 10.0, "heartbeat_s": 0.05}) as server:
        running = asyncio.create_task(server.chat(max_tokens=20, stream=True))
        await asyncio.sleep(0.15)
        closing = asyncio.create_task(server.gateway.close())
        await asyncio.sleep(0.05)
        response = await server.http.get("/health/ready")
        assert (response.status_code, response.json()["reason"]) == (503, "shutting down")
        assert (await server.http.get("/health/live")).status_code == 200
        refused = await server.chat()
        assert server.error(refused, 503)["code"] == "overloaded"
        assert refused.headers["retry-after"]
        chunks = server.events(await running)
        assert server.finish_reasons(chunks) == ["length"]
        await closing


async def test_what_outlives_the_drain_ends_with_an_error_event(start_server: Any) -> None:
    script = {"default": {"pieces": ["a"], "eos": False, "delay_ms": 20}}
    async with start_server(script, gateway={"drain_s": 0.2, "heartbeat_s": 0.05}) as server:
        running = asyncio.create_task(server.chat(max_tokens=300, stream=True))
        await asyncio.sleep(0.1)
        await server.gateway.close()
        *chunks, last = server.events(await running)
        assert server.text(chunks).startswith("a")
        assert "shutting down" in last["error"]["message"]


async def test_a_hung_engine_is_noticed(start_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No stream hangs for ever, and readiness goes."""
    gateway = {"heartbeat_s": 0.05, "progress_timeout_s": 0.3, "drain_s": 0.1}
    async with start_server(gateway=gateway) as server:
        hanging: list[Future[Any]] = []

        def submit(_plan: Any) -> Future[Any]:
            hanging.append(Future())
            return hanging[-1]

        engine = server.gateway.service.links.all[0]._engine.engine
        monkeypatch.setattr(engine._executor, "submit", submit)
        response = await server.chat(stream=True)
        assert server.error(response, 503)["code"] == "engine_dead"
        ready = await server.http.get("/health/ready")
        assert ready.status_code == 503
        assert "no step" in ready.json()["reason"]
        assert server.error(await server.chat(), 503)["code"] == "engine_dead"
        for step in hanging:
            step.set_exception(RuntimeError("the test is over"))


async def test_an_answer_that_is_lost_on_its_way_ends(start_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start_server(gateway={"heartbeat_s": 0.05, "drain_s": 0.1}) as server:
        monkeypatch.setattr(server.gateway.service._hub, "dispatch", lambda deltas: None)
        error = server.error(await server.chat(), 503)
        assert "lost on its way" in error["message"]
        assert (await server.http.get("/health/ready")).status_code == 200


async def test_a_dead_engine_is_noticed(start_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start_server() as server:

        async def dead(*_: Any) -> Any:
            raise RuntimeError("gone")

        monkeypatch.setattr(server.gateway.service.links.all[0]._engine, "heartbeat", dead)

        async def unready() -> bool:
            return (await server.http.get("/health/ready")).status_code == 503

        await server.wait_for(unready)
        assert server.error(await server.chat(), 503)["code"] == "engine_dead"


async def test_models(start_server: Any) -> None:
    async with start_server(engine={"served_model_name": "team/model"}) as server:
        (card,) = (await server.http.get("/v1/models")).json()["data"]
        assert (card["id"], card["object"], card["max_model_len"]) == ("team/model", "model", 512)
        assert (await server.http.get("/v1/models/team/model")).json() == card
        assert (await server.chat(model="team/model")).json()["model"] == "team/model"


async def test_tokenize_and_detokenize(start_server: Any) -> None:
    text = "the lazy 😀 dog"
    async with start_server() as server:
        body = {"prompt": text, "add_special_tokens": False, "return_token_strs": True}
        answer = (await server.http.post("/tokenize", json=body)).json()
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["max_model_len"] == 512
        back = (await server.http.post("/detokenize", json={"tokens": answer["tokens"]})).json()
        assert back == {"prompt": text}
        assert (await server.http.post("/tokenize", json={"prompt": ""})).json()["count"] == 0
        assert server.error(await server.http.post("/detokenize", json={"tokens": [10**9]}), 400)["param"] == "tokens"
        assert server.error(await server.http.post("/tokenize", json={}), 400)["param"] == "prompt"


async def test_metrics_parse_and_every_name_is_in_the_table(start_server: Any) -> None:
    async with start_server() as server:
        await server.chat(stream=True)
        response = await server.http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = {family.name: family for family in text_string_to_metric_families(response.text)}
    known = {metric.name.removesuffix("_total"): metric for metric in TABLE}
    assert families.keys() <= known.keys()
    for name, family in families.items():
        assert family.type == known[name].kind
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels <= {"model_name", *known[name].labels}


async def test_time_to_first_token_is_what_it_was(start_server: Any) -> None:
    """O-25."""
    async with start_server({"default": {"pieces": ["a"], "delay_ms": 300}}) as server:
        await server.chat(stream=True, max_tokens=1)
        text = (await server.http.get("/metrics")).text
    for name in ("shoal_time_to_first_token_seconds", "shoal_http_first_token_seconds"):
        (family,) = (family for family in text_string_to_metric_families(text) if family.name == name)
        buckets = [
            (float(sample.labels["le"]), sample.value) for sample in family.samples if sample.name == f"{name}_bucket"
        ]
        assert [count for _, count in buckets] == sorted(count for _, count in buckets)
        assert all(count == 0 for edge, count in buckets if edge < 0.25)
        assert buckets[-1] == (float("inf"), 1)
        values = {sample.name: sample.value for sample in family.samples}
        assert values[f"{name}_count"] == 1
        assert values[f"{name}_sum"] >= 0.3


async def test_a_prompt_is_counted_once_for_all_samples(start_server: Any) -> None:
    async with start_server() as server:
        usage = (await server.chat(n=3, temperature=1, max_tokens=1)).json()["usage"]
        text = (await server.http.get("/metrics")).text
    samples = {
        sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples
    }
    assert samples["shoal_prompt_tokens_total"] == usage["prompt_tokens"]
    assert samples["shoal_output_tokens_total"] == usage["completion_tokens"]


async def test_the_request_id_goes_in_and_out(start_server: Any) -> None:
    async with start_server() as server:
        given = await server.http.get("/version", headers={"x-request-id": "my-id-1"})
        assert given.headers["x-request-id"] == "my-id-1"
        for bad in ("", "x" * 200, "a b"):
            made = (await server.http.get("/version", headers={"x-request-id": bad})).headers["x-request-id"]
            assert made != bad
            assert len(made) == 32


async def test_logs_carry_ids_and_numbers_and_no_content(start_server: Any, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("shoal").propagate = True
    caplog.set_level(logging.INFO, logger="shoal")
    async with start_server() as server:
        body = {"messages": [{"role": "user", "content": "my-secret-words"}]}
        await server.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "id-7"})
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records if record.name == "shoal.access"]
    (line,) = (line for line in lines if line["route"] == "/v1/chat/completions")
    assert (line["status"], line["message"], line["stream"]) == (200, "request", False)
    assert line["completion_tokens"] > 0
    everything = "\n".join(JsonFormatter().format(record) for record in caplog.records)
    assert "my-secret-words" not in everything
    assert "Hello" not in everything
