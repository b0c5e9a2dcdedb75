"""The layers in a config.json written by qao, in the form that a serving engine requests them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...schemes import Float8StaticActivationFloat8Weight, Scheme
from ..huggingface.config import QaoConfig


class Served:
    """The layers in a config.json written by qao, under the names of an engine.

    Args:
        layers: schemes of the quantized layers by name.
        engine: for messages.
    """

    def __init__(self, layers: Mapping[str, Scheme], engine: str) -> None:
        self.layers, self.engine = dict(layers), engine
        self.loads = False  # set when a layer is loaded from a checkpoint; stays False with dummy weights
        self._requested: set[str] = set()
        self._warned = False

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], engine: str) -> Served:
        """Parse the engine's ``quantization_config``.

        Raises:
            ValueError: not written by qao, or the model is not yet quantized.
        """
        config = QaoConfig.from_dict(content)
        assert isinstance(config, QaoConfig)
        if config.scheme is not None and not config.layers:
            raise ValueError(
                f"qao: this config.json asks to quantize a float model while it is loaded. {engine} serves models "
                "that are already quantized: qao quantize MODEL FOLDER --scheme int4 writes one"
            )
        return cls(config.layers, engine)

    def scheme_of(self, name: str, joined: Mapping[str, Sequence[str]]) -> Scheme | None:
        """The scheme of a layer of the engine; None: it is not quantized.

        Args:
            name: the engine's name: "model.layers.0.self_attn.qkv_proj".
            joined: the layers that a fused layer consists of, by the last part of its name: {"qkv_proj": ["q_proj",
                …]}.

        Raises:
            ValueError: the joined layers have different schemes.
        """
        self._requested.add(name)
        if name in self.layers:
            return self.layers[name]
        path, dot, last = name.rpartition(".")
        names = [path + dot + part for part in joined.get(last) or _JOINED.get(last, (last,))]
        self._requested.update(names)
        found = [self.layers.get(one) for one in names]
        if any(_alike(one) != _alike(found[0]) for one in found):
            texts = {str(one) for one in found}
            said = str if len(texts) > 1 else repr  # which shows all options
            listed = ", ".join(
                f"{one}: {'not quantized' if kind is None else said(kind)}"
                for one, kind in zip(names, found, strict=True)
            )
            raise ValueError(f"qao: {name} joins layers that are not quantized alike: {listed}. Give them one scheme.")
        return found[0]

    def experts_of(self, name: str) -> tuple[Scheme, Scheme] | None:
        """The schemes of gate-and-up and of down of fused experts; None: they are not quantized.

        If a block has no experts of this name but others, the engine uses the checkpoint's name, while a config has the
        name of transformers (Mixtral). ``projection.check_loaded`` then checks that tensors arrive.

        Raises:
            NotImplementedError: the experts are separate linear layers, or the choice is ambiguous.
        """
        if listed := [one for one in self._inside(name) if one not in (f"{name}.up", f"{name}.down")]:
            raise NotImplementedError(
                f"qao: {name}: experts quantized by qao ({len(listed)} layers, such as {listed[0]}) have no kernel in "
                f"{self.engine}. Leave them in float, or save the model as compressed-tensors."
            )
        block = re.match(r".*?\blayers\.\d+\.", name)
        prefix = name if block is None else block[0]
        found = [
            one.removesuffix(".up") for one in self.layers if one.startswith(prefix) and one.endswith("experts.up")
        ]
        if name not in found and len(found) > 1:
            raise NotImplementedError(
                f"qao: {self.engine} calls the experts of a layer {name}, and the checkpoint has {' and '.join(found)} "
                "quantized there. Leave them in float, or save the model as compressed-tensors."
            )
        of = name if name in found else found[0] if found else None
        self._requested |= {f"{of}.up", f"{of}.down"}
        return None if of is None else (self.layers[f"{of}.up"], self.layers[f"{of}.down"])

    def refuse_embedding(self, name: str) -> None:
        """Raise NotImplementedError if the engine's embedding ``name`` is quantized.

        Some vLLM models give no name ("": Llama); then any layer named like an embedding counts.
        """
        found = self._inside(name) if name else [one for one in self.layers if _EMBEDDING.search(one)]
        if found:
            raise NotImplementedError(
                f"qao: {found[0]}: {self.engine} does not serve a quantized embedding. Quantize without "
                "embeddings=True."
            )

    def warn_unrequested(self) -> None:
        """After all layers are created, warn once of quantized layers that the engine did not request.

        Blocks without any requested layer are skipped: they belong to other pipeline stages, or are unused.
        """
        if self._warned:
            return
        self._warned = True
        made = {_block(one) for one in self._requested}
        left = [one for one in self.layers if one not in self._requested]
        whole = all(_block(one) in {"", *made} for one in left)
        if found := [one for one in left if _block(one) in made or (whole and not _block(one))]:
            warnings.warn(
                f"qao: {self.engine} has made no quantized layer for {len(found)} quantized ones, such as {found[0]}: "
                "it has them in float or not at all, and fails to load or ignores them. Leave them in float.",
                stacklevel=2,
            )

    def _inside(self, name: str) -> list[str]:
        return [one for one in self.layers if one == name or one.startswith(f"{name}.")]


def _block(name: str) -> str:
    """ "model.layers.0." of a layer's name; "" outside blocks."""
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else ""


_EMBEDDING = re.compile(r"(^|\.)(wte|\w*embed\w*)$")

# Joined layers of models that do not declare them.
_JOINED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def _alike(scheme: Scheme | None) -> Scheme | None:
    static = isinstance(scheme, Float8StaticActivationFloat8Weight)
    return replace(scheme, activation_scale=1.0) if static else scheme  # type: ignore[type-var]
