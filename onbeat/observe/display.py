"""The live display on a terminal: the last lines of the screen, kept up to date; lines of the run scroll above it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from onbeat.observe.recorder import number, percent
from onbeat.status import Status, headline, sparkline

_REFRESH_S = 0.5


@asynccontextmanager
async def live(status: Callable[[], Status]) -> AsyncIterator[None]:
    """Show the status while the block runs."""
    with Live(render(status()), console=Console(), auto_refresh=False, transient=True) as screen:
        task = asyncio.create_task(_refresh(screen, status))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _refresh(screen: Live, status: Callable[[], Status]) -> None:
    while True:
        screen.update(render(status()), refresh=True)
        await asyncio.sleep(_REFRESH_S)


def render(status: Status) -> Group:
    """Period, groups, rewards, who waits for whom."""
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=max(1, status.num_groups), completed=status.num_groups_done, width=24), Text(headline(status))
    )
    last = status.reward_means[-1] if status.reward_means else None
    trend = f"reward {number(last)}  {sparkline(status.reward_means)}"
    if status.accuracy is not None:
        trend += f"  held-out accuracy {percent(status.accuracy)}"
    workers = Table.grid(padding=(0, 2))
    for worker in status.workers:
        workers.add_row(Text(worker.name, style="bold"), Text(worker.state))
    return Group(bar, Text(trend), workers, Text(f"waits for {status.waiting_for}", style="dim"))
