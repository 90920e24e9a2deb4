"""A worker's first word: that it is ready, or why it cannot be."""

from __future__ import annotations

from typing import Any, TypeVar

from msgspec import Struct

from onbeat.errors import UndecodableError, WorkerError
from onbeat.messages import Failed
from onbeat.protocols import Child

R = TypeVar("R", bound=Struct)


async def first_word(child: Child[Any], ready: type[R]) -> R:
    """Wait for the worker to be ready. Raises WorkerError with its reason, or with the end of its log;
    UndecodableError if it is the model."""
    async for message in child.connection.messages():
        match message:
            case ready():
                return message
            case Failed(reason=reason, undecodable=True):
                raise UndecodableError(reason)
            case Failed(reason=reason):
                raise WorkerError(f"{child.name} cannot start: {reason}")
            case _:
                raise WorkerError(f"{child.name} began with a {type(message).__name__}")
    raise WorkerError(f"{child.name} died while starting (status {await child.exited()})", child.log_tail())
