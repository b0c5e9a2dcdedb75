"""QaoConfig: the quantization settings in config.json, and how to quantize a model during loading."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn

from ... import _words
from ...quantization.skeleton import describe, float_dtype
from ...schemes import FLOAT_DTYPES, Scheme, scheme_from_dict

VERSION = 1


class Method(str, Enum):
    """The name of the method. An Enum because libraries read its ``value``."""

    QAO = "qao"


class QaoConfig:
    """The ``quantization_config`` of transformers and diffusers.

    Args:
        scheme: a scheme, or a dict from names to schemes, as ``qao.quantize_`` takes it: how to quantize a float model
            during loading. None: the model is already quantized.
        modules_to_not_convert: names of modules that stay unchanged, including their children: the whole name or its
            end ("lm_head", "mlp.down_proj"), or ``"re:<pattern>"`` for the whole name.
        embeddings: quantize tied embeddings too, as in ``qao.quantize_``.

    Attributes:
        layers: schemes of the quantized modules by name, for a quantized model.
        dtype: dtype of the unquantized tensors of a quantized model. ``dtype`` of transformers' own config is the dtype
            of the first float tensor, which may be a scale.

    Raises:
        TypeError: ``scheme`` has another type.
    """

    quant_method = Method.QAO

    def __init__(
        self,
        scheme: Scheme | Mapping[str, Scheme | None] | None = None,
        *,
        modules_to_not_convert: Iterable[str] | None = None,
        embeddings: bool = False,
        layers: Mapping[str, Scheme] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        schemes = list(scheme.values()) if isinstance(scheme, Mapping) else [scheme]
        if not all(one is None or isinstance(one, Scheme) for one in schemes):
            raise TypeError(
                "QaoConfig: scheme must be a scheme such as qao.Int4WeightOnly(), a dict of module names to schemes, "
                f"or None, not {_words.described(scheme)}"
            )
        if isinstance(modules_to_not_convert, str):
            raise TypeError(
                f"QaoConfig: modules_to_not_convert must be a list of names, not {modules_to_not_convert!r}"
            )
        self.scheme = dict(scheme) if isinstance(scheme, Mapping) else scheme
        self.modules_to_not_convert = list(modules_to_not_convert or ())
        self.embeddings = embeddings
        self.layers = dict(layers or {})
        self.dtype = dtype

    def to_dict(self) -> dict[str, Any]:
        """The configuration in JSON types. Lists where order matters, since writers of config.json sort keys."""
        scheme: Any = self.scheme
        if isinstance(scheme, Scheme):
            scheme = scheme.to_dict()
        elif scheme is not None:
            scheme = [[name, None if one is None else one.to_dict()] for name, one in scheme.items()]
        groups: dict[Scheme, list[str]] = {}
        for name, one in self.layers.items():
            groups.setdefault(one, []).append(name)
        layers = [{"scheme": one.to_dict(), "modules": names} for one, names in groups.items()]
        return {
            "quant_method": self.quant_method.value,
            "version": VERSION,
            "scheme": scheme,
            "modules_to_not_convert": self.modules_to_not_convert,
            "embeddings": self.embeddings,
            "layers": layers,
            "dtype": None if self.dtype is None else str(self.dtype).removeprefix("torch."),
        }

    @classmethod
    def of(cls, model: nn.Module) -> QaoConfig:
        """The configuration of a quantized model."""
        return cls(layers=describe(model), dtype=float_dtype(model))

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> QaoConfig | tuple[QaoConfig, dict[str, Any]]:
        """The inverse of ``to_dict``; ``kwargs`` are for transformers' callers and are ignored here.

        Raises:
            ValueError: a newer version, or not a qao configuration.
        """
        version = config_dict.get("version")
        if type(version) is int and version > VERSION:
            raise ValueError(
                f"quantization_config: written by a newer qao (format {version}, this one knows {VERSION}): "
                "pip install -U qao"
            )
        try:
            if type(version) is not int or version < 1:
                raise ValueError(f"version {version!r}")
            scheme = config_dict.get("scheme")
            if isinstance(scheme, Mapping):
                scheme = scheme_from_dict(scheme)
            elif scheme is not None:
                scheme = {str(name): None if one is None else scheme_from_dict(one) for name, one in scheme}
            layers = {
                str(name): scheme_from_dict(group["scheme"])
                for group in config_dict.get("layers", ())
                for name in group["modules"]
            }
            dtype = config_dict.get("dtype")
            config = cls(
                scheme,
                modules_to_not_convert=config_dict.get("modules_to_not_convert"),
                embeddings=bool(config_dict.get("embeddings", False)),
                layers=layers,
                dtype=None if dtype is None else next(one for one in FLOAT_DTYPES if str(one) == f"torch.{dtype}"),
            )
        except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
            raise ValueError(f"quantization_config: not one that qao wrote: {error}") from error
        return (config, kwargs) if return_unused_kwargs else config

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()

    def to_json_string(self, use_diff: bool = True) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def update(self, **kwargs: Any) -> dict[str, Any]:
        """Set the attributes among ``kwargs`` and return the rest."""
        known = {name for name in kwargs if name in vars(self)}
        for name in known:
            setattr(self, name, kwargs[name])
        return {name: value for name, value in kwargs.items() if name not in known}

    def get(self, name: str, default: Any = None) -> Any:
        """``dict.get``, for code that expects the dict of config.json."""
        return self.to_dict().get(name, default)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QaoConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> QaoConfig:
        other = copy.copy(self)
        other.layers = dict(self.layers)
        return other

    def __repr__(self) -> str:
        shown = [] if self.scheme is None else [repr(self.scheme)]
        shown += [f"modules_to_not_convert={self.modules_to_not_convert}"] if self.modules_to_not_convert else []
        shown += ["embeddings=True"] if self.embeddings else []
        shown += [f"{len(self.layers)} layers"] if self.layers else []
        return f"QaoConfig({', '.join(shown)})"
