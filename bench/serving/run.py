"""Tokens per second of a serving engine on one checkpoint, with qao and with the engine's own kernels.

``python -m bench vllm`` and ``python -m bench sglang``, wherever the engine is installed. The contenders are separate
processes on the same GPUs, started together; each measurement alternates between them. Checkpoints have random weights
(checkpoints.py), so nothing is downloaded. A contender is "qao", "own" (the engine without qao), or one of the engine's
other backends, such as "marlin".
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any

import torch

from ..llama_model import PRESETS, head_dim
from ..meta import describe
from ..result_files import OF_ROWS, dated, earlier, join, write
from ..turns import Turns
from . import logprobs
from .checkpoints import BF16, LAYOUTS, OWN, SMALL, config_of
from .checkpoints import write as write_checkpoint
from .engine import Engine, EngineError, start_all
from .features import FEATURES, Feature

Row = dict[str, Any]


OWN_KERNELS, QAO, REFERENCE = "own", "qao", "bf16 of the same values"
BATCHES = (1, 8, 32, 64, 128, 256)
PREFILLS = ("1x2048", "8x2048", "32x512")
CHECKPOINTS = (*LAYOUTS, *OWN, BF16)
_TOKENS = 128  # of a prompt before decoding, and decoded tokens
_LONGEST = 4096
# What identifies a row, and the metadata that each row has for itself: the runs of a table take days.
_KEYS = ("engine", "model", "layers", "gpus", "checkpoint", "contender", "measure", "requests", "tokens", "feature")


def add_arguments(command: argparse.ArgumentParser, engine: str) -> None:
    command.add_argument("--model", choices=[*PRESETS, *SMALL], default="llama-3.1-8b")
    command.add_argument("--layers", type=int, metavar="N", help="instead of as many as the model has")
    command.add_argument("--checkpoints", nargs="+", choices=CHECKPOINTS, default=["w4a16"], metavar="NAME")
    contenders = (OWN_KERNELS, QAO, *(("marlin", "machete", "cutlass", "triton") if engine == "vllm" else ()))
    command.add_argument("--contenders", nargs="+", choices=contenders, default=[OWN_KERNELS, QAO], metavar="NAME")
    command.add_argument("--batches", nargs="*", type=int, default=list(BATCHES), metavar="B", help="requests at once")
    command.add_argument("--prefill", nargs="*", default=list(PREFILLS), metavar="BxT", help="prompts x tokens")
    command.add_argument("--reps", type=int, default=3, help="measurements of each cell and contender")
    command.add_argument("--gpus", type=int, default=1, help="tensor parallelism")
    command.add_argument("--reference", action="store_true", help="compare log-probabilities with those in bfloat16")
    if engine == "vllm":
        command.add_argument("--features", nargs="*", choices=FEATURES, metavar="NAME", help="run these, without times")
    command.add_argument(
        "--parallel", type=int, default=1, metavar="N", help="checkpoints or features at once, but for the timing"
    )
    command.add_argument(
        "--turns", type=Path, metavar="FILE", help="of several runs on one GPU: one measures while no engine starts"
    )
    command.add_argument("--folder", type=Path, help="where checkpoints are written and kept; default: a temporary one")
    command.add_argument("--logs", type=Path, default=Path("build/engines"), help="folder of the engines' output")
    command.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="more of the constructor's")
    command.add_argument("--add", nargs="+", type=Path, metavar="FILE", help="add these results to those in --out")
    command.add_argument("--budget", type=float, default=math.inf, metavar="S", help="start no checkpoint after this")
    command.set_defaults(device="cuda", engine=engine)


def run(arguments: argparse.Namespace, path: Path) -> None:
    """Measure, print one line per cell, and write the results after each of them."""
    import transformers

    _ = transformers.AutoConfig, transformers.AutoModelForCausalLM  # imported lazily, which threads must not do at once
    began = time.perf_counter()
    meta = describe(arguments.device)
    rows, writing = {_key(row): row for row in earlier(path, meta, OF_ROWS)}, Lock()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(arguments.parallel) as pool:
        folder = arguments.folder or Path(temporary)
        turns = Turns(arguments.turns or Path(temporary, "turns"))

        def measure(part: Callable[[], Iterator[Row]]) -> None:
            if time.perf_counter() - began > arguments.budget:
                print("no time left for a part", flush=True)
                return
            for row in map(partial(dated, meta), part()):
                with writing:  # a thread must not write over the rows of another
                    rows[_key(row)] = row
                    write({"meta": meta, "rows": list(rows.values())}, path)

        for _ in pool.map(measure, _parts(arguments, folder, turns)):
            pass
    write({"meta": meta, "rows": list(rows.values())}, path)  # also without rows


def _parts(arguments: argparse.Namespace, folder: Path, turns: Turns) -> list[Callable[[], Iterator[Row]]]:
    """The measurements: one per checkpoint, or per checkpoint and feature."""
    if getattr(arguments, "features", None):
        return [
            partial(_feature, arguments, folder, turns, checkpoint, name)
            for checkpoint in arguments.checkpoints
            for name in arguments.features
        ]
    return [partial(_measure, arguments, folder, turns, checkpoint) for checkpoint in arguments.checkpoints]


def add(arguments: argparse.Namespace, path: Path) -> None:
    """Add rows of the chosen model and checkpoints in the files ``--add`` to the results at ``path``."""

    def wanted(row: Row) -> bool:
        return row["model"] == arguments.model and row["checkpoint"] in arguments.checkpoints

    join(arguments.add, path, _key, wanted)


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in _KEYS)


def _about(arguments: argparse.Namespace, config: Any, checkpoint: str) -> Row:
    about = {"engine": arguments.engine, "model": arguments.model, "layers": config.num_hidden_layers}
    return about | {"gpus": arguments.gpus, "checkpoint": checkpoint}


def _start(
    arguments: argparse.Namespace, config: Any, paths: dict[str, Path], log: str, feature: Feature = FEATURES["plain"]
) -> tuple[dict[str, tuple[Engine, dict[str, Any]]], dict[str, str]]:
    """Start the contenders in ``paths`` on their checkpoints. ``log``: a file name with "{}" for the contender."""
    torch.cuda.empty_cache()  # of this process, which drew the weights
    arguments.logs.mkdir(parents=True, exist_ok=True)
    makers = {}
    for name, path in paths.items():
        options = _options(arguments, config, len(paths), name) | feature.options
        options["model_path" if arguments.engine == "sglang" else "model"] = str(path)
        file = arguments.logs / log.format(name).replace(" ", "_")
        makers[name] = partial(Engine, arguments.engine, options, qao=name == QAO, log=file, env=feature.env)
    return start_all(makers)


def _measure(arguments: argparse.Namespace, folder: Path, turns: Turns, checkpoint: str) -> Iterator[Row]:
    config = config_of(arguments.model, arguments.layers)
    about, written = _about(arguments, config, checkpoint), partial(write_checkpoint, folder, config, checkpoint)
    with turns.start():
        paths = dict.fromkeys(arguments.contenders, written(arguments.device))
        if arguments.reference and checkpoint != BF16:
            paths[REFERENCE] = written(arguments.device, dense=True)
        engines, errors = _start(arguments, config, paths, f"{checkpoint}-{{}}.log")
    for name, error in errors.items():
        print(f"{checkpoint:<14} {name:<10} {error}", flush=True)
    try:
        for name, (_, said) in engines.items():
            print(f"{checkpoint:<14} {name:<10} ready after {said['start_s']:.0f} s: {said.get('kernels')}", flush=True)
            kept = {key: value for key, value in said.items() if key not in ("kernels", "device")}
            kernels = ", ".join(f"{count} {kind}" for kind, count in said.get("kernels", {}).items())
            yield about | {"contender": name, "measure": "start", "kernels": kernels} | kept
        timed = {name: engine for name, (engine, _) in engines.items() if name != REFERENCE}
        with turns.measure():
            for row in chain(_compare(checkpoint, engines, config), _time(arguments, timed, config)):
                yield about | row
    except EngineError as error:
        print(f"{checkpoint:<14} {error}", flush=True)
    finally:
        for engine, _ in engines.values():
            engine.close()


def _feature(arguments: argparse.Namespace, folder: Path, turns: Turns, checkpoint: str, name: str) -> Iterator[Row]:
    """The answers with qao and with vLLM's own kernels, after the requests of a feature."""
    config, feature = config_of(arguments.model, arguments.layers), FEATURES[name]
    with turns.start():
        path = write_checkpoint(folder, config, checkpoint, arguments.device)
        paths = dict.fromkeys(arguments.contenders, path)
        engines, errors = _start(arguments, config, paths, f"{checkpoint}-{{}}-{name}.log", feature)
    prompts, answers = logprobs.prompts(config.vocab_size), {}
    with turns.measure():
        for contender, (engine, _) in engines.items():
            try:
                answers[contender] = feature.requests(engine, prompts, config, folder)
            except (EngineError, ValueError) as error:
                errors[contender] = str(error)
    for engine, _ in engines.values():
        engine.close()
    about = _about(arguments, config, checkpoint) | {"measure": "feature", "feature": name}
    for contender in arguments.contenders:
        row = about | {"contender": contender, "failed": errors.get(contender, "")}
        row |= {name: answers.get(contender, {}).get(name) for name in ("reload_s", "refit_s")}
        if contender != OWN_KERNELS and {contender, OWN_KERNELS} <= answers.keys():
            ours, theirs = answers[contender], answers[OWN_KERNELS]
            if feature.logprobs:
                row |= logprobs.distance(ours, theirs)._asdict()
            else:
                row["same_choice"] = logprobs.same_tokens(ours, theirs)
        shown = ("mean", "p99", "same_choice", "reload_s", "refit_s", "failed")
        said = {key: row[key] for key in shown if row.get(key)}
        print(f"{checkpoint:<14} {name:<22} {contender:<6} {said}", flush=True)
        yield row


