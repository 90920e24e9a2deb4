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


class Row(dict[str, Any]):
    """The columns of a row, and where it comes from."""

    place = ""


def read_rows(
    source: str, key: str = "data.path", columns: Mapping[str, str] | None = None, split: str = "train"
) -> list[Row]:
    """Every row of the source that the recipe's `key` names, its columns named by `columns`, checked."""
    rows = [
        _checked(row, f"{place}, row {number}", columns or {})
        for place, found in _sources(source, key, split)
        for number, row in enumerate(found, 1)
    ]
    if not rows:
        raise InputError(f"{source} has no rows")
    return rows


def _sources(source: str, key: str, split: str) -> Iterator[tuple[str, Iterator[Any]]]:
    """Each place that rows come from, and its rows."""
    path = Path(source)
    name, _, configuration = source.partition(":")
    if path.is_dir():
        yield from _directory(path, key, split)
    elif path.suffix in _READERS:
        _refuse_split(source, split)
        yield source, _READERS[path.suffix](path)
    elif ":" in source and not _HUB_NAME.fullmatch(name):
        _refuse_split(source, split)
        yield source, _yielded(source, key)
    elif _HUB_NAME.fullmatch(name):
        yield source, _hub(name, configuration, split, key)
    else:
        raise InputError(
            f"{key} = {source!r} is neither a {', '.join(_READERS)} file, nor a directory, nor file.py:function, nor "
            "the name of a Hugging Face dataset (owner/name)"
        )


def _yielded(source: str, key: str) -> Iterator[Any]:
    function = load_function(source, key)
    try:
        yield from function()
    except (Exception, SystemExit) as error:
        raise InputError(f"{source} failed: {type(error).__name__}: {error}") from error


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/(?!.*\.py$)[\w.-]+")


def _refuse_split(source: str, split: str) -> None:
    if split != "train":
        raise InputError(f"{source} has no splits, and cannot be asked for {split!r} (data.split, data.eval_split)")


def _directory(path: Path, key: str, split: str) -> Iterator[tuple[str, Iterator[Any]]]:
    if (path / "dataset_dict.json").exists() or (path / "dataset_info.json").exists():
        yield str(path), _saved(path, split, key)
        return
    _refuse_split(str(path), split)
    files = sorted(file for file in path.iterdir() if file.suffix in _READERS)
    if not files:
        raise InputError(f"{key} = {str(path)!r} has no {', '.join(_READERS)} file, and is no dataset saved to disk")
    for file in files:
        yield str(file), _READERS[file.suffix](file)


def _saved(path: Path, split: str, key: str) -> Iterator[Any]:
    datasets = _imported("datasets", key)
    try:
        saved = datasets.load_from_disk(str(path))
        if (path / "dataset_dict.json").exists():
            saved = _split(saved, split, str(path))
        else:
            _refuse_split(str(path), split)
        yield from saved
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise InputError(
            f"{path} cannot be read as a dataset saved to disk: {type(error).__name__}: {error}"
        ) from error


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
                except (ValueError, RecursionError) as error:
                    raise InputError(f"{path}, line {number} is not JSON: {error}") from None


def _json(path: Path) -> Iterator[Any]:
    with _reading(path) as file:
        try:
            content = json.load(file)
        except UnicodeDecodeError:
            raise
        except (ValueError, RecursionError) as error:
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
    row = Row(found | {name: _at(found, path, place) for name, path in columns.items()})
    row.place = place
    if "prompt" not in row:
        raise InputError(f"{place} has no 'prompt'; its columns are {sorted(map(str, row))}")
    prompt = row["prompt"]
    if isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt):
        for number, message in enumerate(prompt, 1):
            if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str | list):
                raise InputError(
                    f"{place}: message {number} of its 'prompt' needs a 'role' and a 'content', and is "
                    f"{str(message)[:60]!r}"
                )
    elif not isinstance(prompt, str) or not prompt:
        raise InputError(f"{place}: 'prompt' must be text or chat messages, not {str(prompt)[:60]!r}")
    _refuse_half_characters(prompt, place)
    return row


def _refuse_half_characters(prompt: Any, place: str) -> None:
    """JSON can spell half of a surrogate pair, which is no text."""
    try:
        json.dumps(prompt, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise InputError(f"{place}: its 'prompt' holds half of a surrogate pair, which is no character") from None


def _at(row: Mapping[str, Any], path: str, place: str) -> Any:
    """The column of that name; or, dot by dot, what lies inside one."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            raise InputError(f"{place} has no {path!r} (data.columns); its columns are {sorted(map(str, row))}")
        value = value[part]
    return value
