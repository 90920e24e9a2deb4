"""Figures for the docs: what a test has measured on its way goes to the file that ONBEAT_FIGURES names, a line each."""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Any


def figure(name: str, **values: Any) -> None:
    if path := os.environ.get("ONBEAT_FIGURES"):
        with Path(path).open("a") as file:
            file.write(json.dumps({"figure": name, **values}) + "\n")


def spread(values: list[float]) -> dict[str, float]:
    """Median and largest."""
    return {"median": round(statistics.median(values), 3), "max": round(max(values), 3)}
