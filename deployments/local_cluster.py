"""A Ray cluster of one machine for `shoal serve` and the tests: started, used and wholly stopped by this process."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shoal.configs.errors import ConfigError, ModelLoadError
from shoal.deployments.address import Address, bind

if TYPE_CHECKING:
    from shoal.deployments.ray_head import RayHead

Ingress = Literal["direct", "proxy", "haproxy"]

logger = logging.getLogger("shoal.local_cluster")

_POLL_S = 0.02
_STATUS_EVERY_S = 0.5
_USER_ERRORS = tuple(f"{error.__module__}.{error.__name__}" for error in (ConfigError, ModelLoadError))
_STOP_S = 10.0
_MAX_TEMPORARY_PATH = 8
_CALM = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "2000",
    "REPORTER_UPDATE_INTERVAL_MS": "10000",
    "RAY_memory_monitor_refresh_ms": "1000",
    "RAY_event_stats": "0",
}
"""How often Ray and Serve look around where nothing but one application runs: by default 4 to 20 times as often, which
keeps 7 % of a core busy for ever (docs/operations.md). What the user has set stays."""
_EXCEPTION_LINE = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception): (.*)")


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    host: str = "127.0.0.1"
    port: int = 8000
    ingress: Ingress = "direct"
    """Who listens on host:port. `direct`: the gateway's one replica itself; no proxy runs. `proxy`: Serve's Python
    proxy. `haproxy`: Serve's HAProxy mode, the production ingress; it also opens a statistics and a metrics port on all
    interfaces."""
    dashboard: bool = False
    num_cpus: int = 2
    """Logical ones, which the stages share out (deployments/app.py); not a limit on threads."""


def check_port(host: str, port: int) -> None:
    """Raises ConfigError unless a server could listen there now."""
    bind(Address(host, port)).close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LocalCluster:
    """Ray and Serve on this machine. `stop` leaves no process and no file behind; call it however `start` ended."""

    def __init__(self, options: ClusterOptions) -> None:
        self._options = options
        self._directory: Path | None = None
        self._environment: dict[str, str | None] = {}
        self._descendants: set[tuple[int, str]] = set()
        self._head: RayHead | None = None
        self.dashboard_url: str | None = None

    @property
    def port(self) -> int:
        return self._options.port

    @property
    def token_path(self) -> Path:
        assert self._directory is not None
        return self._directory / "auth_token"

    def prepare(self) -> None:
        """Sets what Ray reads from the environment when it is imported; before anyone imports it."""
        if self._directory is None:
            in_time = "ray" not in sys.modules or os.environ.get("RAY_AUTH_MODE") == "token"
            assert in_time, "Ray was imported without token authentication; its cluster would be open to anyone"
            self._directory = Path(tempfile.mkdtemp(prefix="shoal-", dir=_temporary_directory()))
            self._set_environment(self._directory)

    def start(self) -> None:
        """Starts Ray and connects to it. To be called in the main thread. Takes about two seconds, mostly waiting."""
        self.prepare()
        import ray

        with _explained("Ray"):
            try:
                self._head = self._start_head()
            except Exception as error:
                # Ray gives its processes half a minute, which a busy machine with cold files may need: with warm ones
                # it may not.
                logger.warning("Ray did not start (%s); trying once more", error)
                self._end_descendants()
                self._head = self._start_head()
            try:
                ray.init(address=self._head.address, log_to_driver=False, logging_level=logging.ERROR)
            finally:
                self._note_descendants()
        self.dashboard_url = self._head.dashboard_url

    def _start_head(self) -> RayHead:
        from shoal.deployments.ray_head import HeadOptions, RayHead

        assert self._directory is not None
        options = HeadOptions(self._directory / "ray", self._options.num_cpus, self._options.dashboard)
        try:
            return RayHead(options, meanwhile=_import_serve)
        finally:
            self._note_descendants()

    def start_serve(self) -> None:
        """Starts Serve's controller, and its proxy where there is to be one."""
        from ray import serve

        options = self._options
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        location = "Disabled" if options.ingress == "direct" else "HeadOnly"
        with _explained("Ray Serve"):
            serve.start(proxy_location=location, http_options={"host": options.host, "port": options.port})
        self._note_descendants()

    @property
    def listen(self) -> Address | None:
        """Where the gateway's replica is to listen (`build_graph`); None where an ingress of Serve does."""
        options = self._options
        return Address(options.host, options.port) if options.ingress == "direct" else None

    def run(self, application: Any, name: str, route_prefix: str = "/") -> Any:
        """Deploys and waits until every replica is made; returns the ingress handle. Raises ConfigError with what a
        replica's constructor said, when it failed."""
        from ray import serve

        target = serve.RunTarget(application, name, None if self.listen else route_prefix)
        try:
            (handle,) = serve.run_many([target], wait_for_applications_running=False)
            self._wait_until_running(name)
        finally:
            self._note_descendants()
        return handle

    def _wait_until_running(self, name: str) -> None:
        """Serve's own waiting looks once a second, and goes on through errors that no further try can mend."""
        from ray import serve

        while True:
            application = serve.status().applications[name]
            if application.status == "RUNNING":
                return
            error = deployment_error(application)
            if error is not None:
                raise ConfigError(error)
            look_again = time.monotonic() + _STATUS_EVERY_S
            while time.monotonic() < look_again:
                if self.listen is not None and _is_open(self.listen):
                    return
                time.sleep(_POLL_S)

    def stop(self) -> None:
        """Stops whatever `start` and `run` have started, by force where it does not go."""
        try:
            self._stop_ray()
        finally:
            self._end_descendants()
            for name, value in self._environment.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)
                self._directory = None

    def _stop_ray(self) -> None:
        ray = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():
            from ray import serve

            self._note_descendants()
            # Ray prints on standard output that its controller, which is being stopped, has stopped.
            with contextlib.redirect_stdout(io.StringIO()):
                with contextlib.suppress(Exception):
                    # Whatever Serve cannot stop in an orderly way, the end of Ray stops.
                    serve.shutdown()
                ray.shutdown()
        if self._head is not None:
            self._note_descendants()
            self._head.stop()
            self._head = None

    def _set_environment(self, directory: Path) -> None:
        self.token_path.touch(mode=0o600)
        self.token_path.write_text(secrets.token_hex(32))
        settings = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_path),
            "RAY_USAGE_STATS_ENABLED": "0",
            # Ray would set it to the (logical) CPUs of an actor, and torch would compute on one thread.
            "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
            **_ingress_environment(self._options, directory / "h"),
            **{name: os.environ.get(name, value) for name, value in _CALM.items()},
        }
        for name, value in settings.items():
            self._environment[name] = os.environ.get(name)
            os.environ[name] = value

    def _note_descendants(self) -> None:
        self._descendants |= set(descendants(os.getpid()))

    def _end_descendants(self) -> None:
        """The last resort, process by process: a process is known by its id and its start time, so that an id which
        the system has given to someone else meanwhile is left alone."""
        for sign, patience_s in ((None, 3.0), (signal.SIGTERM, 3.0), (signal.SIGKILL, _STOP_S)):
            alive = [process for process in self._descendants if start_time(process[0]) == process[1]]
            if not alive:
                return
            if sign is not None:
                logger.warning("%d processes did not end by themselves; sending %s", len(alive), sign.name)
                for pid, _ in alive:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, sign)
            _wait_until_gone(alive, patience_s)


