"""State machines of layers: random sequences of what users do with a quantized model.

After every step each layer must hold the weight that a model of it in float64 says, floats must have their values,
ties must hold, and the result for one input must keep its bits unless the step changes weights or dtypes.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import accuracy
import qao
import torch
from checkpoint_support import SCHEMES
from ops_schemes import generator
from qao.nn.packed_module import PackedModule
from qao.schemes import Int4Weight
from torch import Tensor, nn

from .finding import Finding, check

_DTYPES = ("float32", "bfloat16", "float16")
_SCHEMES = (
    *SCHEMES,
    qao.Int8DynamicActivationInt8Weight(rotation=32),
    qao.Int8DynamicActivationInt4Weight(32, True, integer_scales=True),
    qao.Float8DynamicActivationInt4Weight(32, True, power_of_two_scales=True),
)
# Relative error of a weight of normal values, root mean square: a third of a step of its format, times a margin of 2.
_ERRORS = {"int4": 0.25, "fp4": 0.25, "int8": 0.02, "fp8": 0.06}


class Tiny(nn.Module):
    """An embedding, which may be tied to the head, a norm, and layers with and without a bias."""

    def __init__(self, seed: int, tied: bool) -> None:
        super().__init__()
        g = generator(seed)
        self.embed, self.norm = nn.Embedding(40, 64), nn.LayerNorm(64)
        self.up, self.down, self.head = nn.Linear(64, 96), nn.Linear(96, 64, bias=False), nn.Linear(64, 40, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.3)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids))
        return self.head(x + self.down(torch.tanh(self.up(x))))  # type: ignore[no-any-return]


KEEP = (
    "deepcopy",
    "pickle",
    "torch_save",
    "state",
    "state_into_floats",
    "save",
    "modes",
    "compile",
    "refused",
    "weight",
)
CHANGE = ("to", "update", "dequantize", "quantize", "train_bias")


def draw(rng: random.Random) -> dict[str, Any]:
    steps: list[list[Any]] = [["quantize", rng.randrange(len(_SCHEMES)), rng.getrandbits(16)]]
    for _ in range(rng.randint(1, 8)):
        name = rng.choice(KEEP if rng.random() < 0.6 else CHANGE)
        if name == "compile" and rng.random() < 0.8:
            continue
        steps.append([name, rng.randrange(len(_SCHEMES)), rng.getrandbits(16)])
    return {"seed": rng.getrandbits(32), "dtype": rng.choice(_DTYPES), "tied": rng.random() < 0.5, "steps": steps}


def run(case: dict[str, Any], device: str) -> int:
    """Make the steps of a case. Returns their number."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of layers that a scheme leaves out
        machine = Machine(case, device)
        for i, (name, scheme, seed) in enumerate(case["steps"]):
            try:
                getattr(machine, name)(_SCHEMES[scheme], seed)
                machine.check(keeps=name in KEEP)
            except (Finding, qao.checkpoints.CheckpointError) as error:
                raise Finding(f"step {i} {name}: {error}") from error
    return len(case["steps"])


def _exact(layer: Any) -> qao.Scheme:
    """The layer's scheme with the dtype that its scales have, which may follow from the dtype of the float weight."""
    scheme: qao.Scheme = layer.scheme
    return replace(scheme, scale_dtype=layer.scales.dtype) if isinstance(scheme, Int4Weight) else scheme


