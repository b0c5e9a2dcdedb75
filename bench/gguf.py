"""GGUF files on the CPU: tokens per second of decoding and of a prompt, by qao and by llama.cpp.

``python -m bench gguf [FILE ...]``; without a file, that of the demo. qao runs them as ``qao generate
--compile`` does: ``from_pretrained``, ``generate()`` with a static cache and backend "qao". llama.cpp takes part if the
package llama-cpp-python is installed and runs the file (builds with AMX have crashed). Both have the same number of
threads and take turns.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import qao
import torch
from qao.checkpoints.gguf.file import open_gguf

from .language import demo_model
from .markdown import caption, table
from .meta import describe, warn_if_busy
from .result_files import earlier, write
from .timing import Call, ceilings, seconds_of

CONTEXT = 64  # tokens before those that are decoded
_FIRST = 8  # new tokens of the shorter call, which the time of the longer one is compared with
_ROUNDS = 5
_PEER = "llama_cpp"
_BACKEND = "qao"
_TRIAL = "import sys, llama_cpp; llama_cpp.Llama(sys.argv[1], n_ctx=64, verbose=False).eval([1] * 32)"


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("files", nargs="*", type=Path, metavar="FILE")
    command.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    command.add_argument("--steps", type=int, default=64, metavar="T", help="decoded tokens")
    command.add_argument("--prompt", type=int, default=512, metavar="T", help="tokens of the prompt")


@torch.inference_mode()
def run(arguments: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Measure, print one line per file and contender, and write the results after each file."""
    import transformers

    torch.set_num_threads(arguments.threads)
    meta = describe("cpu") | {"threads": arguments.threads, "transformers": transformers.__version__}
    meta |= {"context": CONTEXT, "prompt": arguments.prompt}
    if find_spec(_PEER):
        meta["llama_cpp"] = importlib.metadata.version("llama-cpp-python")
    warn_if_busy(meta)
    kept = {(row["file"], row["name"]): row for row in earlier(path, meta, but=("read_gb_s",))}
    meta["read_gb_s"] = ceilings("cpu")[0] / 1e9
    for file in arguments.files or [demo_model()]:
        for row in measure(file, arguments.threads, arguments.steps, arguments.prompt):
            print(f"{row['file']}, {row['name']}: {row['decode']:.1f} and {row['prefill']:.0f} tokens/s", flush=True)
            kept[row["file"], row["name"]] = row
        write({"meta": meta, "rows": list(kept.values())}, path)
    return {"meta": meta, "rows": list(kept.values())}


def measure(file: Path, threads: int, steps: int, prompt: int) -> list[dict[str, Any]]:
    """A row per contender. Decoding reads all tensors but a separate embedding."""
    tensors = open_gguf(file).tensors
    skipped = "token_embd.weight" if "output.weight" in tensors else ""
    read = sum(info.nbytes for name, info in tensors.items() if name != skipped)
    contenders = {"qao": _qao(file, steps, prompt)}
    if find_spec(_PEER) and llama_cpp_runs(file):
        contenders["llama.cpp"] = _llama_cpp(file, threads, steps, prompt)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(_ROUNDS):
        for name, (decode, prefill) in contenders.items():
            seconds[name].append((decode(), prefill()))
    rows = []
    for name, pairs in seconds.items():
        decoding, prefilling = (median(column) for column in zip(*pairs, strict=True))
        row = {"file": file.stem, "name": name, "mib": file.stat().st_size / 2**20, "read_mib": read / 2**20}
        rows.append(row | {"decode": steps / decoding, "prefill": prompt / prefilling})
    return rows


Times = tuple[Callable[[], float], Callable[[], float]]  # seconds of decoding, and of the prompt


def _seconds(call: Call) -> float:
    return seconds_of(call, 1, "cpu")


def _qao(file: Path, steps: int, prompt: int) -> Times:
    """Seconds of decoding are those by which a longer call takes longer than a shorter one."""
    from transformers import CompileConfig

    model = qao.from_pretrained(file)
    model.generation_config.eos_token_id = None
    config: Any = CompileConfig(backend=_BACKEND)
    config._compile_all_devices = True
    options = {"cache_implementation": "static", "compile_config": config, "do_sample": False, "pad_token_id": 0}
    ids, text = (torch.randint(100, 200, (1, count)) for count in (CONTEXT, prompt))

    def generate(tokens: int) -> None:
        model.generate(ids, max_new_tokens=tokens, **options)

    def decode() -> float:
        long = _seconds(partial(generate, _FIRST + steps))
        return long - _seconds(partial(generate, _FIRST))

    generate(_FIRST + steps)  # compiles for this cache, which serves both
    generate(_FIRST)
    return decode, lambda: _seconds(partial(model, text, logits_to_keep=1))


def llama_cpp_runs(file: Path) -> bool:
    """Whether llama.cpp evaluates a prompt of the file, in another process: a crash would end this one."""
    done = subprocess.run([sys.executable, "-c", _TRIAL, str(file)], capture_output=True)
    if done.returncode:
        print(f"llama.cpp is left out: it ends with {done.returncode} on {file.name}", flush=True)
    return done.returncode == 0


def _llama_cpp(file: Path, threads: int, steps: int, prompt: int) -> Times:
    from llama_cpp import Llama

    length = max(CONTEXT + steps, prompt) + 1
    model = Llama(str(file), n_ctx=length, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)

    def prefill(count: int) -> float:
        model.reset()
        return _seconds(partial(model.eval, torch.randint(100, 200, (count,)).tolist()))

    def decode() -> float:
        prefill(CONTEXT)
        return _seconds(lambda: [model.eval([token]) for token in range(100, 100 + steps)])

    decode()
    return decode, partial(prefill, prompt)


# ---- documents -------------------------------------------------------------------------------------------------------


def render(results: dict[str, Any]) -> str:
    """The Markdown of one results file."""
    meta, rows = results["meta"], results["rows"]
    cells = {(row["file"], row["name"]): row for row in rows}
    lines = []
    for file in dict.fromkeys(row["file"] for row in rows):
        ours, peer = (cells.get((file, name)) for name in ("qao", "llama.cpp"))
        assert ours is not None
        floor = meta["read_gb_s"] * 1e9 / (ours["read_mib"] * 2**20)
        line = [f"`{file}`", f"{ours['mib']:.0f}", f"{floor:.0f}"]
        for key in ("decode", "prefill"):
            line += [f"{ours[key]:.0f}"] + ([f"{peer[key]:.0f} ({ours[key] / peer[key]:.2f})"] if peer else ["—"])
        lines.append(line)
    about = f"{caption(meta)}; transformers {meta['transformers']}, llama-cpp-python {meta.get('llama_cpp', '—')}, "
    about += f"{meta['context']} tokens before the decoded ones, a prompt of {meta['prompt']}."
    header = ["file", "MiB", "limit of decoding", "decode", "llama.cpp (qao / llama.cpp)", "prompt"]
    return f"{about}\n\n{table([*header, 'llama.cpp (qao / llama.cpp)'], lines)}"
