"""Eligibility of modules: every reason for which a layer cannot be replaced, from a real module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import qao
import torch
from qao.nn.eligibility import (
    Unsupported,
    kind_of,
    unsupported_bias,
    unsupported_for_embeddings,
    unsupported_place,
    unsupported_reason,
)
from torch import Tensor, distributed, nn
from torch.nn.utils import parametrizations

INT8 = qao.Int8WeightOnly()


class Adds(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


class Doubles(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class Marked(nn.Parameter):
    """A Parameter that another library gives a meaning."""


def falcon_linear() -> nn.Module:
    falcon = pytest.importorskip("transformers.models.falcon.modeling_falcon")
    made: nn.Module = falcon.FalconLinear(8, 4)
    return made


def linear(**attributes: Any) -> nn.Linear:
    return with_(nn.Linear(8, 4), **attributes)


def embedding(**attributes: Any) -> nn.Embedding:
    return with_(nn.Embedding(8, 4), **attributes)


def with_(module: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def fixed(*size: int, **options: Any) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*size, **options), requires_grad=False)


def sparse(*size: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(*size).to_sparse())


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


def offloaded() -> nn.Module:
    hooks = pytest.importorskip("accelerate.hooks")
    module: nn.Module = hooks.add_hook_to_module(nn.Linear(8, 4), hooks.ModelHook())
    return module


def no_longer_offloaded() -> nn.Module:
    hooks = pytest.importorskip("accelerate.hooks")
    module: nn.Module = hooks.remove_hook_from_module(offloaded())
    return module


def partitioned() -> nn.Module:
    module = nn.Linear(8, 4)
    module.weight.ds_id = 0  # type: ignore[attr-defined]  # as DeepSpeed does
    return module


def bias_in_a_buffer() -> nn.Module:
    module = nn.Linear(8, 4)
    del module.bias
    module.register_buffer("bias", torch.zeros(4))
    return module


def with_buffer() -> nn.Module:
    module = nn.Linear(8, 4)
    module.register_buffer("scale", torch.ones(()))
    return module


def conv1d(**attributes: Any) -> nn.Module:
    module: nn.Module = with_(pytest.importorskip("transformers.pytorch_utils").Conv1D(4, 8), **attributes)
    return module


def gemma_embedding() -> nn.Module:
    kind = pytest.importorskip("transformers.models.gemma3.modeling_gemma3").Gemma3TextScaledWordEmbedding
    module: nn.Module = kind(8, 4, padding_idx=0, embed_scale=2.0)
    return module


def experts(**attributes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", minversion="5")
    config = transformers.MixtralConfig(hidden_size=8, intermediate_size=4, num_local_experts=2)
    module = transformers.models.mixtral.modeling_mixtral.MixtralExperts(config)
    return with_(module, **attributes)  # type: ignore[no-any-return]


def quantized(module: nn.Module) -> nn.Module:
    model = nn.Sequential(module)
    qao.quantize_(model, INT8, progress=False)
    assert model[0] is not module
    return model[0]


REASONS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "another module": (nn.ReLU, "it is a ReLU, not a linear layer, an embedding or fused experts"),
    "bag": (lambda: nn.EmbeddingBag(8, 4), "it is a EmbeddingBag, not a linear layer, an embedding or fused experts"),
    "subclass": (lambda: Adds(8, 4), "Adds is a subclass of nn.Linear with its own forward"),
    "computed": (
        lambda: parametrizations.weight_norm(nn.Linear(8, 4)),
        "its weight is computed from other parameters (parametrization, weight_norm, pruning)",
    ),
    "lazy": (lambda: nn.LazyLinear(4), "it is lazy and has no weight yet: run the model once first"),
    "deepspeed": (partitioned, "DeepSpeed partitions its weight (ZeRO-3): quantize before deepspeed.initialize"),
    "accelerate": (
        offloaded,
        "a hook of accelerate runs it (device_map, offloading): call "
        "accelerate.hooks.remove_hook_from_module(model, recurse=True) first, and dispatch the model after it",
    ),
    "instance": (lambda: linear(forward=lambda x: x), "its forward was replaced on the instance"),
    "hook": (lambda: hooked(nn.Linear(8, 4)), "it has forward_hooks, which would be lost"),
    "Parameter": (lambda: linear(weight=Marked(torch.ones(4, 8))), "its weight is a Marked, not a plain Parameter"),
    "dtype": (lambda: linear(weight=fixed(4, 8, dtype=torch.int8)), "its weight has dtype torch.int8"),
    "layout": (lambda: linear(weight=sparse(4, 8)), "its weight has layout torch.sparse_coo, not torch.strided"),
    "dimensions": (lambda: linear(weight=fixed(2, 4, 8)), "its weight [2, 4, 8] does not have two dimensions"),
    "empty": (lambda: linear(weight=fixed(4, 0)), "its weight [4, 0] is empty"),
    "bias in a buffer": (
        bias_in_a_buffer,
        "its bias is not a Parameter (a buffer, a plain tensor, or computed by a parametrization)",
    ),
    "bias": (lambda: linear(bias=Marked(torch.ones(4))), "its bias is a Marked, not a plain Parameter"),
    "layout of the bias": (lambda: linear(bias=sparse(4)), "its bias has layout torch.sparse_coo, not torch.strided"),
    "shape of the bias": (lambda: linear(bias=fixed(1)), "its bias is float32[1], not [4] in a float dtype"),
    "shape of Conv1D's bias": (lambda: conv1d(bias=fixed(8)), "its bias is float32[8], not [4] in a float dtype"),
    "buffer": (with_buffer, "it also has scale, which would be lost"),
    "child": (lambda: linear(gate=nn.ReLU()), "it also has gate, which would be lost"),
    "subclass of an embedding": (
        lambda: Doubles(8, 4),
        "Doubles is a subclass of nn.Embedding with its own forward",
    ),
    "max_norm": (
        lambda: embedding(max_norm=1.0),
        "it has max_norm, which rewrites rows of the weight in every forward",
    ),
    "sparse": (lambda: embedding(sparse=True), "it has sparse, which is for training, but quantized rows are frozen"),
    "scale_grad_by_freq": (
        lambda: embedding(scale_grad_by_freq=True),
        "it has scale_grad_by_freq, which is for training, but quantized rows are frozen",
    ),
    "hook of an embedding": (lambda: hooked(nn.Embedding(8, 4)), "it has forward_hooks, which would be lost"),
    "parameter of experts": (
        lambda: experts(extra=fixed(1)),
        "fused experts: it has gate_up_proj, down_proj, extra, not just gate_up_proj, down_proj",
    ),
    "dtype of experts": (
        lambda: experts(down_proj=fixed(2, 8, 4, dtype=torch.int8)),
        "fused experts: down_proj is not a plain Parameter in a float dtype",
    ),
    "shape of experts": (
        lambda: experts(down_proj=fixed(8, 4)),
        "fused experts: down_proj has shape [8, 4]",
    ),
    "child of experts": (
        lambda: experts(norm=nn.LayerNorm(8)),
        "fused experts: it has norm, which would be lost",
    ),
    "hook of experts": (lambda: hooked(experts()), "fused experts: it has forward_hooks, which would be lost"),
    "hook of a quantized layer": (
        lambda: hooked(quantized(nn.Linear(8, 4))),
        "it has forward_hooks, which would be lost",
    ),
}


@pytest.mark.parametrize("case", REASONS)
def test_a_module_that_cannot_be_replaced(case: str) -> None:
    make, reason = REASONS[case]
    found = unsupported_reason(make())
    assert found == Unsupported(reason) and str(found) == reason


SUPPORTED: dict[str, tuple[Callable[[], nn.Module], str | None]] = {
    "linear": (lambda: nn.Linear(8, 4), "linear"),
    "no bias": (lambda: nn.Linear(8, 4, bias=False), "linear"),
    "float64": (lambda: nn.Linear(8, 4, dtype=torch.float64), "linear"),
    "meta": (lambda: nn.Linear(8, 4, device="meta"), "linear"),
    "known subclass": (falcon_linear, "linear"),
    "once offloaded": (no_longer_offloaded, "linear"),
    "child without a value": (lambda: linear(gate=None), "linear"),
    "Conv1D": (conv1d, "conv1d"),
    "embedding": (lambda: nn.Embedding(8, 4, padding_idx=0), "embedding"),
    "scaled embedding": (gemma_embedding, "embedding"),
    "experts": (experts, "experts"),
    "quantized": (lambda: quantized(nn.Linear(8, 4)), None),
}


@pytest.mark.parametrize("case", SUPPORTED)
def test_a_module_that_can_be_replaced(case: str) -> None:
    make, kind = SUPPORTED[case]
    module = make()
    assert unsupported_reason(module) is None
    assert kind_of(module) == kind


@pytest.mark.parametrize("module", [nn.ReLU(), nn.EmbeddingBag(8, 4), nn.Conv1d(8, 4, 1), nn.Bilinear(8, 4, 2)])
def test_other_modules_have_no_kind(module: nn.Module) -> None:
    assert kind_of(module) is None


# ---- places, schemes and biases --------------------------------------------------------------------------------------


class RwkvFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8)


ENCODER = nn.TransformerEncoderLayer(8, 2, 8)
COMPILED = "torch.compile was called on it and keeps it: quantize first, then compile"


@pytest.mark.parametrize(
    ("parent", "attribute", "reason"),
    [
        (ENCODER.self_attn, "out_proj", "MultiheadAttention reads or writes its weight itself"),
        (ENCODER, "linear1", "TransformerEncoderLayer reads or writes its weight itself"),
        (RwkvFeedForward(), "value", "RwkvFeedForward reads or writes its weight itself"),
        (RwkvFeedForward(), "key", None),
        (torch.compile(nn.Linear(8, 8)), "_orig_mod", COMPILED),
        (nn.Sequential(nn.Linear(8, 8)), "0", None),
    ],
)
def test_a_place_where_no_layer_can_be_replaced(parent: nn.Module, attribute: str, reason: str | None) -> None:
    elsewhere = (nn.Sequential(), "0")
    found = unsupported_place([elsewhere, (parent, attribute)], in_fsdp=False)
    assert found == (None if reason is None else Unsupported(reason))


def test_a_layer_in_a_flat_parameter() -> None:
    found = unsupported_place([(nn.Sequential(), "0")], in_fsdp=True)
    assert found is not None and found.reason.startswith("it is sharded (fully_shard, FSDP, tensor parallelism)")


def test_schemes_of_embeddings() -> None:
    rotated = qao.Int8DynamicActivationInt4Weight(group_size=32, rotation=32)
    reasons = {
        qao.Float8WeightOnly(): "embeddings are quantized to int4 or int8, but fp8 has fp8 weights",
        rotated: f"{rotated} rotates the weight, so its rows are not rows of the embedding: use rotation=0 for it",
    }
    for scheme, reason in reasons.items():
        assert unsupported_for_embeddings(scheme) == Unsupported(reason)
        assert unsupported_reason(nn.Embedding(8, 4), scheme) == Unsupported(reason)
        assert unsupported_reason(nn.Linear(8, 4), scheme) is None
    for scheme in (INT8, qao.Int4WeightOnly(group_size=32)):
        assert unsupported_reason(nn.Embedding(8, 4), scheme) is None
    assert unsupported_reason(embedding(sparse=True), qao.Float8WeightOnly()) != Unsupported(
        reasons[qao.Float8WeightOnly()]
    )


def test_biases() -> None:
    assert unsupported_bias(torch.zeros(4), 4) is None
    assert unsupported_bias(torch.zeros(4), 8) == Unsupported("its bias is float32[4], not [8] in a float dtype")
    integers = torch.zeros(4, dtype=torch.int32)
    assert unsupported_bias(integers, 4) == Unsupported("its bias is int32[4], not [4] in a float dtype")


# ---- sharded modules -------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Iterator[Any]:
    if not distributed.is_available():
        pytest.skip("this build of torch has no torch.distributed")
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    try:
        yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


def test_sharded_modules(mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    weight = nn.Parameter(distribute_tensor(torch.ones(4, 8), mesh))
    stacked = nn.Parameter(distribute_tensor(torch.ones(2, 8, 4), mesh))
    hooked_by_fsdp = fully_shard(quantized(nn.Linear(8, 4)), mesh=mesh)
    for module in (linear(weight=weight), embedding(weight=weight), experts(down_proj=stacked), hooked_by_fsdp):
        found = unsupported_reason(module)
        assert found is not None and "it is sharded (fully_shard, FSDP, tensor parallelism)" in found.reason, module
