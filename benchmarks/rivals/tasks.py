"""What the training benchmarks train on: small sums, asked of a chat model. The same rows and rewards for everybody.

Standard library only, since it runs in every contender's own environment.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

NUM_ROWS = 512


def rows() -> Iterator[dict[str, Any]]:
    rng = random.Random(0)
    for _ in range(NUM_ROWS):
        left, right = rng.randint(1, 9), rng.randint(1, 9)
        question = f"What is {left} + {right}? Answer with the number."
        yield {"prompt": [{"role": "user", "content": question}], "answer": str(left + right)}


def right_sum(prompts: Any, completions: Any, answer: list[str], **columns: Any) -> list[float]:
    """1 if the last number of the answer is the sum. Groups of equal rewards are common."""
    texts = [_text(completion) for completion in completions]
    found = [re.findall(r"\d+", text) for text in texts]
    return [float(bool(numbers) and numbers[-1] == sum_) for numbers, sum_ in zip(found, answer, strict=True)]


def every_other(prompts: Any, completions: Any, answer: list[str], **columns: Any) -> list[float]:
    """Sums that are even: all completions are equally good, and the group is not trained. Odd ones: the share of
    vowels, which differs within practically every group."""
    texts = [_text(completion) for completion in completions]
    vowels = [sum(letter in "aeiou" for letter in text.lower()) / (1 + len(text)) for text in texts]
    return [0.0 if int(sum_) % 2 == 0 else share for share, sum_ in zip(vowels, answer, strict=True)]


def _text(completion: Any) -> str:
    text: str = completion if isinstance(completion, str) else completion[-1]["content"]
    return text
