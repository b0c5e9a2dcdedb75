"""Serving engine in a separate process, so that several engines share a GPU and answer in alternation."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from ..meta import ROOT

_SWITCHES = {"vllm": "QAO_DISABLE_VLLM", "sglang": "QAO_DISABLE_SGLANG"}


class EngineError(RuntimeError):
    """An engine that did not start, or failed to answer."""


class Engine:
    """A process that runs process.py.

    Args:
        engine: "vllm" or "sglang".
        qao: whether the engine may use qao's kernels.
        log: file of the engine's output.
        options: of the engine's constructor. The process starts at once; ``ready`` waits for it.
        env: more environment variables.
    """

    def __init__(
        self, engine: str, options: dict[str, Any], *, qao: bool, log: Path, env: dict[str, str] | None = None
    ) -> None:
        self.log = log
        self._folder = tempfile.TemporaryDirectory()
        address = f"{self._folder.name}/socket"
        caches = {"VLLM_CACHE_ROOT": f"{self._folder.name}/vllm"}  # cold starts
        own = os.environ | caches | (env or {}) | ({} if qao else {_SWITCHES[engine]: "1"})
        with Listener(address, family="AF_UNIX") as listener, log.open("w") as output:
            listener._listener._socket.settimeout(120)  # type: ignore[attr-defined]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.serving.process", engine, address],
                cwd=ROOT, env=own, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
            try:
                self._connection: Connection = listener.accept()
            except OSError as error:
                raise EngineError(f"{engine} did not start; see {log}") from error
        self._connection.send(("start", options))

    def ready(self, seconds: float = 600) -> dict[str, Any]:
        """What the engine says of itself, once it has started."""
        return self._answer(seconds)

    def __call__(self, request: str, /, *, seconds: float = 300, **arguments: Any) -> dict[str, Any]:
        """The answer to a request, a method of the engine in process.py.

        Raises:
            EngineError: the request failed, or took more than ``seconds``.
        """
        self._connection.send((request, arguments))
        return self._answer(seconds)

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            if not self._connection.poll(seconds):
                raise EngineError(f"no answer within {seconds:.0f} s; see {self.log}")
            answer: dict[str, Any] = self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise EngineError(f"the engine's process ended; see {self.log}") from error
        if "error" in answer:
            raise EngineError(f"{answer['error'][:500]}; see {self.log}")
        return answer

    def close(self) -> None:
        """End the process and its children."""
        try:
            self._connection.send(None)
            self._process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            pass
        _kill_group(self._process)
        self._connection.close()
        self._folder.cleanup()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    import signal

    for ask in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, ask)
            process.wait(5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def start_all(
    makers: dict[str, Callable[[], Engine]],
) -> tuple[dict[str, tuple[Engine, dict[str, Any]]], dict[str, str]]:
    """Engines that are started at the same time, with what they say of themselves; and the errors of the others."""
    processes, errors, ready = {}, {}, {}
    for name, make in makers.items():
        try:
            processes[name] = make()
        except EngineError as error:
            errors[name] = str(error)
    for name, engine in processes.items():
        try:
            ready[name] = engine, engine.ready()
        except EngineError as error:
            errors[name] = str(error)
            engine.close()
    return ready, errors
