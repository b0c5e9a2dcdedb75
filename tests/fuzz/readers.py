"""Mutated checkpoints of every format, through every reader.

A reader may read a mutated file, if shapes, dtypes and scales are then sound, or refuse it by ``CheckpointError`` with
the name of the file. Anything else is a finding: another exception, a crash, a hang, too much memory.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import qao
import torch
from qao.checkpoints import CheckpointError, open_checkpoint
from torch import Tensor, nn

from .bases import Base, bases
from .finding import Finding, check
from .mutations import contents, draw, mutated

__all__ = ["draw", "run"]


@cache
def _folder() -> Path:
    """A folder for the files of a case, in memory if possible."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="qao-fuzz-", dir=memory if os.access(memory, os.W_OK) else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


_written: dict[str, bytes] = {}  # the files in the folder


def _write(files: dict[str, bytes]) -> Path:
    """Write the files that differ from those of the case before, which may be mapped and keep their content."""
    folder = _folder()
    for name in [name for name, content in _written.items() if files.get(name) != content]:
        os.unlink(f"{folder}/{name}")
        del _written[name]
    for name, content in files.items():
        if name not in _written:
            with open(f"{folder}/{name}", "xb", buffering=0) as file:
                check(file.write(content) == len(content), "no space for the file of a case")
            _written[name] = content
    return folder


def run(case: dict[str, Any], device: str) -> int:
    """Write the files of a case and read them. Returns the number of files read."""
    base = bases()[case["base"]]
    folder = _write(contents(case))
    path = folder / "model.gguf" if base.gguf is not None else folder
    try:
        _read(path)
    except CheckpointError as error:
        _check_refusal(error, folder)
    if base.model is not None and case.get("load", True):
        _load(case, path)
    return 1


def _load(case: dict[str, Any], path: Path) -> None:
    """The same file by ``qao.load``, and its tensors by ``load_state_dict``; what loads must run."""
    base = bases()[case["base"]]
    assert base.model is not None
    try:
        _run(qao.load(path, base.model()))
    except ValueError as error:  # CheckpointError too
        check(len(str(error)) > 10, f"a refusal of load without a reason: {error!r}")
    steps = [step for step in case["steps"] if step[0] == "tensor"]
    if steps or case["base"] not in _loaded:
        _load_state(base, mutated(base.tensors, steps))
    if not steps:
        _loaded.add(case["base"])


_loaded: set[str] = set()  # bases that load_state_dict has loaded without mutations


def _load_state(base: Base, state: dict[str, Tensor]) -> None:
    assert base.model is not None
    model = base.model()
    try:
        model.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        # The model itself has no name, but its marker has one.
        named = re.search(r"\b[012]\b|\bpip_install_qao:|Unexpected key|single quantized layer", str(error))
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


_multiplied: dict[Any, dict[str, Tensor]] = {}  # the last weight of a layer


def _multiply(layer: Any, packed: dict[str, Tensor]) -> None:
    """A product with a weight that is not the last of this layer, which most mutations leave as it is."""
    key = layer.scheme, layer.name, layer.in_features, layer.out_features
    last = _multiplied.get(key, {})
    if last.keys() == packed.keys() and all(torch.equal(last[name], tensor) for name, tensor in packed.items()):
        return
    sizes = layer.in_features, layer.out_features
    linear = qao.QuantLinear.empty(*sizes, bias=False, scheme=layer.scheme, dtype=torch.float32)
    try:
        linear.load_state_dict(packed, strict=False, assign=True)
    except RuntimeError as error:  # without the marker, values in place of padding are another size
        check(str(error).startswith("Error(s) in loading"), f"{layer.name}: {error}")
        return
    y = linear(torch.ones(2, layer.in_features))
    check(y.shape == (2, layer.out_features), f"{layer.name}: y is {list(y.shape)}")
    if len(_multiplied) > 1000:
        _multiplied.clear()
    _multiplied[key] = packed


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
