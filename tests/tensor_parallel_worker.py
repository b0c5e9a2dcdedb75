"""qao.distributed.Colwise and Rowwise: one of the processes of tests/test_tensor_parallel.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import qao
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from qao.distributed import Colwise, Rowwise
from ranks_support import DEVICE, WORLD, Cases, Collectives, main
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

CASES: Cases = {}
SCHEMES = {
    "int4": qao.Int4WeightOnly(group_size=32),
    "int4 rows": qao.Int4WeightOnly(group_size=-1, symmetric=True),
    "int8": qao.Int8WeightOnly(),
    "fp8": qao.Float8WeightOnly(),
    "fp8 block": qao.Float8WeightOnly(granularity="block"),
    "int8_int8": qao.Int8DynamicActivationInt8Weight(),
    "int8_int8 asymmetric": qao.Int8DynamicActivationInt8Weight(symmetric_activations=False),
    "int8_int4": qao.Int8DynamicActivationInt4Weight(group_size=32),
    "int8_int4 asymmetric": qao.Int8DynamicActivationInt4Weight(group_size=32, symmetric_activations=False),
    "fp8_fp8": qao.Float8DynamicActivationFloat8Weight(),
    "fp8_fp8 block": qao.Float8DynamicActivationFloat8Weight(granularity="block"),
    "fp8_fp8 tensor": qao.Float8DynamicActivationFloat8Weight(granularity="tensor"),
    "fp8_fp8 static": qao.Float8StaticActivationFloat8Weight(granularity="tensor", activation_scale=0.01),
    "fp8_int4": qao.Float8DynamicActivationInt4Weight(group_size=32),
}
PLAN = {"up": Colwise(), "down": Rowwise()}
PART = 128  # rows of up and columns of down that a rank has
HIDDEN = PART * WORLD


def case(function: Callable[[Path], None]) -> Callable[[Path], None]:
    CASES[function.__name__] = function
    return function


def mesh() -> DeviceMesh:
    return init_device_mesh(DEVICE, (WORLD,))


def own(size: int = PART) -> slice:
    """The rank's part of a dimension of which each has ``size``."""
    return slice(size * dist.get_rank(), size * (dist.get_rank() + 1))


class Mlp(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(96, HIDDEN, bias), nn.Linear(HIDDEN, 80, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def activations(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), device="cpu").to(DEVICE)


def quantized(scheme: qao.Scheme, model: nn.Module | None = None) -> nn.Module:
    model = model or Mlp()
    qao.quantize_(model, scheme)
    return model


def close(got: Tensor, expected: Tensor, exact: Tensor) -> None:
    """``got`` is at most twice as far from the float64 result as ``expected``; both are float32 sums."""
    error = (expected.double() - exact).norm()
    assert (got.double() - exact).norm() <= 2 * error + 1e-6 * exact.norm(), (got, expected)


def same(got: Tensor, expected: Tensor, scheme: qao.Scheme | None = None) -> None:
    """Bit for bit on the CPU, except for e4m3 sums; a GPU may add N / world rows in a different order than N."""
    if DEVICE == "cpu" and (scheme is None or scheme.weights != "fp8"):
        assert torch.equal(got, expected)
    else:
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6 * max(1.0, float(expected.abs().max())))


def in_float64(model: nn.Module, x: Tensor) -> Tensor:
    """The float model, with rounded weights and no other rounding."""
    return copy.deepcopy(model).double()(x.double())


