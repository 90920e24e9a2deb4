"""Runs of models that onbeat computes another way, or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM, PreTrainedTokenizerFast

import onbeat
from onbeat.cli import main
from onbeat.model_source import make_model, model_directory
from tests.fakes.runs import RECIPE, ROOT, SMALL, run_digests

REWARD = """
def share_of_ones(completions, **columns):
    return [completion.count("1") / (1 + len(completion)) for completion in completions]
"""
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def saved(model_class: Any, config_class: Any, directory: Path, **more: Any) -> str:
    """A random model with the recipe's tokenizer."""
    source = f"{ROOT}/recipes/arithmetic.py:make_model"
    if not (model_directory(source) / "config.json").is_file():
        make_model(source, model_directory(source))
    directory.mkdir()
    for file in model_directory(source).glob("tokenizer*"):
        shutil.copy(file, directory)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    torch.manual_seed(0)
    ends = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
    model_class(config_class(vocab_size=len(tokenizer), **SIZES, **ends, **more)).save_pretrained(directory)
    return str(directory)


@pytest.mark.integration
def test_a_model_trained_plain_says_so_and_ends_with_the_same_bits_in_both_modes(
    tmp_path: Path,
) -> None:
    model = saved(CohereForCausalLM, CohereConfig, tmp_path / "cohere", logit_scale=0.25)
    (tmp_path / "rewards.py").write_text(REWARD)
    digests = set()
    for mode, sequences in (("sync", 21), ("periodic", 7)):
        run_dir = tmp_path / f"{mode}-{sequences}"
        keys = {
            **SMALL, "model.path": model, "schedule.mode": mode, "generator.max_sequences": sequences,
            "schedule.updates_per_period": 2, "trainer.max_tokens": 40, "run.dir": str(run_dir),
            "reward.functions": [{"path": f"{tmp_path}/rewards.py:share_of_ones"}],
        }  # fmt: skip
        with pytest.warns(UserWarning, match="prompts are not shared in training: .*CohereForCausalLM"):
            result = onbeat.train(RECIPE, overrides=keys)
        assert all(record["grad_norm"] > 0 for record in result.metrics)
        said = json.loads((run_dir / "environment.json").read_text())
        assert said["exact"] is True
        assert said["shared_prompt"] is False
        assert "CohereForCausalLM" in said["why_not_shared"]
        digests.add(run_digests(run_dir))
    assert len(digests) == 1


@pytest.mark.integration
def test_a_model_that_the_embedded_generator_cannot_decode_ends_the_run_at_once_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = saved(Gemma2ForCausalLM, Gemma2Config, tmp_path / "gemma2", head_dim=8, attn_logit_softcapping=50.0)
    run_dir = tmp_path / "run"
    assert main(["train", RECIPE, f"--model.path={model}", f"--run.dir={run_dir}"]) == 3
    said = capsys.readouterr().err
    assert "Gemma2ForCausalLM uses softcap in attention, which onbeat does not compute" in said
    assert "Traceback" not in said
    assert [log.name for log in (run_dir / "logs").glob("generator-*")] == ["generator-0.log"]
