"""GGUF container, versions 2 and 3: metadata and tensor offsets, read from a memory-mapped file.

The specification is docs/gguf.md of ggml. A file is untrusted: every count, length and offset is compared with the file
size before it is used to read or allocate. (The reader of the PyPI package gguf trusts the counts.) Elements of long
arrays, such as a vocabulary of 150 000 tokens, are skipped.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.gguf import BLOCKS
from ...schemes.gguf import GGUF_NUMBERS
from ..base import CheckpointError

# ggml type: name, elements per block, bytes per block. Other types are looked up in the package gguf.
TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2)}
TYPES |= {number: (name, *BLOCKS[number]) for name, number in GGUF_NUMBERS.items()}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # by value type
STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_PARTS = 1 << 12
_MAX_ELEMENTS = 1 << 24  # per array; ten times the largest vocabulary
_MAX_READ = 1 << 10  # elements of an array with a number for each block
_SHORTEST_ENTRY = 8 + 4 + 1  # bytes of a metadata entry: length of the key, type, value
_SHORTEST_TENSOR = 8 + 4 + 8 + 4 + 8  # bytes of a tensor entry: length of the name, dimensions, one, type, offset


class Array(NamedTuple):
    """An array in the metadata. Elements of long ones, and strings, are read by ``read_elements`` alone."""

    value_type: int
    length: int
    values: tuple[Any, ...] | None = None
    begin: int = 0  # offset of the first element in the file


@dataclass(frozen=True)
class TensorInfo:
    name: str
    type: str  # "Q4_1"
    shape: tuple[int, ...]  # in torch's order: [N, K]
    offset: int  # in bytes from the start of the file
    nbytes: int


class GgufFile:
    """An open file.

    Attributes:
        metadata: numbers, strings and ``Array`` by key.
        tensors: by their names in the file.

    Raises:
        CheckpointError: the file is not GGUF, is damaged or contradicts itself.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        size = self.path.stat().st_size
        if size < 24:
            raise CheckpointError(f"{self.path}: {size} bytes are not a GGUF file")
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, self.path)
            try:
                self.metadata, self.tensors = _read_header(cursor)
            except UnicodeDecodeError as error:
                raise cursor.error(f"a string is not UTF-8 ({error.reason})") from error
        self._data = torch.from_file(str(self.path), shared=False, size=size, dtype=torch.uint8)

    def bytes_of(self, tensor: TensorInfo) -> Tensor:
        """uint8 [nbytes], a view of the file."""
        return self._data[tensor.offset : tensor.offset + tensor.nbytes]


class GgufParts:
    """A model split into several files, with the interface of one. The first part has the metadata.

    Raises:
        CheckpointError: a part is missing, has the wrong number, or repeats a tensor of an earlier part.
    """

    def __init__(self, paths: list[Path]) -> None:
        self.path = paths[0]
        for path in paths:
            if not path.exists():
                raise CheckpointError(f"{path}: no such file; all {len(paths)} parts of the model are needed")
        self._parts: dict[str, GgufFile] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for number, path in enumerate(paths):
            part = GgufFile(path)
            stated = part.metadata.get("split.no"), part.metadata.get("split.count")
            if stated != (number, len(paths)):
                raise CheckpointError(
                    f"{path}: its metadata says part {stated[0]!r} (from 0) of {stated[1]!r}, but its name says part "
                    f"{number + 1} (from 1) of {len(paths)}"
                )
            if number == 0:
                self.metadata = part.metadata
            for name, tensor in part.tensors.items():
                if name in self.tensors:
                    raise CheckpointError(f"{path}: tensor {name} is also in {self._parts[name].path.name}")
                self.tensors[name], self._parts[name] = tensor, part
        total = self.metadata.get("split.tensors.count")
        if total is not None and total != len(self.tensors):
            raise CheckpointError(f"{self.path}: its parts have {len(self.tensors)} tensors, not {total!r}")

    def bytes_of(self, tensor: TensorInfo) -> Tensor:
        return self._parts[tensor.name].bytes_of(tensor)


