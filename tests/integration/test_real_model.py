"""A real pretrained chat model, at its real size: what is exact with thousands of parameters must be with millions.

Larger tensors take other paths through torch (operations split over threads, chunks, blocks), so this is not a
repetition of tests/equivalence/test_exactness.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import onbeat
from onbeat.config import LoraSection
from onbeat.model_source import model_directory
from onbeat.training.trainer import model_snapshot
from tests.fakes.figures import figure
from tests.fakes.processes import RunProcess
from tests.fakes.runs import ROOT, run_digests

RECIPE = """
[model]
path = "{root}/recipes/smollm2.py:make_model"
[schedule]
periods = 2
prompts_per_period = 5
[algorithm]
group_size = 6
beta = 0.02
[sampling]
max_new_tokens = 12
[generator]
max_sequences = 12
[trainer]
learning_rate = 1e-5
[data]
path = "rows.jsonl"
[reward]
functions = [{{ path = "numeric_answer" }}, {{ path = "rewards.py:short", weight = 0.1 }}]
"""


def write_recipe(directory: Path) -> str:
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)}
        for a, b in ((2, 3), (4, 4), (1, 6), (7, 2), (5, 9), (8, 8), (3, 3))
    ]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "rewards.py").write_text(
        "def short(completions, **columns):\n    return [-len(c[0]['content']) / 50 for c in completions]\n"
    )
    (directory / "recipe.toml").write_text(RECIPE.format(root=ROOT))
    return str(directory / "recipe.toml")


@pytest.mark.integration
def test_smollm2_ends_with_the_same_weights_in_sync_and_periodic_with_two_generators(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    digests = set()
    for mode, count in (("sync", 1), ("periodic", 2)):
        run_dir = tmp_path / f"{mode}-{count}"
        overrides = {"run.dir": str(run_dir), "schedule.mode": mode, "generator.count": count}
        result = onbeat.train(recipe, overrides=overrides)
        assert all(record["num_trained_tokens"] > 0 for record in result.metrics)
        assert all(record["gap_max"] < 1e-3 for record in result.metrics)
        environment = json.loads((run_dir / "environment.json").read_text())
        assert (environment["exact"], environment["shared_prompt"]) == (True, True)
        if 2 <= environment["cores"] <= 4:
            assert environment["threads"]["why_trainer_fixed"] is None
        digests.add(run_digests(run_dir))
    assert len(digests) == 1


@pytest.mark.full
def test_with_lora_far_less_is_published_and_the_trainer_needs_less_memory_by_more_than_the_model(
    tmp_path: Path,
) -> None:
    """With a reference, of which full training keeps a copy."""
    recipe = write_recipe(tmp_path)
    model_dir = str(model_directory(f"{ROOT}/recipes/smollm2.py:make_model"))
    peak, published = {}, {}
    for rank in (0, 16):
        keys = {"schedule__prompts_per_period": 2, "generator__max_sequences": 6, "algorithm__group_size": 6}
        run = RunProcess(tmp_path / f"rank-{rank}", recipe, schedule__periods=2, lora__rank=rank, **keys)
        run.wait_for_line("period 1/2")
        peak[rank] = run.peak_bytes("trainer-0")
        code, _, errors = run.finish()
        assert code == 0, errors
        fd, published[rank], _ = model_snapshot(model_dir, LoraSection(rank=rank), seed=0)
        os.close(fd)
    megabytes = {"peak": peak, "published": published}
    figure("lora", **{name: {rank: b >> 20 for rank, b in found.items()} for name, found in megabytes.items()})
    print(megabytes)
    assert published[16] * 20 <= published[0]
    assert peak[16] + published[0] <= peak[0]
