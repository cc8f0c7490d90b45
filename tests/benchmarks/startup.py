"""How long `shoal serve` takes to its first token, which process uses the time, and what the server costs while idle.

    python tests/benchmarks/startup.py smollm2-135m --starts 5 --idle 30 -- --kv-cache-memory 512MiB

What follows `--` goes to `shoal serve`. For each start: when the command said what it was doing, when each process was
born, when the first token of a streamed answer arrived, and the CPU time of every process until then; medians over the
starts (min-max where they differ). For the last one: PSS of every process and its share of one core while nothing
happens, then how long stopping took. Wall times mean something on a quiet machine only; CPU times nearly always.
Linux only.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from statistics import median

from shoal.deployments.bench.memory import tree_memory
from shoal.deployments.bench.processes import process_name, process_tree, processor_seconds
from shoal.deployments.local_cluster import free_port

SHOAL = [sys.executable, "-m", "shoal.deployments.cli.main"]
SAMPLE_S = 0.02
TIMEOUT_S = 300.0


@dataclass
class Start:
    """Times in seconds after the command's process was made."""

    events: dict[str, float] = field(default_factory=dict)
    births: dict[str, float] = field(default_factory=dict)
    """Process -> when it was first seen."""
    cpu: dict[str, float] = field(default_factory=dict)
    """Process -> CPU seconds until the first token."""


class Server:
    """One `shoal serve`, watched from its birth."""

    def __init__(self, model: str, options: list[str]) -> None:
        self.start = Start()
        self.port = free_port()
        self.began = time.monotonic()
        command = [*SHOAL, "serve", model, "--port", str(self.port), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self._births: dict[int, float] = {}
        self._done = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._watch)]
        for thread in self._threads:
            thread.start()

    @property
    def now(self) -> float:
        return time.monotonic() - self.began

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            said = re.sub(r"^\[ *[\d.]+ s\] ", "", line.strip())
            if said and not said.startswith("still ") and not self._done.is_set():
                self.start.events.setdefault(said, self.now)

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_S):
            for pid in process_tree(self.process.pid):
                self._births.setdefault(pid, self.now)

    def wait_for_first_token(self) -> None:
        url = f"http://127.0.0.1:{self.port}"
        while not _answers(f"{url}/health/ready"):
            if self.process.poll() is not None or self.now > TIMEOUT_S:
                raise SystemExit(f"the server did not start: {list(self.start.events)}")
            time.sleep(SAMPLE_S)
        self.start.events["ready"] = self.now
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4, "stream": True}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60.0) as response:
            for line in response:
                if b'"content":"' in line and b'"content":""' not in line:
                    self.start.events["first token"] = self.now
                    break
            self._count()
            response.read()

    def _count(self) -> None:
        self._done.set()
        self._threads[1].join()
        for pid, name in unique_names(list(self._births)).items():
            self.start.births[name] = self._births[pid]
            self.start.cpu[name] = processor_seconds(pid, children=pid == self.process.pid)

    def idle_shares(self, seconds: float) -> dict[int, float]:
        """Process -> share of one core, in per cent."""
        pids = process_tree(self.process.pid)
        before = {pid: processor_seconds(pid, children=False) for pid in pids}
        time.sleep(seconds)
        return {pid: 100 * (processor_seconds(pid, children=False) - before[pid]) / seconds for pid in pids}

    def stop(self) -> float:
        """Seconds until it had ended. Raises SystemExit when it left a process behind."""
        below = {pid: process_name(pid) for pid in process_tree(self.process.pid)}
        began = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        self.process.wait(TIMEOUT_S)
        took = time.monotonic() - began
        if alive := [name for pid, name in below.items() if process_name(pid) == name]:
            raise SystemExit(f"left behind: {alive}")
        return took


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5.0) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def unique_names(pids: list[int]) -> dict[int, str]:
    """Of the living ones, without what a Ray process is doing just now; two of one name are numbered."""
    names: dict[int, str] = {}
    for pid in pids:
        if name := process_name(pid):
            name = name.split(".")[0] if name.startswith("ray::") else name
            again = sum(other.split(" (")[0] == name for other in names.values())
            names[pid] = f"{name} ({again + 1})" if again else name
    return names


def show(title: str, rows: dict[str, list[float]], digits: int = 2) -> None:
    print(f"\n{title}")
    for name, values in rows.items():
        spread = f"  [{min(values):.{digits}f}-{max(values):.{digits}f}]" if len(values) > 1 else ""
        print(f"  {median(values):8.{digits}f}{spread:<16} {name}")


def gather(starts: list[dict[str, float]]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for start in starts for name in start)
    return {name: [start[name] for start in starts if name in start] for name in names}


def report(starts: list[Start]) -> None:
    events = gather([start.events for start in starts])
    show("seconds after the command began", dict(sorted(events.items(), key=lambda row: median(row[1]))))
    show("processes, when they were born", gather([start.births for start in starts]))
    cpu = gather([start.cpu for start in starts])
    cpu["all"] = [sum(start.cpu.values()) for start in starts]
    show("CPU seconds until the first token", dict(sorted(cpu.items(), key=lambda row: -median(row[1]))))


def main() -> None:
    own, _, options = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--idle", type=float, default=30.0, metavar="SECONDS")
    args = parser.parse_args(own.split())
    starts: list[Start] = []
    for number in range(args.starts):
        server = Server(args.model, options.split())
        try:
            server.wait_for_first_token()
            starts.append(server.start)
            if number == args.starts - 1:
                report(starts)
                time.sleep(5.0)
                shares, memory = server.idle_shares(args.idle), tree_memory(server.process.pid)
                assert memory is not None
                print(f"\nidle for {args.idle:g} s: MB of memory (PSS), per cent of one core")
                for process in memory.processes:
                    print(f"  {process.pss_mb:8.1f} {shares.get(process.pid, 0.0):7.2f}  {process.name}")
                print(f"  {memory.pss_mb:8.1f} {sum(shares.values()):7.2f}  all")
        finally:
            took = server.stop()
    print(f"\n  {took:8.2f} seconds to stop")


if __name__ == "__main__":
    main()
