"""qao.from_pretrained: a transformers model with quantized layers from any checkpoint that qao opens."""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ... import _words
from ...ops import modes
from ...schemes import Fp4WeightOnly, Scheme
from .config import QaoConfig
from .lazy_state import LazyValue, lazy_state
from .loading import Unfit
from .model_class import CODE, HUB, check_known, concrete_class, configuration, dtype_of, kept_gguf_types, model_class

_Schemes = Scheme | Mapping[str, Scheme | None]


@modes.neutral(defaults=False)
def from_pretrained(
    path: str | os.PathLike[str] | None,
    *model_args: Any,
    scheme: _Schemes | None = None,
    device_map: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    embeddings: bool = False,
    auto_class: Any = None,
    dequantize: bool = False,
    **options: Any,
) -> Any:
    """Load a transformers model and keep its layers quantized, in four or eight bits, on qao's operators.

    Args:
        path: an argument of ``qao.checkpoints.open_checkpoint``: a directory with config.json and safetensors
            (compressed- tensors, GPTQ, AWQ, AutoRound, fp8, fbgemm_fp8, ModelOpt, torchao, qao's own, or float), a
            .safetensors file or an index of several, a .gguf file; or the name of a repository on the Hugging Face hub,
            which is downloaded. None: with ``config`` and ``state_dict``, as in transformers.
        model_args: arguments of the model's class, as in transformers.
        scheme: how to quantize a float checkpoint during loading, as in ``qao.QaoConfig``. This includes GPT-OSS's
            MXFP4 experts; None keeps their values and leaves its other layers unchanged. For a GGUF file, how to
            quantize the layers that no qao format holds exactly; the others keep their values.
        device_map: as in transformers, for example "auto".
        device: one device for the whole model; instead of ``device_map``.
        dtype: dtype of unquantized tensors; None or "auto": that of the checkpoint; for GGUF on a CPU, bfloat16 if
            the CPU has instructions for it.
        embeddings: with ``scheme``, quantize tied embeddings too.
        auto_class: the class of the model, or an Auto class; None: the class in config.json.
        dequantize: for a GGUF file: read layers that are not in Q4_0 or Q4_1 as float, exactly, and take a file without
            quantized layers. Otherwise these keep the file's blocks on a CPU (``GgufWeightOnly``); on a GPU, Q8_0 is
            rounded to int8, and others are float.
        options: every other argument of transformers' ``from_pretrained``, with the same meaning: for the hub
            (``revision``, ``subfolder``, ``cache_dir``, ``token`` …), files (``variant``, ``gguf_file`` …), the
            configuration (``use_cache=False``, ``num_labels=3`` …), and the rest. ``quantization_config`` takes a
            ``qao.QaoConfig`` or a scheme, instead of ``scheme``.

    Returns:
        The model in evaluation mode; with ``output_loading_info=True`` a pair of the model and transformers' dict.

    Raises:
        CheckpointError: the checkpoint is damaged, has no qao kernel, or does not match the model: tensors are missing
            or left over. With ``auto_class``, transformers reports such tensors instead.
        OSError: a file cannot be opened, for example without permission.
        ValueError: no scheme for a float checkpoint; a scheme, or ``embeddings``, for a quantized one; an argument that
            is incompatible with this checkpoint.
        TypeError: an argument has the wrong type.
        ImportError: transformers is not installed.
    """
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ImportError("qao.from_pretrained needs transformers: pip install transformers accelerate") from error
    if device is not None and device_map is not None:
        raise ValueError("from_pretrained: pass device or device_map, not both")
    where = {"": torch.device(device)} if device is not None else device_map
    quantization = _quantization(scheme, embeddings, options)
    torch_dtype = options.pop("torch_dtype", None)
    request = _Request(path, model_args, where, _dtype_named(torch_dtype if dtype is None else dtype), auto_class)
    if path is None:
        if options.get("state_dict") is None or options.get("config") is None:
            raise ValueError("from_pretrained: without a path, both config and state_dict are needed")
        return _from_floats(request, {}, _needed(quantization, "state_dict"), options)
    if options.get("state_dict") is not None:
        raise ValueError("from_pretrained: pass a path or state_dict, not both")
    local = _local(path, options)
    base = _base_of_adapter(local)
    if base is not None:
        return _with_adapter(base, local, request, quantization, dequantize, options)
    if options.get("use_safetensors") is False and not dequantize:
        content = _content(local)
        if not any(content.get(key) for key in ("quantization_config", "compression_config")):
            return _from_floats(request, content, _needed(quantization, local), options)
        raise ValueError("from_pretrained: use_safetensors=False: quantized weights are only read from safetensors")
    return _from_checkpoint(request, local, quantization, dequantize, options)


