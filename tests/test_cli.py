"""The command line in process: files equal to those of the library, exit codes, cleanup after errors."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from qao.checkpoints.shard_writer import ShardWriter
from qao.cli import main
from qao.diagnostics import doctor
from qao.nn.packed_module import PackedModule
from qao.quantization.report import Report, Row, table
from torch import Tensor

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")
safetensors_torch = pytest.importorskip("safetensors.torch")

COMMANDS = ["quantize", "convert", "inspect", "chat", "generate", "serve", "eval", "bench", "doctor"]
TEXT = "The quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "tied", tie_word_embeddings=True)


def save_llama(path: Path, **options: Any) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        **sizes, vocab_size=256, num_hidden_layers=2, bos_token_id=0, eos_token_id=1, dtype=torch.bfloat16, **options
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    save_tokenizer(path)
    return path


def save_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:254]
    tokenizer = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, **{c: i + 2 for i, c in enumerate(alphabet)}}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}: {% endfor %}"
    fast.save_pretrained(path)


def load(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()


def quantized_layers(model: torch.nn.Module) -> dict[str, dict[str, Tensor]]:
    return {
        name: {key: tensor for key, tensor in module.packed.tensors().items() if tensor is not None}
        for name, module in model.named_modules()
        if isinstance(module, PackedModule)
    }


def assert_same(path: Path, model: torch.nn.Module) -> None:
    """The file holds the layers of ``model`` bit for bit and all other tensors unchanged."""
    checkpoint = qao.checkpoints.open_checkpoint(path)
    expected = quantized_layers(model)
    assert expected and checkpoint.layers.keys() == expected.keys()
    for name, tensors in expected.items():
        packed = checkpoint.layers[name].pack()
        assert packed.keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert packed[key].dtype == tensor.dtype and torch.equal(packed[key], tensor), f"{name}.{key}"
    state = model.state_dict()
    assert checkpoint.others
    for name in checkpoint.others:
        assert checkpoint.shape_dtype(name)[1] == state[name].dtype and torch.equal(
            checkpoint.tensor(name), state[name]
        )


def stderr_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if not line.startswith("qao: warning:")]
    assert captured.out == "" and len(lines) == 1 and lines[0].startswith("qao: error: ")
    return lines[0]


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert f"\nexamples:\n  qao {command}" in text and "130  stopped with Ctrl-C" in text
    assert main(["--help"]) == 0
    assert all(f"\n    {command} " in text for text in [capsys.readouterr().out] for command in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"qao {qao.__version__}\n"


@pytest.mark.parametrize(
    ("options", "scheme", "format"),
    [
        (["--scheme", "int4", "--group-size", "32"], qao.Int4WeightOnly(32), "qao"),  # zero points that are not whole
        (
            ["--scheme", "int4", "--group-size", "32", "--set", "whole_zeros=true"],
            qao.Int4WeightOnly(32, whole_zeros=True),
            "compressed-tensors",
        ),
        (["--scheme", "int4", "--symmetric"], qao.Int4WeightOnly(symmetric=True), "qao"),  # 128 divides no K
        (["--scheme", "int8", "--to", "qao", "--set", "clip_search=false"], qao.Int8WeightOnly(False), "qao"),
        (["--scheme", "fp8_fp8"], qao.Float8DynamicActivationFloat8Weight(), "compressed-tensors"),
        (
            ["--scheme", "int8_int4", "--set", "symmetric_activations=False", "--to", "qao"],
            qao.Int8DynamicActivationInt4Weight(symmetric_activations=False),
            "qao",
        ),
        (["--scheme", "fp8", "--granularity", "block"], qao.Float8WeightOnly("block"), "compressed-tensors"),
    ],
)
def test_quantize_writes_what_the_library_makes(
    llama: Path, tmp_path: Path, options: list[str], scheme: Any, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["quantize", str(llama), str(out), *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    model = load(llama)
    expected = qao.quantize_(model, scheme)
    assert_same(out, model)
    assert report["format"] == format == qao.checkpoints.open_checkpoint(out).format
    errors = [row.relative_error for row in expected.rows]
    assert [row["relative_error"] for row in report["rows"]] == errors and None not in errors
    assert {file.name for file in llama.iterdir()} == {file.name for file in out.iterdir()}
    ids = torch.arange(5, 25)[None]
    assert torch.equal(qao.from_pretrained(out)(ids).logits, model(ids).logits)


def test_quantize_in_another_dtype_and_in_shards(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--scheme", "int4", "--group-size", "32", "--dtype", "float16", "--shard-size", "5e-5"]
    assert (
        main(["quantize", str(llama), str(out), *options, "--exclude", "lm_head", "--exclude", r"re:.*\.v_proj"]) == 0
    )
    model = load(llama).half()
    left = {"lm_head": None, r"re:.*\.v_proj": None}
    qao.quantize_(model, {**left, "re:.*": qao.Int4WeightOnly(32)})
    assert_same(out, model)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in out.glob("*.safetensors"))
    assert len(files) > 2 and files == sorted(set(index["weight_map"].values()))
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"


def test_quantize_a_tied_embedding(tied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--embeddings"]):
        out = tmp_path / f"out{len(options)}"
        capsys.readouterr()
        assert main(["quantize", str(tied), str(out), "--scheme", "int4", *options, "--quiet"]) == 0
        captured = capsys.readouterr()
        assert ("--embeddings quantizes both" in captured.out) is not bool(options)
        assert "embeddings=True" not in captured.out + captured.err and captured.err == ""
        model = load(tied)
        qao.quantize_(model, qao.Int4WeightOnly(), embeddings=bool(options))
        assert_same(out, model)
    names = safetensors_torch.load_file(out / "model.safetensors").keys()
    assert len([name for name in names if name.endswith("qweight")]) == 15  # that of head and embedding once


def test_quantize_gpt2_whose_weights_are_transposed(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=96, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    assert main(["quantize", str(tmp_path / "gpt2"), str(tmp_path / "out"), "--scheme", "int8", "--quiet"]) == 0
    model = load(tmp_path / "gpt2")
    qao.quantize_(model, qao.Int8WeightOnly())
    assert_same(tmp_path / "out", model)
    assert main(["inspect", str(tmp_path / "out"), "--against", str(tmp_path / "gpt2"), "--json"]) == 0


def test_quantize_a_file_without_config(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {"a.up.weight": torch.randn(32, 64), "a.up.bias": torch.randn(32), "embed.weight": torch.randn(9, 64)}
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors")
    assert main(["quantize", str(tmp_path / "model.safetensors"), str(tmp_path / "out"), "--scheme", "int8"]) == 0
    checkpoint = qao.checkpoints.open_checkpoint(tmp_path / "out")
    packed = qao.Int8WeightOnly().quantize(tensors["a.up.weight"])
    assert torch.equal(checkpoint.layers["a.up"].pack()["qweight"], packed.qweight)
    assert set(checkpoint.others) == {"a.up.bias", "embed.weight"}


def test_convert_there_and_back(llama: Path, tmp_path: Path) -> None:
    model = load(llama)
    qao.quantize_(model, qao.Int4WeightOnly(32, whole_zeros=True))
    options = ["--scheme", "int4", "--group-size", "32", "--set", "whole_zeros=true"]
    assert main(["quantize", str(llama), str(tmp_path / "a"), *options]) == 0
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "qao"]) == 0
    assert main(["convert", str(tmp_path / "b"), str(tmp_path / "c")]) == 0
    for name, format in (("b", "qao"), ("c", "compressed-tensors")):
        assert qao.checkpoints.open_checkpoint(tmp_path / name).format == format
        assert_same(tmp_path / name, model)
    a, c = (safetensors_torch.load_file(tmp_path / name / "model.safetensors") for name in "ac")
    assert a.keys() == c.keys() and all(torch.equal(a[name], c[name]) for name in a)


def test_inspect(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    main(["quantize", str(llama), str(out), "--scheme", "int4", "--group-size", "32", "--exclude", "model.layers.1"])
    capsys.readouterr()
    assert main(["inspect", str(out), "--against", str(llama), "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    layer = {one["name"]: one for one in report["layers"]}["model.layers.0.mlp.up_proj"]
    assert layer["bits_per_weight"] == 4 + 32 / 32  # a scale and a zero point of 16 bits for 32 columns
    model = load(llama)
    weight = model.model.layers[0].mlp.up_proj.weight.double()
    qao.quantize_(model, qao.Int4WeightOnly(32))
    error = (weight - model.model.layers[0].mlp.up_proj.dequantize(torch.float64)).norm() / weight.norm()
    assert layer["relative_error"] == pytest.approx(error.item(), rel=1e-6)
    assert any("model.layers.#.mlp.up_proj differs between blocks" in text for text in report["odd"])
    assert "PROBLEM" not in captured.err and report["problems"] == []

    file = out / "model.safetensors"
    tensors = safetensors_torch.load_file(file)
    tensors["model.norm.weight"][3] = float("nan")
    safetensors_torch.save_file(tensors, file)
    assert main(["inspect", str(out)]) == 0
    assert main(["inspect", str(out), "--check"]) == 1
    assert "PROBLEM: model.norm.weight holds NaN or Inf" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["{llama}", "{out}", "--scheme", "int5"], 2, "invalid choice: 'int5'"),
        (
            ["{llama}", "{out}", "--scheme", "int8", "--group-size", "32"],
            2,
            "int8 has no --group-size; it has --set clip_search=VALUE",
        ),
        (["{llama}", "{out}", "--scheme", "int4", "--group-size", "33"], 2, "group_size must be 32, 64, 128, 256"),
        (["{llama}", "{out}", "--scheme", "int4", "--set", "clip_search"], 2, "must be FIELD=VALUE"),
        (["{llama}", "{out}", "--scheme", "int4", "--device", "gpu"], 2, "no such device"),
        (["{llama}", "{out}", "--scheme", "int4", "--shard-size", "-1"], 2, "must be positive"),
        (["{llama}", "{out}", "--scheme", "int4", "--exclude", "head"], 1, "no module of the model matches 'head'"),
        (["{llama}", "{out}", "--scheme", "int4", "--exclude", "lm_haed"], 1, "'lm_haed'; did you mean 'lm_head'?"),
        (["{llama}", "{out}", "--scheme", "int4", "--exclude", "k_proj"], 1, r"or 're:.*\.k_proj' for every k_proj"),
        (["{llama}", "{out}", "--scheme", "int4", "--exclude", "re:.*"], 1, "no layers to quantize"),
        (["{llama}", "{out}", "--scheme", "int4", "--to", "compressed-tensors"], 1, "cannot hold this"),
        (["{out}", "{out}2", "--scheme", "int4"], 1, "no such file or directory"),
        (["{llama}", "{llama}", "--scheme", "int8"], 1, "exists; choose another name"),
        (["{llama}", "{llama}", "--scheme", "int8", "--force"], 1, "is the input"),
        (["{llama}", "{tmp}", "--scheme", "int8", "--force"], 1, "holds no model"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(
    llama: Path, tmp_path: Path, arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dear.txt").write_text("x")
    before = sorted(llama.iterdir())
    names = {"llama": llama, "out": tmp_path / "out", "tmp": tmp_path}
    assert main(["quantize", *(text.format(**names) for text in arguments)]) == status
    assert message in stderr_line(capsys)
    assert [file.name for file in tmp_path.iterdir()] == ["dear.txt"] and sorted(llama.iterdir()) == before


@pytest.mark.parametrize("command", ["chat", "generate", "eval", "quantize"])
def test_a_config_that_is_missing_or_damaged(
    command: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    more = {"generate": ["Hello"], "quantize": [str(tmp_path / "out"), "--scheme", "int8"]}.get(command, [])
    shutil.copytree(llama, model)
    (model / "config.json").write_text("{")
    assert main([command, str(model), *more]) == 1
    assert "config.json: cannot be read as JSON" in stderr_line(capsys)
    (model / "config.json").unlink()
    assert main([command, str(model), *more]) == 1
    assert "has no config.json" in stderr_line(capsys)


def test_a_file_that_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, message in (("notes.txt", "is not a checkpoint"), ("model.bin", "is a pickle, which can execute")):
        (tmp_path / name).write_text("x")
        assert main(["inspect", str(tmp_path / name)]) == 1
        assert f"{name} {message}" in stderr_line(capsys)


def test_a_float_model_has_no_errors_to_compare(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(llama), "--against", str(llama)]) == 1
    assert "no quantized layers to compare" in stderr_line(capsys)


def test_a_config_of_another_model(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    config = json.loads((llama / "config.json").read_text())
    for change, message in (
        ({"num_hidden_layers": 3}, "lacks the weights of 7 layers"),
        ({"intermediate_size": 128}, "the config says float of shape [128, 64]"),
        ({"architectures": ["NoSuchModel"]}, "has no NoSuchModel"),
        ({"model_type": "no_such_type"}, "config.json: transformers cannot make a no_such_type model from it"),
    ):
        (model / "config.json").write_text(json.dumps({**config, **change}))
        assert main(["quantize", str(model), str(tmp_path / "out"), "--scheme", "int8"]) == 1
        assert message in stderr_line(capsys)
    (model / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes()[:-100])
    assert main(["quantize", str(model), str(tmp_path / "out"), "--scheme", "int8"]) == 1
    assert "not a readable safetensors file" in stderr_line(capsys)
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


@pytest.fixture
def third_layer(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BaseException]]:
    """What the third write of a shard raises."""
    raised: list[BaseException] = []
    original, calls = ShardWriter.add, []

    def add(self: ShardWriter, tensors: Any) -> None:
        calls.append(None)
        if len(calls) == 3:
            raise raised[0]
        original(self, tensors)

    monkeypatch.setattr(ShardWriter, "add", add)
    yield raised


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (KeyboardInterrupt(), 130, "qao: stopped\n"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "/out: No space left on device; partial output"),
    ],
)
def test_what_is_stopped_leaves_the_old_output(
    llama: Path,
    tmp_path: Path,
    third_layer: list[BaseException],
    error: BaseException,
    status: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    third_layer.append(error)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    assert main(["quantize", str(llama), str(tmp_path / "out"), "--scheme", "int8", "--force"]) == status
    captured = capsys.readouterr()
    assert captured.out == "" and text in captured.err and captured.err.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["config.json"]


def test_force_replaces_a_model(llama: Path, tmp_path: Path) -> None:
    for scheme in ("int8", "fp8"):
        assert main(["quantize", str(llama), str(tmp_path / "out"), "--scheme", scheme, "--force"]) == 0
    layers = qao.checkpoints.open_checkpoint(tmp_path / "out").layers.values()
    assert {layer.scheme.word for layer in layers} == {"fp8"}
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [(signal.SIGINT, 130, "qao: stopped\n"), (signal.SIGTERM, 143, "qao: ended by SIGTERM\n")],
)
def test_signals(number: int, status: int, said: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {f"{i}.weight": torch.randn(1024, 1024) for i in range(24)}
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors")
    command = [sys.executable, "-m", "qao", "quantize", str(tmp_path / "model.safetensors"), str(tmp_path / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--scheme", "int4"],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("out.tmp-*/.part-*")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    _, text = process.communicate(timeout=60)
    assert process.returncode == status and text.endswith(said) and "Traceback" not in text
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def _pressed_in_cpp(*_: Any) -> None:
    """The error that torch raises if Ctrl-C arrives while C++ calls Python."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    except KeyboardInterrupt:
        pass
    raise ValueError("could not determine the shape of an object")


