"""Held-out accuracy of the arithmetic recipe before and after training, for five seeds.

    make bench-learning

Prints one line per seed and the smallest gain; exits 1 if it is under 30 points. Writes docs/learning.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import onbeat

ROOT = Path(__file__).parents[1]
SEEDS = range(5)
MIN_GAIN = 0.30


def main() -> int:
    rows = []
    with tempfile.TemporaryDirectory(prefix="onbeat-learning-") as folder:
        for seed in SEEDS:
            began_s = time.monotonic()
            overrides = {"seed": seed, "run.dir": f"{folder}/{seed}"}
            result = onbeat.train(str(ROOT / "recipes" / "arithmetic.toml"), overrides=overrides)
            assert result.accuracy_before is not None
            assert result.accuracy_after is not None
            rows.append(
                {
                    "seed": seed,
                    "accuracy_before": result.accuracy_before,
                    "accuracy_after": result.accuracy_after,
                    "wall_s": round(time.monotonic() - began_s, 1),
                }
            )
    for row in rows:
        before, after = 100 * row["accuracy_before"], 100 * row["accuracy_after"]
        print(f"seed {row['seed']}: {before:.1f} % -> {after:.1f} % in {row['wall_s']} s")
    gain = min(row["accuracy_after"] - row["accuracy_before"] for row in rows)
    print(f"smallest gain: {100 * gain:.1f} points")
    (ROOT / "docs" / "learning.json").write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if gain >= MIN_GAIN else 1


if __name__ == "__main__":
    sys.exit(main())
