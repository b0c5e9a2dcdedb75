"""A serving engine's layer with the weights of a checkpoint, in one of several processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import tomllib
import torch
from torch import Tensor, nn

N, K = 256, 512  # of one matrix
HEAD = 64  # 8 heads for queries, 4 for keys and values


# Types of layers, and the matrices that each joins: name in a checkpoint, id for loaders, rows.
MLP, ATTENTION = "model.layers.0.mlp", "model.layers.0.self_attn"
KINDS: dict[str, list[tuple[str, Any, int]]] = {
    "column": [(f"{MLP}.fc1", None, N)],
    "row": [(f"{MLP}.down_proj", None, N)],
    "qkv": [(f"{ATTENTION}.{one}_proj", one, HEAD * (8 if one == "q" else 4)) for one in "qkv"],
    "gate_up": [(f"{MLP}.gate_proj", 0, N), (f"{MLP}.up_proj", 1, N)],
}
JOINED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class Layer:
    """``make`` makes the engine's layer of a kind with ``quant_config`` and ``bias``; within ``shard(rank, size)``."""

    def __init__(
        self,
        make: Callable[..., nn.Module],
        shard: Callable[[int, int], AbstractContextManager[None]],
        kind: str,
        config: Any,
        states: list[dict[str, Tensor]],
        rank: int = 0,
        size: int = 1,
    ) -> None:
        config.packed_modules_mapping = JOINED
        self.rank, self.size, self.kind, self.shard = rank, size, kind, shard
        with shard(rank, size):
            self.layer: Any = make(quant_config=config, bias="bias" in states[0])
            self.load(states)

    def load(self, states: list[dict[str, Tensor]]) -> None:
        parameters = dict(self.layer.named_parameters())
        parts = [part for _, part, _ in KINDS[self.kind]] if len(states) > 1 else [None]  # joined in the checkpoint
        for part, state in zip(parts, states, strict=True):
            for name, tensor in state.items():
                target = parameters[name]
                target.weight_loader(target, tensor, *([] if part is None else [part]))
        self.layer.quant_method.process_weights_after_loading(self.layer)

    def columns(self) -> slice:
        """Of x, that this process multiplies."""
        share = K // self.size
        return slice(self.rank * share, (self.rank + 1) * share) if self.kind == "row" else slice(0, K)

    def __call__(self, x: Tensor) -> Tensor:
        with self.shard(self.rank, self.size), torch.no_grad():
            return self.layer(x[..., self.columns()].contiguous())[0]

    def part_of(self, matrices: list[Tensor]) -> Tensor:
        """The rows and columns of the joined matrices (or biases) that this process has."""
        parts = []
        for matrix, (_, _, rows) in zip(matrices, KINDS[self.kind], strict=True):
            share = rows // self.size
            own = slice(self.rank * share, (self.rank + 1) * share)
            parts.append(matrix[:, self.columns()] if self.kind == "row" else matrix[own])
        return torch.cat(parts)


def installed(folder: Path, group: str) -> Path:
    """A folder for sys.path that has qao's entry points of a group, as if it were installed."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    metadata = folder / "qao_of_this_test-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: qao-of-this-test\nVersion: 1\n")
    lines = [f"{name} = {value}" for name, value in project["entry-points"][group].items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))
    return folder