def open_gguf(path: str | Path) -> GgufFile | GgufParts:
    """Open a file, with all other parts of its model if its name says that the model is split."""
    path = Path(path)
    name = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if name is None:
        return GgufFile(path)
    stem, _, count = name.groups()
    if not 0 < int(count) <= _MAX_PARTS:
        raise CheckpointError(f"{path}: its name says that it is one of {count} parts")
    return GgufParts([path.with_name(f"{stem}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)])


def read_elements(path: Path, array: Array) -> list[Any]:
    """All elements of an array in the metadata of the file, or of the first file of a model in parts.

    Raises:
        CheckpointError: a string is not UTF-8.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data, path, array.begin)
        if array.value_type != STRING:
            layout = struct.Struct(f"<{array.length}{_SCALARS[array.value_type]}")
            return list(layout.unpack_from(data, cursor.skip(layout.size)))
        try:
            return [cursor.string() for _ in range(array.length)]
        except UnicodeDecodeError as error:
            raise cursor.error(f"a string is not UTF-8 ({error.reason})") from error


class _Cursor:
    """A bounds-checked cursor from an offset in the file to its end."""

    def __init__(self, data: mmap.mmap, path: Path, at: int = 0) -> None:
        self.data, self.path, self.at, self.size = data, path, at, len(data)

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}, at byte {self.at}. Is the file complete? Download it again")

    def skip(self, count: int) -> int:
        """Skip ``count`` bytes and return their offset."""
        if count > self.size - self.at:
            raise self.error(f"{count} bytes should follow, but only {self.size - self.at} are left")
        self.at += count
        return self.at - count

    def number(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        return layout.unpack_from(self.data, self.skip(layout.size))[0]

    def string(self) -> str:
        count = self.number("Q")
        begin = self.skip(count)
        return self.data[begin : begin + count].decode()

    def count_of(self, what: str, shortest: int) -> int:
        """Read a count of items, each at least ``shortest`` bytes long."""
        count: int = self.number("Q")
        if count * shortest > self.size - self.at:
            raise self.error(f"it claims {count} {what}, more than the rest of the file can hold")
        return count

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise self.error(f"metadata of unknown type {kind}")
        return self.number(_SCALARS[kind])

    def array(self) -> Array:
        kind = self.number("I")
        if kind != STRING and kind not in _SCALARS:
            raise self.error(f"an array of elements of type {kind}")
        size = 8 if kind == STRING else struct.calcsize(_SCALARS[kind])
        count = self.count_of("elements of an array", size)
        if count > _MAX_ELEMENTS:
            raise self.error(f"an array of {count} elements; at most {_MAX_ELEMENTS} are allowed")
        begin = self.at
        if kind == STRING:
            for _ in range(count):
                self.skip(self.number("Q"))
            return Array(kind, count, begin=begin)
        if count <= _MAX_READ:
            return Array(kind, count, tuple(self.number(_SCALARS[kind]) for _ in range(count)), begin)
        self.skip(count * size)
        return Array(kind, count, begin=begin)


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    if cursor.data[:4] != b"GGUF":
        raise CheckpointError(f"{cursor.path}: it begins with {cursor.data[:4]!r}, so it is not a GGUF file")
    cursor.skip(4)
    version = cursor.number("I")
    if version not in (2, 3):
        big_endian = version in (2 << 24, 3 << 24)
        what = "it is big-endian" if big_endian else f"version {version} of GGUF"
        raise CheckpointError(f"{cursor.path}: {what}; only little-endian files of version 2 or 3 are supported")
    tensor_count = cursor.count_of("tensors", _SHORTEST_TENSOR)
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count_of("entries of metadata", _SHORTEST_ENTRY)):
        key = cursor.string()
        if key in metadata:
            raise cursor.error(f"{key!r} is in its metadata twice")
        metadata[key] = cursor.value(cursor.number("I"))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment is {alignment!r}, not a power of two from 8 to 2^20")

    entries = [_read_entry(cursor) for _ in range(tensor_count)]
    begin = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, (kind, block, size), dims, offset in entries:
        nbytes = math.prod(dims) // block * size
        problem = (
            f"rows of {dims[0]} elements are not a multiple of the block size {block}"
            if dims[0] % block
            else f"its offset {offset} is not a multiple of {alignment}"
            if offset % alignment
            else f"its {nbytes} bytes at {begin + offset} lie beyond the end of the file, {cursor.size}"
            if begin + offset + nbytes > cursor.size
            else "it is listed twice"
            if name in tensors
            else None
        )
        if problem is not None:
            raise CheckpointError(f"{cursor.path}: tensor {name} {kind}{dims}: {problem}. Download the file again")
        tensors[name] = TensorInfo(name, kind, tuple(reversed(dims)), begin + offset, nbytes)
    end, last = 0, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise CheckpointError(f"{cursor.path}: tensors {last} and {tensor.name} overlap. Download the file again")
        end, last = tensor.offset + tensor.nbytes, tensor.name
    return metadata, tensors


def _read_entry(cursor: _Cursor) -> tuple[str, tuple[str, int, int], list[int], int]:
    """Name, type, dimensions (fastest first), and offset in the data."""
    name = cursor.string()
    count = cursor.number("I")
    if not 1 <= count <= _MAX_DIMS:
        raise cursor.error(f"tensor {name!r} has {count} dimensions")
    dims = [cursor.number("Q") for _ in range(count)]
    if 0 in dims:
        raise cursor.error(f"tensor {name!r} is empty, {dims}")
    return name, _type(cursor, name, cursor.number("I")), dims, cursor.number("Q")


def _type(cursor: _Cursor, name: str, number: int) -> tuple[str, int, int]:
    if number in TYPES:
        return TYPES[number]
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError:
        known = ", ".join(kind for kind, _, _ in TYPES.values())
        raise CheckpointError(
            f"{cursor.path}: tensor {name} is of ggml type {number}, not one of {known}; others need `pip install gguf`"
        ) from None
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise cursor.error(f"tensor {name!r} is of unknown ggml type {number}") from None
    block, size = GGML_QUANT_SIZES[kind]
    return kind.name, block, size
