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
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from numbers import Real
from typing import Any

from onbeat.errors import InputError
from onbeat.functions import described, did_you_mean, load_function, shown
from onbeat.messages import ScoreCall
from onbeat.reward.builtin import BUILTINS, text_of

_VERL_MARKS = {"solution_str", "ground_truth"}
_ALSO_SPELT = "completions_ids"
"""`completion_ids` in some of TRL's own examples."""


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
        if _ALSO_SPELT in self._parameters:
            known[_ALSO_SPELT] = known["completion_ids"]
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


def load(path: str, loop: asyncio.Runner) -> LoadedFunction:
    """The function a recipe names. Raises InputError."""
    function = load_function(path, "reward.functions") if ":" in path else _builtin(path)
    try:
        return LoadedFunction(path, function, loop)
    except (TypeError, ValueError) as error:
        raise InputError(f"the parameters of {path!r} cannot be read. Wrap it in a def.") from error


def _builtin(name: str) -> Callable[..., Any]:
    if name not in BUILTINS:
        raise InputError(
            f"there is no built-in reward {name!r}{did_you_mean(name, list(BUILTINS))} "
            f"The built-in ones are {', '.join(BUILTINS)}; your own is written file.py:function."
        )
    return BUILTINS[name]
