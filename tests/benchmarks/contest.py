"""What a comparison of engines consists of: turns, in an order that is fair, and about how long they will take."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engines import ALL, Entry, Pace

from shoal.deployments.bench.workloads import Workload, preset

SAME = "same"
"""The preset that gives every engine the same requests a second: `SAME_SHARE` of what the slowest sustains, and of what
the first engine (ours) does."""
SAME_SHARE = 0.8
TURN_S = 2.0
"""Waking up, the first request, reading memory."""


@dataclass(frozen=True)
class Turn:
    """One engine gets one preset, once."""

    repetition: int
    preset: str
    engine: str

    @property
    def key(self) -> tuple[int, str, str]:
        return self.repetition, self.preset, self.engine


def parse_presets(text: str, scale: float) -> dict[str, float]:
    """`W1,W3:0.5` -> preset -> scale."""
    found = {}
    for part in text.split(","):
        name, _, own = part.strip().partition(":")
        found[name if name == SAME else name.upper()] = float(own) if own else scale
    return found


def choose(known: Mapping[str, Entry], text: str) -> dict[str, Entry]:
    """`shoal,vllm-f32-512:W4+W5` -> the engines, in order, each with the presets that it is for. Exits for an unknown
    one."""
    chosen = {}
    for part in filter(None, text.split(",")):
        name, _, only = part.strip().partition(":")
        if name not in known:
            raise SystemExit(f"no engine {name}; there are {', '.join(known)}")
        wanted = parse_presets(only.replace("+", ","), 1.0) if only else ALL
        chosen[name] = replace(known[name], workloads=known[name].workloads.intersection(wanted))
    return chosen


def compared_at_one_rate(entries: Mapping[str, Entry]) -> list[str]:
    return [name for name, entry in entries.items() if SAME in entry.workloads]


def make_turns(entries: Mapping[str, Entry], presets: Sequence[str], repetitions: int, *, one_up: bool) -> list[Turn]:
    """With all servers up, engines alternate within each workload; with `one_up` each gets all its workloads of a
    repetition in a row. The order rotates, so that nobody always follows the same neighbour."""
    names = list(entries)
    rotated = [names[r % len(names) :] + names[: r % len(names)] for r in range(repetitions)]
    if not one_up:
        turns = [Turn(r, p, name) for r in range(repetitions) for p in presets for name in rotated[r]]
    else:
        turns = [Turn(r, p, name) for r in range(repetitions) for name in rotated[r] for p in presets if p != SAME]
        # Only when everybody's capacity is known.
        if SAME in presets:
            turns += [Turn(r, SAME, name) for name in names for r in range(repetitions)]
    return [turn for turn in turns if turn.preset in entries[turn.engine].workloads]


def capacities(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Engine -> requests a second that it sustained in W3, the median of its repetitions."""
    found: dict[str, list[float]] = {}
    for run in runs:
        if run["workload"] == "W3" and run["requests_per_s"]:
            found.setdefault(run["engine"], []).append(run["requests_per_s"])
    return {name: statistics.median(rates) for name, rates in found.items()}


def workloads_of(name: str, scale: float, known: Mapping[str, float], engines: Sequence[str]) -> list[Workload] | None:
    """The workloads of a preset; None while a capacity that `same` needs is unknown."""
    if name != SAME:
        return preset(name, scale)
    if any(engine not in known for engine in engines):
        return None
    base = preset("W6", scale)[-1]
    rates = {"slowest": min(known[engine] for engine in engines), "ours": known[engines[0]]}
    return [
        replace(base, name=f"W6={whose}", rate=SAME_SHARE * rate, capacity_share=None) for whose, rate in rates.items()
    ]


class Forecast:
    """Seconds of a turn: what the same one took before, else a guess from the engine's pace."""

    def __init__(self, entries: Mapping[str, Entry], presets: Mapping[str, float]) -> None:
        self._entries, self._presets = entries, presets
        self._seen: dict[tuple[str, str], float] = {}

    def took(self, turn: Turn, seconds: float) -> None:
        self._seen[turn.preset, turn.engine] = seconds

    def turn(self, turn: Turn) -> float:
        seen = self._seen.get((turn.preset, turn.engine))
        if seen is not None:
            return seen
        pace = self._entries[turn.engine].pace
        rates = {name: _capacity(entry.pace) for name, entry in self._entries.items()}
        alike = compared_at_one_rate(self._entries)
        workloads = workloads_of(turn.preset, self._presets[turn.preset], rates, alike)
        return TURN_S + sum(_seconds(workload, pace) for workload in workloads or [])

    def starts(self, turns: Sequence[Turn], *, one_up: bool) -> float:
        """Of starting the servers."""
        if one_up:
            changes = [turn.engine for i, turn in enumerate(turns) if i == 0 or turns[i - 1].engine != turn.engine]
        else:
            changes = list({turn.engine for turn in turns})
        return sum(self._entries[name].pace.startup_s for name in changes)


def _capacity(pace: Pace) -> float:
    """Requests a second of 128 tokens in and out."""
    return 1 / (128 / pace.prefill + 128 / pace.many)


def _seconds(workload: Workload, pace: Pace) -> float:
    if workload.long is not None:
        long = workload.long
        # The short streams go on meanwhile and take about half of the machine.
        return 2 * long.requests * long.input_tokens / pace.prefill
    prompt = workload.requests * workload.input_tokens + workload.prefixes * workload.shared_prefix_tokens
    rate = pace.one if workload.concurrency == 1 and not workload.open_loop else pace.many
    closed = prompt / pace.prefill + workload.requests * workload.output_tokens / rate
    if not workload.open_loop:
        return closed
    offered = workload.rate or (workload.capacity_share or 1.0) * _capacity(pace)
    return max(closed, workload.requests / offered) + workload.output_tokens / pace.one
