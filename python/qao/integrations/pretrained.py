"""qao.from_pretrained: a transformers model out of any checkpoint that qao can open, its layers quantised."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..formats import FLOAT_DTYPES, Scheme
from ..schemes import Fp4WeightOnly
from .config import QaoConfig

_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # of a repository: no pickles, no code


def from_pretrained(
    path: str | os.PathLike[str],
    *model_args: Any,
    scheme: Scheme | Mapping[str, Scheme | None] | None = None,
    device_map: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    embeddings: bool = False,
    auto_class: Any = None,
    **options: Any,
) -> Any:
    """A model of transformers whose quantised layers stay in four or eight bits, on qao's operators.

    Args:
        path: what ``qao.checkpoints.open_checkpoint`` takes: a directory with config.json and safetensors (compressed-
            tensors, GPTQ, AWQ, fp8, fbgemm_fp8, torchao, qao's own, or floats), a .gguf file; or the name of a
            repository on the Hugging Face hub, which is downloaded.
        scheme: for a checkpoint of floats, how to quantise it while it is loaded, as in ``qao.QaoConfig``. So it is for
            GPT-OSS's experts in MXFP4; None keeps their numbers, and its other layers as they are.
        device_map: as in transformers, "auto" for example.
        device: all of the model there; instead of ``device_map``.
        dtype: of what is not quantised; None: that of the checkpoint.
        embeddings: with ``scheme``, quantise tied embeddings too.
        auto_class: the class of the model, or an Auto class; None: the one config.json names.
        options: further arguments of transformers' ``from_pretrained``; ``revision`` of the repository.

    Returns:
        The model, in evaluation mode.

    Raises:
        CheckpointError: the checkpoint is damaged, of a kind that no kernel of qao multiplies, or none of this model:
            tensors are missing or left over. With ``auto_class`` transformers reports those, as it always does.
        ValueError: no scheme for a checkpoint of floats; a scheme, or ``embeddings``, for a quantised one.
        ImportError: transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError("qao.from_pretrained needs transformers: pip install transformers accelerate") from error
    from ..checkpoints import CheckpointError, open_checkpoint

    if device is not None and device_map is not None:
        raise ValueError("from_pretrained: give device or device_map, not both")
    where = {"": torch.device(device)} if device is not None else device_map
    local = _local(path, options)
    checkpoint = open_checkpoint(local)
    floats = checkpoint.format in ("float", "mxfp4")
    if floats:
        if scheme is None and checkpoint.format == "mxfp4":
            scheme = {r"re:.*\.experts": Fp4WeightOnly()}  # the same numbers again
        if scheme is None:
            raise ValueError(
                f"from_pretrained: {local} is not quantised. Give a scheme to quantise it while it is loaded, for "
                "example scheme=qao.Int4WeightOnly()."
            )
    elif scheme is not None:
        raise ValueError(f"from_pretrained: {local} is quantised already ({checkpoint.format}); leave scheme out")
    elif embeddings:
        raise ValueError(
            f"from_pretrained: {local} is quantised already ({checkpoint.format}); embeddings are loaded as they are "
            'there. Quantise a tied one next: qao.quantize_(model, {"lm_head": qao.Int8WeightOnly()}, embeddings=True)'
        )
    config = _config(transformers, checkpoint.config, local, options)
    cls = _model_class(config, auto_class)
    common = {"config": config, "device_map": where, **options}
    if checkpoint.format == "float":
        quantisation = QaoConfig(scheme, embeddings=embeddings)
        common |= {"quantization_config": quantisation, "dtype": dtype or "auto"}
        return cls.from_pretrained(str(local), *model_args, **common)
    if floats:
        common["quantization_config"] = QaoConfig(scheme, embeddings=embeddings)
    else:
        schemes = _told(local) or {name: layer.scheme for name, layer in checkpoint.layers.items()}
        config.quantization_config = QaoConfig(layers=schemes).to_dict()
    state = {name: _Value(tensor) for name, tensor in checkpoint.state_dict().items()}
    dtype = _dtype(config, checkpoint) if dtype is None else dtype
    wanted = common.pop("output_loading_info", False)
    common |= {"state_dict": state, "dtype": dtype, "output_loading_info": True}
    model, info = cls.from_pretrained(None, *model_args, **common)
    problems = [f"{what[:-5]}: {name}" for what in ("missing_keys", "unexpected_keys") for name in sorted(info[what])]
    problems += _mismatched(cls, config, state)
    if problems and auto_class is None:
        text = "".join(f"\n  {line}" for line in problems[:20])
        raise CheckpointError(f"{local}: not a checkpoint of {cls.__name__}: {len(problems)} tensors differ:{text}")
    model.name_or_path = model.config.name_or_path = str(local)
    if model.can_generate() and (local / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(str(local))
    return (model, info) if wanted else model


def _told(local: Path) -> Mapping[str, Scheme]:
    """The layers that a config.json of qao's names. In files some models have other names (block_sparse_moe)."""
    path = local / "config.json"
    content = json.loads(path.read_text()).get("quantization_config") if path.exists() else None
    if not isinstance(content, dict) or content.get("quant_method") != "qao":
        return {}
    config: Any = QaoConfig.from_dict(content)
    return config.layers  # type: ignore[no-any-return]


class _Value:
    """A lazy tensor with what the loaders of transformers ask of one: version 5 takes ``[...]``, version 4 ``.to``."""

    def __init__(self, lazy: Any) -> None:
        self._lazy = lazy
        self.shape: torch.Size = lazy.shape
        self.dtype: torch.dtype = lazy.dtype
        self.device = torch.device("cpu")

    def __getitem__(self, index: Any) -> Tensor:
        return self._lazy[index]  # type: ignore[no-any-return]

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        tensor: Tensor = self._lazy.load()
        return tensor.to(*args, **kwargs)

    def get_shape(self) -> list[int]:  # of a slice of safetensors, for which parts of it are asked
        return list(self.shape)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def numel(self) -> int:
        return self.shape.numel()


def _mismatched(cls: Any, config: Any, state: Mapping[str, _Value]) -> list[str]:
    """Tensors of another shape than the float model's, which some versions of transformers take without a word."""
    with torch.device("meta"):
        model = cls(copy.deepcopy(config))
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [
        f"size mismatch: {name} {list(value.shape)}, the model has {list(own[name].shape)}"
        for name, value in state.items()
        if name in own and own[name].shape != value.shape
    ]


def _local(path: str | os.PathLike[str], options: dict[str, Any]) -> Path:
    names = ("revision", "cache_dir", "force_download", "local_files_only", "token")
    hub = {name: options.pop(name) for name in names if name in options}
    local, folder = Path(path), options.pop("subfolder", None) or ""
    if local.exists() or os.path.isabs(local) or str(path).count("/") != 1 or str(path).startswith("."):
        return local / folder  # where nothing is there, opening it says so
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError(f"{path}: no such directory; to download it, pip install huggingface_hub") from error
    return (
        Path(snapshot_download(str(path), allow_patterns=[os.path.join(folder, one) for one in _FILES], **hub)) / folder
    )


def _config(transformers: Any, content: dict[str, Any], local: Path, options: dict[str, Any]) -> Any:
    """The model's configuration, without what it says about quantisation."""
    given = options.pop("config", None)
    if isinstance(given, transformers.PretrainedConfig):
        config = copy.deepcopy(given)
    elif local.is_dir() and (local / "config.json").exists():
        trust = {key: options[key] for key in ("trust_remote_code",) if key in options}
        config = transformers.AutoConfig.from_pretrained(str(local), **trust)
    elif "model_type" in content:
        config = transformers.AutoConfig.for_model(**content)
    else:
        from ..checkpoints import CheckpointError

        raise CheckpointError(f"{local}: there is no config.json that tells what model it is; qao.load(path, module)")
    for part in (config, *(part for part in vars(config).values() if isinstance(part, transformers.PretrainedConfig))):
        quantisation = getattr(part, "quantization_config", None)
        if isinstance(quantisation, dict) and quantisation.get("quant_method") == "qao" and quantisation.get("dtype"):
            told: Any = QaoConfig.from_dict(quantisation)
            config.dtype = told.dtype  # a dtype, not its name: Apertus makes tensors of it
        if quantisation is not None:
            del part.quantization_config
    return config


def _model_class(config: Any, auto_class: Any) -> Any:
    import transformers
    from transformers.models.auto.auto_factory import _get_model_class

    if isinstance(auto_class, str):
        auto_class = getattr(transformers, auto_class)
    if auto_class is None:
        named = getattr(config, "architectures", None) or [""]
        auto_class = getattr(transformers, named[0], None)
        if auto_class is None:
            raise ValueError(
                f"from_pretrained: config.json names the class {named[0]!r}, which transformers does not have. Give "
                "auto_class, for example transformers.AutoModelForCausalLM."
            )
    if hasattr(auto_class, "_model_mapping"):
        return _get_model_class(config, auto_class._model_mapping)
    return auto_class


def _dtype(config: Any, checkpoint: Any) -> torch.dtype:
    """That of the config, else of the largest tensor that is not quantised."""
    given = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if isinstance(given, str):
        given = next((one for one in FLOAT_DTYPES if str(one) == f"torch.{given.removeprefix('torch.')}"), None)
    if isinstance(given, torch.dtype):
        return given
    floats = [found for found in map(checkpoint.shape_dtype, checkpoint.others) if found[1].is_floating_point]
    return max(floats, key=lambda found: torch.Size(found[0]).numel())[1] if floats else torch.float32
