"""`onbeat export`: a checkpoint's weights as a model directory that `from_pretrained` and vLLM open."""

from __future__ import annotations

from pathlib import Path

from onbeat.checkpoint import CheckpointStore
from onbeat.errors import CheckpointError, ConfigError, InputError
from onbeat.model_source import model_directory
from onbeat.observe.recorder import best_version, read_records
from onbeat.recipe import load
from onbeat.run_dir import check_is_run
from onbeat.training.export import write_model


def export_checkpoint(run_dir: Path, directory: Path, version: int | None) -> int:
    """Returns the version: the one asked for; else the best evaluated one; else the newest."""
    check_is_run(run_dir)
    if directory.exists():
        raise ConfigError(f"{str(directory)!r} exists; name a directory that is to be made")
    config = load([run_dir / "config.toml"])
    store = CheckpointStore(run_dir / "checkpoints", keep=config.checkpoint.keep)
    if not (versions := store.versions()):
        raise CheckpointError(f"{run_dir} has no checkpoint yet")
    if version is None:
        version = best_version(read_records(run_dir / "evaluations.jsonl"), versions) or versions[-1]
    if version not in versions:
        raise CheckpointError(f"{run_dir} has no checkpoint of version {version}; it has {versions}")
    model_dir = model_directory(config.model.path)
    if not (model_dir / "config.json").is_file():
        raise InputError(f"model.path = {config.model.path!r}, with which the run began, is not there any more")
    checkpoint = store.load(version)

    from onbeat.device import load_model  # imports torch
    from onbeat.lora import add_adapter, save_model
    from onbeat.training.state import load_weights

    model = load_model(str(model_dir))
    add_adapter(model, config.lora, config.seed)
    load_weights(model, checkpoint.directory)
    write_model(directory, model_dir, lambda hidden: save_model(model, str(model_dir), hidden))
    return version