@dataclass
class _Request:
    """Arguments of one ``from_pretrained`` call."""

    path: str | os.PathLike[str] | None
    model_args: tuple[Any, ...]
    device_map: Any
    dtype: torch.dtype | str | None
    auto_class: Any


def _quantization(scheme: _Schemes | None, embeddings: bool, options: dict[str, Any]) -> QaoConfig | None:
    """The quantization from ``scheme`` or ``quantization_config``. Removes arguments that models reject."""
    if "return_unused_kwargs" in options:
        raise TypeError("from_pretrained: return_unused_kwargs is an argument of configurations, not of models")
    given = options.pop("quantization_config", None)
    if given is None:
        if embeddings and scheme is None:
            return QaoConfig(None, embeddings=True)
        return None if scheme is None else QaoConfig(scheme, embeddings=embeddings)
    if scheme is not None:
        raise ValueError("from_pretrained: pass scheme or quantization_config, not both")
    if isinstance(given, (Scheme, Mapping)) and not (isinstance(given, Mapping) and "quant_method" in given):
        return QaoConfig(given, embeddings=embeddings)
    if isinstance(given, Mapping) and given["quant_method"] == "qao":
        read: Any = QaoConfig.from_dict(given)
        given = read
    if not isinstance(given, QaoConfig):
        raise TypeError(
            f"from_pretrained: quantization_config must be a qao.QaoConfig or a scheme, not "
            f"{_words.described(given)}. transformers loads models that other libraries quantize."
        )
    if embeddings and not given.embeddings:
        given = copy.deepcopy(given)
        given.embeddings = True
    return given


def _needed(quantization: QaoConfig | None, what: object) -> QaoConfig:
    if quantization is None or quantization.scheme is None:
        raise ValueError(
            f"from_pretrained: {what} is not quantized. Pass a scheme to quantize it while it is loaded, for "
            "example scheme=qao.Int4WeightOnly()."
        )
    return quantization


def _dtype_named(dtype: Any) -> torch.dtype | str | None:
    if dtype is None or dtype == "auto":
        return None
    named = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype) or not named.is_floating_point:
        raise (TypeError if not isinstance(dtype, str) else ValueError)(
            f'from_pretrained: dtype must be "auto" or a float dtype such as torch.bfloat16, not {dtype!r}'
        )
    return named


# ---- locating files


def _local(path: str | os.PathLike[str], options: dict[str, Any]) -> Path:
    """The directory of the model, or its file."""
    from ...checkpoints.hub import local_copy

    folder, gguf_file = options.get("subfolder") or "", options.get("gguf_file")
    local = local_copy(
        path,
        subfolder=folder,
        gguf_file=gguf_file,
        code=bool(options.get("trust_remote_code")),
        pickles=options.get("use_safetensors") is False,
        **{key: options[key] for key in HUB if key in options and key != "proxies"},
    )
    if not local.is_dir():
        for name in ("subfolder", "variant", "gguf_file"):
            if options.get(name):
                raise ValueError(f"from_pretrained: {name} needs a directory or repository, and {path} is a file")
        return local
    return local / folder / gguf_file if gguf_file else local / folder


