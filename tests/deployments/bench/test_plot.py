"""Figures: the right ones, valid images, small."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shoal.configs.errors import ConfigError
from shoal.deployments.bench.plot import plot_results
from shoal.deployments.bench.results import Curve, ResultRun
from shoal.deployments.cli.main import main

MAX_BYTES = 200_000
LABELS = ("shoal", "peer <A&B>", "third", "fourth", "fifth")


def curve(scale: float) -> Curve:
    values = [scale * (1 + i / 10) ** 2 for i in range(101)]
    return Curve(500, values[50], values[99], values)


def run(label: str, workload: str, concurrency: int | None, *kinds: str) -> ResultRun:
    scale = 5.0 * (1 + LABELS.index(label)) * (concurrency or 1)
    curves = {kind: curve(scale) for kind in kinds or ("",)}
    return ResultRun(label, workload, "128 tokens in, 128 out", concurrency, 100.0 / scale, curves, curves)


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def check_images(paths: list[Path]) -> None:
    for path in paths:
        data = path.read_bytes()
        assert len(data) < MAX_BYTES, path
        if path.suffix == ".png":
            assert data.startswith(b"\x89PNG\r\n\x1a\n")
            assert data.endswith(b"IEND\xaeB`\x82")
        else:
            assert ElementTree.fromstring(data).tag == "{http://www.w3.org/2000/svg}svg"


def svg_text(path: Path) -> str:
    return " ".join("".join(element.itertext()) for element in ElementTree.parse(path).iter() if "text" in element.tag)


def test_a_sweep_gives_throughput_and_distributions(tmp_path: Path) -> None:
    runs = [run(label, f"custom@{n}", n) for label in LABELS[:2] for n in (1, 4, 16)]
    paths = plot_results(runs, tmp_path / "new")
    assert names(paths) == ["throughput.png", "throughput.svg", "ttft.png", "ttft.svg", "itl.png", "itl.svg"]
    check_images(paths)
    text = svg_text(tmp_path / "new" / "throughput.svg")
    for word in ("output tokens/s", "concurrent streams", "128 tokens in, 128 out", "16", "peer <A&B>", "ms"):
        assert word in text


def test_every_workload_and_kind_of_five_engines_stays_small(tmp_path: Path) -> None:
    shapes = [("W1", 1), ("W2", 8), ("W3", 32), ("W4", 8), ("W6@50%", None), ("W6@80%", None)]
    runs = [run(label, name, n) for label in LABELS for name, n in shapes for _ in range(3)]
    runs += [run(label, "W5", None, "long", "short") for label in LABELS]
    paths = plot_results(runs, tmp_path)
    check_images(paths)
    text = svg_text(tmp_path / "itl.svg")
    assert "W5 · short" in text
    assert "W6@80%" in text


def test_one_concurrency_gives_no_throughput_figure(tmp_path: Path) -> None:
    paths = plot_results([run("shoal", "W2", 8)], tmp_path)
    assert names(paths) == ["ttft.png", "ttft.svg", "itl.png", "itl.svg"]


def test_equal_results_are_equal_files(tmp_path: Path) -> None:
    runs = [run("shoal", "W2", 8)]
    first, second = plot_results(runs, tmp_path / "a"), plot_results(runs, tmp_path / "b")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_nothing_answered_is_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to draw"):
        plot_results([ResultRun("shoal", "W1", "", 1, 0.0, {}, {})], tmp_path)


def test_a_missing_matplotlib_names_the_extra_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--url", "http://127.0.0.1:1", "--plot", str(tmp_path)]) == 2
    assert "pip install 'shoal[plot]'" in " ".join(capsys.readouterr().err.split())
