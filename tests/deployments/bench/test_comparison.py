"""The comparison of engines (tests/benchmarks): its order, its tables, and that nothing measured is lost."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.deployments.bench.processes import process_tree, processor_seconds
from shoal.deployments.bench.prompts import Message, Ruler
from shoal.deployments.bench.results import read_results
from shoal.deployments.bench.workloads import Workload

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    import contest
    import peers
    import peers_report
    import servers
    from engines import ALL, SHORT, Engine, Entry, Pace, catalogue
finally:
    sys.path.remove(str(BENCHMARKS))

FAKE_ENGINE = """
import asyncio, json, sys
from aiohttp import web

async def generate(request):
    body = await request.json()
    usage = {"prompt_tokens": 9, "completion_tokens": body["max_tokens"], "prompt_tokens_details": {"cached_tokens": 3}}
    if not body.get("stream"):
        return web.json_response({"choices": [], "usage": usage})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(body["max_tokens"]):
        await asyncio.sleep(float(sys.argv[2]))
        event = {"choices": [{"index": 0, "delta": {"content": "x "}}]}
        await response.write(f"data: {json.dumps(event)}\\n\\n".encode())
    await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\\n\\ndata: [DONE]\\n\\n".encode())
    return response

app = web.Application()
app.router.add_post("/v1/chat/completions", generate)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
"""
PACE = Pace(1, 1000, 1000, 1000)


class WordRuler(Ruler):
    async def count(self, messages: list[Message]) -> int:
        return sum(len(message["content"].split()) for message in messages)


@pytest.fixture
def entries(tmp_path: Path) -> dict[str, Entry]:
    """Two engines, the second ten times slower."""
    script = tmp_path / "fake_engine.py"
    script.write_text(FAKE_ENGINE)

    def entry(gap: float) -> Entry:
        def start(root: Path, port: int, threads: int) -> Engine:
            return Engine([sys.executable, str(script), str(port), str(gap)], 269_000_000, 23_040)

        return Entry(start, 16, PACE)

    return {"shoal": entry(0.001), "slow": entry(0.01)}


def arguments(tmp_path: Path, *more: str) -> argparse.Namespace:
    base = ["--json", str(tmp_path / "peers.json"), "--port", "18950", "--repetitions", "1", "--threads", "1"]
    return peers.parse_arguments([*base, *more])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tokenizer, no probe of the machine, small workloads."""

    async def ruler(_: str) -> Ruler:
        return WordRuler()

    def small(name: str, scale: float) -> list[Workload]:
        if name == "W6":
            return [Workload("W6@80%", "", 2, 16, 4, capacity_share=0.8)]
        return [Workload(name, "", 2, 16, 8, concurrency=2)]

    limits = peers.roofline.MachineLimits({256 << 20: 20.0}, 100.0, 1, "test")
    monkeypatch.setattr(peers, "local_ruler", ruler)
    monkeypatch.setattr(contest, "preset", small)
    monkeypatch.setattr(peers.roofline, "measure", lambda *_: limits)
    monkeypatch.setattr(servers, "SETTLE_S", 0.0)


async def play(args: argparse.Namespace, entries: dict[str, Entry]) -> dict[str, Any]:
    document = peers.load_document(args)
    played = peers.Contest(args, entries, document)
    try:
        await played.play()
    finally:
        await asyncio.to_thread(played.stop)
    return document


# --- order ----------------------------------------------------------------------------------------------------------


def test_engines_alternate_within_a_workload_and_the_order_rotates(entries: dict[str, Entry]) -> None:
    turns = contest.make_turns(entries, ["W1", "W3"], 2, one_up=False)
    assert [(turn.repetition, turn.preset, turn.engine) for turn in turns] == [
        *((0, "W1", "shoal"), (0, "W1", "slow"), (0, "W3", "shoal"), (0, "W3", "slow")),
        *((1, "W1", "slow"), (1, "W1", "shoal"), (1, "W3", "slow"), (1, "W3", "shoal")),
    ]