def check_scheme(scheme: qao.Scheme) -> None:
    floats, x = Mlp(), activations(3, 5, 96)
    exact = in_float64(floats, x)
    whole = quantized(scheme, copy.deepcopy(floats))
    model = parallelize_module(copy.deepcopy(whole), mesh(), PLAN)
    with torch.no_grad(), Collectives() as trace:
        y, expected = model(x), whole(x)
    assert trace.names == ["allreduce_"], trace.names
    close(y, expected, exact)
    if scheme.activations == "float" or "block" in str(scheme) or scheme.activation_scale is not None:
        # The codes, scales and activations are the same, so only the order of the float32 sums differs.
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))

    # The parts equal those of the whole bit for bit, and so do the results of a column-wise layer.
    rows = own()
    assert torch.equal(model.up.dequantize(), whole.up.dequantize()[rows])
    assert torch.equal(model.down.dequantize(), whole.down.dequantize()[:, rows])
    up, expected = model.up(x), whole.up(x)[..., rows]
    same(up, expected, scheme)

    # Sharded first: ranks search the ranges of their own parts.
    later = quantized(scheme, parallelize_module(copy.deepcopy(floats), mesh(), PLAN))
    assert "rows" in repr(later.up) and "out_features=128" in repr(later.up) and "columns" in repr(later.down)
    close(later(x), whole(x), exact)
    layer = quantized(scheme, nn.Sequential(parallelize_module(copy.deepcopy(floats.down), mesh(), Rowwise())))[0]
    assert torch.equal(layer.bias, floats.down.bias)


def check_gradients(scheme: qao.Scheme) -> None:
    """Straight through: gradients are those of the dequantized weights, summed over ranks for x, once for biases."""
    whole = quantized(scheme).requires_grad_()
    model = parallelize_module(copy.deepcopy(whole), mesh(), PLAN)
    results = []
    for some in (whole, model):
        x = activations(3, 96).requires_grad_()
        hidden = some.up(x)
        y = some.down(hidden)  # linear, so that gradients do not depend on how activations were rounded
        y.backward(activations(*y.shape))
        results.append((x.grad, some.up.bias.grad, some.down.bias.grad))
    part = own()
    (dx, up, down), (got_dx, got_up, got_down) = results
    for got, expected in ((got_dx, dx), (got_up, up[part]), (got_down, down)):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def check_compiled(scheme: qao.Scheme) -> None:
    torch._dynamo.reset()
    model = parallelize_module(quantized(scheme), mesh(), PLAN)
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    for rows in (1, 5):
        x = activations(rows, 96)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


for _name, _scheme in SCHEMES.items():
    CASES[f"scheme {_name}"] = lambda folder, scheme=_scheme: check_scheme(scheme)
    CASES[f"gradients {_name}"] = lambda folder, scheme=_scheme: check_gradients(scheme)
for _name in ("int4", "int8_int8 asymmetric", "fp8_fp8"):
    CASES[f"compiled {_name}"] = lambda folder, scheme=SCHEMES[_name]: check_compiled(scheme)


@case
def compiled_graphs_are_alike_on_every_rank(folder: Path) -> None:
    """The graph of a step: the same code, with one all-reduce; every GEMM is one opaque operator."""
    for scheme in SCHEMES.values():
        torch._dynamo.reset()
        codes: list[str] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[Tensor], codes: list[str] = codes) -> Any:
            codes.append(graph.code)
            return graph

        model = parallelize_module(quantized(scheme), mesh(), PLAN)
        with torch.no_grad():
            torch.compile(model, fullgraph=True, dynamic=False, backend=backend)(activations(3, 96))
        (code,) = codes
        assert code.count("_c10d_functional.all_reduce") == 1, code
        assert code.count(f".{scheme.word}_mm") == 2, code
        of_all: list[Any] = [None] * WORLD
        dist.all_gather_object(of_all, code)
        assert of_all == [code] * WORLD, of_all


