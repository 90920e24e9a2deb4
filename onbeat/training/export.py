"""A model directory in Hugging Face format, written whole or not at all. No torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from onbeat.errors import CheckpointError

_SMALL_FILES = {".json", ".jinja", ".model", ".txt"}


def write_model(directory: Path, model_dir: Path, write_weights: Callable[[Path], object]) -> None:
    """Weights beside the tokenizer and templates of the model they started from."""
    hidden, before = directory.with_name(f".{directory.name}"), directory.with_name(f".{directory.name}-before")
    try:
        for left_behind in (hidden, before):
            shutil.rmtree(left_behind, ignore_errors=True)
        hidden.mkdir(parents=True)
        for file in model_dir.iterdir():
            if file.suffix in _SMALL_FILES and not file.name.endswith(".index.json"):
                shutil.copyfile(file, hidden / file.name)
        write_weights(hidden)
        if directory.exists():
            directory.rename(before)
        hidden.rename(directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(hidden, ignore_errors=True)
        there = next(place for place in directory.absolute().parents if place.exists())
        raise CheckpointError(
            f"the model cannot be written to {directory}: {error} ({shutil.disk_usage(there).free:,} bytes are free)"
        ) from error
    shutil.rmtree(before, ignore_errors=True)
