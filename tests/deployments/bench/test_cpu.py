"""Who used the processors."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.deployments.bench.cpu import CpuMeter, process_tree

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
def test_the_tree_of_a_process_holds_itself() -> None:
    assert os.getpid() in process_tree(os.getpid())
