"""torch.compile over whole models with every scheme: one graph, no break, eager's result.

Two styles that nothing else here has: a decoder with a static KV cache written at a position held in a tensor, as fast
generation is written in plain torch, and a diffusion transformer between channels_last convolutions.
"""

from __future__ import annotations

import copy

import qao
import torch
from ops_support import randn
from test_compile_schemes import ONE_OF_EACH, SCHEMES, check_counts, fresh_dynamo  # noqa: F401  # a fixture of every test
from torch import Tensor, nn
from torch.nn import functional as F

MODE = "reduce-overhead"  # with CUDA graphs; on the CPU the default mode


def quantized(model: nn.Module) -> nn.Module:
    """Every scheme in turn, layer after layer."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert len(names) >= len(ONE_OF_EACH)
    qao.quantize_(
        model, {name: SCHEMES[ONE_OF_EACH[i % len(ONE_OF_EACH)]] for i, name in enumerate(names)}, progress=False
    )
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    return model.eval()


def check_close(actual: Tensor, expected: Tensor) -> None:
    """Code between the layers rounds differently when compiled, and activations of eight bits then cross a tie."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert (actual - expected).abs().max() <= 2.0**-5 * expected.abs().max()


# ---- generation with a static cache ----------------------------------------------------------------------------------

VOCABULARY, WIDTH, HEADS, KV_HEADS, LENGTH = 96, 64, 4, 2, 32


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """x [..., size] by pairs, by ``rotation`` [M, size / 2, 2], cosine and sine."""
    (a, b), (cosine, sine) = x.unflatten(-1, (-1, 2)).unbind(-1), rotation.unbind(-1)
    return torch.stack([a * cosine - b * sine, a * sine + b * cosine], dim=-1).flatten(-2)


class Attention(nn.Module):
    """Grouped queries; q, k and v by one layer; rotated; k and v kept in buffers of fixed size."""

    def __init__(self) -> None:
        super().__init__()
        self.size = WIDTH // HEADS
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * self.size, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(1, KV_HEADS, LENGTH, self.size))

    def forward(self, x: Tensor, rotation: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        q, k = rotated(q, rotation), rotated(k, rotation)
        self.k_cache[:, :, positions] = k
        self.v_cache[:, :, positions] = v
        y = F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=mask, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norms = Attention(), nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, *where: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), *where)
        normal = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normal)) * self.up(normal))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        angles = torch.outer(torch.arange(LENGTH), 100.0 ** -torch.linspace(0, 1, WIDTH // HEADS // 2))
        self.register_buffer("rotation", torch.stack([angles.cos(), angles.sin()], dim=-1))
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rotation[positions], self.mask[positions], positions)
        return self.head(x)


def test_generation_with_a_static_cache(device: str) -> None:
    """One graph for the prompt and one for every token after it, in two caches."""
    torch.manual_seed(0)
    model = quantized(Decoder().to(device))
    eager = copy.deepcopy(model)
    prefill, decode = (torch.compile(model, mode=MODE, fullgraph=True) for _ in range(2))
    prompt = torch.arange(7, device=device)[None] % VOCABULARY
    with torch.inference_mode():
        positions = torch.arange(7, device=device)
        check_close(prefill(prompt, positions), eager(prompt, positions))
        for position in range(7, 12):
            token, positions = prompt[:, position % 7, None], torch.tensor([position], device=device)
            check_close(decode(token, positions), eager(token, positions))
    check_counts(2)


# ---- diffusion -------------------------------------------------------------------------------------------------------


class DiffusionBlock(nn.Module):
    """Attention over patches and an MLP, each scaled, shifted and gated by what the timestep says."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(F.silu(time))[:, None].chunk(6, dim=-1)
        normal = F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift
        q, k, v = self.qkv(normal).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        normal = F.layer_norm(x, (WIDTH,)) * (1 + mlp_scale) + mlp_shift
        return x + mlp_gate * self.down(F.gelu(self.up(normal), approximate="tanh"))


class Diffusion(nn.Module):
    """A noisy image to its noise: patches by a convolution, a block, and back by a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.pixels = nn.Conv2d(4, WIDTH, 2, stride=2), nn.ConvTranspose2d(WIDTH, 4, 2, stride=2)
        self.time = nn.Sequential(nn.Linear(32, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.block = DiffusionBlock()

    def forward(self, image: Tensor, timestep: Tensor) -> Tensor:
        frequencies = torch.exp(-torch.arange(16, device=image.device) / 2)
        angles = timestep[:, None] * frequencies
        time = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1))
        patches = self.patches(image)
        x = patches.flatten(2).transpose(1, 2)  # [batch, patches, WIDTH], a view: channels are last
        x = self.block(x, time)
        return self.pixels(x.transpose(1, 2).unflatten(2, patches.shape[2:]))


def test_a_diffusion_transformer_between_convolutions(device: str) -> None:
    """One more graph when the size of the image changes."""
    torch.manual_seed(0)
    model = quantized(Diffusion()).to(device, memory_format=torch.channels_last)
    compiled = torch.compile(model, mode=MODE, fullgraph=True)
    with torch.no_grad():
        for batch, size in ((2, 8), (2, 16), (2, 12)):
            image = randn(batch, 4, size, size, dtype=torch.float32, device=device)
            image = image.to(memory_format=torch.channels_last)
            timestep = torch.arange(1.0, batch + 1, device=device)
            y = compiled(image, timestep)
            check_close(y, model(image, timestep))
            assert y.is_contiguous(memory_format=torch.channels_last)
    check_counts(2)
