"""onbeat's loader in a training script of your own.

    import onbeat

    onbeat.prepare_environment()                  # before torch is imported
    import torch …

    with onbeat.open_loader("recipe.toml") as loader:
        for version in range(10):
            loader.publish(version, model.named_parameters())
            for microbatch in loader.period(version, loader.take_prompts()):
                …                                 # your forward and backward, while the others are generated

    your thread                        the loader's thread (asyncio)
      period() ───────── opens ──────────▶ submits prompts; pool, scorer and packing run here
      next(microbatch) ── waits ─────────▶ answers when one is ready
      forward, backward                    goes on meanwhile: the period's groups bound how far ahead it gets
      publish() ──────── waits ──────────▶ two phases, all generators

The thread lives as long as the `with` block. If a worker dies for good, the next call of yours raises; if your
script dies, however, so do the workers.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import warnings
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from onbeat.cluster.local import EXACT_ENVIRONMENT
from onbeat.config import Config, load
from onbeat.controller import prepare_run_dir
from onbeat.loader import Period
from onbeat.observe.trace import Trace
from onbeat.protocols import Snapshot
from onbeat.session import Session, open_session
from onbeat.types import Prompt

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def prepare_environment() -> None:
    """Set what torch must find when it is imported; warn if that is too late."""
    if "torch" in sys.modules:
        if missing := environment_gaps():
            warnings.warn(f"torch was imported before prepare_environment(): not bit-exact ({missing})", stacklevel=2)
        return
    os.environ.update(EXACT_ENVIRONMENT)


def environment_gaps() -> str | None:
    """What in this process' environment keeps its numbers from being those of `onbeat train`; None if nothing."""
    gaps = [f"{key} is not {value}" for key, value in EXACT_ENVIRONMENT.items() if os.environ.get(key) != value]
    return ", ".join(gaps) or None


class OwnLoop:
    """The generating side of a run, for a loop that is not ours. Made by `open_loader`."""

    def __init__(self, session: Session, loop: asyncio.AbstractEventLoop) -> None:
        self._session = session
        self._loop = loop

    @property
    def config(self) -> Config:
        return self._session.config

    @property
    def model_dir(self) -> str:
        """Where the starting weights are."""
        return str(self._session.model_dir)

    def take_prompts(self) -> list[Prompt]:
        """The next period's prompts, in the recipe's order."""
        return self._session.prompts.take(self.config.schedule.prompts_per_period)

    def publish(self, version: int, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Give the generators these weights as `version`; they serve them when this returns."""
        from onbeat.weights import snapshot

        fd, num_bytes, digest = snapshot.write(parameters)
        published = Snapshot(version=version, digest=digest, num_bytes=num_bytes, handle=fd)
        self._call(self._session.channel.publish(published))

    def period(self, version: int, prompts: list[Prompt]) -> Period:
        """Send the prompts and return at once; iterate over the result for micro-batches."""
        return self._session.loader.period(version, prompts)

    def why_not_exact(self) -> str | None:
        """None if the micro-batches do not depend on schedule and workers, and this process computes as ours do."""
        return environment_gaps() or self._session.why_not_exact()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


@contextmanager
def open_loader(*recipes: str, overrides: dict[str, Any] | None = None) -> Iterator[OwnLoop]:
    """Start generators and rewards of the recipes; end them with the block."""
    config = load(recipes, overrides)
    run_dir = prepare_run_dir(config)
    if gaps := environment_gaps():
        warnings.warn(f"this process will not be bit-exact: {gaps}; see prepare_environment()", stacklevel=3)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="onbeat-loader", daemon=True)
    thread.start()

    def call(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    trace = Trace(run_dir / "trace.json", zero_s=loop.time())
    opened = open_session(config, run_dir, trace.span, warnings.warn)
    try:
        session = call(opened.__aenter__())
        try:
            yield OwnLoop(session, loop)
        finally:
            call(opened.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        trace.close()
