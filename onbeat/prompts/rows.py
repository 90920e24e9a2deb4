"""Rows of a dataset: dicts with a `prompt` (text, or chat messages) and any other columns.

A source is

    train.jsonl  .json  .csv  .parquet      a file
    data/                                   a directory of such files, in the order of their names
    saved/                                  … or of a Hugging Face dataset, as `save_to_disk` leaves it
    openai/gsm8k  openai/gsm8k:main         a Hugging Face dataset by name, if nothing of that name is on the disk;
                                            after the colon, its configuration
    file.py:function                        a function without arguments that yields rows

Columns of other layouts get the names they need by a map: `{prompt = "question", answer = "reward_model.answer"}`. A
row that cannot be used is an error that names the source and the row, counted from 1. parquet needs pyarrow, Hugging
Face datasets need `datasets`: both come with `pip install onbeat[data]`.
"""

from __future__ import annotations

import csv
import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from onbeat.errors import InputError
from onbeat.functions import load_function

Row = dict[str, Any]


def read_rows(
    source: str, key: str = "data.path", columns: Mapping[str, str] | None = None, split: str = "train"
) -> list[Row]:
    """Every row of the source that the recipe's `key` names, its columns named by `columns`, checked."""
    found = _raw_rows(source, key, split)
    rows = [_checked(row, f"{source}, row {number}", columns or {}) for number, row in enumerate(found, 1)]
    if not rows:
        raise InputError(f"{source} has no rows")
    return rows


def _raw_rows(source: str, key: str, split: str) -> Iterator[Any]:
    path = Path(source)
    name, _, configuration = source.partition(":")
    if path.is_dir():
        yield from _directory(path, key, split)
    elif path.suffix in _READERS:
        yield from _READERS[path.suffix](path)
    elif ":" in source and not _HUB_NAME.fullmatch(name):
        function = load_function(source, key)
        try:
            yield from function()
        except Exception as error:
            raise InputError(f"{source} failed: {type(error).__name__}: {error}") from error
    elif _HUB_NAME.fullmatch(name):
        yield from _hub(name, configuration, split, key)
    else:
        raise InputError(
            f"{key} = {source!r} is neither a {', '.join(_READERS)} file, nor a directory, nor file.py:function, nor "
            "the name of a Hugging Face dataset (owner/name)"
        )


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/(?!.*\.py$)[\w.-]+")


def _directory(path: Path, key: str, split: str) -> Iterator[Any]:
    if (path / "dataset_dict.json").exists() or (path / "dataset_info.json").exists():
        saved = _imported("datasets", key).load_from_disk(str(path))
        yield from _split(saved, split, str(path)) if (path / "dataset_dict.json").exists() else saved
        return
    files = sorted(file for file in path.iterdir() if file.suffix in _READERS)
    if not files:
        raise InputError(f"{key} = {str(path)!r} has no {', '.join(_READERS)} file, and is no dataset saved to disk")
    for file in files:
        yield from _READERS[file.suffix](file)


def _hub(name: str, configuration: str, split: str, key: str) -> Iterator[Any]:
    datasets = _imported("datasets", key)
    try:
        yield from datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        raise InputError(
            f"{key} = {name!r} is not on this disk, and as a Hugging Face dataset it cannot be loaded: "
            f"{type(error).__name__}: {reason}"
        ) from error


def _split(saved: Any, split: str, source: str) -> Any:
    if split not in saved:
        raise InputError(f"{source} has no split {split!r} (data.split); it has {sorted(saved)}")
    return saved[split]


def _imported(package: str, key: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise InputError(
            f"{key} needs {package}, which cannot be imported ({error}): pip install 'onbeat[data]'"
        ) from None


def _parquet(path: Path) -> Iterator[Any]:
    parquet = _imported("pyarrow.parquet", str(path))
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:  # pyarrow's own errors are of this kind
        raise InputError(f"{path} is not parquet: {error}") from None


def _jsonl(path: Path) -> Iterator[Any]:
    with _reading(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise InputError(f"{path}, line {number} is not JSON: {error}") from None


def _json(path: Path) -> Iterator[Any]:
    with _reading(path) as file:
        try:
            content = json.load(file)
        except UnicodeDecodeError:
            raise
        except ValueError as error:
            raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, list):
        raise InputError(f"{path} holds one {type(content).__name__}, not a list of rows")
    yield from content


def _csv(path: Path) -> Iterator[Any]:
    with _reading(path) as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise InputError(f"{path}, line {reader.line_num} has not as many fields as the first line")
                yield row
        except csv.Error as error:
            raise InputError(f"{path}, line {reader.line_num + 1} is not CSV: {error}") from None


_READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}


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
