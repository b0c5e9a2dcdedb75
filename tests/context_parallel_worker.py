"""Context parallelism around attention with quantized projections; for tests/test_context_parallel.py.

``python context_parallel_worker.py RANK FOLDER``: one of several processes. ``... fake``: one of 32 ranks in torch's
fake process group. Its collectives return at once, with irrelevant results.

torch's context parallelism supports the attention kernels of GPUs. ``ring_on_cpu`` adds the CPU kernel.

Tokens come in multiples of 64 per rank: torch's memory-efficient attention, used for float32 on GPUs, pads its
log-sum-exp to 32 tokens. The ring also calls it with half of a rank's tokens and adds the result to that half.
"""

from __future__ import annotations

import copy
import sys
from itertools import product
from typing import Any

import qao
import torch
import torch.distributed as dist
from ranks_support import DEVICE, WORLD, Cases, main
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

CASES: Cases = {}
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
SCHEMES = {
    "int4": qao.Int4WeightOnly(group_size=32),
    "int8_int8": qao.Int8DynamicActivationInt8Weight(),
    "fp8_fp8": qao.Float8DynamicActivationFloat8Weight(),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOKENS = 64 * WORLD
# One kernel per dtype, so that all ranks choose the same one.
KERNELS = {
    ("cpu", torch.float32): SDPBackend.FLASH_ATTENTION,
    ("cpu", torch.bfloat16): SDPBackend.FLASH_ATTENTION,
    ("cuda", torch.float32): SDPBackend.EFFICIENT_ATTENTION,
    ("cuda", torch.bfloat16): SDPBackend.FLASH_ATTENTION,
}
RING = _attention._templated_ring_attention


rings: list[Any] = []  # one per ring pass of attention, executed or traced


def counted_ring(*args: Any, **kwargs: Any) -> Any:
    rings.append(args)
    return RING(*args, **kwargs)


def ring_on_cpu(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    query, key, value, dropout, is_causal = (*args, 0.0, False)[:5]
    mesh = query.device_mesh
    out, sums = _attention._templated_ring_attention(
        mesh.get_group(),
        2,
        CPU_ATTENTION,
        query=query.to_local(),
        key=key.to_local(),
        value=value.to_local(),
        is_causal=is_causal,
        **{"dropout_p": dropout, **kwargs},
    )
    return tuple(DTensor.from_local(one, mesh, query.placements, run_check=False) for one in (out, sums))


_attention._templated_ring_attention = counted_ring
_attention.custom_ops[CPU_ATTENTION] = ring_on_cpu


class Attention(nn.Module):
    """Four causal heads of 32, independent of token positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(128, 384), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (part.view(batch, tokens, 4, 32).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, 128))


def model(scheme: qao.Scheme, dtype: torch.dtype) -> nn.Module:
    made = nn.Sequential(Attention(), Attention()).to(dtype).eval()
    qao.quantize_(made, scheme)
    return made


@torch.no_grad()
def run(made: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, backend: str | None) -> tuple[Tensor, ...]:
    """The rank's result for its tokens; the result of one process for them; the same in float64."""
    torch._dynamo.reset()
    x = torch.randn(1, TOKENS, 128, generator=torch.Generator().manual_seed(1), device="cpu").to(DEVICE, dtype)
    positions = torch.arange(TOKENS)
    exact = qao.dequantize_(copy.deepcopy(made)).double()(x.double())
    called = made if backend is None else torch.compile(made, dynamic=False, backend=backend)
    with sdpa_kernel(KERNELS[DEVICE, dtype]):
        expected = made(x)
        rings.clear()
        with context_parallel(mesh, buffers=[x, positions], buffer_seq_dims=[1, 0]):
            y = called(x)
            assert len(rings) >= 2, "attention did not go around the ranks"
            return y, expected[:, positions.clone()], exact[:, positions.clone()]


def check(scheme: qao.Scheme, dtype: torch.dtype, backend: str | None) -> None:
    precision = torch.get_float32_matmul_precision()
    made, mesh = model(scheme, dtype), init_device_mesh(DEVICE, (WORLD,))
    try:
        for allowed in ("highest", "high"):  # without and with TF32, where there is any
            torch.set_float32_matmul_precision(allowed)
            y, expected, exact = run(made, mesh, dtype, backend)
            assert y.shape == (1, TOKENS // WORLD, 128)
            error, own = ((one.double() - exact).norm() for one in (expected, y))
            assert own <= 2 * error + 1e-6 * exact.norm(), (own, error)
    finally:
        torch.set_float32_matmul_precision(precision)
        _attention._disable_context_parallel_dispatcher_impl()  # torch 2.11 leaves it enabled after an error


for _name, _scheme in SCHEMES.items():
    for _dtype_name, _dtype in DTYPES.items():
        # Inductor compiles C++ on a CPU, half a minute per case: once. The collectives of aot_eager are the same.
        for _backend in (None, "inductor" if DEVICE == "cuda" or _name == "int4" else "aot_eager"):
            CASES[f"{_name} {_dtype_name} {'compiled' if _backend else 'eager'}"] = (
                lambda folder, of=(_scheme, _dtype, _backend): check(*of)
            )


def fake(world: int = 32) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    mesh = init_device_mesh("cpu", (world,))
    # Inductor would compile the attention of each of 32 ring steps, which takes minutes; collectives are fixed before.
    for dtype, backend, allowed in product(DTYPES.values(), (None, "aot_eager"), ("highest", "high")):
        torch.set_float32_matmul_precision(allowed)
        assert run(model(SCHEMES["int4"], dtype), mesh, dtype, backend)[0].shape == (1, TOKENS // world, 128)
    print("finished")


if __name__ == "__main__":
    torch.set_num_threads(1)
    fake() if sys.argv[1] == "fake" else main(CASES)
