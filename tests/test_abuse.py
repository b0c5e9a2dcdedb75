"""Hostile calls: no crash, no uninitialized memory in results, no error without its operator."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from abuse_support import CALLS, ON_CPU, call_of, freed
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

HERE = Path(__file__).parent
PACKAGE = Path(qao.__file__).parent
SCHEMES = (
    qao.Int4WeightOnly(group_size=32),
    qao.Int8WeightOnly(),
    qao.Float8WeightOnly(),
    qao.Int8DynamicActivationInt8Weight(symmetric_activations=False),
    qao.Int8DynamicActivationInt4Weight(group_size=32, symmetric_activations=False),
    qao.Float8StaticActivationFloat8Weight(activation_scale=0.01),
    qao.Float8DynamicActivationInt4Weight(group_size=32),
)


def python(program: str, *paths: Path, timeout: int = 120) -> subprocess.CompletedProcess[str]:
    """Another process with this package, or with those in ``paths``, in it."""
    where = [str(path) for path in (*(paths or (PACKAGE.parent,)), HERE)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(where), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout)


def tensors_of(arguments: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in arguments.items() if isinstance(value, Tensor)}


def call(op: str, arguments: dict[str, Any]) -> Any:
    return getattr(torch.ops.qao, op)(**arguments)


# ---- operators -------------------------------------------------------------------------------------------------------


def test_all_operators_are_attacked() -> None:
    names = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
    public = {name.partition(".")[0] for space, _, name in names if space == "qao" and not name.startswith("_")}
    assert public == set(CALLS), "a call of each operator belongs into abuse_support.py"


def mixes(op: str, device: str, other: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each operand alone on the other device, and each alone left on this one, for calls with several tensors."""
    good = call_of(op, device)
    tensors = tensors_of(good)
    away = good | {name: value.to(other) for name, value in tensors.items()}
    for name, value in tensors.items() if len(tensors) > 1 else ():
        yield name, good | {name: value.to(other)}
        yield name, away | {name: value}


@pytest.mark.parametrize("op", CALLS)
def test_one_operand_on_meta(op: str, device: str) -> None:
    call(op, call_of(op, device))
    for name, mixed in mixes(op, device, "meta"):
        with pytest.raises(RuntimeError, match=rf"qao::{op}: operands are on different devices") as caught:
            call(op, mixed)
        where = "cpu" if op in ON_CPU else device
        assert f"on {where}" in str(caught.value) and "on meta" in str(caught.value), name


@pytest.mark.parametrize("op", CALLS)
def test_one_operand_on_meta_compiled(op: str, device: str) -> None:
    run = torch.compile(lambda tensors, rest: call(op, {**tensors, **rest}), backend="eager", fullgraph=True)
    for _, mixed in list(mixes(op, device, "meta"))[:2]:
        tensors = tensors_of(mixed)
        with pytest.raises(Exception, match="operands are on different devices"):
            run(tensors, {name: value for name, value in mixed.items() if name not in tensors})


@pytest.mark.parametrize("op", CALLS)
def test_one_operand_on_meta_with_fake_tensors(op: str, device: str) -> None:
    with FakeTensorMode() as mode:
        for _, mixed in list(mixes(op, device, "meta")):
            fake = {n: mode.from_tensor(v) if isinstance(v, Tensor) else v for n, v in mixed.items()}
            with pytest.raises(RuntimeError, match=rf"qao::{op}: operands are on different devices"):
                call(op, fake)


