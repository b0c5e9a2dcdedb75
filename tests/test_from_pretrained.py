"""Arguments of qao.from_pretrained compared with transformers; ModelOpt and AutoRound checkpoints."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qao
import saving_support as support
import torch
from qao.checkpoints import CheckpointError, open_checkpoint
from qao.cli import main
from safetensors.torch import save_file

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
INT8 = qao.Int8WeightOnly()

# What transformers' from_pretrained takes. One that is not here is to be looked at: does it hold for quantized files?
KNOWN = """
config cache_dir ignore_mismatched_sizes force_download local_files_only token revision
use_safetensors weights_only fusion_config disable_mmap state_dict proxies tqdm_class
output_loading_info _from_pipeline _from_auto dtype torch_dtype device_map max_memory offload_folder
offload_buffers quantization_config subfolder _commit_hash variant adapter_kwargs adapter_name
generation_config gguf_file distributed_config device_mesh tp_plan tp_size trust_remote_code
allow_all_kernels use_kernels kernel_config key_mapping code_revision attn_implementation
experts_implementation resume_download from_tf from_flax load_in_8bit load_in_4bit
pretrained_model_name_or_path
""".split()


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("floats")
    support.llama(128).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def native(floats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("native")
    qao.from_pretrained(floats, scheme=INT8).save_pretrained(path)
    return path


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(support.IDS).logits


def test_the_deprecated_name_of_a_dtype_is_not_read(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers prints a warning whenever something reads it."""
    pytest.importorskip("gguf")
    from test_gguf_native import write

    def fail(config: Any) -> None:
        raise AssertionError("torch_dtype is read")

    monkeypatch.setattr(transformers.PretrainedConfig, "torch_dtype", property(fail), raising=False)
    for path in (native, write(tmp_path / "model.gguf", "Q4_K")):
        assert qao.from_pretrained(path).dtype in (torch.float32, torch.bfloat16)


@pytest.mark.skipif(transformers.__version__ < "5", reason="KNOWN has the arguments of version 5")
def test_every_argument_is_known() -> None:
    own = transformers.PreTrainedModel.from_pretrained
    named = {p.name for p in inspect.signature(own).parameters.values() if p.kind is p.KEYWORD_ONLY}
    sources = [own, transformers.AutoModel.from_pretrained]
    taken = {name for one in sources for name in re.findall(r'kwargs\.pop\("(\w+)"', inspect.getsource(one))}
    assert not (named | taken) - set(KNOWN)


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False},
        {"attention_dropout": 0.1},
        {"output_hidden_states": True},
        {"num_labels": 3},
        {"attn_implementation": "eager"},
        {"dtype": "float16"},
        {"torch_dtype": torch.float16},
        {"device_map": "auto", "max_memory": {"cpu": "1GiB"}},
        {"generation_config": transformers.GenerationConfig(max_length=7)},
    ],
    ids=str,
)
def test_arguments(options: dict[str, Any], floats: Path, native: Path) -> None:
    dtype = {} if "torch_dtype" in options else {"dtype": "auto"}  # version 4 has another default
    own = transformers.AutoModelForCausalLM.from_pretrained(floats, **{**dtype, **options})
    for model in (qao.from_pretrained(floats, scheme=INT8, **options), qao.from_pretrained(native, **options)):
        for name in ("use_cache", "attention_dropout", "output_hidden_states", "num_labels", "_attn_implementation"):
            assert getattr(model.config, name) == getattr(own.config, name)
        assert model.dtype == own.dtype
        assert model.generation_config.max_length == own.generation_config.max_length
        assert isinstance(model.lm_head, qao.QuantLinear)


