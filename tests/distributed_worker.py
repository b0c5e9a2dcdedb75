"""FSDP2, DDP and distributed checkpoints: one of the processes of tests/test_distributed.py."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import qao
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks_support import DEVICE, WORLD, Cases, Collectives, main
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

CASES: Cases = {}
KEYS = ("weight", "bias")
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
INT4 = qao.Int4WeightOnly(group_size=32)
SCHEMES = {
    "int4": INT4,
    "int4 in float16": qao.Int4WeightOnly(group_size=32, scale_dtype=torch.float16),
    "int8": qao.Int8WeightOnly(),
    "fp8": qao.Float8WeightOnly(),
    "fp4": qao.Fp4WeightOnly(),
    "nvfp4": qao.Fp4WeightOnly("nvfp4"),
    "fp8 block": qao.Float8WeightOnly(granularity="block"),
    "int8_int8": qao.Int8DynamicActivationInt8Weight(symmetric_activations=False),
    "int8_int4": qao.Int8DynamicActivationInt4Weight(group_size=32, symmetric_activations=False),
    "fp8_fp8": qao.Float8StaticActivationFloat8Weight(granularity="tensor", activation_scale=0.02),
    "fp8_int4": qao.Float8DynamicActivationInt4Weight(group_size=32),
}


def case(function: Callable[[Path], None]) -> Callable[[Path], None]:
    CASES[function.__name__] = function
    return function


GPUS = ((90, 132, 232448), (80, 108, 166912), (89, 142, 101376), (100, 148, 232448))
STORED = {"int4": "bfloat16", "fp4": "bfloat16", "int8": "float32", "fp8": "float32"}  # dtype of scales


def net(scheme: qao.Scheme) -> nn.Sequential:
    """Sizes not divisible by any number of processes, with the same values everywhere."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 101), nn.GELU(), nn.Linear(101, 35))
    qao.quantize_(model, scheme)
    return model


def shard(model: nn.Module, *blocks: nn.Module, **options: Any) -> nn.Module:
    for block in (*blocks, model):
        fully_shard(block, mesh=init_device_mesh(DEVICE, (WORLD,)), **options)
    return model


def equal(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype and torch.equal(got, expected), (got, expected)


def near(got: Tensor, expected: Tensor, sent: torch.dtype = torch.float32) -> None:
    """Means over ranks of equal values: exact only for powers of two; else each of ``WORLD`` sums is rounded."""
    if WORLD & (WORLD - 1) == 0:
        equal(got, expected)
    else:
        torch.testing.assert_close(got, expected, rtol=WORLD * torch.finfo(sent).eps, atol=0)


def packed_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: p.dtype for name, p in model.named_parameters() if not name.endswith("bias")}


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------


def check_fsdp2(scheme: qao.Scheme, policy: MixedPrecisionPolicy | None = None, **options: Any) -> None:
    """Results and gradients of the sharded model equal those of the whole one bit for bit."""
    whole = net(scheme)
    model = copy.deepcopy(whole)
    x = torch.randn(3, 70)
    if policy is not None:  # the policy casts biases and x, nothing else
        whole, x = whole.bfloat16(), x.bfloat16()
        options["mp_policy"] = policy
    dtypes = packed_dtypes(model)
    for some in (whole, model):
        some.requires_grad_()
    shard(model, model[0], model[2], **options)
    assert packed_dtypes(model) == dtypes
    for _ in range(2):
        whole.zero_grad()
        model.zero_grad()
        y = model(x)
        equal(y, whole(x))
        y.float().sum().backward()
        whole(x).float().sum().backward()
        for got, expected in zip((model[0].bias, model[2].bias), (whole[0].bias, whole[2].bias), strict=True):
            near(got.grad.full_tensor().to(x.device), expected.grad.to(got.dtype), x.dtype)
    for layer, expected in ((model[0], whole[0]), (model[2], whole[2])):
        layer.unshard()
        for got, own in zip(layer.packed.tensors().values(), expected.packed.tensors().values(), strict=True):
            assert (got is None) == (own is None)
            if own is not None:
                equal(got.data, own.data)


for _name, _scheme in SCHEMES.items():
    CASES[f"fsdp2 {_name}"] = lambda folder, scheme=_scheme: check_fsdp2(scheme)
    CASES[f"fsdp2 in bfloat16 {_name}"] = lambda folder, scheme=_scheme: check_fsdp2(scheme, policy=HALF)


@case
def fsdp2_with_offload(folder: Path) -> None:
    check_fsdp2(INT4, policy=HALF, offload_policy=CPUOffloadPolicy(pin_memory=False))


