"""The head of the model with its weights packed once per version, instead of by every product.

The head is the widest matrix and sees the fewest rows, one per sequence, so the matrix library spends most of its time
there on rearranging weights that have not changed. oneDNN keeps them rearranged. Like the library's other products
under MKL_CBWR, a row's result depends on that row alone; here for any number of rows.

The model is not changed: the packed head stands in for its own during a forward of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_EXPECTED_ROWS = 32


class PackedHead(torch.nn.Module):
    def __init__(self, dense: torch.nn.Linear) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(dense.weight.detach(), _EXPECTED_ROWS)
        self._bias = dense.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._weight, self._bias, "none", [], "")
        return logits


def pack_head(model: Any) -> PackedHead | None:
    """Of the model's weights as they are now; None where it cannot be packed, and the model's own is used."""
    dense = model.get_output_embeddings()
    packable = type(dense) is torch.nn.Linear and dense.weight.device.type == "cpu"
    if not packable or dense.weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    return PackedHead(dense)


@contextmanager
def standing_in(head: PackedHead | None, model: Any) -> Iterator[None]:
    """The model computes its logits with `head`."""
    if head is None:
        yield
        return
    dense = model.get_output_embeddings()
    model.set_output_embeddings(head)
    try:
        yield
    finally:
        model.set_output_embeddings(dense)