def _weights(local: Path, options: dict[str, Any]) -> tuple[Path, bool]:
    """The path to open, and whether transformers finds these weights in the directory."""
    if not local.is_dir():
        return local, False
    explicit, variant = _content(local).get("transformers_weights"), options.get("variant")
    ending = "" if variant is None else f".{variant}"
    names = [f"model{ending}.safetensors", f"model.safetensors.index{ending}.json"]
    if isinstance(explicit, str) and Path(explicit).name == explicit:
        names = [explicit]
    found = next((local / name for name in names if (local / name).exists()), None)
    if variant is not None and found is None:
        from ...checkpoints import CheckpointError

        missing = f"{local}: variant={variant!r}: no file {' or '.join(names)}"
        raise CheckpointError(f"{missing}. {_instead_of_variant(local, ending)}")
    return (local, False) if found is None else (found if variant or explicit else local, True)


def _instead_of_variant(local: Path, ending: str) -> str:
    """What a directory without the safetensors files of a variant holds, and how to load it."""
    held = sorted(file.name for file in local.iterdir())
    pickles = [name for name in held if name.startswith("pytorch_model") and f"{ending}." in name]
    if pickles:
        return (
            f"Found {pickles[0]}, a pickle, which can execute arbitrary code. If you trust it and its weights are "
            "float, transformers reads it: pass use_safetensors=False and a scheme. Else convert it to safetensors."
        )
    others = [name for name in held if name.endswith(".safetensors") or ".safetensors.index" in name]
    if others:
        return f"Found {', '.join(others[:8])}. Pass the variant in these names; without one, leave the argument out."
    return f"Found no weights, but {', '.join(held[:8]) or 'nothing'}."


def _content(local: Path) -> dict[str, Any]:
    from ...checkpoints.files import read_json

    file = (local if local.is_dir() else local.parent) / "config.json"
    return read_json(file) if file.exists() else {}


def _base_of_adapter(local: Path) -> str | None:
    """The base model of a PEFT adapter in a directory that holds only an adapter."""
    from ...checkpoints.files import read_json

    file = local / "adapter_config.json"
    if not local.is_dir() or not file.exists() or (local / "config.json").exists():
        return None
    base = read_json(file).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ValueError(f"from_pretrained: {file} names no base_model_name_or_path; load the adapter with PEFT")
    return base


def _with_adapter(
    base: str, local: Path, request: _Request, quantization: Any, dequantize: bool, options: dict[str, Any]
) -> Any:
    name, more = options.pop("adapter_name", "default"), options.pop("adapter_kwargs", None)
    rest = {key: value for key, value in options.items() if key not in ("revision", "subfolder")}
    loaded = from_pretrained(
        base,
        *request.model_args,
        device_map=request.device_map,
        dtype=request.dtype,
        auto_class=request.auto_class,
        dequantize=dequantize,
        **({} if quantization is None else {"quantization_config": quantization}),
        **rest,
    )
    model = loaded[0] if options.get("output_loading_info") else loaded
    model.load_adapter(str(local), adapter_name=name, adapter_kwargs=dict(more or {}))
    return loaded


# ---- float checkpoints, read by transformers


def _from_floats(request: _Request, content: dict[str, Any], quantization: QaoConfig, options: dict[str, Any]) -> Any:
    """Load with transformers' own from_pretrained and a quantization config."""
    options = dict(options)
    code = {key: options.pop(key) for key in CODE if key in options}
    hub = {key: options.pop(key) for key in (*HUB, "subfolder") if key in options}
    source = None if request.path is None else str(_expanded(request.path))
    config, options = configuration(content, source, options, {**hub, **code})
    cls = model_class(config, request.auto_class)
    if not hasattr(cls, "_model_mapping"):
        code.pop("code_revision", None)
    dtype = request.dtype or "auto"
    more = {"device_map": request.device_map, "dtype": dtype, "quantization_config": quantization, "config": config}
    return cls.from_pretrained(source, *request.model_args, **more, **hub, **code, **options)


