"""Attention of all samples being decoded as one call per layer, by kernels.c: instead of a dozen small operations of
torch for every group, which on a CPU cost more in being called than in computing. And that of a prompt's chunk, in a
half to a third of the time that torch's takes.

It is there where it could be compiled when onbeat was installed, and where the processor has AVX2; for float32 in host
memory, heads of a multiple of 8 numbers. With AVX-512 it is faster, with the same bits. Everywhere else `Tokens.attend`
and `Chunk.attend` (cache.py) compute the same with torch's operations, group by group, and other bits: a generator's
fingerprint tells who has which (probe.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from onbeat.compiled import VECTOR
from onbeat.kernels import available, kernels

if TYPE_CHECKING:
    from onbeat.rollout.cache import GroupCache


class _Group(ctypes.Structure):
    _fields_ = (
        ("prompt", ctypes.c_void_p),
        ("own", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("prompt_length", "rows", "capacity", "length", "num_samples", "first")),
    )


class _Rows(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("head", ctypes.c_int64), ("token", ctypes.c_int64))

    @classmethod
    def of(cls, rows_HND: torch.Tensor) -> _Rows:
        head, token, number = rows_HND.stride()
        assert (number, rows_HND.dtype) == (1, torch.float32)
        return cls(rows_HND.data_ptr(), head, token)


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("layer", "heads", "per_head", "dim", "window")),
        ("scale", ctypes.c_float),
        *((name, _Rows) for name in ("q", "k", "v")),
        ("out", ctypes.c_void_p),
    )


def fits(own: torch.Tensor) -> bool:
    """Whether it computes with such a cache."""
    return own.dtype == torch.float32 and own.device.type == "cpu" and own.shape[-1] % VECTOR == 0 and available()


class Fused:
    """The samples of one step, in the order of their tokens, from the first on."""

    def __init__(self, caches: Sequence[GroupCache]) -> None:
        self._groups = (_Group * len(caches))()
        self._kept = []  # what is pointed to
        heads, dim = caches[0].num_heads, caches[0].own[0].shape[-1]
        self._shape = (len(caches[0].own), heads, dim)
        self.num_tokens = 0
        for group, cache in zip(self._groups, caches, strict=True):
            own = (ctypes.c_void_p * len(cache.own))(*(layer.data_ptr() for layer in cache.own))
            self._kept.append((cache.prompt, list(cache.own), own))
            rows, capacity = cache.own[0].shape[2:4]
            assert cache.length < capacity
            group.prompt, group.own = cache.prompt.data_ptr(), ctypes.addressof(own)
            group.prompt_length, group.rows, group.capacity = cache.prompt_length, rows, capacity
            group.length, group.num_samples, group.first = cache.length, cache.num_samples, self.num_tokens
            self.num_tokens += cache.num_samples

    def attend(
        self, layer: int, q_HND: torch.Tensor, k_KND: torch.Tensor, v_KND: torch.Tensor, scale: float,
        window: int | None, out_NHD: torch.Tensor,
    ) -> None:  # fmt: skip
        """Keys and values of the tokens go into the caches; what they attend to comes into `out_NHD`."""
        q_HND, k_KND, v_KND = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (q_HND, k_KND, v_KND))
        num_heads, dim = len(k_KND), q_HND.shape[-1]
        num_layers, *cached = self._shape
        if layer >= num_layers or any(found != cached for found in ([num_heads, dim], [len(v_KND), v_KND.shape[-1]])):
            raise ValueError(
                f"layer {layer} has {num_heads} heads of {dim} numbers; the cache is of {num_layers} layers with "
                f"{cached[0]} of {cached[1]}"
            )
        call = _Call(
            layer, num_heads, len(q_HND) // num_heads, dim, window or 0, scale,
            _Rows.of(q_HND), _Rows.of(k_KND), _Rows.of(v_KND), out_NHD.data_ptr(),
        )  # fmt: skip
        compiled = kernels()
        assert compiled is not None
        compiled.onbeat_attend(self._groups, len(self._groups), ctypes.byref(call))


def attend_chunk(
    q_HTD: torch.Tensor, keys_KPD: torch.Tensor, values_KPD: torch.Tensor, first: int, window: int | None,
    out_THD: torch.Tensor,
) -> None:  # fmt: skip
    """What tokens `first` … `first` + T - 1 of a prompt attend to, with scaled queries; their keys are there."""
    num_tokens, num_heads, dim = out_THD.shape
    num_kv_heads, length, _ = keys_KPD.shape
    assert q_HTD.shape == (num_heads, num_tokens, dim)
    assert keys_KPD.shape == values_KPD.shape
    assert first + num_tokens <= length
    assert out_THD.is_contiguous()
    assert keys_KPD.stride(1) == values_KPD.stride(1) == dim
    q_HTD = q_HTD if q_HTD.stride(-1) == 1 else q_HTD.contiguous()
    call = _Call(
        0, num_kv_heads, num_heads // num_kv_heads, dim, window or 0, 1.0,
        _Rows.of(q_HTD), _Rows.of(keys_KPD), _Rows.of(values_KPD), out_THD.data_ptr(),
    )  # fmt: skip
    compiled = kernels()
    assert compiled is not None
    compiled.onbeat_attend_chunk(ctypes.byref(call), first, num_tokens)
