"""The options of `shoal bench` and the workloads they make."""

from __future__ import annotations

import argparse

import pytest

from shoal.configs.errors import ConfigError
from shoal.deployments.bench.workloads import LongStreams, Workload
from shoal.deployments.cli import bench
from shoal.deployments.cli.main import build_parser, main


def options(*arguments: str) -> argparse.Namespace:
    parser, _ = build_parser(["bench"])
    return parser.parse_args(["bench", *arguments])


def workloads(*arguments: str) -> list[Workload]:
    return bench.plan_workloads(options(*arguments))


def test_the_default_is_one_user_and_a_small_batch() -> None:
    assert [workload.name for workload in workloads()] == ["W1", "W2"]


def test_presets_run_in_the_order_given_and_can_be_scaled() -> None:
    planned = workloads("--workload", "w3,W1", "--scale", "0.75")
    assert [(workload.name, workload.requests) for workload in planned] == [("W3", 48), ("W1", 2)]


def test_no_scale_leaves_a_stream_without_a_request() -> None:
    (workload,) = workloads("--workload", "W3", "--scale", "0.25")
    assert workload.requests == workload.concurrency == 32


def test_options_alone_make_a_workload() -> None:
    (workload,) = workloads("--concurrency", "5", "--requests", "10", "--input-tokens", "32", "--output-tokens", "8")
    assert workload == Workload("custom", "", 10, 32, 8, concurrency=5)


def test_options_change_a_preset() -> None:
    planned = workloads("--workload", "W4", "--shared-prefix-tokens", "2048")
    shapes = [(workload.name, workload.shared_prefix_tokens, workload.input_tokens) for workload in planned]
    assert shapes == [("W4", 2048, 64), ("W4@1", 2048, 64)]


def test_several_rates_are_several_open_loops() -> None:
    planned = workloads("--rate", "1,2.5")
    assert [(workload.name, workload.rate) for workload in planned] == [("custom@1/s", 1.0), ("custom@2.5/s", 2.5)]


def test_long_prompts_beside_short_ones_have_no_rate() -> None:
    assert workloads("--workload", "W5")[0].long == LongStreams()
    with pytest.raises(ConfigError, match="closed loop"):
        workloads("--workload", "W5", "--rate", "1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "fast"], "no number"),
        (["--extra-body", "[1]"], "must be a JSON object"),
        (["--extra-body", "{"], "not JSON"),
        (["--rate", "1", "--concurrency", "2"], "not allowed with"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        options(*arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_one_objective_alone_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--slo-ttft", "100"]) == 2
    assert "belong together" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_paragraph(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:1"]) == 2
    assert "`shoal serve` starts a" in capsys.readouterr().err
