"""What people do: rewards that never work, the same command twice, odd directories, threads, notebooks."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

import onbeat
from onbeat.errors import ConfigError, InputError
from tests.fakes.processes import RunProcess
from tests.fakes.runs import RECIPE, ROOT, SMALL, run_digests, train_digests

pytestmark = pytest.mark.integration


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    file = tmp_path / "rewards.py"
    file.write_text(
        textwrap.dedent(
            """
            def boom(completions, **columns):
                raise ValueError("no such thing as a score")

            def needs(completions, gold):
                return [1.0 for _ in completions]

            def sometimes(completions, answer, **columns):
                if any(text.startswith("9") for text in completions):
                    raise ValueError("nines are not scored")
                return [float(text == right) for text, right in zip(completions, answer)]
            """
        )
    )
    return file


def functions(rewards: Path, name: str) -> str:
    return f'[{{path = "{rewards}:{name}"}}]'


@pytest.mark.parametrize(("name", "cause"), [("boom", "no such thing as a score"), ("needs", "gold")])
def test_a_reward_that_always_fails_stops_the_run_with_its_cause(
    rewards: Path, name: str, cause: str, tmp_path: Path
) -> None:
    run = RunProcess(tmp_path / "run", reward__functions=functions(rewards, name))
    code, _, errors = run.finish()
    assert code == 3
    assert "not one of 91 completions could be scored" in errors
    assert cause in errors
    assert "Traceback" not in errors


def test_a_reward_that_sometimes_fails_is_told_once_and_counted(rewards: Path, tmp_path: Path) -> None:
    run = RunProcess(tmp_path / "run", reward__functions=functions(rewards, "sometimes"), schedule__periods=6)
    code, output, errors = run.finish()
    assert code == 0
    assert errors.count("nines are not scored") == 1
    assert "unscorable" in output
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["num_reward_failures"] > 0
    assert any(record["unscorable_share"] > 0 for record in records)


def test_a_run_that_diverges_ends_with_a_sentence_and_its_last_checkpoint(tmp_path: Path) -> None:
    """The first step makes weights of 1e30, which are finite; what they compute is not."""
    keys = {"trainer__learning_rate": 1e30, "checkpoint__every": 1, "generator__count": 2}
    code, output, errors = RunProcess(tmp_path / "run", **keys).finish()
    assert code == 7
    assert errors.startswith("onbeat: version 1: the model's logits are not finite: training has diverged")
    assert len(errors.splitlines()) == 1
    assert f"--resume would go on from {tmp_path}/run/checkpoints/version-000001" in output


def test_a_run_that_failed_at_start_up_may_be_repeated_and_one_that_trained_may_not(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(InputError, match="there is no built-in reward 'exactmatch'"):
        train_digests(run_dir, reward__functions=[{"path": "exactmatch"}])
    train_digests(run_dir, schedule__periods=1)
    with pytest.raises(ConfigError, match="already holds a run"):
        train_digests(run_dir, schedule__periods=1)


@pytest.mark.parametrize("where", ["/proc/nope/x", RECIPE])
def test_a_run_dir_that_cannot_be_written_is_a_sentence(where: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.dir = .* cannot be written: "):
        onbeat.train(RECIPE, overrides={**SMALL, "run.dir": where})


def test_sequences_longer_than_the_model_can_see_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="more would exceed the model's 64 positions"):
        train_digests(tmp_path / "run", sampling__max_new_tokens=100)


def test_training_works_in_a_thread_and_under_a_running_loop(tmp_path: Path) -> None:
    digests: dict[str, Any] = {}

    def in_thread() -> None:
        digests["thread"] = train_digests(tmp_path / "thread", schedule__periods=1)

    async def in_loop() -> None:
        digests["loop"] = train_digests(tmp_path / "loop", schedule__periods=1)

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    asyncio.run(in_loop())
    assert digests["thread"] == digests["loop"]


NOTEBOOK = """
import asyncio, sys
import onbeat

async def cell():
    try:
        onbeat.train(sys.argv[1], overrides={"run.dir": sys.argv[2], "schedule.periods": 1000})
    except KeyboardInterrupt:
        print("stopped", flush=True)

asyncio.run(cell())
"""


def test_a_notebooks_interrupt_stops_the_run_and_keeps_it(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-c", NOTEBOOK, RECIPE, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert any(line.startswith("period 2/") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert output.endswith("stopped\n"), errors
    assert "interrupted; go on with --resume" in output
    assert len(list((tmp_path / "run" / "checkpoints").glob("version-*"))) == 1


OWN_LOOP = """
import os, signal, sys, warnings
import onbeat
onbeat.prepare_environment()
from transformers import AutoModelForCausalLM
warnings.simplefilter("error" if "strict" in sys.argv else "default")
overrides = {"run.dir": sys.argv[2], "generator.count": 2, "trainer.pack_tokens": 1, "schedule.prompts_per_period": 6}
with onbeat.open_loader(sys.argv[1], overrides=overrides) as loader:
    model = AutoModelForCausalLM.from_pretrained(loader.model_dir)
    loader.publish(0, model.named_parameters())
    prompts = loader.take_prompts()
    period = loader.period(0, prompts[:3])
    slots = []
    for microbatch in period:
        if not slots:
            period.add(prompts[3:])
            if "kill" in sys.argv:
                os.kill(loader._session.pool.generators[0].pid, signal.SIGKILL)
        slots += [group.slot for group in microbatch.groups] or ["-"]
    print("groups", microbatch.closes.num_groups)
"""


@pytest.mark.parametrize("how", [[], ["kill"], ["kill", "strict"]], ids=["calm", "a generator dies", "warnings raise"])
def test_a_loop_of_ones_own_may_add_prompts_and_survives_the_death_of_a_generator(
    how: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "own.py"
    script.write_text(OWN_LOOP)
    command = [sys.executable, str(script), RECIPE, str(tmp_path / "run"), *how]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert "groups 6" in done.stdout, done.stderr
    assert ("died (status -9)" in done.stderr) == (how == ["kill"])


def test_completion_order_trains_the_same_groups(tmp_path: Path) -> None:
    in_order = train_digests(tmp_path / "dispatch", schedule__periods=1)
    by_arrival = train_digests(tmp_path / "completion", schedule__periods=1, schedule__order="completion")
    assert by_arrival[1] == in_order[1]  # the ledger
    environment = json.loads((tmp_path / "completion" / "environment.json").read_text())
    assert environment["exact"] is False
    assert "order of arrival" in environment["why_not_exact"]
    assert run_digests(tmp_path / "dispatch") == in_order


def test_the_example_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(# sums\.py\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "sums.py").write_text(example)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    done = subprocess.run([sys.executable, "sums.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rewards = json.loads(re.findall(r"^reward: (.*)$", done.stdout, re.MULTILINE)[0])
    assert len(rewards) == 20
    assert rewards[-1] > rewards[0]
    assert (tmp_path / "runs" / "sums" / "model" / "model.safetensors").is_file()