@pytest.mark.parametrize("op", [op for op in CALLS if op not in ON_CPU])
def test_one_operand_on_the_host(op: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    call(op, call_of(op, "cuda"))
    for name, mixed in mixes(op, "cuda", "cpu"):
        with pytest.raises(RuntimeError, match=rf"qao::{op}: ") as caught:
            call(op, mixed)
        assert "on cuda" in str(caught.value) and "on cpu" in str(caught.value), name


@pytest.mark.parametrize("op", CALLS)
def test_an_operand_that_is_none_or_was_freed(op: str, device: str) -> None:
    good = call_of(op, device)
    optional = {a.name for a in getattr(torch.ops.qao, op).default._schema.arguments if "Optional" in str(a.type)}
    tensors = tensors_of(good)
    for name, value in tensors.items():
        with pytest.raises(RuntimeError, match=rf"qao::{op}: {name} has no memory"):
            call(op, good | {name: freed(value)})
        if name in optional or len(tensors) == 1:
            continue
        with pytest.raises(RuntimeError, match=rf"^qao::{op}: {name} must be a tensor, not None\."):
            call(op, good | {name: None})
    if len(tensors) == 1:  # torch cannot choose a device
        with pytest.raises(RuntimeError, match=rf"qao::{op}"):
            call(op, good | dict.fromkeys(tensors))


@pytest.mark.parametrize("op", ["int4_mm", "int8_int8_mm", "fp8_mm", "int8_quantize", "add_rms_norm", "silu_mul"])
def test_x_too_large_to_copy(op: str, device: str) -> None:
    good = call_of(op, device)
    name = next(iter(good))
    rows = {n: v[:1].expand(2**40, v.shape[1]) for n, v in good.items() if n in (name, "residual", "up")}
    with pytest.raises(RuntimeError, match=rf"^qao::{op}: out of memory: torch could not copy {name}: .*1099511627776"):
        call(op, good | rows)


def test_a_result_too_large(device: str) -> None:
    good = call_of("int8_embedding", device)
    with pytest.raises(RuntimeError, match=r"^qao::int8_embedding: out of memory: .*float32\[1125899906842624, 200\]"):
        call("int8_embedding", good | {"ids": good["ids"][:1].expand(2**50)})


def test_a_result_too_large_of_a_fake_kernel() -> None:
    experts = torch.zeros(3, 2, dtype=torch.int64, device="meta")
    with pytest.raises(RuntimeError, match=r"^qao::expert_sort: torch cannot make a result of this size.*experts"):
        call("expert_sort", {"experts": experts, "num_experts": 2**63 - 1})


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_sparse_operands(layout: str, device: str) -> None:
    good = call_of("int8_mm", device)
    for name in ("x", "scales"):
        value = good[name].float()
        if layout == "to_sparse_csr" and value.dim() < 2:
            continue
        with pytest.raises(RuntimeError, match=rf"^qao::int8_mm: {name} has no memory that can be read"):
            call("int8_mm", good | {name: getattr(value, layout)()})


@pytest.mark.parametrize("op", ["add_rms_norm", "rms_norm_quantize", "add_rms_norm_quantize", "add_rms_norm_int4_mm"])
@pytest.mark.parametrize("eps", [float("nan"), float("inf"), -1e-6, 1e308])
def test_eps(op: str, eps: float, device: str) -> None:
    with pytest.raises(RuntimeError, match=rf"^qao::{op}: eps must be a number from 0"):
        call(op, call_of(op, device) | {"eps": eps})


def test_hostile_calls() -> None:
    """In a separate process, so that a crash is detected; its last line names the call."""
    count = 1000 if torch.__version__ >= (2, 13) else 200  # torch 2.11 looks up a C++ stack for every error
    run = python(f"""
    import runpy, sys
    sys.argv = ["abuse_support", "7", "{count}"]
    runpy.run_module("abuse_support", run_name="__main__")
    """)
    lines = run.stdout.splitlines()
    assert run.returncode == 0 and lines[-1] == "survived", (lines[-1:], run.stderr[-2000:])
    assert not [line for line in lines if line.startswith("BAD")]


# ---- layers ----------------------------------------------------------------------------------------------------------


def layer_of(scheme: qao.Scheme, device: str = "cpu") -> qao.QuantLinear:
    torch.manual_seed(0)
    return qao.QuantLinear.from_linear(nn.Linear(64, 48, device=device), scheme)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_layer_whose_tensors_have_not_all_arrived(scheme: qao.Scheme, device: str) -> None:
    """Each tensor alone missing from a checkpoint, and all but each."""
    state = layer_of(scheme, device).state_dict()
    x = torch.randn(3, 64, device=device)
    names = [name for name in state if name not in ("weight", "pip_install_qao")]
    for missing in (*([name] for name in names), *([n for n in names if n != name] for name in names), names):
        layer = qao.QuantLinear.empty(64, 48, scheme=scheme, device="meta")
        layer.load_state_dict({n: v for n, v in state.items() if n not in missing}, strict=False, assign=True)
        for run in (layer, torch.compile(layer, backend="eager")):
            with pytest.raises(
                Exception, match=rf"(?s)qao::{scheme.word}_mm: operands are on different devices.*on meta"
            ):
                run(x)
    layer.load_state_dict(state, assign=True)
    assert torch.equal(layer(x), layer_of(scheme, device)(x))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_what_is_no_tensor(scheme: qao.Scheme, grad: bool, autocast: bool) -> None:
    layer = layer_of(scheme)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for x in (None, [1.0, 2.0], torch.ones(2, 64).numpy(), "x", 1.5):
            with pytest.raises(
                RuntimeError, match=rf"qao::{scheme.word}_mm(: x must be a tensor|\(\) Expected a value)"
            ):
                layer(x)


def test_what_is_no_tensor_of_the_other_functions() -> None:
    x = torch.ones(2, 64)
    with pytest.raises(RuntimeError, match="qao::add_rms_norm: x must be a tensor"):
        qao.ops.add_rms_norm(None, x, None, 1e-6)
    with pytest.raises(RuntimeError, match="qao::silu_mul: up must be a tensor"):
        qao.ops.silu_mul(x, None)
    embedding = qao.nn.QuantEmbedding.from_embedding(nn.Embedding(8, 64), SCHEMES[0])
    with pytest.raises(RuntimeError, match="qao::int4_embedding: ids must be a tensor"):
        embedding(None)
    with pytest.raises(RuntimeError, match="qao::int4_mm: an argument is not a tensor.*x: None"):
        qao.QuantLinear.empty(64, 48, scheme=SCHEMES[0], device="meta")(None)


BIASES = [
    torch.ones(47),
    torch.ones(1),
    torch.ones(()),
    torch.ones(48, 1),
    torch.ones(48).int(),
    torch.ones(48).cfloat(),
]


@pytest.mark.parametrize("bias", [*BIASES, torch.ones(48).to_sparse()], ids=lambda b: f"{b.dtype}{list(b.shape)}")
def test_a_bias_that_does_not_fit_is_refused_when_the_layer_is_made(bias: Tensor) -> None:
    scheme = qao.Int8WeightOnly()
    packed = scheme.quantize(torch.randn(48, 64))
    linear = nn.Linear(64, 48)
    linear.bias = nn.Parameter(bias, requires_grad=False)
    with pytest.raises(ValueError, match=r"QuantLinear: .*its bias (is|has layout)"):
        qao.QuantLinear(64, 48, scheme, packed, bias)
    with pytest.raises(ValueError, match=r"QuantLinear: linear cannot be quantized: its bias (is|has layout)"):
        qao.QuantLinear.from_linear(linear, scheme)
    with pytest.raises(ValueError, match=r"QuantLinear: .*its bias (is|has layout)"):
        qao.QuantLinear.from_packed(linear, scheme, packed)
    with pytest.raises(ValueError, match=r"QuantLinear: .*its bias (is|has layout)"):
        qao.QuantLinear.from_quantized(*packed[:2], bias=bias, scheme=scheme)


@pytest.mark.parametrize("sizes", [(0, 8), (-1, 8), (8, 0), (8, 2.0), ("8", 8), (True, 8)])
def test_sizes_of_an_empty_layer(sizes: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match=r"QuantLinear.empty: (in|out)_features must be a positive int"):
        qao.QuantLinear.empty(*sizes, scheme=SCHEMES[0])


# ---- defaults of torch -----------------------------------------------------------------------------------------------


@pytest.fixture
def defaults() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up, self.head = nn.Embedding(40, 64), nn.Linear(64, 64), nn.Linear(64, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.up(self.embed(ids)))


@pytest.mark.parametrize("scheme", [*SCHEMES, qao.Float8WeightOnly("block")], ids=str)
@pytest.mark.parametrize("change", [
    lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.bfloat16),
    lambda: torch.set_default_device("meta")], ids=["float64", "bfloat16", "meta"])  # fmt: skip
