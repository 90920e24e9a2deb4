"""`onbeat check MODEL`: what people run before they trust a new architecture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from onbeat.check import CheckReport, Gap
from onbeat.cli import main
from onbeat.training import forward
from onbeat.training.attention import KeysValues, SharedPrompt
from tests.fakes.models import tiny_model


def check(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "onbeat.cli", "check", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_a_model_whose_forms_agree_passes_with_the_differences_and_the_speed_up(
    architecture: str, tmp_path: Path
) -> None:
    tiny_model(architecture).save_pretrained(tmp_path)
    done = check(tmp_path)
    assert done.returncode == 0, done.stderr
    for line in (
        "log-probabilities  largest difference",
        "gradients ",
        "speed-up ",
        "batch invariance   yes",
        "agrees",
    ):
        assert line in done.stdout


def test_a_mixture_of_experts_is_compared_in_float64_and_told_that_its_rows_depend_on_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    assert main(["check", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "compared in float64" in said
    gaps = [float(number) for line in said.splitlines() if line.startswith("  ") for number in line.split()[-3::2]]
    assert gaps
    assert max(gaps) < 1e-6, "no float32 comes so near"
    assert "batch invariance   no: " in said


def test_a_model_that_cannot_share_is_told_so_and_passes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    CohereForCausalLM(
        CohereConfig(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, logit_scale=0.25)
    ).save_pretrained(tmp_path)  # fmt: skip
    done = check(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "shared prompt      no: " in done.stdout
    assert "trained plain" in done.stdout
    assert "gradients " in done.stdout
    assert "batch invariance   yes" in done.stdout


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (MambaForCausalLM(MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2)), "linear_attention"),
        (Gemma2ForCausalLM(Gemma2Config(
            vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, sliding_window=16, attn_logit_softcapping=0.5)), "soft"),
    ],
    ids=["mamba", "gemma2"],
)  # fmt: skip
def test_a_model_that_is_neither_shared_nor_decoded_has_its_plain_form_compared(
    model: Any, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model.save_pretrained(tmp_path)
    assert main(["check", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "shared prompt      no: " in said
    assert "gradients " in said
    assert "generation         not by the embedded generator: " in said
    assert reason in said


def test_a_plain_form_that_computes_something_else_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    MambaForCausalLM(MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2)).save_pretrained(tmp_path)
    plain = forward._plain_logprobs

    def wrong(*arguments: Any) -> Any:
        logprobs, entropy = plain(*arguments)
        return 1.01 * logprobs, entropy

    monkeypatch.setattr(forward, "_plain_logprobs", wrong)
    assert main(["check", str(tmp_path)]) == 1
    assert "DISAGREES" in capsys.readouterr().out


def test_what_is_no_model_is_a_sentence_with_code_3(tmp_path: Path) -> None:
    done = check(tmp_path / "nothing")
    assert done.returncode == 3
    assert "cannot be loaded as a causal language model" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("logprobs", "gradient"), [(0.1, 1e-6), (1e-6, 1e-2), (float("nan"), 1e-6)])
def test_a_difference_over_the_limit_is_a_disagreement(logprobs: float, gradient: float) -> None:
    gaps = (Gap("good", 1e-6, 1e-6, "head"), Gap("bad", logprobs, gradient, "layers.1.mlp"))
    report = CheckReport(why_not_shared=None, gaps=gaps, speedup=2.0, row_variance=None)
    assert not report.agrees
    assert report.lines()[-1].startswith("DISAGREES")
    assert [line.split()[0] for line in report.lines() if "most of all in layers.1.mlp" in line] == ["bad"]


def test_an_attention_that_forgets_what_prompts_begin_with_is_found_and_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fault that a single short group, as it is tried when a run starts, does not show."""
    prompt = SharedPrompt._prompt

    def forgetful(self: SharedPrompt, query: torch.Tensor, keys_values: KeysValues, *rest: Any) -> torch.Tensor:
        key, value = (tensor[:, :, -query.shape[2] :] for tensor in keys_values)
        return prompt(self, query, (key, value), *rest)

    tiny_model("qwen3").save_pretrained(tmp_path)
    monkeypatch.setattr(SharedPrompt, "_prompt", forgetful)
    assert main(["check", str(tmp_path)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert any("DISAGREES" in line for line in said if "pack with a common prefix" in line)
    assert not any("DISAGREES" in line for line in said if line.startswith("  group"))
