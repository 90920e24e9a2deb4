"""Prompts in the order they are trained on: epoch after epoch, each shuffled by the seed, with a cursor.

The order is a function of (rows, seed). Which rows period t gets does not depend on anything that happened before,
unless dynamic sampling took further ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from onbeat.errors import InputError
from onbeat.keyed import shuffled
from onbeat.prompts.codec import Codec
from onbeat.prompts.rows import Row
from onbeat.types import Prompt

T = TypeVar("T")
_HELD_OUT_EPOCH = 2**32 - 1
"""No run gets so far: a shuffle of its own."""


def encode_rows(rows: Sequence[Row], codec: Codec, max_prompt_tokens: int) -> tuple[list[Prompt], list[str]]:
    """The rows as prompts, and the names of those that were too long and left out."""
    prompts, dropped = [], []
    for number, row in enumerate(rows, 1):
        columns = {name: value for name, value in row.items() if name != "prompt"}
        prompt_id = str(row.get("id", number))
        try:
            token_ids = codec.encode(row["prompt"])
        except InputError as error:
            raise InputError(f"{row.place}: {error}") from None
        if not 0 < len(token_ids) <= max_prompt_tokens:
            dropped.append(prompt_id if "id" in row else row.place)
        else:
            prompts.append(Prompt(prompt_id=prompt_id, token_ids=token_ids, source=row["prompt"], columns=columns))
    if not prompts:
        raise InputError(f"none of the {len(rows)} prompts has between 1 and {max_prompt_tokens} tokens")
    return prompts, dropped


def hold_out(rows: Sequence[T], num_rows: int, seed: int) -> tuple[list[T], list[T]]:
    """What to train on, in its order, and `num_rows` others to evaluate on, chosen by the seed alone."""
    if num_rows >= len(rows):
        raise InputError(f"data.eval_rows = {num_rows} would leave nothing to train on: there are {len(rows)} prompts")
    chosen = set(shuffled(len(rows), seed=seed, epoch=_HELD_OUT_EPOCH)[:num_rows])
    train = [row for number, row in enumerate(rows) if number not in chosen]
    return train, [rows[number] for number in sorted(chosen)]


class PromptCursor:
    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order: list[int] = []
        self.position = 0
        """Prompts taken so far, over all epochs."""

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next prompts; goes round when the rows are used up."""
        taken = [self._prompt(self.position + offset) for offset in range(num_prompts)]
        self.position += num_prompts
        return taken

    def _prompt(self, position: int) -> Prompt:
        epoch, index = divmod(position, len(self._prompts))
        if not self._shuffle:
            return self._prompts[index]
        if epoch != self._epoch:
            self._order, self._epoch = shuffled(len(self._prompts), seed=self._seed, epoch=epoch), epoch
        return self._prompts[self._order[index]]
