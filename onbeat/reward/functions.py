"""From the name in a recipe to a call and a checked list of rewards. Runs in the reward worker.

    load("rewards.py:score")  →  LoadedFunction  →  .score(call)  →  [1.0, None, 0.0]

Two signatures are understood, told apart by the names of their parameters; both may be `async def`:

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]        the field's (TRL's)
    def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float     verl's, called per row

A function gets only what it has parameters for. What comes back is believed only after `checked`: a reward that is
not n finite numbers is an error that says what it was, never a 0.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from onbeat.messages import ScoreCall
from onbeat.reward.builtin import BUILTINS, text_of

_MAX_SHOWN = 80
"""Characters of a foreign value or message in a sentence."""
_VERL_MARKS = {"solution_str", "ground_truth"}


class LoadError(Exception):
    """A function that cannot be used at all; the text is a sentence for the user."""


class RewardError(Exception):
    """A call that gave no rewards; the text continues the sentence "The reward function x …"."""


class LoadedFunction:
    def __init__(self, path: str, function: Callable[..., Any], loop: asyncio.Runner) -> None:
        self.path = path
        self._function = function
        self._loop = loop
        self._parameters = inspect.signature(function).parameters
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())
        self._is_verl = self._parameters.keys() >= _VERL_MARKS

    def score(self, call: ScoreCall) -> list[float | None]:
        """Rewards of the call's completions. Raises RewardError, or whatever the user's code raises."""
        num_rows = len(call.completions)
        if self._is_verl:
            return checked([self._verl_score(call, row) for row in range(num_rows)], num_rows)
        known = call.columns | {
            "prompts": call.prompts,
            "completions": call.completions,
            "completion_ids": [list(ids) for ids in call.completion_ids],
        }
        return checked(self._run(known), num_rows)

    def _verl_score(self, call: ScoreCall, row: int) -> Any:
        columns = {name: values[row] for name, values in call.columns.items()}
        known = {
            "data_source": columns.get("data_source", ""),
            "solution_str": text_of(call.completions[row]),
            "ground_truth": ground_truth(columns),
            "extra_info": columns.get("extra_info"),
        }
        score = self._run(known)
        if not isinstance(score, dict):
            return score
        if "score" not in score:
            raise RewardError(f"returned a dict without 'score': {shown(score)}")
        return score["score"]

    def _run(self, known: Mapping[str, Any]) -> Any:
        """Call it with what it takes of `known`; wait for it if it is asynchronous."""
        missing = [
            p.name
            for p in self._parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in known
        ]
        if missing:
            raise RewardError(f"needs {' and '.join(map(repr, missing))}; the data offers {', '.join(sorted(known))}")
        given = known if self._takes_all else {k: v for k, v in known.items() if k in self._parameters}
        result = self._function(**given)
        return self._loop.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def ground_truth(columns: Mapping[str, Any]) -> Any:
    """verl's data keeps it in `reward_model["ground_truth"]`; a plain column wins."""
    if "ground_truth" in columns:
        return columns["ground_truth"]
    reward_model = columns.get("reward_model")
    if isinstance(reward_model, dict) and "ground_truth" in reward_model:
        return reward_model["ground_truth"]
    raise RewardError(
        "needs a column 'ground_truth', or 'reward_model' with a key 'ground_truth'; "
        f"the data offers {', '.join(sorted(columns)) or 'no columns'}"
    )


def checked(values: object, num_rows: int) -> list[float | None]:
    """The values as `num_rows` rewards. Raises RewardError that says what came back instead."""
    if not isinstance(values, list | tuple) and hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise RewardError(f"returned {described(values)}, not a list of {num_rows} numbers")
    if len(values) != num_rows:
        raise RewardError(f"returned {len(values)} values for {num_rows} completions")
    return [_checked_value(value, f" in row {row}" if num_rows > 1 else "") for row, value in enumerate(values)]


def _checked_value(value: Any, place: str) -> float | None:
    """One reward as a float. `place` is empty if there is only one."""
    if value is None:
        return None
    if not isinstance(value, Real) and hasattr(value, "item") and getattr(value, "size", 1) == 1:
        value = value.item()
    if not isinstance(value, Real):
        raise RewardError(f"returned {described(value)}{place}, not a number or None")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isnan(number):
        raise RewardError(f"returned NaN{place}")
    if math.isinf(number):
        raise RewardError(f"returned an infinite number{place}")
    return number


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


def load(path: str, loop: asyncio.Runner) -> LoadedFunction:
    """The function a recipe names. Raises LoadError."""
    place, colon, name = path.rpartition(":")
    try:
        if not colon:
            function = _builtin(path)
        elif place.endswith(".py") or "/" in place:
            function = _member(_module_of_file(Path(place).expanduser()), name, place)
        else:
            function = _member(_module_of_name(place), name, place)
        return LoadedFunction(path, function, loop)
    except LoadError as error:
        raise LoadError(f"The reward function {path} cannot be loaded: {error}") from error.__cause__


def _builtin(name: str) -> Callable[..., Any]:
    if name not in BUILTINS:
        raise LoadError(
            f"there is no built-in reward {name!r}{_did_you_mean(name, list(BUILTINS))} "
            f"The built-in ones are {', '.join(BUILTINS)}; your own is written file.py:function."
        )
    return BUILTINS[name]


def _module_of_file(file: Path) -> ModuleType:
    """Import the file as a script would be: its folder is on the path, so that it finds its neighbours."""
    file = file.absolute()
    if not file.is_file():
        raise LoadError(f"there is no file {file}. Correct the path in the recipe's reward.functions.")
    name = f"reward_file_{file.parent.as_posix().replace('.', '_')}_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise LoadError(f"{file} is not a Python file. Name one that ends in .py.")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        raise _import_failed(str(file), error) from error
    return module


def _module_of_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise LoadError(
                f"there is no module {error.name}. Install it, or name a file instead: path/to/file.py:function."
            ) from error
        raise _import_failed(name, error) from error


def _import_failed(what: str, error: BaseException) -> LoadError:
    return LoadError(
        f"importing {what} raised {raised(error)}. Correct that; the whole traceback is in this worker's log."
    )


def _member(module: ModuleType, name: str, place: str) -> Callable[..., Any]:
    offered = [key for key, value in vars(module).items() if inspect.isroutine(value) and not key.startswith("_")]
    if not hasattr(module, name):
        listed = f" It has {', '.join(offered[:10])}." if offered else " It has none at all."
        raise LoadError(f"{place} has no function {name!r}{_did_you_mean(name, offered)}{listed}")
    function = getattr(module, name)
    if inspect.isclass(function) or not callable(function):
        kind = "a class" if inspect.isclass(function) else described(function)
        raise LoadError(f"{name!r} in {place} is {kind}. Name a function.")
    try:
        inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise LoadError(f"the parameters of {name!r} in {place} cannot be read. Wrap it in a def.") from error
    found: Callable[..., Any] = function
    return found


def _did_you_mean(name: str, offered: list[str]) -> str:
    close = difflib.get_close_matches(name, offered, n=1)
    return f"; did you mean {close[0]!r}?" if close else "."
