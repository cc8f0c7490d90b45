"""`shoal serve`: its settings, what it refuses before anything starts, and that it stops all that it started."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.configs.errors import ConfigError
from shoal.deployments.cli import serve
from shoal.deployments.local_cluster import check_port, descendants, free_port, start_time

SHOAL = [sys.executable, "-c", "import sys; from shoal.deployments.cli.main import main; sys.exit(main())"]


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers(dest="command"))
    return parser.parse_args(["serve", *arguments])


# --- settings -----------------------------------------------------------------------------------------------------


def test_options_become_settings(tmp_path: Path) -> None:
    config = serve.app_config(
        parse(
            *("smollm2-135m", "--max-model-len", "512", "--kv-cache-memory", "64MiB", "--dtype", "float32"),
            *("--served-model-name", "mine", "--engine", '{"block_size": 32}', "--deny-list", str(tmp_path / "w.txt")),
        )
    )
    engine = config.engine
    assert (engine.model, engine.max_model_len, engine.kv_cache_memory) == ("smollm2-135m", 512, 64 << 20)
    assert (engine.block_size, engine.served_model_name, engine.dtype) == (32, "mine", "float32")
    assert config.guard.deny_list == tmp_path / "w.txt"
    assert config.wiring.mode == "colocated"


def test_options_override_the_file_and_decide_the_wiring(repository: Path) -> None:
    file = str(repository / "configs" / "smollm2-local.yaml")
    config = serve.app_config(parse("--config", file, "--max-num-seqs", "3"))
    assert (config.engine.model, config.engine.max_num_seqs, config.wiring.mode) == ("smollm2-135m", 3, "colocated")
    assert serve.app_config(parse("--config", file, "--separate")).wiring.mode == "separate"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "Name a model"),
        (("x", "--engine", '{"modle": 1}'), "engine.modle"),
        (("x", "--max-num-seqs", "0"), "max_num_seqs"),
        (("--config", "/no/such/file.yaml"), "cannot be read"),
    ],
)
def test_wrong_settings_are_named(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        serve.app_config(parse(*arguments))


def test_a_port_in_use_is_found() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"Cannot listen on 127\.0\.0\.1"):
            check_port("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ConfigError):
        check_port("127.0.0.1", 70000)


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def corrupt_gguf(tmp_path: Path) -> Path:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 200)
    return path


def refused(arguments: list[str], tmp_path: Path) -> str:
    """Runs the command to its end; checks how it ended and returns what it said."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ran = subprocess.run(
        [*SHOAL, "serve", *arguments], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert ran.returncode == 2, ran.stderr
    assert "Traceback" not in ran.stderr
    assert "starting Ray\n" not in ran.stderr
    assert not list(tmp_path.glob("shoal-*")), "nothing is left behind"
    return ran.stderr


def test_an_unknown_model_is_refused(tmp_path: Path) -> None:
    assert "no-such-model" in refused(["no-such-model", "--port", str(free_port())], tmp_path)


def test_a_corrupt_file_is_refused(corrupt_gguf: Path, tmp_path: Path) -> None:
    assert "broken.gguf" in refused([str(corrupt_gguf), "--port", str(free_port())], tmp_path)


def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "Cannot listen" in refused(["smollm2-135m", "--port", str(taken.getsockname()[1])], tmp_path)


