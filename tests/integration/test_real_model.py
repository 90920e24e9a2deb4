"""A real pretrained chat model, at its real size: what is exact with thousands of parameters must be with millions.

Larger tensors take other paths through torch (operations split over threads, chunks, blocks), so this is not a
repetition of tests/equivalence/test_exactness.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import onbeat
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


@pytest.mark.integration
def test_smollm2_ends_with_the_same_weights_in_sync_and_periodic_with_two_generators(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)}
        for a, b in ((2, 3), (4, 4), (1, 6), (7, 2), (5, 9), (8, 8), (3, 3))
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(
        "def short(completions, **columns):\n    return [-len(c[0]['content']) / 50 for c in completions]\n"
    )
    (tmp_path / "recipe.toml").write_text(RECIPE.format(root=ROOT))
    digests = set()
    for mode, count in (("sync", 1), ("periodic", 1), ("periodic", 2)):
        run_dir = tmp_path / f"{mode}-{count}"
        overrides = {"run.dir": str(run_dir), "schedule.mode": mode, "generator.count": count}
        result = onbeat.train(str(tmp_path / "recipe.toml"), overrides=overrides)
        assert all(record["num_trained_tokens"] > 0 for record in result.metrics)
        assert all(record["gap_max"] < 1e-3 for record in result.metrics)
        assert json.loads((run_dir / "environment.json").read_text())["exact"] is True
        digests.add(run_digests(run_dir))
    assert len(digests) == 1
