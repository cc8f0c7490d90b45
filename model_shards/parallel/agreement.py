"""Whether all ranks are about to load the same model.

Each node has its own copy of the files, and copies differ: a download that was cut off, another revision, another
model of the same shapes. Such ranks would compute nonsense together, or wait for each other until a deadline.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterable
from pathlib import Path

from shoal.configs.errors import ConfigError
from shoal.configs.units import format_bytes
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.weights.checkpoint import Checkpoint

_HEAD_BYTES = 1 << 20
"""Of a file, read whole: its table of tensors, or most of it."""
_SAMPLES = 64
_SAMPLE_BYTES = 4 << 10
"""Of each sample; they lie evenly over the file. Two models of the same shapes differ in every one of them."""
_MAX_LISTED = 4


def require_same_files(context: ParallelContext, checkpoint: Checkpoint, files: Iterable[Path]) -> None:
    """Compares what the ranks hold: configuration, names and shapes of tensors, sizes and samples of `files`. All ranks
    call it. Raises ConfigError on every one of them, naming who has what; reads under 2 MiB a file."""
    if context.position.world_size == 1:
        return
    mine = {"configuration": _digest([repr(checkpoint.config)])}
    mine["tensors"] = _digest(f"{name} {checkpoint.shape(name)}" for name in sorted(checkpoint.names()))
    mine |= {file.name: _fingerprint(file) for file in files}
    everyone = context.tell_all([str(context.position), socket.gethostname(), mine])
    first_rank, first_host, expected = everyone[0]
    different = [(rank, host, theirs) for rank, host, theirs in everyone if theirs != expected]
    if not different:
        return
    lines = []
    for rank, host, theirs in different[:_MAX_LISTED]:
        names = sorted(name for name in theirs.keys() | expected.keys() if theirs.get(name) != expected.get(name))
        lines += [
            f"{name}: {first_rank} on {first_host} has {expected.get(name, 'none')}, {rank} on {host} has "
            f"{theirs.get(name, 'none')}"
            for name in names[:_MAX_LISTED]
        ]
    more = f" (and {len(different) - _MAX_LISTED} more ranks)" if len(different) > _MAX_LISTED else ""
    raise ConfigError(
        f"The ranks do not load the same model from {checkpoint.path}. {'; '.join(lines)}{more}. Copy one set of files "
        "to every node.",
        param="model",
    )


def _fingerprint(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        digest.update(opened.read(_HEAD_BYTES))
        for sample in range(_SAMPLES + 1):  # the last one is the end of the file
            opened.seek(max(0, size - _SAMPLE_BYTES) * sample // _SAMPLES)
            digest.update(opened.read(_SAMPLE_BYTES))
    return f"{format_bytes(size)} ({size} bytes, contents {digest.hexdigest()[:12]})"


def _digest(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()[:12]