def _options(arguments: argparse.Namespace, config: Any, contenders: int, name: str) -> dict[str, Any]:
    prompts = [tuple(map(int, cell.split("x"))) for cell in arguments.prefill]
    sizes = [count * length for count, length in prompts] + [b * (2 * _TOKENS + 1) for b in arguments.batches]
    tokens = 2 * max(sizes, default=_LONGEST) + 2 * _LONGEST
    share, most = 0.9 / (contenders * arguments.parallel), max(arguments.batches, default=1)
    if arguments.engine == "vllm":
        per_token = 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim(config) // arguments.gpus
        options = {
            "max_model_len": _LONGEST, "max_num_seqs": max(256, most), "gpu_memory_utilization": share,
            "kv_cache_memory_bytes": tokens * per_token, "enable_prefix_caching": False,
            "tensor_parallel_size": arguments.gpus,
        }  # fmt: skip
        if name not in (OWN_KERNELS, QAO, REFERENCE):
            options["kernel_config"] = {"linear_backend": name}
    else:
        options = {
            "context_length": _LONGEST, "max_running_requests": max(256, most), "mem_fraction_static": share,
            "max_total_tokens": tokens, "disable_radix_cache": True, "tp_size": arguments.gpus,
        }  # fmt: skip
    for key, value in arguments.options.items():
        options[key] = options.get(key, {}) | value if isinstance(value, dict) else value
    return options