class Machine:
    """A model, and what it must hold."""

    def __init__(self, case: dict[str, Any], device: str) -> None:
        self.tied, self.dtype = case["tied"], getattr(torch, case["dtype"])
        self.device = device
        self.seed = case["seed"]
        self.model: nn.Module = self.floats_of(self.seed)
        self.scheme: qao.Scheme | None = None
        self.remember()

    def floats_of(self, seed: int) -> nn.Module:
        return Tiny(seed, self.tied).to(self.device, self.dtype)

    def remember(self) -> None:
        """The present state is the right one."""
        self.dense = {n: m.dequantize(torch.float32).double() for n, m in self.packed().items()}
        self.plain = {n: p.detach().clone() for n, p in self.parameters().items()}
        self.y = self.model(torch.arange(7, device=self.device))

    def packed(self) -> dict[str, Any]:
        modules = self.model.named_modules(remove_duplicate=False)
        return {name: module for name, module in modules if isinstance(module, PackedModule)}

    def parameters(self) -> dict[str, Tensor]:
        """Float parameters outside packed weights."""
        packed = self.packed()
        named = self.model.named_parameters(remove_duplicate=False)
        return {n: p for n, p in named if n.rpartition(".")[0] not in packed or n.endswith(".bias")}

    def check(self, keeps: bool) -> None:
        packed, plain = self.packed(), self.parameters()
        check(packed.keys() == self.dense.keys(), f"quantized are {list(packed)}, not {list(self.dense)}")
        check(plain.keys() == self.plain.keys(), f"floats are {list(plain)}, not {list(self.plain)}")
        for name, module in packed.items():
            dense = module.dequantize(torch.float32).double()
            check(torch.equal(dense, self.dense[name]), f"{name} holds another weight")
            check(_exact(module) == self.scheme, f"{name} has the scheme {module.scheme!r}, not {self.scheme!r}")
            check(module.dtype == self.dtype, f"{name} has dtype {module.dtype}, not {self.dtype}")
        for name, tensor in plain.items():
            wanted = self.plain[name]
            check(tensor.dtype == wanted.dtype and torch.equal(tensor, wanted), f"{name} has another value")
        if self.tied:
            embed, head = (getattr(self.model, name) for name in ("embed", "head"))
            kinds = isinstance(embed, PackedModule), isinstance(head, PackedModule)
            part = "qweight" if all(kinds) else "weight"
            same = kinds[0] != kinds[1] or getattr(embed, part).data_ptr() == getattr(head, part).data_ptr()
            check(same, "the head is no longer tied to the embedding")
        y = self.model(torch.arange(7, device=self.device))
        check(not keeps or torch.equal(y, self.y), "the model gives another result")
        check(bool(y.isfinite().all()), "the result is not finite")
        for name, module in packed.items():
            if isinstance(module, qao.QuantLinear) and module.scheme.activations == "float":
                x = torch.randn(3, module.in_features, generator=generator(5)).to(self.device, self.dtype)
                accuracy.check_close(module(x), x, self.dense[name], module.bias)

    # ---- steps that keep everything

    def deepcopy(self, scheme: qao.Scheme, seed: int) -> None:
        self.model = copy.deepcopy(self.model)

    def pickle(self, scheme: qao.Scheme, seed: int) -> None:
        self.model = pickle.loads(pickle.dumps(self.model))

    def torch_save(self, scheme: qao.Scheme, seed: int) -> None:
        file = io.BytesIO()
        torch.save(self.model, file)
        self.model = torch.load(io.BytesIO(file.getvalue()), weights_only=False)

    def other(self, seed: int) -> nn.Module:
        """A model of the same kind with other values."""
        model = self.floats_of(seed + 1)
        if self.scheme is not None and self.packed():
            qao.quantize_(model, self.scheme, embeddings="embed" in self.packed(), progress=False)
        return model

    def state(self, scheme: qao.Scheme, seed: int) -> None:
        state, model = self.model.state_dict(), self.other(seed)
        if seed % 2:
            file = io.BytesIO()
            torch.save(state, file)
            state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        model.load_state_dict(state, assign=bool(seed & 2) and not self.tied)
        self.model = model

    def state_into_floats(self, scheme: qao.Scheme, seed: int) -> None:
        model = self.floats_of(seed + 1)
        model.load_state_dict(self.model.state_dict())
        self.model = model

    def save(self, scheme: qao.Scheme, seed: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / ("model.safetensors" if seed & 1 else "model")
            qao.save(self.model, path)
            target = self.other(seed) if seed & 2 else self.floats_of(seed + 1)
            if seed & 4 and not seed & 2:
                with torch.device("meta"):
                    target = Tiny(seed, self.tied)
            self.model = qao.load(path, target, device=self.device)

    def modes(self, scheme: qao.Scheme, seed: int) -> None:
        (self.model.eval if seed & 1 else self.model.train)()
        self.model.requires_grad_(bool(seed & 2))
        self.model.to(self.device)
        self.model.apply(lambda module: None)
        if seed & 4:
            self.model.share_memory()

    def compile(self, scheme: qao.Scheme, seed: int) -> None:
        torch._dynamo.reset()
        ids = torch.arange(7, device=self.device)
        check(torch.equal(torch.compile(self.model, backend="eager")(ids), self.y), "compiled, it gives another result")

    def refused(self, scheme: qao.Scheme, seed: int) -> None:
        """Damaged entries are refused, and nothing changes."""
        if not self.packed():
            return
        state = {name: value for name, value in self.floats_of(seed).state_dict().items()}
        state["up.weight"] = state["up.weight"].clone()
        state["up.weight"][0, 0] = float("nan")
        self.raises(lambda: qao.update_(self.model, state), "update_ with NaN")
        name, layer = sorted(self.packed().items())[seed % len(self.packed())]
        own = layer.state_dict()
        self.raises(lambda: layer.load_state_dict(own | {"qweight": own["qweight"][..., :-1]}), "a short qweight")
        self.raises(lambda: layer.load_state_dict(own | {"scales": own["scales"].long()}), "integer scales")

    def raises(self, call: Any, what: str) -> None:
        try:
            call()
        except (ValueError, RuntimeError, TypeError):
            return
        raise Finding(f"{what} is not refused")

    def weight(self, scheme: qao.Scheme, seed: int) -> None:
        """``layer.weight`` is the dequantized one."""
        for name, layer in self.packed().items():
            wanted = layer.dequantize(self.dtype)
            check(torch.equal(layer.weight, wanted), f"{name}.weight is not the dequantized one")

    # ---- steps that change something

    def to(self, scheme: qao.Scheme, seed: int) -> None:
        self.dtype = getattr(torch, _DTYPES[seed % 3])
        dense = self.dense
        self.model = self.model.to(self.dtype)
        for name, tensor in self.plain.items():
            self.plain[name] = tensor.to(self.dtype)
        self.rest(dense)

    def rest(self, dense: dict[str, Tensor]) -> None:
        """Weights must be these, floats those of ``plain``; the result may be another."""
        plain = self.plain
        self.remember()
        self.dense, self.plain = dense, plain

    def update(self, scheme: qao.Scheme, seed: int) -> None:
        """The same bits as of a model quantized from the new floats."""
        if not self.packed():
            return
        expected = self.other(seed)
        state = self.floats_of(seed + 1).state_dict()
        qao.update_(self.model, state)
        static = {n for n, m in self.packed().items() if getattr(m, "activation_scale", None) is not None}
        for name, module in expected.named_modules(remove_duplicate=False):
            if isinstance(module, PackedModule) and name not in static:
                same = torch.equal(module.dequantize(torch.float32), self.packed()[name].dequantize(torch.float32))
                check(same, f"{name} is not what quantize_ makes of the new weight")
        self.seed = seed + 1
        self.plain = {name: p.clone() for name, p in self.parameters().items()}
        for name, wanted in state.items():
            if name in self.plain:
                check(torch.equal(self.plain[name], wanted), f"{name} was not updated")
        self.remember()

    def dequantize(self, scheme: qao.Scheme, seed: int) -> None:
        if not self.packed():
            return
        weights = {f"{name}.weight": layer.dequantize(layer.dtype) for name, layer in self.packed().items()}
        plain = self.plain
        qao.dequantize_(self.model)
        self.remember()
        self.plain = plain | weights
        self.scheme = None

    def quantize(self, scheme: qao.Scheme, seed: int) -> None:
        if self.packed():
            return
        before = {name: m.weight.detach().double() for name, m in self.model.named_modules() if hasattr(m, "weight")}
        plain, embeddings = self.plain, seed % 2 == 0 and scheme.word in ("int4", "int8")
        qao.quantize_(self.model, scheme, embeddings=embeddings, progress=False)
        self.scheme = scheme
        packed = self.packed()
        check("up" in packed and "down" in packed, f"layers are left out by {scheme}: {list(packed)}")
        for name, layer in packed.items():
            if name in before:
                error = layer.dequantize(torch.float32).double() - before[name]
                relative = (error.norm() / before[name].norm()).item()
                bound = _ERRORS[next(word for word in _ERRORS if scheme.word.endswith(word))]
                check(relative <= bound, f"{name}: {scheme} loses {relative:.3g} of the weight")
        self.plain = {n: t for n, t in plain.items() if n.rpartition(".")[0] not in packed or n.endswith(".bias")}
        self.rest({n: m.dequantize(torch.float32).double() for n, m in packed.items()})
        self.scheme = _exact(packed["up"])

    def train_bias(self, scheme: qao.Scheme, seed: int) -> None:
        """An optimizer's step on a bias."""
        bias = self.model.up.bias  # type: ignore[union-attr]
        bias.add_(0.5)  # type: ignore[operator, union-attr]
        self.plain["up.bias"] = self.plain["up.bias"] + 0.5
        self.rest(self.dense)
