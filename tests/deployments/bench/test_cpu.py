"""Who used the processors."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.deployments.bench.cpu import CpuMeter
from shoal.deployments.bench.memory import tree_memory
from shoal.deployments.bench.processes import process_name, process_tree

needs_proc = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="reads /proc (Linux)")


def test_own_work_is_the_clients_share() -> None:
    meter = CpuMeter()
    used = time.process_time()
    while time.process_time() - used < 0.2:
        pass
    shares = meter.shares()
    assert shares.client > 0
    assert shares.server is None
    assert shares.foreign is None


@needs_proc
def test_a_servers_children_belong_to_it() -> None:
    # The shell starts a child that burns 0.3 s of processor time and then waits.
    burn = (
        "import time; t = time.process_time()\nwhile time.process_time() - t < 0.3: pass\nprint(1, flush=True); input()"
    )
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    server = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        meter = CpuMeter(server.pid)
        assert server.stdout is not None
        server.stdout.readline()
        assert len(process_tree(server.pid)) == 2
        shares = meter.shares()
        assert shares.server is not None
        assert shares.server > shares.client
        assert shares.foreign is not None
    finally:
        server.communicate(b"\n")


@needs_proc
def test_whoever_disturbs_is_named() -> None:
    burn = "import time; print(1, flush=True); t = time.process_time()\nwhile time.process_time() - t < 0.4: pass"
    quiet = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        meter = CpuMeter(quiet.pid)
        noisy = subprocess.Popen(
            [sys.executable, "-c", f"{burn}\nprint(2, flush=True); input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert noisy.stdout is not None
        assert [noisy.stdout.readline() for _ in range(2)] == [b"1\n", b"2\n"]
        shares = meter.shares()
        name = process_name(noisy.pid)
        noisy.communicate(b"\n")
    finally:
        quiet.communicate(b"\n")
    assert shares.foreign_by[name] > 0.01
    assert len(shares.foreign_by) <= 5


@needs_proc
def test_memory_is_stated_for_every_process_of_a_tree() -> None:
    child = "print(1, flush=True); input()"
    code = f"import subprocess, sys; b = bytearray(64 << 20); subprocess.run([sys.executable, '-c', {child!r}])"
    server = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        server.stdout.readline()
        memory = tree_memory(server.pid)
    finally:
        server.communicate(b"\n")
    assert memory is not None
    assert len(memory.processes) == 2
    assert memory.processes[0].pid == server.pid
    assert memory.processes[0].pss_mb > 64 > memory.processes[1].pss_mb
    assert memory.processes[0].peak_rss_mb >= memory.processes[0].pss_mb
    assert memory.to_json()["pss_mb"] == memory.pss_mb == pytest.approx(sum(p.pss_mb for p in memory.processes))
    assert tree_memory(server.pid) is None  # it is gone


@needs_proc
def test_the_tree_of_a_process_holds_itself() -> None:
    assert os.getpid() in process_tree(os.getpid())
