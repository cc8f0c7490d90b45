"""The definitions of the latencies, on a scripted clock (binary fractions, so that equality is exact)."""

from __future__ import annotations

import pytest

from shoal.deployments.bench.records import RequestRecord
from shoal.deployments.bench.summary import Distribution, Objective, percentile, summarize


def record(token_times: list[float], end: float, tokens: int, **more: object) -> RequestRecord:
    made = RequestRecord(wanted_tokens=tokens, due=1.0, sent=1.25, end=end, token_times=token_times)
    made.output_tokens = tokens
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_latencies_of_a_scripted_request() -> None:
    seen = record([2.0, 2.5, 4.0], end=4.5, tokens=3)
    assert seen.ttft == 1.0
    assert seen.gaps == [0.5, 1.5]
    assert seen.e2e == 3.5
    assert seen.tpot == 1.25


def test_end_to_end_is_first_token_plus_tpot_times_the_rest() -> None:
    seen = record([2.0, 2.5, 4.0], end=4.5, tokens=3)
    assert seen.tpot is not None
    assert seen.e2e == seen.ttft + seen.tpot * (seen.output_tokens - 1)


def test_time_counts_from_when_the_request_was_due_not_from_when_a_late_client_sent_it() -> None:
    late = record([2.0], end=2.0, tokens=1, sent=1.75)
    assert late.ttft == 1.0


def test_one_token_has_no_tpot_and_no_gap() -> None:
    single = record([2.0], end=2.0, tokens=1)
    assert single.tpot is None
    assert single.gaps == []


def test_a_burst_is_one_gap_but_all_its_tokens_count_for_tpot() -> None:
    burst = record([2.0, 4.0], end=4.0, tokens=9)
    assert burst.gaps == [2.0]
    assert burst.tpot == 0.25


def test_tokens_held_back_to_the_end_count_against_tpot() -> None:
    held = record([2.0, 2.125], end=6.0, tokens=5)
    assert held.tpot == 1.0


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1.0), (0.5, 2.5), (0.9, pytest.approx(3.7)), (1.0, 4.0), (0.25, 1.75)]
)
def test_percentiles_interpolate_between_closest_ranks(share: float, expected: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], share) == expected


def test_distribution_is_in_milliseconds_and_sorts() -> None:
    assert Distribution.of_seconds([0.5, 0.25]) == Distribution(2, 375.0, 375.0, 475.0, 497.5, 500.0, (250.0, 500.0))
    assert Distribution.of_seconds([]) is None


def test_summary_rates_are_over_the_whole_wall_time() -> None:
    summary = summarize([record([2.0, 3.0], 3.0, 8, input_tokens=16), record([2.0], 5.0, 8, input_tokens=16)], 4.0)
    assert (summary.output_tokens_per_s, summary.input_tokens_per_s, summary.requests_per_s) == (4.0, 8.0, 0.5)
    assert summary.tokens_per_event == round(16 / 3, 3)


def test_failed_requests_count_as_errors_and_give_no_latency() -> None:
    failed = record([2.0], 2.5, 1, error="HTTP 500")
    summary = summarize([record([2.0], 2.0, 1), failed], 1.0)
    assert (summary.requests, summary.errors, summary.first_error) == (2, 1, "HTTP 500")
    assert summary.ttft_ms is not None
    assert summary.ttft_ms.count == 1
    assert summary.output_tokens == 1


def test_short_answers_are_counted_as_early_stops() -> None:
    assert summarize([record([2.0], 2.0, 1, wanted_tokens=5)], 1.0).early_stops == 1


def test_goodput_needs_both_objectives_and_counts_failures_as_misses() -> None:
    good = record([1.5, 2.0], 2.0, 2)
    slow_first = record([3.0, 3.25], 3.25, 2)
    slow_rest = record([1.5, 4.0], 4.0, 2)
    failed = record([1.5], 1.5, 1, error="cut")
    summary = summarize([good, slow_first, slow_rest, failed], 2.0, Objective(ttft_ms=500, tpot_ms=500))
    assert summary.goodput is not None
    assert summary.goodput.attainment == 0.25
    assert summary.goodput.requests_per_s == 0.5
    assert not summary.goodput.sustained


def test_a_rate_is_sustained_when_nine_in_ten_meet_the_objectives() -> None:
    records = [record([1.5], 1.5, 1) for _ in range(9)] + [record([9.0], 9.0, 1)]
    summary = summarize(records, 1.0, Objective(500, 500))
    assert summary.goodput is not None
    assert summary.goodput.sustained


def test_each_tag_is_summarised_by_itself() -> None:
    summary = summarize([record([2.0], 2.0, 1, tag="long"), record([1.5], 1.5, 1, tag="short")], 1.0)
    assert summary.by_tag["long"].ttft_ms == Distribution(1, 1000.0, 1000.0, 1000.0, 1000.0, 1000.0, (1000.0,))
    assert summary.by_tag["short"].requests == 1
    assert summarize([record([2.0], 2.0, 1)], 1.0).by_tag == {}


def test_nothing_succeeded() -> None:
    summary = summarize([record([], 2.0, 0, error="refused")], 1.0)
    assert summary.ttft_ms is summary.tpot_ms is summary.itl_ms is summary.e2e_ms is None
