"""Whether the generators' attention (rollout/attend.c) was compiled when onbeat was installed. No torch."""

from __future__ import annotations

import importlib.util


def compiled_attention() -> str | None:
    """The file it is in."""
    found = importlib.util.find_spec("onbeat.rollout._attend")
    return None if found is None else found.origin
