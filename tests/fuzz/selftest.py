"""Cases that go wrong, for the test of the workers."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

from .finding import Finding

KINDS = ("right", "wrong", "raises", "crashes", "hangs", "waits", "too much memory")


def draw(rng: random.Random) -> dict[str, Any]:
    return {"kind": rng.choice(KINDS)}


def run(case: dict[str, Any], device: str) -> int:
    if case["kind"] == "wrong":
        raise Finding("1 is 2")
    if case["kind"] == "raises":
        raise KeyError("x")
    if case["kind"] == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if case["kind"] == "hangs":
        signal.setitimer(signal.ITIMER_PROF, 1)  # of SECONDS_OF_A_CASE
        while True:
            pass
    if case["kind"] == "waits":
        signal.setitimer(signal.ITIMER_REAL, 1)
        signal.pause()
    if case["kind"] == "too much memory":
        bytearray(8 << 30)
    return 1
