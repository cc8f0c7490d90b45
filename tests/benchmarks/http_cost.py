"""What the way from the engine's step to the socket costs: CPU time per token and per request, by thread.

    python tests/benchmarks/http_cost.py [--layouts colocated,data-plane,serve] [--streams 1,32,128] [--json FILE]

A model that computes nothing (`scripted:`) speaks one token a sequence and step, behind the real gateway and a real
HTTP server in a process of its own; the clients are bare sockets in this process. Steps are paced as a model would pace
them, so that every token is a chunk of its own: without a pause the streams coalesce and each token looks cheap.

Layouts: `colocated` is the gateway under uvicorn; `data-plane` the same with tokens that come over ZMQ, as from an
engine in another process; `serve` is the colocated gateway as a replica of Ray Serve, as under `shoal serve`.

Per token: (CPU of long answers - CPU of short answers) / (tokens between them); per request: what is left of the
answers. `engine` is the thread that schedules, commits and makes text; `loop` is all that HTTP is. Two figures are wall
clock and say nothing on a busy machine: the added TTFT, of one stream on an unpaced model, and by how much steps are
late (`--switch-interval-ms` is how long Python lets a thread keep the interpreter while another waits for it).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from shoal.configs.app import AppConfig
from shoal.model_shards.engine.plan import StepOutput, StepPlan
from shoal.model_shards.executor import scripted

WORDS = "The quick brown fox jumps over the lazy dog while \u201cevery\u201d good boy does fine, said the caf\u00e9.\n"
MESSAGES = [{"role": "user", "content": "Tell me what you know of the history of the city and its people. " * 9}]
SHORT, LONG = 16, 112
"""Output tokens of the two runs whose difference is the cost of a token."""
ANSWERS = 8
"""In each run, at least: few streams answer several times."""
ROLES = (
    ("shoal-engine", "engine"),
    ("shoal-script", "model"),
    ("bench-pace", "model"),
    ("bench-probe", "probe"),
    ("shoal-tokenizer", "tokenizer"),
    ("shoal-ray-metrics", "ray metrics"),
)
COLUMNS = ("loop", "engine", "tokenizer", "ray metrics", "other")
TIMINGS = ("parsed_s", "accepted_s", "first_token_s")


# The server's process -------------------------------------------------------------------------------------------------


class PacedExecutor(scripted.ScriptedExecutor):
    """A scripted model whose step takes `step_s`, whatever is in it."""

    step_s = 0.0
    late_s: ClassVar[list[float]] = []
    """By how much each step took longer than it was asked to: the thread that runs the model had to wait for a CPU, or
    for the interpreter, which the event loop held."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._pace = ThreadPoolExecutor(1, thread_name_prefix="bench-pace")

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        return self._pace.submit(self._wait, plan)

    def _wait(self, plan: StepPlan) -> StepOutput:
        due = time.perf_counter() + PacedExecutor.step_s
        time.sleep(PacedExecutor.step_s)
        PacedExecutor.late_s.append(time.perf_counter() - due)
        return super().submit(plan).result()


def thread_seconds(loop_thread: int) -> dict[str, float]:
    """CPU seconds of this process so far, by what its threads do. `loop_thread`: native id of the one that HTTP runs
    on."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    seconds: dict[str, float] = defaultdict(float)
    for task in os.listdir("/proc/self/task"):
        try:
            nanoseconds = int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue
        name = names.get(int(task), "")
        role = next((role for prefix, role in ROLES if name.startswith(prefix)), "other")
        seconds["loop" if int(task) == loop_thread else role] += nanoseconds / 1e9
    return dict(seconds)


class Timings(logging.Handler):
    """Collects the stages of each request from its access log line."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, float]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append({name: value for name, value in vars(record).items() if name in TIMINGS})


class Probe:
    """The benchmark's view into a server: its CPU time, its stages, and how fast its model is."""

    def __init__(self, switch_interval_s: float) -> None:
        sys.setswitchinterval(switch_interval_s)
        self._loop_thread = threading.get_native_id()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bench-probe")
        self._timings = Timings()
        access = logging.getLogger("shoal.access")
        access.addHandler(self._timings)
        access.setLevel(logging.INFO)
        scripted.ScriptedExecutor = PacedExecutor  # type: ignore[misc]  # `build_engine` looks it up when it is called

    def seconds(self) -> dict[str, float]:
        return thread_seconds(self._loop_thread)

    def pace(self, step_s: float) -> None:
        PacedExecutor.step_s = step_s
        PacedExecutor.late_s.clear()
        self._timings.lines.clear()

    def notes(self) -> tuple[list[float], list[dict[str, float]]]:
        return PacedExecutor.late_s, self._timings.lines

    async def answer(self, command: str, argument: Any) -> Any:
        """On a thread of its own, so that looking at the loop's CPU time costs it none."""
        arguments = [] if argument is None else [argument]
        return await asyncio.get_running_loop().run_in_executor(self._thread, getattr(self, command), *arguments)


