"""Functions that run inside a worker process of vLLM."""

from __future__ import annotations

from collections import Counter
from typing import Any


def kernels_of(model: Any) -> dict[str, int]:
    """Layers by the class of their kernel. Needs qao, but not its plugin."""
    from qao.integrations.vllm.loaded import kernel_of

    found = Counter(named[0] for named in map(kernel_of, model.modules()) if named is not None)
    return dict(found)


def memory(_: Any) -> dict[str, Any]:
    import torch

    return {"peak_mib": torch.cuda.max_memory_allocated() / 2**20, "device": torch.cuda.get_device_name()}
