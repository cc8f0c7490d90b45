"""Starts that fail: what is left of them (nothing), and what Serve says about a replica that could not be made."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.configs.errors import ConfigError
from shoal.deployments import local_cluster
from shoal.deployments.local_cluster import ClusterOptions, LocalCluster, deployment_error, descendants, last_error

TRACEBACK = """\
Retrying 2 more time(s). Error:
ray::ServeReplica:shoal:Gateway.initialize_and_get_metadata() (pid=12, ip=192.0.2.2)
  File "/x/replica.py", line 3, in initialize
RuntimeError: Traceback (most recent call last):
  File "/x/build.py", line 90, in plan
    raise ConfigError(text)
shoal.configs.errors.ConfigError: The KV cache does not fit:
  weights      269 MB
  KV cache       1 MB
"""
FITS_NOT = "The KV cache does not fit:\n  weights      269 MB\n  KV cache       1 MB"


def application(status: str, deployment_status: str, message: str) -> Any:
    deployment = SimpleNamespace(status=deployment_status, message=message)
    return SimpleNamespace(status=status, message="deploying", deployments={"Gateway": deployment})


def test_the_last_exception_is_told_with_all_its_lines() -> None:
    assert last_error(TRACEBACK) == FITS_NOT
    assert last_error("no exception here\nbut words") == "but words"
    assert last_error('ValueError: a\n\nDuring handling ...\n\n  File "y"\nKeyError: b') == "b"


def test_what_the_user_can_mend_is_told_at_the_first_try() -> None:
    assert deployment_error(application("DEPLOYING", "UPDATING", TRACEBACK)) == FITS_NOT


def test_other_errors_are_told_when_serve_gives_up() -> None:
    crash = "Error:\nTraceback ...\nMemoryError: out of pages"
    assert deployment_error(application("DEPLOYING", "UPDATING", crash)) is None
    failed = deployment_error(application("DEPLOY_FAILED", "DEPLOY_FAILED", crash))
    assert failed == "Gateway could not be started: out of pages"
    assert deployment_error(application("DEPLOY_FAILED", "HEALTHY", "")) == "deploying"
    assert deployment_error(application("RUNNING", "HEALTHY", "")) is None


@pytest.mark.serve
def test_a_start_that_fails_is_tried_twice_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def fail() -> None:
        tries.append(len(list(descendants(os.getpid()))))
        raise ImportError("half an installation")

    monkeypatch.setattr(local_cluster, "_import_serve", fail)
    before = {pid for pid, _ in descendants(os.getpid())}
    cluster = LocalCluster(ClusterOptions())
    try:
        cluster.prepare()
        directory = cluster.token_path.parent
        with pytest.raises(ConfigError, match="Ray could not be started: half an installation"):
            cluster.start()
    finally:
        cluster.stop()
    assert len(tries) == 2
    assert min(tries) >= 2, "GCS and raylet ran"
    assert {pid for pid, _ in descendants(os.getpid())} <= before
    assert not directory.exists()
