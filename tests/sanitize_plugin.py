"""Pytest plugin of gpu_sanitize.py: a process's share of the smaller GPU tests, and their calls of qao's operators."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_sanitize import MORE_SECONDS, SHARE, Share
from qao.diagnostics.operator_checks import OF_CPU
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = "cuda"
OPERATOR_TEST = "test_an_operator_is_near_its_reference"  # calls every operator with CUDA kernels
# Too large, or a graph, which cannot be captured where each tensor has its own allocation.
_LARGE = re.compile(r"m(1000|4096)-|plain_loop|graph")
_SCHEME = re.compile(r"(?<![a-z0-9_])(?:int|fp)[48](?:_(?:int|fp)[48])?")


def cuda_operators() -> list[str]:
    """Operators with CUDA kernels. All are registered for CUDA, but those of OF_CPU refuse its tensors."""
    registered = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("qao::"))
    cuda = (name for name in registered if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"))
    return sorted({name.removeprefix("qao::").partition(".")[0] for name in cuda} - set(OF_CPU))


class Calls(TorchDispatchMode):
    """Finished calls of qao's operators that had a tensor on this type of device."""

    supports_higher_order_operators = True

    def __init__(self, device: str = DEVICE) -> None:
        super().__init__()
        self.device = device
        self.counts: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise torch.compile compiles nothing under this mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_ours = isinstance(func, OpOverload) and func.namespace == "qao"
        if is_ours and any(map(self._is_there, tree_leaves((args, kwargs)))):
            self.counts[func._opname] += 1
        return result

    def _is_there(self, leaf: Any) -> bool:
        is_real = isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor)
        return is_real and leaf.device.type == self.device


def ordered(tests: Sequence[str], seed: int) -> list[str]:
    """A random order that begins with OPERATOR_TEST, then has one test per function and scheme, then a second one, …"""
    shuffled = random.Random(seed).sample(tests, len(tests))
    seen: Counter[tuple[str, str]] = Counter()
    ranks = {}
    for test in shuffled:
        function, _, parameters = test.partition("[")
        scheme = _SCHEME.search(parameters)
        stratum = function, scheme[0] if scheme else ""
        seen[stratum] += 1
        ranks[test] = 0 if function.endswith(OPERATOR_TEST) else seen[stratum]
    return sorted(shuffled, key=ranks.__getitem__)


class Recorder:
    """The hooks of pytest. The file of the share holds the results of all tests so far."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self.end = 0.0
        self.calls = Calls()
        self.passed = 0
        self.failed: list[str] = []
        self.operators: Counter[str] = Counter()

    @pytest.hookimpl(trylast=True)  # after -k
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        smaller = {item.nodeid: item for item in items if DEVICE in item.nodeid and not _LARGE.search(item.nodeid)}
        tests = ordered(list(smaller), self.share.seed)
        items[:] = [smaller[test] for test in tests[self.share.first :: self.share.step]]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        self.end = time.time() + self.share.seconds
        self.write()
        # A test that runs too long ends, and the tool still writes its summary.
        signal.signal(signal.SIGALRM, lambda *_: pytest.exit("the time is over", returncode=0))
        signal.setitimer(signal.ITIMER_REAL, self.share.seconds + MORE_SECONDS)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        """Tests that would begin after the end of the time neither run nor appear in the report."""
        return True if time.time() > self.end else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, None, None]:
        with Calls(DEVICE) as self.calls:
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.passed and report.when == "call":
            self.passed += 1
            self.operators += self.calls.counts
        self.write()

    def write(self) -> None:
        results = {"passed": self.passed, "failed": self.failed, "operators": self.operators}
        Path(self.share.file).write_text(json.dumps(results))


def pytest_configure(config: pytest.Config) -> None:
    if SHARE in os.environ:
        config.pluginmanager.register(Recorder(Share(*json.loads(os.environ[SHARE]))))
