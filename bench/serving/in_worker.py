"""Functions that run inside a worker process of vLLM."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any


def kernels_of(model: Any) -> dict[str, int]:
    """Layers by the class of their kernel. Needs qao, but not its plugin."""
    from qao.integrations.vllm.loaded import kernel_of

    found = Counter(named[0] for named in map(kernel_of, model.modules()) if named is not None)
    return dict(found)


def memory(_: Any) -> dict[str, Any]:
    import torch

    return {"peak_mib": torch.cuda.max_memory_allocated() / 2**20, "device": torch.cuda.get_device_name()}


def refit(worker: Any, folder: str, times: int = 3) -> float:
    """Seconds of loading a checkpoint's weights again in place, from tensors on the GPU: the median."""
    import torch
    from safetensors.torch import load_file

    files = sorted(Path(folder).glob("*.safetensors"))
    tensors = [item for file in files for item in load_file(file, device="cuda").items()]
    seconds = []
    for _ in range(times):
        torch.cuda.synchronize()
        started = time.perf_counter()
        worker.reload_weights(weights_iterator=iter(tensors))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return median(seconds)