async def serve_here(layout: str, config: AppConfig, switch_interval_s: float) -> None:
    """Serves on a free port, which is printed; then obeys commands from standard input, a line each, until its end."""
    import socket

    import uvicorn

    from shoal.deployments.gateway import Gateway, build_shard_group, build_tokenizer
    from shoal.deployments.guard import Guard

    probe = Probe(switch_interval_s)
    if layout == "colocated":
        gateway, group = await Gateway.colocated(config), None
    else:
        group = await asyncio.to_thread(build_shard_group, config)
        gateway = await Gateway.separate(config, build_tokenizer(config), Guard(config.guard), group)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    server = uvicorn.Server(uvicorn.Config(gateway.asgi, log_level="warning", lifespan="off", access_log=False))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    # As Serve does when a replica has been made; else one collection in some bursts goes through all of torch.
    gc.collect()
    gc.freeze()
    print(json.dumps(listener.getsockname()[1]), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await probe.answer(*json.loads(line))), flush=True)
    server.should_exit = True
    await serving
    await gateway.close()
    if group is not None:
        await group.shutdown()


# The client's process -------------------------------------------------------------------------------------------------


@dataclass
class Server:
    port: int
    ask: Callable[..., Awaitable[Any]]


@contextmanager
def child_server(layout: str, config: AppConfig, switch_interval_s: float) -> Iterator[Server]:
    arguments = [sys.executable, __file__, "--child", layout, config.model_dump_json(), str(switch_interval_s)]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def exchange(command: str, argument: Any) -> Any:
        print(json.dumps([command, argument]), file=stdin, flush=True)
        return json.loads(stdout.readline())

    async def ask(command: str, argument: Any = None) -> Any:
        return await asyncio.to_thread(exchange, command, argument)

    try:
        yield Server(json.loads(stdout.readline()), ask)
    finally:
        stdin.close()
        process.wait(timeout=30)


@contextmanager
def serve_server(config: AppConfig, switch_interval_s: float) -> Iterator[Server]:
    """The gateway's replica as `shoal serve` deploys it, with a probe."""
    from shoal.deployments.local_cluster import ClusterOptions, LocalCluster, free_port

    cluster = LocalCluster(ClusterOptions(port=free_port()))
    cluster.prepare()  # before Ray is imported
    from ray import serve

    from shoal.deployments.gateway import Gateway
    from shoal.deployments.listener import Listener
    from shoal.deployments.ray_metrics import RayMirror

    address = cluster.listen
    assert address is not None

    @serve.deployment(name="Gateway", ray_actor_options={"num_cpus": 1})
    class Replica:
        async def __init__(self) -> None:  # type: ignore[misc]  # Serve awaits it
            self.probe = http_cost().Probe(switch_interval_s)
            self.gateway = await Gateway.colocated(config, RayMirror)
            self.listener = Listener(self.gateway.asgi, address, 1000)
            await self.listener.start()

        async def command(self, name: str, argument: Any) -> Any:
            return await self.probe.answer(name, argument)

        async def __del__(self) -> None:
            await self.gateway.close()
            await self.listener.stop()

    try:
        cluster.start()
        cluster.start_serve()
        handle = cluster.run(Replica.bind(), "http-cost")

        async def ask(command: str, argument: Any = None) -> Any:
            return await handle.command.remote(command, argument)

        yield Server(cluster.port, ask)
    finally:
        cluster.stop()


def http_cost() -> Any:
    """This file as a module: what Ray pickles by value would be another class than the one whose pace is set."""
    import importlib

    sys.path.insert(0, str(Path(__file__).parent))
    return importlib.import_module("http_cost")


@dataclass
class Answer:
    ttft_s: float
    events: int


async def request(port: int, tokens: int, *, stream: bool) -> Answer:
    """One answer over a connection of its own, read as bytes."""
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": tokens, "ignore_eos": True}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    started = time.perf_counter()
    writer.write(head.encode() + data)
    first, events, status, tail = 0.0, 0, b"", b""
    while piece := await reader.read(65536):
        status = status or piece[:15]
        if not first and b'"content"' in piece:
            first = time.perf_counter() - started
        events += piece.count(b'"content":"') - piece.count(b'"content":""')
        tail = (tail + piece)[-64:]
    writer.close()
    if b" 200 " not in status or (stream and b"[DONE]" not in tail):
        raise RuntimeError(f"an answer failed: {status!r} ... {tail!r}")
    return Answer(first, events)


