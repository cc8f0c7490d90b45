"""`shoal serve`: a model behind an OpenAI-compatible API on this machine, in the foreground until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, get_args

from shoal.configs.errors import ConfigError
from shoal.deployments.cli.main import COMMANDS
from shoal.deployments.cli.options import json_object
from shoal.deployments.local_cluster import ClusterOptions, Ingress, LocalCluster, check_port

if TYPE_CHECKING:
    from shoal.configs.app import AppConfig

_DESCRIPTION = """\
Serves a model on this machine: starts a small Ray cluster and Ray Serve, loads the model, waits until it answers, and
stays in the foreground. Ctrl-C lets running answers end and stops everything that was started. What is wrong with the
settings, the model's files or the port is found before anything starts; what its engine refuses (too little memory)
stops everything again.
"""
_EPILOG = """\
examples:
  shoal serve smollm2-135m                              fetched on first use, then on http://127.0.0.1:8000/v1
  shoal serve ./model.gguf --port 9000 --kv-cache-memory 1GiB
  shoal serve smollm2-135m --deny-list words.txt        block answers that match a regular expression
  shoal serve smollm2-135m --separate                   each stage a Serve deployment of its own
  shoal serve scripted:tests/answers.json               answers from a file, to test clients

On a cluster, use `serve deploy FILE.yaml` (see configs/smollm2-local.yaml).
"""
_ENGINE_OPTIONS = {
    "dtype": "of the stored weights: auto, float32, bfloat16, float16",
    "weights": "how they are kept: dense (in dtype), packed (as the GGUF file has them), int8 (rounded while loading)",
    "max-model-len": "most tokens of one conversation, prompt and answer",
    "kv-cache-memory": "size of the KV cache, such as 512MiB",
    "max-num-seqs": "most sequences that run at once",
    "num-threads": "CPU threads of the model",
    "served-model-name": "the name that clients use",
}
_READY_TIMEOUT_S = 600.0
_PROGRESS_EVERY_S = 10.0
_POLL_S = 0.02


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "serve",
        help=COMMANDS["serve"],
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", nargs="?", help="a name from `shoal models`, a .gguf file, a directory, a hub id, scripted:FILE.json"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    for name, text in _ENGINE_OPTIONS.items():
        number = name in ("max-model-len", "max-num-seqs", "num-threads")
        parser.add_argument(f"--{name}", type=int if number else str, help=text)
    parser.add_argument(
        "--engine", type=json_object, default={}, metavar="JSON", help="other engine settings: '{\"block_size\": 32}'"
    )
    parser.add_argument("--deny-list", type=Path, metavar="FILE", help="block texts that match a pattern in FILE")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings from a YAML file; options override it")
    parser.add_argument("--separate", action="store_true", help="each stage in a deployment of its own")
    parser.add_argument(
        "--ingress",
        choices=get_args(Ingress),
        default="direct",
        help="who listens: the gateway itself (default, cheapest), Serve's Python proxy, or Serve's HAProxy",
    )
    parser.add_argument("--dashboard", action="store_true", help="start Ray's dashboard too (on this machine only)")
    parser.add_argument("--ask", metavar="QUESTION", help="ask this once it is ready, and print the answer")


def run(args: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM. Raises ConfigError, with nothing left running, for what cannot work."""
    options = ClusterOptions(host=args.host, port=args.port, ingress=args.ingress, dashboard=args.dashboard)
    cluster = LocalCluster(options)
    progress = _Progress()
    with _signals() as stop:
        try:
            cluster.prepare()
            check_port(options.host, options.port)
            config = app_config(args)
            progress.say(f"reading {config.engine.model}")
            served = preflight(config)
            stop.check()
            handle = _start(cluster, config, served, progress, stop)
            url = f"http://{_url_host(options.host)}:{options.port}"
            _wait_until_ready(url, progress, stop)
            progress.done()
            _greet(url, served.name, cluster)
            if args.ask:
                _ask(url, served.name, args.ask)
            stop.wait()
            progress.say("stopping: running answers may end")
            _drain(handle, config)
        except _StoppedError:
            pass
        finally:
            progress.say("stopping Ray")
            cluster.stop()
            progress.done("stopped")
    return 0


