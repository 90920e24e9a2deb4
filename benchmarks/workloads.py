"""The workloads, in one place: what is asked, how many answers, how long, scored by what.

SmolLM2-135M in float32, temperature 1. Rows and rewards are in rivals/tasks.py, the same for every contender, taken in
the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    rows: str
    reward: str
    prompts: int
    max_new_tokens: int
    beta: float
    updates: int
    """Of one run: one where an update of TRL takes minutes."""
    group_size: int = 8

    @property
    def completions(self) -> int:
        """Of an update."""
        return self.prompts * self.group_size

    @property
    def task(self) -> dict[str, str]:
        return {"rows": self.rows, "reward": self.reward}

    @property
    def keys(self) -> dict[str, Any]:
        """Of a recipe; everything else is onbeat's default."""
        return {
            "schedule.prompts_per_period": self.prompts,
            "algorithm.group_size": self.group_size,
            "algorithm.beta": self.beta,
            "sampling.max_new_tokens": self.max_new_tokens,
            "data.shuffle": False,
        }


SHORT = Workload(rows="sums", reward="right_sum", prompts=8, max_new_tokens=16, beta=0.02, updates=2)
WORKLOADS = {
    "short": SHORT,
    "short, beta 0": Workload(rows="sums", reward="right_sum", prompts=8, max_new_tokens=16, beta=0.0, updates=2),
    "chat": Workload(rows="chat", reward="vowels", prompts=4, max_new_tokens=128, beta=0.02, updates=1),
    "long-prompt": Workload(rows="long_prompt", reward="vowels", prompts=4, max_new_tokens=64, beta=0.02, updates=1),
    "long-answer": Workload(rows="long_answer", reward="vowels", prompts=4, max_new_tokens=256, beta=0.02, updates=1),
    "unequal": Workload(rows="sums", reward="every_other", prompts=32, max_new_tokens=128, beta=0.0, updates=1),
    "balanced": Workload(rows="sums", reward="every_other", prompts=96, max_new_tokens=16, beta=0.0, updates=1),
}
AGAINST_TRL = ("short", "short, beta 0", "chat", "long-prompt", "long-answer")
