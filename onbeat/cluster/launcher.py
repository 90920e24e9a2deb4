"""The launcher a recipe asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from onbeat.cluster.local import LocalLauncher
from onbeat.config import Config
from onbeat.protocols import Launcher


def open_launcher(config: Config, log_dir: Path, warn: Callable[[str], None]) -> Launcher:
    if config.cluster.launcher == "ray":
        from onbeat.cluster.ray_launcher import RayLauncher

        log_dir.mkdir(parents=True, exist_ok=True)
        return RayLauncher(config, log_dir, warn)
    return LocalLauncher(log_dir, compact=config.trainer.gradient_checkpointing, keep=config.reward.environment)
