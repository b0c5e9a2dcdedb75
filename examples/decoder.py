"""A large layer stack: two blocks in the shape of Llama-3-8B, bfloat16 against every scheme.

The weights are random, since speed does not depend on their values. The blocks have every matrix, norm, activation and
attention of the original, but no rotary embedding.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import partial

import qao
import torch
import torch.nn.functional as F
from common import SCHEMES, linear_bytes, mebibytes, print_table
from torch import Tensor, nn

from bench.timing import capture, interleaved

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 4096, 14336, 32, 8, 128
BLOCKS = 2
CONTEXT = 512  # tokens in the key-value cache when decoding
CASES = {"decode, 1 sequence": (1, 1), "decode, 16 sequences": (16, 1), "prompt of 128 tokens": (1, 128)}


class Block(nn.Module):
    """One decoder block with a full key-value cache."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.o = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 2 * FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        batch = max(batch for batch, _ in CASES.values())
        self.register_buffer("cache", torch.randn(2, batch, KV_HEADS, CONTEXT, HEAD_DIM))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, HIDDEN]. A single token attends to the cache; a prompt attends to itself."""
        x = x + self.attention(self.norms[0](x))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

    def attention(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        heads = self.qkv(x).view(batch, tokens, -1, HEAD_DIM).transpose(1, 2)  # [batch, heads, tokens, HEAD_DIM]
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        if tokens == 1:
            cache = self.cache[:, :batch]
            cache[0, :, :, -1:], cache[1, :, :, -1:] = k, v
            k, v = cache[0], cache[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=tokens > 1, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


@torch.inference_mode()
def run(device: str) -> None:
    """Print sizes and times of the stacks."""
    print(f"\n== {BLOCKS} decoder blocks shaped like Llama-3-8B's on {device} (random weights) ==")
    with torch.device(device):
        block = Block().bfloat16()
    bf16 = nn.Sequential(*(copy.deepcopy(block) for _ in range(BLOCKS)))  # separate memory per block, as in a model
    inputs = [torch.randn(*shape, HIDDEN, device=device, dtype=torch.bfloat16) for shape in CASES.values()]
    rows = []
    for word, scheme in SCHEMES.items():
        print(f"timing: {word} ...", flush=True)
        quantized = copy.deepcopy(bf16)
        qao.quantize_(quantized, _without_search(scheme), progress=False)
        cells = [_ms_per_block(bf16, quantized, x, device) for x in inputs]
        rows.append(
            [word, mebibytes(linear_bytes(quantized)), *(f"{fast:.2f} ({slow / fast:.2f}x)" for slow, fast in cells)]
        )
        before = [f"{slow:.2f}" for slow, _ in cells]
    print_table(
        ["", "linear weights", *(f"{name}, ms/block" for name in CASES)],
        [["bf16", mebibytes(linear_bytes(bf16)), *before], *rows],
    )
    print("In parentheses: times faster than bf16 in the same rounds.")


def _without_search(scheme: qao.Scheme) -> qao.Scheme:
    """The scheme without clipping search, which gains nothing on random weights."""
    return dataclasses.replace(scheme, clip_search=False) if hasattr(scheme, "clip_search") else scheme


def _ms_per_block(before: nn.Module, after: nn.Module, x: Tensor, device: str) -> tuple[float, float]:
    calls = [partial(before, x), partial(after, x)]
    if device == "cuda":
        calls = [capture(call).replay for call in calls]
    slow, fast = (seconds * 1e3 / BLOCKS for seconds in interleaved(calls, 1.0, device, min_rounds=3))
    return slow, fast
