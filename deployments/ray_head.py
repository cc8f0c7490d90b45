"""The processes of a Ray cluster of one machine: those that serving needs, and no others.

`ray.init()` also starts, and waits for, a dashboard process (even with `include_dashboard=False`), a monitor of the
autoscaler and a log monitor: three Python processes, some 175 MB and two seconds of every start, that do nothing here.
There is no public switch for the first, so this leans on private classes of the Ray version that the project pins;
`ray.cluster_utils.Cluster` uses them in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # compiled

_OBJECT_STORE_BYTES = 80_000_000
"""Nothing large goes through Ray here; this is about the least that Ray takes."""


@dataclass(frozen=True, slots=True)
class HeadOptions:
    directory: Path
    """For sockets and logs; below it a path may have some 85 more characters."""
    num_cpus: int
    dashboard: bool


class RayHead:
    """GCS, raylet and its agents, as children of this process: they end when it does, however it does.

    To be made in the main thread (Linux ties them to the thread that started them). Raises whatever Ray raises, with
    nothing left running that the end of this process would not end.
    """

    def __init__(self, options: HeadOptions, meanwhile: Callable[[], None]) -> None:
        """`meanwhile` is called when all processes are started, while they get ready: about a second that is free."""
        parameters = RayParams(
            num_cpus=options.num_cpus,
            object_store_memory=_OBJECT_STORE_BYTES,
            temp_dir=str(options.directory),
            include_dashboard=options.dashboard,
            dashboard_host="127.0.0.1",
            include_log_monitor=False,
            no_monitor=not options.dashboard,
        )
        # A process keeps the first token that it has read: that of its last cluster would be refused by this one.
        AuthenticationTokenLoader.instance().reset_cache()
        self._node = _Node(parameters, meanwhile)

    @property
    def address(self) -> str:
        """Of the cluster, for `ray.init`."""
        return str(self._node.gcs_address)

    @property
    def dashboard_url(self) -> str | None:
        return f"http://{self._node.webui_url}" if self._node.webui_url else None

    def stop(self) -> None:
        """Ends every process; drivers should have disconnected. Idempotent."""
        self._node.kill_all_processes(check_alive=False, allow_graceful=True)


class _Node(Node):  # type: ignore[misc]
    def __init__(self, parameters: RayParams, meanwhile: Callable[[], None]) -> None:
        self._meanwhile = meanwhile
        super().__init__(parameters, head=True, shutdown_at_exit=False, spawn_reaper=True)

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        # Agents and raylet learn of it by a key in the GCS, and do without when that stays unset.
        if include_dashboard:
            super().start_api_server(include_dashboard=include_dashboard, raise_on_failure=raise_on_failure)

    def start_ray_processes(self) -> None:
        super().start_ray_processes()
        self._meanwhile()
