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

    Works in any thread, in a notebook too. Progress is printed; problems that do not stop the run are warnings. An
    interrupt (Ctrl-C, SIGTERM, a notebook's stop) leaves a run that can be resumed, and raises KeyboardInterrupt.
    """
    import warnings

    from onbeat.controller import run
    from onbeat.interrupt import Interruption, run_interruptibly
    from onbeat.recipe import load

    config = load(recipes, overrides)

    def warn(sentence: str) -> None:
        warnings.warn(sentence, stacklevel=2)

    interruption = Interruption()
    work = run(config, say=print, warn=warn, resume=resume, interruption=interruption)
    return run_interruptibly(work, interruption)


def __getattr__(name: str) -> Any:
    if name in ("open_loader", "prepare_environment"):
        from onbeat import own_loop

        return getattr(own_loop, name)
    raise AttributeError(f"module 'onbeat' has no attribute {name!r}")
