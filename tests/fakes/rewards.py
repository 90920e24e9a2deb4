"""Reward files written for a test, and their functions run by a real scorer in real processes.

The honest reward of a completion is its length, so a reward that went to the wrong row shows.
"""

from __future__ import annotations

import asyncio
import os
import select
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from onbeat.cluster.local import LocalLauncher
from onbeat.reward.scorer import RewardScorer, ScorerCounts
from onbeat.types import Completion, Messages, Prompt, Rollout

T = TypeVar("T")
TEXTS = ("a", "bb", "poison", "dddd")
LONG_S = 60.0
"""A time limit that no test reaches."""
SHORT_S = 0.5


@dataclass(frozen=True)
class Function:
    path: str
    weight: float = 1.0


def prompt_of(source: str | Messages = "say", **columns: Any) -> Prompt:
    return Prompt(prompt_id="p", token_ids=(1,), source=source, columns=columns)


def completions_of(texts: Sequence[str]) -> list[Completion]:
    """Tokens are code points, so that `decode` needs no tokenizer."""
    return [
        Completion(
            stream="train",
            period=0,
            slot=0,
            sample=sample,
            version=0,
            token_ids=tuple(map(ord, text)),
            sampler_logprobs=(0.0,) * len(text),
            finish_reason="stop",
        )
        for sample, text in enumerate(texts)
    ]


def decode(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


def write(tmp_path: Path, source: str, name: str = "rewards.py") -> str:
    (tmp_path / name).write_text(textwrap.dedent(source))
    return str(tmp_path / name)


def poisoned(tmp_path: Path, body: str) -> Function:
    """A reward that runs `body` if a row is poisoned; `values` is what it returns unless the body does."""
    file = write(
        tmp_path,
        "import os, select, signal, sys, threading\n"
        "def reward(completions, **columns):\n"
        "    values = [float(len(text)) for text in completions]\n"
        "    if 'poison' in completions:\n"
        "        row = completions.index('poison')\n"
        + textwrap.indent(textwrap.dedent(body).strip("\n"), " " * 8)
        + "\n"
        "    return values\n",
    )
    return Function(f"{file}:reward")


@asynccontextmanager
async def scoring(
    tmp_path: Path,
    *functions: Function,
    workers: int = 2,
    timeout_s: float = LONG_S,
    load_timeout_s: float = LONG_S,
    keep: tuple[str, ...] = (),
    **limits: Any,
) -> AsyncIterator[RewardScorer]:
    launcher = LocalLauncher(tmp_path / "logs", keep=keep)
    scorer = RewardScorer(launcher, functions, decode, workers, timeout_s, load_timeout_s, **limits)
    try:
        await scorer.start()
        yield scorer
        await scorer.close()
    finally:
        await launcher.close()


def run(
    tmp_path: Path,
    *functions: Function,
    texts: Sequence[str] = TEXTS,
    prompt: Prompt | None = None,
    **settings: Any,
) -> tuple[tuple[Rollout, ...], ScorerCounts]:
    """One group scored, from start to close."""

    async def score() -> tuple[tuple[Rollout, ...], ScorerCounts]:
        async with scoring(tmp_path, *functions, **settings) as scorer:
            return await scorer.score(prompt or prompt_of(), completions_of(texts)), scorer.counts

    return asyncio.run(score())


def with_scorer(
    tmp_path: Path, *functions: Function, use: Callable[[RewardScorer], Awaitable[T]], **settings: Any
) -> T:
    async def main() -> T:
        async with scoring(tmp_path, *functions, **settings) as scorer:
            return await use(scorer)

    return asyncio.run(main())


def rewards_of(rollouts: Sequence[Rollout]) -> list[float | None]:
    return [rollout.reward for rollout in rollouts]


def assert_gone(pid: int) -> None:
    """Waits for the end of the process, bounded so that a failing test ends."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended, _, _ = select.select([process], [], [], 20.0)
    os.close(process)
    assert ended, f"process {pid} is still running"
