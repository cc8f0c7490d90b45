"""Experts over ranks give, bit for bit, what a loop over tokens and choices gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_four_ranks_two_and_slices(tmp_path: Path) -> None:
    """Everything in one start of four processes; see expert_ranks.py."""
    program = [sys.executable, str(Path(__file__).parent / "expert_ranks.py")]
    rendezvous = f"file://{tmp_path / 'rendezvous'}"
    ranks = [
        subprocess.Popen([*program, str(rank), rendezvous], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(4)
    ]
    try:
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [out for out, _ in outputs] == ["agreed\n"] * 4, "\n".join(error[-2000:] for _, error in outputs)
