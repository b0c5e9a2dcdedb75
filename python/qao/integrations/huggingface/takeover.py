"""Loads other libraries' quantized checkpoints onto qao's layers in transformers' ``from_pretrained``.

transformers passes compressed-tensors, GPTQ, AWQ, fp8 and torchao checkpoints to the library named in config.json,
which may decompress the weights. ``register`` makes ``PreTrainedModel.from_pretrained`` pass supported ones to
``qao.from_pretrained`` instead. To disable this, set ``QAO_TAKEOVER=0`` in the environment, or pass a
``quantization_config`` of the other library in one call. qao's own checkpoints take this way if ``key_mapping`` renames
their layers.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...quantization.rules import differing
from ...schemes import Scheme
from ..imports import register_part
from ..wrapping import wrap
from .compiled_generate import with_backend, with_deferred_stop, with_rounded_cache
from .config import QaoConfig
from .decoding_loop import with_decoding_loop
from .decoding_mask import with_decoding_mask
from .from_pretrained import from_pretrained as load
from .from_pretrained import renamed
from .loading import Unfit

SWITCH = "QAO_TAKEOVER"
METHODS = ("compressed-tensors", "gptq", "awq", "auto_round", "fp8", "fbgemm-fp8", "modelopt", "mxfp4", "torchao")
_HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies")


def register() -> None:
    """Called after transformers has defined its base class of models."""
    from transformers import modeling_utils
    from transformers.generation import utils

    register_part("qao.integrations.huggingface.transformers", "watch_loading")
    wrap(modeling_utils.PreTrainedModel, "from_pretrained", _from_pretrained)
    wrap(modeling_utils.PreTrainedModel, "get_compiled_call", with_backend)
    wrap(utils, "create_masks_for_generate", with_decoding_mask)
    for name in ("_prepare_static_cache", "_get_cache"):  # private methods, the second before version 5
        if hasattr(utils.GenerationMixin, name):
            wrap(utils.GenerationMixin, name, with_rounded_cache)
    if hasattr(utils.GenerationMixin, "_sample"):
        wrap(utils.GenerationMixin, "_sample", with_decoding_loop)
    if hasattr(utils, "DeferredStopCheck"):  # since transformers 5.17
        wrap(utils.DeferredStopCheck, "is_supported", with_deferred_stop)


def _from_pretrained(upstream: Any) -> Any:
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *model_args: Any, **options: Any) -> Any:
        path = _base_of(pretrained_model_name_or_path, options)
        found, method = (None, "none") if path is None else _quantization(path, options)
        given = options.get("quantization_config")
        if method == "qao" and found is not None and isinstance(given, QaoConfig):
            _check_again(path, _layers(found), given)
            options = {name: value for name, value in options.items() if name != "quantization_config"}
        other = method in METHODS and (given is None or isinstance(given, QaoConfig)) and is_on()
        whole = functools.partial(upstream, cls, pretrained_model_name_or_path, *model_args, **options)
        if other or (method == "qao" and found is not None and _renames(options.get("key_mapping"), found)):
            return _take(cls, whole, path, model_args, options, again=method == "mxfp4", fall_back=other)
        return whole()

    return from_pretrained


def is_on() -> bool:
    return os.environ.get(SWITCH, "1").lower() not in ("0", "false", "off", "no")


def _base_of(path: Any, options: dict[str, Any]) -> Any:
    """``path``, or the base model of a PEFT adapter in this directory, as Auto classes resolve it."""
    folder = Path(path) if isinstance(path, (str, os.PathLike)) else Path("/dev/null")
    file = folder / "adapter_config.json"
    if options.get("config") is not None or not file.is_file() or (folder / "config.json").exists():
        return path
    try:
        base = json.loads(file.read_text()).get("base_model_name_or_path")
    except ValueError:  # reported by transformers
        return path
    return base or path


def _quantization(path: Any, options: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, str]:
    """The quantization settings of a checkpoint, or None, and their method.

    They are looked up as ``open_checkpoint`` does it: for settings that transformers does not see, such as those of a
    quantize_config.json, it would load no weights and only log that. A repository of the hub only has its config.json
    here.
    """
    from transformers import PretrainedConfig

    from ...checkpoints import CheckpointError
    from ...checkpoints.opening import method_of, take_settings

    if options.get("state_dict") is not None or options.get("gguf_file") is not None:
        return None, "none"
    config = options.get("config")
    if isinstance(config, PretrainedConfig):
        holders = {"": config, "text_config": getattr(config, "text_config", None)}
        names = ("quantization_config", "compression_config")
        parts = {key: {name: getattr(holder, name, None) for name in names} for key, holder in holders.items()}
        content: dict[str, Any] = parts.pop("") | parts
    else:
        hub = {name: options[name] for name in _HUB if name in options}
        try:
            content, _ = PretrainedConfig.get_config_dict(path if config is None else config, **hub)
        except (OSError, ValueError):  # only an adapter, or nothing: transformers reports which
            return None, "none"
    try:
        found = take_settings(content, Path(path) / (options.get("subfolder") or ""))
        return (None, "none") if found is None else (found.values, method_of(found))
    except CheckpointError:  # transformers reports settings that are no object
        return None, "none"


def _layers(found: Mapping[str, Any]) -> Mapping[str, Scheme]:
    config: Any = QaoConfig.from_dict(found)
    return config.layers  # type: ignore[no-any-return]


def _renames(mapping: Mapping[str, str] | None, found: Mapping[str, Any]) -> bool:
    """Whether ``key_mapping`` renames layers in a qao configuration; transformers only renames tensors."""
    return mapping is not None and any(renamed(name, mapping) != name for name in _layers(found))


def _take(
    cls: Any,
    upstream: functools.partial[Any],
    path: Any,
    model_args: tuple[Any, ...],
    options: dict[str, Any],
    *,
    again: bool,
    fall_back: bool,
) -> Any:
    """``qao.from_pretrained``, or ``upstream`` if that cannot load the checkpoint.

    Args:
        again: a QaoConfig may quantize the checkpoint with another scheme, as most of the model is in float.
        fall_back: ``upstream`` may load what qao cannot; otherwise the error is raised.
    """
    from ...checkpoints import CheckpointError, open_checkpoint

    kept = dict(options)
    given = None if again else kept.pop("quantization_config", None)
    if given is not None and os.path.isdir(path):
        opened = open_checkpoint(os.path.join(path, kept.get("subfolder") or ""))
        _check_again(path, {name: layer.scheme for name, layer in opened.layers.items()}, given)
    old = kept.pop("torch_dtype", None)
    dtype = kept.pop("dtype", None) or old
    if dtype not in (None, "auto"):
        kept["dtype"] = dtype
    more = dict(kept.pop("adapter_kwargs", None) or {})
    named, adapter = kept.pop("adapter_name", "default"), more.pop("_adapter_model_path", None)
    requested = upstream.args[1]
    try:
        _check_options(options)
        loaded = load(path, *model_args, auto_class=cls, **kept)
    except (CheckpointError, Unfit) as error:
        if not fall_back:
            raise
        warnings.warn(f"{path}: loaded as without qao ({SWITCH}=0), not onto qao's layers: {error}", stacklevel=3)
        return upstream()
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    model.name_or_path = model.config.name_or_path = str(path)
    adapter = adapter or (None if requested == path else requested)
    if adapter is not None and not getattr(model, "_hf_peft_config_loaded", False):
        model.load_adapter(str(adapter), adapter_name=named, adapter_kwargs=more)
    return loaded


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise Unfit for file options of transformers that qao does not support."""
    device_map = options.get("device_map")
    if isinstance(device_map, Mapping) and "disk" in device_map.values():
        raise Unfit("device_map leaves layers on the disk")
    if options.get("use_safetensors") is False:
        raise Unfit("use_safetensors=False, but qao only reads safetensors")


def _check_again(path: Any, layers: Mapping[str, Scheme], given: QaoConfig) -> None:
    """Raise ValueError if a quantized checkpoint would be quantized with another scheme."""
    if given.scheme is None:
        return
    other = differing(layers, given.scheme)
    if other is None:
        return
    name, has, wanted = other
    raise ValueError(
        f"{path}: this checkpoint is already quantized: {name} is {has}, but quantization_config asks for {wanted}. "
        "Leave quantization_config out, or load and quantize the float checkpoint."
    )
