"""What is installed: from the wheel and editable, under one import root, with nothing at the top level but `shoal`.

Built from a copy of the tree, so that neither build/ nor an egg-info of an earlier build can add anything.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDERS = ("configs", "kernels", "kvcache", "model_shards", "guardrails", "deployments")


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    copy = tmp_path_factory.mktemp("source")
    for name in listed.stdout.splitlines():
        if (REPOSITORY / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source, cwd=out)
    (path,) = out.glob("*.whl")
    return path


def fresh_environment(folder: Path) -> Path:
    """A virtual environment that sees our dependencies but not our own editable install; returns its interpreter."""
    venv.create(folder, symlinks=True)
    # A .pth line adds a folder without obeying the .pth files inside it, hence without the hook of an editable install.
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def install(python: Path, *what: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    run(*command, "--no-build-isolation", *what, cwd=python.parent)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel."""
    python = fresh_environment(tmp_path_factory.mktemp("installed"))
    install(python, wheel)
    return python


def where(python: Path, module: str, cwd: Path) -> Path:
    return Path(run(python, "-c", f"import {module} as m; print(m.__file__)", cwd=cwd).strip())


def test_the_wheel_holds_one_top_level_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"shoal"}


def test_the_wheel_holds_every_file_beside_the_code(wheel: Path, source: Path) -> None:
    expected = {
        "shoal/" + path.relative_to(source).as_posix()
        for folder in FOLDERS
        for path in (source / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        assert expected - set(archive.namelist()) == set()


def test_the_wheel_is_importable_from_anywhere(installed: Path, tmp_path: Path) -> None:
    found = where(installed, "shoal.kernels.ops", tmp_path)
    assert found.is_relative_to(installed.parents[1])


def test_the_wheel_brings_the_command(installed: Path, tmp_path: Path) -> None:
    assert run(installed.with_name("shoal"), "--help", cwd=tmp_path).startswith("usage: shoal")
    assert run(installed.with_name("shoal"), "version", cwd=tmp_path).startswith("shoal ")


def test_no_bare_kernels_package_is_installed(installed: Path, tmp_path: Path) -> None:
    code = (
        "import importlib.util, sys\n"
        f"folders = {FOLDERS!r}\n"
        "specs = {name: importlib.util.find_spec(name) for name in folders}\n"
        "ours = [name for name, spec in specs.items() if spec and 'shoal' in str(spec.submodule_search_locations)]\n"
        "print(ours)"
    )
    assert run(installed, "-c", code, cwd=tmp_path).strip() == "[]"


def test_an_editable_install_follows_the_tree(source: Path, tmp_path: Path) -> None:
    python = fresh_environment(tmp_path / "editable")
    tree = tmp_path / "tree"
    shutil.copytree(source, tree)
    install(python, "--editable", tree)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert where(python, "shoal.kernels.ops", elsewhere) == tree / "kernels" / "ops.py"
    (tree / "kvcache" / "added_later.py").write_text("VALUE = 7\n")
    assert where(python, "shoal.kvcache.added_later", elsewhere) == tree / "kvcache" / "added_later.py"
    assert run(python.with_name("shoal"), "--help", cwd=elsewhere).startswith("usage: shoal")
