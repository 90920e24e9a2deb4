"""The benchmarks' harness: what is compared has taken turns, also after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = f"""
import json, os, signal, sys
sys.path.insert(0, {str(BENCHMARKS / "rivals")!r})
import contender

def prepare(settings):
    def run(job):
        with open(settings["diary"], "a") as diary:
            diary.write(f"{{settings['name']}}{{job['seed']}} ")
        if settings.get("dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        return {{"seconds": 1.0}}
    return run

contender.main(prepare, [])
"""
JOBS = [{"seed": seed} for seed in (1, 2, 3)]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import harness  # type: ignore[import-not-found]

    monkeypatch.setattr(harness, "wait_until_quiet", lambda: None)  # beside other tests it never is
    return harness


class Benchmark:
    """Of two contenders, real processes that note in a diary whose turn it was; the second does one job only."""

    def __init__(self, harness: Any, folder: Path) -> None:
        self.harness, self.folder, self.cell, self.rehearsal = harness, folder, 1, None
        (folder / "script.py").write_text(SCRIPT)

    def contenders(self, **more: Any) -> list[Any]:
        settings = {"diary": str(self.folder / "diary")}
        script = str(self.folder / "script.py")
        return [
            self.harness.Contender("a", script, settings | {"name": "a"}),
            self.harness.Contender("b", script, settings | {"name": "b"} | more),
            self.harness.Contender("c", script, settings | {"name": "c"}, repeats=1),
        ]

    def turns(self, again: bool = False, **more: Any) -> str:
        """What the diary says of a run."""
        diary = self.folder / "diary"
        diary.write_text("")
        results = self.harness.Results(self.folder / "bench.json", again)
        self.harness.take_turns(
            results, {"cell": self.cell}, self.contenders(**more), JOBS, {"seed": 0}, self.folder, self.rehearsal
        )
        return diary.read_text().strip()

    def forget(self, *lost: tuple[str, int]) -> None:
        """As if it had been interrupted: of these contenders only so many runs are there."""
        path = self.folder / "bench.json"
        content = json.loads(path.read_text())
        for result in content["results"]:
            for name, kept in lost:
                if result["contender"] == name:
                    del result["runs"][kept:]
        path.write_text(json.dumps(content))


@pytest.fixture
def benchmark(harness: Any, tmp_path: Path) -> Benchmark:
    return Benchmark(harness, tmp_path)


def test_contenders_take_turns_job_by_job_and_nothing_is_made_twice(benchmark: Benchmark) -> None:
    assert benchmark.turns() == "a0 b0 c0 a1 b1 c1 a2 b2 a3 b3"
    assert benchmark.turns() == ""


def test_all_rehearse_when_the_last_has_started_so_that_nobody_takes_turns_cold(benchmark: Benchmark) -> None:
    benchmark.rehearsal = lambda contender: {"seed": f"-{contender.name}"}
    assert benchmark.turns() == "a0 b0 c0 a-a b-b c-c a1 b1 c1 a2 b2 a3 b3"


def test_a_round_that_was_interrupted_is_made_again_by_all(benchmark: Benchmark) -> None:
    benchmark.turns()
    benchmark.forget(("a", 2), ("b", 1))
    assert benchmark.turns() == "a0 b0 a2 b2 a3 b3"


def test_a_contender_with_other_settings_is_compared_with_new_runs_of_the_others(benchmark: Benchmark) -> None:
    benchmark.turns()
    assert benchmark.turns(threads=2) == "a0 b0 c0 a1 b1 c1 a2 b2 a3 b3"


def test_a_cell_is_of_one_machine_and_the_other_cells_stay(
    benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark.turns()
    benchmark.cell = 2
    benchmark.turns()
    elsewhere = benchmark.harness.machine() | {"cores": 1000}
    monkeypatch.setattr(benchmark.harness, "machine", lambda: elsewhere)
    assert benchmark.turns() == "a0 b0 c0 a1 b1 c1 a2 b2 a3 b3"
    results = json.loads((benchmark.folder / "bench.json").read_text())["results"]
    cores = [(result["cell"]["cell"], result["machine"]["cores"] == 1000, len(result["runs"])) for result in results]
    assert cores == [(1, False, 3), (1, False, 3), (1, False, 1), (2, True, 3), (2, True, 3), (2, True, 1)]


def test_what_is_asked_for_again_is_made_again_and_the_other_cells_stay(benchmark: Benchmark) -> None:
    benchmark.turns()
    benchmark.cell = 2
    benchmark.turns()
    assert benchmark.turns(again=True) == "a0 b0 c0 a1 b1 c1 a2 b2 a3 b3"
    results = json.loads((benchmark.folder / "bench.json").read_text())["results"]
    found = [(result["cell"]["cell"], result["contender"], len(result["runs"])) for result in results]
    assert found == [(cell, name, runs) for cell in (1, 2) for name, runs in (("a", 3), ("b", 3), ("c", 1))]


def test_the_machine_is_told_apart_by_its_instructions(harness: Any) -> None:
    flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[-1].split("\n", 1)[0].split()
    expected = "avx512f" if "avx512f" in flags else "avx2" if "avx2" in flags else "none of AVX"
    assert harness.machine()["instructions"] == expected


def test_a_machine_that_never_gets_quiet_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import harness

    clock = iter(range(1000))
    monkeypatch.setattr(harness, "_busy_s", lambda: float(next(clock)))  # a whole core's work, whenever it is asked
    monkeypatch.setattr(harness, "QUIET_WITHIN_S", 0.01)
    with pytest.raises(RuntimeError, match=r"stop it .* it goes on where it was"):
        harness.wait_until_quiet()


def test_of_a_contender_that_was_killed_it_is_said_first_by_what(harness: Any, tmp_path: Path) -> None:
    with pytest.raises(harness.EndedError, match=r"^killed by signal 9, most likely for want of memory\n"):
        Benchmark(harness, tmp_path).turns(dies=True)
