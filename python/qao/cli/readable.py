"""Check that qao.from_pretrained will find every tensor of a model, by names and shapes alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..checkpoints import open_checkpoint
from ..checkpoints.base import Checkpoint
from ..integrations.huggingface import loading
from ..nn.marker import MARKER, TRIPWIRE
from ..nn.packed_module import PackedModule
from ..quantization.skeleton import prepare_layers
from ..schemes import Scheme
from .common import Failure
from .names import Names
from .skeleton import model_of


def reading_problems(
    checkpoint: Checkpoint, layers: Mapping[str, Scheme] | None = None, trust: bool = False
) -> list[str]:
    """Tensors that the reader would miss or have left over; empty if no config.json names the model.

    ``layers``: the quantized layers by their names in config.json, if listed there.
    """
    if not checkpoint.config:
        return []
    try:
        model = model_of(checkpoint, trust)
    except Failure:  # transformers does not know the model: nothing to compare
        return []
    # Sorted, so that the first mismatch is the same in source and result.
    schemes = dict(sorted((layers or {name: layer.scheme for name, layer in checkpoint.layers.items()}).items()))
    try:
        prepare_layers(model, loading._names_in(model, schemes))
    except ValueError as error:
        return [str(error)]
    names = Names({name: tuple(tensor.shape) for name, tensor in checkpoint.state_dict().items()}, model)
    hidden = _hidden(model)
    expected: dict[str, Any] = model.state_dict(keep_vars=True)
    found = {id(expected[name]) for name in names.groups if name in expected}
    missing = [name for name, tensor in expected.items() if id(tensor) not in found and name not in hidden]
    problems = [f"{name} is missing" for name in missing]
    ignored = [re.compile(one) for one in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    left_over = [
        name
        for name in names.left_over
        if not any(one.search(name) for one in ignored) and not checkpoint.is_zero_bias(name)
    ]
    return problems + [f"{name} is not a tensor of the model" for name in left_over]


def check_readable(directory: Path, layers: Mapping[str, Scheme], known: list[str], trust: bool = False) -> None:
    """Raise Failure if the reader would find a problem not ``known`` from the source."""
    problems = [one for one in reading_problems(open_checkpoint(directory), layers, trust) if one not in known]
    if problems:
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise Failure(
            f"the result could not be loaded, so nothing is written: {'; '.join(problems[:3])}{more}. In Python, "
            "qao.from_pretrained(MODEL, scheme=...).save_pretrained(OUT) does the same in memory"
        )


def _hidden(model: nn.Module) -> set[str]:
    """Entries of a state dict that are not tensors: markers."""
    return {
        f"{name}.{key}" if name else key
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, PackedModule)
        for key in (MARKER, TRIPWIRE)
    }
