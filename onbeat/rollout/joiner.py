"""`onbeat worker --join`: a generator for a run that is going on, here or, with a token, on another machine.

Ctrl-C or SIGTERM once: it finishes the groups it has, then leaves; twice: it leaves at once, and its groups go to
others. It ends, too, when the run does.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from onbeat.config import Config
from onbeat.control import ask_to_join, connect_here, connect_there
from onbeat.errors import ConfigError, WorkerError
from onbeat.messages import Welcome
from onbeat.rollout.client import ENTRIES
from onbeat.rollout.vllm.server import check_config
from onbeat.secret import read_token

_LEFT_AT_ONCE = 130


def serve_run(
    place: str, token_file: str | None, say: Callable[[str], None], vllm_environment: str | None = None
) -> None:
    """Until the run ends, or somebody wants us to leave. Imports torch; prepare the environment first."""
    sock = connect(place, token_file)
    try:
        welcome = ask_to_join(sock)
    except OSError as error:
        raise WorkerError(f"--join {place}: the run gives no answer ({error})") from error
    if welcome is None:
        raise WorkerError(f"--join {place}: the run does not want another generator now")
    with tempfile.TemporaryDirectory(prefix="onbeat-worker-") as folder:
        config = _here(Config.model_validate_json(welcome.settings.config), vllm_environment)
        settings = msgspec.structs.replace(
            welcome.settings, model_dir=_unpacked(welcome, Path(folder)), config=config.model_dump_json()
        )
        say(f"{settings.name} joins {place}")
        module, _, function = ENTRIES[config.generator.backend].partition(":")
        main = getattr(importlib.import_module(module), function)

        def started(worker: Any) -> None:
            def leave(signum: int, frame: FrameType | None) -> None:
                signal.signal(signal.SIGINT, _leave_at_once)
                signal.signal(signal.SIGTERM, _leave_at_once)
                say("leaving when what has been begun is done; once more: at once")
                worker.leave()

            signal.signal(signal.SIGINT, leave)
            signal.signal(signal.SIGTERM, leave)

        sock.settimeout(None)
        try:
            main(sock, msgspec.msgpack.encode(settings), started)
        except (ConnectionError, TimeoutError):
            pass  # the run has ended, or is out of reach
        except OSError as error:
            raise WorkerError(f"{settings.name} has left, for {error}") from error
    say(f"{settings.name} has left")


def connect(place: str, token_file: str | None) -> socket.socket:
    if token_file is not None:
        return connect_there(place, read_token(token_file, "--token-file"))
    if not Path(place).is_dir():
        raise ConfigError(
            f"--join {place}: not the directory of a run; to join one on another machine, give HOST:PORT and "
            "--token-file"
        )
    sock = connect_here(Path(place))
    if sock is None:
        raise ConfigError(f"--join {place}: no run is going there")
    return sock


def _here(config: Config, vllm_environment: str | None) -> Config:
    """With what differs on this machine: where vLLM is, and no server but our own."""
    if config.generator.backend != "vllm":
        return config
    there = config.generator.vllm
    vllm = there.model_copy(update={"servers": (), "environment": vllm_environment or there.environment})
    ours = config.model_copy(update={"generator": config.generator.model_copy(update={"vllm": vllm})})
    check_config(ours)
    return ours


def _unpacked(welcome: Welcome, folder: Path) -> str:
    if not welcome.files:
        return welcome.settings.model_dir
    for name, content in welcome.files.items():
        (folder / Path(name).name).write_bytes(content)
    return str(folder)


def _leave_at_once(signum: int, frame: FrameType | None) -> None:
    os._exit(_LEFT_AT_ONCE)