def _expanded(path: str | os.PathLike[str]) -> Path | str:
    local = Path(path).expanduser()
    return local if local.exists() else os.fspath(path)


# ---- all other checkpoints, read by qao


def _from_checkpoint(
    request: _Request, local: Path, quantization: QaoConfig | None, dequantize: bool, options: dict[str, Any]
) -> Any:
    from ...checkpoints import open_checkpoint
    from ...checkpoints.gguf.read import GgufCheckpoint
    from ...checkpoints.gguf.rows import stacks_experts
    from ...checkpoints.opening import open_to_quantize

    opened, standard = _weights(local, options)
    if dequantize and local.suffix != ".gguf":
        raise ValueError(f"from_pretrained: dequantize=True is for GGUF files, and {local} is not one")
    plain = dequantize or (quantization is not None and quantization.scheme is not None)
    if opened.suffix == ".gguf" and opened.exists() and not plain:
        checkpoint: Any = GgufCheckpoint(opened, native=kept_gguf_types(request.device_map), stacked=stacks_experts())
        if checkpoint.mxfp4:  # experts are quantized as they arrive, and then everything else is float
            checkpoint = GgufCheckpoint(opened, dequantize=True)
    else:
        checkpoint = open_to_quantize(opened) if plain else open_checkpoint(opened)
    quantization = _planned(checkpoint, local, quantization, dequantize)
    if checkpoint.format == "float" and standard:
        assert quantization is not None
        return _from_floats(request, checkpoint.config, quantization, options)
    return _from_state(request, local, checkpoint, quantization, options)


def _planned(checkpoint: Any, local: Path, quantization: QaoConfig | None, dequantize: bool) -> QaoConfig | None:
    """How to quantize the float tensors; None: nothing to quantize."""
    from ...checkpoints.opening import is_for_a_scheme

    scheme = None if quantization is None else quantization.scheme
    if quantization is not None and scheme is not None and is_for_a_scheme(checkpoint, quantization.embeddings):
        return quantization
    if checkpoint.format == "mxfp4" or (scheme is None and not dequantize and getattr(checkpoint, "mxfp4", False)):
        embeddings = quantization is not None and quantization.embeddings
        return QaoConfig({r"re:.*\.experts": Fp4WeightOnly()}, embeddings=embeddings)  # represents MXFP4 exactly
    if checkpoint.format == "float":
        return _needed(quantization, local)
    if scheme is None and checkpoint.format == "gguf" and (checkpoint.float_linears or not checkpoint.layers):
        if not checkpoint.layers and not checkpoint.dequantized and not dequantize:
            return _needed(quantization, local)
        if not dequantize:
            _warn_of_floats(checkpoint, local)
    elif scheme is not None:
        raise ValueError(f"from_pretrained: {local} is already quantized ({checkpoint.format}); leave out scheme")
    elif checkpoint.format == "gguf" and checkpoint.rounded:
        _warn_of_floats(checkpoint, local)
    if quantization is not None and quantization.embeddings:
        raise ValueError(
            f"from_pretrained: {local} is already quantized ({checkpoint.format}); embeddings are loaded as "
            "stored. To quantize a tied one afterwards: "
            'qao.quantize_(model, {"lm_head": qao.Int8WeightOnly()}, embeddings=True)'
        )
    return None


def _warn_of_floats(checkpoint: Any, local: Path) -> None:
    parts = []
    if checkpoint.float_linears:
        listed = ", ".join(f"{count} of {kind}" for kind, count in sorted(checkpoint.float_linears.items()))
        parts.append(
            f"{sum(checkpoint.float_linears.values())} linear layers are in float, because no format of qao holds "
            f"their values exactly ({listed}); scheme=, for example scheme=qao.Int8WeightOnly(), quantizes them"
        )
    if checkpoint.rounded:
        parts.append(
            f"{checkpoint.rounded} linear layers in Q8_0 are rounded to int8 with one scale per row; dequantize=True "
            "loads them in float, exactly"
        )
    warnings.warn(f"from_pretrained: {local}: {'. '.join(parts)}", stacklevel=6)


