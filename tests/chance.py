"""How likely it is that chance alone gives such counts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def chi_square_p(
    observed: npt.NDArray[np.integer | np.floating],
    expected: npt.NDArray[np.floating] | None = None,
    *,
    constraints: int = 1,
) -> float:
    """Pearson's test: of counts this far from the expected ones (without any: all alike), or further.

    `constraints`: how many sums of the counts are known beforehand. (scipy has the same; it is not installed because
    transformers imports it wherever it finds it, and every process would start later.)
    """
    if expected is None:
        expected = np.full(observed.shape, observed.sum() / observed.size)
    distance = float((np.square(observed - expected) / expected).sum())
    freedom = observed.size - constraints
    half = torch.tensor([freedom, distance], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(half[0], half[1]))