def test_with_one_server_up_an_engine_is_started_once_a_repetition(entries: dict[str, Entry]) -> None:
    turns = contest.make_turns(entries, ["W1", "W3", "same"], 2, one_up=True)
    assert [turn.engine for turn in turns if turn.preset != "same"] == ["shoal"] * 2 + ["slow"] * 4 + ["shoal"] * 2
    assert [(turn.engine, turn.repetition) for turn in turns[8:]] == [
        *(("shoal", 0), ("shoal", 1), ("slow", 0), ("slow", 1))
    ]
    assert contest.Forecast(entries, {"W1": 1, "W3": 1, "same": 1}).starts(turns, one_up=True) == 4


def test_an_engine_gets_only_what_its_settings_can_hold(entries: dict[str, Entry]) -> None:
    narrow = {**entries, "slow": replace(entries["slow"], workloads=SHORT)}
    turns = contest.make_turns(narrow, ["W3", "W4", "W5"], 1, one_up=False)
    assert {turn.preset for turn in turns if turn.engine == "slow"} == {"W3"}
    assert catalogue([])["llamacpp-q4-split"].workloads == SHORT
    assert catalogue([])["llamacpp-q4"].workloads == ALL


def test_engines_may_be_for_some_workloads_only(entries: dict[str, Entry]) -> None:
    chosen = contest.choose(entries, "slow,shoal:w3+same")
    assert list(chosen) == ["slow", "shoal"]
    assert chosen["shoal"].workloads == {"W3", "same"}
    assert contest.compared_at_one_rate(contest.choose(entries, "slow:W5,shoal")) == ["shoal"]
    with pytest.raises(SystemExit, match="no engine other; there are shoal, slow"):
        contest.choose(entries, "shoal,other")


def test_presets_may_have_a_scale_of_their_own() -> None:
    assert contest.parse_presets("W1,w3:0.5,same:0.25", 2.0) == {"W1": 2.0, "W3": 0.5, "same": 0.25}


def test_the_same_rate_for_all_follows_the_capacities_measured() -> None:
    runs = [
        *({"workload": "W3", "engine": "shoal", "requests_per_s": rate} for rate in (1.0, 3.0, 2.0)),
        {"workload": "W3", "engine": "slow", "requests_per_s": 0.5},
        {"workload": "W2", "engine": "slow", "requests_per_s": 9.0},
    ]
    known = contest.capacities(runs)
    assert known == {"shoal": 2.0, "slow": 0.5}
    found = contest.workloads_of("same", 1.0, known, ["shoal", "slow"])
    assert found is not None
    assert [(workload.name, workload.rate) for workload in found] == [
        ("W6=slowest", pytest.approx(0.4)),
        ("W6=ours", pytest.approx(1.6)),
    ]
    assert contest.workloads_of("same", 1.0, {"shoal": 2.0}, ["shoal", "slow"]) is None


def test_the_forecast_learns(entries: dict[str, Entry]) -> None:
    forecast = contest.Forecast(entries, {"W1": 1.0, "W5": 1.0})
    turn = contest.Turn(0, "W1", "slow")
    assert forecast.turn(turn) == pytest.approx(contest.TURN_S + 3 * (0.128 + 0.128))
    assert forecast.turn(contest.Turn(0, "W5", "slow")) > 2 * 4 * 4096 / 1000
    forecast.took(turn, 42.0)
    assert forecast.turn(contest.Turn(2, "W1", "slow")) == 42.0


