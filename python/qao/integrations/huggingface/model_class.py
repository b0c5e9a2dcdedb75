"""Configuration, class and dtype of a transformers model that ``qao.from_pretrained`` creates."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

import torch

from ...ops.library import cpu_features
from ...schemes import FLOAT_DTYPES
from ...schemes.gguf import GGUF_NUMBERS
from .config import QaoConfig

# Arguments of transformers' from_pretrained that locate a repository and its files.
HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision", "proxies")
CODE = ("trust_remote_code", "code_revision")
_BF16 = ("avx512_bf16", "amx")  # instruction sets with products of bfloat16
_GGUF = ("avx512", *_BF16)  # with integer kernels of GGUF blocks
_GGUF_BUT_4_BITS = ("avx2", "avx_vnni")  # where int4 is faster than Q4_0 and Q4_1


def configuration(
    content: dict[str, Any], source: str | None, options: dict[str, Any], more: dict[str, Any], from_file: bool = True
) -> tuple[Any, dict[str, Any]]:
    """The model's configuration without its quantization settings, and the remaining options.

    As in transformers, options that are configuration attributes set them, unless a whole configuration is given.
    """
    import transformers

    given = options.pop("config", None)
    if given is not None and not isinstance(given, (str, os.PathLike, transformers.PretrainedConfig)):
        raise TypeError(f"from_pretrained: config must be a configuration or a path, not {type(given).__name__}")
    source = os.fspath(given) if isinstance(given, (str, os.PathLike)) else source
    if isinstance(given, transformers.PretrainedConfig):
        config, rest = copy.deepcopy(given), options
    elif source is not None and (from_file or given is not None) and (content or given is not None):
        config, rest = transformers.AutoConfig.from_pretrained(source, return_unused_kwargs=True, **more, **options)
        for name in (*HUB, "subfolder", "_from_auto", "name_or_path", *CODE):
            rest.pop(name, None)
    elif "model_type" in content:
        cls = type(transformers.AutoConfig.for_model(**copy.deepcopy(content)))
        config, rest = cls.from_dict(copy.deepcopy(content), return_unused_kwargs=True, **options)
    else:
        from ...checkpoints import CheckpointError

        raise CheckpointError(f"{source}: no config.json describes the model; use qao.load(path, model)")
    for part in (config, *(part for part in vars(config).values() if isinstance(part, transformers.PretrainedConfig))):
        quantization = getattr(part, "quantization_config", None)
        if isinstance(quantization, dict) and quantization.get("quant_method") == "qao" and quantization.get("dtype"):
            stored: Any = QaoConfig.from_dict(quantization)
            config.dtype = stored.dtype  # a dtype, not its name: Apertus creates tensors with it
        if quantization is not None:
            del part.quantization_config
    return config, rest


def check_known(content: dict[str, Any], where: str) -> None:
    """Raise CheckpointError if the configuration, made from a GGUF file, is beyond this version of transformers."""
    import transformers

    from ...checkpoints import CheckpointError

    installed, remedy = f"transformers {transformers.__version__}", "pip install --upgrade transformers"
    if content["model_type"] not in transformers.CONFIG_MAPPING:
        raise CheckpointError(f"{where}: {installed} has no model of type {content['model_type']!r}: {remedy}")
    if "rope_parameters" in content and int(transformers.__version__.partition(".")[0]) < 5:
        raise CheckpointError(
            f"{where}: its blocks have rotary embeddings of several kinds, which {installed} does not have: {remedy}"
        )


def model_class(config: Any, auto_class: Any) -> Any:
    """The class of the model: ``auto_class``, or the class that the configuration names.

    The latter is a transformers class, a registered one, or an Auto class if the repository has custom code.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    if isinstance(auto_class, str):
        found = getattr(transformers, auto_class, None)
        if found is None:
            raise ValueError(f"from_pretrained: auto_class: transformers has no {auto_class!r}")
        return found
    if auto_class is not None:
        return auto_class
    named = (getattr(config, "architectures", None) or [""])[0]
    code = {name: str(ref).rpartition(".")[2] for name, ref in (getattr(config, "auto_map", None) or {}).items()}
    models = [name for name in code if name.startswith("AutoModel") and hasattr(transformers, name)]
    best = [name for name in models if code[name] == named]
    best += [name for name in ("AutoModelForCausalLM", "AutoModel") if name in models and not named]
    if best:
        return getattr(transformers, best[0])
    own = getattr(transformers, named, None) if named else None
    if own is not None:
        return own
    for auto in vars(modeling_auto).values():
        registered = getattr(getattr(auto, "_model_mapping", None), "_extra_content", {}).get(type(config))
        for one in registered if isinstance(registered, (list, tuple)) else [registered]:
            if one is not None and one.__name__ == named:
                return one
    raise ValueError(
        f"from_pretrained: config.json names the class {named!r}, which transformers does not have. Pass "
        "auto_class, for example transformers.AutoModelForCausalLM."
    )


