"""Ctrl-C, SIGTERM, a notebook's interrupt: a run ends where it can be gone on with.

    first     the weights are those of the last boundary      ends now, saved as of that boundary
              the period has stepped already                  ends at the next boundary, saved there
    second                                                    ends now, whatever is not saved yet
    third                                                     whatever the program did with it before

An ignored signal (a job in the background of a shell) stays ignored. Signals reach the main thread alone; a run in
another thread is interrupted through `from_other_thread`.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Call it, in the run's own thread, to interrupt the run."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._before: dict[signal.Signals, Any] = {}
        """Handlers in whose place ours are."""
        self._count = 0
        self.why_not_now: Callable[[], str | None] = lambda: None
        """Told to the user if the run had better go on to its next boundary."""
        self.say: Callable[[str], None] = lambda sentence: None

    @property
    def asked(self) -> bool:
        """Whether the run should end at the next boundary."""
        return self._count > 0

    @property
    def at_once(self) -> bool:
        """Whether it should end without saving."""
        return self._count > 1

    def __call__(self) -> None:
        self._count += 1
        if self._count == 1 and (reason := self.why_not_now()) is not None:
            self.say(reason)
        elif self._task is not None:
            self._task.cancel()
        if self.at_once:
            self._release_signals()

    def from_other_thread(self) -> None:
        if self._loop is None:
            self._count += 1  # it ends as soon as it begins
        else:
            with suppress(RuntimeError):  # it has just ended
                self._loop.call_soon_threadsafe(self)

    @contextmanager
    def handled(self) -> Iterator[None]:
        """The current task is what is interrupted, by signals too if this is the main thread."""
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        if self.asked and self._task is not None:
            self._task.cancel()
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if (before := signal.getsignal(number)) is not signal.SIG_IGN:
                    self._before[number] = before
                    self._loop.add_signal_handler(number, self)
        try:
            yield
        finally:
            self._task = None
            self._release_signals()

    def _release_signals(self) -> None:
        for number, before in self._before.items():
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, before)
        self._before.clear()


def run_interruptibly(work: Coroutine[Any, Any, T], interruption: Interruption) -> T:
    """Run it, in a thread of its own where a loop is running already; KeyboardInterrupt if it was interrupted."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        try:
            return asyncio.run(work)
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
    with ThreadPoolExecutor(1) as other_thread, _signals_passed_on(interruption):
        try:
            return other_thread.submit(asyncio.run, work).result()
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


@contextmanager
def _signals_passed_on(interruption: Interruption) -> Iterator[None]:
    """To the thread in which the run is, whatever this thread's loop does with them."""
    here = threading.current_thread() is threading.main_thread()
    taken = [number for number in _SIGNALS if here and signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, lambda signum, frame: interruption.from_other_thread()) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """What may take long and cannot be stopped: who is interrupted does not wait for its end, nor does the program."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(settler: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            settler(value)

    def work() -> None:
        try:
            settler, value = result.set_result, function(*arguments)
        except BaseException as error:
            settler, value = result.set_exception, error  # type: ignore[assignment]
        with suppress(RuntimeError):  # nobody waits any more
            loop.call_soon_threadsafe(settle, settler, value)

    threading.Thread(target=work, name=function.__name__, daemon=True).start()
    return await result