@case
def rowwise_finds_scales_of_a_token_in_its_own_columns(folder: Path) -> None:
    """Each part is the operator on its own columns of x; a huge value on one rank does not coarsen those of others."""
    whole = quantized(qao.Int8DynamicActivationInt8Weight()).down
    layer = parallelize_module(copy.deepcopy(whole), mesh(), Rowwise())
    x = activations(4, HIDDEN)
    x[:, 3] = 1e4
    parts = []
    for columns in (slice(PART * rank, PART * (rank + 1)) for rank in range(WORLD)):
        q, scales, _ = qao.ops.int8_quantize(x[:, columns].contiguous(), True)
        parts.append((q * scales).double() @ whole.dequantize(torch.float64)[:, columns].T)
    y = layer(x[:, own()].contiguous())
    torch.testing.assert_close(y.double(), sum(parts) + whole.bias.double(), rtol=1e-5, atol=1e-4)


@case
def layouts(folder: Path) -> None:
    """DTensors in and out, a gathered output, an input that is split here, a sum that is scattered."""
    whole, x = quantized(SCHEMES["int8"]), activations(2, 2 * WORLD, 96)
    hidden = torch.relu(whole.up(x))
    expected = whole.down(hidden)
    up = parallelize_module(copy.deepcopy(whole.up), mesh(), Colwise(output_layouts=Replicate()))
    same(up(x), whole.up(x))
    up = parallelize_module(copy.deepcopy(whole.up), mesh(), Colwise(use_local_output=False))
    down = parallelize_module(copy.deepcopy(whole.down), mesh(), Rowwise(use_local_output=False))
    y = down(torch.relu(up(DTensor.from_local(x, mesh(), [Replicate()]))))
    assert isinstance(y, DTensor)
    torch.testing.assert_close(y.full_tensor(), expected)
    down = parallelize_module(copy.deepcopy(whole.down), mesh(), Rowwise(input_layouts=Replicate()))
    torch.testing.assert_close(down(hidden), expected)
    down = parallelize_module(
        copy.deepcopy(whole.down), mesh(), Rowwise(input_layouts=Replicate(), output_layouts=Shard(1))
    )
    tokens = own(2)
    torch.testing.assert_close(down(hidden), expected[:, tokens])
    sequence = parallelize_module(copy.deepcopy(whole.up), mesh(), Colwise(input_layouts=Shard(1)))
    same(sequence(x[:, tokens]), whole.up(x)[..., own()])


