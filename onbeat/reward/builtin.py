"""The rewards that need no file of the user's, named in a recipe without a colon.

    exact_match      the completion is the column `answer`, white space at the ends aside
    numeric_answer   the last number of the completion equals the column `answer`
    format           the completion fully matches the regular expression in the column `pattern`

Each gives 1.0 or 0.0, and None (does not apply) for a row whose column is null. They have the field's signature, and
they are read as examples of it: keep them plain.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

_NUMBER = re.compile(
    r"""(?:(?<![\w)\]])(?P<sign>[-+−]))?     # a sign, unless it is the minus between two terms: 5-3
        \$?(?:(?<=\$)(?P<inner_sign>[-−]))?  # -$3 and $-3 are both written
        (?P<digits>
            (?: [0-9]{1,3}(?:,[0-9]{3})+(?!,?[0-9]) | [0-9]+ ) (?:\.[0-9]+)?
          | (?<![0-9])\.[0-9]+
        )
        (?P<exponent>[eE][-+]?[0-9]{1,3}(?![0-9A-Za-z]))?""",
    re.VERBOSE,
)


def text_of(completion: str | Sequence[dict[str, Any]]) -> str:
    """What the model said: the completion itself, or the content of the last message of a chat."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def exact_match(completions: list[Any], answer: list[Any], **_: Any) -> list[float | None]:
    return [
        None if right is None else float(text_of(completion).strip() == str(right).strip())
        for completion, right in zip(completions, answer, strict=True)
    ]


def numeric_answer(completions: list[Any], answer: list[Any], **_: Any) -> list[float | None]:
    return [
        None if right is None else float(last_number(text_of(completion)) == answer_number(right))
        for completion, right in zip(completions, answer, strict=True)
    ]


def matches_pattern(completions: list[Any], pattern: list[str | None], **_: Any) -> list[float | None]:
    """`.` matches a line break too, so that `<think>.*</think>.*` spans lines."""
    return [
        None if regex is None else float(re.fullmatch(regex, text_of(completion).strip(), re.DOTALL) is not None)
        for completion, regex in zip(completions, pattern, strict=True)
    ]


def last_number(text: str) -> Decimal | None:
    """The last number written in the text: 1,000 and -$2.50 and 6e3 are numbers. None if there is none."""
    last = deque(_NUMBER.finditer(text), maxlen=1)
    return _value(last[0]) if last else None


def answer_number(answer: object) -> Decimal:
    """The column's value. It must be a number and nothing else, after the last `####` if there is one (GSM8K)."""
    text = str(answer).rpartition("####")[2].strip()
    match = _NUMBER.fullmatch(text.removesuffix(".").removesuffix("%").rstrip())
    if match is None:
        raise ValueError(f"the column 'answer' holds {text[:80]!r}, which is no number; use exact_match for such rows")
    return _value(match)


def _value(match: re.Match[str]) -> Decimal:
    number = Decimal(match["digits"].replace(",", "") + (match["exponent"] or ""))
    negative = (match["sign"] or match["inner_sign"] or "+") in "-−"
    return number.copy_negate() if negative else number


BUILTINS: dict[str, Callable[..., list[float | None]]] = {
    "exact_match": exact_match,
    "numeric_answer": numeric_answer,
    "format": matches_pattern,
}
