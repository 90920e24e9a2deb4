"""A run that goes on without getting anywhere is told so, and stopped when that is certain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onbeat.errors import InputError, NumbersError
from onbeat.observe.metrics import Record
from onbeat.protocols import UpdateReport
from onbeat.types import Group

MAX_SKIPPED_IN_A_ROW = 3
"""Optimizer steps whose loss or gradient is not finite."""
EQUAL_PERIODS = 5
"""Periods in which no group had two different rewards, before somebody should know."""
MAX_GAP = 0.01
"""Mean distance of log-probabilities between sampler and trainer. Float32 on both sides gives some 1e-6, bfloat16 on
one of them some 1e-2."""
_MAX_KINDS = 20


class Health:
    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._problems: set[str] = set()
        self._skipped = 0
        self._equal = 0
        self._gap_told = False

    def check(self, record: Record, groups: Sequence[Group], reports: Sequence[UpdateReport]) -> None:
        """Each kind of problem is told once; what cannot get better stops the run."""
        period = f"period {record['period'] + 1}"
        self._check_rewards(period, groups)
        self._check_numbers(period, reports)
        if reports and (gap := reports[0].gap_mean) is not None:  # later ones are measured from weights that have moved
            self._check_gap(period, gap)
        self._equal = self._equal + 1 if record["zero_variance_share"] == 1.0 else 0
        if self._equal == EQUAL_PERIODS:
            self._warn(
                f"{period}: for {EQUAL_PERIODS} periods all completions of every prompt have had the same reward (now "
                f"{record['reward_mean']}), and nothing is learned. If the model always fails, give it easier prompts, "
                "a reward with partial credit, a larger algorithm.group_size or more sampling.max_new_tokens; if it "
                "always succeeds, harder prompts"
            )

    def _check_gap(self, period: str, gap: float) -> None:
        if not gap <= MAX_GAP and not self._gap_told:  # also if it is no number
            self._gap_told = True
            self._warn(
                f"{period}: the sampler's log-probabilities are {gap:.2g} from the trainer's on average (gap_mean), "
                f"more than {MAX_GAP}: what is trained on is not quite what the policy would have written. Give both "
                "the same precision, or correct for it with algorithm.importance_cap = 2"
            )

    def _check_rewards(self, period: str, groups: Sequence[Group]) -> None:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        for rollout in rollouts:
            if rollout.problem is not None and rollout.problem not in self._problems:
                if len(self._problems) < _MAX_KINDS:
                    self._warn(f"{period}: unscorable: {rollout.problem}")
                self._problems.add(rollout.problem)
        if rollouts and not any(rollout.scorable for rollout in rollouts):
            raise InputError(
                f"{period}: not one of {len(rollouts)} completions could be scored, so there is nothing to learn from: "
                f"{rollouts[0].problem}"
            )

    def _check_numbers(self, period: str, reports: Sequence[UpdateReport]) -> None:
        for report in reports:
            self._skipped = 0 if report.stepped else self._skipped + 1
            if not report.stepped:
                self._warn(
                    f"{period}: the loss ({report.loss}) or the gradient's norm ({report.grad_norm}) is not finite; "
                    "the optimizer step was skipped"
                )
            if self._skipped == MAX_SKIPPED_IN_A_ROW:
                raise NumbersError(
                    f"{period}: {MAX_SKIPPED_IN_A_ROW} optimizer steps in a row had to be skipped: the weights are "
                    "still finite, what they compute is not; begin another run with a lower trainer.learning_rate, "
                    "from the model before, or from the last good weights of this run (`onbeat export`)"
                )
