"""Data and rewards written for other trainers run as they are: TRL's and verl's layouts and signatures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

import onbeat
from onbeat.model_source import make_model, model_directory
from tests.fakes.runs import RECIPE, ROOT

TRL_REWARDS = """
import re

def sum_is_right(completions, answer, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [1.0 if text.strip() == right else 0.0 for text, right in zip(texts, answer)]

async def only_for_small_sums(prompts, completions, completion_ids, answer, **kwargs):
    assert all(isinstance(token, int) for ids in completion_ids for token in ids)
    return [0.5 if int(right) < 50 else None for right in answer]
"""
VERL_SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and extra_info["split"] == "train"
    return {"score": float(solution_str.strip() == ground_truth), "acc": 0.0}
"""


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's tiny model with a chat template."""
    source = f"{ROOT}/recipes/arithmetic.py:make_model"
    if not (model_directory(source) / "config.json").is_file():
        make_model(source, model_directory(source))
    directory = tmp_path_factory.mktemp("model") / "chat"
    shutil.copytree(model_directory(source), directory)
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    return directory


SUMS = [(a, b) for a in (12, 25, 31, 48) for b in (7, 16, 39)]


@pytest.mark.integration
def test_trls_layout_and_reward_functions_run_unchanged(chat_model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)} for a, b in SUMS]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    (tmp_path / "rewards.py").write_text(TRL_REWARDS)
    functions = [{"path": f"{tmp_path}/rewards.py:{name}"} for name in ("sum_is_right", "only_for_small_sums")]
    keys = {"model.path": str(chat_model), "data.path": f"{tmp_path}/train.json", "reward.functions": functions}
    check(tmp_path / "run", keys | {"data.eval_path": f"{tmp_path}/train.json"})


@pytest.mark.integration
def test_verls_layout_and_score_function_run_unchanged(chat_model: Path, tmp_path: Path) -> None:
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"split": "train", "index": number},
        }
        for number, (a, b) in enumerate(SUMS)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    (tmp_path / "score.py").write_text(VERL_SCORE)
    keys = {
        "model.path": str(chat_model),
        "data.path": f"{tmp_path}/train.parquet",
        "data.eval_path": f"{tmp_path}/train.parquet",
        "reward.functions": [{"path": f"{tmp_path}/score.py:compute_score"}],
    }
    check(tmp_path / "run", keys)


@pytest.mark.integration
def test_questions_and_answers_under_other_names_are_mapped(tmp_path: Path) -> None:
    rows = [{"question": f"{a}+{b}=", "solution": {"final": str(a + b)}} for a, b in SUMS]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {
        "data.path": f"{tmp_path}/train.jsonl",
        "data.eval_path": f"{tmp_path}/train.jsonl",
        "data.columns": {"prompt": "question", "answer": "solution.final"},
        "reward.functions": [{"path": "exact_match"}],
    }
    check(tmp_path / "run", keys)


def check(run_dir: Path, keys: dict[str, object]) -> None:
    few = {"schedule.periods": 2, "schedule.prompts_per_period": 6, "run.dir": str(run_dir)}
    result = onbeat.train(RECIPE, overrides={**few, **keys})
    assert all(record["unscorable_share"] == 0.0 for record in result.metrics)
    assert any(record["reward_mean"] > 0.0 for record in result.metrics)
    assert result.accuracy_before is not None
