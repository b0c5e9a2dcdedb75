"""The modules of a model without its numbers, so that a file of tensors is surveyed as a model is."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from ..checkpoints.base import Checkpoint
from .common import Failure, one_line


def skeleton(checkpoint: Checkpoint) -> nn.Module:
    """The model on meta, tied where it ties: of transformers by ``checkpoint.config``; without one by the names.

    Raises:
        Failure: there is a config, and transformers does not know the model or is not installed.
    """
    if not checkpoint.config:
        warnings.warn(
            "there is no config.json: every matrix named *.weight counts as a linear layer, unless its name speaks of "
            "an embedding. Use --exclude for what is none.",
            stacklevel=2,
        )
        return _by_names(checkpoint)
    return from_config(checkpoint.config)


def from_config(config: dict[str, Any]) -> nn.Module:
    """The model of transformers that config.json describes, on meta."""
    if "_class_name" in config:
        raise Failure(f"{config['_class_name']} is a model of diffusers: use qao.quantize_ and qao.save in Python")
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise Failure("config.json names no model_type, so it is not known which model this is")
    try:
        import transformers
    except ImportError:
        raise Failure("transformers is needed to know the layers of this model: pip install transformers") from None
    names = config.get("architectures") or []
    try:
        parsed = transformers.AutoConfig.for_model(**config)
        chosen: Any = getattr(transformers, str(names[0]), None) if names else transformers.AutoModel
        if chosen is None:
            raise Failure(f"transformers {transformers.__version__} has no {names[0]}")
        make = chosen.from_config if chosen is transformers.AutoModel else chosen._from_config
        with torch.device("meta"):
            model: nn.Module = make(parsed)
    except Failure:
        raise
    except Exception as error:  # whatever a hostile or unknown config makes of transformers
        raise Failure(f"config.json: transformers makes no {kind} model of it: {one_line(error)}") from error
    return model


def _by_names(checkpoint: Checkpoint) -> nn.Module:
    root = nn.Module()
    for key in checkpoint.others:
        shape, dtype = checkpoint.shape_dtype(key)
        *path, name, last = key.split(".") if key.count(".") else ("", key)
        if last != "weight" or len(shape) != 2 or not name:
            continue
        parent = root
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        embedding = any(word in key.lower() for word in ("embed", "wte", "wpe"))
        n, k = shape
        sizes = (n, k) if embedding else (k, n)
        options: Any = {"device": "meta", "dtype": dtype if dtype.is_floating_point else torch.float32}
        module = nn.Embedding(*sizes, **options) if embedding else nn.Linear(*sizes, bias=False, **options)
        if name in parent._modules:  # both a matrix and a parent of others
            module._modules.update(parent._modules[name]._modules)  # type: ignore[union-attr]
        parent.add_module(name, module)
    return root
