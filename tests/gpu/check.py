"""Checks Shoal on a real GPU, kernel by kernel and whole steps, then times it against what the GPU can do.

    python tests/gpu/check.py [--json FILE] [--seed N] [--part NAME ...] [--no-timing]

from the repository root, on a machine with an NVIDIA GPU, torch >= 2.11 and triton >= 3.6; nothing of the project needs
to be installed, and neither Ray nor a network is used; transformers and safetensors are, where they can be imported.

    kernels   every Triton kernel beside its reference on fresh random inputs
    engine    the engine beside transformers on random checkpoints; captured steps beside eager ones; waits for the GPU
    steps     decode steps of a random 8B Llama shape against their roofline, beside transformers' generate; the sampler
    timing    paged decode against the measured copy bandwidth, prefill against the measured bf16 matmul rate, the
              element-wise kernels against bandwidth, beside torch's scaled_dot_product_attention

Each part is a process of its own with a time limit: one that fails, hangs or breaks the GPU's context is reported, and
the others run. Writes JSON after every part and prints one table in the end. Exit status: 0 all agree, 1 something is
wrong or did not run, 2 no GPU. A target that is missed is said and is no error.

Not yet run on a GPU. `--dry-run` goes through everything in Triton's interpreter on the CPU with small shapes and
measures nothing: it proves this script and the kernels' arithmetic, not their speed.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = 2
PARTS = {"kernels": 300, "engine": 150, "steps": 150, "timing": 90}
"""Name -> seconds that it may take. On an H200 they are expected to take half of that together."""
TIMINGS = ("steps", "timing")

Report = dict[str, Any]


def map_import_root() -> None:
    """Lets `shoal.kernels` mean ROOT/kernels, as an installation would. Uses the files beside this script even where
    the project is installed."""
    package = types.ModuleType("shoal")
    package.__path__ = [str(ROOT)]
    sys.modules["shoal"] = package


def no_gpu_reason() -> str | None:
    """Why nothing can be checked here, with what to do about it; None when it can."""
    try:
        import torch
    except ModuleNotFoundError:
        return "torch is not installed (pip install torch)."
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} sees no CUDA device. This check needs an NVIDIA GPU and a CUDA build of torch; "
            "without one, `--dry-run` runs it in Triton's interpreter."
        )
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError:
        return "triton is not installed (pip install triton)."
    return None


# --- the parts, each in a process of its own -----------------------------------------------------------------------


def run_part(part: str, seed: int, target: Path, *, small: bool) -> None:
    """Writes what the part found to `target` as it goes: what a later failure leaves is what was found before it."""
    map_import_root()
    import torch

    torch.manual_seed(seed)
    device = torch.device("cpu") if small else torch.device("cuda", 0)
    report: Report = {}

    def note(kind: str, entry: Any) -> None:
        report.setdefault(kind, []).append(entry)
        target.write_text(json.dumps(report))

    runners: dict[str, Callable[..., None]] = {
        "kernels": _kernels, "engine": _engine, "steps": _steps, "timing": _timing
    }  # fmt: skip
    runners[part](device, seed, note, small=small)


def _kernels(device: Any, seed: int, note: Callable[[str, Any], None], *, small: bool) -> None:
    from correctness import run_checks

    for check in run_checks(device, seed, small=small):
        note("checks", asdict(check) | {"passed": check.passed})


def _engine(device: Any, seed: int, note: Callable[[str, Any], None], *, small: bool) -> None:
    from engine import run_engine_checks

    for check in run_engine_checks(device, seed, small=small):
        print(f"  {'ok   ' if check.passed else 'WRONG'} {check.name}: {check.error:.2g}", flush=True)
        note("checks", asdict(check) | {"passed": check.passed})


def _steps(device: Any, seed: int, note: Callable[[str, Any], None], *, small: bool) -> None:
    from engine_steps import StepTiming, run_steps

    for timing in run_steps(device, seed, small=small):
        if isinstance(timing, StepTiming):
            note("steps", asdict(timing) | {"fraction": timing.fraction})
        else:
            note("sampling", asdict(timing))
        print(f"  {timing}", flush=True)


def _timing(device: Any, seed: int, note: Callable[[str, Any], None], *, small: bool) -> None:
    from timing import Stopwatch, render, run_timings

    roofs, timings = run_timings(device, Stopwatch(device), small=small)
    print(render(roofs, timings), flush=True)
    note("roofs", asdict(roofs))
    for timing in timings:
        note("timings", asdict(timing))


# --- all of them ---------------------------------------------------------------------------------------------------


def run_isolated(part: str, seed: int, *, small: bool) -> Report:
    """The part's report, with "failure" where its process did not end well."""
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "report.json"
        command = [sys.executable, __file__, "--only", part, "--report", str(target), "--seed", str(seed)]
        if small:
            command.append("--dry-run")
        began = time.monotonic()
        try:
            status = subprocess.run(command, timeout=None if small else PARTS[part], check=False).returncode
            failure = None if status == 0 else f"exit status {status}"
        except subprocess.TimeoutExpired:
            failure = f"not done after {PARTS[part]} s"
        report: Report = json.loads(target.read_text()) if target.exists() else {}
        report["seconds"] = round(time.monotonic() - began, 1)
        if failure is not None:
            report["failure"] = failure
        return report


def describe(*, small: bool) -> Report:
    import platform

    import torch
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
    if small:
        return {"device": "Triton's interpreter", **versions}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        **versions,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"), help="where the results go")
    parser.add_argument("--seed", type=int, default=None, help="of the random inputs (default: a fresh one)")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="only these (default: all)")
    parser.add_argument("--no-timing", action="store_true", help="only compare")
    parser.add_argument("--dry-run", action="store_true", help="in Triton's interpreter on the CPU, small shapes")
    parser.add_argument("--only", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    small = options.dry_run
    if small:
        os.environ["TRITON_INTERPRET"] = "1"
    if options.only is not None:
        run_part(options.only, options.seed, options.report, small=small)
        return 0
    if not small and (reason := no_gpu_reason()) is not None:
        print(f"Cannot check the GPU: {reason}", file=sys.stderr)
        return NO_GPU
    from engine_report import problems, render_report

    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    result: Report = {
        **describe(small=small),
        "seed": seed,
        "started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }
    print(", ".join(f"{name} {value}" for name, value in result.items()), flush=True)
    result["parts"] = {}
    for part in options.part:
        if options.no_timing and part in TIMINGS:
            continue
        print(f"\n{part}:", flush=True)
        result["parts"][part] = run_isolated(part, seed, small=small)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print("\n" + render_report(result))
    print(f"results in {options.json}")
    wrong = problems(result)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