def _from_state(
    request: _Request, local: Path, checkpoint: Any, quantization: QaoConfig | None, options: dict[str, Any]
) -> Any:
    """transformers' from_pretrained with a lazy state dict instead of files that it cannot read."""
    from ...checkpoints import CheckpointError

    options = _without_files(dict(options), request.device_map, local)
    code = {key: options.pop(key) for key in CODE if key in options}
    wants_info, renaming = options.pop("output_loading_info", False), options.pop("key_mapping", None) or {}
    adapter = {key: options.pop(key) for key in ("adapter_name", "adapter_kwargs") if key in options}
    directory = local if local.is_dir() else local.parent
    if local.suffix == ".gguf" and options.get("config") is None:
        check_known(checkpoint.config, str(local))
    config, options = configuration(checkpoint.config, str(directory), options, code, local.suffix != ".gguf")
    if options.get("tie_word_embeddings") is None and getattr(config, "tie_word_embeddings", False):
        _check_tied(config, checkpoint)
    cls, config = concrete_class(model_class(config, request.auto_class), config, str(directory), code)
    later = None  # the scheme for float layers of a partly quantized checkpoint
    if checkpoint.layers:
        later = quantization
        schemes = _config_layers(local) or {name: layer.scheme for name, layer in checkpoint.layers.items()}
        schemes = {renamed(name, renaming): one for name, one in schemes.items()}
        config.quantization_config = QaoConfig(layers=schemes).to_dict()
    elif quantization is not None:
        options["quantization_config"] = quantization
    state = {renamed(name, renaming): value for name, value in lazy_state(checkpoint).items()}
    dtype = request.dtype or dtype_of(config, checkpoint)
    given = {"config": config, "state_dict": state, "dtype": dtype, "device_map": request.device_map}
    model, info = cls.from_pretrained(None, *request.model_args, output_loading_info=True, **given, **options)
    original = {renamed(name, renaming): name for name in checkpoint.others}
    unneeded = {name for name in info["unexpected_keys"] if checkpoint.is_zero_bias(original.get(name, name))}
    problems = _problems(model, {**info, "unexpected_keys": set(info["unexpected_keys"]) - unneeded})
    if not options.get("ignore_mismatched_sizes"):
        problems += _mismatched(cls, config, {name: one for name, one in state.items() if isinstance(one, LazyValue)})
    if problems and request.auto_class is None:
        text = "".join(f"\n  {line}" for line in problems[:20])
        raise CheckpointError(f"{local}: not a checkpoint of {cls.__name__}: {len(problems)} tensors differ:{text}")
    if later is not None:
        _quantize_rest(model, later)
    assert request.path is not None
    model.name_or_path = model.config.name_or_path = str(_expanded(request.path))
    _read_generation(model, directory, options, code)
    if (directory / "adapter_config.json").exists():
        model.load_adapter(str(directory), **{"adapter_name": "default", "adapter_kwargs": {}, **adapter})
    return (model, info) if wants_info else model


def _problems(model: Any, info: Mapping[str, Any]) -> list[str]:
    """Missing or left-over tensors, except those of layers that the caller keeps in float."""
    left: set[str] = getattr(getattr(getattr(model, "hf_quantizer", None), "loader", None), "left", set())
    anew = {*left, *(name.rpartition(".")[0] for name in left if name.endswith((".up", ".down")))}
    return [
        f"{what[:-5]}: {name}"
        for what in ("missing_keys", "unexpected_keys")
        for name in sorted(info[what])
        if name.rpartition(".")[0] not in anew
    ]


