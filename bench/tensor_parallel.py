"""Decoder blocks under tensor parallelism: time of a decode step and a prompt, eager and compiled.

    torchrun --nproc-per-node 4 -m bench.tensor_parallel                         # 1, 2 and 4 GPUs, every scheme
    torchrun --nproc-per-node 2 -m bench.tensor_parallel --preset tiny --device cpu --prompt 32   # to try it

Blocks of a 70B Llama with random weights, as many as ``--layers`` says; no embedding and no head. Every size of
``--tp`` is measured in the same run, as replicas where it is smaller than the number of processes, and so
is bfloat16. Schemes do not search clipping ranges. Efficiency is the time of one GPU over ``tp`` times that of ``tp``.
A number is the median over steps of the slowest rank's time; the steps of all schemes are interleaved. Compiled steps
are CUDA graphs on a GPU.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import qao
import torch
import torch.distributed as dist
from qao.distributed import Colwise, Rowwise
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

from .markdown import caption, table
from .meta import RESULTS, describe, device_slug
from .result_files import write
from .schemes import LAYER_SCHEMES, without_search
from .timing import capture

BASELINE = "bf16"
PLAN = {"qkv.*": Colwise(), "o": Rowwise(), "gate": Colwise(), "up": Colwise(), "down": Rowwise()}


class Sizes(NamedTuple):
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    context: int  # tokens before the decoded one


PRESETS = {
    "llama-3.1-70b": Sizes(8192, 28672, 64, 8, 512),
    "tiny": Sizes(512, 1024, 8, 4, 32),  # for trying the benchmark; 4 ranks at most
}


class Block(nn.Module):
    """Llama's attention over a cache and gated MLP, without rotary embedding, which costs every rank the same."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.hidden // sizes.heads
        widths = (sizes.hidden, sizes.kv_heads * self.head_dim, sizes.kv_heads * self.head_dim)
        self.qkv = nn.ModuleList(nn.Linear(sizes.hidden, width, bias=False) for width in widths)
        self.o = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.gate, self.up = (nn.Linear(sizes.hidden, sizes.intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.intermediate, sizes.hidden, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(sizes.hidden) for _ in range(2))
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        normed = self.norms[0](x)
        q, k, v = (part(normed).view(batch, tokens, -1, self.head_dim).transpose(1, 2) for part in self.qkv)
        if self.keys is not None and self.values is not None:  # keys and values of earlier tokens
            k, v = torch.cat((self.keys, k), 2), torch.cat((self.values, v), 2)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.keys is None, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, tokens, -1))
        normed = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))

    def remember(self, batch: int, tokens: int) -> None:
        """Fill the cache; 0: no cache."""
        width = self.qkv[1].out_features // self.head_dim  # heads on this rank
        shape, like = (batch, width, tokens, self.head_dim), next(self.norms.parameters())
        self.keys, self.values = (torch.randn(shape).to(like) if tokens else None for _ in range(2))


def make(sizes: Sizes, layers: int, scheme: str, mesh: DeviceMesh, device: torch.device) -> nn.Sequential:
    """Shard block by block, so that no rank holds the whole model. Weights are the same on every rank."""
    blocks = []
    for number in range(layers):
        torch.manual_seed(number)
        with device:
            block = Block(sizes).bfloat16()
        if scheme != BASELINE:
            qao.quantize_(block, without_search(LAYER_SCHEMES[scheme]), progress=False)
        blocks.append(parallelize_module(block, mesh, PLAN, src_data_rank=None))
    return nn.Sequential(*blocks).eval()


class Step:
    """One decode step or prompt of one model on one mesh."""

    def __init__(self, model: nn.Sequential, x: Tensor, compiled: bool) -> None:
        self.device = x.device
        run: Callable[[], Tensor] = lambda: model(x)  # noqa: E731
        if compiled:
            blocks = [torch.compile(block, fullgraph=True, dynamic=False) for block in model]

            def run() -> Tensor:
                y = x
                for block in blocks:
                    y = block(y)
                return y

        for _ in range(3):
            self.result = run()
        self.run: Callable[[], Any] = run
        self.captured = run  # keeps x alive, which the graph reads
        if compiled and x.is_cuda:
            self.graph = capture(run)
            self.run = self.graph.replay

    def seconds(self) -> float:
        """Time of the slowest rank, including replicas."""
        self._settle()
        begin = time.perf_counter()
        self.run()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        taken = torch.tensor(time.perf_counter() - begin, device=self.device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken)

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


