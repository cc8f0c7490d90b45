"""Results as files: what is written can be read and drawn again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.configs.errors import ConfigError
from shoal.deployments.bench.cpu import CpuShares
from shoal.deployments.bench.records import RequestRecord
from shoal.deployments.bench.results import Curve, dump_results, merged, parse_runs, read_results
from shoal.deployments.bench.session import Measurement
from shoal.deployments.bench.summary import QUANTILES, Distribution, summarize
from shoal.deployments.bench.workloads import LongStreams, Workload


def record(ttft: float, tag: str = "") -> RequestRecord:
    made = RequestRecord(3, 0.0, tag, sent=0.0, end=ttft + 0.5, token_times=[ttft, ttft + 0.25, ttft + 0.5])
    made.output_tokens = 3
    return made


def measured(workload: Workload, records: list[RequestRecord]) -> dict[str, object]:
    return Measurement(workload, 0, summarize(records, 2.0), CpuShares(0.0)).to_json()


def test_a_distribution_has_the_same_size_for_any_number_of_observations() -> None:
    few, many = Distribution.of_seconds([0.5, 0.25, 1.0]), Distribution.of_seconds([i / 8 for i in range(5000)])
    assert few is not None
    assert many is not None
    assert few.quantiles == (250.0, 500.0, 1000.0)
    assert len(many.quantiles) == QUANTILES + 1
    assert (many.quantiles[0], many.quantiles[50], many.quantiles[99]) == (0.0, many.p50, many.p99)
    assert many.quantiles[-1] == many.max


def test_files_come_back_with_their_name_or_the_engines(tmp_path: Path) -> None:
    run = measured(Workload("a", "", 2, 16, 3, concurrency=2), [record(0.5), record(1.0)])
    own, several = tmp_path / "mine.json", tmp_path / "peers.json"
    own.write_text(dump_results({"runs": [run]}))
    several.write_text(dump_results({"runs": [{**run, "engine": "other"}]}))
    (read,) = read_results(own)
    assert (read.label, read.workload, read.concurrency, read.shape) == ("mine", "a", 2, "16 tokens in, 3 out")
    assert read.output_tokens_per_s == 3.0
    assert read.ttft == {"": Curve(2, 750.0, 995.0, [500.0, 1000.0])}
    assert read.itl[""].quantiles == [250.0] * 4
    assert read_results(several)[0].label == "other"


def test_kinds_of_requests_are_kept_apart() -> None:
    prefix = Workload("p", "", 2, 16, 3, concurrency=1, shared_prefix_tokens=64)
    (run,) = parse_runs([measured(prefix, [record(2.0, "cold"), record(0.5, "hit")])], "x")
    assert {kind: curve.p50 for kind, curve in run.ttft.items()} == {"cold": 2000.0, "hit": 500.0}
    assert set(run.itl) == {""}
    assert run.shape == "16 tokens in after 64 shared, 3 out"
    mixed = Workload("m", "", 1, 16, 3, concurrency=4, long=LongStreams())
    (run,) = parse_runs([measured(mixed, [record(2.0, "long"), record(0.5, "short")])], "x")
    assert set(run.itl) == set(run.ttft) == {"long", "short"}
    assert run.concurrency is None  # no point of a sweep: two loads at once


def test_numbers_of_a_distribution_stay_on_one_line() -> None:
    text = dump_results({"name": "a [1, 2]", "values": [1.5, -2, 3e-7], "nested": [{"empty": []}]})
    assert '"values": [1.5, -2, 3e-07]' in text
    assert json.loads(text) == {"name": "a [1, 2]", "values": [1.5, -2, 3e-7], "nested": [{"empty": []}]}


def test_repetitions_are_merged_by_how_many_observations_they_stand_for() -> None:
    values, shares = merged([Curve(3, 2.0, 3.0, [1.0, 2.0, 3.0]), Curve(1, 10.0, 10.0, [10.0])])
    assert values == [1.0, 2.0, 3.0, 10.0]
    assert shares == pytest.approx([0.25, 0.5, 0.75, 1.0])
    large = Curve(1000, 0.0, 0.0, [float(i) for i in range(101)])
    values, shares = merged([large, large, large])
    assert len(values) < 70
    assert (values[-1], shares[-1]) == (100.0, pytest.approx(1.0))


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("[]", "holds no results"), ('{"runs": []}', "holds no results"), ('{"runs": [{}]}', "older")],
)
def test_other_files_are_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "odd.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_results(path)
    assert "odd" in str(caught.value)
    with pytest.raises(ConfigError, match="Cannot read"):
        read_results(tmp_path / "missing.json")
