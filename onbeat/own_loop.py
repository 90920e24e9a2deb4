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
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from onbeat.config import Config
from onbeat.environment import EXACT_ENVIRONMENT, prepare_this_process
from onbeat.loader import Period
from onbeat.observe.trace import Trace
from onbeat.protocols import Snapshot
from onbeat.recipe import load
from onbeat.run_dir import open_run_dir
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
    prepare_this_process()


def environment_gaps() -> str | None:
    """What in this process' environment keeps its numbers from being those of `onbeat train`; None if nothing.

    It can only look at what the environment is now, not at what torch found when it was imported.
    """
    gaps = [f"{key} is not {value}" for key, value in EXACT_ENVIRONMENT.items() if os.environ.get(key) != value]
    return ", ".join(gaps) or None


class OwnLoop:
    """The generating side of a run, for a loop that is not ours. Made by `open_loader`."""

    def __init__(self, session: Session, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
        self._session = session
        self._loop = loop
        self._stop = stop

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
        return self._session.loader.period(version, prompts, more=self._session.prompts)

    def why_not_exact(self) -> str | None:
        """None if the micro-batches do not depend on schedule and workers, and this process computes as ours do."""
        return environment_gaps() or self._session.why_not_exact()

    def close(self) -> None:
        """End generators and rewards; `open_loader` does it at the end of its block."""
        self._loop.call_soon_threadsafe(self._stop.set)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


@contextmanager
def open_loader(*recipes: str, overrides: dict[str, Any] | None = None) -> Iterator[OwnLoop]:
    """Start generators and rewards of the recipes; end them with the block."""
    config = load(recipes, overrides)
    if gaps := environment_gaps():
        warnings.warn(f"this process will not be bit-exact: {gaps}; see prepare_environment()", stacklevel=3)
    with open_run_dir(config, resume=False, say=print, warn=warnings.warn) as run_dir:
        yield from _serving(config, run_dir.path)


def _serving(config: Config, run_dir: Path) -> Iterator[OwnLoop]:
    opened: Future[OwnLoop] = Future()

    async def serve() -> None:
        """In the loader's thread: everything from start to end, so that however it ends, it ends in order."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        trace = Trace(run_dir / "trace.json", zero_s=loop.time())
        try:
            async with open_session(config, run_dir, trace.span, print, warnings.warn) as session:
                opened.set_result(OwnLoop(session, loop, stop))
                await stop.wait()
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)
        finally:
            trace.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="onbeat-loader", daemon=True)
    thread.start()
    own_loop = opened.result()
    try:
        yield own_loop
    finally:
        own_loop.close()
        thread.join()