def measure(
    arguments: argparse.Namespace, device: torch.device, save: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """``save`` gets partial results after every case, in case the run is interrupted."""
    sizes, world, rows = PRESETS[arguments.preset], dist.get_world_size(), []
    tps = [tp for tp in arguments.tp if world % tp == 0]
    meshes = {tp: init_device_mesh(device.type, (world // tp, tp), mesh_dim_names=("dp", "tp"))["tp"] for tp in tps}
    cases = [("decode", batch, 1) for batch in arguments.batch]
    cases += [("prompt", 1, arguments.prompt)] if arguments.prompt else []
    schemes = (BASELINE, *arguments.schemes)
    made = {tp: {s: make(sizes, arguments.layers, s, mesh, device) for s in schemes} for tp, mesh in meshes.items()}
    for compiled in (False, True):
        for phase, batch, tokens in cases:
            for tp, models in made.items():
                torch._dynamo.reset()
                steps: dict[str, Step] = {}
                for scheme, model in models.items():
                    torch.manual_seed(0)
                    for block in model:
                        block.remember(batch, sizes.context if phase == "decode" else 0)
                    x = torch.randn(batch, tokens, sizes.hidden).to(device, torch.bfloat16)
                    steps[scheme] = Step(model, x, compiled)
                times: dict[str, list[float]] = {scheme: [] for scheme in steps}
                for _ in range(arguments.rounds):
                    for scheme, step in steps.items():
                        times[scheme].append(step.seconds())
                for scheme, taken in times.items():
                    row = {"scheme": scheme, "tp": tp, "phase": phase, "batch": batch, "tokens": tokens}
                    rows.append(row | {"compiled": compiled, "us": 1e6 * median(taken)})
                    _say(f"{rows[-1]}")
                save(rows)
                del steps
    return rows


def with_efficiency(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add each row's speedup over bfloat16 and parallel efficiency: one GPU's time over ``tp`` times its own."""
    key = ("scheme", "tp", "phase", "batch", "tokens", "compiled")
    times = {tuple(row[name] for name in key): row["us"] for row in rows}
    for row in rows:
        at = {name: row[name] for name in key}
        row["bf16_ratio"] = times[tuple({**at, "scheme": BASELINE}.values())] / row["us"]
        one = times.get(tuple({**at, "tp": 1}.values()))
        row["efficiency"] = None if one is None else one / (row["tp"] * row["us"])
    return rows


def render(results: dict[str, Any]) -> str:
    """Milliseconds on every number of GPUs, one line per step and scheme."""
    rows, meta = results["rows"], results["meta"]
    sizes = sorted({row["tp"] for row in rows})
    steps: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for row in rows:
        at = row["phase"], row["batch"], row["tokens"], row["compiled"], row["scheme"]
        steps.setdefault(at, {})[row["tp"]] = row
    lines = []
    for (phase, batch, tokens, compiled, scheme), found in steps.items():
        what = f"prompt of {tokens}" if phase != "decode" else f"{batch} token{'s' * (batch > 1)}"
        line = [f"{what}, {'compiled' if compiled else 'eager'}", scheme]
        line += [f"{found[tp]['us'] / 1e3:.2f}" if tp in found else "–" for tp in sizes]
        line += [_cell(found.get(tp, {}).get("efficiency")) for tp in sizes[1:]]
        lines.append([*line, _cell(found.get(sizes[-1], {}).get("bf16_ratio"))])
    header = ["", "scheme", *(f"{tp} GPU{'s' * (tp > 1)}" for tp in sizes)]
    header += [f"efficiency of {tp}" for tp in sizes[1:]] + ["bf16 / scheme"]
    blocks = f"{meta['layers']} blocks of {meta['preset']}, milliseconds"
    return f"{caption(meta)}; {meta['processes']} processes; {blocks}.\n\n{table(header, lines)}"


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="torchrun -m bench.tensor_parallel", description=__doc__)
    parser.add_argument("--preset", choices=list(PRESETS), default="llama-3.1-70b")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="blocks; a 70B model has 80")
    parser.add_argument("--schemes", nargs="+", choices=list(LAYER_SCHEMES), default=list(LAYER_SCHEMES))
    parser.add_argument("--tp", nargs="+", type=int, default=[1, 2, 4, 8], help="those that divide the processes")
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 32], metavar="B", help="sequences decoded")
    parser.add_argument("--prompt", type=int, default=2048, metavar="T", help="tokens of a prompt; 0: no prompt")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="instead of bench/results/<device>")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch._dynamo.config.recompile_limit = 256  # one forward method is compiled for every scheme and block
    folder = arguments.out or RESULTS / f"{device_slug(device.type)}-x{dist.get_world_size()}"

    def save(rows: list[dict[str, Any]]) -> None:
        if dist.get_rank() == 0:
            meta = describe(device.type) | {"processes": dist.get_world_size(), "layers": arguments.layers}
            results = {"meta": meta | {"preset": arguments.preset}, "rows": with_efficiency(rows)}
            write(results, folder / "tensor_parallel.csv")

    try:
        with torch.no_grad():
            rows = with_efficiency(measure(arguments, device, save))
        if dist.get_rank() == 0:
            columns = ("scheme", "tp", "phase", "batch", "compiled", "us", "bf16_ratio", "efficiency")
            cells = [[_cell(row[name]) for name in columns] for row in rows]
            print(table(list(columns), cells))
    finally:
        dist.destroy_process_group()


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "–" if value is None else str(value)


if __name__ == "__main__":
    main()
