"""Fixtures and hooks of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


def pytest_configure() -> None:
    # Workers of pytest-xdist share the CPUs, and so do their children.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    if workers and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(len(os.sched_getaffinity(0)) // workers, 1))
        os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", os.environ["OMP_NUM_THREADS"])
    # Workers also share the GPUs: all see all GPUs, in rotated order. Must run before CUDA starts.
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), torch.cuda.device_count()
    if worker and count > 1:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
        first = int(worker.removeprefix("gw")) % count
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Select tests, and spread the longest ones over pytest-xdist's workers.

    Not selected are those that gpu_report.py has already run or leaves out, and in CI, with QAO_TEST_PART=1/3, two
    thirds of those marked extended or packaging. Each worker gets an equal part of the list. At the end of the last
    part the longest tests would run one by one.
    """
    if part := os.environ.pop("QAO_TEST_PART", None):
        number, count = map(int, part.split("/"))
        turns = [item for item in items if any(map(item.get_closest_marker, ("extended", "packaging")))]
        left_out = {item.nodeid for i, item in enumerate(turns) if i % count != number - 1}
        items[:] = [item for item in items if item.nodeid not in left_out]
    if path := os.environ.pop("QAO_TESTS_DONE", None):  # not for pytest inside a test
        done = set(Path(path).read_text().splitlines())
        items[:] = [item for item in items if item.nodeid not in done]
    if os.environ.pop("QAO_TESTS_OF_GPU", None):
        cases = [item for item in items if _params(item).get("device") != "cpu"]
        items[:] = [item for item in cases if not any(map(item.get_closest_marker, ("cpu", "packaging")))]
    if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        long = [item for item in items if item.get_closest_marker("early")]
        items[:] = [item for item in items if item not in long]
        for i, item in enumerate(long):
            items.insert((i % workers) * len(items) // workers + workers, item)  # parts differ by the remainder


def _params(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    """ "cpu", and "cuda" where torch finds a GPU."""
    return str(request.param)


@pytest.fixture(autouse=True)
def full_precision_matmul() -> Iterator[None]:
    """Plain torch on a GPU as the reference of the tolerance: no TF32, no 16-bit reduction."""
    matmul = torch.backends.cuda.matmul
    names = ("allow_tf32", "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: getattr(matmul, name) for name in names}
    for name in names:
        setattr(matmul, name, False)
    yield
    for name, value in before.items():
        setattr(matmul, name, value)
