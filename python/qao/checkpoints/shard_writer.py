"""A streaming writer of safetensors files, with at most one layer in memory.

The format (huggingface.co/docs/safetensors): eight bytes with the length of the header, the header in JSON, padded with
spaces, and the tensors without gaps.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# In the order of the safetensors library, which writes the last ones first.
DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
_RANKS = {dtype: rank for rank, dtype in enumerate(DTYPES)}
_HEADER = 1 << 18  # bytes: names, shapes and offsets of some 1500 tensors
_ALIGNMENT = 8  # readers use tensors in place, so offsets must be multiples of the element size


class ShardWriter:
    """Writes model.safetensors, or model-00001-of-00003.safetensors, … with their index, into a directory.

    Files have temporary names until the ``with`` block ends. Then they replace those of an earlier model. After an
    error they are removed.

    Args:
        directory: an existing directory.
        metadata: strings for the header of every file.
        limit: bytes of tensors per file, exceeded only by a single larger ``add``.
        name: the name of the one file, which replaces no other file of the directory.
        compact: a header of minimal length, and the tensors in the order of the safetensors library. Both are known
            with the last tensor, so the tensors of a file must stay in memory until then. Otherwise tensors are written
            as they come, behind space for the header.

    Attributes:
        bytes: tensor bytes of all files.
        files: paths of the files, after the block.
    """

    def __init__(
        self,
        directory: Path,
        metadata: Mapping[str, str],
        limit: float,
        *,
        name: str | None = None,
        compact: bool = False,
    ) -> None:
        self._directory, self._name = directory, name
        self._metadata = dict(metadata)
        self._limit = limit
        self._compact = compact
        self._parts: list[Path] = []
        self._numbers: dict[str, int] = {}  # of the part that has the tensor
        self._file: BinaryIO | None = None
        self.bytes = 0
        self.files: list[Path] = []

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None:
                with self._named():
                    self._close()
        finally:
            if self._file is not None:
                with contextlib.suppress(OSError):  # the disk is full: the first error says so
                    self._file.close()
            for part in self._parts:
                part.unlink(missing_ok=True)

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors that belong together into one file.

        Raises:
            ValueError: a repeated name, or a dtype that is not written.
            OSError: for example, the disk is full.
        """
        needed = sum(len(json.dumps(name)) + 160 for name in tensors)
        count = sum(tensor.nbytes for tensor in tensors.values())
        with self._named():
            if self._file is not None and (self._size + count > self._limit or self._header_left < needed):
                self._finish()
            if self._file is None:
                self._begin()
            self._header_left -= needed
            self._size += count
            self.bytes += count
            for name, tensor in tensors.items():
                self._add(name, tensor)

    def _add(self, name: str, tensor: Tensor) -> None:
        if name in self._numbers:
            raise ValueError(f"{name}: two tensors have this name")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name}: qao writes no {tensor.dtype} into safetensors files")
        self._numbers[name] = len(self._parts) - 1
        if self._compact:
            self._later[name] = tensor
        elif tensor.nbytes % _ALIGNMENT:  # misaligns what follows: small tensors, written at the end
            self._later[name] = tensor.detach().cpu().clone()
        else:
            self._enter(name, tensor)
            self._write(tensor)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of the disk name the output, not the temporary files."""
        try:
            yield
        except OSError as error:
            error.filename = str(self._directory / (self._name or ""))
            raise

    def _begin(self) -> None:
        part = self._directory / f".part-{len(self._parts) + 1:05}.{os.getpid()}"
        self._parts.append(part)
        self._file = part.open("wb")
        self._file.seek(8 + _HEADER)
        self._end = self._size = 0  # of the entered tensors, of all
        self._header_left = math.inf if self._compact else _HEADER - len(json.dumps(self._metadata)) - 64
        self._entries: dict[str, dict[str, Any]] = {}
        self._later: dict[str, Tensor] = {}

    def _enter(self, name: str, tensor: Tensor) -> None:
        """Add a tensor to the header."""
        begin, self._end = self._end, self._end + tensor.nbytes
        offsets = [begin, self._end]
        self._entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}

    def _write(self, tensor: Tensor) -> None:
        assert self._file is not None
        if tensor.numel():
            data = tensor.detach().cpu().contiguous()
            self._file.write((ctypes.c_char * data.nbytes).from_address(data.data_ptr()))

    def _finish(self) -> None:
        """Write the remaining tensors and the header of a file."""
        assert self._file is not None
        written = self._end
        later = sorted(self._later.items(), key=self._order)
        for name, tensor in later:
            self._enter(name, tensor)
        content = {"__metadata__": self._metadata, **self._entries}
        header = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
        length = -(-len(header) // _ALIGNMENT) * _ALIGNMENT if self._compact else _HEADER
        if len(header) > length:
            raise ValueError(f"{len(header)} bytes of names and shapes do not fit the header of a safetensors file")
        self._file.seek(0)
        self._file.write(length.to_bytes(8, "little") + header.ljust(length))
        self._file.seek(8 + length + written)
        for _, tensor in later:
            self._write(tensor)
        self._file.close()
        self._file = None

    def _order(self, item: tuple[str, Tensor]) -> tuple[int, str]:
        name, tensor = item
        return (-_RANKS[tensor.dtype], name) if self._compact else (-tensor.element_size(), "")

    def _close(self) -> None:
        """Finish the last file, write the index, and rename all files."""
        if self._file is None:
            self._begin()
        self._finish()
        count = len(self._parts)
        names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        names = names if count > 1 else [self._name or WHOLE]
        self.files = [self._directory / name for name in names]
        moves = dict(zip(self._parts, self.files, strict=True))
        if count > 1:
            places = {name: names[number] for name, number in self._numbers.items()}
            places = places if self._compact else dict(sorted(places.items()))
            index = {"metadata": {"total_size": self.bytes}, "weight_map": places}
            self._parts.append(self._directory / f".{INDEX}.{os.getpid()}")
            self._parts[-1].write_text(json.dumps(index, indent=2) + "\n")
            moves[self._parts[-1]] = self._directory / INDEX
        if self._name is None:  # files of an earlier model, which an index or a reader of the directory would include
            for stale in [self._directory / INDEX, *self._directory.glob("model*.safetensors")]:
                if stale not in moves.values():
                    stale.unlink(missing_ok=True)
        for part, file in moves.items():
            part.replace(file)