# ---- measurements ----------------------------------------------------------------------------------------------------


def _time(arguments: argparse.Namespace, engines: dict[str, Engine], config: Any) -> Iterator[Row]:
    """Decoding: seconds of 128 tokens minus seconds of the first one. Prefill: seconds of the first token."""
    for requests in arguments.batches:
        prompts = logprobs.prompts(config.vocab_size, ((_TOKENS, requests),), seed=_TOKENS)
        times: dict[str, list[float]] = {name: [] for name in engines}
        for rep in range(arguments.reps + 1):
            for name, engine in engines.items():
                first = engine("generate", prompts=prompts, tokens=1)["seconds"]
                count = _TOKENS if rep else 4  # the first round warms up
                whole = engine("generate", prompts=prompts, tokens=count)["seconds"]
                if rep:
                    times[name].append((whole - first) / (_TOKENS - 1))
        yield from _rows("decode", requests, _TOKENS, requests, times)
    for cell in arguments.prefill:
        requests, tokens = map(int, cell.split("x"))
        prompts = logprobs.prompts(config.vocab_size, ((tokens, requests),), seed=tokens)
        times = {name: [] for name in engines}
        for rep in range(arguments.reps + 1):
            for name, engine in engines.items():
                seconds = engine("generate", prompts=prompts, tokens=1)["seconds"]
                if rep:
                    times[name].append(seconds)
        yield from _rows("prefill", requests, tokens, requests * tokens, times)


def _rows(measure: str, requests: int, tokens: int, per_call: int, times: dict[str, list[float]]) -> Iterator[Row]:
    base = median(times.get(OWN_KERNELS, [math.nan]))
    for name, seconds in times.items():
        middle = median(seconds)
        spread = (max(seconds) - min(seconds)) / middle
        row = {"contender": name, "measure": measure, "requests": requests, "tokens": tokens}
        row |= {"tokens_s": per_call / middle, "ms": middle * 1e3, "spread": spread}
        print(
            f"  {measure} {requests:>3} x {tokens:<5} {name:<8} {row['tokens_s']:>9.0f} tokens/s"
            f" {base / middle:5.2f} {row['ms']:9.3f} ms, spread {spread:.0%}",
            flush=True,
        )
        yield row


def _compare(checkpoint: str, engines: dict[str, tuple[Engine, dict[str, Any]]], config: Any) -> Iterator[Row]:
    """Distances of log-probabilities from the reference and from the engine's own kernels."""
    prompts = logprobs.prompts(config.vocab_size)
    answers = {
        name: engine("generate", prompts=prompts, tokens=4, logprobs=64) for name, (engine, _) in engines.items()
    }
    for name in engines:
        for base in (REFERENCE, OWN_KERNELS):
            if base in answers and name not in (base, REFERENCE):
                found = logprobs.distance(answers[name], answers[base])
                print(f"{checkpoint:<14} {name} against {base}: {_said(found)}", flush=True)
                row = {"contender": name, "measure": f"logprobs against {base}"}
                yield row | {"mean": found.mean, "p99": found.p99, "same_choice": found.same_choice}


def _said(found: logprobs.Distance) -> str:
    return f"log-probabilities differ by {found.mean:.4f} (p99 {found.p99:.3f}), {found.same_choice:.1%} same choices"
