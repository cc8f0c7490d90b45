"""Reader of GGUF files (versions 2 and 3, little-endian): metadata and tensor table; the tensors stay in the file.

Layout, after the GGUF specification (ggml-org/ggml, docs/gguf.md):

    | magic version n_tensors n_kv | n_kv x (key, type, value) | n_tensors x (name, dims, type, offset) | pad | data |

Every count and length is checked against what is left of the file before anything is allocated for it, so a corrupt or
cut file ends in one ModelLoadError that says where, whatever its bytes are.
"""

from __future__ import annotations

import logging
import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from shoal.configs.errors import ModelLoadError
from shoal.model_shards.weights.ggml_types import GGML_TYPES

logger = logging.getLogger(__name__)

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_NAME_BYTES = 1 << 16
MAX_ARRAY_DEPTH = 2
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20

_STRING, _ARRAY, _BOOL = 8, 9, 7
# value type id -> numpy code of its little-endian scalar
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    _BOOL: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_MIN_KV_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One row of the tensor table."""

    name: str
    type_id: int
    """ggml type number, a key of GGML_TYPES."""
    type_name: str
    shape: tuple[int, ...]
    """In torch order, outermost first (the file stores it innermost first)."""
    block_elements: int
    block_bytes: int
    offset: int
    """Of the first byte, from the start of the file."""

    @property
    def num_rows(self) -> int:
        """Product of all dims but the innermost."""
        rows = 1
        for dim in self.shape[:-1]:
            rows *= dim
        return rows

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.block_elements * self.block_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes


class GGUFFile:
    """An open GGUF file. `metadata` maps keys to Python values (arrays to lists); `tensors` maps names to the table's
    rows in file order. The mapping lives as long as this object or a view taken from it."""

    def __init__(self, path: Path) -> None:
        started = time.monotonic()
        self.path = path
        self._map = _map_file(path)
        cursor = _Cursor(self._map, path)
        num_tensors, num_values = _read_header(cursor)
        self.metadata: dict[str, Any] = _read_metadata(cursor, num_values)
        self.tensors: dict[str, GGUFTensor] = _read_tensor_table(cursor, num_tensors, self._alignment())
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise ModelLoadError(
                f"{path} is one of {self.metadata['split.count']} parts of a split GGUF model, which is not supported. "
                "Merge the parts first with `llama-gguf-split --merge FIRST_PART OUT.gguf`."
            )
        logger.debug("read GGUF header of %s in %.2f s", path.name, time.monotonic() - started)

    def rows(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """The tensor's bytes as [num_rows, blocks per row, block_bytes], a read-only view of the mapped file."""
        view = np.frombuffer(self._map, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        return view.reshape(tensor.num_rows, -1, tensor.block_bytes)

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        ok = isinstance(alignment, int) and 0 < alignment <= MAX_ALIGNMENT and alignment & (alignment - 1) == 0
        if not ok:
            raise _corrupt(self.path, f"general.alignment is {alignment!r}; a power of two was expected")
        return int(alignment)


def open_gguf(path: Path) -> GGUFFile:
    """The file, read once as long as someone holds it: the engine, the tokenizer and the loader each want a part of a
    header that may have hundreds of thousands of strings. Raises ModelLoadError."""
    status = path.stat() if path.is_file() else None
    key = (path, status and (status.st_ino, status.st_size, status.st_mtime_ns))
    file = _OPEN_FILES.get(key)
    if file is None:
        file = _OPEN_FILES[key] = GGUFFile(path)
    return file


_OPEN_FILES: WeakValueDictionary[tuple[Path, tuple[int, int, int] | None], GGUFFile] = WeakValueDictionary()


class _Cursor:
    """Reads forward through the mapped file; refuses to pass its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.size = len(data)
        self.position = 0

    @property
    def left(self) -> int:
        return self.size - self.position

    def need(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.left:
            raise _corrupt(
                self.path,
                f"{what} at byte {self.position} needs {num_bytes} bytes, but only {self.left} are left of {self.size}",
            )

    def take(self, num_bytes: int, what: str) -> bytes:
        self.need(num_bytes, what)
        start = self.position
        self.position += num_bytes
        return self.data[start : self.position]

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def text(self, what: str, max_bytes: int | None = None) -> str:
        start = self.position
        length = self.u64(what)
        if max_bytes is not None and length > max_bytes:
            raise _corrupt(self.path, f"{what} at byte {start} claims {length} bytes; at most {max_bytes} are expected")
        return _decode(self.take(length, what), self.path, f"{what} at byte {start}")


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelLoadError(f"GGUF file {path} does not exist.") from None
    except ValueError:
        raise ModelLoadError(f"GGUF file {path} is empty.") from None
    except OSError as error:
        raise ModelLoadError(f"GGUF file {path} cannot be read: {error.strerror or error}.") from error


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    magic = cursor.take(4, "the magic")
    if magic != MAGIC:
        raise ModelLoadError(f"{cursor.path} is not a GGUF file: it starts with {magic!r}, not {MAGIC!r}.")
    version = cursor.u32("the version")
    if version not in SUPPORTED_VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in SUPPORTED_VERSIONS
        hint = "it is big-endian" if swapped else f"versions {SUPPORTED_VERSIONS} are supported"
        raise ModelLoadError(f"{cursor.path} has GGUF version {version}, which cannot be read: {hint}.")
    num_tensors = cursor.u64("the tensor count")
    num_values = cursor.u64("the metadata count")
    cursor.need(num_tensors * _MIN_TENSOR_BYTES, f"a table of {num_tensors} tensors")
    cursor.need(num_values * _MIN_KV_BYTES, f"a list of {num_values} metadata values")
    return num_tensors, num_values


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text("a metadata key", MAX_NAME_BYTES)
        if key in metadata:
            raise _corrupt(cursor.path, f"metadata key {key!r} appears twice")
        type_id = cursor.u32(f"the type of {key!r}")
        metadata[key] = _read_value(cursor, type_id, f"the value of {key!r}", depth=0)
    return metadata


def _read_value(cursor: _Cursor, type_id: int, what: str, *, depth: int) -> Any:
    if type_id == _STRING:
        return cursor.text(what)
    if type_id == _ARRAY:
        return _read_array(cursor, what, depth=depth + 1)
    code = _SCALARS.get(type_id)
    if code is None:
        raise _corrupt(cursor.path, f"{what} at byte {cursor.position} has unknown type {type_id}")
    value = np.frombuffer(cursor.take(np.dtype(code).itemsize, what), dtype=code)[0].item()
    return bool(value) if type_id == _BOOL else value


def _read_array(cursor: _Cursor, what: str, *, depth: int) -> list[Any]:
    if depth > MAX_ARRAY_DEPTH:
        raise _corrupt(cursor.path, f"{what} nests arrays more than {MAX_ARRAY_DEPTH} deep")
    type_id = cursor.u32(f"the item type of {what}")
    count = cursor.u64(f"the length of {what}")
    code = _SCALARS.get(type_id)
    if code is not None:
        raw = cursor.take(count * np.dtype(code).itemsize, f"{what} ({count} items)")
        values: list[Any] = np.frombuffer(raw, dtype=code).tolist()
        return [bool(value) for value in values] if type_id == _BOOL else values
    if type_id == _STRING:
        return _read_strings(cursor, count, what)
    if type_id == _ARRAY:
        cursor.need(count * 12, f"{what} ({count} arrays)")
        return [_read_array(cursor, what, depth=depth + 1) for _ in range(count)]
    raise _corrupt(cursor.path, f"{what} holds items of unknown type {type_id}")


def _read_strings(cursor: _Cursor, count: int, what: str) -> list[str]:
    """The hot loop (vocabularies and merges: hundreds of thousands of strings), so without a call per string."""
    cursor.need(count * 8, f"{what} ({count} strings)")
    data, size, position = cursor.data, cursor.size, cursor.position
    read_length = struct.Struct("<Q").unpack_from
    strings: list[str] = []
    try:
        for _ in range(count):
            (length,) = read_length(data, position)
            position += 8
            if length > size - position:
                raise _corrupt(
                    cursor.path, f"string {len(strings)} of {what} claims {length} bytes past the end of the file"
                )
            strings.append(data[position : position + length].decode("utf-8"))
            position += length
    except struct.error:
        raise _corrupt(cursor.path, f"the file ends inside {what}, after {len(strings)} of {count} strings") from None
    except UnicodeDecodeError:
        raise _corrupt(cursor.path, f"string {len(strings)} of {what} is not UTF-8") from None
    cursor.position = position
    return strings


def _read_tensor_table(cursor: _Cursor, count: int, alignment: int) -> dict[str, GGUFTensor]:
    entries: list[tuple[str, tuple[int, ...], int, int]] = []
    for index in range(count):
        name = cursor.text(f"the name of tensor {index}", MAX_NAME_BYTES)
        num_dims = cursor.u32(f"the number of dims of tensor {name!r}")
        if not 1 <= num_dims <= MAX_DIMS:
            raise _corrupt(cursor.path, f"tensor {name!r} has {num_dims} dims; 1 to {MAX_DIMS} were expected")
        dims = tuple(cursor.u64(f"the dims of tensor {name!r}") for _ in range(num_dims))
        type_id = cursor.u32(f"the type of tensor {name!r}")
        entries.append((name, dims[::-1], type_id, cursor.u64(f"the offset of tensor {name!r}")))
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, type_id, offset in entries:
        if name in tensors:
            raise _corrupt(cursor.path, f"tensor {name!r} appears twice")
        if offset % alignment:
            raise _corrupt(cursor.path, f"tensor {name!r} starts at {offset}, not a multiple of {alignment}")
        tensors[name] = _checked_tensor(cursor, name, shape, type_id, data_start + offset)
    return tensors


def _checked_tensor(cursor: _Cursor, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GGUFTensor:
    kind = GGML_TYPES.get(type_id)
    if kind is None:
        raise ModelLoadError(
            f"{cursor.path}: tensor {name!r} has ggml type {type_id}, which is not known here. The file is corrupt or "
            "newer than this version of Shoal."
        )
    block_elements, block_bytes = kind.block_elements, kind.block_bytes
    if min(shape) < 1 or shape[-1] % block_elements:
        raise _corrupt(
            cursor.path,
            f"tensor {name!r} has shape {list(shape)}, which {kind.name} blocks of {block_elements} cannot fill",
        )
    tensor = GGUFTensor(name, type_id, kind.name, shape, block_elements, block_bytes, offset)
    if offset + tensor.num_bytes > cursor.size:
        raise _corrupt(
            cursor.path,
            f"tensor {name!r} lies at bytes {offset} to {offset + tensor.num_bytes}, but the file has only "
            f"{cursor.size}; the file is probably cut short",
        )
    return tensor


def _decode(raw: bytes, path: Path, what: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise _corrupt(path, f"{what} is not UTF-8") from None


def _corrupt(path: Path, what: str) -> ModelLoadError:
    return ModelLoadError(f"GGUF file {path} is corrupt or incomplete: {what}. Download or convert it again.")
