"""Servers of a comparison as processes: started, measured when they first answer, put to sleep, and wholly stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from engines import Engine

from shoal.deployments.bench.memory import TreeMemory, tree_memory
from shoal.deployments.bench.processes import process_tree, start_ticks

START_LIMIT_S = 600.0
SETTLE_S = 1.0
"""After waking up a server has missed timers to catch up with."""


class Server:
    """A started engine. `asleep` servers use no processor at all: their processes are stopped by SIGSTOP."""

    def __init__(self, name: str, engine: Engine, port: int, log: Path) -> None:
        self.name, self.engine, self.url = name, engine, f"http://127.0.0.1:{port}"
        self.log_path, self._log = log, log.open("wb")
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
        self.idle_memory: TreeMemory | None = None
        self.asleep = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for_first_token(self) -> None:
        """Until a one-token chat request is answered; whatever fails before that is start-up. Exits with the place of
        the log when it never is."""
        body: dict[str, Any] = {"model": self.engine.model, "messages": [{"role": "user", "content": "hi"}]}
        data = json.dumps({**body, **self.engine.extra_body, "max_tokens": 1}).encode()
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", data, {"Content-Type": "application/json"})
        while True:
            if self._process.poll() is not None:
                raise SystemExit(f"{self.name} ended with {self._process.returncode}; see {self.log_path}")
            if time.perf_counter() - self._started > START_LIMIT_S:
                raise SystemExit(f"{self.name} gave no token within {START_LIMIT_S:.0f} s; see {self.log_path}")
            try:
                with urllib.request.urlopen(request, timeout=60):
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        self.startup_s = round(time.perf_counter() - self._started, 2)
        self.idle_memory = tree_memory(self.pid)

    def sleep(self) -> None:
        if not self.asleep:
            # Twice: a process may have been started while the first list was made.
            for _ in range(2):
                self._signal_tree(signal.SIGSTOP)
            self.asleep = True

    def wake(self) -> None:
        if self.asleep:
            self._signal_tree(signal.SIGCONT)
            self.asleep = False
            time.sleep(SETTLE_S)

    def _signal_tree(self, number: signal.Signals) -> None:
        for pid in process_tree(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        """Asks politely, then less so; then ends what is left of the tree, process by process."""
        self.wake()
        tree = [(pid, start_ticks(pid)) for pid in process_tree(self.pid)]
        for number, patience in ((signal.SIGINT, 40), (signal.SIGTERM, 20), (signal.SIGKILL, 5)):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(patience)
                break
            except subprocess.TimeoutExpired:
                continue
            except ProcessLookupError:
                break
        for pid, started in tree:
            if started is not None and start_ticks(pid) == started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._log.close()
