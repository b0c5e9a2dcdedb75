"""Modes of torch around every function: autocast, inference mode, defaults, TF32, dispatch modes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from qao.diagnostics.perplexity import perplexity
from qao.diagnostics.sensitivity import by_layer
from qao.ops import modes
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

SCHEMES = [
    qao.Int4WeightOnly(group_size=32),
    qao.Int8DynamicActivationInt4Weight(group_size=32, rotation=32),
    qao.Int8WeightOnly(),
    qao.Fp4WeightOnly(),
    qao.Float8WeightOnly("block"),
    qao.Int8DynamicActivationInt4Weight(group_size=32, symmetric=True),
    qao.Float8DynamicActivationFloat8Weight(),
]
LOWER = (torch.bfloat16, torch.float16)


class Calls(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def set_to(setter: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


def set_tf32(precision: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = precision


MODES: dict[str, Callable[[str], Any]] = {
    **{f"autocast {dtype}": (lambda device, dtype=dtype: torch.autocast(device, dtype)) for dtype in LOWER},
    "inference_mode": lambda device: torch.inference_mode(),
    "no_grad": lambda device: torch.no_grad(),
    "default float64": lambda device: set_to(torch.set_default_dtype, torch.float64, torch.float32),
    "default bfloat16": lambda device: set_to(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "default meta": lambda device: set_to(torch.set_default_device, "meta", None),
    "with meta": lambda device: torch.device("meta"),
    "with cuda": lambda device: torch.device(device),
    "medium": lambda device: set_to(torch.set_float32_matmul_precision, "medium", "highest"),
    "tf32": lambda device: set_to(set_tf32, "tf32", "ieee"),
    "deterministic": lambda device: set_to(torch.use_deterministic_algorithms, True, False),
    "anomaly": lambda device: torch.autograd.detect_anomaly(check_nan=True),
    "functions": lambda device: Calls(),
    "dispatch": lambda device: Dispatched(),
    "flops": lambda device: FlopCounterMode(display=False),
}
UNCAST = [name for name in MODES if not name.startswith("autocast")]


def settings() -> list[Any]:
    """State that functions must restore."""
    of_devices = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    legacy = modes._legacy_precision()
    precisions = [torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision]
    defaults = [torch.get_default_dtype(), torch.get_default_device(), torch.is_autocast_cache_enabled()]
    return [of_devices, legacy, precisions, defaults, torch.is_inference_mode_enabled(), torch.is_grad_enabled()]


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    found, wanted = model.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        own = found[name]
        assert (own.dtype, own.device, own.shape) == (value.dtype, value.device, value.shape), name
        assert torch.equal(own.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name
    inference = [name for name, value in model.named_parameters() if value.is_inference()]
    assert not inference


def mlp(dtype: torch.dtype, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_weights_are_the_same_in_every_mode(
    scheme: qao.Scheme, dtype: torch.dtype, device: str, tmp_path: Path
) -> None:
    base, state = mlp(dtype, device), {name: 0.5 * value for name, value in mlp(dtype, device).state_dict().items()}
    quantized = copy.deepcopy(base)
    qao.quantize_(quantized, scheme, progress=False)
    floats = qao.dequantize_(copy.deepcopy(quantized))
    updated = copy.deepcopy(quantized)
    qao.update_(updated, state)
    for name, mode in MODES.items():
        made, again = copy.deepcopy(base), copy.deepcopy(base)
        back, other = copy.deepcopy(quantized), copy.deepcopy(quantized)
        with mode(device):
            before = settings()
            qao.quantize_(made, scheme, progress=False)
            layer = qao.QuantLinear.from_linear(again[0], scheme)
            qao.save(made, tmp_path / f"{name}.safetensors")
            loaded = qao.load(tmp_path / f"{name}.safetensors", again)
            qao.update_(other, state)
            qao.dequantize_(back)
            assert settings() == before, name
        for found, expected in (
            (made, quantized), (layer, quantized[0]), (loaded, quantized), (other, updated), (back, floats)
        ):  # fmt: skip
            assert_equal(found, expected)


class Block(nn.Module):
    """``to``: the dtype of an autocast in its forward."""

    def __init__(self, to: torch.dtype | None) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.to = nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(96, 64), to

    def forward(self, x: Tensor) -> Tensor:
        inside = contextlib.nullcontext()
        if self.to is not None:
            inside = torch.autocast(x.device.type, self.to, cache_enabled=False)
        with inside:
            return x + self.down(self.up(self.norm(x)).relu())


def blocks(device: str, to: torch.dtype | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(to), Block(to)).to(device)


def samples(device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    outliers = torch.ones(64).index_fill_(0, torch.tensor([3, 40]), 50.0)
    return [(torch.randn(16, 64, generator=generator) * outliers).to(device) for _ in range(4)]


CALIBRATED = [
    *((SCHEMES[i], "gptq") for i in (0, 1, 2, 4)),
    (SCHEMES[6], "smoothquant"),
    (qao.Int8DynamicActivationInt8Weight(), "smoothquant"),
]


@pytest.mark.parametrize(("scheme", "method"), CALIBRATED, ids=str)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_calibrate_is_the_same_in_every_mode_but_autocast(scheme: qao.Scheme, method: str, device: str) -> None:
    def calibrated(model: nn.Module) -> nn.Module:
        qao.calibrate(model, data, scheme, method=method, progress=False)
        return model

    base, data = blocks(device), samples(device)
    expected = calibrated(copy.deepcopy(base))
    activations = base(data[0])
    for name in UNCAST:
        model = copy.deepcopy(base)
        with MODES[name](device):
            if name in ("medium", "tf32") and not torch.equal(base(data[0]), activations):
                continue  # GPUs, and CPUs with bfloat16 instructions
            before = settings()
            calibrated(model)
            assert settings() == before, name
        assert_equal(model, expected)


@pytest.mark.parametrize("to", LOWER, ids=str)
@pytest.mark.parametrize(("scheme", "method"), CALIBRATED, ids=str)
def test_calibrate_under_autocast(scheme: qao.Scheme, method: str, to: torch.dtype, device: str) -> None:
    """The same as of a model that enters autocast in its forward."""

    def calibrated(model: nn.Module) -> nn.Module:
        qao.calibrate(model, data, scheme, method=method, progress=False)
        return model

    data = samples(device)
    expected = calibrated(blocks(device, to))
    around = blocks(device)
    with torch.autocast(device, to):
        around(data[0])  # casts of the float weights are in autocast's cache
        assert_equal(calibrated(around), expected)
        inside = around(data[0])
    with torch.autocast(device, to):
        assert torch.equal(around(data[0]), inside)
    # And nearly as good as without: what float32 activations give, but for their rounding to 16 bits.
    y = blocks(device)(data[0])
    alone = calibrated(blocks(device))(data[0])
    with torch.autocast(device, to):
        rounded = blocks(device)(data[0])
    error = (calibrated(blocks(device, to)).float()(data[0]) - y).norm()
    assert error <= 1.1 * (alone - y).norm() + 3 * (rounded - y).norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("mode", ["medium", "tf32"])
def test_calibrate_with_tf32(mode: str) -> None:
    """Statistics stay in float32: as good as without, but for what TF32 changes of the activations."""
    base, data = blocks("cuda"), samples("cuda")
    y, errors = base(data[0]), []
    for each in ("no_grad", mode):
        model = copy.deepcopy(base)
        with MODES[each]("cuda"):
            qao.calibrate(model, data, SCHEMES[0], progress=False)
        errors.append((model(data[0]) - y).norm().item())
    assert errors[1] <= 1.1 * errors[0]


def test_calibrate_refuses_fp4_before_anything() -> None:
    base = blocks("cpu")
    model = copy.deepcopy(base)
    with pytest.raises(ValueError, match=r"calibrate: 0\.up: no codes of fp4.* qao\.quantize_"):
        qao.calibrate(model, samples("cpu"), qao.Fp4WeightOnly(), progress=False)
    assert_equal(model, base)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_model_quantized_in_inference_mode_can_be_trained(scheme: qao.Scheme, device: str) -> None:
    def gradient(model: nn.Module) -> Tensor:
        x = torch.linspace(-1, 1, 3 * 64, device=device).view(3, 64).requires_grad_()
        model(x).square().sum().backward()
        assert x.grad is not None
        return x.grad

    expected, made = mlp(torch.float32, device), mlp(torch.float32, device)
    qao.quantize_(expected, scheme, progress=False)
    with torch.inference_mode():
        qao.quantize_(made, scheme, progress=False)
        empty = qao.QuantLinear.empty(64, 96, scheme=scheme, device=device)
    assert not empty.qweight.is_inference()
    assert torch.equal(gradient(made), gradient(expected))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_models_of_inference_mode_take_new_weights(scheme: qao.Scheme, where: str, device: str) -> None:
    """All of their tensors are inference tensors, the float ones too."""
    base = mlp(torch.float32, device)
    state = {name: 0.5 * value for name, value in base.state_dict().items()}
    expected = copy.deepcopy(base)
    qao.quantize_(expected, scheme, progress=False)
    with torch.inference_mode():
        model = nn.Sequential(*copy.deepcopy(expected), nn.LayerNorm(64, device=device))
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        made = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(made, assign=True)
        assert model[0].qweight.is_inference() and model[3].weight.is_inference()
    norm = {"3.weight": torch.full((64,), 2.0, device=device), "3.bias": torch.full((64,), 3.0, device=device)}
    with torch.inference_mode(where == "inside"):
        qao.update_(model, state | norm)
    qao.update_(expected, state)
    for name, value in expected.state_dict().items():
        own = model.state_dict()[name]
        assert torch.equal(own.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name
    assert torch.equal(model[3].weight, norm["3.weight"]) and torch.equal(model[3].bias, norm["3.bias"])


class Bigrams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head, self.seen = nn.Embedding(40, 64), nn.Linear(64, 40), torch.zeros(())

    def forward(self, ids: Tensor) -> Tensor:
        states = self.embedding(ids)
        self.seen = states.mean()
        return self.head(states)


@pytest.mark.parametrize("mode", ["no_grad", "default float64", "default bfloat16", "default meta", "with meta",
                                  "inference_mode", "deterministic", "flops"])  # fmt: skip
def test_evaluation_is_the_same_in_every_mode(mode: str, device: str) -> None:
    torch.manual_seed(0)
    model, tokens = Bigrams().to(device).eval(), [*range(40), *range(0, 40, 3)]
    expected = perplexity(model, tokens, window=16)
    costs = by_layer(model, tokens, SCHEMES[0], window=16, progress=False)
    with MODES[mode](device):
        assert perplexity(model, tokens, window=16) == expected
        assert by_layer(model, tokens, SCHEMES[0], window=16, progress=False) == costs


def test_evaluation_runs_the_model_under_autocast(device: str) -> None:
    """By hand: logits of a bfloat16 product, everything behind them in float32."""
    torch.manual_seed(0)
    model, tokens = Bigrams().to(device).eval(), torch.arange(40, device=device)
    with torch.no_grad():
        logits = nn.functional.linear(model.embedding(tokens[:-1]).bfloat16(), model.head.weight.bfloat16(),
                                      model.head.bias.bfloat16()).double()  # fmt: skip
    expected = -logits.log_softmax(-1).gather(1, tokens[1:, None]).mean().item()
    with torch.autocast(device, torch.bfloat16):
        found = perplexity(model, tokens)
        costs = by_layer(model, tokens, SCHEMES[0], progress=False)
    assert found.nats_per_token == pytest.approx(expected, rel=1e-5)
    assert costs[0].divergence > 0 and not model.seen.is_inference()


def test_weights_without_numbers_are_said() -> None:
    with FakeTensorMode():
        model, layer = nn.Sequential(nn.Linear(64, 96)), qao.QuantLinear.empty(64, 96, scheme=SCHEMES[0])
        with pytest.raises(ValueError, match=r"calibrate: 0\.weight is a FakeTensor, and the model cannot run"):
            qao.calibrate(model, [torch.zeros(2, 64)], SCHEMES[0], progress=False)
        with pytest.raises(ValueError, match=r"weight: the new weight is a FakeTensor and has no data"):
            layer.load_float_(torch.zeros(96, 64))
        with pytest.warns(UserWarning, match="its weight is a FakeTensor"):
            qao.quantize_(model, SCHEMES[0], progress=False)


@pytest.mark.parametrize("name", MODES)
def test_an_error_leaves_the_modes_as_they_were(name: str, device: str) -> None:
    model = blocks(device)
    with MODES[name](device):
        before = settings()
        with pytest.raises(ValueError, match="data is empty"):
            qao.calibrate(model, [], SCHEMES[0])
        assert settings() == before


def test_warnings_name_the_line_of_the_caller(recwarn: pytest.WarningsRecorder) -> None:
    qao.quantize_(nn.Sequential(nn.ReLU()), SCHEMES[0])
    idle = nn.ModuleDict({"used": nn.Linear(64, 64), "idle": nn.Linear(64, 64)})
    idle.forward = lambda x: idle["used"](x)
    qao.calibrate(idle, samples("cpu"), SCHEMES[0], progress=False)
    assert [warning.filename for warning in recwarn] == [__file__] * 2
