"""Layers reject packed weights of another size or scheme, however loaded; replicas compute alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from torch import Tensor, nn

FOUR_BITS = [
    qao.Int4WeightOnly(group_size=32),
    qao.Int4WeightOnly(group_size=-1),
    qao.Int8DynamicActivationInt4Weight(group_size=32, symmetric=True, integer_scales=True),
    qao.Float8DynamicActivationInt4Weight(group_size=32),
    qao.Fp4WeightOnly("mxfp4"),
    qao.Fp4WeightOnly("nvfp4"),
]
SCHEMES = [
    *FOUR_BITS,
    qao.Int8WeightOnly(),
    qao.Int8DynamicActivationInt8Weight(symmetric_activations=False),
    qao.Float8WeightOnly("block"),
    qao.Float8StaticActivationFloat8Weight(activation_scale=0.1),
]
SIZES = [(7, 64), (4, 64), (16, 60), (16, 64)]  # packed weights of four bits have one shape


def quantized(n: int, k: int, scheme: qao.Scheme, bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(k, n, bias=bias))
    qao.quantize_(model, scheme, progress=False)
    return model


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("scheme", FOUR_BITS, ids=str)
def test_a_weight_of_another_size(scheme: qao.Scheme, assign: bool, strict: bool) -> None:
    for own in SIZES:
        for other in SIZES:
            model, state = quantized(*own, scheme), quantized(*other, scheme).state_dict()
            before = model[0].dequantize()
            if own == other:
                model.load_state_dict(state, strict=strict, assign=assign)
                continue
            with pytest.raises(
                RuntimeError, match=rf"holds a weight \[{other[0]}, {other[1]}\].*\[{own[0]}, {own[1]}\]"
            ):
                model.load_state_dict(state, strict=strict, assign=assign)
            assert torch.equal(model[0].dequantize(), before)


@pytest.mark.parametrize("scheme", FOUR_BITS, ids=str)
def test_a_weight_of_another_size_without_a_marker(scheme: qao.Scheme) -> None:
    for own in SIZES:
        for other in SIZES:
            model = quantized(*own, scheme)
            state = {name: t for name, t in quantized(*other, scheme).state_dict().items() if t.dtype != torch.uint8}
            if own == other:
                model.load_state_dict(state)
            else:
                before = model[0].dequantize()
                fewer_columns = own == (16, 64) and other == (16, 60)
                message = "the size of the packed weight is ambiguous" if fewer_columns else "padded to the same shape"
                with pytest.raises(RuntimeError, match=f"0.qweight: .*{message}"):
                    model.load_state_dict(state)
                assert torch.equal(model[0].dequantize(), before)


@pytest.mark.parametrize("scheme", FOUR_BITS, ids=str)
def test_a_last_column_of_zeros(scheme: qao.Scheme) -> None:
    """The marker says that it is one; without it, sizes that no fewer columns are padded to are unambiguous."""
    for k, ambiguous in ((64, True), (65, False)):
        torch.manual_seed(0)
        linear = nn.Linear(k, 16, bias=False)
        with torch.no_grad():
            linear.weight[:, -1] = 0
        model = nn.Sequential(linear)
        qao.quantize_(model, scheme, progress=False)
        state, expected = model.state_dict(), model[0].dequantize()
        other = quantized(16, k, scheme)
        other.load_state_dict(state)
        assert torch.equal(other[0].dequantize(), expected)
        if not ambiguous:
            other.load_state_dict({name: tensor for name, tensor in state.items() if tensor.dtype != torch.uint8})
            assert torch.equal(other[0].dequantize(), expected)


def test_every_pair_of_schemes() -> None:
    for own in SCHEMES:
        for other in SCHEMES:
            model, state = quantized(16, 64, own, True), quantized(16, 64, other, True).state_dict()
            if own == other or {own.word, other.word} == {"int4", "fp8_int4"} and own.group_size == other.group_size:
                model.load_state_dict(state)
                assert torch.equal(model[0].dequantize(), quantized(16, 64, other, True)[0].dequantize())
            elif (own.word, other.word) == ("int8", "int8_int8"):
                model.load_state_dict(state, strict=False)  # with the sums left over
                assert torch.equal(model[0].dequantize(), quantized(16, 64, other, True)[0].dequantize())
            else:
                message = "0.(pip_install_qao: the checkpoint holds|weight_sums: the checkpoint has none)"
                with pytest.raises(RuntimeError, match=message):
                    model.load_state_dict(state, strict=False)


@pytest.mark.parametrize("scheme", FOUR_BITS, ids=str)
def test_layers_made_of_a_weight_of_another_size(scheme: qao.Scheme) -> None:
    packed = scheme.quantize(torch.randn(4, 64))
    layer = quantized(7, 64, scheme)[0]
    with pytest.raises(ValueError, match=r"QuantLinear: .* of \[7, 64\]: the packed weight is of \[4, 64\]"):
        qao.QuantLinear(64, 7, scheme, packed, None)
    with pytest.raises(ValueError, match=r"the packed weight is of \[4, 64\]"):
        layer.set_packed(packed)
    with pytest.raises(ValueError, match=r"qweight must be int8.* of a weight \[4, 64\]"):
        layer.qweight = quantized(4, 64, scheme)[0].qweight
    with pytest.raises(ValueError, match=r"scales must be"):
        layer.scales = nn.Parameter(torch.ones(3), requires_grad=False)


def test_a_packed_weight_of_another_scheme() -> None:
    packed = qao.Int8WeightOnly().quantize(torch.randn(16, 64))
    with pytest.raises(ValueError, match="scales must be"):
        qao.QuantLinear(64, 16, qao.Float8WeightOnly(), packed, None)
    with pytest.raises(ValueError, match="weight_sums must be float32"):
        qao.QuantLinear(64, 16, qao.Int8DynamicActivationInt8Weight(symmetric_activations=False), packed, None)


# ---- nn.DataParallel -------------------------------------------------------------------------------------------------


def replica(module: nn.Module) -> Any:
    """As torch.nn.parallel.replicate makes it, of tensors that lie at any address."""
    made: Any = module._replicate_for_data_parallel()
    made._former_parameters = {}
    for name, child in module._modules.items():
        setattr(made, name, replica(child))  # type: ignore[arg-type]
    for name, own in module._parameters.items():
        if own is None:
            made._parameters[name] = None
            continue
        buffer = torch.empty(own.numel() + 1, dtype=own.dtype, device=own.device)
        copied: Tensor = buffer[1:].view(own.shape)
        setattr(made, name, copied.copy_(own.detach()))
    return made


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_replica_computes_the_same(scheme: qao.Scheme, bias: bool, device: str) -> None:
    model = quantized(48, 64, scheme, bias).to(device)
    made, x = replica(model), torch.randn(3, 64, device=device)
    assert torch.equal(made(x), model(x)) and not list(made.parameters())
    assert torch.equal(made[0].dequantize(), model[0].dequantize())
    assert torch.equal(made[0].weight.clone(), model[0].dequantize(made[0].dtype))


def test_a_replica_of_an_embedding(device: str) -> None:
    table = qao.nn.QuantEmbedding.from_embedding(nn.Embedding(50, 64, device=device), qao.Int4WeightOnly(group_size=32))
    ids = torch.arange(5, device=device)
    assert torch.equal(replica(table)(ids), table(ids))


# ---- Trainer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_what_save_pretrained_wrote_loads_into_the_model(scheme: qao.Scheme, tmp_path: Path) -> None:
    """As Trainer does to resume, and to take the best model at the end."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(transformers.LlamaForCausalLM(config).eval())
        qao.quantize_(models[-1], scheme, progress=False)
    saved, model = models
    saved.save_pretrained(tmp_path)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    ids = torch.arange(8)[None]
    assert torch.equal(model(ids).logits, saved(ids).logits)
