"""Safetensors files, optionally with an index, and config.json: located and checked before use."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from .base import Checkpoint, CheckpointError, QuantizedLayer, try_open
from .shard_writer import DTYPES, INDEX, WHOLE

__all__ = ["HeldTensors", "SafetensorsCheckpoint", "TensorFiles", "read_json"]

_DTYPES = {code: dtype for dtype, code in DTYPES.items()}
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_ALIGNMENT = 64  # bytes, torch's allocation alignment
_LARGEST_JSON = 256 << 20  # bytes; an index of a million tensors has 100 MB


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises OSError if the file cannot be opened."""
    size = path.stat().st_size
    if size > _LARGEST_JSON:
        raise CheckpointError(f"{path}: {size} bytes is too large for a checkpoint's JSON file")
    text = path.read_bytes()
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not an object")
    return content


class TensorFiles:
    """The tensors of a checkpoint by name.

    Args:
        path: a .safetensors file, an index of several, or a directory with one of these. As in transformers,
            model.safetensors precedes model.safetensors.index.json, and both precede others.

    Raises:
        CheckpointError: no such file, several candidates, pickles, a damaged file, an index that points outside its
            directory or to missing tensors.
        OSError: a file or the directory cannot be opened, for example without permission.
    """

    def __init__(self, path: Path) -> None:
        self.directory = path if path.is_dir() else path.parent
        files = _in_directory(path) if path.is_dir() else _of_index(path) if is_index(path) else {path: None}
        self.metadata: dict[str, str] = {}
        self._handles: dict[str, Any] = {}  # by file name
        self._aliases: dict[str, str] = {}
        self._seen: dict[str, Path] = {}  # file of every tensor, listed in the index or not
        self._file: dict[str, str] = {}
        self._facts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for file, expected in files.items():
            self._open(file, expected)

    def _open(self, file: Path, expected: list[str] | None) -> None:
        if expected is not None and not file.exists():
            raise CheckpointError(
                f"{file}: no such file, but the index says that it holds {len(expected)} tensors ({expected[0]}, …). "
                "Download it again"
            )
        try_open(file)
        try:
            handle: Any = safetensors.safe_open(str(file), framework="pt")
            self.metadata.update(handle.metadata() or {})
            names = list(handle.keys())
        except (OSError, safetensors.SafetensorError, ValueError) as error:
            raise CheckpointError(f"{file}: not a readable safetensors file (truncated?): {error}") from error
        present = set(names)
        absent = next((name for name in expected or () if name not in present), None)
        if absent is not None:
            raise CheckpointError(f"{file}: {absent}: the index says that this tensor is here, but it is missing")
        twice = next((name for name in names if name in self._seen), None)
        if twice is not None:  # transformers takes the last one, regardless of the index
            raise CheckpointError(
                f"{file}: {twice}: this tensor is also in {self._seen[twice]}. Download the files again"
            )
        self._seen.update(dict.fromkeys(names, file))
        for name in names if expected is None else expected:
            view = handle.get_slice(name)
            dtype = _DTYPES.get(view.get_dtype())
            if dtype is None:
                raise CheckpointError(f"{file}: {name}: qao does not support the dtype {view.get_dtype()}")
            self._handles[name] = handle
            self._file[name] = str(file)
            self._facts[name] = tuple(view.get_shape()), dtype

    def alias(self, name: str, stored: Any) -> None:
        """Add another name for a tensor."""
        known = isinstance(stored, str) and stored in self and stored not in self._aliases
        if name in self or not known:
            raise self.error(name, f"the header says that it is the same tensor as {stored!r:.80}, which is impossible")
        self._aliases[name] = stored
        self._facts[name] = self._facts[stored]

    def stored(self, name: str) -> str:
        """The name in the file of a tensor or of its alias."""
        return self._aliases.get(name, name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._facts)

    def __contains__(self, name: str) -> bool:
        return name in self._facts

    def shape(self, name: str) -> tuple[int, ...]:
        return self._facts[name][0]

    def dtype(self, name: str) -> torch.dtype:
        return self._facts[name][1]

    def error(self, name: str, message: str) -> CheckpointError:
        """Build an error about a tensor."""
        return CheckpointError(f"{self.where(name)}: {name}: {message}")

    def where(self, name: str) -> str:
        """The file of a tensor, or else the directory."""
        return self._file.get(self.stored(name)) or str(self.directory)

    def check(self, name: str, dtypes: Iterable[torch.dtype], *shapes: tuple[int, ...]) -> None:
        """Raise CheckpointError unless the tensor exists with one of these dtypes and (if given) shapes."""
        if name not in self:
            raise self.error(name, "this tensor is missing")
        shape, dtype = self._facts[name]
        if dtype not in (dtypes := tuple(dtypes)) or (shapes and shape not in shapes):
            wanted = " or ".join(str(one).removeprefix("torch.") for one in dtypes)
            sizes = " or ".join(str(list(one)) for one in shapes)
            found = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
            raise self.error(name, f"must be {wanted}" + (f" of shape {sizes}" if shapes else "") + f", not {found}")

    def matrix(self, name: str, *dtypes: torch.dtype) -> tuple[int, int]:
        """The two sizes of a non-empty matrix; otherwise raises CheckpointError."""
        self.check(name, dtypes)
        shape = self.shape(name)
        if len(shape) != 2 or 0 in shape:
            what = "fused experts are not supported" if len(shape) == 3 else "a matrix is needed"
            raise self.error(name, f"has shape {list(shape)}: {what}")
        return shape[0], shape[1]

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, aligned for kernels (in the file it may have any alignment)."""
        stored = self.stored(name)
        try:
            tensor: Tensor = self._handles[stored].get_tensor(stored)
        except (OSError, safetensors.SafetensorError, RuntimeError) as error:
            raise self.error(name, f"cannot be read: {error}") from error
        return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()

    def part(self, name: str, index: Any) -> Tensor:
        stored = self.stored(name)
        try:
            return self._handles[stored].get_slice(stored)[index]  # type: ignore[no-any-return]
        except (OSError, safetensors.SafetensorError, RuntimeError) as error:
            raise self.error(name, f"cannot be read: {error}") from error

    def finite(self, name: str) -> Tensor:
        """A finite tensor of scales. Exponents (e8m0, or uint8 with that meaning) are converted to float32."""
        scales = self.read(name)
        if scales.dtype == torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        if scales.dtype == torch.float8_e8m0fnu:
            scales = scales.float()
        if not scales.isfinite().all():
            raise self.error(name, "holds NaN or Inf: the file is damaged")
        return scales

    def scalar(self, name: str) -> float:
        """The value of a tensor with one positive number."""
        self.check(name, FLOATS, (), (1,), (1, 1))
        value = float(self.read(name).reshape(()))
        if not torch.finfo(torch.float32).tiny <= value < float("inf"):
            raise self.error(name, f"must be a positive number that float32 holds without loss, not {value}")
        return value


class HeldTensors(TensorFiles):
    """Tensors in memory with the interface of ``TensorFiles``; ``where``: a path for errors."""

    def __init__(self, where: Path, tensors: Mapping[str, Tensor]) -> None:
        self.directory, self.metadata = where, {}
        self._tensors, self._file, self._aliases = tensors, {}, {}
        self._facts = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[self.stored(name)].detach().cpu()


def _in_directory(directory: Path) -> dict[Path, list[str] | None]:
    """The safetensors files of a directory, each with the tensors that an index lists for it."""
    held = sorted(directory.iterdir())  # raises OSError without permission, where glob finds no file
    indices = [file for file in held if file.name.endswith(".safetensors.index.json")]
    files = [file for file in held if file.suffix == ".safetensors"]
    if (directory / WHOLE) in files:
        return {directory / WHOLE: None}
    if (directory / INDEX) in indices:
        return _of_index(directory / INDEX)
    if len(indices) == 1:
        return _of_index(indices[0])
    if not indices and len(files) == 1:
        return {files[0]: None}
    if indices or files:
        found = ", ".join(file.name for file in [*indices, *files][:8])
        raise CheckpointError(f"{directory}: several files could be loaded ({found}); pass the path of one")
    pickles = [file.name for file in held if file.suffix in PICKLES]
    if pickles:
        raise CheckpointError(
            f"{directory}: {pickles[0]} is a pickle, which can execute arbitrary code; qao never opens one. Convert it "
            "to safetensors."
        )
    raise CheckpointError(f"{directory}: no .safetensors file here")


def is_index(path: Path) -> bool:
    return path.suffix == ".json" and ".safetensors.index" in path.name


def _of_index(index: Path) -> dict[Path, list[str] | None]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index}: has no weight_map")
    files: dict[Path, list[str] | None] = {}
    for name, file in places.items():
        plain = isinstance(file, str) and file.endswith(".safetensors") and Path(file).name == file and "\\" not in file
        if not plain:
            raise CheckpointError(f"{index}: {name}: {file!r} is not the name of a .safetensors file next to the index")
        names = files.setdefault(index.parent / file, [])
        assert names is not None
        names.append(name)
    return files


class SafetensorsCheckpoint(Checkpoint):
    """A checkpoint in safetensors files. ``dropped``: ignored tensors outside layers, see ``notes``."""

    def __init__(
        self,
        format: str,
        config: dict[str, Any],
        files: TensorFiles,
        layers: Iterable[QuantizedLayer] = (),
        dropped: Iterable[str] = (),
        notes: Iterable[str] = (),
    ) -> None:
        self.format = format
        self.config = config
        self.layers = {layer.name: replace(layer, where=files.where(layer.keys[0])) for layer in layers}
        self.notes = tuple(notes)
        self._files = files
        used = {key for layer in self.layers.values() for key in layer.keys} | set(dropped)
        self.others = tuple(name for name in files.names if name not in used)
        self._others = frozenset(self.others)

    def tensor(self, name: str) -> Tensor:
        return self._files.read(self._known(name))

    def part(self, name: str, index: Any) -> Tensor:
        return self._files.part(self._known(name), index)

    def shape_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        name = self._known(name)
        return self._files.shape(name), self._files.dtype(name)

    def _known(self, name: str) -> str:
        if name not in self._others:
            raise KeyError(f"{name!r} is not a tensor outside quantized layers")
        return name
