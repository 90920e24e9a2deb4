"""A contender's side of the harness: a process that is given jobs on its standard input and answers with figures.

    main(prepare, packages)        prepare(settings) -> run;  run(job) -> figures
    closing.callback(function)     what is to be done when the input ends, or a job fails

Standard library only, since it runs in every contender's own environment. Whatever libraries print goes to the log.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

Run = Callable[[dict[str, Any]], dict[str, Any]]
closing = ExitStack()


def main(prepare: Callable[[dict[str, Any]], Run], packages: Sequence[str]) -> None:
    """Get ready, say so with the versions of `packages`, then answer job after job until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(figures: dict[str, Any]) -> None:
        answers.write(json.dumps(figures) + "\n")
        answers.flush()

    with closing:
        run = prepare(json.loads(sys.argv[1]))
        say({package: version(package) for package in packages})
        for line in sys.stdin:
            say(run(json.loads(line)))
