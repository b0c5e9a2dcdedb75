"""Third-party checkpoints loaded onto qao's layers by transformers' ``from_pretrained``."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import qao
import saving_support as support
import torch
from checkpoint_support import write
from qao.cli import main as cli
from safetensors.torch import load_file, save_file
from test_checkpoints_fp8 import e4m3, fp8
from test_checkpoints_gptq_awq import Weight, awq, gptq

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
CompressedTensors = pytest.mark.skipif(
    not transformers.utils.is_compressed_tensors_available(), reason="no compressed-tensors"
)
WORDS = list(qao.schemes.SCHEMES)
# One head is quantized and one is not; mixtures name their layers.
MODELS = ("all", "blocks", "mixed")

_LOAD = """
import sys, json, torch
order, root = sys.argv[1:]
if order == "first":
    import qao
import transformers
from transformers import AutoModelForCausalLM
if order == "last":
    import transformers.modeling_utils, qao
transformers.utils.logging.disable_progress_bar()
from pathlib import Path
results = {}
for path in sorted(Path(root).iterdir()):
    if not (path / "config.json").exists():
        continue
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        found = model(torch.arange(9)[None]).logits
    expected = torch.load(path / "expected.pt")
    quantized = sum(type(module).__name__ == "QuantLinear" for module in model.modules())
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    results[path.name] = [quantized, torch.equal(found, expected), str(model.dtype), model.name_or_path, error]
print("RESULT" + json.dumps(results))
"""


def scheme_of(word: str) -> qao.Scheme:
    scheme = qao.schemes.SCHEMES[word]()
    if not isinstance(scheme, qao.schemes.Int4Weight):
        return scheme
    # Next to quantized activations, zero points are saved in qao's own format.
    return replace(scheme, whole_zeros=True) if scheme.activations == "float" else replace(scheme, symmetric=True)


def save(path: Path, schemes: Any) -> None:
    model = support.llama(128)
    qao.quantize_(model, schemes)
    model.save_pretrained(path)
    torch.save(support.run(model, "transformers"), path / "expected.pt")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    for word in WORDS:
        scheme, other = scheme_of(word), scheme_of("int8" if word != "int8" else "fp8")
        save(root / f"{word}-all", scheme)
        save(root / f"{word}-blocks", {"model.layers": scheme})
        save(root / f"{word}-mixed", {r"re:.*mlp\..*": scheme, "model.layers": other})
    return root


def process(order: str, root: Path, **environment: str) -> tuple[dict[str, Any], str]:
    plain = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    plain.pop("TRANSFORMERS_VERBOSITY", None)
    arguments = [sys.executable, "-c", _LOAD, order, str(root)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, env=plain)
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Any] = json.loads(done.stdout.partition("RESULT")[2])
    return results, done.stderr


@pytest.fixture(scope="module", params=["first", "last"])
def loaded(root: Path, request: pytest.FixtureRequest) -> tuple[dict[str, Any], str]:
    return process(request.param, root)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("which", MODELS)
def test_with_qao_layers_and_bits_are_those_saved(
    word: str, which: str, loaded: tuple[dict[str, Any], str], root: Path
) -> None:
    path = root / f"{word}-{which}"
    content = json.loads((path / "config.json").read_text())
    assert content["quantization_config"]["quant_method"] == "compressed-tensors"
    quantized, equal, dtype, name, _ = loaded[0][path.name]
    assert quantized == (15 if which == "all" else 14)
    assert equal and dtype == "torch.bfloat16" and name == str(path)


def test_nothing_is_logged(loaded: tuple[dict[str, Any], str]) -> None:
    assert loaded[1] == ""


@CompressedTensors
@pytest.mark.skipif(transformers.__version__ < "5", reason="version 4 decompresses bfloat16 models to float16")
def test_without_qao_the_names_match(root: Path, tmp_path: Path) -> None:
    """And the numbers are right, as far as the package rounds activations alike."""
    for path in root.iterdir():
        if not path.name.startswith("int4-"):  # transformers makes no room for packed zero points, and raises
            (tmp_path / path.name).symlink_to(path)
    results, log = process("never", tmp_path)
    assert len(results) == 21
    assert "Could not match" not in log and "LOAD REPORT" not in log
    assert all(quantized == 0 and error < 0.15 for quantized, _, _, _, error in results.values())


@CompressedTensors
def test_the_switch(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "int8-all", tmp_path / "int8-all")
    for value in ("0", "off"):
        results, _ = process("first", tmp_path, QAO_TAKEOVER=value)
        assert results["int8-all"][0] == 0


@CompressedTensors
def test_the_configuration_of_the_other_library_turns_it_off(root: Path) -> None:
    path = root / "int8-all"
    config = transformers.CompressedTensorsConfig()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(path, quantization_config=config)
    assert not any(isinstance(module, qao.QuantLinear) for module in model.modules())


def test_every_class_and_part_of_the_model(root: Path) -> None:
    path = root / "int8-all"
    expected = torch.load(path / "expected.pt")
    whole = transformers.LlamaForCausalLM.from_pretrained(str(path))
    assert torch.equal(support.run(whole, "transformers"), expected)
    base = transformers.AutoModel.from_pretrained(path)
    assert isinstance(base.layers[0].mlp.up_proj, qao.QuantLinear)
    other = transformers.AutoModelForSequenceClassification.from_pretrained(path, num_labels=3)
    assert type(other.score) is torch.nn.Linear and isinstance(other.model.layers[0].mlp.up_proj, qao.QuantLinear)
    mapped, info = transformers.AutoModelForCausalLM.from_pretrained(path, device_map="cpu", output_loading_info=True)
    assert torch.equal(support.run(mapped, "transformers"), expected) and not info["missing_keys"]


def others(method: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The model in another library's layout, and the entry of config.json."""
    state = support.llama(128).state_dict()
    for name in [name for name in state if name.endswith("_proj.weight")]:
        layer, (n, k) = name.removesuffix(".weight"), state.pop(name).shape
        if method == "fp8":
            state |= {name: e4m3(n, k), f"{name}_scale_inv": torch.rand(-(-n // 128), -(-k // 128)) / 4096}
        else:
            weight = Weight(n, k, 32)
            weight.scales /= 16
            tensors = getattr(weight, method)()
            tensors.pop("a.bias", None)
            state |= {one.replace("a.", f"{layer}.", 1): tensor for one, tensor in tensors.items()}
    return state, {"gptq": gptq(desc_act=False, sym=False), "awq": awq(), "fp8": fp8()}[method]


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8"])
def test_what_other_libraries_wrote(method: str, tmp_path: Path) -> None:
    """Loaded, saved as compressed-tensors and loaded again."""
    state, quantization = others(method)
    write(tmp_path, state, support.llama(128).config.to_dict() | quantization | {"architectures": ["LlamaForCausalLM"]})
    load = transformers.AutoModelForCausalLM.from_pretrained
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load(tmp_path, dtype=torch.bfloat16)
    assert sum(isinstance(module, qao.QuantLinear) for module in model.modules()) == 14
    expected = support.run(qao.from_pretrained(tmp_path, dtype=torch.bfloat16), "transformers")
    assert expected.isfinite().all() and torch.equal(support.run(model, "transformers"), expected)
    base = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert sum(isinstance(module, qao.QuantLinear) for module in base.modules()) == 14
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(support.run(load(tmp_path / "again"), "transformers"), expected)


def test_zero_biases_that_the_model_has_not(tmp_path: Path) -> None:
    """AutoGPTQ and GPTQModel write a bias for every layer; only one that adds nothing may be left out."""
    state, quantization = others("gptq")
    config = support.llama(128).config.to_dict() | quantization | {"architectures": ["LlamaForCausalLM"]}
    write(tmp_path, state, config)
    expected = support.run(qao.from_pretrained(tmp_path), "transformers")
    scales = {name: tensor for name, tensor in state.items() if "mlp" in name and name.endswith(".scales")}
    more = {name.replace("scales", "bias"): torch.zeros(tensor.shape[1]) for name, tensor in scales.items()}
    write(tmp_path, state | more, config)
    assert torch.equal(support.run(qao.from_pretrained(tmp_path), "transformers"), expected)
    assert cli(["convert", str(tmp_path), str(tmp_path / "out"), "--to", "qao", "--quiet"]) == 0
    assert torch.equal(support.run(qao.from_pretrained(tmp_path / "out"), "transformers"), expected)
    next(iter(more.values()))[0] = 1
    write(tmp_path, state | more, config)
    with pytest.raises(qao.checkpoints.CheckpointError, match=r"1 tensors differ:\n  unexpected: .*\.bias"):
        qao.from_pretrained(tmp_path)


@pytest.mark.parametrize("key", ["compression_config", "quantize_config.json", "Quant_Method"])
def test_settings_that_transformers_does_not_see(key: str, tmp_path: Path) -> None:
    """It would leave every weight random and only log that."""
    state, quantization = others("gptq")
    config = support.llama(128).config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    settings = quantization["quantization_config"]
    if key == "compression_config":
        config[key] = settings
    elif key == "Quant_Method":
        config["quantization_config"] = settings | {"quant_method": "GPTQ"}
    else:
        (tmp_path / key).write_text(json.dumps({name: one for name, one in settings.items() if name != "quant_method"}))
    write(tmp_path, state, config)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    expected = qao.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert sum(isinstance(module, qao.QuantLinear) for module in model.modules()) == 14
    assert torch.equal(support.run(model, "transformers"), support.run(expected, "transformers"))


def test_a_stray_quantize_config_leaves_a_float_model_as_it_is(tmp_path: Path) -> None:
    model = support.llama(128)
    model.save_pretrained(tmp_path)
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 128}')
    with pytest.warns(UserWarning, match=r"loaded as without qao.*no tensor is quantized that way"):
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(support.run(again, "transformers"), support.run(model, "transformers"))


def test_what_qao_does_not_read_goes_to_the_other_library_with_a_warning(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "int8-all", tmp_path / "x")
    file = tmp_path / "x" / "config.json"
    content = json.loads(file.read_text())
    content["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 6
    file.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match=r"not onto qao's layers.*int of 6 bits"):
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "x")
        except (ImportError, RuntimeError, ValueError, KeyError):
            return  # what the library makes of it
    assert not any(isinstance(module, qao.QuantLinear) for module in model.modules())


@pytest.mark.parametrize("native", [False, True])
def test_another_scheme_for_a_quantized_checkpoint_is_an_error(native: bool, root: Path, tmp_path: Path) -> None:
    path, same = root / "int8-all", qao.Int8WeightOnly()
    if native:
        path, same = tmp_path, qao.Int4WeightOnly()  # asymmetric without whole zero points
        model = support.llama(128)
        qao.quantize_(model, same)
        model.save_pretrained(path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    with pytest.raises(ValueError, match=r"already quantized: .* asks for fp4"):
        load(path, quantization_config=qao.QaoConfig(qao.Fp4WeightOnly()))
    assert isinstance(load(path, quantization_config=qao.QaoConfig(same)).lm_head, qao.QuantLinear)


def test_names_of_the_hub_and_folders(root: Path, tmp_path: Path) -> None:
    path, commit = root / "int8-all", "a" * 40
    expected = torch.load(path / "expected.pt")
    repository = tmp_path / "cache" / "models--me--mine"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / commit).symlink_to(path)
    (tmp_path / "sub").symlink_to(path)
    hub = {"cache_dir": tmp_path / "cache", "local_files_only": True}
    for kind in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM):
        for model, name in (
            (kind.from_pretrained("me/mine", **hub), "me/mine"),
            (kind.from_pretrained(tmp_path, subfolder="sub"), str(tmp_path)),
        ):
            assert isinstance(model.lm_head, qao.QuantLinear) and model.name_or_path == name
            assert torch.equal(support.run(model, "transformers"), expected)


