"""`shoal bench` as a command, against a server with known delays."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shoal.deployments.cli.main import main

if TYPE_CHECKING:
    from tests.deployments.bench.conftest import FakeServer

SHAPE = ["--requests", "4", "--input-tokens", "20", "--output-tokens", "4", "--warm-up", "1"]


async def shoal_bench(server: FakeServer, *arguments: str) -> int:
    server.first_delay, server.gap = 0.05, 0.02
    return await asyncio.to_thread(main, ["bench", "--url", server.url, *arguments])


async def test_a_report_for_people_and_one_for_programs(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    slo = ["--slo-ttft", "1000", "--slo-tpot", "500"]
    assert await shoal_bench(server, *SHAPE, "--concurrency", "2", "--json", str(path), *slo) == 0
    text = capsys.readouterr().out
    assert "Measuring fake at http://127.0.0.1" in text
    assert "closed loop, 2 streams, 20 tokens in, 4 out" in text
    report = json.loads(path.read_text())
    assert report["target"] == {"kind": "http", "url": server.url, "model": "fake", "api": "chat"}
    assert report["exact_prompts"]
    (run,) = report["runs"]
    assert (run["requests"], run["errors"], run["output_tokens"], run["input_tokens"]) == (4, 0, 16, 80)
    assert run["ttft_ms"]["p50"] >= 50
    assert run["itl_ms"]["count"] == 12
    assert run["goodput"]["attainment"] == 1.0


async def test_json_on_standard_output_is_only_json(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert await shoal_bench(server, *SHAPE, "--rate", "50,100", "--json", "-") == 0
    captured = capsys.readouterr()
    assert [run["workload"] for run in json.loads(captured.out)["runs"]] == ["custom@50/s", "custom@100/s"]
    assert "open loop, 50 requests/s (Poisson)" in captured.err


async def test_a_sweep_is_measured_and_drawn_and_can_be_drawn_again(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ["--input-tokens", "20", "--output-tokens", "4", "--warm-up", "0"]
    assert await shoal_bench(server, *shape, "--concurrency", "1,2", "--plot", str(tmp_path / "a")) == 0
    captured = capsys.readouterr()
    assert "wrote" in captured.err
    overview = captured.out[captured.out.rindex("streams") :].splitlines()
    assert [line.split()[:2] for line in overview if "custom" in line] == [["custom@1", "1"], ["custom@2", "2"]]
    results = tmp_path / "a" / "results.json"
    runs = json.loads(results.read_text())["runs"]
    assert [(run["shape"]["concurrency"], run["requests"]) for run in runs] == [(1, 4), (2, 6)]
    again = ["bench", "--plot", str(tmp_path / "b"), "--from", str(results)]
    requests = len(server.seen)
    assert main(again) == 0
    assert len(server.seen) == requests
    for folder in ("a", "b"):
        made = {path.name for path in (tmp_path / folder).iterdir()} - {"results.json"}
        assert made == {f"{name}.{kind}" for name in ("throughput", "ttft", "itl") for kind in ("png", "svg")}


def test_what_cannot_be_drawn_or_swept_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--from", str(tmp_path / "a.json")]) == 2
    assert "--plot DIR says where" in " ".join(capsys.readouterr().err.split())
    assert main(["bench", "--workload", "W5", "--concurrency", "1,2"]) == 2
    assert "W5 and W6 have their own concurrency" in " ".join(capsys.readouterr().err.split())


async def test_failed_requests_are_exit_code_1_and_shown(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.fail_with, server.fail_from = "the shard died", 3
    assert await shoal_bench(server, *SHAPE) == 1
    assert "first error: the shard died" in capsys.readouterr().out


async def test_a_server_that_refuses_the_first_request_is_quoted(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refuse = {"stream": "streaming is switched off"}
    assert await shoal_bench(server, *SHAPE) == 2
    assert "streaming is switched off" in " ".join(capsys.readouterr().err.split())


async def test_what_the_server_did_not_take_is_said(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.refuse, server.has_tokenize = {"ignore_eos": "unknown field ignore_eos"}, False
    assert await shoal_bench(server, *SHAPE) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "The server refused ignore_eos; answers may stop early." in text
    assert "Prompt lengths are estimates" in text
