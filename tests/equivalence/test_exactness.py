"""The product: real processes, real weights; sync and periodic, with any number of generators, end bit-identical."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onbeat.algorithms.catalogue import ALGORITHMS
from tests.fakes.runs import RECIPE, ROOT, SMALL, run_digests, train_digests


def test_sync_and_periodic_with_1_2_and_3_generators_end_with_the_same_weights_after_10_periods(tmp_path: Path) -> None:
    sync = train_digests(tmp_path / "sync", schedule__mode="sync", schedule__periods=10)
    for count in (1, 2, 3):
        run_dir = tmp_path / f"periodic-{count}"
        assert train_digests(run_dir, generator__count=count, schedule__periods=10) == sync
        environment = json.loads((run_dir / "environment.json").read_text())
        assert (environment["exact"], environment["shared_prompt"]) == (True, True)


@pytest.mark.full
def test_so_they_do_with_two_updates_per_period_of_groups_that_are_split(tmp_path: Path) -> None:
    keys = {"schedule__periods": 10, "schedule__updates_per_period": 2, "trainer__max_tokens": 12}
    sync = train_digests(tmp_path / "sync", schedule__mode="sync", **keys)
    for count in (1, 2, 3):
        assert train_digests(tmp_path / f"periodic-{count}", generator__count=count, **keys) == sync


@pytest.mark.integration
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3))])
def test_other_seeds_agree_too_and_differ_from_each_other(
    seed: int, tmp_path: Path, seen: dict[int, tuple[str, str]]
) -> None:
    sync = train_digests(tmp_path / "sync", schedule__mode="sync", seed=seed)
    periodic = train_digests(tmp_path / "periodic", generator__count=2, seed=seed)
    assert periodic == sync
    assert sync not in seen.values()
    seen[seed] = sync


@pytest.fixture(scope="module")
def seen() -> dict[int, tuple[str, str]]:
    return {}


@pytest.mark.parametrize(
    "setting",
    [
        {"schedule.updates_per_period": 2},
        {"schedule.updates_per_period": 2, "trainer.max_tokens": 12},
        pytest.param({"algorithm.beta": 0.1, "algorithm.loss_mean": "token"}, marks=pytest.mark.integration),
        pytest.param(
            {"trainer.gradient_checkpointing": True, "sampling.temperature": 0.7, "algorithm.scale_advantages": False},
            marks=pytest.mark.integration,
        ),
    ],
    ids=lambda setting: " ".join(setting),
)
def test_sync_equals_periodic_with(setting: dict[str, Any], tmp_path: Path) -> None:
    keys = {key.replace(".", "__"): value for key, value in setting.items()}
    sync = train_digests(tmp_path / "sync", schedule__mode="sync", **keys)
    assert train_digests(tmp_path / "periodic", generator__count=2, **keys) == sync


ALGORITHM_SETTINGS: list[dict[str, Any]] = [
    {"algorithm.name": "dr_grpo"},
    {"algorithm.name": "dapo", "sampling.max_new_tokens": 5},
    {"algorithm.name": "rloo", "algorithm.beta": 0.05, "algorithm.kl": "k1"},
    {"algorithm.name": "reinforce_pp", "algorithm.beta": 0.05, "algorithm.kl": "k2"},
    {"algorithm.name": "gspo", "schedule.updates_per_period": 2},
    {"algorithm.name": "cispo", "schedule.updates_per_period": 2, "algorithm.mask_truncated": True},
    {"algorithm.dynamic_sampling": True, "schedule.updates_per_period": 2, "algorithm.importance_cap": 2.0},
    # Of rank 1: the narrowest products, which depend on the batch unless care is taken (rollout/invariant.py).
    {"lora.rank": 1, "lora.alpha": 2.0, "algorithm.beta": 0.05, "schedule.updates_per_period": 2},
]


OFTEN = ("dapo", "cispo", None)
"""Algorithms that CI runs; the others differ from these in what tests/unit/test_algorithms.py looks at."""


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(
            setting, marks=pytest.mark.integration if setting.get("algorithm.name") in OFTEN else pytest.mark.full
        )
        for setting in ALGORITHM_SETTINGS
    ],
    ids=lambda setting: " ".join(f"{k}={v}" for k, v in setting.items()),
)
def test_every_algorithm_dynamic_sampling_and_lora_are_exact(setting: dict[str, Any], tmp_path: Path) -> None:
    """Sync with one generator, periodic with three."""
    keys = {key.replace(".", "__"): value for key, value in setting.items()}
    sync = train_digests(tmp_path / "sync", schedule__mode="sync", **keys)
    assert train_digests(tmp_path / "three", generator__count=3, **keys) == sync
    assert json.loads((tmp_path / "three" / "environment.json").read_text())["exact"] is True


def test_every_algorithm_is_among_those_that_are_tested() -> None:
    tested = {setting["algorithm.name"] for setting in ALGORITHM_SETTINGS if "algorithm.name" in setting}
    assert tested | {"grpo"} == set(ALGORITHMS)


@pytest.mark.integration
def test_a_training_loop_of_ones_own_ends_with_the_weights_of_onbeat_train(tmp_path: Path) -> None:
    ours = train_digests(tmp_path / "ours")
    flags = [text for key, value in SMALL.items() for text in (f"--{key}", str(value))]
    command = [sys.executable, str(ROOT / "examples" / "own_loop.py"), RECIPE, str(tmp_path / "own"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "exact: yes" in done.stdout
    assert run_digests(tmp_path / "own") == ours


def test_the_trace_shows_training_of_the_first_group_before_generation_of_the_last_has_ended(tmp_path: Path) -> None:
    settings = {"trainer__pack_tokens": 1, "generator__max_sequences": 7}
    train_digests(tmp_path / "periodic", **settings)
    train_digests(tmp_path / "sync", schedule__mode="sync", **settings)
    assert any(overlaps(tmp_path / "periodic"))
    assert not any(overlaps(tmp_path / "sync"))


def overlaps(run_dir: Path) -> list[bool]:
    """Per period: did the trainer begin before the generators were done?"""
    events = json.loads((run_dir / "trace.json").read_text())
    lanes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    spans = [(lanes[e["pid"]], e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    assert {"publish", "first token", "generator-0", "scorer", "trainer-0", "checkpoint"} == set(lanes.values())
    versions = [f"generator-0 version {period}" for period in range(SMALL["schedule.periods"])]
    assert [span[1] for span in spans if span[0] == "first token"][: len(versions)] == versions
    found = []
    for period in range(SMALL["schedule.periods"]):
        names = {f"train {period}.{slot}" for slot in range(SMALL["schedule.prompts_per_period"])}
        generated = [span for span in spans if span[0] == "generator-0" and span[1] in names]
        assert len(generated) == len(names)
        first, last = min(span[2] for span in generated), max(span[3] for span in generated)
        trained = [span[2] for span in spans if span[0] == "trainer-0" and span[2] > first]
        found.append(min(trained) < last)
    return found