# --- measuring ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
async def test_every_turn_is_written_and_a_broken_off_comparison_goes_on(
    entries: dict[str, Entry], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = await play(arguments(tmp_path, "--workloads", "W1,W3,W6,same"), entries)
    path = tmp_path / "peers.json"
    assert json.loads(path.read_text()) == json.loads(json.dumps(document))
    done = [(run["engine"], run["preset"], run["workload"]) for run in document["runs"]]
    assert done[:4] == [("shoal", "W1", "W1"), ("slow", "W1", "W1"), ("shoal", "W3", "W3"), ("slow", "W3", "W3")]
    assert {workload for _, _, workload in done} == {"W1", "W3", "W6@80%", "W6=slowest", "W6=ours"}
    assert all(run["errors"] == 0 and run["goodput"] is not None for run in document["runs"])
    own = {run["engine"]: run["shape"]["rate"] for run in document["runs"] if run["preset"] == "W6"}
    assert own["shoal"] > own["slow"]
    # The last turn was lost: only that one is played again.
    lost = [run for run in document["runs"] if (run["engine"], run["preset"]) == ("slow", "same")]
    path.write_text(json.dumps({**document, "runs": [run for run in document["runs"] if run not in lost]}))
    again = peers.parse_arguments(
        [
            "--resume",
            str(path),
            "--repetitions",
            "1",
            "--threads",
            "1",
            "--port",
            "18990",
            "--workloads",
            "W1,W3,W6,same",
        ]
    )
    resumed = await play(again, entries)
    assert [(run["engine"], run["workload"]) for run in resumed["runs"][-2:]] == [
        ("slow", "W6=slowest"),
        ("slow", "W6=ours"),
    ]
    assert len(resumed["runs"]) == len(document["runs"])
    assert len(resumed["engines"]["shoal"]["startups_s"]) == 1
    assert len(resumed["engines"]["slow"]["startups_s"]) == 2
    peers_report.report(resumed)
    text = capsys.readouterr().out
    assert "How many times better shoal is" in text
    assert {run.label for run in read_results(path)} == {"shoal", "slow"}


@pytest.mark.usefixtures("quick")
async def test_with_one_server_up_no_other_runs(entries: dict[str, Entry], tmp_path: Path) -> None:
    args = arguments(tmp_path, "--isolate", "--workloads", "W1", "--repetitions", "2", "--port", "19030")
    document = await play(args, entries)
    assert [run["engine"] for run in document["runs"]] == ["shoal", "slow", "slow", "shoal"]
    assert len(document["engines"]["shoal"]["startups_s"]) == 2
    assert len(document["engines"]["slow"]["startups_s"]) == 1


@pytest.mark.usefixtures("quick")
async def test_an_engine_that_does_not_start_does_not_stop_the_others(
    entries: dict[str, Entry], tmp_path: Path
) -> None:
    def broken(root: Path, port: int, threads: int) -> Engine:
        return Engine([sys.executable, "-c", "raise SystemExit(3)"], 1, 1)

    args = arguments(tmp_path, "--workloads", "W1", "--port", "19070")
    document = await play(args, {"broken": Entry(broken, 16, PACE), **entries})
    assert [run["engine"] for run in document["runs"]] == ["shoal", "slow"]
    assert [failure["engine"] for failure in document["failures"]] == ["broken"]
    assert "ended with 3" in document["failures"][0]["reason"]


def test_other_settings_are_not_mixed_into_old_results(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"settings": {"scale": 0.5, "threads": 1, "shoal_args": ""}, "runs": []}))
    args = peers.parse_arguments(["--resume", str(path), "--scale", "1", "--threads", "1"])
    with pytest.raises(SystemExit, match="go on with the same"):
        peers.load_document(args)


