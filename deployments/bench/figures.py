"""The look of every figure: colours that colour-blind people tell apart, units, small files. Needs matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.configs.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, without the yellow that is too light for lines, in an order of falling contrast.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DPI = 90
_STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    # Text stays text: smaller files, and a reader may search it. A fixed salt makes equal figures equal files.
    "svg.fonttype": "none",
    "svg.hashsalt": "shoal",
}


@dataclass(frozen=True, slots=True)
class Look:
    """How one of several engines is drawn; colour, dashes and marker all differ, so that print in grey works too."""

    colour: str
    line: str
    marker: str


def look(index: int) -> Look:
    return Look(COLOURS[index % len(COLOURS)], LINES[index % len(LINES)], MARKERS[index % len(MARKERS)])


def require_matplotlib() -> None:
    """Raises ConfigError that names the extra when it is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("Figures need matplotlib: pip install 'shoal[plot]'.", param="plot") from error


@contextmanager
def house_style() -> Iterator[None]:
    """Figures that are made, filled and saved within look alike."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def panels(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """A figure of `rows` x `columns` panels of `size` inches each. Without pyplot: no state is shared, no display asked
    for."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * size[0], rows * size[1]), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def title_and_legend(figure: Figure, lines: Sequence[Any], labels: Sequence[str], title: str) -> None:
    """A title above and one legend for all panels below."""
    figure.suptitle(title, fontsize=11, fontweight="bold")
    if labels:
        columns = min(len(labels), 5)
        figure.legend(lines, labels, loc="outside lower center", ncols=columns, frameon=False, handlelength=3)


def save(figure: Figure, directory: Path, name: str) -> list[Path]:
    """As PNG and SVG; returns their paths. Raises ConfigError when they cannot be written."""
    paths = [directory / f"{name}.{kind}" for kind in ("png", "svg")]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        figure.savefig(paths[0], dpi=_DPI, metadata={"Software": None}, pil_kwargs={"optimize": True})
        drawing = io.StringIO()
        figure.savefig(drawing, format="svg", metadata={"Date": None})
        # A hundredth of a point is finer than any screen, and half the bytes.
        paths[1].write_text(re.sub(r"(\d\.\d\d)\d+", r"\1", drawing.getvalue()))
    except OSError as error:
        raise ConfigError(f"Cannot write figures to {directory}: {error.strerror}.", param="plot") from error
    return paths
