"""Rows of a dataset: dicts with a `prompt` (text, or chat messages) and any other columns.

A source is a .jsonl, .json or .csv file, or `file.py:function`, a function without arguments that yields rows. Columns
of other layouts get the names they need by a map: `{prompt = "question", answer = "reward_model.ground_truth"}`. A row
that cannot be used is an error that names the source and the row, counted from 1.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from onbeat.errors import InputError
from onbeat.functions import load_function

Row = dict[str, Any]


def read_rows(source: str, key: str = "data.path", columns: Mapping[str, str] | None = None) -> list[Row]:
    """Every row of the source that the recipe's `key` names, its columns named by `columns`, checked."""
    rows = [_checked(row, f"{source}, row {n}", columns or {}) for n, row in enumerate(_raw_rows(source, key), 1)]
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
    elif (read := _READERS.get(Path(source).suffix)) is not None:
        with _reading(Path(source)) as file:
            yield from read(file, source)
    else:
        raise InputError(f"{key} = {source!r} is neither a {', '.join(_READERS)} file nor file.py:function")


def _jsonl(file: TextIO, source: str) -> Iterator[Any]:
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise InputError(f"{source}, line {number} is not JSON: {error}") from None


def _json(file: TextIO, source: str) -> Iterator[Any]:
    try:
        content = json.load(file)
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        raise InputError(f"{source} is not JSON: {error}") from None
    if not isinstance(content, list):
        raise InputError(f"{source} holds one {type(content).__name__}, not a list of rows")
    yield from content


def _csv(file: TextIO, source: str) -> Iterator[Any]:
    reader = csv.DictReader(file, strict=True)
    try:
        for row in reader:
            if None in row or None in row.values():
                raise InputError(f"{source}, line {reader.line_num} has not as many fields as the first line")
            yield row
    except csv.Error as error:
        raise InputError(f"{source}, line {reader.line_num + 1} is not CSV: {error}") from None


_READERS: dict[str, Callable[[TextIO, str], Iterator[Any]]] = {".jsonl": _jsonl, ".json": _json, ".csv": _csv}


@contextmanager
def _reading(path: Path) -> Iterator[TextIO]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield file
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read {path}: it is not UTF-8 ({error.reason} at byte {error.start})") from None


def _checked(found: Any, place: str, columns: Mapping[str, str]) -> Row:
    if not isinstance(found, dict):
        raise InputError(f"{place} is a {type(found).__name__}, not an object with a 'prompt'")
    row: Row = found | {name: _at(found, path, place) for name, path in columns.items()}
    if "prompt" not in row:
        raise InputError(f"{place} has no 'prompt'; its columns are {sorted(map(str, row))}")
    prompt = row["prompt"]
    is_chat = isinstance(prompt, list) and all(isinstance(m, dict) and "role" in m for m in prompt) and prompt
    if not (is_chat or (isinstance(prompt, str) and prompt)):
        raise InputError(f"{place}: 'prompt' must be text or chat messages, not {str(prompt)[:60]!r}")
    return row


def _at(row: Row, path: str, place: str) -> Any:
    """The column of that name; or, dot by dot, what lies inside one."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            raise InputError(f"{place} has no {path!r} (data.columns); its columns are {sorted(map(str, row))}")
        value = value[part]
    return value