def test_key_mapping_renames_layers_in_the_configuration(tmp_path: Path) -> None:
    """A checkpoint of a model with other module names has them in its tensors and in config.json."""
    model = support.llama(128)
    qao.quantize_(model, qao.Int4WeightOnly())  # in qao's own format
    model.save_pretrained(tmp_path / "sub", variant="q4")
    expected = support.run(model, "transformers")
    file, config = tmp_path / "sub" / "model.q4.safetensors", tmp_path / "sub" / "config.json"
    tensors = {re.sub("^model", "old", name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt", "qao": "1"})
    config.write_text(config.read_text().replace('"model.layers', '"old.layers'))
    options: dict[str, Any] = {"subfolder": "sub", "variant": "q4"}
    for kind in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM):
        again = kind.from_pretrained(tmp_path, key_mapping={"^old": "model"}, **options)
        assert isinstance(again.model.layers[0].mlp.up_proj, qao.QuantLinear)
        assert torch.equal(support.run(again, "transformers"), expected)
    with pytest.raises(qao.checkpoints.CheckpointError, match="no file model.q5.safetensors"):
        kind.from_pretrained(tmp_path, key_mapping={"^old": "model"}, **options | {"variant": "q5"})


def test_an_adapter_brings_its_base_model(root: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    load = transformers.AutoModelForCausalLM.from_pretrained
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(load(root / "int8-all"), config, autocast_adapter_dtype=False).eval()
    adapted.base_model.model.config.name_or_path = str(root / "int8-all")
    adapted.save_pretrained(tmp_path)
    expected = support.run(adapted, "transformers")
    for kind in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM):
        model = kind.from_pretrained(tmp_path)
        assert isinstance(model.lm_head, qao.QuantLinear)
        assert torch.equal(support.run(model, "transformers"), expected)
