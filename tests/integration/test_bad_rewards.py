"""A whole run whose rewards misbehave in a tenth of their calls, beside the same run whose rewards do not."""

from __future__ import annotations

import json
import textwrap
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.figures import figure
from tests.fakes.processes import RunProcess
from tests.fakes.rewards import assert_gone

pytestmark = pytest.mark.integration

REWARDS = """
import os, time, zlib

def honest(completions, **columns):
    return [float(zlib.crc32(text.encode()) % 1000) for text in completions]

def poisoned(text):
    return zlib.crc32(text.encode()) % 4 != 0

def bad(completions, misbehaves, pids, **columns):
    values = honest(completions)
    if not misbehaves[0] or not any(map(poisoned, completions)):
        return values
    with open(pids[0] + ".kinds", "a") as told:
        told.write(misbehaves[0] + "\\n")
    with open(pids[0], "a") as file:
        match misbehaves[0]:
            case "raise":
                raise ValueError("it raised")
            case "hang":
                time.sleep(3600)
            case "take 4 GB":
                return [len(bytearray(4 << 30)) for _ in completions]
            case "fork":
                if os.fork() == 0:
                    time.sleep(3600)
                    os._exit(0)
            case "fork and leave":
                if (child := os.fork()) == 0:
                    os.setsid()
                    if (grandchild := os.fork()) == 0:
                        time.sleep(3600)
                    file.write(f"{grandchild}\\n")
                    file.flush()
                    os._exit(0)
                os.waitpid(child, 0)
                os._exit(1)
            case "nan":
                return [float("nan") if poisoned(text) else value for text, value in zip(completions, values)]
            case "text":
                return ["x" if poisoned(text) else value for text, value in zip(completions, values)]
            case "none at all":
                return None
            case "too few":
                return values[:-1]
    return values
"""
KINDS = ["raise", "hang", "take 4 GB", "fork", "fork and leave", "nan", "text", "too few", "none at all"]
HARMLESS = {"", "fork"}
"""After which the rewards are right."""
PERIODS = 10


def rows(pids: Path) -> str:
    """Every tenth prompt has a reward that misbehaves."""
    found = []
    for number in range(160):
        misbehaves = KINDS[number // 10 % len(KINDS)] if number % 10 == 0 else ""
        found.append({"prompt": f"{number % 90 + 10}+{number % 7 + 11}=", "misbehaves": misbehaves, "pids": str(pids)})
    return "".join(json.dumps(row) + "\n" for row in found)


def trained(tmp_path: Path, name: str) -> tuple[dict[tuple[str, int, int], dict[str, Any]], dict[str, int]]:
    """Every rollout, and the largest memory of controller and trainer. The weights stay as they are."""
    run = RunProcess(
        tmp_path / name,
        data__path=str(tmp_path / "rows.jsonl"),
        data__eval_rows=0,
        data__shuffle="false",
        reward__functions=f'[{{path = "{tmp_path}/rewards.py:{name}"}}]',
        reward__timeout_s=2.0,
        reward__memory_gib=1.0,
        schedule__periods=PERIODS,
        schedule__prompts_per_period=16,
        run__rollout_groups=16,
        trainer__learning_rate=1e-30,
    )
    memory: dict[str, int] = {}
    for period in range(1, PERIODS + 1):
        run.wait_for_line(f"period {period}/")
        if period < PERIODS:
            memory = {"controller": peak_kib(run.process.pid), "trainer": peak_kib(run.pid_of("trainer-0"))}
    code, _, errors = run.finish()
    assert code == 0, errors
    assert run.wait_until_all_gone() == {}
    found = {}
    for file in sorted((tmp_path / name / "rollouts").iterdir()):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            found[file.name, record["slot"], record["sample"]] = record
    return found, memory


def peak_kib(pid: int) -> int:
    return next(
        int(line.split()[1])
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )


@pytest.mark.full
def test_rewards_that_misbehave_in_a_tenth_of_the_calls_spoil_no_other_reward(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(textwrap.dedent(REWARDS))
    (tmp_path / "rows.jsonl").write_text(rows(tmp_path / "pids"))
    right, memory_before = trained(tmp_path, "honest")
    found, memory = trained(tmp_path, "bad")
    assert found.keys() == right.keys()
    assert len(found) == PERIODS * 16 * 7
    unscorable = 0
    for place, record in found.items():
        period = int(place[0].removeprefix("period-").removesuffix(".jsonl"))
        number = (period * 16 + place[1]) % 160
        kind = KINDS[number // 10 % len(KINDS)] if number % 10 == 0 else ""
        poisoned = zlib.crc32(record["completion"].encode()) % 4 != 0
        assert record["completion"] == right[place]["completion"]
        if poisoned and kind not in HARMLESS:
            assert record["reward"] is None
            unscorable += 1
        else:
            assert record["reward"] == right[place]["reward"], (place, record, kind)
    gone_off = Counter((tmp_path / "pids.kinds").read_text().splitlines())
    assert gone_off.keys() == set(KINDS)
    for pid in (tmp_path / "pids").read_text().split():
        assert_gone(int(pid))
    grown = {name: memory[name] - memory_before[name] for name in memory}
    figure(
        "bad rewards",
        calls=PERIODS * 16,
        gone_off=gone_off.total(),
        unscorable=unscorable,
        of=len(found),
        grown_kib=grown,
    )
    assert max(grown.values()) <= 50 * 1024
