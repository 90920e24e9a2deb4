"""What a resumed run rests on is what it rested on before, or it is refused or told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onbeat.errors import CheckpointError
from onbeat.inputs import check_inputs, inputs_of
from onbeat.recipe import load
from onbeat.types import Prompt
from tests.fakes.runs import RECIPE


def prompt(text: str, **columns: object) -> Prompt:
    return Prompt(prompt_id=text, token_ids=tuple(text.encode()), source=text, columns=columns)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 40_000)
    return tmp_path


def found(
    model: Path, *, prompts: list[Prompt] | None = None, threads: int = 2, reward: str = "", loss: str = ""
) -> dict[str, str]:
    keys: dict[str, Any] = {"trainer.threads": threads}
    if reward:
        (model / "rewards.py").write_text(reward)
        keys["reward.functions"] = [{"path": f"{model}/rewards.py:score"}]
    if loss:
        (model / "losses.py").write_text(loss)
        keys["algorithm.loss"] = f"{model}/losses.py:loss"
    prompts = prompts or [prompt("a", answer=1), prompt("b", answer={"x": [2.0]})]
    return inputs_of(load([RECIPE], keys), prompts, [prompt("c")], model)


def test_the_same_inputs_are_the_same(model: Path) -> None:
    check_inputs(found(model), found(model), pytest.fail)


@pytest.mark.parametrize(
    "others",
    [
        [prompt("b", answer={"x": [2.0]}), prompt("a", answer=1)],
        [prompt("a", answer=1)],
        [prompt("a", answer=2), prompt("b", answer={"x": [2.0]})],
    ],
    ids=["another order", "one less", "another answer"],
)
def test_other_data_are_refused(model: Path, others: list[Prompt]) -> None:
    with pytest.raises(CheckpointError, match="the prompts to train on are not what was there when the checkpoint"):
        check_inputs(found(model), found(model, prompts=others), pytest.fail)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("place", [0, 5_000_000, 10_239_999])
def test_another_model_is_refused(model: Path, place: int, name: str) -> None:
    (model / "model.safetensors").rename(model / name)
    before = found(model)
    weights = bytearray((model / name).read_bytes())
    for byte in range(max(0, place - 200_000), min(len(weights), place + 200_000)):
        weights[byte] ^= 1
    (model / name).write_bytes(weights)
    with pytest.raises(CheckpointError, match="the model is not what was there"):
        check_inputs(before, found(model), pytest.fail)


def test_other_threads_and_other_functions_are_told(model: Path) -> None:
    told: list[str] = []
    check_inputs(found(model), found(model, threads=1), told.append)
    assert told == ["resuming with threads 1, which was 2: the result may not be that of one run any more"]
    before = found(model, reward="def score(completions): ...")
    check_inputs(before, found(model, reward="def score(completions): return []"), told.append)
    assert told[1].startswith("resuming with rewards ")
    before = found(model, loss="def loss(tokens): ...")
    check_inputs(before, found(model, loss="def loss(tokens): return 0"), told.append)
    assert told[2].startswith("resuming with algorithm ")


def test_values_that_no_format_knows_have_a_digest_that_stays(model: Path) -> None:
    def odd() -> list[Prompt]:
        return [prompt("a", number=2**70), prompt("b", half="\ud800"), prompt("c", thing=object(), image=slice(3))]

    check_inputs(found(model, prompts=odd()), found(model, prompts=odd()), pytest.fail)


def test_a_checkpoint_that_says_nothing_of_its_inputs_is_believed(model: Path) -> None:
    check_inputs({}, found(model), pytest.fail)
