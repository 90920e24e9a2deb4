"""Layers of the model with their weights packed once per version, by oneDNN.

    the head           the widest matrix, and it sees the fewest rows, one per sequence: the matrix library spends most
                       of its time there on rearranging weights that have not changed
    LoRA's first one   (A) so narrow that the matrix library chooses its kernel by the number of rows and of threads,
                       and bits with it

Here a row's result depends on that row alone, for any number of rows and threads.

The model is not changed: packed layers stand in for its own during a forward of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from onbeat.lora import first_layers

_EXPECTED_ROWS = 32


class Packed:
    """A linear layer and what it computes with the weights it has now."""

    def __init__(self, dense: torch.nn.Linear) -> None:
        self.dense = dense
        self._weight = torch.ops.mkldnn._reorder_linear_weight(dense.weight.detach(), _EXPECTED_ROWS)
        self._bias = dense.bias

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._weight, self._bias, "none", [], "")
        return out


def pack(model: Any) -> list[Packed]:
    """Of the model's weights as they are now; without layers that cannot be packed."""
    return [Packed(dense) for dense in (model.get_output_embeddings(), *first_layers(model)) if _packable(dense)]


def _packable(dense: Any) -> bool:
    if type(dense) is not torch.nn.Linear or dense.weight.device.type != "cpu" or dense.weight.dtype != torch.float32:
        return False
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available


@contextmanager
def standing_in(layers: Sequence[Packed]) -> Iterator[None]:
    """The model computes with these."""
    for packed in layers:
        vars(packed.dense)["forward"] = packed
    try:
        yield
    finally:
        for packed in layers:
            del vars(packed.dense)["forward"]
