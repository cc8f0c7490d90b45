"""The two commands of the README, as far as they can be looked at without running them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
REPOSITORY = Path(__file__).resolve().parents[1]


def make(*arguments: str, **variables: str) -> str:
    # A surrounding `make test` must not hand its own flags and variables down.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    for name in ("PORT", "MODEL", "ASK", "VENV", "PYTEST_ARGS"):
        inherited.pop(name, None)
    done = subprocess.run(
        ["make", *arguments], cwd=REPOSITORY, env={**inherited, **variables}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_alone_explains_itself() -> None:
    text = make()
    assert "make serve" in text
    assert "make test" in text
    assert "PORT=8000 MODEL=smollm2-135m" in text


def test_make_serve_takes_port_and_model() -> None:
    plan = make("-n", "serve", "PORT=9123", "VENV=elsewhere")
    assert 'elsewhere/bin/shoal serve "$MODEL" --port 9123 --ask "$ASK"' in plan
    assert "python3.11 -m venv elsewhere" in plan
    assert "pip --disable-pip-version-check install  'torch==" in plan


def test_what_is_asked_is_only_text(tmp_path: Path) -> None:
    """Quotes in MODEL or ASK reach the command as they are."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    fake = binaries / "shoal"
    fake.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    fake.chmod(0o755)
    for stamp in (".python", ".torch", ".serve"):
        (tmp_path / stamp).touch()
    text = make("serve", "-o", f"{tmp_path}/.serve", VENV=str(tmp_path), ASK='What\'s "$HOME"?', MODEL="a b.gguf")
    assert text == 'serve|a b.gguf|--port|8000|--ask|What\'s "$HOME"?|'


def test_make_test_lints_checks_types_and_tests() -> None:
    plan = make("-n", "test", "VENV=elsewhere", "PYTEST_ARGS=-k one")
    for command in ("ruff check", "ruff format --check", "mypy --config-file", "-m pytest -k one"):
        assert command in plan


def test_ci_runs_make_test() -> None:
    script = REPOSITORY / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "exec make test" in script.read_text()
