"""Model requirements during loading by transformers: fixed dtypes, layers missing from the checkpoint."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qao
import saving_support as support
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from safetensors.torch import load_file, save_file  # noqa: E402

IDS = support.IDS
INT4 = qao.Int4WeightOnly(group_size=32)
V5 = int(transformers.__version__.partition(".")[0]) >= 5
SKIPS_MISMATCHES = V5 and "hf_quantizer.param_needs_quantization" in inspect.getsource(
    importlib.import_module("transformers.core_model_loading").set_param_for_module
)


# ---- dtypes that a model keeps ---------------------------------------------------------------------------------------


def t5() -> Any:
    """Outputs of ``wo`` are beyond 65504, as those of real T5 are."""
    sizes = {"vocab_size": 60, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 1, "num_heads": 4}
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
    with torch.no_grad():
        for block in (*model.encoder.block, *model.decoder.block):
            block.layer[-1].DenseReluDense.wo.weight.mul_(600)
    return model


WAYS: dict[str, Callable[[Path, Any], Any]] = {
    "qao.from_pretrained": lambda path, dtype: qao.from_pretrained(path),
    "their from_pretrained": lambda path, dtype: transformers.T5ForConditionalGeneration.from_pretrained(
        path, dtype=dtype
    ),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scheme", [qao.Int8WeightOnly(), INT4], ids=["compressed-tensors", "qao"])
@pytest.mark.filterwarnings("ignore:quantize_. these big weights")
def test_what_is_kept_in_float32_is_so_on_every_way(scheme: qao.Scheme, dtype: torch.dtype, tmp_path: Path) -> None:
    kind = transformers.T5ForConditionalGeneration
    t5().to(dtype).save_pretrained(tmp_path / "f")
    kept = torch.float32 if dtype == torch.float16 else dtype

    def check(model: Any) -> torch.Tensor:
        assert not any(module.training for module in model.modules())
        for stack in (model.encoder, model.decoder):
            dense = stack.block[0].layer[-1].DenseReluDense
            assert isinstance(dense.wo, qao.QuantLinear) and isinstance(dense.wi, qao.QuantLinear)
            assert dense.wo.weight.dtype == kept and dense.wi.weight.dtype == dtype
        large = torch.full((1, 128), 500.0, dtype=kept)
        assert model.encoder.block[0].layer[-1].DenseReluDense.wo(large).isfinite().all()
        with torch.no_grad():
            return model(input_ids=IDS, decoder_input_ids=IDS).logits

    loaded = kind.from_pretrained(tmp_path / "f", dtype=dtype, quantization_config=qao.QaoConfig(scheme))
    expected = check(loaded)
    later = kind.from_pretrained(tmp_path / "f", dtype=dtype)
    qao.quantize_(later, scheme)
    assert torch.equal(check(later), expected)
    for model in (loaded, later):
        model.save_pretrained(tmp_path / "q")
        for load in WAYS.values():
            assert torch.equal(check(load(tmp_path / "q", dtype)), expected)
    assert torch.equal(check(qao.from_pretrained(tmp_path / "f", scheme=scheme)), expected)
    qao.save(loaded, tmp_path / "s")
    empty = t5().to(dtype)
    qao.load(tmp_path / "s", empty)
    assert torch.equal(check(empty), expected)


# ---- layers that the checkpoint lacks --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("floats")
    support.llama(64).save_pretrained(path)
    return path


def fresh(names: str) -> Any:
    return pytest.warns(UserWarning, match=rf"the checkpoint does not hold {names}: new random numbers")


def check_head(head: nn.Module) -> None:
    assert type(head) is nn.Linear and all(parameter.requires_grad for parameter in head.parameters())


@pytest.mark.parametrize("scheme", [INT4, {"re:.*": INT4}])
@pytest.mark.filterwarnings("ignore:quantize_. these big weights")
def test_a_new_head_stays_in_float_and_can_be_trained(scheme: Any, floats: Path) -> None:
    kind = transformers.AutoModelForSequenceClassification
    with fresh("score"):
        model = kind.from_pretrained(floats, num_labels=33, quantization_config=qao.QaoConfig(scheme))
    check_head(model.score)
    assert isinstance(model.model.layers[0].mlp.up_proj, qao.QuantLinear)
    with fresh("score"):
        again = qao.from_pretrained(floats, scheme=scheme, auto_class="AutoModelForSequenceClassification")
    check_head(again.score)


def test_a_new_head_left_out_by_name_needs_no_warning(floats: Path) -> None:
    config = qao.QaoConfig(INT4, modules_to_not_convert=["score"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = transformers.AutoModelForSequenceClassification.from_pretrained(floats, quantization_config=config)
    check_head(model.score)


@pytest.mark.filterwarnings("ignore:quantize_. these big weights")
def test_new_parts_of_bert(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=90)).save_pretrained(tmp_path)
    with fresh("bert.pooler.dense, classifier"):
        model = transformers.BertForSequenceClassification.from_pretrained(
            tmp_path, quantization_config=qao.QaoConfig(INT4)
        )
    check_head(model.bert.pooler.dense)
    check_head(model.classifier)
    assert isinstance(model.bert.encoder.layer[0].output.dense, qao.QuantLinear)


@pytest.mark.skipif(not V5, reason="version 4 of transformers raises")
@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.filterwarnings("ignore:quantize_. these big weights")
def test_weights_of_another_size(embeddings: bool, floats: Path, tmp_path: Path) -> None:
    """A vocabulary that is larger than the checkpoint's."""
    config = qao.QaoConfig(INT4, embeddings=embeddings)
    load = transformers.AutoModelForCausalLM.from_pretrained
    path = floats
    if embeddings:
        path = tmp_path
        tied = transformers.LlamaConfig.from_pretrained(floats, tie_word_embeddings=True)
        transformers.LlamaForCausalLM(tied).save_pretrained(path)
    if not SKIPS_MISMATCHES:
        with pytest.raises(RuntimeError, match=r"size mismatch for .*: \[128, 64\] in the checkpoint, \[150, 64\]"):
            load(path, vocab_size=150, ignore_mismatched_sizes=True, quantization_config=config)
        return
    with fresh("lm_head"):
        model = load(path, vocab_size=150, ignore_mismatched_sizes=True, quantization_config=config)
    check_head(model.lm_head)
    assert model.lm_head.weight.shape == (150, 64) and type(model.get_input_embeddings()) is nn.Embedding
    assert isinstance(model.model.layers[0].mlp.up_proj, qao.QuantLinear)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(path, vocab_size=150, quantization_config=config)


