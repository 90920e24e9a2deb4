"""Algorithms in whole runs: a loss and an advantage of one's own, dynamic sampling, LoRA."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import onbeat
from onbeat.errors import InputError, WorkerError
from tests.fakes.processes import RunProcess
from tests.fakes.runs import RECIPE, ROOT, SMALL, run_digests, train_digests
from tests.integration.test_elastic_run import worker

pytestmark = pytest.mark.integration


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_example_of_a_loss_of_ones_own_runs_and_learns(tmp_path: Path) -> None:
    keys = {"algorithm.loss": f"{ROOT}/examples/own_loss.py:careful", "run.dir": str(tmp_path / "run")}
    result = onbeat.train(RECIPE, overrides={**keys, "schedule.periods": 25})
    assert result.accuracy_before is not None
    assert result.accuracy_after is not None
    assert result.accuracy_after > result.accuracy_before + 0.1
    assert all(record["num_elided_groups"] == 0 for record in result.metrics)


def test_an_advantage_of_ones_own_is_what_is_trained(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def centred(rewards):\n    mean = sum(rewards) / len(rewards)\n    return [r - mean for r in rewards]\n"
    )
    ours = train_digests(tmp_path / "ours", algorithm__scale_advantages=False)
    own = train_digests(tmp_path / "own", algorithm__advantage=f"{tmp_path}/own.py:centred")
    assert own[1] == ours[1]  # the ledger; the means may differ in their last bits


@pytest.mark.parametrize(
    ("key", "body", "complaint"),
    [
        ("advantage", "return rewards[1:]", "must return 7 finite numbers"),
        ("advantage", "return [float('nan')] * len(rewards)", "must return 7 finite numbers"),
        ("advantage", "return 1 / 0", "ZeroDivisionError"),
        ("loss", "return 1 / 0", "ZeroDivisionError"),
    ],
)
def test_mistakes_in_ones_own_functions_are_told(tmp_path: Path, key: str, body: str, complaint: str) -> None:
    (tmp_path / "own.py").write_text(f"def mine(rewards):\n    {body}\n")
    with pytest.raises((InputError, WorkerError), match=complaint):
        train_digests(tmp_path / "run", **{f"algorithm__{key}": f"{tmp_path}/own.py:mine"})


def test_dynamic_sampling_trains_as_many_groups_as_planned_and_tells_how_many_it_passed_over(tmp_path: Path) -> None:
    train_digests(tmp_path / "run", algorithm__dynamic_sampling=True)
    outcomes = [json.loads(line)["outcome"] for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    found = records(tmp_path / "run")
    assert outcomes.count("trained") == SMALL["schedule.periods"] * SMALL["schedule.prompts_per_period"]
    assert outcomes.count("replaced") == sum(record["num_replaced_groups"] for record in found) > 0


# LoRA


def lora_run(run_dir: Path, **overrides: Any) -> Path:
    keys = {"lora__rank": 8, "trainer__learning_rate": 0.003, **overrides}
    train_digests(run_dir, **keys)
    return run_dir


def test_with_lora_the_recipe_is_learned(tmp_path: Path) -> None:
    keys = {"lora.rank": 16, "trainer.learning_rate": 0.002, "run.dir": str(tmp_path / "run"), "schedule.periods": 40}
    result = onbeat.train(RECIPE, overrides=keys)
    assert result.accuracy_before is not None
    assert result.accuracy_after is not None
    assert result.accuracy_after > result.accuracy_before + 0.3


def test_the_merged_model_and_the_base_with_the_adapter_compute_the_same(tmp_path: Path) -> None:
    run_dir = lora_run(tmp_path / "run")
    merged = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    config = json.loads((run_dir / "model" / "adapter" / "adapter_config.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"])
    tokens = torch.arange(3, 12)[None]
    with torch.no_grad():
        before = base(tokens).logits
        adapted = PeftModel.from_pretrained(base, run_dir / "model" / "adapter")(tokens).logits
        torch.testing.assert_close(merged(tokens).logits, adapted, rtol=1e-4, atol=1e-4)
        assert (adapted - before).abs().max() > 1e-3


def test_a_checkpoint_holds_the_adapter_alone_and_a_run_goes_on_from_it(tmp_path: Path) -> None:
    keys = {"lora__rank": 8, "trainer__learning_rate": 0.003, "checkpoint__every": 1, "algorithm__beta": 0.02}
    undisturbed = train_digests(tmp_path / "undisturbed", schedule__periods=4, **keys)
    train_digests(tmp_path / "run", schedule__periods=2, **keys)
    names = {key.replace("__", "."): value for key, value in keys.items()}
    overrides = {**SMALL, **names, "run.dir": str(tmp_path / "run"), "schedule.periods": 4}
    onbeat.train(RECIPE, overrides=overrides, resume=True)
    assert run_digests(tmp_path / "run") == undisturbed
    part = tmp_path / "run" / "checkpoints" / "version-000004" / "rank-0.safetensors"
    with safe_open(part, framework="np") as file:
        trained = [name for name in file.keys() if name.startswith("model.")]  # noqa: SIM118
    assert trained
    assert all("lora_" in name for name in trained)
    command = [sys.executable, "-m", "onbeat.cli", "export", str(tmp_path / "run"), str(tmp_path / "exported")]
    subprocess.run([*command, "--version=4"], check=True, capture_output=True)
    exported, ours = (
        path.joinpath("model.safetensors").read_bytes() for path in (tmp_path / "exported", tmp_path / "run" / "model")
    )
    assert exported == ours


def test_lora_targets_that_are_not_in_the_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises((InputError, WorkerError), match=r"lora.targets = \['nope'\]"):
        train_digests(tmp_path / "run", lora__rank=4, lora__targets=["nope"])


@pytest.mark.full
def test_into_a_run_with_lora_come_workers_of_this_machine_and_no_others(tmp_path: Path) -> None:
    keys = {"lora__rank": 8, "trainer__learning_rate": 0.003, "schedule__periods": 100}
    undisturbed = train_digests(tmp_path / "undisturbed", **keys)
    token_file = tmp_path / "token"
    token_file.write_text("a token for this test alone\n")
    token_file.chmod(0o600)
    run = RunProcess(tmp_path / "run", cluster__listen="127.0.0.1:0", cluster__token_file=str(token_file), **keys)
    place = run.wait_for_line("workers may join at ").split()[-1]
    run.wait_for_line("period 2/")
    from_elsewhere = worker(["--join", place, "--token-file", str(token_file)])
    assert "only workers of this machine can join" in from_elsewhere.communicate(timeout=60)[1]
    from_here = worker(["--join", str(tmp_path / "run")])
    while not run.wait_for_line("generator-").endswith("has joined; there are 2 generators\n"):
        pass
    code, _, errors = run.finish()
    assert code == 0, errors
    assert from_here.communicate(timeout=60)[0].endswith("has left\n")
    assert run_digests(tmp_path / "run") == undisturbed
