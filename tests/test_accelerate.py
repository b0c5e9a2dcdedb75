"""accelerate: offloading, device maps and its loading of checkpoints, of quantized layers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from qao import Int4WeightOnly, quantize_
from torch import Tensor, nn

accelerate = pytest.importorskip("accelerate")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.filterwarnings(
    "ignore:quantize_. these big weights stay", "ignore:Attempting to save a model with offloaded modules"
)

SCHEME = Int4WeightOnly(group_size=32)
SCHEMES = {
    "up": SCHEME,
    "down": qao.Int8DynamicActivationInt8Weight(symmetric_activations=False),
    "head": qao.Float8StaticActivationFloat8Weight(activation_scale=0.01),
}
IDS = torch.arange(10)
SPREAD = {"embed": "cpu", "up": "disk", "down": "cpu", "head": "disk"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 64)
        self.head = nn.Linear(64, 50)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.down(self.up(self.embed(ids)).relu()))


def quantized_model() -> Model:
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16)
    quantize_(model, SCHEMES, progress=False)
    return model


def empty_model(dtype: torch.dtype = torch.bfloat16) -> Model:
    with accelerate.init_empty_weights():
        model = Model().to(dtype)
    quantize_(model, SCHEMES, progress=False)
    return model


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    path = tmp_path / "model.safetensors"
    safetensors.save_file(quantized_model().state_dict(), path, {"format": "pt"})
    return str(path)


def offload(model: nn.Module, how: str, folder: Path, places: dict[str, str] = SPREAD) -> Any:
    if how == "cpu_offload":
        return accelerate.cpu_offload(model, torch.device("cpu"))
    if how == "disk_offload":
        return accelerate.disk_offload(model, str(folder), torch.device("cpu"))
    return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(folder), force_hooks=True)


HOWS = ("cpu_offload", "disk_offload", "dispatch_model")


@pytest.mark.parametrize("how", HOWS)
def test_offloaded_after_quantizing_it_computes_the_same(how: str, tmp_path: Path) -> None:
    model = quantized_model()
    expected = model(IDS)
    offloaded = offload(copy.deepcopy(model), how, tmp_path)
    assert offloaded.up.qweight.is_meta
    assert torch.equal(offloaded(IDS), expected) and torch.equal(offloaded(IDS), expected)
    assert offloaded.up.qweight.is_meta


@pytest.mark.parametrize("how", HOWS)
def test_offloaded_before_quantizing_says_so(how: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    expected = copy.deepcopy(model)
    quantize_(expected, SCHEME, progress=False)
    offloaded = offload(model, how, tmp_path)
    hooked = {"dispatch_model": 2}.get(how, 3)  # those on the disk; block "down" keeps a hook too, of its device
    with pytest.warns(UserWarning, match=r"hook of accelerate.*remove_hook_from_module") as caught:
        report = quantize_(offloaded, SCHEME)
    assert len([row for row in report.problems if "hook of accelerate" in (row.note or "")]) >= hooked
    assert "no layer was quantized" in str(caught[0].message)
    accelerate.hooks.remove_hook_from_module(offloaded, recurse=True)
    quantize_(offloaded, SCHEME, strict=True, progress=False)
    assert torch.equal(offloaded(IDS), expected(IDS))


@pytest.mark.parametrize("how", HOWS)
def test_offloaded_layers_are_saved_with_the_same_bytes(how: str, tmp_path: Path) -> None:
    model = quantized_model()
    model.embed.register_buffer("nothing", torch.zeros(0))
    qao.save(model, tmp_path / "whole.safetensors")
    offloaded = offload(model, how, tmp_path / "off")
    qao.save(offloaded, tmp_path / "offloaded.safetensors")
    assert (tmp_path / "offloaded.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert offloaded.up.qweight.is_meta and offloaded.head.bias.is_meta


@pytest.mark.parametrize("how", HOWS)
def test_values_of_offloaded_layers_change_after_their_hooks_are_removed(how: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    new = Model().to(torch.bfloat16)
    model = offload(quantized_model(), how, tmp_path)
    before = model(IDS)
    with pytest.raises(ValueError, match=r"up\.weight: the layer is offloaded by accelerate: call .*remove_hook_from"):
        qao.update_(model, new.state_dict())
    with pytest.raises(ValueError, match=r"head\.bias is offloaded by accelerate: call .*remove_hook_from_module"):
        qao.update_(model, {"head.bias": new.head.bias}, strict=False)
    with pytest.raises(ValueError, match=r"dequantize_: up: a hook of accelerate.*: call .*remove_hook_from_module"):
        qao.dequantize_(model)
    assert torch.equal(model(IDS), before)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    qao.update_(model, new.state_dict())
    quantize_(new, SCHEMES, progress=False)
    assert torch.equal(offload(model, how, tmp_path / "again")(IDS), new(IDS))


def test_a_layer_on_the_disk_since_it_was_loaded_needs_another_load(checkpoint: str, tmp_path: Path) -> None:
    """Its tensors stay on meta when the hook is removed."""
    model = accelerate.load_checkpoint_and_dispatch(
        empty_model(), checkpoint, SPREAD, offload_folder=str(tmp_path / "off"), force_hooks=True
    )
    for call in (qao.dequantize_, lambda model: qao.update_(model, Model().to(torch.bfloat16).state_dict())):
        with pytest.raises(ValueError, match=r"up.*: load the model without offloading it \(device_map\)"):
            call(model)
    qao.save(model, tmp_path / "saved.safetensors")
    whole = qao.load(tmp_path / "saved.safetensors", Model())
    assert torch.equal(whole(IDS), quantized_model()(IDS))
    qao.dequantize_(whole)


@pytest.mark.parametrize("kind", ["LoraConfig", "LoHaConfig"])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.filterwarnings("ignore:Merging quantizes:UserWarning")
def test_adapters_merge_into_offloaded_layers(kind: str, how: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    weights = {"init_lora_weights" if kind == "LoraConfig" else "init_weights": False}
    config = getattr(peft, kind)(r=2, target_modules=["up", "down"], **weights)
    model = peft.get_peft_model(quantized_model(), config).eval()
    places = {f"base_model.model.{name}": place for name, place in SPREAD.items()}
    expected = copy.deepcopy(model).merge_and_unload()
    offloaded = offload(model, how, tmp_path, places)
    offloaded.merge_adapter()
    assert torch.equal(offloaded(IDS), expected(IDS))
    with pytest.raises(ValueError, match=r"accelerate offloads the base layer.* unmerge_adapter"):
        offloaded.base_model.model.up.unmerge()
    offloaded.unmerge_adapter()
    merged = offloaded.merge_and_unload()
    assert merged.up.qweight.is_meta and torch.equal(merged(IDS), expected(IDS))
    qao.save(merged, tmp_path / "merged.safetensors")
    qao.save(expected, tmp_path / "expected.safetensors")
    assert (tmp_path / "merged.safetensors").read_bytes() == (tmp_path / "expected.safetensors").read_bytes()


@pytest.mark.parametrize("kind", ["LoraConfig", "LoHaConfig"])
def test_adapters_added_after_offloading_are_not_merged(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(r=2, target_modules=["up"])
    model = offload(quantized_model(), "disk_offload", tmp_path)
    adapted = peft.get_peft_model(model, config)
    with pytest.raises(ValueError, match=r"accelerate offloads the base layer.* merge_and_unload of the whole model"):
        adapted.base_model.model.up.merge()
    with pytest.raises(ValueError, match=r"default.* is on meta and has no values.*remove_hook_from_module"):
        adapted.merge_and_unload()
    model = adapted.unload()
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    model = offload(peft.get_peft_model(model, config), "disk_offload", tmp_path / "again").merge_and_unload()
    assert torch.equal(model(IDS), quantized_model()(IDS))  # new adapters change nothing


def llama(scheme: qao.schemes.Scheme) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
    quantize_(model, scheme, progress=False)
    return model


LLAMA = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"} | {
    "lm_head": "disk"
}


@pytest.mark.parametrize(
    "scheme", [SCHEME, qao.Int4WeightOnly(group_size=64, symmetric=True), qao.Int8WeightOnly()], ids=str
)
def test_save_pretrained_writes_offloaded_layers(scheme: qao.schemes.Scheme, tmp_path: Path) -> None:
    model = llama(scheme)
    logits = model(IDS[None]).logits
    model.save_pretrained(tmp_path / "whole")
    whole = safetensors.load_file(tmp_path / "whole" / "model.safetensors")
    for how in HOWS:
        offloaded = offload(copy.deepcopy(model), how, tmp_path / how, LLAMA)
        offloaded.save_pretrained(tmp_path / "saved")
        saved = safetensors.load_file(tmp_path / "saved" / "model.safetensors")
        assert saved.keys() == whole.keys() and all(torch.equal(saved[name], whole[name]) for name in whole)
        assert (tmp_path / "saved" / "config.json").read_text() == (tmp_path / "whole" / "config.json").read_text()
        assert torch.equal(offloaded(IDS[None]).logits, logits)
    with pytest.raises(ValueError, match=r"device_map.*accelerate\.dispatch_model\(model, device_map, offload_dir="):
        qao.from_pretrained(tmp_path / "saved", device_map=LLAMA)
    loaded = accelerate.dispatch_model(qao.from_pretrained(tmp_path / "saved"), LLAMA, offload_dir=tmp_path / "off")
    assert loaded.lm_head.qweight.is_meta and torch.equal(loaded(IDS[None]).logits, logits)


def test_a_replaced_forward_is_still_unsupported() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].forward = lambda x: x  # type: ignore[method-assign]
    model[1].forward = model[1].forward  # type: ignore[method-assign]  # as accelerate leaves it behind
    report = quantize_(model, SCHEME)
    assert [row.note for row in report.rows] == ["its forward was replaced on the instance", None]


@pytest.mark.parametrize(
    "options",
    [
        {"device_map": {"": "cpu"}},
        {"device_map": {"": "cpu"}, "strict": True},
        {"device_map": {"": "cpu"}, "dtype": torch.bfloat16},
        {"device_map": {"": "cpu"}, "offload_state_dict": True},
    ],
    ids=lambda options: "+".join(options),
)
def test_load_checkpoint_in_model(options: dict[str, Any], checkpoint: str) -> None:
    """Also with a dtype argument, which is for floats: scales keep theirs."""
    expected, model = quantized_model(), empty_model()
    accelerate.load_checkpoint_in_model(model, checkpoint, **options)
    for name, parameter in model.named_parameters():
        wanted = expected.get_parameter(name)
        assert parameter.dtype == wanted.dtype and torch.equal(parameter, wanted), name
        if name.endswith(("qweight", "scales")):  # the file is mapped, and kernels read 16 bytes at a time
            assert parameter.data_ptr() % 16 == 0
    assert torch.equal(model(IDS), expected(IDS))


def test_load_checkpoint_in_model_without_a_device_map(checkpoint: str) -> None:
    torch.manual_seed(1)
    model = Model().to(torch.bfloat16)
    quantize_(model, SCHEMES, progress=False)
    accelerate.load_checkpoint_in_model(model, checkpoint)
    assert torch.equal(model(IDS), quantized_model()(IDS))


def float_model() -> Model:
    with accelerate.init_empty_weights():
        return Model().to(torch.bfloat16)


def test_a_float_model_takes_the_layers_of_the_checkpoint(tmp_path: Path) -> None:
    """One file, a file of torch, several files: a layer in two of them."""
    expected, state = quantized_model(), quantized_model().state_dict()
    (tmp_path / "one").mkdir()
    safetensors.save_file(state, tmp_path / "one" / "model.safetensors", {"format": "pt"})
    (tmp_path / "torch").mkdir()
    torch.save(state, tmp_path / "torch" / "pytorch_model.bin")
    (tmp_path / "several").mkdir()
    parts: dict[str, dict[str, Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
    weight_map = {name: "b.safetensors" if name.endswith("qweight") else "a.safetensors" for name in state}
    for name, file in weight_map.items():
        parts[file][name] = state[name]
    for file, part in parts.items():
        safetensors.save_file(part, tmp_path / "several" / file, {"format": "pt"})
    (tmp_path / "several" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for folder in ("one", "torch", "several"):
        for options in ({"": "cpu"}, SPREAD):
            model = accelerate.load_checkpoint_and_dispatch(
                float_model(), str(tmp_path / folder), options, offload_folder=str(tmp_path / "off"), force_hooks=True
            )
            assert isinstance(model.up, qao.QuantLinear) and torch.equal(model(IDS), expected(IDS))
        model = Model().to(torch.bfloat16)
        accelerate.load_checkpoint_in_model(model, str(tmp_path / folder), device_map={"": "cpu"}, strict=True)
        assert torch.equal(model(IDS), expected(IDS))


def test_a_dtype_is_that_of_the_layers_too(checkpoint: str) -> None:
    model = Model()
    accelerate.load_checkpoint_in_model(model, checkpoint, device_map={"": "cpu"}, dtype=torch.bfloat16)
    assert model.up.dtype == model.up.bias.dtype == torch.bfloat16  # type: ignore[comparison-overlap]
    assert torch.equal(model(IDS), quantized_model()(IDS))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_load_checkpoint_and_dispatch_with_the_disk(dtype: Any, checkpoint: str, tmp_path: Path) -> None:
    model = accelerate.load_checkpoint_and_dispatch(
        empty_model(), checkpoint, SPREAD, offload_folder=str(tmp_path / "off"), dtype=dtype, force_hooks=True
    )
    assert model.up.qweight.is_meta and not model.down.qweight.is_meta
    assert torch.equal(model(IDS), quantized_model()(IDS))


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_checkpoints_without_markers_show_their_sizes(file: str, tmp_path: Path) -> None:
    """Packed weights of 60 and of 64 columns have tensors of one shape."""
    state = {
        name: one
        for name, one in quantized_model().state_dict().items()
        if not name.endswith("pip_install_qao") and one.shape != qao.nn.marker.tripwire().shape
    }
    write = safetensors.save_file if file.endswith("safetensors") else torch.save
    write(state, tmp_path / file)
    for places in ({"": "cpu"}, SPREAD):
        options = {"offload_folder": str(tmp_path / "off"), "force_hooks": True}
        model = accelerate.load_checkpoint_and_dispatch(empty_model(), str(tmp_path / file), places, **options)
        assert torch.equal(model(IDS), quantized_model()(IDS))
        with accelerate.init_empty_weights():
            narrow = Model().to(torch.bfloat16)
            narrow.up = nn.Linear(60, 96, dtype=torch.bfloat16)
        quantize_(narrow, SCHEMES, progress=False)
        with pytest.raises(ValueError, match=r"up\.qweight: this is the packed weight of a larger layer"):
            accelerate.load_checkpoint_and_dispatch(narrow, str(tmp_path / file), places, **options)
        assert narrow.up.qweight.is_meta and narrow.embed.weight.is_meta


def test_what_does_not_fit_is_refused(checkpoint: str, tmp_path: Path) -> None:
    """Otherwise each would load values with another meaning."""
    narrow = Model()
    narrow.up = nn.Linear(64, 95)
    with pytest.raises(RuntimeError, match=r"up: the checkpoint has a weight \[96, 64\], but the model has \[95, 64\]"):
        accelerate.load_checkpoint_in_model(narrow, checkpoint, device_map={"": "cpu"})

    floats = tmp_path / "floats.safetensors"
    safetensors.save_file(Model().state_dict(), floats, {"format": "pt"})
    with pytest.raises(ValueError, match=r"\.weight: the checkpoint holds .*, a weight that is not quantized"):
        accelerate.load_checkpoint_in_model(empty_model(), str(floats), device_map={"": "cpu"})

    # scales of another dtype would be rounded, and those of another group size have another shape
    with pytest.raises(ValueError, match=r"up\.scales: the checkpoint holds torch\.bfloat16.*needs torch\.float32"):
        accelerate.load_checkpoint_in_model(empty_model(torch.float32), checkpoint, device_map={"": "cpu"})
    with accelerate.init_empty_weights():
        other = Model().to(torch.bfloat16)
    quantize_(other, {**SCHEMES, "up": Int4WeightOnly(group_size=64)}, progress=False)
    with pytest.raises(ValueError, match=r"up\.scales: the checkpoint holds .*Quantize the model with the scheme"):
        accelerate.load_checkpoint_in_model(other, checkpoint, device_map={"": "cpu"})

    state = quantized_model().state_dict()
    state["up.pip_install_qao"] = torch.frombuffer(
        bytearray(bytes(state["up.pip_install_qao"].tolist()).replace(b'"version": 1', b'"version": 9')),
        dtype=torch.uint8,
    )
    newer = tmp_path / "newer.safetensors"
    safetensors.save_file(state, newer, {"format": "pt"})
    with pytest.raises(ValueError, match=r"up\.pip_install_qao: written by a newer qao"):
        accelerate.load_checkpoint_in_model(empty_model(), str(newer), device_map={"": "cpu"})
