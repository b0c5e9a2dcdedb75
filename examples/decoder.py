"""A large layer stack: two blocks in the shape of Llama-3-8B, bfloat16 against int4.

The weights are random, since speed does not depend on their values. The blocks have every matrix, norm, activation and
attention of the original, but no rotary embedding.
"""

from __future__ import annotations

import copy
from functools import partial

import qao
import torch
import torch.nn.functional as F
from common import linear_bytes, mebibytes, print_table
from torch import Tensor, nn

from bench.timing import capture, interleaved

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 4096, 14336, 32, 8, 128
BLOCKS = 2
CONTEXT = 512  # tokens in the key-value cache when decoding
CASES = {"decode, 1 sequence": (1, 1), "decode, 16 sequences": (16, 1), "prompt of 128 tokens": (1, 128)}


class Block(nn.Module):
    """One decoder block with a key-value cache that is already full."""

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
        """x: [batch, tokens, HIDDEN]. One token attends to the cache; more are a prompt and attend to themselves."""
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
    """Prints the two stacks' sizes and times."""
    print(f"\n== {BLOCKS} decoder blocks shaped like Llama-3-8B's on {device} (random weights) ==")
    with torch.device(device):
        block = Block().bfloat16()
    bf16 = nn.Sequential(*(copy.deepcopy(block) for _ in range(BLOCKS)))  # each with its own memory, as in a model
    int4 = copy.deepcopy(bf16)
    qao.quantize_(int4, qao.Int4WeightOnly(clip_search=False))  # random weights: nothing to gain from the search
    print(f"linear weights: bf16 {mebibytes(linear_bytes(bf16))}, int4 {mebibytes(linear_bytes(int4))}")

    rows = []
    for name, (batch, tokens) in CASES.items():
        print(f"timing: {name} ...", flush=True)
        x = torch.randn(batch, tokens, HIDDEN, device=device, dtype=torch.bfloat16)
        calls = [partial(bf16, x), partial(int4, x)]
        modes = {"eager": calls}
        if device == "cuda":
            modes["CUDA graph"] = [capture(call).replay for call in calls]
        for mode, pair in modes.items():
            slow, fast = (seconds * 1e3 / BLOCKS for seconds in interleaved(pair, 1.0, device, min_rounds=3))
            rows.append([name, mode, f"{slow:.3f}", f"{fast:.3f}", f"{slow / fast:.2f}x"])
    print_table(["", "mode", "bf16 ms/block", "int4 ms/block", "int4 is"], rows)
