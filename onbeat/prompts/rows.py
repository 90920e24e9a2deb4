"""Rows of a dataset: dicts with a `prompt` (text, or chat messages) and any other columns.

A source is a .jsonl file or `file.py:function`, a function without arguments that yields rows. A row that cannot be
used is an error that names the source and the row, counted from 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onbeat.errors import InputError
from onbeat.functions import load_function

Row = dict[str, Any]


def read_rows(source: str, key: str = "data.path") -> list[Row]:
    """Every row of the source that the recipe's `key` names, checked."""
    rows = [_checked(row, source, number) for number, row in enumerate(_raw_rows(source, key), 1)]
    if not rows:
        raise InputError(f"{source} has no rows")
    return rows


def _raw_rows(source: str, key: str) -> Iterator[Any]:
    if ":" in source:
        function = load_function(source, key)
        try:
            yield from function()
        except Exception as error:
            raise InputError(f"{source} failed: {type(error).__name__}: {error}") from error
    elif source.endswith(".jsonl"):
        yield from _jsonl(Path(source))
    else:
        raise InputError(f"{key} = {source!r} is neither a .jsonl file nor file.py:function")


def _jsonl(path: Path) -> Iterator[Any]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except json.JSONDecodeError as error:
                        raise InputError(f"{path}, line {number} is not JSON: {error}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read {path}: it is not UTF-8 ({error.reason} at byte {error.start})") from None


def _checked(row: Any, source: str, number: int) -> Row:
    place = f"{source}, row {number}"
    if not isinstance(row, dict):
        raise InputError(f"{place} is a {type(row).__name__}, not an object with a 'prompt'")
    if "prompt" not in row:
        raise InputError(f"{place} has no 'prompt'; its columns are {sorted(map(str, row))}")
    prompt = row["prompt"]
    is_chat = isinstance(prompt, list) and all(isinstance(m, dict) and "role" in m for m in prompt) and prompt
    if not (is_chat or (isinstance(prompt, str) and prompt)):
        raise InputError(f"{place}: 'prompt' must be text or chat messages, not {str(prompt)[:60]!r}")
    return row
