"""qao's own safetensors format: the state dict of quantized layers, each with a marker of its format.

<layer>.pip_install_qao   uint8, JSON: scheme, sizes, dtype; see nn/marker.py
<layer>.weight            uint8, the tripwire for other loaders; dropped
<layer>.qweight, .scales, .weight_sums, .activation_scale, .row_scales   the tensors of a QuantLinear
header                    "qao": version of the header; "aliases": JSON, further names of tensors that several layers
                          share
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..nn import marker
from ..schemes import GgufWeightOnly, Int4Weight, Scheme
from .base import Plain, QuantizedLayer, try_open

if TYPE_CHECKING:
    from .files import TensorFiles  # imports safetensors, and ``import qao`` does not

__all__ = ["VERSION", "add_aliases", "entries", "header", "is_native", "markers", "markers_in_files", "read"]

VERSION = 1  # version of the header's metadata; each layer's marker has a separate version
_LARGEST = 1 << 31  # rows or columns; the product of two such numbers does not overflow


def header(aliases: Mapping[str, str]) -> dict[str, str]:
    """Metadata of a file's header."""
    metadata = {"format": "pt", "qao": str(VERSION)}
    return {**metadata, "aliases": json.dumps(aliases)} if aliases else metadata


def add_aliases(files: TensorFiles) -> None:
    """Add the further names of tensors in the header.

    Raises:
        CheckpointError: the header is of a newer qao, or its aliases are no names of tensors.
    """
    version, text = files.metadata.get("qao", "0"), files.metadata.get("aliases", "{}")
    if not version.isdecimal() or int(version) > VERSION:
        raise files.error("header", f"written by a newer qao (format {version!r:.20}): pip install -U qao")
    try:
        aliases = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise files.error("header", f"its aliases are no JSON: {error}") from error
    if not isinstance(aliases, dict):
        raise files.error("header", f"its aliases must be an object, not {aliases!r:.80}")
    for name, stored in aliases.items():
        files.alias(name, stored)


_Path = str | os.PathLike[str]


def entries(file: _Path, parts: Iterable[str] = (marker.MARKER, "scales")) -> dict[str, Any]:
    """All names in a safetensors file, and in other files of ``torch.save``. See ``safetensors_entries``."""
    if os.fspath(file).endswith(".safetensors"):
        return safetensors_entries(file, parts)
    return dict(torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)))


def safetensors_entries(file: _Path, parts: Iterable[str] = (marker.MARKER, "scales")) -> dict[str, Any]:
    """All names in a safetensors file. Only these parts of quantized layers are read."""
    from safetensors import safe_open

    try_open(file)
    with safe_open(file, framework="pt") as content:
        names = list(content.keys())
        layers = [layer for name in names if (layer := marker.layer_of(name)) is not None]
        wanted = {f"{layer}.{part}".lstrip(".") for layer in layers for part in parts}
        return {name: content.get_tensor(name) if name in wanted else None for name in names}


def markers(state: Mapping[str, Any]) -> dict[str, marker.Marker]:
    """Markers in a state dict by layer name.

    Raises:
        ValueError: a marker is unreadable or from a newer qao.
    """
    layers = ((marker.layer_of(key), key) for key in state)
    return {layer: marker.decode(state[key], key) for layer, key in layers if layer is not None}


def markers_in_files(files: Iterable[_Path]) -> dict[str, marker.Marker]:
    """As ``markers``, for safetensors and ``torch.save`` files. Only the markers are read."""
    return {name: found for file in files for name, found in markers(entries(file, [marker.MARKER])).items()}


def is_native(names: tuple[str, ...]) -> bool:
    """Whether one of these tensors is a marker."""
    return any(marker.layer_of(name) is not None for name in names)


@dataclass(frozen=True)
class NativeLayer(QuantizedLayer):
    """A layer that is already packed: ``pack`` reads its tensors unchanged."""

    stored: Callable[[], dict[str, Tensor]] = dict
    parts: tuple[str, ...] = ()  # names of the returned tensors

    def meta(self) -> dict[str, Tensor]:
        return {part: tensor for part, tensor in super().meta().items() if part in self.parts}

    def pack(self) -> dict[str, Tensor]:
        return self.stored()


def read(files: TensorFiles) -> list[QuantizedLayer]:
    """The layers of a file that qao wrote.

    Raises:
        CheckpointError: a marker is unreadable or from a newer qao, or tensors do not match their marker.
    """
    add_aliases(files)
    return list(_layers(files, {files.stored(name) for name in files.names if files.stored(name) != name}))


def _layers(files: TensorFiles, shared: set[str]) -> Iterator[QuantizedLayer]:
    for key in files.names:
        if marker.layer_of(key) is None:
            continue
        prefix = key.removesuffix(marker.MARKER)
        if len(files.shape(key)) != 1 or files.shape(key)[0] > 1 << 16:
            raise files.error(key, "is not a marker of qao")
        try:
            found = marker.decode(files.read(key), key)
            scheme = marker.scheme_of(found, key)
        except ValueError as error:
            raise files.error(key, str(error)) from error
        n, k = found.out_features, found.in_features
        if max(n, k) >= _LARGEST:
            raise files.error(key, f"says [{n}, {k}], which is not the shape of a weight")
        scales = prefix + "scales"
        files.check(scales, scheme.scale_dtypes)
        if isinstance(scheme, Int4Weight):
            scheme = replace(scheme, scale_dtype=files.dtype(scales))
        if (found.experts or 1) >= _LARGEST:
            raise files.error(key, f"says {found.experts} experts; there must be at least one")
        expected = scheme.empty(n, k, dtype=found.dtype, device="meta", experts=found.experts).tensors()
        parts = {part: prefix + part for part, tensor in expected.items() if tensor is not None}
        for part in ("weight_sums", "row_scales"):
            if prefix + "qweight" in shared and prefix + part not in files:  # an embedding; the tied head stores them
                parts.pop(part, None)
        for part, name in parts.items():
            wanted = expected[part]
            assert wanted is not None
            files.check(name, (wanted.dtype,), tuple(wanted.shape))
        keys = (key, *parts.values(), *(name for name in [prefix + marker.TRIPWIRE] if name in files))
        stored = partial(_stored, files, parts)
        experts = found.experts
        plain = partial(_plain, stored, scheme, n, k, experts)
        name = prefix.removesuffix(".")
        yield NativeLayer(name, scheme, n, k, keys, plain, experts=experts, stored=stored, parts=tuple(parts))


def _stored(files: TensorFiles, parts: dict[str, str]) -> dict[str, Tensor]:
    return {part: files.read(name) if part == "qweight" else files.finite(name) for part, name in parts.items()}


def _plain(stored: Callable[[], dict[str, Tensor]], scheme: Scheme, n: int, k: int, experts: int | None) -> Plain:
    """All experts together, if the layer has them: q [E, N, K], and scales and zeros with the same dimension."""
    tensors = stored()
    weight, scales = tensors["qweight"], tensors["scales"]
    if experts is None or isinstance(scheme, GgufWeightOnly):
        return Plain(*scheme.unpack(weight, scales, n, k))
    each = (scheme.unpack(*one, n, k) for one in zip(weight, scales, strict=True))
    return Plain(*(None if one[0] is None else torch.stack(one) for one in zip(*each, strict=True)))  # type: ignore[arg-type]
