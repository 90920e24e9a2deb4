"""Small sums, asked of a chat model: "What is 3 + 4?"

The task. Both numbers are from 1 to 9. The reward is 1 if the answer is finished within its tokens and the last number
in it is the sum. The model, SmolLM2-135M-Instruct, can add, more or less; what it does is talk about it until it is cut
off. What it has to learn from the reward alone is to answer, and to be right.

Of the 81 pairs 25 are held out, and never trained on; (3, 4) and (4, 3) are two pairs.

Standard library only: the benchmarks give the same rows and the same reward to other trainers.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

NUM_HELD_OUT = 25
END_TOKENS = (0, 2)
"""`<|endoftext|>` and `<|im_end|>`: the last token of a finished answer."""


def train_rows() -> Iterator[dict[str, Any]]:
    """The pairs to train on, in an order that is the same on every machine."""
    for a, b in _pairs()[NUM_HELD_OUT:]:
        yield _row(a, b)


def held_out_rows() -> Iterator[dict[str, Any]]:
    """The pairs to evaluate on. None of them is in `train_rows`."""
    for a, b in _pairs()[:NUM_HELD_OUT]:
        yield _row(a, b)


def correct(
    prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], answer: list[str], **columns: Any
) -> list[float]:
    """1.0 where the answer is finished and its last number is the sum."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [
        float(bool(ids) and ids[-1] in END_TOKENS and re.findall(r"\d+", text)[-1:] == [expected])
        for text, ids, expected in zip(texts, completion_ids, answer, strict=True)
    ]


def _pairs() -> list[tuple[int, int]]:
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    random.Random(0).shuffle(pairs)
    return pairs


def _row(a: int, b: int) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)}
