"""The demo with a real model, kept: held-out accuracy and answers, before and after, and how long it took.

    make bench-demo

`make demo` with recipes/smollm2-arithmetic.toml, as a person would run it, the model being there already. Writes
docs/bench-demo.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import ROOT, Contender, Results, parser, smollm2

RECIPE = ROOT / "recipes" / "smollm2-arithmetic.toml"
CELL = {"recipe": RECIPE.name}


def main() -> None:
    flags = parser(repeats=1)
    flags.add_argument("flags", nargs="*", help="over the recipe, after --")
    arguments = flags.parse_args()
    smollm2()
    results = Results(arguments.to / "bench-demo.json", arguments.again)
    demo = Contender("demo", "contender.py", {"flags": arguments.flags})
    while len(results.expect(CELL, demo)["runs"]) < arguments.repeats:
        with tempfile.TemporaryDirectory(prefix="onbeat-bench-") as folder:
            command = [sys.executable, str(ROOT / "recipes" / "demo.py"), str(RECIPE), "--run.dir", f"{folder}/run"]
            began_s = time.monotonic()
            subprocess.run([*command, *arguments.flags], check=True)
            shown = json.loads((Path(folder) / "run" / "demo.json").read_text())
            environment = json.loads((Path(folder) / "run" / "environment.json").read_text())
        results.add(CELL, demo.name, environment["packages"], shown | {"wall_s": time.monotonic() - began_s})


if __name__ == "__main__":
    main()
