"""What a run's bits rest on beside its recipe: data, model, rewards, processor, threads, libraries. No torch.

Kept in every checkpoint. A run that is resumed with other data or another model would be another run, and is refused;
with other rewards, another loss or advantage of one's own, other threads, libraries, another processor or a generator
compiled otherwise it goes on, and is told that it may not be the same run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec
import xxhash

from onbeat.compiled import KERNELS_VERSION, why_not_compiled
from onbeat.config import Config, TrainerConfig
from onbeat.errors import CheckpointError
from onbeat.types import Prompt

_MUST_AGREE = {"data": "the prompts to train on are", "held_out": "the held-out prompts are", "model": "the model is"}
_NUM_PIECES = 64
_PIECE_BYTES = 64 << 10


def inputs_of(config: Config, prompts: Sequence[Prompt], held_out: Sequence[Prompt], model_dir: Path) -> dict[str, str]:
    return {
        "data": _digest(prompts),
        "held_out": _digest(held_out),
        "model": model_digest(model_dir),
        "processor": processor(),
        "attention": "by torch's operations" if why_not_compiled() else f"compiled, version {KERNELS_VERSION}",
        "threads": str(config.trainer.threads or len(os.sched_getaffinity(0))),
        "ranks": layout_of(config.trainer),
        "rewards": _files(function.path for function in config.reward.functions),
        "algorithm": _files(path for path in (config.algorithm.advantage, config.algorithm.loss) if path),
        **{name: version(name) for name in ("onbeat", "torch", "transformers")},
    }


def layout_of(trainer: TrainerConfig) -> str:
    """How the trainer's ranks share the work."""
    shared = [f"{trainer.tensor_parallel} to a matrix"] if trainer.tensor_parallel > 1 else []
    return ", ".join([str(trainer.ranks), *shared, *(["sharded"] if trainer.shard else [])])


def _digest(prompts: Sequence[Prompt]) -> str:
    digest = xxhash.xxh3_128()
    for prompt in prompts:
        try:
            content = msgspec.msgpack.encode(prompt, order="deterministic", enc_hook=_kind)
        except (OverflowError, UnicodeEncodeError):  # integers beyond 64 bits, halves of characters
            content = repr(prompt).encode(errors="backslashreplace")
        digest.update(content)
    return f"{len(prompts)} prompts, {digest.hexdigest()}"


def _kind(value: object) -> str:
    """All that is told of a value no file format knows: its text may hold its address."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _files(functions: Iterable[str]) -> str:
    """Of the content of the files they are in, where it is files they are in."""
    digest = xxhash.xxh3_128()
    for function in functions:
        path = function.rpartition(":")[0]
        digest.update(Path(path).read_bytes() if Path(path).is_file() else path.encode())
    return digest.hexdigest()


def model_digest(directory: Path) -> str:
    """Of its configuration, and of pieces all over its weights: reading them whole would take too long."""
    digest = xxhash.xxh3_128((directory / "config.json").read_bytes())
    for path in sorted([*directory.glob("*.safetensors"), *directory.glob("*.bin")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for piece in range(_NUM_PIECES):
                file.seek(max(0, size - _PIECE_BYTES) * piece // (_NUM_PIECES - 1))
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


TRAINER = "trainer's arithmetic"
"""Of the machines it was placed on, which are known when it has started."""


def check_inputs(
    before: Mapping[str, str], now: Mapping[str, str], warn: Callable[[str], None], *, only: str | None = None
) -> None:
    """Of the checkpoint, and of the run that goes on from it, as far as they are known."""
    for name, value in before.items():
        if now.get(name) == value or (name == TRAINER) != (only == TRAINER):
            continue
        if name in _MUST_AGREE:
            raise CheckpointError(
                f"--resume: {_MUST_AGREE[name]} not what was there when the checkpoint was written (then {value}; now "
                f"{now.get(name)}); put that back, or begin another run with --run.dir"
            )
        warn(f"resuming with {name} {now.get(name)}, which was {value}: the result may not be that of one run any more")