def _import_serve() -> None:
    import shoal.deployments.app  # noqa: F401  (and Ray Serve with it)


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """What Ray raises is a page of stack; its log files, which are removed, would be no help either."""
    try:
        yield
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ConfigError(f"{what} could not be started: {lines[-1] if lines else type(error).__name__}") from error


def _temporary_directory() -> str:
    """Ray and HAProxy put UNIX sockets some 85 characters below it, and such paths have a limit of about 100: where the
    user's directory for temporary files is too deep, /tmp has to do."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= _MAX_TEMPORARY_PATH else "/tmp"


def _ingress_environment(options: ClusterOptions, directory: Path) -> dict[str, str]:
    # Serve reads these at import, in this process and in every actor.
    if options.ingress == "haproxy":
        return {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
            # Serve's defaults are fixed places, where two clusters of one machine meet.
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(directory / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(directory / "admin.sock"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(directory / "metrics.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(directory / "server-state"),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        }
    return {"RAY_SERVE_ENABLE_DIRECT_INGRESS": "0", "RAY_SERVE_ENABLE_HA_PROXY": "0"}


def _is_open(address: Address) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address.host, address.port), timeout=1.0):
        return True
    return False


def deployment_error(application: Any) -> str | None:
    """What a replica's constructor raised, of the page of stack around it that Serve reports: when Serve has given up,
    or when it is an error of ours that tells the user what to change."""
    failed = application.status == "DEPLOY_FAILED"
    for name, deployment in application.deployments.items():
        if failed and deployment.status not in ("HEALTHY", "UPDATING") and deployment.message.strip():
            return f"{name} could not be started: {last_error(deployment.message)}"
        if any(f"{error}: " in deployment.message for error in _USER_ERRORS):
            return last_error(deployment.message)
    return (str(application.message).strip() or "Ray Serve could not deploy the application.") if failed else None


def last_error(traceback: str) -> str:
    """The message of the last exception in a traceback's text, with all its lines."""
    lines = traceback.strip().splitlines()
    for index in range(len(lines) - 1, -1, -1):
        if found := _EXCEPTION_LINE.fullmatch(lines[index]):
            return "\n".join([found.group(1), *lines[index + 1 :]]).strip()
    return lines[-1].strip()


# --- processes ----------------------------------------------------------------------------------------------------


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """(id, start time) of every process below `pid`."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields:
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    waiting = list(children.get(pid, ()))
    while waiting:
        child = waiting.pop()
        started = start_time(child)
        if started is not None:
            yield child, started
        waiting += children.get(child, ())


def start_time(pid: int) -> str | None:
    """In clock ticks after boot; None when the process is gone (or only waits to be collected)."""
    fields = _stat(pid)
    return None if not fields or fields[0] == "Z" else fields[19]


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command's name, which may hold anything; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _wait_until_gone(processes: list[tuple[int, str]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(start_time(pid) == started for pid, started in processes):
        time.sleep(0.05)