def concrete_class(cls: Any, config: Any, source: str, code: dict[str, Any]) -> tuple[Any, Any]:
    """The class that an Auto class selects, and its part of the configuration."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module, resolve_trust_remote_code
    from transformers.models.auto.auto_factory import _get_model_class, add_generation_mixin_to_remote_model

    if not hasattr(cls, "_model_mapping"):
        return cls, config
    reference = (getattr(config, "auto_map", None) or {}).get(cls.__name__)
    known = type(config) in cls._model_mapping
    trusted = resolve_trust_remote_code(code.get("trust_remote_code"), source, known, reference is not None)
    local = _get_model_class(config, cls._model_mapping) if known else None
    if reference is not None and trusted and (local is None or local.__module__.startswith("transformers.")):
        more = {key: code[key] for key in ("code_revision",) if code.get(key) is not None}
        return add_generation_mixin_to_remote_model(get_class_from_dynamic_module(reference, source, **more)), config
    if local is None:
        raise ValueError(f"from_pretrained: auto_class: {cls.__name__} has no model for {type(config).__name__}")
    inner = (getattr(config, "sub_configs", None) or {}).get("text_config")
    if inner is not None and getattr(local, "config_class", None) is inner:
        config = config.get_text_config()
    return local, config


def dtype_of(config: Any, checkpoint: Any) -> torch.dtype:
    """The dtype of the config, else of the largest unquantized tensor.

    A GGUF file, in float32 otherwise, is computed in bfloat16 on a CPU that has instructions for it.
    """
    given = getattr(config, "dtype", None)
    if isinstance(given, str):
        given = next((one for one in FLOAT_DTYPES if str(one) == f"torch.{given.removeprefix('torch.')}"), None)
    if isinstance(given, torch.dtype):
        return given
    if getattr(checkpoint, "native", ()) and checkpoint.layers:
        return torch.bfloat16 if cpu_features()["selected"] in _BF16 else torch.float32
    if getattr(checkpoint, "mxfp4", False):
        return torch.bfloat16
    floats = [found for found in map(checkpoint.shape_dtype, checkpoint.others) if found[1].is_floating_point]
    return max(floats, key=lambda found: torch.Size(found[0]).numel())[1] if floats else torch.float32


def kept_gguf_types(device_map: Any) -> tuple[str, ...]:
    """Types of GGUF blocks with a kernel that is faster than other weights, on the CPU that holds all of a model."""
    if not _is_on_cpu(device_map):
        return ()
    selected = cpu_features()["selected"]
    if selected in _GGUF_BUT_4_BITS:
        return tuple(kind for kind in GGUF_NUMBERS if kind not in ("Q4_0", "Q4_1"))
    return tuple(GGUF_NUMBERS) if selected in _GGUF else ()


def _is_on_cpu(device_map: Any) -> bool:
    if device_map is None:
        return torch.get_default_device().type == "cpu"
    if isinstance(device_map, str) and device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        return not torch.cuda.is_available()
    devices = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    return all(not isinstance(one, int) and torch.device(one).type == "cpu" for one in devices if one != "disk")
