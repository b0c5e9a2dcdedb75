"""Mutated checkpoints of every format, through every reader.

A reader may read a mutated file, if shapes, dtypes and scales are then sound, or refuse it by ``CheckpointError`` with
the name of the file. Anything else is a finding: another exception, a crash, a hang, too much memory.

A case is a base and a list of steps, so that a found case can be shortened and kept: first of tensors, then of JSON,
then of bytes.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import re
import shutil
import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import qao
import torch
from qao.checkpoints import CheckpointError, open_checkpoint
from qao.checkpoints.shard_writer import DTYPES
from qao.nn.marker import MARKER
from torch import Tensor, nn

from .bases import Base, bases
from .finding import Finding, check

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
_VALUES = (None, True, False, 0.5, -0.0, 1e-300, 1e300, [], {}, [[]], [None], {"a": 1}, [1, 2], [128, 128], ["Linear"])


# ---- draw ------------------------------------------------------------------------------------------------------------


def draw(rng: random.Random) -> dict[str, Any]:
    name = rng.choice(sorted(bases()))
    base = bases()[name]
    steps = [_step(rng, name, base) for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5)))]
    # qao.load costs more than the rest
    return {
        "base": name,
        "load": rng.random() < 0.4,
        "steps": sorted(steps, key=lambda step: ("tensor", "json", "bytes").index(step[0])),
    }


def _step(rng: random.Random, name: str, base: Base) -> list[Any]:
    if base.gguf is not None:
        return _bytes(rng, "model.gguf", len(base.gguf))
    kind = rng.random()
    if kind < 0.4:
        return _tensor(rng, base)
    if kind < 0.8:
        return _json(rng, name)
    return _bytes(rng, base.store, 600 if rng.random() < 0.7 else 4000)


def _tensor(rng: random.Random, base: Base) -> list[Any]:
    name = rng.choice(sorted(base.tensors))
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
        return ["tensor", name, what, rng.choice((rng.choice(sorted(base.tensors)), _renamed(rng, name)))]
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
    file = rng.choice(sorted(_documents(name)))
    path, value = _place(rng, _documents(name)[file])
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


def _parts(tensors: dict[str, Tensor], metadata: dict[str, str]) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    data = b""
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        ends = [len(data), len(data) + len(content)]
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": ends}
        data += content
    return header, data


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


def _tensors(tensors: dict[str, Tensor], steps: list[list[Any]]) -> dict[str, Tensor]:
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


def contents(case: dict[str, Any]) -> dict[str, bytes]:
    """The files of a case by name."""
    base, steps = bases()[case["base"]], case["steps"]
    by_kind = {kind: [step for step in steps if step[0] == kind] for kind in ("tensor", "json", "bytes")}
    files: dict[str, bytes] = {}
    documents = copy.deepcopy(base.files)
    data = b""
    if base.gguf is None:
        documents[base.store], data = _parts(_tensors(base.tensors, by_kind["tensor"]), base.metadata)
    for _, file, path, what, *value in by_kind["json"]:
        new = copy.deepcopy(value[0]) if value else None
        documents[file] = _put(documents[file], path, new, what == "delete")
    for file, document in documents.items():
        files[file] = _joined(document, data) if file == base.store else _dumped(document)
    if base.gguf is not None:
        files["model.gguf"] = base.gguf
    for _, file, *step in by_kind["bytes"]:
        files[file] = _damaged(files[file], *step)
    return files


# ---- run -------------------------------------------------------------------------------------------------------------


def run(case: dict[str, Any], device: str) -> int:
    """Write the files of a case and read them. Returns the number of files read."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="qao-fuzz-", dir=memory if os.access(memory, os.W_OK) else None))
    try:
        for name, content in contents(case).items():
            (folder / name).write_bytes(content)
        path = folder / "model.gguf" if bases()[case["base"]].gguf is not None else folder
        try:
            _read(path)
        except CheckpointError as error:
            _check_refusal(error, folder)
        if bases()[case["base"]].model is not None and case.get("load", True):
            _load(case, path)
    finally:
        shutil.rmtree(folder)
    return 1


def _load(case: dict[str, Any], path: Path) -> None:
    """The same file by ``qao.load``, and its tensors by ``load_state_dict``; what loads must run."""
    base = bases()[case["base"]]
    assert base.model is not None
    try:
        _run(qao.load(path, base.model()))
    except ValueError as error:  # CheckpointError too
        check(len(str(error)) > 10, f"a refusal of load without a reason: {error!r}")
    state = _tensors(base.tensors, [step for step in case["steps"] if step[0] == "tensor"])
    model = base.model()
    try:
        model.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        named = re.search(r"\b[012]\b|Unexpected key|single quantized layer", str(error))
        check(named is not None, f"no layer is named: {error}")
        return
    _run(model)


def _run(model: nn.Module) -> None:
    dtype = next((p.dtype for p in model.parameters() if p.dtype in (torch.float16, torch.bfloat16)), torch.float32)
    try:
        model(torch.ones(2, 64, dtype=dtype))
    except (RuntimeError, NotImplementedError) as error:  # of torch: dtypes of a norm
        named = re.search("dtype|scalar type|not implemented for|qao::", str(error))
        check(named is not None, f"the model does not run: {error}")


def _check_refusal(error: CheckpointError, folder: Path) -> None:
    text = str(error)
    check(str(folder) in text, f"a refusal that does not name the file: {text[:400]}")
    check("alloc" not in text and "out of memory" not in text, f"too much memory: {text[:400]}")
    check(len(text) <= 2000, f"a refusal of {len(text)} characters: {text[:200]}")


def _multiply(layer: Any, packed: dict[str, Tensor]) -> None:
    sizes = layer.in_features, layer.out_features
    linear = qao.QuantLinear.empty(*sizes, bias=False, scheme=layer.scheme, dtype=torch.float32)
    try:
        linear.load_state_dict(packed, strict=False, assign=True)
    except RuntimeError as error:  # without the marker, values in place of padding are another size
        check(str(error).startswith("Error(s) in loading"), f"{layer.name}: {error}")
        return
    y = linear(torch.ones(2, layer.in_features))
    check(y.shape == (2, layer.out_features), f"{layer.name}: y is {list(y.shape)}")


def _read(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    check(isinstance(checkpoint.config, dict), "config is no object")
    for layer in checkpoint.layers.values():
        expected = layer.meta()
        packed = layer.pack()
        for name, tensor in packed.items():
            wanted = expected.get(name)
            if wanted is None or wanted.shape != tensor.shape or wanted.dtype != tensor.dtype:
                raise Finding(f"{layer.name}.{name} is {tensor.dtype}{list(tensor.shape)}, meta() says {wanted}")
            if tensor.is_floating_point() and not tensor.float().isfinite().all():
                raise Finding(f"{layer.name}.{name} is not finite")
        check(packed.keys() == expected.keys(), f"{layer.name}: pack() gives {list(packed)}")
        if layer.experts is None and layer.out_features * layer.in_features < 1 << 20:
            _multiply(layer, packed)
    for name in checkpoint.others:
        tensor, (shape, dtype) = checkpoint.tensor(name), checkpoint.shape_dtype(name)
        check((tuple(tensor.shape), tensor.dtype) == (tuple(shape), dtype), f"{name}: {tensor.shape} for {shape}")