@case
def fsdp2_with_parameters_kept(folder: Path) -> None:
    check_fsdp2(INT4, policy=HALF, reshard_after_forward=False)


@case
def fsdp2_leaves_floats_to_the_policy(folder: Path) -> None:
    model = shard(nn.Linear(8, 8), mp_policy=HALF)
    assert model(torch.ones(1, 8)).dtype == torch.bfloat16


@case
def fsdp2_takes_new_weights(folder: Path) -> None:
    for scheme in SCHEMES.values():
        model, expected = net(scheme), net(scheme)
        torch.manual_seed(7)
        new = {f"{name}.{key}": torch.randn(getattr(expected[int(name)], key).shape) for name in "02" for key in KEYS}
        qao.update_(expected, new)
        shard(model, model[0], model[2])
        x = torch.randn(3, 70)
        model(x)
        model.reshard()
        qao.update_(model, new)
        equal(model(x), expected(x))


@case
@torch.no_grad()
def fsdp2_holds_its_part_and_a_layer(folder: Path) -> None:
    """Memory of a rank: 1/world of the weights, plus the current and the prefetched layer during a pass."""
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(16)))
    qao.quantize_(model, qao.Int8WeightOnly(clip_search=False), progress=False)
    layer = sum(parameter.nbytes for parameter in model[0].parameters())
    shard(model, *model)
    own = sum(parameter.to_local().nbytes for parameter in model.parameters())
    assert own <= 16 * layer / WORLD * 1.01, (own, layer)
    x = torch.randn(4, 2048)
    model(x)
    if DEVICE == "cpu":
        return
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model(x)
    torch.cuda.synchronize()
    layers = (torch.cuda.max_memory_allocated() - before) / layer
    print(f"weights of a rank {own / layer:.2f} layers of 16, in a pass {layers:.2f} more")
    assert layers < 5, layers  # whole twice (as it arrives, as kernels read it), of two layers


# ---- checkpoints of models of transformers ---------------------------------------------------------------------------


def llama(tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 101}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)).eval()


def qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 101}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).eval()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=101, n_positions=64, **ids)).eval()


def tied_llama() -> nn.Module:
    return llama(tied=True)


MODELS = {"llama": (llama, False), "qwen2": (qwen2, False), "gpt2": (gpt2, False), "tied": (tied_llama, True)}


def skeleton(make: Callable[[], nn.Module], embeddings: bool) -> nn.Module:
    """The quantized model, sharded, its Parameters on meta: the recipe of docs/quantize.md."""
    from accelerate import init_empty_weights

    with init_empty_weights():
        model = make()
    model.tie_weights()
    qao.quantize_(model, INT4, embeddings=embeddings)
    return shard(model, *(model.transformer.h if hasattr(model, "transformer") else model.model.layers))


@torch.no_grad()
def check_checkpoint(folder: Path, make: Callable[[], nn.Module], embeddings: bool) -> None:
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict

    torch.manual_seed(0)
    whole = make()
    qao.quantize_(whole, INT4, embeddings=embeddings)
    ids = torch.arange(10)[None]
    expected = whole(ids).logits

    model = skeleton(make, embeddings)
    state = whole.state_dict() if dist.get_rank() == 0 else {}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    equal(model(ids).logits, expected)
    model.reshard()  # frees what the root has gathered

    third = skeleton(make, embeddings)
    main = SimpleNamespace(is_main_process=dist.get_rank() == 0)
    fsdp2_load_full_state_dict(main, third, whole.state_dict() if main.is_main_process else {})
    equal(third(ids).logits, expected)

    dcp.save(model.state_dict(), checkpoint_id=folder / make.__name__)
    again = skeleton(make, embeddings)
    state = {name: torch.empty_like(tensor, device="cpu") for name, tensor in again.state_dict().items()}
    dcp.load(state, checkpoint_id=folder / make.__name__)
    again.load_state_dict(state, assign=True)
    equal(again(ids).logits, expected)


@case
@torch.no_grad()
def checkpoint_of_another_number_of_processes(folder: Path) -> None:
    torch.manual_seed(0)
    whole, ids = llama(), torch.arange(10)[None]
    qao.quantize_(whole, INT4)
    expected = whole(ids).logits
    two, one = folder / "of two", folder / f"of one, {dist.get_rank()}"
    model = copy.deepcopy(whole)
    shard(model, *model.model.layers)
    dcp.save(model.state_dict(), checkpoint_id=two)
    dcp.save(whole.state_dict(), checkpoint_id=one, no_dist=True)

    alone = llama()
    qao.quantize_(alone, INT4)
    state = alone.state_dict()
    dcp.load(state, checkpoint_id=two, no_dist=True)
    alone.load_state_dict(state)
    equal(alone(ids).logits, expected)

    model = llama()
    qao.quantize_(model, INT4)
    shard(model, *model.model.layers)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder / "of one, 0")
    model.load_state_dict(state)
    equal(model(ids).logits, expected)