def test_ctrl_c_that_came_back_as_another_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(qao.cli.inspect, "run", _pressed_in_cpp)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        assert main(["inspect", str(tmp_path)]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "qao: stopped\n"


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no such file"):
        main(["inspect", str(tmp_path / "none"), "--debug"])


def test_shards_are_read_by_safetensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "odd": torch.arange(3, dtype=torch.uint8),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "flag": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).half(),
        "long": torch.arange(7),
        "e4m3": torch.randn(4, 6).to(torch.float8_e4m3fn),
        "transposed": torch.randn(4, 6).bfloat16().t(),
        "double": torch.randn(3).double(),
    }
    with ShardWriter(tmp_path, {"format": "pt"}, 1 << 30) as writer:
        for name, tensor in tensors.items():
            writer.add({name: tensor})
        with pytest.raises(ValueError, match="odd: two tensors have this name"):
            writer.add({"odd": tensors["odd"]})
    loaded = safetensors_torch.load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name].double(), tensor.double())
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_generate_and_chat(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["quantize", str(llama), str(out), "--scheme", "int8"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    model = qao.from_pretrained(out)
    for path in (out, llama):
        model = qao.from_pretrained(out) if path is out else load(llama)
        ids = tokenizer("Hello", return_tensors="pt")["input_ids"]
        made = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        capsys.readouterr()
        options = ["--max-new-tokens", "12", "--temperature", "0", "--json", "--no-compile"]
        assert main(["generate", str(path), "Hello", *options]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["text"] == tokenizer.decode(made, skip_special_tokens=True) and report["tokens"] == len(made)

    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n/reset\nHello\n\n/exit\nHello\n"))
    assert main(["chat", str(out), "--max-new-tokens", "12", "--temperature", "0", "--no-compile"]) == 0
    captured = capsys.readouterr()
    half = len(captured.out) // 2
    assert half > 0 and captured.out[:half] == captured.out[half:]  # /reset forgets, /exit ends
    assert captured.err.count("[12 tokens, first after") == 2 and "new conversation" in captured.err
    assert main(["generate", str(out), "x", "--max-new-tokens", "0"]) == 2


def test_compiled_answers(llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    backends: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda call, **options: backends.append(options["backend"]) or call)
    reports = []
    for option in ("--no-compile", "--compile"):
        options = ["--max-new-tokens", "12", "--temperature", "0", "--json", option]
        assert main(["generate", str(llama), "Hello", *options]) == 0
        captured = capsys.readouterr()
        reports.append({name: json.loads(captured.out)[name] for name in ("text", "tokens", "prompt_tokens")})
    assert reports[0] == reports[1] and reports[0]["tokens"] == 12
    assert backends == ["qao"] and re.search(r"compiling the decoding step.*\nqao: compiled in \d+ s\n", captured.err)

    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nAnd?\n"))
    assert main(["chat", str(llama), "--max-new-tokens", "3", "--compile"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("compiled in") == 1 and captured.err.count("[3 tokens, first after") == 2

    def fail(call: Any, **options: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", fail)
    assert main(["generate", str(llama), "Hello", "--compile"]) == 1
    assert "LlamaForCausalLM cannot be compiled; use --no-compile: RuntimeError: no compiler" in capsys.readouterr().err


def test_serve_is_transformers_server(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = pytest.importorskip("transformers.cli.transformers")

    class UsageError(Exception):
        pass

    calls: list[list[str]] = []
    errors = [UsageError("No such option '--fast'.\n\nMany lines"), ImportError("no fastapi"), None]

    def app(arguments: list[str], **options: Any) -> None:
        calls.append(arguments)
        if (error := errors[len(calls) - 1]) is not None:
            raise error

    monkeypatch.setattr(commands, "app", app)
    assert main(["serve", str(llama), "--fast"]) == 2
    assert capsys.readouterr().err == "qao: error: No such option '--fast'. (see transformers serve --help)\n"
    assert main(["serve", str(llama)]) == 1
    assert 'pip install "transformers[serving]>=5"' in capsys.readouterr().err
    assert main(["serve", str(llama), "--port", "8001"]) == 0
    assert calls == [["serve", str(llama), *more] for more in (["--fast"], [], ["--port", "8001"])]
    assert main(["serve", str(llama / "none")]) == 1


def test_eval(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from qao.diagnostics import perplexity as evaluate

    (tmp_path / "text.txt").write_text(TEXT)
    options = ["--text", str(tmp_path / "text.txt"), "--windows", "3", "--window", "50", "--json", "--device", "cpu"]
    assert main(["eval", str(llama), "--scheme", "int4", "--group-size", "32", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    model, tokenizer = load(llama), transformers.AutoTokenizer.from_pretrained(llama)
    ids = [tokenizer.bos_token_id, *tokenizer(TEXT, add_special_tokens=False)["input_ids"][:150]]
    before = evaluate.perplexity(model, ids, window=50, num_bytes=150)
    qao.quantize_(model, qao.Int4WeightOnly(32))
    after = evaluate.perplexity(model, ids, window=50, num_bytes=150)
    assert [one["perplexity"] for one in report["models"]] == [after.perplexity, before.perplexity]
    assert [one["bits_per_byte"] for one in report["models"]] == [after.bits_per_byte, before.bits_per_byte]
    assert report["difference"] == vars(evaluate.compare(after, before))
    assert main(["eval", str(llama), "--symmetric"]) == 2


def test_bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qao.cli.timing.ROUND_SECONDS", 1e-4)
    monkeypatch.setattr("qao.cli.timing.CPU_BYTES", 1 << 16)
    assert main(["bench", "--layer", "64x96", "--tokens", "1,3", "--scheme", "int4", "--json"]) == 0
    times = json.loads(capsys.readouterr().out)["times"]
    assert [(one["m"], one["name"]) for one in times] == [(m, name) for m in (1, 3) for name in ("F.linear", "int4")]
    assert all(one["seconds"] > 0 and (one["n"], one["k"]) == (64, 96) for one in times)
    assert main(["bench", "--layer", "64x96", "--tokens", "1,3", "--scheme", "int4"]) == 0
    _, header, _, linear, int4 = capsys.readouterr().out.splitlines()
    assert header.split() == ["layer", "scheme", "M=1", "M=3"] and linear.split()[1] == "F.linear"
    assert int4.split()[:2] == ["64x96", "int4"] and int4.count("x)") == 2
    assert main(["bench"]) == 2 and main(["bench", "--layer", "64"]) == 2


def test_facts_and_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out.startswith(f"qao          {qao.__version__}, ")
    monkeypatch.setattr(doctor, "checks", lambda: [doctor.Check("good", None)])
    monkeypatch.setattr("qao.cli.timing.ROUND_SECONDS", 1e-4)
    monkeypatch.setattr("qao.cli.doctor._SIZE", 64)
    assert main(["doctor", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["failed"] == 0
    on_cpu = [speed for speed in result["speeds"] if speed["device"] == "cpu"]
    assert [speed["m"] for speed in on_cpu] == [1, 256]
    for speed in on_cpu:
        assert set(speed["ratios"]) == set(qao.schemes.SCHEMES) and min(speed["ratios"].values()) > 0
        assert speed["ratios"][speed["fastest"]] == max(speed["ratios"].values())
    monkeypatch.setattr(doctor, "checks", lambda: [doctor.Check("good", None), doctor.Check("bad", "is off by 1")])
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith("ok    good\nFAIL  bad  is off by 1\n\n1 of 2 checks passed\n")


def test_all_other_files_arrive(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    for name in ("2_Dense/model.safetensors", "vision-lora/adapter_model.safetensors", "adapter_model.safetensors"):
        (model / name).parent.mkdir(exist_ok=True)
        safetensors_torch.save_file({"linear.weight": torch.ones(4, 4)}, model / name)
    others = ("2_Dense/config.json", "3_Head/pytorch_model.bin", "modeling_own.py", "preprocessor_config.json")
    others += (".gitattributes", "chat_templates/tool.jinja", "training_args.bin", "original/params.json")
    twice = ("pytorch_model.bin", "model.fp16.safetensors", "onnx/model.onnx", "original/consolidated.00.pth")
    for name in (*others, *twice, ".git/HEAD", ".cache/huggingface/x"):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "more.txt").write_text("x")
    (model / "linked").symlink_to(tmp_path / "elsewhere")
    (model / "back").symlink_to(model)
    (model / "broken.txt").symlink_to(tmp_path / "none")
    assert main(["quantize", str(model), str(model / "out"), "--scheme", "int8"]) == 0  # OUT inside MODEL
    capsys.readouterr()
    assert main(["quantize", str(model), str(tmp_path / "out"), "--scheme", "int8", "--exclude", "lm_head"]) == 0
    warned = capsys.readouterr().err
    arrived = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*") if file.is_file()}
    there = {str(file.relative_to(model)) for file in model.rglob("*") if file.is_file()}
    missing = {name for name in there - arrived if not name.startswith(("out/", "back/", ".git/", ".cache/"))}
    assert missing == set(twice) and all(name in warned for name in (*twice, "broken.txt"))
    assert (tmp_path / "out" / "linked" / "more.txt").read_text() == "x"
    assert not [name for name in arrived if name.startswith("out/out")]
    copied = safetensors_torch.load_file(tmp_path / "out" / "2_Dense" / "model.safetensors")
    assert torch.equal(copied["linear.weight"], torch.ones(4, 4))
    qao.from_pretrained(tmp_path / "out")


def test_for_readers_without_qao(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["quantize", str(llama), str(tmp_path / "vllm"), "--scheme", "int4", "--group-size", "32"]
    assert main([*base, "--for", "vllm"]) == 0
    assert "compressed-tensors, which vLLM, transformers and qao load" in capsys.readouterr().out
    checkpoint = qao.checkpoints.open_checkpoint(tmp_path / "vllm")
    assert checkpoint.format == "compressed-tensors"
    model = load(llama)
    qao.quantize_(model, qao.Int4WeightOnly(32, whole_zeros=True))
    assert_same(tmp_path / "vllm", model)
    capsys.readouterr()  # the progress bar of transformers, unless an earlier command has turned it off
    # Groups of 128 are shortened for rows of 64 and 96 columns, which compressed-tensors cannot express.
    for options, message in (
        (["--scheme", "int4", "--group-size", "32", "--for", "transformers"], "add --symmetric"),
        (["--scheme", "int8_int4", "--group-size", "32", "--for", "vllm"], "add --symmetric"),
        (["--scheme", "fp8_int4", "--group-size", "128", "--for", "vllm"], "add --symmetric"),
        (["--scheme", "int4", "--group-size", "32", "--for", "vllm", "--to", "qao"], "cannot load this layout"),
    ):
        assert main(["quantize", str(llama), str(tmp_path / "out"), *options]) != 0
        assert message in stderr_line(capsys) and not (tmp_path / "out").exists()
    assert main([*base[:2], str(tmp_path / "own"), *base[3:]]) == 0
    captured = capsys.readouterr()
    assert "qao: warning: written in qao's own layout" in captured.err and "--for vllm" in captured.err
    assert "qao's layout, which vLLM and transformers load if qao is installed" in captured.out
    assert main(["convert", str(tmp_path / "own"), str(tmp_path / "again")]) == 0
    assert "are not integers" in capsys.readouterr().err
    assert qao.checkpoints.open_checkpoint(tmp_path / "again").format == "qao"
    assert main(["convert", str(tmp_path / "own"), str(tmp_path / "no"), "--for", "vllm"]) == 1
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("word", "own"),
    [("nf4", "int4"), ("bnb-4bit", "int4"), ("q4_k_m", "int4"), ("w4a16", "int4"), ("AWQ", "int4"), ("gptq", "int4")]
    + [("fp8_dynamic", "fp8_fp8"), ("8bit", "int8"), ("W8A8", "int8_int8"), ("mxfp4", "fp4")],
)
def test_words_of_others(word: str, own: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "model", "out", "--scheme", word]) == 2
    assert f"the equivalent in qao is {own} " in stderr_line(capsys)
    name = type(qao.schemes.SCHEMES[own]()).__name__
    with pytest.raises(TypeError, match=rf"the equivalent in qao is qao\.{name}\("):
        qao.quantize_(torch.nn.Sequential(torch.nn.Linear(4, 4)), word)  # type: ignore[arg-type]


def test_configs_of_others() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    for config, name in (
        (transformers.BitsAndBytesConfig(load_in_4bit=True), "Int4WeightOnly"),
        (transformers.BitsAndBytesConfig(load_in_8bit=True), "Int8WeightOnly"),
        (transformers.GPTQConfig(bits=4), "Int4WeightOnly"),
        (transformers.GPTQConfig(bits=8), "Int8WeightOnly"),
        (transformers.AwqConfig(), "Int4WeightOnly"),
        (transformers.QuantoConfig(weights="int4"), "Int4WeightOnly"),
        (transformers.QuantoConfig(weights="float8"), "Float8WeightOnly"),
        (transformers.QuantoConfig(weights="int8", activations="int8"), "Int8DynamicActivationInt8Weight"),
        (transformers.EetqConfig("int8"), "Int8WeightOnly"),
    ):
        for call in (
            lambda: qao.quantize_(model, config),  # noqa: B023
            lambda: qao.QaoConfig(config),  # noqa: B023
            lambda: qao.from_pretrained("a/b", quantization_config=config),  # noqa: B023
        ):
            with pytest.raises(TypeError, match=rf"the equivalent in qao is qao\.{name}\(\)") as error:
                call()
            assert len(str(error.value)) < 300  # some configs have long texts


def test_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["generate", "x"], ["chat"], ["eval"], ["inspect"], ["quantize", "out", "--scheme", "int8"]):
        assert main([command[0], str(tmp_path / "none"), *command[1:]]) == 1
        assert stderr_line(capsys) == f"qao: error: {tmp_path / 'none'}: no such file or directory"


def test_an_output_that_cannot_be_written(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    assert main(["quantize", str(llama), str(tmp_path / "file" / "out"), "--scheme", "int8"]) == 1
    assert f"{tmp_path / 'file' / 'out'}: cannot be written: Not a directory" in stderr_line(capsys)


def test_tables_fit_the_width() -> None:

    rows = [
        (f"model.layers.{i}.self_attn.q_proj", "64x64", "int8", "its weight is also that of others") for i in (1, 2)
    ]
    for width in (50, 60, 80, 200):
        lines = table(("layer", "shape", "scheme", "kernel"), rows, width)
        assert max(map(len, lines)) <= width
        text = " ".join(" ".join(lines).split())
        assert text.count("q_proj") == 2 and set(lines[1]) == {"-"}
        assert "".join(text.split()).count("others") == 2
    assert table(("a", "b"), [("x", "y")], 80) == ["a  b", "----", "x  y"]
    assert table(("a", "b", "c"), [("x", "-", "z"), ("-", "", "-")], 80) == ["a  c", "----", "x  z", "-  -"]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
@pytest.mark.parametrize("calibrated", [False, True])
def test_reports_fit_every_width(width: int, calibrated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost but beginnings of names, and at 80 columns a report is a table."""
    rows = [
        Row(
            *(f"model.layers.{i}.self_attn.q_proj", (576, 576), "quantized", "int4 g128 asymmetric"),
            *("shares its weight with others", 2**22, 2**20, 0.1, "avx2 vpmaddubsw / avx2 vfmadd231ps"),
            output_error=0.03 + i / 100 if calibrated else None,
            output_error_nearest=0.06 + i / 100 if calibrated else None,
        )
        for i in range(2)
    ]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    lines = str(Report(1000, 900, rows)).splitlines()
    end = next(i for i, line in enumerate(lines) if line.startswith("2 of 2 layers quantized"))
    text = "".join("".join(lines[:end]).split())
    assert max(map(len, lines[:end])) <= width
    assert text.count("q_proj") == 2
    for cell in ("576x576", "4.00", "1.00", *(("0.0300", "0.0600", "0.0400", "0.0700") if calibrated else ("0.1000",))):
        assert cell in text
    for word in ("int4", "g128", "asymmetric", "avx2", "vpmaddubsw", "others"):
        assert text.count(word) >= 2
    assert lines[0].startswith("layer") or width < (100 if calibrated else 80)
