"""Random numbers with a name instead of a history.

The uniform number behind a token is a function of (seed, stream, version, slot, sample, position): whoever draws it,
whenever, after whatever crash, draws the same. That is half of R1; the other half is the engine's batch invariance.

The mixer is SplitMix64's finaliser (Steele, Lea, Flood 2014), chained over the fields: cheap, and every output bit
depends on every input bit. Plain Python integers: one draw per token is nothing beside a forward pass.
"""

from __future__ import annotations

from onbeat.types import Stream

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_STREAMS: dict[Stream, int] = {"train": 1, "eval": 2}


def _mix(x: int) -> int:
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def sequence_key(*, seed: int, stream: Stream, version: int, slot: int, sample: int) -> int:
    """The 64-bit key of one completion's draws."""
    key = _mix(seed)
    for part in (_STREAMS[stream], version, slot, sample):
        key = _mix(key ^ part)
    return key


def uniform(key: int, position: int) -> float:
    """In [0, 1), with 53 random bits, for the token at `position` of the completion."""
    return (_mix(key ^ _mix(position)) >> 11) * 2.0**-53


def shuffled(count: int, *, seed: int, epoch: int) -> list[int]:
    """A permutation of range(count) that depends on nothing but its arguments (not on Python's random module)."""
    key = _mix(_mix(seed) ^ epoch)
    return sorted(range(count), key=lambda index: (_mix(key ^ index), index))