@pytest.mark.usefixtures("defaults")
def test_the_defaults_of_torch_do_not_matter(scheme: qao.Scheme, change: Callable[[], None], device: str) -> None:
    base, ids = Tied().to(device), torch.arange(7, device=device)

    def run() -> tuple[Tensor, dict[str, Tensor], Tensor]:
        model, other = copy.deepcopy(base), copy.deepcopy(base)
        for each in (model, other):
            qao.quantize_(each, scheme, embeddings=True, progress=False)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        other.load_state_dict(state, assign=True)
        y = other.bfloat16()(ids)
        return model(ids) + 0 * y, state, qao.dequantize_(model)(ids)

    expected = run()
    change()
    got = run()
    for a, b in zip(got[::2], expected[::2], strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    for (name, a), b in zip(got[1].items(), expected[1].values(), strict=True):
        assert a.dtype == b.dtype and a.device == b.device and torch.equal(a.view(-1), b.view(-1)), name


@pytest.mark.parametrize(
    "scale", [0, 0.0, -1.0, 1e-50, 1e-40, 1e300, 3.5e38, float("inf"), float("nan"), True, "1", 10**400]
)
def test_an_activation_scale_that_float32_cannot_hold(scale: Any) -> None:
    with pytest.raises(ValueError, match=r"activation_scale must be a number from 1\.175e-38 to 3\.403e\+38.*, not "):
        qao.Float8StaticActivationFloat8Weight(activation_scale=scale)


@pytest.mark.parametrize("scale", [1.1754943508222875e-38, 3.4e38, 1])
@pytest.mark.usefixtures("defaults")
def test_an_activation_scale_is_float32(scale: float) -> None:
    torch.set_default_dtype(torch.float64)
    stored = layer_of(qao.Float8StaticActivationFloat8Weight(activation_scale=scale)).activation_scale
    assert stored is not None and stored.dtype == torch.float32 and stored.item() == pytest.approx(scale)


# ---- processes, threads, copies --------------------------------------------------------------------------------------

FORGET = """
    import sys
    def forget():
        for name in [name for name in sys.modules if name.partition(".")[0] == "qao"]:
            del sys.modules[name]
    import qao, torch
"""


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package in another place."""
    place = tmp_path_factory.mktemp("copy")
    shutil.copytree(PACKAGE, place / "qao", ignore=shutil.ignore_patterns("__pycache__"))
    return place


def test_a_second_copy_of_the_package_is_an_import_error(copied: Path) -> None:
    run = python(f"""{FORGET}
    forget()
    sys.path.insert(0, {str(copied)!r})
    try:
        import qao
    except ImportError as error:
        print(error)
    print(torch.ops.qao.silu_mul(torch.zeros(1, 8), torch.ones(1, 8)).sum().item())
    """)
    assert run.returncode == 0, run.stderr
    message, still_works = run.stdout.splitlines()
    assert f"already loaded another copy of qao, from {PACKAGE / '_C.so'}" in message and str(copied) in message
    assert still_works == "0.0"


def test_a_second_library_loaded_by_hand_stays_unused(copied: Path) -> None:
    run = python(f"""{FORGET}
    torch.ops.load_library({str(copied / "qao" / "_C.so")!r})
    print(torch.ops.qao.silu_mul(torch.zeros(1, 8), torch.ones(1, 8)).sum().item())
    """)
    assert run.returncode == 0 and run.stdout == "0.0\n", run.stderr
    assert f"qao: {copied / 'qao' / '_C.so'} stays unused: " in run.stderr


def test_the_same_package_again_works() -> None:
    run = python(f"""{FORGET}
    import importlib
    for again in (forget, lambda: sys.modules.pop("qao"), lambda: importlib.reload(qao)):
        again()
        torch.ops.load_library({str(PACKAGE / "_C.so")!r})
        import qao
        layer = qao.QuantLinear.from_linear(torch.nn.Linear(64, 64), qao.Int4WeightOnly(group_size=32))
        print(layer(torch.ones(1, 64)).shape[1], layer.to("meta")(torch.ones(1, 64, device="meta")).shape[1])
    """)
    assert run.returncode == 0 and run.stdout == "64 64\n" * 3, run.stderr
    assert "unused" not in run.stderr


def test_after_fork() -> None:
    """A child process of one that has used the operators, threads included, computes the same."""
    run = python("""
    import os, torch, qao
    torch.set_num_threads(2)
    layer = qao.QuantLinear.from_linear(torch.nn.Linear(512, 512), qao.Int4WeightOnly())
    x = torch.randn(32, 512)
    expected = layer(x)
    child = os.fork()
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    same = torch.equal(layer(x), expected)
    if child == 0:
        os._exit(not same)
    print(same, os.waitpid(child, 0)[1])
    """)
    assert run.stdout == "True 0\n", run.stderr


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_threads_and_copies(scheme: qao.Scheme, device: str) -> None:
    layer, x = layer_of(scheme, device), torch.randn(17, 64, device=device)
    copies = [layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    expected, failures = layer(x), []

    def work(own: nn.Module) -> None:
        for _ in range(50):
            if not torch.equal(own(x), expected):
                failures.append(own)

    threads = [threading.Thread(target=work, args=(copies[i % 3],)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# ---- qao._host -------------------------------------------------------------------------------------------------------


HOSTS = [("_host{}", "cannot be loaded: "), ("_host.cpython-39-x86_64-linux-gnu.so", "it is for a different version")]


@pytest.mark.parametrize("name,said", HOSTS)
def test_a_broken_host_module_is_said(name: str, said: str, copied: Path, tmp_path: Path) -> None:
    import importlib.machinery

    place = tmp_path / "qao"
    shutil.copytree(copied / "qao", place)
    for path in place.glob("_host.*.so"):
        path.unlink()
    broken = place / name.format(importlib.machinery.EXTENSION_SUFFIXES[0])
    broken.write_text("no library")
    run = python("from qao.cli import main; main(['doctor', '--facts']); main(['doctor'])", tmp_path)
    failed = [line for line in run.stdout.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 1 and "qao._host" in failed[0]  # the operators work
    assert f"{broken} cannot be loaded: " in failed[0] and said in failed[0]
    assert "ABI" in run.stdout  # facts of the build come from the operators' library
