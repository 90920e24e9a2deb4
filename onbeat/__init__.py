"""onbeat: on-policy reinforcement learning of language models, generating and training at the same time.

    import onbeat
    result = onbeat.train("recipes/arithmetic.toml", overrides={"schedule.mode": "sync"})

Importing this package imports neither torch nor anything that does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onbeat.controller import TrainResult
    from onbeat.own_loop import open_loader, prepare_environment

__all__ = ["open_loader", "prepare_environment", "train"]


def train(*recipes: str, overrides: dict[str, Any] | None = None) -> TrainResult:
    """Train by recipes composed left to right, with dotted keys over them, as `onbeat train` does."""
    from onbeat.cli import run_until_signal
    from onbeat.config import load

    return run_until_signal(load(recipes, overrides))


def __getattr__(name: str) -> Any:
    if name in ("open_loader", "prepare_environment"):
        from onbeat import own_loop

        return getattr(own_loop, name)
    raise AttributeError(f"module 'onbeat' has no attribute {name!r}")
