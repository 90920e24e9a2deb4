"""What a recipe comes to on this machine, and why: `onbeat train … --dry-run`. Starts nothing, needs no torch."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from onbeat.admission import bytes_per_token, cache_tokens, head_dim
from onbeat.compiled import why_not_compiled
from onbeat.config import Config, TrainerConfig
from onbeat.cores import generator_threads, rank_threads
from onbeat.model_source import model_directory
from onbeat.recipe import to_toml


def describe(config: Config) -> str:
    """The resolved recipe, and what it comes to on this machine."""
    cores = len(os.sched_getaffinity(0))
    schedule, algorithm = config.schedule, config.algorithm
    directory = model_directory(config.model.path)
    state = (
        "found" if (directory / "config.json").is_file() else "to be made" if ":" in config.model.path else "MISSING"
    )
    models = ["policy", *(["old policy"] if schedule.updates_per_period > 1 else [])]
    models += ["reference"] if algorithm.beta > 0 else []
    sources = [config.data.path, config.data.eval_path, *(function.path for function in config.reward.functions)]
    named = [source.rpartition(":")[0] if ":" in source else source for source in sources if source]
    files = {name for name in named if os.path.isabs(name)}  # what a recipe calls a path has been made absolute
    missing = sorted(file for file in files if not os.path.exists(file))
    notes = [
        *(f"MISSING      {file}" for file in missing),
        f"model        {directory} ({state})",
        f"per period   {schedule.prompts_per_period} groups of {algorithm.group_size} completions, "
        f"{schedule.updates_per_period} optimizer step(s); {schedule.periods} periods",
        f"trainer      {_ranks(config.trainer)} {', '.join(models)}; {_trainer_threads(config, cores)}",
        f"generators   {_count(config)} processes; each {_generator_threads(config, cores)}",
        *([_attention(directory)] if config.generator.backend == "embedded" else []),
        *_concurrency(config, directory),
        f"rewards      {config.reward.workers} processes, {config.reward.timeout_s:g} s a call",
        f"cores        {cores}",
    ]
    return to_toml(config) + "\n" + "\n".join(f"# {note}" for note in notes)


def _trainer_threads(config: Config, cores: int) -> str:
    trainer = config.trainer
    if trainer.threads:
        return f"{trainer.threads} threads, as the recipe says"
    if trainer.ranks > 1:
        return f"{rank_threads(0, trainer.ranks, cores)} threads each, its share of the cores"
    if (reason := config.why_trainer_threads_fixed) is not None:
        return f"{cores} threads at all times: {reason}"
    return (
        f"{cores} threads: all cores, and its share of them while generators work if its bits do not tell, which is "
        "tried at the start (environment.json)"
    )


def _ranks(trainer: TrainerConfig) -> str:
    if trainer.ranks == 1:
        return "1 process, holds"
    shared = f", {trainer.tensor_parallel} to a matrix" if trainer.tensor_parallel > 1 else ""
    return f"{trainer.ranks} processes{shared}, each {'with its share of' if trainer.shard else 'holds'}"


def _count(config: Config) -> str:
    lowest, highest = config.generator.bounds
    return str(lowest) if lowest == highest else f"{lowest} to {highest}, by demand;"


def _generator_threads(config: Config, cores: int) -> str:
    threads = generator_threads(config.generator.threads, config.generator.bounds[0], cores)
    if threads.alone == threads.beside_trainer:
        why = "as the recipe says" if config.generator.threads else "its share of the cores"
        return f"{threads.alone} threads, {why}"
    return (
        f"{threads.alone} threads while the trainer waits, its share, {threads.beside_trainer}, while it works: "
        "neither side waits for a core the other is on"
    )


def _attention(model: Path) -> str:
    described = _described(model)
    if (reason := why_not_compiled(None if described is None else head_dim(described))) is None:
        return "attention    compiled: one call per layer for all samples"
    return f"attention    by torch's operations, SLOWER: {reason}"


def _concurrency(config: Config, model: Path) -> list[str]:
    size, total = config.algorithm.group_size, config.schedule.prompts_per_period
    groups, why = max(1, config.generator.max_sequences // size), "generator.max_sequences"
    held = _groups_in_cache(config, model)
    if held is None and config.generator.backend == "embedded":
        why += f", if its cache of {config.generator.cache_gib:g} GiB holds them"
    if held == 0:
        gib = config.generator.cache_gib
        return [
            f"at once      NONE of the longest groups there may be, {_longest_group(config)}: they need more than "
            f"generator.cache_gib = {gib:g}; raise it, or lower data.max_prompt_tokens, sampling.max_new_tokens or "
            "algorithm.group_size"
        ]
    if held is not None and held < groups:
        groups, why = held, f"generator.cache_gib: so many of {_longest_group(config)} fit"
    at_once = min(total, groups * config.generator.bounds[0])
    notes = [
        f"at once      {groups} groups of {size} in each generator ({why}): more use the cores better, fewer end "
        "earlier, one after another",
        f"in turns     the {total} groups of a period take about {-(-total // at_once)} turns",
    ]
    if config.schedule.mode == "periodic" and at_once == total:
        notes.append(
            "overlap      LITTLE: all groups of a period are generated at once and end together; more "
            "schedule.prompts_per_period or a smaller generator.max_sequences would let training begin earlier"
        )
    return notes


def _longest_group(config: Config) -> str:
    tokens = f"{config.data.max_prompt_tokens} tokens and {config.algorithm.group_size} x "
    return f"{tokens}{config.sampling.max_new_tokens} more"


def _described(model: Path) -> dict[str, Any] | None:
    """By its config.json, if it has one that can be read: whoever loads it will say so if not."""
    with suppress(OSError, ValueError):
        found = json.loads((model / "config.json").read_text())
        if isinstance(found, dict) and isinstance(found.get("text_config") or {}, dict):
            return found
    return None


def _groups_in_cache(config: Config, model: Path) -> int | None:
    """Of the longest there may be, in a generator; None if that cannot be told yet."""
    described = _described(model)
    if config.generator.backend != "embedded" or described is None:
        return None
    per_token = bytes_per_token(described, bytes_per_number=4)
    if per_token is None:
        return None
    group = cache_tokens(config.data.max_prompt_tokens, config.algorithm.group_size, config.sampling.max_new_tokens)
    return int(config.generator.cache_gib * 2**30 / per_token) // group