def app_config(args: argparse.Namespace) -> AppConfig:
    """The settings of the command line over those of --config. Raises ConfigError."""
    from shoal.deployments.config_check import load_app_config, parse_app_config

    values: dict[str, Any] = {"engine": {}, "guard": {}, "wiring": {}}
    if args.config is not None:
        values |= load_app_config(args.config).model_dump(exclude_unset=True)
    engine = {**values["engine"], **args.engine}
    for name in _ENGINE_OPTIONS:
        value = getattr(args, name.replace("-", "_"))
        if value is not None:
            engine[name.replace("-", "_")] = value
    if args.model is not None:
        engine["model"] = args.model
    if "model" not in engine:
        raise ConfigError("Name a model, or a --config file that names one; `shoal models` lists the known ones.")
    guard, wiring = dict(values.get("guard", {})), dict(values.get("wiring", {}))
    if args.deny_list is not None:
        guard["deny_list"] = args.deny_list.resolve()
    # The command line decides the wiring, so that a file made for a cluster serves colocated here.
    wiring["mode"] = "separate" if args.separate else "colocated"
    return parse_app_config({**values, "engine": engine, "guard": guard, "wiring": wiring}, "settings")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is known of a model before anything has started."""

    name: str
    files: tuple[Path, ...]
    """Its weights; none for a scripted model."""


def preflight(config: AppConfig) -> ServedModel:
    """What can be known to be wrong without loading anything: settings, rails, files. What needs torch to be known
    (does the memory suffice?) the replica finds out: importing it here too would cost seconds and 150 MB."""
    from shoal.configs.schema import SCRIPTED
    from shoal.guardrails.pipeline import load_rails

    load_rails(config.guard)
    engine = config.engine
    if engine.model.startswith(SCRIPTED):
        from shoal.model_shards.executor.script_file import read_script_file

        path = Path(engine.model.removeprefix(SCRIPTED)).expanduser()
        read_script_file(path)
        return ServedModel(engine.served_model_name or path.stem, ())
    from shoal.model_shards.weights.open import read_config, weight_files
    from shoal.model_shards.weights.sources import resolve_model

    source = resolve_model(engine.model)
    read_config(source)
    return ServedModel(engine.served_model_name or source.name, tuple(weight_files(source)))


def _start(cluster: LocalCluster, config: AppConfig, served: ServedModel, progress: _Progress, stop: _Stop) -> Any:
    # While Ray starts, which is mostly waiting, files are read ahead and the CPU kernels compiled if they never were.
    warming = threading.Thread(target=_warm_up, args=(config, served), daemon=True)
    warming.start()
    progress.say("starting Ray")
    cluster.start()
    # Ray has put handlers of its own in the place of ours, which would end this process at once.
    stop.install()
    stop.check()
    progress.say("starting Ray Serve")
    cluster.start_serve()
    stop.check()
    progress.say(f"loading {config.engine.model} in its replica")
    from shoal.deployments.app import APP_NAME, build_graph

    return cluster.run(build_graph(config, cluster.listen, ranks_as_processes=True), APP_NAME)


def _warm_up(config: AppConfig, served: ServedModel) -> None:
    """Best effort: the replica does the same, waits for a compilation that runs, and reports what goes wrong."""
    with contextlib.suppress(OSError):
        for path in served.files:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)
    if served.files and config.engine.device != "cuda" and config.engine.backend in (None, "cpu"):
        from shoal.kernels.cpu.build import NativeUnavailableError, build

        with contextlib.suppress(NativeUnavailableError, OSError):
            build()


def _wait_until_ready(url: str, progress: _Progress, stop: _Stop) -> None:
    progress.say("waiting for the first answer")
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while True:
        stop.check()
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health/ready", timeout=5.0):
            return
        if time.monotonic() > deadline:
            raise ConfigError(f"{url} was not ready within {_READY_TIMEOUT_S:g} s.")
        time.sleep(_POLL_S)


def _greet(url: str, model: str, cluster: LocalCluster) -> None:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    print(f"\n{model} is served at {url}/v1 (Ctrl-C stops it). Try:\n")
    print(f"  curl {url}/v1/chat/completions -H 'content-type: application/json' \\\n    -d '{body}'\n")
    if cluster.dashboard_url:
        print(f"  Ray dashboard: {cluster.dashboard_url} (token: {cluster.token_path})\n")
    sys.stdout.flush()


def _ask(url: str, model: str, question: str) -> None:
    """One question over HTTP, streamed to the terminal, with the speed of the answer."""
    from rich.console import Console

    from shoal.deployments.cli.answers import HttpAnswers, Sampling
    from shoal.deployments.cli.conversation import Conversation

    console = Console(highlight=False)
    console.print(f"> {question}", style="bold", markup=False)
    answers = HttpAnswers(url, model, None, Sampling(max_tokens=128, temperature=0.0))
    Conversation(answers, console).say(question)
    console.print()


def _drain(handle: Any, config: AppConfig) -> None:
    """Lets running answers end. If the gateway does not answer any more, there is nothing to wait for."""
    with contextlib.suppress(Exception):
        handle.drain.remote().result(timeout_s=config.gateway.drain_s + 5.0)


def _url_host(host: str) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    return f"[{shown}]" if ":" in shown and not shown.startswith("[") else shown


class _StoppedError(Exception):
    """A signal came while something was being started."""


class _Stop:
    """Set by a signal. Ray is started and stopped between looks at it, never in the middle."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._previous: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        for sign in (signal.SIGINT, signal.SIGTERM):
            self._previous.setdefault(sign, signal.signal(sign, self._on_signal))

    def restore(self) -> None:
        for sign, handler in self._previous.items():
            signal.signal(sign, handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._event.set()

    def check(self) -> None:
        if self._event.is_set():
            raise _StoppedError

    def wait(self) -> None:
        self._event.wait()


@contextlib.contextmanager
def _signals() -> Iterator[_Stop]:
    stop = _Stop()
    stop.install()
    try:
        yield stop
    finally:
        stop.restore()


class _Progress:
    """What is being done and since when; repeated while it lasts."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._step: str | None = None
        self._changed = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._repeat, daemon=True).start()

    def say(self, step: str) -> None:
        with self._lock:
            self._step = step
        self._print(step)
        self._changed.set()

    def done(self, word: str = "ready") -> None:
        with self._lock:
            self._step = None
        self._print(word)

    def _print(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started:6.1f} s] {text}", file=sys.stderr, flush=True)

    def _repeat(self) -> None:
        while True:
            if self._changed.wait(_PROGRESS_EVERY_S):
                self._changed.clear()
                continue
            with self._lock:
                step = self._step
            if step is not None:
                self._print(f"still {step}")
