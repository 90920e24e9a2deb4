"""A real generator worker, one of whose kind says that it computes other bits. Entry point for a launcher."""

from __future__ import annotations

import socket

import msgspec

from onbeat.messages import WorkerSettings
from onbeat.rollout import worker as real

OTHER = "generator-1"


def main(sock: socket.socket, settings: bytes) -> None:
    if msgspec.msgpack.decode(settings, type=WorkerSettings).name == OTHER:
        real.fingerprint = lambda: "of another processor"
    real.main(sock, settings)
