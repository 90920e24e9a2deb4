"""Rewards of a group: one call per function, in processes that may be killed; a bad reward is data (R6).

    score(group) ─┬─ function 0 ── call(all rows) ──▶ a free seat ──▶ reward process ── user code
                  └─ function 1 ── call(all rows) ──▶ a free seat ──▶ reward process ── user code
                                     │ fails
                                     └─ call(row) for each row, over all seats ── fails again: unscorable

Who waits for whom, and what bounds it:
- A call waits for a free seat. Each seat has one process, and that one call at a time: so num_workers bounds what runs,
  and one frame each way is what the sockets hold. Groups wait in the order they came.
- The controller waits timeout_s for an answer and no longer. The loading of a process has a limit of its own.
- The worker waits for the next call for ever; it ends with its socket.

When the other side …
- … hangs: the time limit; the process and all it started are killed. The seat is refilled when it is next wanted.
- … dies: the stream ends; its call fails with the exit status. If it was idle, nobody notices but `restarts`.
- … speaks twice, or late, or unasked: not the number of the call under way, so dropped and counted.
- … speaks nonsense: as if it had died.
- … cannot be replaced (its file was changed): WorkerError, and the run stops.

The controller dies: the fork server kills everybody. `close` kills, and waits until all are gone; a call under way
then gets WorkerError. A caller that gives up waiting has its process killed, because it may hang.

What the rewards are does not depend on any of this for a function of its arguments alone: a call that failed for a
neighbour's sake is repeated row by row, each row with the whole time limit, and results are put together by row
and function, not by arrival. A function with a state or with random numbers sees those rows twice.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from onbeat.messages import Limits
from onbeat.protocols import Launcher
from onbeat.reward.workers import CallError, RewardWorkers, ScorerCounts
from onbeat.types import Completion, Prompt, Rollout

_LOAD_TIMEOUT_S = 300.0
"""For the imports of a reward file, which may load a model."""

Outcome = float | None | CallError
"""Of one function on one row: a reward, "does not apply", or the failure."""


class WeightedFunction(Protocol):
    """config.RewardFunction, or anything like it."""

    @property
    def path(self) -> str: ...
    @property
    def weight(self) -> float: ...


class RewardScorer:
    """The Scorer of a run (see protocols.py)."""

    def __init__(
        self,
        launcher: Launcher,
        functions: Sequence[WeightedFunction],
        decode: Callable[[Sequence[int]], str],
        num_workers: int,
        timeout_s: float,
        load_timeout_s: float = _LOAD_TIMEOUT_S,
        memory_bytes: int = 4 << 30,
        cpu_s: float | None = None,
        strict: bool = False,
    ) -> None:
        """`cpu_s`: processor time of a call; by default what all cores can give within the time limit."""
        self._functions = tuple(functions)
        self._decode = decode
        paths = tuple(function.path for function in functions)
        cpu_s = timeout_s * len(os.sched_getaffinity(0)) if cpu_s is None else cpu_s
        limits = Limits(memory_bytes=memory_bytes, cpu_s=cpu_s, strict=strict)
        self._workers = RewardWorkers(launcher, paths, num_workers, timeout_s, load_timeout_s, limits)

    @property
    def counts(self) -> ScorerCounts:
        return self._workers.counts

    def workers(self) -> list[tuple[str, int, str]]:
        """Name, pid and state of every process."""
        return self._workers.states()

    async def start(self) -> None:
        """Raises InputError, with a sentence for the user, if a function cannot be loaded."""
        await self._workers.start()

    async def close(self) -> None:
        await self._workers.close()

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> tuple[Rollout, ...]:
        if not completions:
            return ()
        texts = [self._decode(completion.token_ids) for completion in completions]
        outcomes = await asyncio.gather(
            *(self._outcomes(index, prompt, texts, completions) for index in range(len(self._functions)))
        )
        return tuple(
            judged(completion, text, row, self._functions)
            for completion, text, row in zip(completions, texts, zip(*outcomes, strict=True), strict=True)
        )

    async def _outcomes(
        self, function: int, prompt: Prompt, texts: list[str], completions: Sequence[Completion]
    ) -> Sequence[Outcome]:
        """One function on every row: together, or each by itself if that fails."""
        try:
            return await self._workers.call(function, len(texts), arguments(prompt, texts, completions))
        except CallError:
            rows = zip(texts, completions, strict=True)
            return await asyncio.gather(*(self._outcome(function, prompt, *row) for row in rows))

    async def _outcome(self, function: int, prompt: Prompt, text: str, completion: Completion) -> Outcome:
        try:
            return (await self._workers.call(function, 1, arguments(prompt, [text], [completion])))[0]
        except CallError as failure:
            return failure


def arguments(prompt: Prompt, texts: list[str], completions: Sequence[Completion]) -> dict[str, Any]:
    """What a reward function sees of these rows: a chat is answered by a message, a text by a text."""
    num_rows = len(texts)
    is_chat = not isinstance(prompt.source, str)
    return {
        "prompts": [prompt.source] * num_rows,
        "completions": [[{"role": "assistant", "content": text}] for text in texts] if is_chat else texts,
        "completion_ids": [completion.token_ids for completion in completions],
        "columns": {name: [value] * num_rows for name, value in prompt.columns.items()},
    }


def judged(
    completion: Completion, text: str, outcomes: Sequence[Outcome], functions: Sequence[WeightedFunction]
) -> Rollout:
    """The rollout with the weighted sum of what applies; unscorable if any function failed on it or none applies."""
    problems = [
        f"The reward function {function.path} {outcome}."
        for function, outcome in zip(functions, outcomes, strict=True)
        if isinstance(outcome, CallError)
    ]
    rewards = tuple(None if isinstance(outcome, CallError) else outcome for outcome in outcomes)
    terms = [f.weight * reward for f, reward in zip(functions, rewards, strict=True) if reward is not None]
    total = sum(terms)
    if not problems and not terms:
        names = ", ".join(function.path for function in functions)
        problems.append(f"No reward function applies: None came back from {names}.")
    elif not problems and not math.isfinite(total):
        problems.append(f"The weighted sum of the rewards {rewards} is not a finite number.")
    return Rollout(
        completion=completion,
        text=text,
        reward=None if problems else total,
        rewards=rewards,
        problem=" ".join(problems) or None,
    )
