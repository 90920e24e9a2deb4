"""What torch must find in its process before it is imported: for exactness, and for two processes on the same cores.

Two OpenMP processes that share cores need threads that neither spin (a waiting thread would take the core from the
other process) nor fall asleep at once (waking one takes longer than most operations). torch's own runtime, libgomp, can
do only one or the other; Intel's offers the same entry points, spins for a moment, and yields the core while it does.
So it is loaded where it is installed (x86-64 Linux), and libgomp is told to be passive elsewhere. Neither changes a
bit of the result.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

EXACT_ENVIRONMENT = {
    # One code path of the matrix library whatever the alignment, the batch and the thread: rows come out the same.
    "MKL_CBWR": "AVX2",
    # torch's own kernels likewise, where the processor knows more. (oneDNN's, which compute the generator's layers, may
    # be the processor's best: from two rows on a row stands alone in them.)
    "ATEN_CPU_CAPABILITY": "avx2",
}
"""Exactness rests on this (docs/exactness.md)."""

_THREADS_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "1"}
"""The first for libgomp, the second for Intel's runtime, where it has the last word."""

ALLOCATOR_ENVIRONMENT = {
    # Large buffers stay in the process instead of going back to the kernel after every operation: each return is paid
    # for with a page fault per 4 KiB when the memory is wanted again, a tenth of the time of a training step.
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
}

TORCH_ENVIRONMENT = EXACT_ENVIRONMENT | _THREADS_ENVIRONMENT | ALLOCATOR_ENVIRONMENT
"""For a process that is going to import torch; the allocator reads its part when the process starts."""


COMPACT_BYTES = 1 << 30
"""A compact process above this gives back what it has freed before it asks for more."""


def torch_environment(*, compact: bool) -> dict[str, str]:
    """For a process that is going to import torch; `compact` where memory matters more than a tenth of the time.

    glibc before 2.38 cannot use the hole an aligned buffer left for another of the same size. Where buffers that stay
    lie between such holes (a layer's kept input under checkpointing, between the layer's temporaries), each pass takes
    nearly all of its memory anew: measured, 4.7 GiB instead of 1.8. oneTBB's allocator has no such weakness, but gives
    back more than it should and faults it in again.
    """
    return TORCH_ENVIRONMENT | (_compact_allocator() if compact else {})


def _compact_allocator() -> dict[str, str]:
    names = ("libtbbmalloc.so.2", "libtbbmalloc_proxy.so.2")
    paths = [str(path) for name in names if (path := _installed("tbb", name))]
    if len(paths) < len(names) or any(mark in path for path in paths for mark in ": "):
        return {}  # the loader's list knows no quoting
    return {"LD_PRELOAD": ":".join([*paths, *filter(None, [os.environ.get("LD_PRELOAD")])])}


@contextmanager
def importing() -> Iterator[None]:
    """Around the imports of a process that computes. They leave half a million objects that stay for ever: looking
    through them for garbage meanwhile takes a fifth of the time, and would again at every collection later on."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _limit_allocator() -> None:
    """Of a compact process: its allocator came with its environment, and can be told."""
    if tell := getattr(ctypes.CDLL(None), "scalable_allocation_mode", None):
        set_soft_heap_limit = 1
        tell(set_soft_heap_limit, ctypes.c_ssize_t(COMPACT_BYTES))


def prepare_this_process() -> None:
    """Before torch is imported: the environment, the allocator, and the OpenMP runtime torch is to find."""
    os.environ.update(EXACT_ENVIRONMENT | _THREADS_ENVIRONMENT)
    _limit_allocator()
    if runtime := _openmp_runtime():
        ctypes.CDLL(str(runtime), mode=os.RTLD_GLOBAL)
        start_openmp()


def start_openmp() -> None:
    """In a new process, also after a fork: start the runtime, and remove the note it writes then into shared memory.

    The note is for noticing a second runtime in the process; it would stay behind after a SIGKILL.
    """
    if runtime := _openmp_runtime():
        if torch := sys.modules.get("torch"):
            torch.zeros(1 << 20).add_(1.0)  # after a fork, only a parallel operation starts it
        else:
            ctypes.CDLL(str(runtime)).omp_get_num_procs()
        Path(f"/dev/shm/__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}").unlink(missing_ok=True)


def _openmp_runtime() -> Path | None:
    """Intel's."""
    return _installed("intel-openmp", "libiomp5.so")


@functools.cache
def _installed(package: str, library: str) -> Path | None:
    """Where a package's library stands; both packages exist for x86-64 Linux alone."""
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())).resolve() for file in files if file.name == library), None)


def scrubbed(environment: dict[str, str], keep: tuple[str, ...]) -> dict[str, str]:
    """Without what is not needed to run Python: no key of a service, no token."""
    plain = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM", "VIRTUAL_ENV")
    prefixes = ("LC_", "PYTHON", "ONBEAT_", "XDG_", "LD_", "OMP_", "MKL_")
    return {
        name: value
        for name, value in environment.items()
        if name in (*plain, *keep) or name.startswith(prefixes)
    }  # fmt: skip
