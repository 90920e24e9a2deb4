"""Whether attention, norms and gates can be the compiled ones (rollout/kernels.c). No torch; kernels.py has them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

VECTOR = 8
"""Numbers that are computed at once at least: of a head, of a row."""
KERNELS_VERSION = 4
"""Of kernels.c: its structures, and its bits."""


def compiled_kernels() -> str | None:
    """The file with what was compiled, if it was when onbeat was installed."""
    found = importlib.util.find_spec("onbeat.rollout._kernels")
    return None if found is None else found.origin


def why_not_compiled(head_dim: int | None = None) -> str | None:
    """None if attention is compiled, for heads of so many numbers and as far as can be told without loading it."""
    if compiled_kernels() is None:
        return "no compiler was there when onbeat was installed (docs/install.md)"
    processors = Path("/proc/cpuinfo")
    if processors.exists() and " avx2" not in processors.read_text():
        return "the processor has no AVX2"
    if head_dim is not None and head_dim % VECTOR:
        return f"the model has heads of {head_dim} numbers, which is no multiple of {VECTOR}"
    return None
