"""The compiled functions of rollout/kernels.c, for float32 in host memory.

They are there where they could be compiled when onbeat was installed, and where the processor has AVX2. With AVX-512
they are faster, with the same bits.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from typing import Any

import torch

from onbeat.compiled import KERNELS_VERSION, compiled_kernels


@functools.cache
def kernels() -> Any | None:
    """The compiled functions, or None where there are none."""
    path = compiled_kernels()
    if path is None or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        warnings.warn(f"it is slower than it could be: {path} cannot be loaded ({error})", stacklevel=2)
        return None
    if (found := ctypes.c_int64.in_dll(library, "onbeat_kernels_version").value) != KERNELS_VERSION:
        raise RuntimeError(f"{path} is of version {found} of kernels.c, not {KERNELS_VERSION}: install onbeat again")
    at, number = ctypes.c_void_p, ctypes.c_int64
    arguments = {
        "attend": (at, number, at),
        "attend_chunk": (at, number, number),
        "rms_norm": (at, at, at, number, number, ctypes.c_float),
        "gate": (at, at, at, number),
        "silu": (at, at, number),
        "silu_backward": (at, at, at, number),
    }
    for name, types in arguments.items():
        function = getattr(library, f"onbeat_{name}")
        function.argtypes, function.restype = types, None
    return library


def available() -> bool:
    return kernels() is not None
