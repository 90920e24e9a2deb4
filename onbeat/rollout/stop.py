"""Stop strings: a completion ends with the token that completes one of them, and keeps it.

What is kept is what was sampled, so the trainer sees every token. Only the end of the text is decoded at each step:
as many tokens as could hold the longest stop string, counting that a token may be a single byte of a character. Where
that end begins inside a character, some tokenizers give up all the bytes that follow; so it is begun at four places,
one of which is between characters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_BYTES_PER_CHARACTER = 4


def no_text(token_ids: Sequence[int]) -> str:
    """For an engine without a tokenizer, which can then honour no stop string."""
    raise RuntimeError("stop strings need a tokenizer")


def ends_with_stop(token_ids: Sequence[int], stops: Sequence[str], decode: Decode) -> bool:
    """Whether the text has come to hold a stop string. Asked after every token, so it ends near the last one."""
    if not stops:
        return False
    window = _BYTES_PER_CHARACTER * (max(map(len, stops)) + 1)
    starts = {max(0, len(token_ids) - window - offset) for offset in range(_BYTES_PER_CHARACTER)}
    texts = [decode(token_ids[start:]) for start in starts]
    return any(stop in text for stop in stops for text in texts)
