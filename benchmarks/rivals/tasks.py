"""What the training benchmarks train on, asked of a chat model. The same rows and rewards for everybody.

    sums               about 45 tokens: a small sum. Groups of equal rewards are common (`right_sum`)
    chat               about 120: a person tells what they need, and asks for advice
    long_prompt        about 430: a report, and a question about it
    long_answer        about 60: a story is wanted, as long as it may be

Rows follow from a seed, the same on every machine. `vowels` differs within practically every group, so that none of the
last three could be passed over. Standard library only, since it runs in every contender's own environment.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

NUM_ROWS = 512

PEOPLE = ("a nurse", "a carpenter", "a student", "a gardener", "a teacher", "a sailor", "a baker", "a clerk")
PLACES = ("in a small town", "by the sea", "in the mountains", "on an island", "near the old harbour", "in the capital")
THINGS = ("a bicycle", "a wooden boat", "a piano", "a kitchen table", "a tent", "an apple tree", "a clock", "a kite")
TROUBLES = (
    "it is always later than I think", "the weather changes every hour", "my neighbours complain about the noise",
    "there is never enough room", "everything I own seems to be broken", "nobody has shown me how to begin",
)  # fmt: skip
FACTS = (
    "The bridge at {place} was closed for {n} days while {person} repaired its {part}.",
    "In week {n} the market sold more {goods} than ever before, and {person} said that it was no accident.",
    "After the storm {n} houses had no light, and {person} brought {goods} to all of them.",
    "A survey of {n} families found that most of them would rather have {goods} than a new {part}.",
    "The school counted {n} visitors, among them {person}, who gave a talk about {goods}.",
    "Trains were late on {n} evenings because of work on the {part}, which {person} called a scandal.",
)
PARTS = ("railing", "roof", "water pump", "clock tower", "staircase", "northern gate")
GOODS = ("lamps", "oranges", "blankets", "books about birds", "second-hand shoes", "jars of honey")


def _chat(question: str, **columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": question}], **columns}


def sums() -> Iterator[dict[str, Any]]:
    rng = random.Random(0)
    for _ in range(NUM_ROWS):
        left, right = rng.randint(1, 9), rng.randint(1, 9)
        yield _chat(f"What is {left} + {right}? Answer with the number.", answer=str(left + right))


def chat() -> Iterator[dict[str, Any]]:
    rng = random.Random(1)
    for _ in range(NUM_ROWS):
        person, place, thing = rng.choice(PEOPLE), rng.choice(PLACES), rng.choice(THINGS)
        first, second = rng.sample(TROUBLES, 2)
        yield _chat(
            f"I am {person} and live {place}. For {rng.randint(2, 30)} years I have wanted to build {thing} with my "
            f"own hands, but {first}, and {second}. I have about {rng.randint(2, 9)} hours a week, a few simple tools, "
            f"and {rng.randint(50, 500)} dollars that I could spend. My friends say I should simply buy one. What "
            "should I begin with? Please explain it.",
            answer="",
        )


def long_prompt() -> Iterator[dict[str, Any]]:
    rng = random.Random(2)
    for _ in range(NUM_ROWS):
        report = " ".join(
            rng.choice(FACTS).format(
                n=rng.randint(2, 99), place=rng.choice(PLACES).split(" ", 1)[1], person=rng.choice(PEOPLE),
                part=rng.choice(PARTS), goods=rng.choice(GOODS),
            )
            for _ in range(17)
        )  # fmt: skip
        yield _chat(f"Read this report.\n\n{report}\n\nWhat was the most important event, and why?", answer="")


def long_answer() -> Iterator[dict[str, Any]]:
    rng = random.Random(3)
    for _ in range(NUM_ROWS):
        person, other = rng.sample(PEOPLE, 2)
        yield _chat(
            f"Write a long story about {person} who lives {rng.choice(PLACES)} and finds {rng.choice(THINGS)} that "
            f"belonged to {other}. Take your time.",
            answer="",
        )


def right_sum(prompts: Any, completions: Any, answer: list[str], **columns: Any) -> list[float]:
    """1 if the last number of the answer is the sum. Groups of equal rewards are common."""
    texts = [_text(completion) for completion in completions]
    found = [re.findall(r"\d+", text) for text in texts]
    return [float(bool(numbers) and numbers[-1] == sum_) for numbers, sum_ in zip(found, answer, strict=True)]


def vowels(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    """The share of vowels, which differs within practically every group."""
    texts = [_text(completion) for completion in completions]
    return [sum(letter in "aeiou" for letter in text.lower()) / (1 + len(text)) for text in texts]


def every_other(prompts: Any, completions: Any, answer: list[str], **columns: Any) -> list[float]:
    """Sums that are even: all completions are equally good, and the group is not trained. Odd ones: the vowels."""
    shares = vowels(prompts, completions)
    return [0.0 if int(sum_) % 2 == 0 else share for share, sum_ in zip(shares, answer, strict=True)]


def _text(completion: Any) -> str:
    text: str = completion if isinstance(completion, str) else completion[-1]["content"]
    return text