def test_loading_info_and_quantization_config(floats: Path, native: Path) -> None:
    model, info = qao.from_pretrained(native, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for given in (INT8, qao.QaoConfig(INT8)):
        assert torch.equal(logits(qao.from_pretrained(floats, quantization_config=given)), logits(model))


@pytest.mark.parametrize(
    "options,kind,message",
    [
        ({"return_unused_kwargs": True}, TypeError, "return_unused_kwargs"),
        ({"quantization_config": transformers.BitsAndBytesConfig(load_in_8bit=True)}, TypeError, "quantization_config"),
        ({"dtype": 3}, TypeError, "dtype"),
        ({"dtype": "float99"}, ValueError, "dtype"),
        ({"variant": "fp16"}, ValueError, "model.fp16.safetensors"),
        ({"subfolder": "nope"}, ValueError, "nope: no such file"),
        ({"gguf_file": "x.gguf"}, ValueError, "x.gguf: no such file"),
        ({"state_dict": {}}, ValueError, "state_dict"),
        ({"disable_mmap": True}, ValueError, "disable_mmap"),
        ({"use_safetensors": False}, ValueError, "use_safetensors"),
        ({"device_map": {"model": "disk", "lm_head": "cpu"}}, ValueError, "device_map"),
        ({"dequantize": True}, ValueError, "dequantize"),
        ({"tie_word_embeddings": True}, ValueError, "tie_word_embeddings"),
        ({"not_an_argument": 1}, TypeError, "not_an_argument"),
    ],
    ids=str,
)
def test_refused_arguments(options: dict[str, Any], kind: type[Exception], message: str, native: Path) -> None:
    with pytest.raises(kind, match=message):
        qao.from_pretrained(native, **options)


@pytest.mark.parametrize("name", ["tiny", "someone/tiny"])
@pytest.mark.parametrize("quantized", [False, True])
def test_hub_names(
    name: str, quantized: bool, floats: Path, native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder, source = tmp_path / f"models--{name.replace('/', '--')}", native if quantized else floats
    snapshot = folder / "snapshots" / ("0" * 40)
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    snapshot.parent.mkdir()
    snapshot.symlink_to(source)
    options: dict[str, Any] = {"cache_dir": tmp_path, "local_files_only": True}
    model = qao.from_pretrained(name, **options, **({} if quantized else {"scheme": INT8}))
    assert torch.equal(logits(model), logits(qao.from_pretrained(native)))
    assert model.config.name_or_path == name
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert main(["inspect", name, "--quiet"]) == 0  # by the same names
    with pytest.raises(CheckpointError, match="someone/else: no such file or directory, and no such repository"):
        qao.from_pretrained("someone/else", scheme=INT8, **options)


def test_paths(native: Path, floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(qao.from_pretrained(native))
    monkeypatch.setenv("HOME", str(native.parent))
    monkeypatch.chdir(native.parent)
    for path in (f"~/{native.name}", native.name, native / "model.safetensors", str(native)):
        assert torch.equal(logits(qao.from_pretrained(path)), expected)
    assert torch.equal(logits(qao.from_pretrained(native.parent, subfolder=native.name)), expected)
    assert torch.equal(logits(qao.from_pretrained(floats / "model.safetensors", scheme=INT8)), expected)
    support.llama(128).save_pretrained(tmp_path, max_shard_size="50KB")
    (index,) = tmp_path.glob("*.index.json")
    assert torch.equal(logits(qao.from_pretrained(index, scheme=INT8)), expected)


def test_a_variant_that_only_a_pickle_has(floats: Path, tmp_path: Path) -> None:
    own = transformers.AutoModelForCausalLM.from_pretrained(floats, dtype="auto")
    own.config.save_pretrained(tmp_path)
    torch.save(own.state_dict(), tmp_path / "pytorch_model.fp16.bin")
    with pytest.raises(CheckpointError, match=r"Found pytorch_model\.fp16\.bin, a pickle.*use_safetensors=False"):
        qao.from_pretrained(tmp_path, scheme=INT8, variant="fp16")
    model = qao.from_pretrained(tmp_path, scheme=INT8, variant="fp16", use_safetensors=False)
    assert torch.equal(logits(model), logits(qao.from_pretrained(floats, scheme=INT8)))
    with pytest.raises(CheckpointError, match=r"Found no weights, but config\.json, pytorch_model\.fp16\.bin"):
        qao.from_pretrained(tmp_path, scheme=INT8, variant="bf16")
    own.save_pretrained(tmp_path, variant="q4")
    with pytest.raises(CheckpointError, match=r"Found model\.q4\.safetensors\. Pass the variant"):
        qao.from_pretrained(tmp_path, scheme=INT8, variant="bf16")
    model = qao.from_pretrained(tmp_path, scheme=INT8, variant="q4")
    assert torch.equal(logits(model), logits(qao.from_pretrained(floats, scheme=INT8)))


CASTS: dict[str, tuple[Callable[[Any], Any], torch.dtype]] = {
    "half": (lambda model: model.half(), torch.float16),
    "float": (lambda model: model.bfloat16().float(), torch.float32),
    "to": (lambda model: model.to(torch.float16), torch.float16),
}


@pytest.mark.parametrize("cast, dtype", CASTS.values(), ids=CASTS)
def test_casts_of_a_model_do_not_depend_on_how_it_was_quantized(
    cast: Callable[[Any], Any], dtype: torch.dtype, floats: Path, native: Path
) -> None:
    load = transformers.AutoModelForCausalLM.from_pretrained
    here = load(floats)
    qao.quantize_(here, INT8, progress=False)
    expected = logits(cast(here))
    assert expected.dtype == dtype
    for model in (load(native), load(floats, quantization_config=qao.QaoConfig(INT8)), qao.from_pretrained(native)):
        before = model.lm_head.qweight.clone(), model.lm_head.scales.clone()
        assert cast(model) is model and model.dtype == dtype
        assert torch.equal(logits(model), expected)
        assert all(map(torch.equal, before, (model.lm_head.qweight, model.lm_head.scales)))


def test_other_quantizers_keep_their_rule_for_casts(floats: Path, native: Path) -> None:
    qao.from_pretrained(native)
    model = transformers.AutoModelForCausalLM.from_pretrained(floats)
    model.is_quantized = True
    with pytest.raises(ValueError, match="not supported for quantized model"):
        model.half()


CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
class C(PretrainedConfig):
    model_type = "tiny_x"
class M(PreTrainedModel):
    config_class = C
    def __init__(self, config):
        super().__init__(config)
        self.a = torch.nn.Linear(64, 64)
        self.post_init()
    def forward(self, x):
        return self.a(x)
"""


@pytest.mark.parametrize("auto_class", [None, "AutoModelForCausalLM"])
def test_remote_code(auto_class: str | None, tmp_path: Path) -> None:
    (tmp_path / "code_x.py").write_text(CODE)
    weight = torch.randn(64, 64)
    save_file({"a.weight": weight, "a.bias": torch.zeros(64)}, tmp_path / "model.safetensors", {"format": "pt"})
    auto_map = {"AutoConfig": "code_x.C", "AutoModelForCausalLM": "code_x.M"}
    config = {"model_type": "tiny_x", "architectures": ["M"], "auto_map": auto_map}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = qao.from_pretrained(tmp_path, scheme=INT8, trust_remote_code=True, auto_class=auto_class)
    assert type(model).__name__ == "M" and isinstance(model.a, qao.QuantLinear)
    assert (model.a.dequantize(torch.float32) - weight).abs().max() <= weight.abs().max() / 127
    model.save_pretrained(tmp_path / "q")
    (tmp_path / "q" / "code_x.py").write_text(CODE)
    saved = json.loads((tmp_path / "q" / "config.json").read_text())
    (tmp_path / "q" / "config.json").write_text(json.dumps(saved | {"auto_map": auto_map}))
    again = qao.from_pretrained(tmp_path / "q", trust_remote_code=True, auto_class=auto_class)
    assert torch.equal(again.a.dequantize(torch.float32), model.a.dequantize(torch.float32))


# ---- ModelOpt, AutoRound, and unsupported methods


def written(path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], more: Any = None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    if more is not None:
        (path / "hf_quant_config.json").write_text(json.dumps(more))
    return path


@pytest.mark.parametrize("embedded", [False, True])
@pytest.mark.parametrize("algorithm", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W8A16"])
def test_modelopt(algorithm: str, embedded: bool, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    n, k = 256, 128
    q: Any
    if algorithm == "NVFP4":
        codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
        scale = (torch.rand(n, k // 16, generator=generator) * 4 + 0.1).to(torch.float8_e4m3fn)
        factor = torch.tensor(0.0123)
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        values = torch.cat((table, -table))[codes.long()]
        expected = values.double() * scale.double().repeat_interleave(16, 1) * factor.double()
        tensors = {"a.weight": codes[:, ::2] | codes[:, 1::2] << 4, "a.weight_scale": scale, "a.weight_scale_2": factor}
    else:
        q = torch.randn(n, k, generator=generator)
        q = (q * 40).round().clamp(-127, 127).to(torch.int8) if algorithm == "W8A16" else q.to(torch.float8_e4m3fn)
        shape = {"FP8": (), "FP8_PB_WO": (2, 1, 1, 1)}.get(algorithm, (n,))
        scale = torch.rand(shape, generator=generator) + 0.1
        each = scale.reshape(-1)
        each = each.repeat_interleave(n // len(each)).reshape(n, 1)
        expected = q.double() * each.double()
        tensors = {"a.weight": q, "a.weight_scale": scale}
        if algorithm == "FP8":
            tensors["a.input_scale"] = torch.tensor(0.05)
    settings = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8"}
    tensors["a.k_scale"] = torch.tensor(1.0)
    if embedded:
        path = written(tmp_path, tensors, {"quantization_config": settings | {"quant_method": "modelopt"}})
    else:
        more = {"producer": {"name": "modelopt"}, "quantization": settings | {"exclude_modules": ["lm_head"]}}
        path = written(tmp_path, tensors, {}, more)
    checkpoint = open_checkpoint(path)
    assert checkpoint.format == "modelopt" and not checkpoint.others and "KV cache" in checkpoint.notes[0]
    layer = checkpoint.layers["a"]
    weight = qao.QuantLinear.from_quantized(*layer.read(), scheme=layer.scheme).dequantize(torch.float32).double()
    assert (weight - expected).abs().max() <= 2.0**-22 * expected.abs().max()
    if algorithm == "FP8":
        assert layer.scheme.activation_scale == pytest.approx(0.05)  # type: ignore[attr-defined]


def test_modelopt_refused(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.zeros(64, 64, dtype=torch.int8), "a.weight_scale": torch.ones(64)}
    for number, (settings, message) in enumerate(
        [
            ({"quant_algo": "W4A16_AWQ"}, "W4A16_AWQ"),
            ({"quant_algo": "W8A16", "exclude_modules": ["a*"]}, "excluded"),
            ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {}}, "quantized_layers"),
        ]
    ):
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(written(tmp_path / str(number), tensors, {}, {"quantization": settings}))
    scaled = tensors | {"a.pre_quant_scale": torch.ones(64)}
    with pytest.raises(CheckpointError, match="pre_quant_scale"):
        open_checkpoint(written(tmp_path / "s", scaled, {}, {"quantization": {"quant_algo": "W8A16"}}))


@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", "auto_round:gptqmodel", "auto_round:auto_awq"])
def test_autoround(packing: str, tmp_path: Path) -> None:
    """Asymmetric, in groups of 32, but for one layer in groups of 64 by extra_config."""
    generator, tensors, expected = torch.Generator().manual_seed(0), {}, {}
    for name, group in (("m.a", 32), ("m.b", 64)):
        n, k = 64, 128
        q = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.int32)
        zeros = torch.randint(1, 16, (n, k // group), generator=generator, dtype=torch.int32)
        scales = torch.rand(n, k // group, generator=generator).half()
        wide = zeros.repeat_interleave(group, 1), scales.double().repeat_interleave(group, 1)
        expected[name] = (q - wide[0]).double() * wide[1]
        shifts = 4 * torch.arange(8, dtype=torch.int32)

        def words(values: torch.Tensor, shifts: torch.Tensor = shifts) -> torch.Tensor:
            return (values.reshape(len(values), -1, 8) << shifts).sum(-1, dtype=torch.int32)

        if "awq" in packing:
            order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
            pack = lambda v, order=order: words(v.t().reshape(v.shape[1], -1, 8)[..., order].flatten(1))  # noqa: E731
            tensors |= {f"{name}.qweight": pack(q), f"{name}.qzeros": pack(zeros)}
        else:
            stored = zeros - int(packing == "auto_round:auto_gptq")
            tensors |= {f"{name}.qweight": words(q).t(), f"{name}.qzeros": words(stored.t())}
        tensors[f"{name}.scales"] = scales.t()
    settings = {"quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": 32, "sym": False}
    settings["extra_config"] = {"m.b": {"group_size": 64}, r"m\.[cd]": {"bits": 16, "data_type": "fp"}}
    checkpoint = open_checkpoint(written(tmp_path, tensors, {"quantization_config": settings}))
    for name, weight in expected.items():
        layer = checkpoint.layers[name]
        made = qao.QuantLinear.from_quantized(*layer.read(), scheme=layer.scheme)
        assert (made.dequantize(torch.float32).double() - weight).abs().max() <= 2.0**-22 * weight.abs().max()


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes' is not supported"),
        ({"load_in_8bit": True}, "'bitsandbytes' is not supported"),
        *[({"quant_method": name}, f"'{name}' is not") for name in ("hqq", "quanto", "aqlm", "quark", "mxfp8")],
        ({"bits": 4}, "has no quant_method"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"}, "llm_compressor"),
        ({"quant_method": "auto-round", "data_type": "mx_fp"}, "mx_fp"),
        ({"quant_method": "auto-round", "act_bits": 8}, "8-bit activations"),
        ({"quant_method": "gptq", "format": "marlin"}, "format must be gptq or gptq_v2"),
    ],
    ids=str,
)
def test_methods_that_are_not_read(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    tensors = {
        "a.qweight": torch.zeros(8, 64, dtype=torch.int32),
        "a.qzeros": torch.zeros(1, 8, dtype=torch.int32),
        "a.scales": torch.ones(1, 64).half(),
    }
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(written(tmp_path, tensors, {"quantization_config": settings}))


def test_integers_that_no_config_explains(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.zeros(64, 64, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match=r"model\.safetensors: a\.weight: is part of a quantized weight"):
        open_checkpoint(written(tmp_path, tensors, {}))


def test_indexes_that_lie(tmp_path: Path) -> None:
    one, two = {"a": torch.ones(2)}, {"b": torch.ones(2)}
    (tmp_path / "config.json").write_text("{}")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    save_file(one, tmp_path / "1.safetensors")
    with pytest.raises(CheckpointError, match=r"2\.safetensors: no such file, but the index says"):
        open_checkpoint(tmp_path)
    save_file(one | two, tmp_path / "2.safetensors")
    with pytest.raises(CheckpointError, match=r"2\.safetensors: a: this tensor is also in .*1\.safetensors"):
        open_checkpoint(tmp_path)
    save_file({"c": torch.ones(2)}, tmp_path / "2.safetensors")
    with pytest.raises(CheckpointError, match=r"2\.safetensors: b: the index says"):
        open_checkpoint(index)
    save_file(two | {"c": torch.ones(2)}, tmp_path / "2.safetensors")
    assert set(open_checkpoint(index).others) == {"a", "b"}
