"""A contender's side of the harness: a process that is given jobs on its standard input and answers with figures.

    main(prepare)        prepare(settings) -> run;  run(job) -> figures

Standard library only, since it runs in every contender's own environment. Whatever libraries print goes to the log.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Run = Callable[[dict[str, Any]], dict[str, Any]]


def main(prepare: Callable[[dict[str, Any]], Run]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run = prepare(json.loads(sys.argv[1]))
    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line))) + "\n")
        answers.flush()
