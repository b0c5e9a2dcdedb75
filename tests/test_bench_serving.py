"""The benchmark of serving engines, with a stand-in for the engine: checkpoints, processes, results."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import qao
import torch

from bench import __main__ as bench_command
from bench.result_files import read
from bench.serving import checkpoints, features, logprobs, run, tables
from bench.serving.engine import Engine, EngineError
from bench.turns import Turns

pytest.importorskip("transformers")

# An "engine" with log-probabilities that depend on the prompt, and on qao's switch in the environment.
VLLM = """
import os, random
from types import SimpleNamespace as Of

__version__ = "0.0"
class SamplingParams:
    def __init__(self, **values):
        self.values = values

class LLM:
    def __init__(self, model, **options):
        self.options = options
        if "fail" in options:
            raise ValueError("an engine that fails")

    def generate(self, prompts, sampling, use_tqdm, **more):
        asked, shift = sampling.values, 0.0 if "QAO_DISABLE_VLLM" in os.environ else 0.25
        made = []
        for prompt in prompts:
            draw = random.Random(str(prompt["prompt_token_ids"]))
            first = {t: Of(logprob=draw.random() + shift) for t in range(asked["logprobs"] or 0)}
            out = Of(token_ids=list(range(asked["max_tokens"])), logprobs=[first] * asked["max_tokens"])
            made.append(Of(outputs=[out]))
        return made

    def apply_model(self, function):
        return [{"Kernel": 2}]

    def collective_rpc(self, name):
        return [{"peak_mib": 1.0, "device": "none"}]

    def sleep(self, level):
        pass

    def wake_up(self):
        pass
"""
ADAPTER = """
class LoRARequest:
    def __init__(self, name, number, path):
        pass
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    (folder / "vllm" / "lora").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text(VLLM)
    (folder / "vllm" / "lora" / "__init__.py").write_text("")
    (folder / "vllm" / "lora" / "request.py").write_text(ADAPTER)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    return tmp_path


def _run(folder: Path, *words: str) -> list[dict[str, Any]]:
    parser = bench_command.make_parser()
    small = ["--model", "small-llama", "--layers", "1", "--folder", str(folder), "--logs", str(folder / "logs")]
    arguments = parser.parse_args(["vllm", *small, *words])
    arguments.device = "cpu"
    run.run(arguments, folder / "vllm.csv")
    results = read(folder / "vllm.csv")
    assert tables.render_layouts(results)
    return list(results["rows"])


def test_times_and_distances(stand_in: Path) -> None:
    rows = _run(stand_in, "--batches", "1", "2", "--prefill", "2x16", "--reps", "1", "--reference")
    timed = {(row["contender"], row["measure"], row.get("requests")) for row in rows if row.get("tokens_s")}
    expected = {
        (name, what, n) for name in ("own", "qao") for what, n in (("decode", 1), ("decode", 2), ("prefill", 2))
    }
    assert timed == expected
    means = {(row["contender"], row["measure"]): row["mean"] for row in rows if "mean" in row}
    assert means == pytest.approx(
        {
            ("own", f"logprobs against {run.REFERENCE}"): 0.0,
            ("qao", f"logprobs against {run.REFERENCE}"): 0.25,
            ("qao", "logprobs against own"): 0.25,
        }
    )


def test_features(stand_in: Path) -> None:
    names = [name for name in features.FEATURES if name != "weights loaded again"]
    rows = _run(stand_in, "--features", *names, "--batches", "--prefill", "--parallel", "3")
    assert {(row["feature"], row["contender"]) for row in rows} == {(n, c) for n in names for c in ("own", "qao")}
    assert all(row["failed"] == "" for row in rows)


def test_a_measurement_is_alone(tmp_path: Path) -> None:
    one, other = Turns(tmp_path / "turns"), Turns(tmp_path / "turns")
    happened: list[str] = []

    def measure() -> None:
        with other.measure():
            happened.append("measured")

    thread = Thread(target=measure)
    with one.start(), other.start():  # both at once
        thread.start()
        thread.join(0.1)
        happened.append("started")
    thread.join(10)
    assert happened == ["started", "measured"]


def test_an_engine_that_fails(stand_in: Path) -> None:
    with pytest.raises(EngineError, match="ValueError: an engine that fails"):
        Engine("vllm", {"model": "", "fail": 1}, qao=True, log=stand_in / "log").ready()
    rows = _run(stand_in, "--options", '{"fail": true}', "--batches", "1", "--prefill")
    assert rows == []


@pytest.mark.parametrize("layout", checkpoints.LAYOUTS)
def test_a_layout_represents_what_it_says(layout: str, tmp_path: Path) -> None:
    """qao's reader of checkpoints finds the values of the dense model in every layout that it reads."""
    from qao.checkpoints import open_checkpoint
    from safetensors import safe_open

    config = checkpoints.config_of("small-llama", 1, hidden_size=256, intermediate_size=256, vocab_size=64, head_dim=64)
    path, dense = (checkpoints.write(tmp_path, config, layout, "cpu", dense=one) for one in (False, True))
    layer = open_checkpoint(path).layers["model.layers.0.self_attn.k_proj"]
    found = qao.QuantLinear.from_quantized(*layer.read(), scheme=layer.scheme).dequantize()
    with safe_open(dense / "layer-000.safetensors", "pt") as file:
        expected = file.get_tensor("model.layers.0.self_attn.k_proj.weight")
    torch.testing.assert_close(found.bfloat16(), expected, rtol=2**-7, atol=1e-6)


def test_distance() -> None:
    one = {"tokens": [[1, 2]], "logprobs": [[{1: -1.0, 2: -2.0}, {2: -1.0, 3: -1.5}]]}
    other = {"tokens": [[1, 3]], "logprobs": [[{1: -1.5, 2: -2.0}, {2: -1.0, 3: -1.0}]]}
    assert logprobs.distance(one, other).mean == pytest.approx(0.25)
    assert logprobs.distance(one, other).same_choice == 0.5
    assert logprobs.same_tokens(one, other) == 0.5
