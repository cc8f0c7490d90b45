"""What `check.py` says in the end: one table of all that was measured with its targets, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Report = dict[str, Any]

STEP_TARGET = 0.80
"""Of the roofline, for a decode step of one sequence."""


def target(timing: Report) -> float | None:
    """The share of its roof that a kernel is to reach; sampling reads its rows more than once and has none."""
    if timing["name"].startswith("sampling"):
        return None
    if timing["unit"] == "TFLOP/s":
        return 0.45
    return 0.75 if timing["name"].startswith("decode") else 0.85


def problems(result: Report) -> list[str]:
    """What makes the check fail, a line each."""
    lines = []
    for part, report in result["parts"].items():
        if "failure" in report:
            lines.append(f"FAILED: {part}: {report['failure']}")
        elif not any(kind in report for kind in ("checks", "steps", "timings")):
            lines.append(f"FAILED: {part}: nothing was checked")
        for check in report.get("checks", ()):
            if not check["passed"]:
                lines.append(f"WRONG: {check['name']}: error {check['error']:.3g}, allowed {check['allowed']:.3g}")
    return lines


def render_report(result: Report) -> str:
    """Markdown, as docs/benchmarks.md takes it."""
    lines = []
    for part, report in result["parts"].items():
        checks = report.get("checks", [])
        passed = sum(check["passed"] for check in checks)
        agree = f", {passed} of {len(checks)} comparisons agree" if checks else ""
        lines.append(
            f"{part}: {report['seconds']} s{agree}" + (f", {report['failure']}" if "failure" in report else "")
        )
    rows = [row for report in result["parts"].values() for row in (*_step_rows(report), *_kernel_rows(report))]
    if rows:
        lines += ["", "| what | ms | of its roof | target | beside |", "|---|---|---|---|---|", *rows]
    return "\n".join(lines)


def _step_rows(report: Report) -> Iterator[str]:
    latest = {step["batch"]: step for step in report.get("steps", ())}  # with transformers' time, if it came to that
    for batch, step in latest.items():
        what = f"decode step of 8B, {batch} x {step['context']} tokens, {step['bytes_read'] / 1e9:.1f} GB"
        share = f"{_share(step['fraction'])} (roofline {_number(step['roofline_ms'])} ms)"
        aim = _verdict(step["fraction"], STEP_TARGET) if batch == 1 else ""
        beside = (
            f"eager {_number(step['eager_ms'])}, program alone {_number(step['device_ms'])}, "
            f"transformers {_number(step['transformers_ms'])}"
        )
        yield f"| {what} | {_number(step['captured_ms'])} | {share} | {aim} | {beside} |"
    for entry in report.get("sampling", ()):
        yield f"| sampling, {entry['batch']} rows, {entry['how']} | {_number(entry['ms'])} | | | |"


def _kernel_rows(report: Report) -> Iterator[str]:
    for roofs in report.get("roofs", ()):
        yield (
            f"| copy {_number(roofs['copy_gb_s'], '.0f')} GB/s, "
            f"bf16 matmul {_number(roofs['matmul_tflop_s'], '.0f')} TFLOP/s | | | | |"
        )
    for timing in report.get("timings", ()):
        beside = "" if timing["torch_ms"] is None else f"torch {_number(timing['torch_ms'])}"
        share = f"{_share(timing['fraction'])} ({_number(timing['rate'], '.0f')} {timing['unit']})"
        aim = _verdict(timing["fraction"], target(timing))
        yield f"| {timing['name']} | {_number(timing['ms'])} | {share} | {aim} | {beside} |"


def _verdict(fraction: float | None, aim: float | None) -> str:
    if aim is None:
        return ""
    if fraction is None:
        return f"{aim:.0%}"
    return f"{aim:.0%}, {'met' if fraction >= aim else 'MISSED'}"


def _share(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.0%}"


def _number(value: float | None, form: str = ".4g") -> str:
    return "-" if value is None else format(value, form)
