"""`file.py:function` and `package.module:function`, turned into the function, or into a sentence that says why not."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from onbeat.errors import InputError

_MAX_SHOWN = 80
"""Characters of a foreign value in a sentence."""


def load_function(path: str, key: str) -> Callable[..., Any]:
    """The function that a recipe's `key` names. Raises InputError."""
    place, colon, name = path.rpartition(":")
    if not colon or not place or not name:
        raise InputError(f"{key} = {path!r} is not of the form file.py:function or package.module:function")
    try:
        is_file = place.endswith(".py") or "/" in place
        module = _module_of_file(Path(place).expanduser()) if is_file else _module_of_name(place)
        return _member(module, name, place)
    except InputError as error:
        raise InputError(f"{key} = {path!r} cannot be loaded: {error}") from error.__cause__


def _module_of_file(file: Path) -> ModuleType:
    """Import the file as a script would be: its folder is on the path, so that it finds its neighbours."""
    file = file.resolve()
    if not file.is_file():
        raise InputError(f"there is no file {file}. Correct the path in the recipe.")
    name = f"onbeat_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"{file} is not a Python file. Name one that ends in .py.")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_failed(str(file), error) from error
    return module


def _module_of_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise InputError(
                f"there is no module {error.name}. Install it, or name a file instead: path/to/file.py:function."
            ) from error
        raise _import_failed(name, error) from error


def _import_failed(what: str, error: BaseException) -> InputError:
    return InputError(f"importing {what} raised {raised(error)}. Correct that first.")


def _member(module: ModuleType, name: str, place: str) -> Callable[..., Any]:
    offered = [key for key, value in vars(module).items() if inspect.isroutine(value) and not key.startswith("_")]
    if not hasattr(module, name):
        listed = f" It has {', '.join(offered[:10])}." if offered else " It has none at all."
        raise InputError(f"{place} has no function {name!r}{did_you_mean(name, offered)}{listed}")
    function = getattr(module, name)
    if inspect.isclass(function) or not callable(function):
        kind = "a class" if inspect.isclass(function) else described(function)
        raise InputError(f"{name!r} in {place} is {kind}. Name a function.")
    found: Callable[..., Any] = function
    return found


def did_you_mean(name: str, offered: list[str]) -> str:
    """The end of a sentence about a name that does not exist."""
    close = difflib.get_close_matches(name, offered, n=1)
    return f"; did you mean {close[0]!r}?" if close else "."


def described(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__} ({shown(value)})"


def shown(value: object) -> str:
    """A short repr of a foreign value, which may be of a class with a broken one."""
    try:
        text = repr(value)
    except Exception:
        return "its repr fails"
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"


def raised(error: BaseException) -> str:
    """The exception as "ValueError: message (line 12 of rewards.py)"; the line is the innermost one."""
    try:
        message = " ".join(str(error).split())
    except Exception:
        message = "its message cannot be shown"
    if len(message) > 4 * _MAX_SHOWN:
        message = message[: 4 * _MAX_SHOWN - 1] + "…"
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    if not frames or isinstance(error, SyntaxError):
        return text
    return f"{text} (line {frames[-1].lineno} of {Path(frames[-1].filename).name})"