# ---- LoRA ------------------------------------------------------------------------------------------------------------


@case
def checkpoint_lora_with_fsdp2(folder: Path) -> None:
    """Losses and adapters of training on a sharded base equal those of one process."""
    import peft

    torch.manual_seed(0)
    base = llama()
    qao.quantize_(base, INT4)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)
    alone = peft.get_peft_model(base, config)
    for name, parameter in alone.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    sharded = copy.deepcopy(alone)
    shard(sharded, *sharded.base_model.model.model.layers)
    ids = torch.randint(0, 101, (2, 12), generator=torch.Generator().manual_seed(3), device="cpu").to(DEVICE)
    losses = []
    for model in (alone, sharded):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        for _ in range(4):
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[3] < losses[0]
    torch.testing.assert_close(losses[4:], losses[:4], rtol=1e-5, atol=0)
    for (name, got), (_, own) in zip(sharded.named_parameters(), alone.named_parameters(), strict=True):
        if own.requires_grad:
            torch.testing.assert_close(got.full_tensor(), own, rtol=1e-3, atol=1e-4, msg=name)


# ---- plans -----------------------------------------------------------------------------------------------------------


@case
def every_rank_plans_alike(folder: Path) -> None:
    """Plans do not depend on a rank's memory, environment, order of calls, or data."""
    from qao import _host

    second = dist.get_rank() == 1
    memory = torch.randn(1 << 20) if second else None
    if second:
        os.environ.update(OMP_NUM_THREADS="7", CUDA_VISIBLE_DEVICES="3", LOCAL_RANK="1", NCCL_ALGO="Tree")
    gpus = [_host.Gpu(compute_capability=c, num_sms=s, shared_bytes_per_cta=b) for c, s, b in GPUS]
    facts = [
        (name, m, n, k, gpu)
        for name in SCHEMES
        for m in (1, 7, 16, 33, 128, 2048)
        for n, k in ((4096, 4096), (14336, 8192), (1024, 3584), (8192, 28672))  # of 70B models, cut in two to eight
        for gpu in range(len(gpus))
    ]
    plans = {}
    for name, m, n, k, gpu in reversed(facts) if second else facts:
        scheme = SCHEMES[name]
        problem = scheme._problem(m=m, n=n, k=k, x_dtype="bfloat16", scale_dtype=STORED[scheme.weights])
        plans[f"{name} {m} {n} {k} {gpu}"] = repr(sorted(_host.plan(problem, gpus[gpu]).items()))
    assert len(plans) == len(facts) and (memory is not None) == second
    gathered: list[Any] = [None] * WORLD
    dist.all_gather_object(gathered, plans)
    assert all(one == gathered[0] for one in gathered)


for _name, (_make, _embeddings) in MODELS.items():
    CASES[f"checkpoint {_name}"] = lambda folder, m=_make, e=_embeddings: check_checkpoint(folder, m, e)


# ---- DDP -------------------------------------------------------------------------------------------------------------


@case
def ddp(folder: Path) -> None:
    whole = net(INT4).requires_grad_()
    model = DistributedDataParallel(copy.deepcopy(whole))
    x = torch.randn(3, 70)
    y = model(x)
    equal(y, whole(x))
    y.sum().backward()
    whole(x).sum().backward()
    for (name, got), own in zip(model.module.named_parameters(), whole.parameters(), strict=True):
        assert got.requires_grad == name.endswith("bias")
        if got.requires_grad:
            near(got.grad, own.grad)


@case
def ddp_sends_no_quantized_weight(folder: Path) -> None:
    """Traffic of one step: buffers forward, gradients backward, and nothing else."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 101), nn.BatchNorm1d(101), nn.Linear(101, 35))
    qao.quantize_(model, qao.Int8WeightOnly())
    model = DistributedDataParallel(model.requires_grad_())
    for _ in range(3):
        with Collectives() as trace:
            model(torch.randn(3, 70)).sum().backward()
    sent = dict(zip(trace.names, trace.sizes, strict=True))
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    assert set(sent) == {"broadcast_", "allreduce_"} and sent["allreduce_"] == trained, sent
    packed = min(layer.qweight.nbytes for layer in (model.module[0], model.module[2]))
    buffers = 2 * 101 * 4 + 8  # means, variances and their count
    assert max(size for name, size in zip(trace.names, trace.sizes, strict=True) if name == "broadcast_") <= buffers
    assert buffers < packed and trained < packed


if __name__ == "__main__":
    main(CASES)
