"""The recipe people run first: it learns, and what it leaves behind is whole."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import onbeat
from onbeat.recipe import load
from tests.fakes.runs import RECIPE


def test_the_arithmetic_recipe_gains_at_least_30_points_and_leaves_a_whole_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    result = onbeat.train(RECIPE, overrides={"run.dir": str(run_dir)})
    assert result.accuracy_before is not None
    assert result.accuracy_after is not None
    assert result.accuracy_after - result.accuracy_before >= 0.30

    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert records == result.metrics
    assert [record["period"] for record in records] == list(range(60))
    assert all({"reward_mean", "accuracy", "period_s"} <= record.keys() for record in records)
    assert all(record["gap_max"] < 1e-4 for record in records if record["gap_max"] is not None)

    ledger = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    assert [(entry["period"], entry["slot"]) for entry in ledger] == [(p, s) for p in range(60) for s in range(16)]

    assert load([run_dir / "config.toml"]) == load([RECIPE], {"run.dir": str(run_dir)})
    assert tomllib.loads((run_dir / "config.toml").read_text())["seed"] == 0

    model = AutoModelForCausalLM.from_pretrained(result.model_path)
    tokenizer = AutoTokenizer.from_pretrained(result.model_path)
    answer = model.generate(**tokenizer("27+15=", return_tensors="pt", return_token_type_ids=False), max_new_tokens=4)
    assert tokenizer.decode(answer[0], skip_special_tokens=True).startswith("27+15=")


@pytest.mark.integration
def test_a_completion_ends_with_the_first_of_the_recipes_stop_strings(tmp_path: Path) -> None:
    """The tiny model of the recipe answers with digits: if each of them stops it, answers have one token."""
    few = {"schedule.periods": 2, "run.dir": str(tmp_path / "free")}
    stopping = few | {"sampling.stop": list("0123456789"), "run.dir": str(tmp_path / "stopping")}
    free, stopped = (onbeat.train(RECIPE, overrides=keys).metrics for keys in (few, stopping))
    assert all(record["completion_tokens_mean"] > 1.5 for record in free)
    assert all(record["completion_tokens_mean"] < 1.2 for record in stopped)
    assert all(record["truncated_share"] < 0.2 for record in stopped)
