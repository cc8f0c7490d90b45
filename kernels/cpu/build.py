"""Builds the native unit on first use and keeps it in a per-user cache.

The cache's key covers the sources, the compiler and the CPU (`-march=native`), so an upgrade or another machine on a
shared home directory builds its own. A cached file ends in the digest of what precedes it (loaders ignore trailing
bytes): a truncated or damaged file is built again instead of being mapped.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-pthread")
COMPILE_TIMEOUT_S = 300
DIGEST_BYTES = 32


class NativeUnavailableError(Exception):
    """The native unit cannot be had here; the message says why and what would help."""


def build(cache: Path | None = None, extra_flags: tuple[str, ...] = ()) -> Path:
    """The path of the shared library, built if the cache does not hold it. Safe in many processes at once.

    Raises NativeUnavailableError when there is no compiler or it fails.
    """
    compiler = find_compiler()
    directory = _private_directory(default_cache() if cache is None else cache)
    library = directory / f"shoal_cpu-{_key(compiler, extra_flags)}.so"
    with _lock(library.with_suffix(".lock")):
        if not is_intact(library):
            _compile(compiler, extra_flags, library)
    return library


def default_cache() -> Path:
    """$XDG_CACHE_HOME/shoal/native, by default in ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "shoal" / "native"


def find_compiler() -> str:
    """$CXX, or the first of g++, c++, clang++ that is on the path."""
    chosen = os.environ.get("CXX")
    for name in (chosen,) if chosen else ("g++", "c++", "clang++"):
        path = shutil.which(name)
        if path is not None:
            return path
    missing = f"CXX={chosen} is not on the path" if chosen else "no C++ compiler was found"
    raise NativeUnavailableError(f"{missing}; install g++ (Debian and Ubuntu: apt-get install g++)")


def is_intact(library: Path) -> bool:
    """Whether the file exists and ends in the digest of its own content."""
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]


def _private_directory(directory: Path) -> Path:
    """The cache, or a fresh temporary directory where it cannot be written. Code is loaded from there: it must be
    nobody else's."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = directory.stat()
        if owner.st_uid != os.getuid() or owner.st_mode & 0o022:
            raise PermissionError(f"{directory} can be written by other users")
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError as error:
        temporary = Path(tempfile.mkdtemp(prefix="shoal-native-"))
        logger.warning("The cache of native code cannot be used (%s); building in %s.", error, temporary)
        return temporary


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One builder at a time: ranks that start together wait for the first instead of compiling the same."""
    with path.open("w") as file:
        # A file system without locks only costs repeated work: the library appears by an atomic rename.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _key(compiler: str, extra_flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for part in (*FLAGS, *extra_flags, compiler, _run([compiler, "--version"]), _cpu()):
        digest.update(part.encode() + b"\0")
    for source in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _cpu() -> str:
    """What `-march=native` depends on: the model and the instruction sets of this CPU."""
    facts = {platform.machine(), platform.processor()}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "flags", "Features", "CPU part")):
                facts.add(line)
    return "\n".join(sorted(facts))


def _compile(compiler: str, extra_flags: tuple[str, ...], library: Path) -> None:
    logger.info("Building the native CPU operators with %s (once; some seconds).", compiler)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        objects: list[tuple[subprocess.Popen[str], Path]] = []
        for source in sorted(SOURCES.glob("*.cpp")):
            target = Path(folder) / f"{source.stem}.o"
            command = [compiler, *FLAGS, *extra_flags, "-c", str(source), "-o", str(target)]
            objects.append((subprocess.Popen(command, stderr=subprocess.PIPE, text=True), target))
        errors = [_wait(process) for process, _ in objects]
        if any(errors):
            raise NativeUnavailableError(f"{compiler} failed: {' '.join(errors).strip()[:1000]}")
        linked = Path(folder) / "linked.so"
        _run([compiler, "-shared", "-pthread", *(str(target) for _, target in objects), "-o", str(linked)])
        content = linked.read_bytes()
        linked.write_bytes(content + hashlib.sha256(content).digest())
        os.replace(linked, library)


def _wait(process: subprocess.Popen[str]) -> str:
    """Empty, or what the compiler said when it failed."""
    try:
        _, stderr = process.communicate(timeout=COMPILE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"it took longer than {COMPILE_TIMEOUT_S} s"
    return "" if process.returncode == 0 else stderr or f"exit status {process.returncode}"


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or ""
        raise NativeUnavailableError(f"{error} {said}".strip()[:1000]) from error
    return done.stdout
