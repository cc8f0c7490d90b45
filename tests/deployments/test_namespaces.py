"""Two stages on two machines: network namespaces with their own addresses, joined by nothing but a virtual cable."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from shoal.model_shards.weights.sources import ModelSource

pytestmark = [pytest.mark.serve, pytest.mark.real_model]

MEMBER = Path(__file__).with_name("namespace_member.py")
PROMPT = "The capital of France is Paris. " * 24 + "The capital of Italy is"
HIDDEN_BYTES = 576 * 4
"""Of a token's hidden state between the stages: SmolLM2's hidden size in fp32."""


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@dataclass(frozen=True)
class Machine:
    """A namespace."""

    name: str
    address: str
    interface: str

    def start(self, *arguments: str, environment: dict[str, str]) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", self.name, sys.executable, str(MEMBER), *arguments]
        # Standard error goes to the test's own, where pytest keeps it for a failure.
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )

    def received_bytes(self) -> int:
        path = f"/sys/class/net/{self.interface}/statistics/rx_bytes"
        return int(run("ip", "netns", "exec", self.name, "cat", path))

    def pids(self) -> list[int]:
        return [int(pid) for pid in run("ip", "netns", "pids", self.name).split()]


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    """Two, with a cable between them; afterwards neither they nor any process in them is left."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the `ip` command")
    tag = secrets.token_hex(3)
    ends = ((1, "a"), (2, "b"))
    made = [Machine(f"shoal-{tag}-{end}", f"10.213.77.{number}", f"s{tag}{end}") for number, end in ends]
    try:
        for machine in made:
            try:
                run("ip", "netns", "add", machine.name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        first, second = made
        run("ip", "link", "add", first.interface, "netns", first.name, "type", "veth", "peer", "name", second.interface,
            "netns", second.name)  # fmt: skip
        for machine in made:
            inside = ["ip", "-n", machine.name]
            run(*inside, "link", "set", "lo", "up")
            run(*inside, "addr", "add", f"{machine.address}/24", "dev", machine.interface)
            run(*inside, "link", "set", machine.interface, "up")
        yield made
    finally:
        for machine in made:
            remove(machine)
    assert f"shoal-{tag}" not in run("ip", "netns", "list")


def remove(machine: Machine) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):  # it was never made
        deadline = time.monotonic() + 10
        while (pids := machine.pids()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        run("ip", "netns", "del", machine.name)


@contextlib.contextmanager
def members(machines: list[Machine], config: Path) -> Iterator[None]:
    """A Ray cluster of both machines that serves."""
    head, other = machines
    with tempfile.TemporaryDirectory(prefix="shoal-", dir="/tmp") as directory, contextlib.ExitStack() as started:
        token = Path(directory) / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_SERVE_ENABLE_HA_PROXY": "0"}
        place = str(Path(directory) / "ray")
        first = started.enter_context(head.start("head", head.address, place, str(config), environment=environment))
        assert first.stdin is not None
        assert first.stdout is not None
        gcs_address = first.stdout.readline().strip()
        assert gcs_address.startswith(f"{head.address}:"), gcs_address
        second = started.enter_context(other.start("node", other.address, place, gcs_address, environment=environment))
        assert second.stdin is not None
        assert second.stdout is not None
        assert second.stdout.readline() == "joined\n"
        print("joined", file=first.stdin, flush=True)
        assert first.stdout.readline() == "serving\n"
        yield
        for member in (first, second):
            assert member.stdin is not None
            member.stdin.close()
            assert member.wait(60) == 0


def ask(machine: Machine, url: str, **body: object) -> str:
    """Over HTTP, from within a machine."""
    program = (
        "import sys, urllib.request\n"
        "request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {'content-type': 'application/json'})\n"
        "print(urllib.request.urlopen(request, timeout=100).read().decode())\n"
    )
    answer = run("ip", "netns", "exec", machine.name, sys.executable, "-c", program, url, json.dumps(body))
    return str(json.loads(answer)["choices"][0]["text"])


def test_smollm2_answers_from_two_stages_that_talk_over_a_network(
    machines: list[Machine], smollm2: ModelSource, tmp_path: Path
) -> None:
    from shoal.model_shards.llm import LLM
    from shoal.model_shards.sampling.params import SamplingParams

    engine = {"model": "smollm2-135m", "max_model_len": 512, "kv_cache_memory": "64MiB", "num_threads": 1}
    with LLM(**engine) as one_rank:
        (expected,) = one_rank.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=8))
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "engine": {**engine, "pipeline_parallel_size": 2},
                "placement": {"stages_on_separate_nodes": True},
                "gateway": {"drain_s": 1.0},
            }
        )
    )
    head, other = machines
    with members(machines, config):
        before = [machine.received_bytes() for machine in machines]
        url = f"http://{head.address}:8000/v1/completions"
        assert ask(other, url, prompt=PROMPT, max_tokens=8, temperature=0) == expected.outputs[0].text
        received = [machine.received_bytes() - count for machine, count in zip(machines, before, strict=True)]
        tokens = len(expected.prompt_token_ids) + 7
        assert received[1] > tokens * HIDDEN_BYTES, "hidden states did not come over the cable"
