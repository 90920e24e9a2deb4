"""Ctrl-C, SIGTERM, a notebook's interrupt: the first ends a run where it can be saved, the second at once."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable

import pytest

from onbeat.interrupt import Interruption, run_interruptibly


async def ended_after(interruption: Interruption, interrupts: list[Callable[[], None]]) -> int:
    """How many of them it took to end a task that would go on for ever."""
    given = 0

    async def work() -> None:
        with interruption.handled():
            await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(work())
    for interrupt in interrupts:
        await asyncio.sleep(0)
        if task.done():
            break
        interrupt()
        given += 1
        await asyncio.wait([task], timeout=0.2)
    await asyncio.gather(task, return_exceptions=True)
    return given


def test_the_first_interrupt_ends_a_run_that_can_be_saved_as_it_is() -> None:
    interruption = Interruption()
    assert asyncio.run(ended_after(interruption, [interruption, interruption])) == 1


def test_a_run_in_the_middle_of_a_period_is_told_to_end_at_its_boundary_and_by_the_second_at_once() -> None:
    interruption = Interruption()
    told: list[str] = []
    interruption.why_not_now, interruption.say = lambda: "not yet", told.append
    assert not interruption.asked
    assert asyncio.run(ended_after(interruption, [interruption, interruption])) == 2
    assert interruption.asked
    assert told == ["not yet"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_interrupt_and_are_given_back(number: signal.Signals) -> None:
    def before(signum: int, frame: object) -> None:
        """Of the program that called us."""

    original = signal.signal(number, before)
    send = [lambda: signal.raise_signal(number)] * 2

    async def main() -> int:
        return await ended_after(Interruption(), send)

    loop = asyncio.new_event_loop()  # asyncio.run has a handler of its own
    try:
        assert loop.run_until_complete(main()) == 1
        assert signal.getsignal(number) is before
    finally:
        loop.close()
        signal.signal(number, original)


def test_an_ignored_signal_stays_ignored() -> None:
    script = """
    import asyncio, signal
    from onbeat.interrupt import Interruption

    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def main():
        with Interruption().handled():
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0)
            print("went on")

    asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("went on\n", "")


def test_under_a_running_loop_the_run_has_a_thread_and_is_interrupted_all_the_same() -> None:
    interruption = Interruption()
    ended: list[str] = []

    async def run() -> None:
        with interruption.handled():
            try:
                signal.pthread_kill(main_thread, signal.SIGINT)
                await asyncio.get_running_loop().create_future()
            finally:
                ended.append("in order")

    async def notebook() -> None:
        with pytest.raises(KeyboardInterrupt):
            run_interruptibly(run(), interruption)

    main_thread = threading.get_ident()
    asyncio.run(notebook())
    assert ended == ["in order"]


def test_what_is_not_interrupted_returns_its_result_or_its_error() -> None:
    async def fine() -> int:
        return 3

    async def wrong() -> int:
        raise ValueError("wrong")

    async def under_a_loop() -> int:
        return run_interruptibly(fine(), Interruption())

    assert run_interruptibly(fine(), Interruption()) == 3
    assert asyncio.run(under_a_loop()) == 3
    with pytest.raises(ValueError, match="wrong"):
        run_interruptibly(wrong(), Interruption())


def test_an_interrupt_that_comes_before_the_run_has_begun_ends_it() -> None:
    interruption = Interruption()
    interruption.from_other_thread()

    async def run() -> None:
        with interruption.handled():
            await asyncio.get_running_loop().create_future()

    with pytest.raises(KeyboardInterrupt):
        run_interruptibly(run(), interruption)


def test_who_is_interrupted_does_not_wait_for_what_cannot_be_stopped() -> None:
    script = """
    import asyncio, threading
    from onbeat.interrupt import in_thread

    def forever():
        threading.Event().wait()

    async def main():
        assert await in_thread(max, 1, 2) == 2
        try:
            await in_thread(int, "x")
        except ValueError as error:
            print(error)
        try:
            await asyncio.wait_for(in_thread(forever), 0.1)
        except TimeoutError:
            print("gone on")

    asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "invalid literal for int() with base 10: 'x'\ngone on\n", done.stderr