def without(path: Path, ending: str) -> None:
    file = path / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if not name.endswith(ending)}
    save_file(kept, file, {"format": "pt"})


@pytest.mark.parametrize("quantized", [False, True])
def test_a_missing_bias_is_zero(quantized: bool, tmp_path: Path) -> None:
    model = support.llama(64)
    if quantized:
        qao.quantize_(model, INT4)
    model.save_pretrained(tmp_path)
    without(tmp_path, "q_proj.bias")
    config = {} if quantized else {"quantization_config": qao.QaoConfig(INT4)}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **config)
    for layer in loaded.model.layers:
        assert isinstance(layer.self_attn.q_proj, qao.QuantLinear)
        assert not layer.self_attn.q_proj.bias.any()


def test_a_quantized_layer_without_its_numbers_is_an_error(tmp_path: Path) -> None:
    model = support.llama(64)
    qao.quantize_(model, INT4)
    model.save_pretrained(tmp_path)
    without(tmp_path, "layers.1.mlp.up_proj.scales")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj: .*the checkpoint has no scales of it"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


# ---- what else transformers asks -------------------------------------------------------------------------------------


def test_dequantize_makes_a_float_model(floats: Path, tmp_path: Path) -> None:
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(floats, quantization_config=qao.QaoConfig(INT4)).dequantize()
    assert not any(isinstance(module, qao.QuantLinear) for module in model.modules())
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert not hasattr(again.config, "quantization_config")
    assert torch.equal(support.run(again, "transformers"), support.run(model, "transformers"))
    if transformers.__version__ < "5":
        return  # dequantize takes no dtype
    wide = load(floats, quantization_config=qao.QaoConfig(INT4)).dequantize(torch.float32)
    assert wide.lm_head.weight.dtype == torch.float32
    assert wide.half().lm_head.weight.dtype == torch.float16


@pytest.mark.skipif(not V5, reason="version 4 of transformers counts a byte a weight")
def test_device_map_counts_what_the_layers_will_take(floats: Path) -> None:
    from qao.integrations.huggingface.transformers import QaoQuantizer
    from transformers.integrations.accelerate import compute_module_sizes

    config = transformers.AutoConfig.from_pretrained(floats)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    quantizer = QaoQuantizer(qao.QaoConfig(INT4), pre_quantized=False)
    quantizer.preprocess_model(model, dtype=torch.bfloat16)
    counted = compute_module_sizes(model, quantizer)[0][""]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(floats, quantization_config=qao.QaoConfig(INT4))
    assert counted == sum(tensor.nbytes for tensor in (*loaded.parameters(), *loaded.buffers()))
