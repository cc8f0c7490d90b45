"""Reads results that were written as JSON (`shoal bench --json`, or several engines in one file) for figures."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.configs.errors import ConfigError

_NUMBERS = re.compile(r"\[[\s\d.,eE+-]+\]")


@dataclass(frozen=True, slots=True)
class Curve:
    """One distribution, in ms: evenly spaced quantiles of `count` observations."""

    count: int
    p50: float
    p99: float
    quantiles: Sequence[float]


@dataclass(frozen=True, slots=True)
class ResultRun:
    """One pass of one workload by one engine."""

    label: str
    """Who was measured."""
    workload: str
    shape: str
    """Lengths, in words: runs of one shape may be compared at different concurrencies."""
    concurrency: int | None
    """None: open loop."""
    output_tokens_per_s: float
    ttft: dict[str, Curve]
    """By kind of request ("short", "long", "cold", "hit"), or under "" where there is one kind only."""
    itl: dict[str, Curve]
    """By "short" and "long", or under ""."""


def dump_results(document: Mapping[str, Any]) -> str:
    """As JSON text for people and programs: a field a line, a list of numbers on one line."""
    return _NUMBERS.sub(_on_one_line, json.dumps(document, indent=1)) + "\n"


def read_results(path: Path) -> list[ResultRun]:
    """Every run of a file. Its label is the engine's name when the file says it, else the file's own name. Raises
    ConfigError for what is no such file."""
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.", param="from") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.", param="from") from error
    runs = document.get("runs") if isinstance(document, dict) else None
    if not isinstance(runs, list) or not runs:
        raise ConfigError(f"{path} holds no results of `shoal bench --json`.", param="from")
    return parse_runs(runs, path.stem)


def parse_runs(runs: Sequence[Mapping[str, Any]], label: str) -> list[ResultRun]:
    """`label` is for runs that do not name their engine. Raises ConfigError for results without distributions."""
    try:
        return [_run(run, str(run.get("engine", label))) for run in runs]
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"The results of {label} lack {error}: they are of an older version or another tool. Measure again.",
            param="from",
        ) from error


def merged(curves: Sequence[Curve]) -> tuple[list[float], list[float]]:
    """(values, share of observations up to each) of several distributions taken together, each weighing as many
    observations as it stands for. Points are 2 % apart, in the outer twentieths 1 %; the greatest value is the last."""
    weighted = sorted((value, curve.count / len(curve.quantiles)) for curve in curves for value in curve.quantiles)
    total, below, kept = sum(weight for _, weight in weighted), 0.0, -1.0
    values, shares = [], []
    for number, (value, weight) in enumerate(weighted, 1):
        below += weight / total
        apart = 0.02 if 0.05 < below < 0.95 else 1 / 101
        if below - kept >= apart - 1e-9 or number == len(weighted):
            kept = below
            values.append(value)
            shares.append(below)
    return values, shares


def _on_one_line(numbers: re.Match[str]) -> str:
    return "[" + " ".join(numbers.group()[1:-1].split()) + "]"


def _run(run: Mapping[str, Any], label: str) -> ResultRun:
    shape = run["shape"]
    shared = f" after {shape['shared_prefix_tokens']} shared" if shape["shared_prefix_tokens"] else ""
    kinds = run["by_tag"] or {"": run}
    return ResultRun(
        label=label,
        workload=run["workload"],
        shape=f"{shape['input_tokens']} tokens in{shared}, {shape['output_tokens']} out",
        concurrency=None if "short" in kinds else shape["concurrency"],
        output_tokens_per_s=run["output_tokens_per_s"],
        ttft=_curves(kinds, "ttft_ms"),
        # How a prompt was found in the cache says nothing of the tokens after the first.
        itl=_curves({"": run} if "hit" in kinds else kinds, "itl_ms"),
    )


def _curves(kinds: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Curve]:
    found = {kind: part[name] for kind, part in kinds.items() if part[name] is not None}
    return {
        kind: Curve(values["count"], values["p50"], values["p99"], values["quantiles"])
        for kind, values in found.items()
    }
