"""Every way a run can fail, in one place: what it is called, and the exit code of the process.

A bad rollout is data and never comes here (see `reward/`). What comes here stops the run, with a sentence that says
what was found, where, and what to do. Messages are for people; tests and callers look at the class.

    code  meaning
    1     a bug of onbeat's
    2     the command line or the recipe is wrong (ConfigError)
    3     the data, the model or a reward function cannot be used (InputError)
    4     a worker could not be started, or died and could not be replaced (WorkerError)
    5     a promise of the run was about to be broken, so it stopped (InvariantError)
    6     the run cannot be written down, or cannot be gone on with (CheckpointError)
    7     the numbers went bad: loss or gradient not finite again and again, or logits (NumbersError)
    130   interrupted
"""

from __future__ import annotations


class OnbeatError(Exception):
    """The root. `exit_code` is what the command line returns."""

    exit_code = 1


class ConfigError(OnbeatError):
    """A recipe or a flag that cannot be meant as written."""

    exit_code = 2


class InputError(OnbeatError):
    """Data, model or reward function that cannot be used."""

    exit_code = 3


class UndecodableError(InputError):
    """A model that an embedded generator does not compute; if it is the first one, no other would."""


class CheckpointError(OnbeatError):
    """A checkpoint that cannot be written or read, or does not fit the recipe."""

    exit_code = 6


class NumbersError(OnbeatError):
    """Loss or gradient not finite, several updates in a row; or weights that compute nothing any more."""

    exit_code = 7


class WorkerError(OnbeatError):
    """A process of ours failed. Carries the last lines of its log."""

    exit_code = 4

    def __init__(self, message: str, log_tail: str = "") -> None:
        super().__init__(message + (f"\nThe end of its log:\n{log_tail}" if log_tail else ""))


class WireError(WorkerError):
    """Bytes that are no message of ours, or a message over the size limit."""


class NoGeneratorsError(WorkerError):
    """The last generator is gone while groups are still wanted."""


class InvariantError(OnbeatError):
    """R2 or R4 would have been broken. Names period, slot and worker."""

    exit_code = 5

    def __init__(self, what: str, *, period: int, slot: int | None = None, worker: str | None = None) -> None:
        place = [f"period {period}"]
        if slot is not None:
            place.append(f"slot {slot}")
        if worker is not None:
            place.append(f"worker {worker}")
        super().__init__(f"{what} ({', '.join(place)})")
        self.period, self.slot, self.worker = period, slot, worker


class StaleRolloutError(InvariantError):
    """A completion of this period was sampled from another version of the weights."""


class TrainedTwiceError(InvariantError):
    """A slot that has been handed to the trainer was about to be handed over again."""


class MissingSlotsError(InvariantError):
    """A period was about to close with groups missing."""


class UnverifiedWeightsError(InvariantError):
    """A generator was about to serve, or a period to open, without the period's verified weights."""
