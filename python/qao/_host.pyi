"""Plans, kernel table, CPU features and build information; built by csrc/host.cpp, absent with QAO_PYBIND=OFF."""

from typing import Any

def int4_plan(
    m: int,
    n: int,
    k: int,
    group_size: int,
    has_zeros: bool,
    has_bias: bool,
    x_dtype: str,
    scale_dtype: str,
    x_aligned: bool,
    compute_capability: int,
    num_sms: int,
    shared_bytes: int,
) -> dict[str, Any]: ...
def int4_cpu_kernel(
    m: int,
    n: int,
    k: int,
    group_size: int,
    has_zeros: bool,
    has_bias: bool,
    x_dtype: str,
    scale_dtype: str,
    x_aligned: bool,
    isa: str | None = None,
) -> str: ...
def kernels() -> list[dict[str, Any]]: ...
def cpu_features() -> dict[str, str | None]: ...
def build_info() -> dict[str, Any]: ...
def layout() -> dict[str, int]: ...
