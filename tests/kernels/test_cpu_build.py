"""The native unit's build cache: built once, by one process at a time, never loaded damaged."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shoal.kernels.cpu.build import SOURCES, NativeUnavailableError, build, default_cache, find_compiler, is_intact
from shoal.kernels.cpu.native import Native
from shoal.kernels.registry import select_ops

QUICK = ("-O0",)  # the later -O wins: these tests are about files, not speed


@pytest.fixture(autouse=True)
def _needs_a_compiler(native_ops) -> None:
    pass


@pytest.fixture(scope="module")
def built(tmp_path_factory, native_ops) -> Path:
    return build(tmp_path_factory.mktemp("cache"), QUICK)


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_second_build_compiles_nothing(built) -> None:
    before = built.stat()
    assert build(built.parent, QUICK) == built
    assert built.stat().st_mtime_ns == before.st_mtime_ns


def test_processes_that_build_at_once_get_the_same_whole_file(tmp_path) -> None:
    log = tmp_path / "compilations"
    counting = script(
        tmp_path / "counting", f'case "$*" in *" -c "*) echo x >> {log};; esac\nexec {find_compiler()} "$@"'
    )
    code = (
        "import sys; from pathlib import Path; from shoal.kernels.cpu.build import build\n"
        f"print(build(Path(sys.argv[1]), {QUICK!r}))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache")]
    environment = os.environ | {"CXX": counting}
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(3)]
    paths = {builder.communicate(timeout=300)[0].strip() for builder in builders}
    assert [builder.returncode for builder in builders] == [0, 0, 0]
    assert len(paths) == 1
    assert is_intact(Path(paths.pop()))
    assert len(log.read_text().splitlines()) == len(list(SOURCES.glob("*.cpp")))  # each once: the others waited


@pytest.mark.parametrize("damage", [b"", b"\x7fELF", None])
def test_a_damaged_file_is_built_again(built, tmp_path, damage) -> None:
    content = built.read_bytes()
    library = tmp_path / built.name
    broken = bytearray(content)
    broken[len(content) // 2] ^= 1
    library.write_bytes(bytes(broken) if damage is None else damage)
    assert not is_intact(library)
    assert build(tmp_path, QUICK) == library
    assert is_intact(library)
    assert Native(library).panel_outputs > 0
    assert {path.suffix for path in tmp_path.iterdir()} == {".so", ".lock"}  # no litter


def test_a_failing_compiler_is_reported_with_what_it_said(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(
        "CXX", script(tmp_path / "c++", 'test "$1" = --version && exit 0\necho no space left >&2; exit 1')
    )
    with pytest.raises(NativeUnavailableError, match="no space left"):
        build(tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_compiler_that_cannot_start_is_reported(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CXX", script(tmp_path / "c++", "exit 3"))
    with pytest.raises(NativeUnavailableError, match="exit status 3"):
        build(tmp_path / "cache")


def test_no_compiler_says_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeUnavailableError, match=r"no C\+\+ compiler was found; install g\+\+ .*apt-get"):
        build(tmp_path)
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(NativeUnavailableError, match=r"CXX=/nowhere/c\+\+ is not on the path"):
        build(tmp_path)


def test_a_library_that_does_not_load_falls_back(tmp_path, monkeypatch, caplog) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr("shoal.kernels.cpu.native._load", lambda: Native(broken))
    with caplog.at_level(logging.WARNING, logger="shoal"):
        assert select_ops(torch.device("cpu"), torch.float32, backend="cpu").name == "torch_cpu"
    assert "could not be loaded" in caplog.text


def test_a_directory_that_others_can_write_is_not_used(built, tmp_path, caplog) -> None:
    """A library there could be anybody's code."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with caplog.at_level(logging.WARNING, logger="shoal"):
        library = build(shared, QUICK)
    assert library.parent != shared
    assert library.parent.stat().st_mode & 0o077 == 0
    assert "can be written by other users" in caplog.text


def test_the_cache_is_the_users(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "shoal" / "native"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache() == tmp_path / "home" / ".cache" / "shoal" / "native"
