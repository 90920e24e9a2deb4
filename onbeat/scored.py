"""Groups of a period or an evaluation, from the pool through the scorer, in order of arrival (drawn in loader.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from onbeat.errors import OnbeatError
from onbeat.protocols import Scorer, Tracer
from onbeat.rollout.pool import Harvest
from onbeat.status import GroupStatus
from onbeat.types import Completion, Group, GroupRequest, Prompt, Sampling


class Scored:
    """Groups of one stream and version, generated and scored, in order of arrival."""

    def __init__(
        self, harvest: Harvest, scorer: Scorer, trace: Tracer, on_scored: Callable[[Group], None] = lambda group: None
    ) -> None:
        """`on_scored` is told of each group the moment it is scored."""
        self._harvest = harvest
        self._scorer = scorer
        self._trace = trace
        self._on_scored = on_scored
        self._prompts: list[Prompt] = []
        self._arrivals: asyncio.Queue[Group | Exception] = asyncio.Queue()
        self._tasks = {asyncio.create_task(self._collect())}
        self._scoring: dict[int, tuple[int, float]] = {}
        """By slot: how many completions, since when."""
        self.closed = False

    def scoring(self, now_s: float) -> list[GroupStatus]:
        return [
            GroupStatus(
                stream=self._harvest.stream,
                slot=slot,
                state="scoring",
                worker=None,
                num_done=count,
                num_samples=count,
                age_s=now_s - since_s,
            )
            for slot, (count, since_s) in self._scoring.items()
        ]

    @property
    def num_slots(self) -> int:
        return len(self._prompts)

    def submit(self, prompts: Sequence[Prompt], samples: int, sampling: Sampling) -> None:
        for prompt in prompts:
            slot = len(self._prompts)
            self._prompts.append(prompt)
            self._harvest.submit(
                GroupRequest(
                    stream=self._harvest.stream,
                    period=self._harvest.period,
                    slot=slot,
                    samples=tuple(range(samples)),
                    token_ids=prompt.token_ids,
                    sampling=sampling,
                )
            )

    async def next(self) -> Group:
        arrival = await self._arrivals.get()
        if isinstance(arrival, Exception):
            raise arrival
        return arrival

    async def _collect(self) -> None:
        try:
            while True:
                task = asyncio.create_task(self._score(await self._harvest.next()))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except Exception as error:
            self._arrivals.put_nowait(error)

    async def _score(self, completions: tuple[Completion, ...]) -> None:
        slot = completions[0].slot
        began_s = asyncio.get_running_loop().time()
        self._scoring[slot] = len(completions), began_s
        try:
            rollouts = await self._scorer.score(self._prompts[slot], completions)
            del self._scoring[slot]
            name = f"{self._harvest.stream} {self._harvest.period}.{slot}"
            self._trace("scorer", name, began_s, asyncio.get_running_loop().time())
            group = Group(slot=slot, prompt=self._prompts[slot], rollouts=rollouts)
            self._on_scored(group)
            self._arrivals.put_nowait(group)
        except Exception as error:
            self._arrivals.put_nowait(error)

    async def close(self) -> None:
        """Stop everything; whoever still waits for a group is told."""
        self.closed = True
        self._harvest.close()
        self._arrivals.put_nowait(OnbeatError("the period was closed before its last group"))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
