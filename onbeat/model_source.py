"""Where a run's model comes from: a directory, or a function that fills one, once.

`model.path = "recipe.py:make_model"` calls make_model(directory) in a child process that may import torch, and keeps
the result in the cache, named by the content of the file: edit the file and the model is made anew.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
from pathlib import Path

import msgspec

from onbeat.errors import InputError, WorkerError
from onbeat.functions import load_function, raised
from onbeat.messages import Failed
from onbeat.protocols import Launcher
from onbeat.wire import Channel

_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
_MAX_FILES_BYTES = 64 << 20


class MakeModel(msgspec.Struct, frozen=True):
    source: str
    directory: str


class ModelMade(msgspec.Struct, frozen=True, tag=True):
    pass


def cache_dir() -> Path:
    """`$ONBEAT_CACHE`, else `onbeat` in the user's cache directory."""
    if own := os.environ.get("ONBEAT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onbeat"


def model_directory(path: str) -> Path:
    """Where the model is, or will be once it has been made."""
    file, colon, function = path.rpartition(":")
    if not colon:
        return Path(path)
    if not Path(file).is_file():
        raise InputError(f"model.path: there is no file {file}")
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    return cache_dir() / "models" / f"{Path(file).stem}-{function}-{digest}"


async def obtain_model(path: str, launcher: Launcher) -> Path:
    """The model's directory, made if need be."""
    directory = model_directory(path)
    if (directory / "config.json").is_file():
        return directory
    if ":" not in path:
        raise InputError(f"model.path = {path!r} is not a model directory: there is no {directory / 'config.json'}")
    child = await launcher.spawn(
        name="model",
        entry="onbeat.model_source:main",
        settings=MakeModel(path, str(directory)),
        receives=ModelMade | Failed,
        uses_torch=True,
    )
    async for message in child.connection.messages():
        if isinstance(message, Failed):
            raise InputError(f"model.path = {path!r}: {message.reason}")
        return directory
    raise InputError(f"model.path = {path!r}: the process that makes the model died\n{child.log_tail()}")


def make_model(source: str, directory: Path) -> None:
    """Call the function on a fresh directory beside the model's place, then move it there in one step."""
    beside = directory.with_name(f"{directory.name}.{os.getpid()}")
    beside.mkdir(parents=True)
    try:
        load_function(source, "model.path")(beside)
        if not (beside / "config.json").is_file():
            raise InputError("the function left no config.json in the directory it was given")
        try:
            beside.rename(directory)
        except OSError:
            if not (directory / "config.json").is_file():  # another run may have been first
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def small_files(model_dir: Path) -> dict[str, bytes]:
    """Everything a model directory holds but the weights."""
    found = {file.name: file.read_bytes() for pattern in _SMALL_FILES for file in sorted(model_dir.glob(pattern))}
    if (size := sum(map(len, found.values()))) > _MAX_FILES_BYTES:
        raise WorkerError(f"the small files of {model_dir} have {size:,} bytes; {_MAX_FILES_BYTES:,} can be sent")
    return found


def main(sock: socket.socket, settings_bytes: bytes) -> None:
    """In the child: make the model and say so."""
    settings = msgspec.msgpack.decode(settings_bytes, type=MakeModel)
    channel: Channel[None] = Channel(sock, None)
    try:
        make_model(settings.source, Path(settings.directory))
        channel.send(ModelMade())
    except Exception as error:
        channel.send(Failed(str(error) if isinstance(error, InputError) else raised(error)))
        raise
