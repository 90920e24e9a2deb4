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


def train(*recipes: str, overrides: dict[str, Any] | None = None, resume: bool = False) -> TrainResult:
    """Train by recipes composed left to right, with dotted keys over them, as `onbeat train` does.

    `resume` goes on with the run in run.dir, from its last checkpoint, to the same result bit for bit.

    Works in any thread, in a notebook too. Progress is printed; problems that do not stop the run are warnings.
    """
    import asyncio
    import warnings
    from concurrent.futures import ThreadPoolExecutor

    from onbeat.controller import run
    from onbeat.recipe import load

    config = load(recipes, overrides)

    def start() -> TrainResult:
        def warn(sentence: str) -> None:
            warnings.warn(sentence, stacklevel=2)

        return asyncio.run(run(config, say=print, warn=warn, resume=resume))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return start()
    with ThreadPoolExecutor(1) as other_thread:  # a loop is running in this one
        return other_thread.submit(start).result()


def __getattr__(name: str) -> Any:
    if name in ("open_loader", "prepare_environment"):
        from onbeat import own_loop

        return getattr(own_loop, name)
    raise AttributeError(f"module 'onbeat' has no attribute {name!r}")