def has_ended(pid: int) -> bool:
    """Also when nobody has asked for its exit status yet."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="reads /proc (Linux)")
def test_a_server_asleep_takes_nothing_and_wakes_up(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'while True: pass']); input()"
    engine = Engine([sys.executable, "-c", code.replace("input()", "import time; time.sleep(60)")], 1, 1)
    server = servers.Server("busy", engine, 1, tmp_path / "log")
    try:
        deadline = time.monotonic() + 20
        while len(process_tree(server.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        parent, child = process_tree(server.pid)

        def used(seconds: float) -> float:
            before = processor_seconds(child, children=False)
            time.sleep(seconds)
            return processor_seconds(child, children=False) - before

        server.sleep()
        time.sleep(0.2)
        assert used(0.5) == 0.0
        server.wake()
        deadline = time.monotonic() + 20
        while used(0.2) == 0.0 and time.monotonic() < deadline:
            pass
        assert time.monotonic() < deadline
        server.sleep()
    finally:
        server.stop()
    assert all(has_ended(pid) for pid in (parent, child))


# --- tables ---------------------------------------------------------------------------------------------------------


def run(engine: str, repetition: int, rate: float, foreign: float = 0.0, **more: Any) -> dict[str, Any]:
    return {
        "engine": engine,
        "repetition": repetition,
        "workload": "W3",
        "output_tokens_per_s": rate,
        "cpu": {"client": 0.01, "foreign": foreign, "foreign_by": {"cc1": foreign}},
        "errors": 0,
        "early_stops": 0,
        "limits": 0,
        "memory": None,
        "tpot_ms": {"p50": 1e3 / rate},
        **more,
    }


ROW = peers_report.Row("W3", "tokens/s", "output_tokens_per_s", True)
TPOT = peers_report.Row("W3", "TPOT p50, ms", "tpot_ms.p50", False)


def test_ratios_pair_repetitions_and_the_best_peer_is_the_hardest() -> None:
    rates = {"shoal": (10.0, 20.0, 40.0), "a": (5.0, 5.0, 5.0), "b": (8.0, 2.0, 20.0)}
    results = peers_report.Results(
        run(engine, r, rate) for engine, all_of in rates.items() for r, rate in enumerate(all_of)
    )
    assert results.ratios("shoal", "b", ROW) == {0: 1.25, 1: 10.0, 2: 2.0}
    assert results.ratios("shoal", "b", TPOT) == pytest.approx({0: 1.25, 1: 10.0, 2: 2.0})
    assert results.against_best("shoal", ["a", "b"], ROW) == ({0: 1.25, 1: 10.0, 2: 2.0}, "b")
    assert peers_report.spread([2.0, 1.25, 10.0]) == "1.25 / 2.00 / 10.00"


def test_a_repetition_without_its_counterpart_gives_no_ratio() -> None:
    results = peers_report.Results([run("shoal", 0, 4.0), run("a", 1, 2.0)])
    assert results.ratios("shoal", "a", ROW) == {}
    assert results.against_best("shoal", ["a"], ROW) == ({}, "")


def test_figures_may_be_ratios_of_others() -> None:
    found = {"by_tag": {"short": {"itl_ms": {"p99": 90.0, "p50": 30.0}}}}
    row = next(row for row in peers_report.ROWS if row.label == "short ITL p99 / p50")
    assert peers_report.value(found, row.path) == 3.0
    assert peers_report.value({}, row.path) is None


def test_disturbed_runs_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run("shoal", 0, 10.0), run("shoal", 1, 99.0, foreign=0.2), run("a", 0, 5.0), run("a", 1, 5.0)]
    about = {"startups_s": [1.0], "bits": 16, "idle": None, "weight_bytes": 269_000_000, "kv_bytes_per_token": 23_040}
    limits = peers.roofline.MachineLimits({256 << 20: 20.0}, 100.0, 2, "test").to_json()
    document = {"runs": runs, "engines": {"shoal": about, "a": about}, "limits": [limits], "failures": []}
    peers_report.report(json.loads(json.dumps(document)), quiet_only=True)
    text = capsys.readouterr().out
    assert "1 of 4 runs are left out" in text
    assert "| W3 tokens/s | 10 [10-10] | 5 [5-5] |" in text
    assert "| W3 tokens/s | 2.00 / 2.00 / 2.00 | 2.00 / 2.00 / 2.00 (a) |" in text
    # The bound of 32 sequences is arithmetic here: 100 GFLOP/s over 2 x 134,515,008 for a token.
    assert f"| W3 (batch 32) | {10 / (100e9 / (2 * 134_515_008)):.0%} /" in text


# --- the other scripts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["peers", "graph_cost", "ladder", "step_figure"])
def test_scripts_say_how_they_are_used(script: str) -> None:
    done = subprocess.run([sys.executable, f"{script}.py", "--help"], cwd=BENCHMARKS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"python tests/benchmarks/{script}.py" in done.stdout


def test_what_a_comparison_would_take_is_said_without_starting_anything() -> None:
    command = [sys.executable, "peers.py", "--estimate", "--engines", "shoal,llamacpp-q4-split", "--scale", "0.5"]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Three repetitions; the one whose slots are short has no W4 and W5.
    assert "30 turns, about" in done.stdout
