"""Reading recipes: TOML files composed left to right, dotted flags over them, checked before anything is started.

    onbeat train recipes/arithmetic.toml mine.toml --schedule.mode sync --seed 3

A later file wins over an earlier one key by key; a flag wins over all files. A key nobody knows, or a value of the
wrong type, is refused with its place and the closest right key. Paths in a file are relative to that file; paths in
a flag to the working directory. No torch here.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from onbeat.config import Config, PathMark
from onbeat.errors import ConfigError

_TRUNCATIONS = {"sampling.top_p", "sampling.top_k", "sampling.min_p"}
"""People know these from elsewhere."""
_FILE_SUFFIXES = {".jsonl", ".json", ".csv", ".parquet", ".gguf", ".py"}


def load(recipes: Sequence[str | os.PathLike[str]], overrides: Mapping[str, Any] | None = None) -> Config:
    """The configuration of the recipes, composed left to right, with dotted overrides on top."""
    merged: dict[str, Any] = {}
    for recipe in recipes:
        _merge(merged, _read(Path(recipe)))
    for key, value in (overrides or {}).items():
        check_key(key)
        _merge(merged, _known(_nested(key, value), Config, f"--{key}", Path.cwd(), ""))
    try:
        return from_tree(merged)
    except ValidationError as error:
        raise ConfigError(_explain(error, recipes)) from None


def from_tree(tree: Mapping[str, Any]) -> Config:
    """The configuration of plain tables. Strict, as JSON is: a list is a tuple, an integer a float, and that is all."""
    return Config.model_validate_json(json.dumps(tree, default=str))


def _read(path: Path) -> dict[str, Any]:
    """One TOML file with its keys known and its paths absolute."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        key, is_setting, value = str(path).partition("=")
        way_out = f"; to set a key, write --{key} {value}" if is_setting else ""
        raise ConfigError(f"cannot read the recipe {path}: {error.strerror}{way_out}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    return _known(tree, Config, str(path), path.resolve().parent, "")


def _known(tree: Mapping[str, Any], model: type[BaseModel], place: str, base: Path, prefix: str) -> dict[str, Any]:
    """The tree with its keys known and its paths, relative to `base`, absolute."""
    known: dict[str, Any] = {}
    for name, value in tree.items():
        field = model.model_fields.get(name)
        if field is None:
            raise ConfigError(f"{place}: there is no key {prefix + name!r}{suggestion(prefix + name)}")
        section = _section_of(field.annotation)
        if section is not None and isinstance(value, dict):
            known[name] = _known(value, section, place, base, f"{prefix}{name}.")
        elif section is not None and section is field.annotation:
            raise ConfigError(f"{place}: {prefix + name!r} is a section with keys of its own, not {value!r}")
        elif section is not None and isinstance(value, list):
            known[name] = [
                _known(item, section, place, base, f"{prefix}{name}.") if isinstance(item, dict) else item
                for item in value
            ]
        else:
            known[name] = _resolved(prefix + name, value, base)
    return known


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The model behind a field: itself, the items of a tuple of models, or one of several forms."""
    for form in (annotation, *get_args(annotation)):
        candidate = get_args(form)[0] if get_origin(form) is Annotated else form
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key with its pydantic field, in the order of the file."""
    for name, field in model.model_fields.items():
        section = _section_of(field.annotation)
        if section is not field.annotation:
            yield f"{prefix}{name}", field
        if section is not None:
            yield from keys(section, f"{prefix}{name}.")


_KEYS: dict[str, Any] = dict(keys())


def _is_path(annotation: Any, marks: Sequence[object]) -> bool:
    """Whether it is marked as one, or one of its forms is."""
    forms = get_args(annotation)
    if get_origin(annotation) is Annotated:
        annotation, *marks = forms
        return _is_path(annotation, marks)
    return any(isinstance(mark, PathMark) for mark in marks) or any(_is_path(form, ()) for form in forms)


_PATH_KEYS = {key for key, field in _KEYS.items() if _is_path(field.annotation, field.metadata)}


def check_key(key: str) -> None:
    """Refuse a key that cannot be set with a flag."""
    if key not in _KEYS:
        raise ConfigError(f"there is no key {key!r}{suggestion(key)}")
    section = key.rpartition(".")[0]
    if section in _KEYS:
        raise ConfigError(f"{key!r} is part of {section!r}: set that as a whole, with --{section}")


def suggestion(key: str) -> str:
    """The closest right key, as the end of a sentence."""
    sections = {known.rpartition(".")[0] for known in _KEYS} - {""}
    last = key.rpartition(".")[2]
    if key in _TRUNCATIONS:
        return ", for what is trained is what is sampled from: the whole distribution, at sampling.temperature"
    by_last_name = [known for known in _KEYS if known.rpartition(".")[2] == last]
    close = difflib.get_close_matches(key, {*_KEYS, *sections} - {key}, n=1, cutoff=0.6) or by_last_name[:1]
    return f": did you mean {close[0]!r}?" if close else "; `onbeat config` lists them all"


def _absolute(value: object, base: Path) -> object:
    """`file.py:function` or a plain path, made absolute; `package.module:function` and built-ins stay as they are."""
    if not isinstance(value, str):
        return value
    file, colon, function = value.partition(":")
    path = base / os.path.expanduser(file)
    if colon:
        is_path = file.endswith(".py")
    else:
        is_path = file.startswith(("/", ".", "~")) or path.suffix in _FILE_SUFFIXES or os.path.exists(path)
    return str(path.resolve()) + colon + function if is_path else value


def _resolved(key: str, value: Any, base: Path) -> Any:
    return _absolute(value, base) if key in _PATH_KEYS else value


def _merge(into: dict[str, Any], tree: Mapping[str, Any]) -> None:
    for name, value in tree.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


def _nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    tree: dict[str, Any] = value
    return tree


_FORMS = {"number", "range"}
"""What pydantic calls the forms of a key that may have several."""


def _explain(error: ValidationError, recipes: Sequence[str | os.PathLike[str]]) -> str:
    """One sentence per problem: key, value, what is wrong."""
    where = ", ".join(str(recipe) for recipe in recipes) or "the configuration"
    sentences = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"] if part not in _FORMS)
        if problem["type"] == "missing":
            sentences.append(f"{where}: the key {key!r} is missing")
        elif problem["type"] == "value_error":
            sentences.append(f"{where}: {problem['ctx']['error']!s}")
        else:
            sentences.append(f"{where}: {key} = {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}")
    return "\n".join(sentences)


def parse_flag(key: str, text: str) -> Any:
    """A flag's value: TOML if it is TOML (numbers, booleans, lists, tables), else the text itself. A key that holds
    text gets it though it look like a number or a date."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    holds_text = key in _PATH_KEYS or (key in _KEYS and _KEYS[key].annotation is str)
    return text if holds_text and not isinstance(value, str) else value


def to_toml(config: Config) -> str:
    """The resolved configuration as a recipe that gives it again."""
    lines = [f"seed = {config.seed}"]
    for name, section in config:
        if isinstance(section, BaseModel):
            lines += ["", f"[{name}]"]
            lines += [f"{key} = {_toml_value(value)}" for key, value in section if value is not None]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case tuple() | list():
            return "[" + ", ".join(_toml_value(item) for item in value) + "]"
        case dict():
            return "{ " + ", ".join(f"{_toml_value(key)} = {_toml_value(item)}" for key, item in value.items()) + " }"
        case BaseModel():
            return "{ " + ", ".join(f"{key} = {_toml_value(item)}" for key, item in value) + " }"
        case _:
            raise TypeError(f"no TOML for {value!r}")
