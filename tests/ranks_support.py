"""Cases that run in several processes: a worker is a script of cases, a test file starts it.

On the CPU two processes are joined by gloo; where torch sees several GPUs, as many are joined by NCCL, too.

No case hangs: ranks wait for each other after each, and one that waits too long prints where it is and ends, upon which
all are killed. So ends a rank that is alone in a collective, since the rank that raised waits for it as well.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Cases = dict[str, Callable[[Path], None]]
Raised = dict[str, str]  # what each case raised in one process, "" for nothing

# Of a worker. Those who import one to see its cases are as a worker on the CPU.
DEVICE = os.environ.get("QAO_TEST_DEVICE", "cpu")
WORLD = int(os.environ.get("QAO_TEST_WORLD", "2"))

# Seconds that a rank which raised waits for the others: they raise as well, or are in a collective for good.
RAISED_ALONE = 20

# Of a test: a device, and how many processes.
PLACES = [("cpu", WORLD), *([("cuda", torch.cuda.device_count())] if torch.cuda.device_count() > 1 else [])]


def launch(worker: Path, folders: pytest.TempPathFactory, place: tuple[str, int], timeout: int = 600) -> list[Raised]:
    """The errors of each case of ``worker`` in each process. Workers of pytest-xdist, which may share the tests of a
    file, launch it once and no two at a time."""
    shared = folders.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with (shared / "launches.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = shared / f"{worker.stem}_{place[0]}_{place[1]}"
        if not folder.exists():
            folder.mkdir()
            (folder / "failure").write_text(_run_ranks(worker, folder, place, timeout))
    failure = (folder / "failure").read_text()
    assert not failure, failure
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(place[1])]


def _run_ranks(worker: Path, folder: Path, place: tuple[str, int], timeout: int) -> str:
    """Runs ``python worker RANK FOLDER`` for each rank; kills all if one of them hangs. Returns the errors."""
    device, world = place
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "QAO_TEST_DEVICE": device, "QAO_TEST_WORLD": str(world)}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(qao.__file__).parents[1]), *sys.path])
    logs = [folder / f"{rank}.log" for rank in range(world)]
    processes = []
    for rank, log in enumerate(logs):
        command = [sys.executable, str(worker), str(rank), str(folder)]
        with log.open("w") as output:
            processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
    try:
        end, codes = time.monotonic() + timeout, _codes(processes)
        while None in codes and not any(codes) and time.monotonic() < end:
            time.sleep(0.05)
            codes = _codes(processes)
    finally:
        for process in processes:
            process.kill()
    went_well = not any(codes) and None not in codes
    return "" if went_well else "\n".join([str(codes), *(log.read_text() for log in logs)])


def _codes(processes: list[subprocess.Popen[bytes]]) -> list[int | None]:
    return [process.poll() for process in processes]


class Collectives(TorchDispatchMode):
    """Records communication inside it: ``names`` of operators, ``sizes`` in bytes of their first tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func.name().partition("::")
        if space in ("c10d", "_c10d_functional") and "wait" not in name and name != "barrier":
            first = tree_leaves(args)[0]
            self.names.append(name.partition(".")[0])
            self.sizes.append(first.nbytes)
        return func(*args, **(kwargs or {}))


def main(cases: Cases, limit: float = 300) -> None:
    """Of a worker: runs its cases one after the other and writes ``FOLDER/RANK.json``.

    ``limit``: seconds a case may take, on the slowest rank.
    """
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    # As torchrun does. transformers reads them, LOCAL_RANK for the GPU that a model goes to.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    backend = "gloo"
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(torch.device("cuda", rank))
        backend = "cpu:gloo,cuda:nccl"
    store = dist.FileStore(str(folder / "init"), WORLD)
    wait = timedelta(seconds=limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=WORLD, timeout=wait)
    raised = {}
    for name, run in cases.items():
        print(name, flush=True)  # the last one in the log of a rank that was killed
        faulthandler.dump_traceback_later(limit, exit=True)
        start = time.monotonic()
        try:
            run(folder)
            raised[name] = ""
        except Exception:
            raised[name] = traceback.format_exc()
            print(raised[name], flush=True)
            faulthandler.dump_traceback_later(RAISED_ALONE, exit=True)
        if store.add(name, 1) == WORLD:
            store.set(f"{name}, everywhere", "")
        store.wait([f"{name}, everywhere"], wait)
        print(f"  {time.monotonic() - start:.1f} s", flush=True)
        faulthandler.cancel_dump_traceback_later()
    (folder / f"{rank}.json").write_text(json.dumps(raised))
    dist.destroy_process_group()
