"""Safetensors files written tensor by tensor, with at most one layer in memory.

The format (huggingface.co/docs/safetensors): eight bytes with the length of the header, the header in JSON, padded with
spaces, and the tensors without gaps. The length of the header is fixed before the first tensor is known.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .common import Failure

_HEADER = 1 << 18  # bytes: names, shapes and offsets of some 1500 tensors
_ALIGNMENT = 8  # readers use tensors in place, so offsets must be multiples of the element size
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}


class ShardWriter:
    """Writes model.safetensors, or model-00001-of-00003.safetensors, … with their index, into a directory.

    Args:
        directory: the target directory.
        metadata: strings for the header of every file.
        limit: bytes per file, exceeded only by a single larger layer.
    """

    def __init__(self, directory: Path, metadata: Mapping[str, str], limit: int) -> None:
        self._directory = directory
        self._metadata = dict(metadata)
        self._limit = limit
        self._files: list[list[str]] = []  # tensor names per file
        self._names: set[str] = set()
        self.bytes = 0  # written tensor bytes
        self._file: BinaryIO | None = None

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors that belong together into one file.

        Raises:
            Failure: a repeated name, or a dtype that safetensors lacks.
            OSError: for example, the disk is full.
        """
        room = sum(len(json.dumps(name)) + 160 for name in tensors)
        count = sum(tensor.nbytes for tensor in tensors.values())
        if self._file is not None and (self._place + self._kept + count > self._limit or self._room < room):
            self._finish()
        if self._file is None:
            self._begin()
        self._room -= room
        for name, tensor in tensors.items():
            if name in self._names:
                raise Failure(f"{name}: two tensors have this name")
            self._names.add(name)
            self.bytes += tensor.nbytes
            if tensor.nbytes % _ALIGNMENT:  # misaligns what follows: small tensors, written at the end
                self._later[name] = tensor.detach().cpu().clone()
                self._kept += tensor.nbytes
            else:
                self._write(name, tensor)

    def close(self) -> None:
        """Finish the last file, rename all files and write the index."""
        if self._file is None:
            self._begin()
        self._finish()
        count, places = len(self._files), {}
        for number, names in enumerate(self._files, 1):
            name = "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            self._part(number).rename(self._directory / name)
            places.update(dict.fromkeys(names, name))
        if count > 1:
            index = {"metadata": {"total_size": self.bytes}, "weight_map": dict(sorted(places.items()))}
            (self._directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def abandon(self) -> None:
        """Close the open file. The creator of the directory removes it."""
        if self._file is not None:
            self._file.close()

    def _part(self, number: int) -> Path:
        return self._directory / f"part-{number:05}.safetensors"

    def _begin(self) -> None:
        self._file = self._part(len(self._files) + 1).open("wb")
        self._file.seek(8 + _HEADER)
        self._place = self._kept = 0
        self._room = _HEADER - len(json.dumps(self._metadata)) - 64
        self._entries: dict[str, dict[str, Any]] = {}
        self._later: dict[str, Tensor] = {}

    def _write(self, name: str, tensor: Tensor) -> None:
        assert self._file is not None
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None:
            raise Failure(f"{name}: safetensors has no {tensor.dtype}")
        end = self._place + tensor.nbytes
        self._entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [self._place, end]}
        if tensor.numel():
            data = tensor.detach().cpu().contiguous()
            self._file.write((ctypes.c_char * data.nbytes).from_address(data.data_ptr()))
        self._place = end

    def _finish(self) -> None:
        assert self._file is not None
        for name, tensor in sorted(self._later.items(), key=lambda item: -item[1].element_size()):
            self._write(name, tensor)
        header = json.dumps({"__metadata__": self._metadata, **self._entries}, separators=(",", ":")).encode()
        if len(header) > _HEADER:
            raise Failure(f"{len(header)} bytes of names and shapes do not fit the header of a safetensors file")
        self._file.seek(0)
        self._file.write(_HEADER.to_bytes(8, "little") + header.ljust(_HEADER))
        self._file.close()
        self._files.append(list(self._entries))
        self._file = None
