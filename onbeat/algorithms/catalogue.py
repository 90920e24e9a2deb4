"""The algorithm of a recipe: one of ours by name, with what the recipe changes of it; or a user's own functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from onbeat.algorithms import cispo, dapo, dr_grpo, grpo, gspo, reinforce_pp, rloo
from onbeat.algorithms.base import Advantages, Algorithm, TokenLoss, Tokens
from onbeat.config import AlgorithmConfig
from onbeat.errors import InputError
from onbeat.functions import load_function, raised

ALGORITHMS: dict[str, Algorithm] = {
    module.ALGORITHM.name: module.ALGORITHM for module in (grpo, dr_grpo, dapo, rloo, reinforce_pp, gspo, cispo)
}


def algorithm_of(config: AlgorithmConfig, loads: Literal["advantage", "loss"]) -> Algorithm:
    """As the recipe wants it. Of a user's own functions, the controller needs one and the trainer the other: only that
    one is loaded. Raises InputError if it cannot be."""
    found = ALGORITHMS[config.name]
    changes: dict[str, Any] = {
        key: value
        for key in ("clip_low", "clip_high", "loss_mean", "dynamic_sampling")
        if (value := getattr(config, key)) is not None
    }
    if config.scale_advantages is not None:
        if found.advantages not in (grpo.scaled, grpo.centred):
            raise InputError(f"algorithm.scale_advantages: the advantages of {config.name!r} have no such choice")
        changes["advantages"] = grpo.scaled if config.scale_advantages else grpo.centred
    if config.advantage is not None and loads == "advantage":
        changes |= {"advantages": _own_advantages(config.advantage), "over_batch": None}
    if config.loss is not None and loads == "loss":
        changes["loss"] = _own_loss(config.loss)
    return replace(found, **changes)


def _own_advantages(source: str) -> Callable[[Sequence[float]], Advantages]:
    """A user's function, whose mistakes are told with its name."""
    function = load_function(source, "algorithm.advantage")

    def advantages(rewards: Sequence[float]) -> Advantages:
        try:
            found = tuple(float(value) for value in function(list(rewards)))
        except Exception as error:
            raise InputError(f"algorithm.advantage = {source!r} failed on {list(rewards)}: {raised(error)}") from error
        if len(found) != len(rewards) or not all(map(math.isfinite, found)):
            raise InputError(
                f"algorithm.advantage = {source!r} must return {len(rewards)} finite numbers for {list(rewards)}, and "
                f"returned {found}"
            )
        return found

    return advantages


def _own_loss(source: str) -> Callable[[Tokens], TokenLoss]:
    """The same for a loss."""
    function = load_function(source, "algorithm.loss")

    def loss(tokens: Tokens) -> TokenLoss:
        try:
            found: object = function(tokens)
        except Exception as error:
            raise InputError(f"algorithm.loss = {source!r} failed: {raised(error)}") from error
        if not isinstance(found, TokenLoss):
            raise InputError(
                f"algorithm.loss = {source!r} must return a TokenLoss, and returned {type(found).__name__}"
            )
        shape, shapes = tuple(tokens.policy_logprobs_T.shape), [tuple(getattr(part, "shape", ())) for part in found]
        if shapes != [shape, shape]:
            raise InputError(f"algorithm.loss = {source!r} must return two tensors of {shape}, and returned {shapes}")
        if not found.loss_T.requires_grad:
            raise InputError(f"algorithm.loss = {source!r} does not depend on policy_logprobs_T: there is no gradient")
        return found

    return loss
