"""What the documentation's examples have at hand, by name: small models, their inputs, and checkpoints as files."""

from __future__ import annotations

from torch import Tensor, nn

WIDTH = 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(self.up_proj(x).relu())


class Model(nn.Module):
    """[..., 128] -> [..., 32], by layers that have a language model's names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), Block())
        self.lm_head = nn.Linear(WIDTH, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.layers(x))
