"""QuantEmbedding: embedding lookup in a quantized weight, which may be tied with the output head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..schemes import PackedWeight, Scheme
from .attributes import carry_attributes
from .eligibility import is_embedding, is_scaled, unsupported_for_embeddings, unsupported_reason
from .linear import pack_weight
from .packed_module import PackedModule, frozen


class _ScaledEmbedding(nn.Embedding):
    """The float module of a QuantEmbedding with ``embed_scale``."""

    embed_scale: Tensor | float

    def forward(self, input: Tensor) -> Tensor:
        rows, scale = super().forward(input), self.embed_scale
        return rows * (scale.to(rows.dtype) if isinstance(scale, Tensor) else scale)


class QuantEmbedding(PackedModule):
    """Rows [..., K] of a quantized W [N, K] for ids [...]; drop-in for nn.Embedding.

    Create one with ``from_embedding``, or with ``from_packed`` to share the Parameters of a QuantLinear, as
    ``quantize_(..., embeddings=True)`` does. All tensors are frozen: the result does not require a gradient, but a hook
    may set it, as ``enable_input_require_grads`` of transformers does.

    Attributes:
        qweight, scales: tensors in the layout of the scheme's kernels, shared with a tied head.
        weight: the dequantized weight [N, K], read-only, computed on use.
        num_embeddings, embedding_dim: N and K.
        padding_idx: as in nn.Embedding; its row is treated like the others.
        embed_scale: factor of the rows (Gemma, Bart), a number or a tensor of one element; None: no factor.
        dtype: of the result, initially that of the float embedding. ``.to(dtype)``, ``.half()`` and similar calls
            change it. An attribute, because no float Parameter has this dtype.
        scheme: the quantization scheme; its activation format has no effect here.
    """

    embed_scale: Tensor | float | None
    max_norm, norm_type, scale_grad_by_freq, sparse = None, 2.0, False, False  # defaults of nn.Embedding

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        scheme: Scheme,
        packed: PackedWeight,
        dtype: torch.dtype,
        padding_idx: int | None = None,
        embed_scale: Tensor | float | None = None,
    ) -> None:
        if unsupported := unsupported_for_embeddings(scheme):
            raise ValueError(f"QuantEmbedding: {unsupported}")
        kernel_dtype = torch.float32 if dtype == torch.float64 else dtype  # kernels do not support float64
        super().__init__(
            num_embeddings,
            embedding_dim,
            scheme,
            PackedWeight(packed.qweight, packed.scales, sizes=packed.sizes),
            kernel_dtype,
        )
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        if isinstance(embed_scale, Tensor):
            self.register_buffer("embed_scale", embed_scale, persistent=False)
        else:
            self.embed_scale = embed_scale

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Module,
        scheme: Scheme,
        *,
        device: torch.device | str | None = None,
        name: str = "embedding",
    ) -> QuantEmbedding:
        """Quantizes an nn.Embedding or a scaled embedding of transformers; ``embedding`` itself is not modified.

        Args:
            embedding: the layer. If it is on meta, the result is on meta too, without data.
            scheme: with int4 or int8 weights, for example ``Int8WeightOnly()``.
            device: device of quantization and of the result; None: the weight's device.
            name: prefix of error messages.

        Raises:
            TypeError: ``embedding`` is not an embedding, or ``scheme`` is not a scheme.
            ValueError: ``embedding`` does more than a lookup (custom forward, hooks, max_norm), or has training options
                (sparse, scale_grad_by_freq); the scheme has fp8 weights; the weight holds NaN or Inf, or is on meta and
                ``device`` is not.
        """
        if not isinstance(scheme, Scheme):
            raise TypeError(f"QuantEmbedding: scheme must be a Scheme such as qao.Int8WeightOnly(), not {scheme!r}")
        if not is_embedding(embedding):
            raise TypeError(f"QuantEmbedding: {name} must be an nn.Embedding, not {type(embedding).__name__}")
        if unsupported := unsupported_reason(embedding, scheme):
            raise ValueError(f"QuantEmbedding: {name} cannot be quantized: {unsupported}")
        packed = pack_weight(embedding._parameters["weight"].detach(), scheme, device, name)  # type: ignore[union-attr]
        return cls.from_packed(embedding, scheme, packed)

    @classmethod
    def from_packed(cls, embedding: nn.Module, scheme: Scheme, packed: PackedWeight) -> QuantEmbedding:
        """The module that replaces ``embedding`` [N, K]; it shares Parameters in ``packed`` instead of copying them."""
        scale: Any = embedding.embed_scale if is_scaled(embedding) else None
        if isinstance(scale, Tensor) and not packed.qweight.is_meta:
            scale = scale.to(packed.qweight.device)
        n, k, padding_idx = embedding.num_embeddings, embedding.embedding_dim, embedding.padding_idx
        dtype = embedding._parameters["weight"].dtype  # type: ignore[union-attr]
        made = cls(n, k, scheme, packed, dtype, padding_idx, scale).train(embedding.training)  # type: ignore[arg-type]
        carry_attributes(embedding, made)
        return made

    def to_float(self, weight: nn.Parameter | None = None) -> nn.Embedding:
        """An nn.Embedding with the dequantized weight in ``dtype``, or with ``weight`` [N, K]; it starts frozen."""
        weight = frozen(self.dequantize(self.dtype)) if weight is None else weight
        scale = self.embed_scale
        kind = nn.Embedding if scale is None else _ScaledEmbedding
        floats = kind(*self._sizes, self.padding_idx, _weight=weight)
        floats.weight = weight  # keeps the frozen Parameter object
        if isinstance(scale, Tensor):
            floats.register_buffer("embed_scale", scale, persistent=False)
        elif scale is not None:
            floats.embed_scale = scale  # type: ignore[assignment]
        carry_attributes(self, floats)
        return floats.train(self.training)

    def forward(self, ids: Tensor) -> Tensor:
        gather = ops.EMBEDDINGS[self.scheme.weights]
        rows = gather(ids, self.qweight, self.scales, *self.scheme.sizes(*self._sizes), self.dtype)
        scale = self.embed_scale
        if scale is None:
            return rows
        return rows * (scale.to(rows.dtype) if isinstance(scale, Tensor) else scale)

    def settle(self) -> None:
        """Also fills in the factor. transformers allocates buffers that no file holds, and fills those it knows."""
        super().settle()
        factor = vars(self).get("scalar_embed_scale")
        if factor is not None and isinstance(self.embed_scale, Tensor) and not self.embed_scale.is_meta:
            self.embed_scale.fill_(factor)

    def requires_grad_(self, requires_grad: bool = True) -> QuantEmbedding:
        """Accepts only False, because a quantized embedding cannot be trained."""
        if requires_grad:
            raise RuntimeError(
                "QuantEmbedding: a quantized embedding is frozen and cannot be trained. Leave it in float, with "
                "quantize_(..., embeddings=False), or train adapters."
            )
        return self

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        scale = "" if self.embed_scale is None else f", embed_scale={float(self.embed_scale):g}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}{scale}, {self.scheme}, {self.dtype}"


# ---- transformers ----------------------------------------------------------------------------------------------------


def rename_ties(model: nn.Module) -> None:
    """Renames tied weights in the attributes by which models of transformers tie, save and load them.

    If both modules are quantized, ``{"lm_head.weight": "model.embed_tokens.weight"}`` (a list of the targets in version
    4) becomes entries for ``qweight``, ``scales`` and their other shared tensors; if neither is quantized any more, the
    original entry is restored. Other entries are unchanged.
    """
    for module in model.modules():
        for attribute in ("_tied_weights_keys", "all_tied_weights_keys"):
            ties = getattr(module, attribute, None)
            renamed = _renamed(module, ties) if isinstance(ties, (Mapping, list)) else ties
            if renamed != ties and not isinstance(getattr(type(module), attribute, None), property):
                setattr(module, attribute, renamed)


def _renamed(module: nn.Module, ties: Mapping[str, str] | list[str]) -> dict[str, str] | list[str]:
    renamed: dict[str, str] = {}
    for target in ties:
        sides = target, ties[target] if isinstance(ties, Mapping) else target
        owners = [_owner(module, side) for side in sides]
        packed = [owner for owner in owners if isinstance(owner, PackedModule)]
        key = target.rpartition(".")[2]
        keys: tuple[str, ...] = (key,)
        if key == "weight" and len(packed) == 2:
            tensors = [owner.packed.tensors() for owner in packed]
            keys = tuple(name for name in tensors[0] if all(of[name] is not None for of in tensors))
        elif key in PackedWeight._fields and not packed and None not in owners:
            keys = ("weight",)
        for name in keys:
            of = [side if name == key else side.removesuffix(key) + name for side in sides]
            renamed[of[0]] = of[1]
    return renamed if isinstance(ties, Mapping) else list(renamed)


def _owner(module: nn.Module, name: str) -> nn.Module | None:
    """The module that owns the tensor of that name; None if no such module exists."""
    try:
        return module.get_submodule(name.rpartition(".")[0])
    except AttributeError:  # a pattern, or a name in an enclosing model
        return None
