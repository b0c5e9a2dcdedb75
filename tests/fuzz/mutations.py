"""Mutations of checkpoints: what ``readers`` reads.

A case is a base and a list of steps, so that a found case can be shortened and kept: first of tensors, then of JSON,
then of bytes.
"""

from __future__ import annotations

import copy
import json
import math
import random
import struct
from functools import cache
from typing import Any

import torch
from qao.checkpoints.shard_writer import DTYPES
from qao.nn.marker import MARKER
from torch import Tensor

from .bases import Base, bases, by_format

_DTYPES = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int16", "int32", "int64", "bool")
_DTYPES += ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
_NUMBERS = (0, 1, -1, 2, 3, 7, 8, 15, 16, 31, 32, 33, 64, 127, 128, 255, 256, 2**15, 2**16, 2**24, 2**31 - 1, 2**31)
_NUMBERS += (2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30)
_TEXTS = (
    "",
    "x",
    "weight",
    "a",
    "a.weight",
    "re:.*",
    "re:[",
    "re:(?P<a",
    "re:(.*)*",
    "re:(a+)+x",
    "*",
    "../x",
    "/etc/passwd",
    "\0",
)
_TEXTS += ("\ud800", "é" * 300, "y" * 5000, "int4", "float", "group", "channel", "tensor", "block", "token", "true")
_TEXTS += ("pack-quantized", "gptq", "awq", "fp8", "NVFP4", "FP8", "none", "1", "-1", "1e999", "[", "{}", "null")
_SAME_SIZE = {
    1: ("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"),
    2: ("F16", "BF16", "I16", "U16"),
    4: ("F32", "I32", "U32"),
    8: ("F64", "I64", "U64", "C64"),
}
_HALVES = ("0000", "007c", "00fc", "007e", "ff7b", "ffff", "0000803f", "00000080")  # float16 and float32, in hex
_VALUES = (None, True, False, 0.5, -0.0, 1e-300, 1e300, [], {}, [[]], [None], {"a": 1}, [1, 2], [128, 128], ["Linear"])


# ---- draw ------------------------------------------------------------------------------------------------------------


def draw(rng: random.Random) -> dict[str, Any]:
    """Half of the cases are of any format, so that one with few bases has as many as the others."""
    of_format = rng.choice(list(by_format().values()))
    name = rng.choice(of_format if rng.random() < 0.5 else _names())
    base = bases()[name]
    steps = [_step(rng, name, base) for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5)))]
    # qao.load costs more than the rest
    return {
        "base": name,
        "load": rng.random() < 0.4,
        "steps": sorted(steps, key=lambda step: ("tensor", "json", "bytes").index(step[0])),
    }


@cache
def _names() -> list[str]:
    return sorted(bases())


@cache
def _keys(name: str) -> list[str]:
    return sorted(bases()[name].tensors)


def _step(rng: random.Random, name: str, base: Base) -> list[Any]:
    kind = rng.random()
    if base.gguf is not None:
        head, whole = base.numbers[-1][0] + 8, len(base.gguf)
        if kind < 0.22:
            return _number(rng, base)
        if kind < 0.65:  # codes and scales
            at, value = rng.randrange(head, whole - 8), rng.choice((1 << rng.randrange(8), *_HALVES))
            if isinstance(value, int):
                return ["bytes", "model.gguf", "flip", at, value]
            return ["bytes", "model.gguf", "number", at, value]
        return _bytes(rng, "model.gguf", head if kind < 0.8 else whole)
    if kind < 0.45:
        return _tensor(rng, base, _keys(name))
    if kind < 0.85:
        return _json(rng, name)
    size = len(_whole(name)[base.store])
    return _bytes(rng, base.store, size if rng.random() < 0.5 else min(size, 600))


