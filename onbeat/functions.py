"""`file.py:function` and `package.module:function`, turned into the function, or into a sentence that says why not."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from onbeat.errors import InputError


def load_function(path: str, key: str) -> Callable[..., Any]:
    """The function a recipe's `key` names."""
    file, colon, name = path.rpartition(":")
    if not colon or not file or not name:
        raise InputError(f"{key} = {path!r} is not of the form file.py:function or package.module:function")
    module = _load_file(Path(file), key) if file.endswith(".py") else _load_module(file, key)
    function = getattr(module, name, None)
    if not callable(function):
        names = [known for known in dir(module) if callable(getattr(module, known)) and not known.startswith("_")]
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError(f"{key} = {path!r}: {file} has no function {name!r}{hint}")
    found: Callable[..., Any] = function
    return found


def _load_file(file: Path, key: str) -> ModuleType:
    """The file as a module. Its folder is importable, so that it may have helpers beside it."""
    if not file.is_file():
        raise InputError(f"{key}: there is no file {file}")
    name = f"onbeat_user_{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise InputError(f"{key}: {file} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _load_module(name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise InputError(f"{key}: the module {name!r} cannot be imported: {type(error).__name__}: {error}") from error
