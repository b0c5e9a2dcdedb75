"""qao's own safetensors format: the state dict of quantized layers, each with a marker of its format.

<layer>.pip_install_qao   uint8, JSON: scheme, sizes, dtype; see nn/marker.py
<layer>.weight            uint8, the tripwire for other loaders; dropped
<layer>.qweight, .scales, .weight_sums, .activation_scale, .row_scales   the tensors of a QuantLinear
header                    "aliases": JSON, further names of tensors that several layers share
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from ..nn import marker
from ..schemes import Int4Weight, Scheme, scheme_from_dict
from .base import Plain, QuantizedLayer
from .files import TensorFiles
from .settings import Settings

__all__ = ["NativeLayer", "is_native", "read"]

_LARGEST = 1 << 31  # rows or columns; the product of two such numbers does not overflow


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
    try:
        aliases = json.loads(files.metadata.get("aliases", "{}"))
    except (ValueError, RecursionError) as error:
        raise files.error("header", f"its aliases are not JSON: {error}") from error
    for name, stored in Settings(aliases, f"{files.directory}: aliases"):
        files.alias(name, stored)
    return list(_layers(files, set(aliases.values())))


def _layers(files: TensorFiles, shared: set[str]) -> Iterator[QuantizedLayer]:
    for key in files.names:
        if marker.layer_of(key) is None:
            continue
        prefix = key.removesuffix(marker.MARKER)
        if len(files.shape(key)) != 1 or files.shape(key)[0] > 1 << 16:
            raise files.error(key, "is not a marker of qao")
        try:
            found = marker.decode(files.read(key), key)
            scheme = scheme_from_dict(found.scheme)
        except (ValueError, TypeError) as error:
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
        plain = partial(_plain, stored, scheme, n, k)
        if found.experts is not None:
            plain = partial(_refuse, files, key)
        experts = found.experts
        name = prefix.removesuffix(".")
        yield NativeLayer(name, scheme, n, k, keys, plain, experts=experts, stored=stored, parts=tuple(parts))


def _refuse(files: TensorFiles, key: str) -> Plain:
    raise files.error(key, "is of fused experts, which other formats do not hold: load them with qao instead")


def _stored(files: TensorFiles, parts: dict[str, str]) -> dict[str, Tensor]:
    return {part: files.read(name) if part == "qweight" else files.finite(name) for part, name in parts.items()}


def _plain(stored: Callable[[], dict[str, Tensor]], scheme: Scheme, n: int, k: int) -> Plain:
    tensors = stored()
    return Plain(*scheme.unpack(tensors["qweight"], tensors["scales"], n, k))
