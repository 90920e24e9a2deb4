"""`make demo`: train by a recipe, then show what has changed: held-out accuracy and answers, before and after.

python recipes/demo.py recipes/smollm2-arithmetic.toml [--seed 3 …]
"""

from __future__ import annotations

import sys
import time

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
    shown = read_data(config.data).held_out[:NUM_SHOWN]
    questions = [row["prompt"] for row in shown]
    before = answers(config, str(model_directory(config.model.path)), questions)
    after = answers(config, str(result.model_path), questions)
    print()
    for question, old, new in zip(questions, before, after, strict=True):
        print(f"{text_of(question)}\n    before   {old!r}\n    after    {new!r}")
    seconds = sum(record["period_s"] for record in result.metrics)
    print(
        f"\nheld-out accuracy: {percent(result.accuracy_before)} before, {percent(result.accuracy_after)} after "
        f"{len(result.metrics)} periods in {seconds:.0f} s"
    )


def answers(config: Config, model_dir: str, questions: list[str | Messages]) -> list[str]:
    """Greedy ones, of a model that does not remember the question before."""
    from onbeat.sample import Sampler

    sampler = Sampler(model_dir, temperature=0.0, max_new_tokens=config.sampling.max_new_tokens, seed=config.seed)
    return [sampler.complete(text_of(question)) for question in questions]


def text_of(question: str | Messages) -> str:
    return question if isinstance(question, str) else str(question[-1]["content"])


if __name__ == "__main__":
    main(*sys.argv[1:])
