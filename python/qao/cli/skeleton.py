"""Module tree of a model on meta, so that a file is surveyed like a model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoints.base import Checkpoint
from .common import Failure, one_line


def skeleton(checkpoint: Checkpoint, trust: bool = False) -> nn.Module:
    """The model on meta with its tied weights: from transformers and config.json, or from tensor names.

    Raises:
        Failure: there is a config, but transformers does not know the model or is not installed.
    """
    if not checkpoint.config:
        warnings.warn(
            "there is no config.json: every matrix named *.weight is treated as a linear layer, unless its name "
            "suggests an embedding. Use --exclude for other matrices.",
            stacklevel=2,
        )
        return _by_names(checkpoint)
    return model_of(checkpoint, trust)


def model_of(checkpoint: Checkpoint, trust: bool = False) -> nn.Module:
    """The transformers model of config.json on meta; ``trust``: run code in its directory.

    Raises:
        Failure: there is no config, or transformers cannot create a model from it.
    """
    config = checkpoint.config
    if "_class_name" in config:
        raise Failure(f"{config['_class_name']} is a diffusers model: use qao.quantize_ and qao.save in Python")
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise Failure("config.json has no model_type, so the model class is unknown")
    try:
        import transformers
    except ImportError:
        raise Failure("transformers is needed to find the layers of this model: pip install transformers") from None
    files = getattr(checkpoint, "_files", None)
    directory = None if files is None else files.directory
    if config.get("auto_map") and not trust and kind not in transformers.CONFIG_MAPPING:
        raise Failure(f"the code of {kind} is in the model's directory: --trust-remote-code allows it to run")
    try:
        parsed = _parsed(config, directory, trust)
        chosen = _class_of(parsed, directory, trust)
        make = chosen.from_config if chosen is transformers.AutoModel else chosen._from_config
        with torch.device("meta"):
            model: nn.Module = make(parsed)
    except Failure:
        raise
    except Exception as error:  # a hostile or unknown config can cause any error
        raise Failure(f"config.json: transformers cannot make a {kind} model from it: {one_line(error)}") from error
    return model


def _parsed(config: dict[str, Any], directory: Path | None, trust: bool) -> Any:
    """The configuration without its quantization settings."""
    import transformers

    if directory is not None and (directory / "config.json").exists():
        parsed = transformers.AutoConfig.from_pretrained(str(directory), trust_remote_code=trust)
    else:
        parsed = transformers.AutoConfig.for_model(**config)
    for part in (parsed, *(part for part in vars(parsed).values() if isinstance(part, transformers.PretrainedConfig))):
        vars(part).pop("quantization_config", None)
    return parsed


def _class_of(parsed: Any, directory: Path | None, trust: bool) -> Any:
    import transformers

    name = (getattr(parsed, "architectures", None) or [None])[0]
    known: Any = transformers.AutoModel if name is None else getattr(transformers, str(name), None)
    own: dict[str, str] = getattr(parsed, "auto_map", None) or {}
    if known is not None and not (trust and own):
        return known
    reference = next((one for one in own.values() if str(one).rpartition(".")[2] == name), None)
    if reference is None:
        if known is None:
            raise Failure(f"transformers {transformers.__version__} has no {name}")
        return known
    if not trust:
        raise Failure(f"the code of {name} is in the model's directory: --trust-remote-code allows it to run")
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    return get_class_from_dynamic_module(reference, str(directory))


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
        if name in parent._modules:  # both a matrix and a parent of other modules
            module._modules.update(parent._modules[name]._modules)  # type: ignore[union-attr]
        parent.add_module(name, module)
    return root