def test_a_bad_deny_list_is_refused(tiny_script: Path, tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("fine\n(broken\n")
    arguments = [f"scripted:{tiny_script}", "--deny-list", str(words), "--port", str(free_port())]
    assert "words.txt:2" in refused(arguments, tmp_path)


@pytest.mark.real_model
def test_checking_needs_no_torch(smollm2: Any) -> None:
    """It is the replica that needs it: here it would only cost seconds and memory."""
    program = """
import argparse, sys
from shoal.deployments.cli import serve
parser = argparse.ArgumentParser()
serve.add_parser(parser.add_subparsers())
served = serve.preflight(serve.app_config(parser.parse_args(["serve", "smollm2-135m"])))
print(served.name, served.files[0].name, "torch" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split() == ["smollm2-135m", "SmolLM2-135M-Instruct.Q4_1.gguf", "False"]


@pytest.fixture
def tiny_script(tiny_tokenizer: Path, tmp_path: Path) -> Path:
    path = tmp_path / "answers.json"
    script = {"tokenizer": str(tiny_tokenizer), "default": {"pieces": ["word "], "eos": False, "delay_ms": 30}}
    path.write_text(json.dumps(script))
    return path


class Running:
    """`shoal serve` in a process of its own, with everything it has printed."""

    def __init__(self, arguments: list[str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [*SHOAL, "serve", *arguments, "--port", str(self.port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_until(self, text: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)

    def directory(self) -> Path:
        """Where its cluster keeps its files, as Ray's own processes were told."""
        for pid, _ in descendants(self.process.pid):
            found = re.search(rb"temp.dir=([^\0]+)", Path(f"/proc/{pid}/cmdline").read_bytes())
            if found:
                return Path(found.group(1).decode()).parent
        raise AssertionError("no process of Ray is running")


@pytest.fixture
def run_serve() -> Iterator[Any]:
    started: list[Running] = []

    def start(*arguments: str) -> Running:
        started.append(Running(list(arguments)))
        return started[-1]

    yield start
    for running in started:
        if running.process.poll() is None:
            running.process.terminate()
            running.process.wait(60)


def listening_addresses(port: int) -> set[str]:
    """Local addresses (hexadecimal, as the kernel prints them) that listen on `port`."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}


@pytest.mark.serve
@pytest.mark.parametrize("ingress", ["direct", "haproxy"])
def test_it_serves_answers_and_stops_everything(run_serve: Any, tiny_script: Path, ingress: str) -> None:
    running = run_serve(f"scripted:{tiny_script}", "--ingress", ingress, "--engine", '{"max_model_len": 512}')
    running.wait_until("Try:", 240)
    assert "starting Ray Serve" in running.output
    below = set(descendants(running.process.pid))
    assert not [name for pid, _ in below if (name := _needless(pid))], "processes that serving does not need"
    directory = running.directory()
    assert (directory / "auth_token").stat().st_mode & 0o777 == 0o600
    assert listening_addresses(running.port) == {"0100007F"}, "on loopback only"

    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=30.0).json()
    assert answer["usage"]["completion_tokens"] == 20

    with httpx.stream(
        "POST", f"{running.url}/v1/chat/completions", json={**body, "max_tokens": 60, "stream": True}, timeout=30.0
    ) as response:
        lines = response.iter_lines()
        next(lines)
        running.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]", "a running answer may end"
    assert any('"finish_reason":"length"' in line for line in rest)

    assert running.process.wait(90) == 0, running.output
    assert "stopped" in running.output
    assert "Traceback" not in running.output
    assert not _alive(below)
    assert not directory.exists()
    with pytest.raises(httpx.ConnectError):
        httpx.get(running.url)


def _needless(pid: int) -> str | None:
    """Its command line, when it is one of Ray's processes that only cost memory and time here."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return command if re.search(r"dashboard/dashboard\.py|monitor\.py", command) else None


def _alive(processes: set[tuple[int, str]]) -> set[tuple[int, str]]:
    return {(pid, started) for pid, started in processes if start_time(pid) == started}


@pytest.mark.serve
@pytest.mark.real_model
def test_what_only_the_engine_can_refuse_stops_everything(smollm2: Any) -> None:
    sizes = ["--max-model-len", "4096", "--kv-cache-memory", "1MiB"]
    ran = subprocess.run(
        [*SHOAL, "serve", "smollm2-135m", *sizes, "--port", str(free_port())],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ran.returncode == 2, ran.stderr
    assert "Traceback" not in ran.stderr
    assert "max_model_len=4096" in ran.stderr
    assert "1 MiB are left for the KV cache" in " ".join(ran.stderr.split()), "with the arithmetic"
    assert "stopped" in ran.stderr


@pytest.mark.serve
def test_ctrl_c_while_it_starts_leaves_nothing(run_serve: Any, tiny_script: Path) -> None:
    running = run_serve(f"scripted:{tiny_script}")
    running.wait_until("starting Ray Serve", 120)
    below, directory = set(descendants(running.process.pid)), running.directory()
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(120) == 0
    assert not _alive(below)
    assert not directory.exists()
