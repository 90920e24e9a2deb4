"""Whole runs of the arithmetic recipe, small, by the public API; what they left behind, by digest."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import onbeat

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes" / "arithmetic.toml")
SMALL = {
    "schedule.periods": 3,
    "schedule.prompts_per_period": 13,  # a multiple of nothing below
    "algorithm.group_size": 7,
    "trainer.pack_tokens": 150,
    "generator.max_sequences": 21,
}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run_digests(run_dir: Path) -> tuple[str, str]:
    """Of the exported weights and of the ledger."""
    return sha256(run_dir / "model" / "model.safetensors"), sha256(run_dir / "ledger.jsonl")


def train_digests(run_dir: Path, **overrides: Any) -> tuple[str, str]:
    """Train SMALL with the overrides (dots as double underscores)."""
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    onbeat.train(RECIPE, overrides={**SMALL, "run.dir": str(run_dir), **keys})
    return run_digests(run_dir)
