"""QuantEmbedding: embedding lookup in a quantized weight, which may be tied with the output head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..schemes import PackedWeight, Scheme
from .linear import instance_obstacle, pack_weight
from .packed_module import PackedModule, Sharded, frozen


def is_embedding(module: nn.Module) -> bool:
    """True for nn.Embedding and its subclasses, which do not include nn.EmbeddingBag."""
    return isinstance(module, nn.Embedding)


def _is_scaled(module: nn.Module) -> bool:
    # By name, because transformers is optional. Gemma, Bart and others multiply rows by ``embed_scale``.
    kind = type(module)
    named = kind.__name__.endswith("ScaledWordEmbedding") and kind.__module__.startswith("transformers.models.")
    return named and hasattr(module, "embed_scale") and not hasattr(module, "eoi_embedding")  # T5Gemma2 has two tables


def obstacle(embedding: nn.Module) -> str | None:
    """Why replacing an nn.Embedding by a QuantEmbedding would change its behavior; None if it would not."""
    known = type(embedding).forward is nn.Embedding.forward or isinstance(embedding, Sharded)
    if not known and not _is_scaled(embedding):
        return f"{type(embedding).__name__} is a subclass of nn.Embedding with its own forward"
    if embedding.max_norm is not None:
        return "it has max_norm, which rewrites rows of the weight in every forward"
    if embedding.sparse or embedding.scale_grad_by_freq:
        option = "sparse" if embedding.sparse else "scale_grad_by_freq"
        return f"it has {option}, which is for training, but quantized rows are frozen"
    return instance_obstacle(embedding)


def scheme_obstacle(scheme: Scheme) -> str | None:
    """Why an embedding cannot use a weight of this scheme; None if it can."""
    if scheme.rotation:
        return f"{scheme} rotates the weight, so its rows are not rows of the embedding: use rotation=0 for it"
    if scheme.weights in ops.EMBEDDINGS:
        return None
    return f"embeddings are quantized to int4 or int8, but {scheme.word} has {scheme.weights} weights"


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
        reason = scheme_obstacle(scheme)
        if reason is not None:
            raise ValueError(f"QuantEmbedding: {reason}")
        kernel_dtype = torch.float32 if dtype == torch.float64 else dtype  # kernels do not support float64
        super().__init__(
            num_embeddings,
            embedding_dim,
            scheme,
            PackedWeight(packed.qweight, packed.scales, sizes=packed.sizes),
            kernel_dtype,
        )
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self._constants = scheme.constants(num_embeddings, embedding_dim)
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
        reason = obstacle(embedding) or scheme_obstacle(scheme)
        if reason is not None:
            raise ValueError(f"QuantEmbedding: {name} cannot be quantized: {reason}")
        packed = pack_weight(embedding._parameters["weight"].detach(), scheme, device, name)  # type: ignore[union-attr]
        return cls.from_packed(embedding, scheme, packed)

    @classmethod
    def from_packed(cls, embedding: nn.Module, scheme: Scheme, packed: PackedWeight) -> QuantEmbedding:
        """The module that replaces ``embedding`` [N, K]; it shares Parameters in ``packed`` instead of copying them."""
        scale: Any = embedding.embed_scale if _is_scaled(embedding) else None
        if isinstance(scale, Tensor) and not packed.qweight.is_meta:
            scale = scale.to(packed.qweight.device)
        n, k, padding_idx = embedding.num_embeddings, embedding.embedding_dim, embedding.padding_idx
        dtype = embedding._parameters["weight"].dtype  # type: ignore[union-attr]
        return cls(n, k, scheme, packed, dtype, padding_idx, scale).train(embedding.training)  # type: ignore[arg-type]

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
        return floats.train(self.training)

    def forward(self, ids: Tensor) -> Tensor:
        gather = ops.EMBEDDINGS[self.scheme.weights]
        rows = gather(ids, self.qweight, self.scales, *self._constants, self.dtype)
        scale = self.embed_scale
        if scale is None:
            return rows
        return rows * (scale.to(rows.dtype) if isinstance(scale, Tensor) else scale)

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