def _check_tied(config: Any, checkpoint: Any) -> None:
    """Raise ValueError if the head is tied to an embedding but the file stores both in different formats."""
    if checkpoint.config.get("tie_word_embeddings") is not False or "lm_head" not in checkpoint.layers:
        return
    raise ValueError("from_pretrained: tie_word_embeddings=True: the checkpoint has a separate quantized lm_head")


def _without_files(options: dict[str, Any], device_map: Any, local: Path) -> dict[str, Any]:
    """Options without those that select the files transformers reads."""
    if options.pop("disable_mmap", None):
        raise Unfit(f"from_pretrained: disable_mmap=True: qao reads {local} and always maps files into memory")
    if isinstance(device_map, Mapping) and "disk" in device_map.values():
        raise Unfit(
            f'from_pretrained: device_map: transformers cannot offload layers of {local} to "disk" while it loads '
            "them. Load without this device_map, and offload then: accelerate.dispatch_model(model, device_map, "
            "offload_dir=...)."
        )
    for name in (*HUB, "subfolder", "variant", "gguf_file", "use_safetensors", "weights_only"):
        options.pop(name, None)
    return options


def _quantize_rest(model: Any, quantization: QaoConfig) -> None:
    """Quantize the layers that were loaded in float."""
    from ...quantization.quantize import quantize_
    from .loading import _filter_fn

    assert quantization.scheme is not None
    keep = _filter_fn(model, quantization.modules_to_not_convert)
    more: Any = {"embeddings": True} if quantization.embeddings else {}
    quantize_(model, quantization.scheme, filter_fn=keep, progress=False, **more)


def _read_generation(model: Any, directory: Path, options: dict[str, Any], code: dict[str, Any]) -> None:
    """Read generation_config.json and a custom generate function of the repository."""
    if not model.can_generate() or options.get("generation_config") is not None:
        return
    if not ((directory / "generation_config.json").exists() or (directory / "custom_generate").exists()):
        return
    if not hasattr(model, "adjust_generation_fn"):  # transformers 4
        from transformers import GenerationConfig

        if (directory / "generation_config.json").exists():
            model.generation_config = GenerationConfig.from_pretrained(str(directory))
        return
    nothing = dict.fromkeys(("cache_dir", "proxies", "token", "revision"))
    model.adjust_generation_fn(
        None,
        True,
        None,
        str(directory),
        force_download=False,
        local_files_only=True,
        subfolder="",
        trust_remote_code=code.get("trust_remote_code"),
        **nothing,
    )


def renamed(name: str, renaming: Mapping[str, str]) -> str:
    for pattern, replacement in renaming.items():
        name = re.sub(pattern, replacement, name)
    return name


def _config_layers(local: Path) -> Mapping[str, Scheme]:
    """The layers in a qao config.json. In files, some models use other names (block_sparse_moe)."""
    content = _content(local).get("quantization_config") if local.suffix != ".gguf" else None
    if not isinstance(content, dict) or content.get("quant_method") != "qao":
        return {}
    config: Any = QaoConfig.from_dict(content)
    return config.layers  # type: ignore[no-any-return]


def _mismatched(cls: Any, config: Any, state: Mapping[str, LazyValue]) -> list[str]:
    """Tensors with another shape than in the float model. Some transformers versions ignore such mismatches."""
    import transformers.integrations.accelerate
    from transformers import modeling_utils

    # transformers 4 keeps buffers off meta, since some models read them when they are made, and initial values.
    empty = getattr(transformers.integrations.accelerate, "init_empty_weights", lambda: torch.device("meta"))
    uninitialized = getattr(modeling_utils, "no_init_weights", nullcontext)
    with uninitialized(), empty():
        model = cls(copy.deepcopy(config))
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [
        f"size mismatch: {name} {list(value.shape)}, the model has {list(own[name].shape)}"
        for name, value in state.items()
        if name in own and own[name].shape != value.shape
    ]