def _number(rng: random.Random, base: Base) -> list[Any]:
    """Another value of a number in the head of a GGUF file: a count, a size, a type, an offset, a length."""
    assert base.gguf is not None
    at, width = rng.choice(base.numbers)
    old = int.from_bytes(base.gguf[at : at + width], "little")
    near = (old + 1, old - 1, old * 2, old // 2, old + 32, rng.randrange(48))
    value = rng.choice(near) if rng.random() < 0.7 else rng.choice(_NUMBERS)
    return ["bytes", "model.gguf", "number", at, (value & (256**width - 1)).to_bytes(width, "little").hex()]


def _tensor(rng: random.Random, base: Base, keys: list[str]) -> list[Any]:
    name = rng.choice(keys)
    shape = list(base.tensors[name].shape)
    if name.endswith(MARKER) and rng.random() < 0.7:
        content = json.loads(bytes(base.tensors[name].tolist()))
        path, value = _place(rng, content)
        return ["tensor", name, "text", json.dumps(_put(content, path, _value(rng, value)))]
    what = rng.choice(("drop", "dtype", "view", "shape", "fill", "element", "rename", "copy"))
    if what in ("dtype", "view"):
        return ["tensor", name, what, rng.choice(_DTYPES)]
    if what == "shape":
        if shape and rng.random() < 0.6:
            at = rng.randrange(len(shape))
            shape[at] = rng.choice((0, 1, shape[at] + 1, max(shape[at] - 1, 0), shape[at] * 2, shape[at] // 2))
        else:
            shape = rng.choice(([], [0], [1], [*shape, 1], [1, *shape], shape[::-1], [math.prod(shape)]))
        return ["tensor", name, what, shape]
    if what in ("fill", "element"):
        value = rng.choice(("nan", "inf", "-inf", 0, 1, -1, 255, 1e-45, 1e-30, 65504.0, 1e30, 3.4e38))
        return ["tensor", name, what, value, rng.getrandbits(16)]
    if what in ("rename", "copy"):
        return ["tensor", name, what, rng.choice((rng.choice(keys), _renamed(rng, name)))]
    return ["tensor", name, what]


def _renamed(rng: random.Random, name: str) -> str:
    layer, _, last = name.rpartition(".")
    return rng.choice((f"{layer}.{rng.choice(('weight', 'bias', 'g_idx', 'qweight', 'weight_scale', 'x'))}", last,
                       f"b.{name}", f"{name}.weight", "", f".{last}", name + "_2"))  # fmt: skip


@cache
def _documents(name: str) -> dict[str, Any]:
    """The JSON of a base by file, that of the header too."""
    base = bases()[name]
    files = dict(base.files)
    if base.gguf is None:
        files[base.store] = _parts(base.tensors, base.metadata)[0]
    return files


def _json(rng: random.Random, name: str) -> list[Any]:
    documents = _documents(name)
    file = rng.choice(sorted(documents))
    if file == bases()[name].store and rng.random() < 0.6:
        return _entry(rng, file, documents[file])
    path, value = _place(rng, documents[file])
    value = copy.deepcopy(value)
    if rng.random() < 0.12:
        return ["json", file, path, "delete"]
    if isinstance(value, str) and value[:1] in "{[" and rng.random() < 0.7:  # JSON in a string
        inner = json.loads(value)
        at, old = _place(rng, inner)
        _put(inner, at, _value(rng, old)) if at else None
        return ["json", file, path, "set", json.dumps(inner)]
    if rng.random() < 0.1:
        return ["json", file, [*path[:-1], rng.choice(_TEXTS)], "set", _value(rng, value)]
    return ["json", file, path, "set", _value(rng, value)]


def _entry(rng: random.Random, file: str, header: dict[str, Any]) -> list[Any]:
    """A change of the header of safetensors that the library itself does not refuse, or rarely."""
    name = rng.choice(sorted(header))
    entry = header[name]
    if name == "__metadata__" or rng.random() < 0.1:
        key = rng.choice((*sorted(header.get("__metadata__", {"format": ""})), rng.choice(_TEXTS)))
        return ["json", file, ["__metadata__", key], "set", rng.choice((*_TEXTS, *_keys_of(header)))]
    kind = rng.random()
    if kind < 0.4:
        return ["json", file, [name, "dtype"], "set", rng.choice(_SAME_SIZE[_size_of(entry)])]
    if kind < 0.8:
        shape, count = entry["shape"], math.prod(entry["shape"])
        divisors = [size for size in (2, 3, 4, 8, 16, 32, 64, 128) if count % size == 0]
        size = rng.choice(divisors or [1])
        others = [size, count // size], [count // size, size], [count], shape[::-1], [1, *shape], [*shape, 1]
        return ["json", file, [name, "shape"], "set", rng.choice((*others, [1] * 40 + shape))]
    same = [other for other in _keys_of(header) if _size_of(header[other], True) == _size_of(entry, True)]
    return ["json", file, [name, "data_offsets"], "set", header[rng.choice(same)]["data_offsets"]]


def _keys_of(header: dict[str, Any]) -> list[str]:
    return sorted(name for name in header if name != "__metadata__")


def _size_of(entry: dict[str, Any], whole: bool = False) -> int:
    """Bytes of a tensor in the header, or of an element."""
    begin, end = entry["data_offsets"]
    size: int = end - begin
    return size if whole else size // math.prod(entry["shape"])


def _place(rng: random.Random, document: Any) -> tuple[list[Any], Any]:
    """A path into a document, and the value there."""
    path: list[Any] = []
    while isinstance(document, (dict, list)) and document and (not path or rng.random() < 0.85):
        key = rng.choice(sorted(document)) if isinstance(document, dict) else rng.randrange(len(document))
        path.append(key)
        document = document[key]
    return path, document


def _value(rng: random.Random, old: Any) -> Any:
    if isinstance(old, (int, float)) and not isinstance(old, bool) and rng.random() < 0.6:
        return rng.choice((old + 1, old - 1, old * 2, -old, old // 2, float(old), str(old), rng.choice(_NUMBERS)))
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(_NUMBERS)
    if kind < 0.65:
        return rng.choice(_TEXTS)
    if kind < 0.7:
        return [old] * rng.choice((1, 2, 50))
    if kind < 0.72:
        return "deep"
    return rng.choice(_VALUES)


def _bytes(rng: random.Random, file: str, size: int) -> list[Any]:
    at, what = rng.randrange(size), rng.choice(("flip", "flip", "number", "number", "cut", "insert", "remove", "grow"))
    if what == "flip":
        return ["bytes", file, what, at, 1 << rng.randrange(8)]
    if what == "number":
        width = rng.choice((1, 2, 4, 8))
        value = rng.choice((*_NUMBERS, *(2**bits - 1 for bits in (8, 16, 32, 64)))) & (256**width - 1)
        return ["bytes", file, what, rng.choice((at, at & ~7, 0, 8, 16)), value.to_bytes(width, "little").hex()]
    if what == "insert":
        return ["bytes", file, what, at, rng.randbytes(rng.choice((1, 2, 8, 32))).hex()]
    if what == "remove":
        return ["bytes", file, what, at, rng.choice((1, 2, 8, 32))]
    return ["bytes", file, what, at if what == "cut" else rng.choice((1, 31, 4096))]


# ---- apply -----------------------------------------------------------------------------------------------------------


_of_bases: dict[int, tuple[Tensor, bytes]] = {}  # by id


def _bytes_of(tensor: Tensor) -> bytes:
    known = _of_bases.get(id(tensor))
    return known[1] if known else tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _parts(tensors: dict[str, Tensor], metadata: dict[str, str]) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    data, size = [], 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        content = _bytes_of(tensor)
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [size, size + len(content)],
        }
        data.append(content)
        size += len(content)
    return header, b"".join(data)


def _joined(header: Any, data: bytes) -> bytes:
    text = _dumped(header)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def _dumped(document: Any) -> bytes:
    return _text(json.dumps(document))


def _text(document: str) -> bytes:
    deep = "[" * 20000 + "]" * 20000
    return document.replace('"deep"', deep).encode(errors="surrogatepass")


def _put(document: Any, path: list[Any], value: Any, delete: bool = False) -> Any:
    if not path:
        return value
    holder = document
    try:
        for key in path[:-1]:
            holder = holder[key]
        if delete:
            del holder[path[-1]]
        else:
            holder[path[-1]] = value
    except (KeyError, IndexError, TypeError):  # an earlier step has removed it
        pass
    return document


def _changed(tensor: Tensor, what: str, value: Any, seed: int) -> Tensor:
    if what == "dtype":
        return tensor.to(getattr(torch, value))
    if what == "view":
        flat, dtype = tensor.contiguous().reshape(-1).view(torch.uint8), getattr(torch, value)
        if dtype == torch.bool:
            return tensor != 0
        flat = flat[: flat.numel() // dtype.itemsize * dtype.itemsize].clone().view(dtype)
        return flat.reshape(tensor.shape) if flat.numel() == tensor.numel() else flat
    if what == "shape":
        count = math.prod(value)
        flat = tensor.reshape(-1).view(torch.uint8)
        repeated = flat.repeat(-(-count * tensor.element_size() // max(flat.numel(), 1)) if flat.numel() else 0)
        missing = count * tensor.element_size() - repeated.numel()
        repeated = torch.cat((repeated, repeated.new_zeros(max(missing, 0))))
        return repeated[: count * tensor.element_size()].clone().view(tensor.dtype).reshape(value)
    number = float(value)
    if not tensor.is_floating_point():
        number = int(number) % 256 - (128 if tensor.dtype == torch.int8 else 0) if math.isfinite(number) else 77
        number = min(number, 1) if tensor.dtype == torch.bool else number
    filled = torch.full_like(tensor.float() if tensor.is_floating_point() else tensor, number).to(tensor.dtype)
    if what == "fill" or not tensor.numel():
        return filled
    at = torch.arange(tensor.numel()).reshape(tensor.shape) == seed % tensor.numel()
    raw = (t.contiguous().reshape(-1).view(torch.uint8).reshape(tensor.numel(), -1) for t in (filled, tensor))
    mixed = torch.where(at.reshape(-1, 1), *raw)
    return mixed.reshape(-1).view(tensor.dtype).reshape(tensor.shape)


def mutated(tensors: dict[str, Tensor], steps: list[list[Any]]) -> dict[str, Tensor]:
    tensors = dict(tensors)
    for _, name, what, *rest in steps:
        if name not in tensors:
            continue
        if what == "drop":
            del tensors[name]
        elif what == "text":
            tensors[name] = torch.tensor(list(_text(rest[0])), dtype=torch.uint8)
        elif what in ("rename", "copy"):
            tensors[rest[0]] = tensors[name] if what == "copy" else tensors.pop(name)
        else:
            tensors[name] = _changed(tensors[name], what, rest[0], rest[1] if len(rest) > 1 else 0)
    return tensors


def _damaged(content: bytes, what: str, value: Any, more: Any = None) -> bytes:
    if what == "cut":
        return content[:value]
    if what == "grow":
        return content + bytes(value)
    head, tail = content[:value], content[value:]
    if what == "flip":
        return head + bytes([tail[0] ^ more]) + tail[1:] if tail else content
    if what == "number":
        return head + bytes.fromhex(more) + tail[len(more) // 2 :]
    return head + bytes.fromhex(more) + tail if what == "insert" else head + tail[more:]


@cache
def _whole(name: str) -> dict[str, bytes]:
    """The files of a base by name, without mutations."""
    base = bases()[name]
    if base.gguf is not None:
        return {"model.gguf": base.gguf}
    files = {file: _dumped(document) for file, document in base.files.items()}
    _of_bases.update({id(tensor): (tensor, _bytes_of(tensor)) for tensor in base.tensors.values()})
    return files | {base.store: _joined(*_parts(base.tensors, base.metadata))}


def contents(case: dict[str, Any]) -> dict[str, bytes]:
    """The files of a case by name."""
    name = case["base"]
    base, files = bases()[name], dict(_whole(name))
    by_kind: dict[str, list[list[Any]]] = {"tensor": [], "json": [], "bytes": []}
    for step in case["steps"]:
        by_kind[step[0]].append(step)
    documents: dict[str, Any] = {}  # those that change
    data = b""
    changed = {file for _, file, *_ in by_kind["json"]}
    if by_kind["tensor"] or base.store in changed:
        documents[base.store], data = _parts(mutated(base.tensors, by_kind["tensor"]), base.metadata)
    for file in changed - {base.store}:
        documents[file] = json.loads(files[file])  # a copy
    for _, file, path, what, *value in by_kind["json"]:
        new = copy.deepcopy(value[0]) if value else None
        documents[file] = _put(documents[file], path, new, what == "delete")
    for file, document in documents.items():
        files[file] = _joined(document, data) if file == base.store else _dumped(document)
    for _, file, *step in by_kind["bytes"]:
        files[file] = _damaged(files[file], *step)
    return files
