"""Checks the Triton kernels on a real GPU, then times them against what the GPU can do.

    python tests/gpu/check.py [--json FILE] [--seed N] [--no-timing]

from the repository root, on a machine with an NVIDIA GPU, torch >= 2.11 and triton >= 3.6; nothing of the project needs
to be installed and no network is used. First every kernel is compared with its reference on fresh random inputs (the
seed is printed and can be given again), then paged decode is timed against the measured copy bandwidth, prefill against
the measured bfloat16 matmul rate, the element-wise kernels against bandwidth, with torch's scaled_dot_product_attention
on contiguous keys in the same run. Prints one table and writes JSON. Exit status: 0 all agree, 1 some do not, 2 no GPU.

Not yet run on a GPU. `--dry-run` goes through everything in Triton's interpreter on the CPU with small shapes and
measures nothing: it proves this script and the kernels' arithmetic, not their speed.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import time
import types
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = 2


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"), help="where the results go")
    parser.add_argument("--seed", type=int, default=None, help="of the random inputs (default: a fresh one)")
    parser.add_argument("--no-timing", action="store_true", help="only compare with the reference")
    parser.add_argument("--dry-run", action="store_true", help="in Triton's interpreter on the CPU, small shapes")
    options = parser.parse_args()
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    elif (reason := no_gpu_reason()) is not None:
        print(f"Cannot check the GPU kernels: {reason}", file=sys.stderr)
        return NO_GPU
    map_import_root()

    import torch
    import triton
    from correctness import run_checks
    from timing import Stopwatch, render, run_timings

    device = torch.device("cpu" if options.dry_run else "cuda")
    name = "Triton's interpreter" if options.dry_run else torch.cuda.get_device_name(device)
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}, seed {seed}", flush=True)
    torch.manual_seed(seed)
    started = time.monotonic()

    checks = run_checks(device, seed, small=options.dry_run)
    failed = [check for check in checks if not check.passed]
    print(f"{len(checks) - len(failed)} of {len(checks)} comparisons with the reference agree", flush=True)

    timings = []
    if not options.no_timing:
        roofs, timings = run_timings(device, Stopwatch(device), small=options.dry_run)
        print(render(roofs, timings))
    result = {
        "device": name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
        "checks": [asdict(check) for check in checks],
        "roofs": None if options.no_timing else asdict(roofs),
        "timings": [asdict(timing) for timing in timings],
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['seconds']} s, results in {options.json}")
    for check in failed:
        print(f"WRONG: {check.name}: error {check.error:.3g}, allowed {check.allowed:.3g}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