async def burst(server: Server, streams: int, tokens: int, *, stream: bool) -> tuple[dict[str, float], list[Answer]]:
    """CPU seconds of some rounds of `streams` answers at once, by thread, `client` included; and the answers."""
    answers: list[Answer] = []
    before, mine = await server.ask("seconds"), time.process_time()
    for _ in range(-(-ANSWERS // streams)):
        answers += await asyncio.gather(*(request(server.port, tokens, stream=stream) for _ in range(streams)))
    used = {"client": time.process_time() - mine}
    after = await server.ask("seconds")
    return used | {role: after[role] - before.get(role, 0.0) for role in after}, answers


async def cost(server: Server, streams: int, *, stream: bool, repeats: int) -> dict[str, Any]:
    """Medians over `repeats` of microseconds per token and per request, by thread."""
    step_s = (5 + 0.5 * streams) / 1e3
    await server.ask("pace", step_s)
    await burst(server, streams, SHORT, stream=stream)
    per_token, per_request, events = defaultdict(list), defaultdict(list), 0
    for _ in range(repeats):
        short, _ = await burst(server, streams, SHORT, stream=stream)
        long, answers = await burst(server, streams, LONG, stream=stream)
        events += sum(answer.events for answer in answers)
        for role in short.keys() | long.keys():
            slope = (long.get(role, 0.0) - short.get(role, 0.0)) / (len(answers) * (LONG - SHORT))
            per_token[role].append(slope * 1e6)
            per_request[role].append((short.get(role, 0.0) / len(answers) - slope * SHORT) * 1e6)
    late_ms = sorted(1e3 * seconds for seconds in (await server.ask("notes"))[0])
    return {
        "streams": streams,
        "mode": "stream" if stream else "whole",
        "tokens_per_event": repeats * len(answers) * LONG / events if stream else None,
        "step_ms": step_s * 1e3,
        "late_ms": {"p50": statistics.median(late_ms), "p99": late_ms[int(0.99 * (len(late_ms) - 1))]},
        "us_per_token": {role: statistics.median(values) for role, values in per_token.items()},
        "us_per_request": {role: statistics.median(values) for role, values in per_request.items()},
    }


async def first_tokens(server: Server, count: int) -> dict[str, float]:
    """Medians in ms, one request at a time: the client's TTFT and the server's stages."""
    await server.ask("pace", 0.0)
    answers = [await request(server.port, 1, stream=True) for _ in range(count)]
    _, lines = await server.ask("notes")
    stages = {name: [line[name] for line in lines if name in line] for name in TIMINGS}
    medians = {name.removesuffix("_s"): statistics.median(values) * 1e3 for name, values in stages.items() if values}
    return {**medians, "ttft": statistics.median(answer.ttft_s for answer in answers) * 1e3}


async def measure(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    await request(server.port, 4, stream=True)
    runs = []
    for streams in options.streams:
        for mode in options.modes:
            runs.append(await cost(server, streams, stream=mode == "stream", repeats=options.repeats))
            print(".", end="", file=sys.stderr, flush=True)
    return {"runs": runs, "first_token_ms": await first_tokens(server, 30)}


def show(layout: str, result: dict[str, Any]) -> None:
    stages = ", ".join(f"{name} {value:.2f}" for name, value in result["first_token_ms"].items())
    print(f"\n{layout}: one stream, model of no time, ms since the request: {stages}")
    print(
        f"{'':16}{'server':>9}"
        + "".join(f"{column:>12}" for column in (*COLUMNS, "client"))
        + "  tokens/event, late steps"
    )
    for run in result["runs"]:
        for unit in ("us_per_token", "us_per_request"):
            values = run[unit]
            total = sum(values.get(column, 0.0) for column in COLUMNS)
            label = f"{run['streams']:>4} {run['mode']:<6} {'token' if unit == 'us_per_token' else 'req.'}"
            cells = "".join(f"{values.get(column, 0.0):>12.1f}" for column in (*COLUMNS, "client"))
            per_event = f"{run['tokens_per_event']:.2f}, " if run["tokens_per_event"] else ""
            late = "p50 {p50:.2f} p99 {p99:.2f} ms".format(**run["late_ms"])
            print(f"{label:16}{total:>9.1f}{cells}" + (f"  {per_event}{late}" if unit == "us_per_token" else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", type=lambda text: text.split(","), default=["colocated", "data-plane"])
    parser.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[1, 32, 128])
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["stream", "whole"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--switch-interval-ms", type=float, default=sys.getswitchinterval() * 1e3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        layout, config, switch_interval_s = options.child
        from uvicorn.loops.auto import auto_loop_factory

        with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
            runner.run(http_cost().serve_here(layout, AppConfig.model_validate_json(config), float(switch_interval_s)))
        return
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "speaker.json"
        script.write_text(json.dumps({"default": {"pieces": [WORDS], "eos": False}}))
        engine = {"model": f"scripted:{script}", "max_num_batched_tokens": 32768, "max_num_seqs": 256}
        config = AppConfig.model_validate({"engine": engine})
        for layout in options.layouts:
            interval_s = options.switch_interval_ms / 1e3
            start = serve_server if layout == "serve" else partial(child_server, layout)
            with start(config, interval_s) as server:
                results[layout] = asyncio.run(measure(server, options))
            show(layout, results[layout])
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
