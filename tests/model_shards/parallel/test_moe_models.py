"""Models of experts draw the tokens of one rank, however their experts are shared out; while they move, too."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from safetensors.torch import load_file, save_file

PROMPTS = [[65, 66, 67], list(range(10, 60)), [200] * 17, [5]]
FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3")


def skewed(source: Path, path: Path) -> Path:
    """All biases of the choice are negative, and one group's two experts are chosen by every row."""
    shutil.copytree(source, path)
    tensors = load_file(path / "model.safetensors")
    biases = [tensor for name, tensor in tensors.items() if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2
    for bias in biases:
        bias[:6], bias[6:] = -2.5, -1.25
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_two_ranks_and_four_draw_the_tokens_of_one(
    tiny_checkpoint: Callable[..., Path], driver: ModuleType, tmp_path: Path
) -> None:
    """Everything in one start of four processes; see model_ranks.py."""
    paths = {family: tiny_checkpoint(family) for family in FAMILIES}
    paths["skewed"] = skewed(paths["deepseek_v3"], tmp_path / "skewed")
    cases = []
    for name, path in paths.items():
        runner = driver.make_runner(path)
        expected = driver.generate(runner.execute, runner.settings, PROMPTS, 12, chunk_size=16)
        cases.append({"name": name, "path": str(path), "expected": expected})
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    program = [sys.executable, str(Path(__file__).parent / "model_ranks.py")]
    arguments = [f"file://{tmp_path / 'rendezvous'}", str(tmp_path / "cases.json")]
    ranks = [
        subprocess.Popen([*program, str(rank), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(4)
    ]
    try:
        outputs = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [out for out, _ in outputs] == ["agreed\n"] * 4, "\n".join(error[-2000:] for _, error in outputs)
