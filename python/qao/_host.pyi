"""Plans and kernel table; built by csrc/host.cpp, absent with QAO_PYBIND=OFF."""

from typing import Any

class Problem:
    m: int
    n: int
    k: int
    group_size: int
    has_zeros: bool
    has_bias: bool
    x_aligned: bool
    x_dtype: str
    scale_dtype: str
    bias_dtype: str
    x: str
    weight: str
    x_scaling: str
    weight_scaling: str
    x_zeros: bool
    row_scales: bool
    fast_accum: bool
    static_scale: bool
    weight_aligned: bool
    batch_invariant: bool
    def __init__(self, **attributes: Any) -> None: ...

class Gpu:
    compute_capability: int
    num_sms: int
    shared_bytes_per_cta: int
    def __init__(self, **attributes: int) -> None: ...

def plan(problem: Problem, gpu: Gpu, experts: int = 0) -> dict[str, Any]: ...
def cpu_kernel(problem: Problem, isa: str | None = None) -> str: ...
def kernels() -> list[dict[str, Any]]: ...
def layout() -> dict[str, int]: ...