@case
def sizes_that_do_not_divide(folder: Path) -> None:
    """Parts are those of torch.chunk: of two ranks 51 and 50 of 101."""
    torch.manual_seed(0)
    floats = nn.Sequential(nn.Linear(70, 101), nn.Linear(101, 35))
    x = activations(3, 70)
    for scheme in (SCHEMES["int8"], SCHEMES["int4 rows"], SCHEMES["fp8_fp8"]):
        whole = quantized(scheme, copy.deepcopy(floats))
        model = parallelize_module(copy.deepcopy(whole), mesh(), {"0": Colwise(), "1": Rowwise()})
        assert model[0].out_features == model[1].in_features == len(torch.arange(101).chunk(WORLD)[dist.get_rank()])
        close(model(x), whole(x), in_float64(floats, x))
        gathered = parallelize_module(copy.deepcopy(whole[0]), mesh(), Colwise(output_layouts=Replicate()))
        torch.testing.assert_close(gathered(x), whole[0](x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(80 * WORLD, 32 * WORLD), nn.Linear(32 * WORLD, 80 * WORLD, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


@case
def tied_heads(folder: Path) -> None:
    ids = torch.tensor([[0, 79, 80, 80 * WORLD - 1, 3]])
    plan = {"embed": Rowwise(), "head": Colwise(output_layouts=Replicate())}
    for scheme in (SCHEMES["int4"], SCHEMES["int8"], SCHEMES["int8_int4 asymmetric"]):
        whole = Tied()
        floats = copy.deepcopy(whole)
        qao.quantize_(whole, scheme, embeddings=True)
        model = parallelize_module(copy.deepcopy(whole), mesh(), plan)
        assert model.embed.qweight is model.head.qweight and model.embed.scales is model.head.scales
        assert torch.equal(model.embed(ids), whole.embed(ids))
        torch.testing.assert_close(model(ids), whole(ids))
        columns = parallelize_module(copy.deepcopy(whole.embed), mesh(), Colwise(output_layouts=Replicate()))
        assert torch.equal(columns(ids), whole.embed(ids))
        later = parallelize_module(floats, mesh(), plan)
        assert later.embed.weight is later.head.weight
        qao.quantize_(later, scheme, embeddings=True)
        assert later.embed.qweight is later.head.qweight and later.embed.num_embeddings == 80
        close(later(ids), whole(ids), Tied().double()(ids))
        for wrong in (-1, 80 * WORLD) if DEVICE == "cpu" else ():  # a GPU gives NaN instead of an error
            raises(RuntimeError, partial(model.embed, torch.tensor([wrong])), str(wrong))


def raises(kind: type[Exception], call: Callable[[], object], *words: str) -> None:
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), error
        return
    raise AssertionError(f"no {kind.__name__}")


@case
def errors_name_what_works(folder: Path) -> None:
    def layer(n: int, k: int, scheme: qao.Scheme) -> nn.Module:
        return qao.QuantLinear.from_linear(nn.Linear(k, n), scheme)

    k, most = 32 * (WORLD + 1), f", {WORLD + 1}."  # a group more than ranks
    odd = layer(64, k, SCHEMES["int4"])
    raises(
        ValueError, lambda: parallelize_module(odd, mesh(), Rowwise()), f"[64, {k}]", "in units of 32", "work: 1", most
    )
    assert type(odd) is qao.QuantLinear and odd.in_features == k
    blocks = layer(128 * (WORLD + 1), 128, SCHEMES["fp8 block"])
    raises(ValueError, lambda: parallelize_module(blocks, mesh(), Colwise()), "rows", "work: 1", most)
    raises(ValueError, lambda: parallelize_module(layer(1, 64, SCHEMES["int8"]), mesh(), Colwise()), "work: 1.")
    raises(TypeError, lambda: parallelize_module(nn.Conv1d(1, 1, 1), mesh(), Colwise()), "Conv1d")
    sharded = parallelize_module(layer(64, 64, SCHEMES["int8"]), mesh(), Colwise())
    raises(TypeError, lambda: parallelize_module(sharded, mesh(), Rowwise()), "already sharded", "rows 0:32 of 64"[:4])
    floats = nn.Sequential(parallelize_module(nn.Linear(512, 512), mesh(), Colwise()))
    raises(ValueError, lambda: qao.calibrate(floats, [torch.ones(1, 512)], SCHEMES["int8"]), "sharded")
    raises(ValueError, lambda: qao.dequantize_(nn.Sequential(sharded)), "sharded")


@case
def weights_are_those_of_the_first_rank(folder: Path) -> None:
    torch.manual_seed(dist.get_rank())
    layer = qao.QuantLinear.from_linear(nn.Linear(64, 64), SCHEMES["int4"])
    torch.manual_seed(0)
    first = qao.QuantLinear.from_linear(nn.Linear(64, 64), SCHEMES["int4"])
    layer = parallelize_module(layer, mesh(), Colwise(output_layouts=Replicate()))
    same(layer(activations(2, 64)), first(activations(2, 64)))


@case
def state_dicts_are_of_the_whole(folder: Path) -> None:
    """A checkpoint of all ranks is loaded by one, and the other way round."""
    for number, scheme in enumerate(SCHEMES.values()):
        whole, x = quantized(scheme), activations(3, 96)
        model = parallelize_module(copy.deepcopy(whole), mesh(), PLAN)
        expected, path = model(x), folder / f"state {number}"
        dcp.save(model.state_dict(), checkpoint_id=path)
        alone = quantized(scheme)
        for parameter in alone.parameters():
            parameter.data.zero_()
        state = alone.state_dict()
        dcp.load(state, checkpoint_id=path)
        alone.load_state_dict(state)
        for key, tensor in whole.state_dict().items():
            assert torch.equal(alone.state_dict()[key], tensor), key
        for source in ("file", "whole"):
            again = parallelize_module(quantized(scheme), mesh(), PLAN)
            for parameter in again.parameters():
                parameter.data.zero_()
            state = again.state_dict()
            if source == "file":
                dcp.load(state, checkpoint_id=path)
            again.load_state_dict(state if source == "file" else whole.state_dict())
            assert torch.equal(again(x), expected)
    # 96 columns a rank are three groups, and one and a half tiles.
    layer = parallelize_module(
        qao.QuantLinear.from_linear(nn.Linear(96 * WORLD, 64), SCHEMES["int4"]), mesh(), Rowwise()
    )
    raises(ValueError, layer.state_dict, "columns 0:96"[:7], "tile", "before it is sharded")


@case
def new_weights_for_sharded_layers(folder: Path) -> None:
    """An in-place update equals quantizing the new floats and sharding; for parts, quantizing the parts."""
    torch.manual_seed(7)
    new = {name: torch.randn_like(tensor) for name, tensor in Mlp().state_dict().items()}
    part = own()
    x = activations(3, 96)
    without_search = (
        qao.Int4WeightOnly(group_size=32, clip_search=False),
        qao.Fp4WeightOnly(),
        qao.Int8WeightOnly(clip_search=False),
        qao.Int8DynamicActivationInt8Weight(symmetric_activations=False, clip_search=False),
    )
    for scheme in (*SCHEMES.values(), *without_search):
        model = parallelize_module(quantized(scheme), mesh(), PLAN)
        floats = Mlp()
        floats.load_state_dict(new)
        expected = parallelize_module(quantized(scheme, copy.deepcopy(floats)), mesh(), PLAN)
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        assert qao.update_(model, new) == ["up", "down"]
        assert addresses == [parameter.data_ptr() for parameter in model.parameters()]
        assert torch.equal(model(x), expected(x))
        for key, tensor in expected.state_dict().items():
            assert torch.equal(full(model.state_dict()[key]), full(tensor)), key
        later = quantized(scheme, parallelize_module(floats, mesh(), PLAN))
        model.up.load_float_(new["up.weight"][part])
        model.down.load_float_(new["down.weight"][:, part])
        assert torch.equal(model(x), later(x))
        raises(ValueError, partial(model.up.load_float_, torch.ones(64, 96)), f"[{HIDDEN}, 96] or [128, 96]")


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# ---- tp_plan of transformers -----------------------------------------------------------------------------------------


def causal_lm(tied: bool) -> nn.Module:
    """Qwen2 with random biases of its projections, which would otherwise be zeros."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64 * WORLD, "intermediate_size": HIDDEN, "num_hidden_layers": 2, "vocab_size": 80 * WORLD}
    heads = {"num_attention_heads": 2 * WORLD, "num_key_value_heads": WORLD}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=tied)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model


def shared(folder: Path, name: str, save: Callable[[Path], object]) -> str:
    """A checkpoint that the first rank writes for all."""
    if dist.get_rank() == 0:
        save(folder / name)
    dist.barrier()
    return str(folder / name)


def check_kinds(model: nn.Module, head: str, embedding: str) -> None:
    layer = model.model.layers[1]
    assert type(layer.mlp.up_proj).__name__ == type(layer.self_attn.q_proj).__name__ == "ColwiseQuantLinear"
    assert type(layer.mlp.down_proj).__name__ == "RowwiseQuantLinear" and layer.mlp.down_proj.in_features == 128
    assert (type(model.lm_head).__name__, type(model.model.embed_tokens).__name__) == (head, embedding)
    assert not any(isinstance(parameter, DTensor) for parameter in layer.mlp.parameters())


@torch.no_grad()
def check_tp_plan(folder: Path, scheme: qao.Scheme, tied: bool, embeddings: bool) -> None:
    """Quantized while it is loaded, then loaded from quantized checkpoints: all as the unsharded model."""
    from transformers import Qwen2ForCausalLM

    name, ids = f"{scheme.word} {tied} {embeddings}", torch.arange(9)[None]
    floats = causal_lm(tied)
    path = shared(folder, f"floats {name}", floats.save_pretrained)
    whole = copy.deepcopy(floats)
    qao.quantize_(whole, scheme, embeddings=embeddings)
    expected, exact = whole(ids).logits, floats.double()(ids).logits
    kinds = ("ColwiseQuantLinear", "RowwiseQuantEmbedding" if embeddings else "Embedding")
    kinds = ("Linear", "Embedding") if tied and not embeddings else kinds

    config = qao.QaoConfig(scheme, embeddings=embeddings)
    model = Qwen2ForCausalLM.from_pretrained(path, quantization_config=config, tp_plan="auto", dtype=torch.float32)
    check_kinds(model, *kinds)
    assert not embeddings or model.lm_head.qweight is model.model.embed_tokens.qweight
    got = model(ids).logits
    close(got, expected, exact)
    if scheme.activations == "float":  # the same codes and scales
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)

    path = shared(folder, f"quantized {name}", whole.save_pretrained)
    native = shared(folder, f"native {name}", lambda to: write_native(whole, to))
    for checkpoint in (path, native):
        again = qao.from_pretrained(checkpoint, distributed_config={"tp_size": WORLD})
        check_kinds(again, *kinds)
        assert torch.equal(again(ids).logits, got), checkpoint
    again = Qwen2ForCausalLM.from_pretrained(native, tp_plan="auto")
    assert torch.equal(again(ids).logits, got)

    again.save_pretrained(folder / f"saved {name}")  # all gather, and the first writes
    dist.barrier()
    alone = qao.from_pretrained(folder / f"saved {name}")
    expected = whole.state_dict()
    for key, tensor in alone.state_dict().items():
        assert key.endswith("pip_install_qao") or torch.equal(expected[key].to(tensor.device), tensor), key


def write_native(model: nn.Module, folder: Path) -> None:
    """qao's layout, which QaoConfig declares to transformers, even where compressed-tensors could hold it."""
    qao.save(model, folder)
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], torch.float32
    config.quantization_config = qao.QaoConfig.of(model).to_dict()
    config.save_pretrained(folder)


for _name, _tied, _embeddings in (
    ("int4", False, False),
    ("int8_int8 asymmetric", False, False),
    ("int8", True, False),
    ("int8_int4", True, True),
):
    CASES[f"tp_plan {_name}"] = partial(check_tp_plan, scheme=SCHEMES[_name], tied=_tied, embeddings=_embeddings)


@case
def tp_plan_with_a_style_that_is_none_of_ours(folder: Path) -> None:
    from transformers import Qwen2ForCausalLM

    path = shared(folder, "packed", causal_lm(False).save_pretrained)
    config = {"tp_size": WORLD, "tp_plan": {"model.layers.*.mlp.up_proj": "packed_colwise"}}
    quantization = qao.QaoConfig(SCHEMES["int8"])
    load = partial(Qwen2ForCausalLM.from_pretrained, path, distributed_config=config)
    raises(ValueError, partial(load, quantization_config=quantization), "up_proj", "'packed_colwise'", "rowwise")
    # Left in float, it is sharded by transformers.
    quantization = qao.QaoConfig(SCHEMES["int8"], modules_to_not_convert=["up_proj", "gate_proj"])
    config = {"tp_size": WORLD}
    model = Qwen2ForCausalLM.from_pretrained(path, distributed_config=config, quantization_config=quantization)
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor)
    whole, ids = causal_lm(False), torch.arange(9)[None]
    qao.quantize_(whole, SCHEMES["int8"], filter_fn=lambda module, fqn: "up_proj" not in fqn and "gate" not in fqn)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, whole(ids).logits, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    main(CASES)
