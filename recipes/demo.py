"""`make demo`: train by a recipe, then show what has changed: held-out accuracy and answers, before and after.

python recipes/demo.py recipes/smollm2-arithmetic.toml [--seed 3 …]
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import onbeat
from onbeat.cli import parse_overrides
from onbeat.config import Config
from onbeat.model_source import model_directory
from onbeat.observe.recorder import percent
from onbeat.recipe import load
from onbeat.session import read_data
from onbeat.types import Messages

NUM_SHOWN = 5


def main(recipe: str, *flags: str) -> None:
    onbeat.prepare_environment()  # before torch is imported, for the answers
    overrides = {"run.dir": f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}", **parse_overrides(flags)}
    result = onbeat.train(recipe, overrides=overrides)
    config = load([recipe], overrides)
    questions = [text_of(row["prompt"]) for row in read_data(config.data).held_out[:NUM_SHOWN]]
    shown = {
        "accuracy_before": result.accuracy_before,
        "accuracy_after": result.accuracy_after,
        "periods": len(result.metrics),
        "seconds": sum(record["period_s"] for record in result.metrics),
        "questions": questions,
        "answers_before": answers(config, str(model_directory(config.model.path)), questions),
        "answers_after": answers(config, str(result.model_path), questions),
    }
    (result.run_dir / "demo.json").write_text(json.dumps(shown, indent=1) + "\n")
    show(shown)


def show(shown: dict[str, Any]) -> None:
    print()
    for question, old, new in zip(
        *(shown[key] for key in ("questions", "answers_before", "answers_after")), strict=True
    ):
        print(f"{question}\n    before   {old!r}\n    after    {new!r}")
    print(
        f"\nheld-out accuracy: {percent(shown['accuracy_before'])} before, {percent(shown['accuracy_after'])} after "
        f"{shown['periods']} periods in {shown['seconds']:.0f} s"
    )


def answers(config: Config, model_dir: str, questions: list[str]) -> list[str]:
    """Greedy ones, of a model that does not remember the question before."""
    from onbeat.sample import Sampler

    sampler = Sampler(model_dir, temperature=0.0, max_new_tokens=config.sampling.max_new_tokens, seed=config.seed)
    return [sampler.complete(question) for question in questions]


def text_of(question: str | Messages) -> str:
    return question if isinstance(question, str) else str(question[-1]["content"])


if __name__ == "__main__":
    main(*sys.argv[1:])
