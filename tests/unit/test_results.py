"""What the benchmarks' files come to on docs/results.md: ratios, slopes, TRL's best settings, and what is not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def runs(*seconds: float, first_seed: int = 1, periods: int = 1) -> list[dict[str, Any]]:
    return [{"seed": first_seed + n, "seconds": each, "periods": periods} for n, each in enumerate(seconds)]


def test_a_ratio_is_between_runs_of_the_same_seed_per_update() -> None:
    from harness import rounds, times_as_fast  # type: ignore[import-not-found]

    ours, theirs = runs(1.0, 2.0, 4.0), runs(6.0, 20.0, first_seed=2, periods=2)
    assert times_as_fast(ours, theirs) == [3.0 / 2.0, 10.0 / 4.0]
    assert [[run["seed"] for run in turn] for turn in rounds(ours, theirs, runs(1.0, first_seed=3))] == [[3, 3, 3]]
    assert times_as_fast(ours, []) == []


def test_slopes_are_those_of_the_law_the_seconds_follow() -> None:
    from scaling import slopes  # type: ignore[import-not-found]

    power, each = slopes({n: 3.0 * n**1.5 for n in (1, 2, 4, 8)})
    assert power == pytest.approx(1.5)
    assert slopes({n: 7.0 + 0.25 * n for n in (1, 5, 9)})[1] == pytest.approx(0.25)
    assert each > 0


def test_trls_best_settings_are_the_fastest_tried_on_this_machine_that_compute_the_same(tmp_path: Path) -> None:
    from against_trl import WORKLOADS, best_found
    from harness import Results

    tuned = Results(tmp_path / "tuned.json", again=False)
    workload, cell = WORKLOADS["short"], {"workload": "short"}
    assert best_found(tuned, "short", workload) == {"micro_batch": 8}, "nothing was tried"
    for way, seconds in {
        "TRL, micro-batches of 16": 30.0,
        "TRL, static cache": 29.0,
        "TRL, bfloat16 (not used)": 10.0,
        "TRL, micro-batches of 64": 5.0,
    }.items():
        tuned.add(cell, way, {}, {"seconds": seconds})
    tuned.of(cell, "TRL, micro-batches of 64")["machine"] = {"processor": "another"}
    assert best_found(tuned, "short", workload) == {"micro_batch": 8, "cache_implementation": "static"}


def test_what_is_not_in_the_files_is_told_as_not_measured(tmp_path: Path) -> None:
    import results  # type: ignore[import-not-found]

    page, rows = results.page(tmp_path), results.readme_rows(tmp_path)
    assert not list(tmp_path.glob("*.png"))
    assert page.count(results.NOT_MEASURED) > 100
    assert "nan" not in page
    assert all(results.NOT_MEASURED in line for line in rows.splitlines()[2:])


def test_each_row_is_told_with_the_machine_and_the_commit_it_is_of(tmp_path: Path) -> None:
    import results

    def result(workload: str, who: str, commit: str, cores: int, *seconds: float) -> dict[str, Any]:
        figures = {"generated_tokens": 1, "mean_length": 1.0, "zero_variance_share": 0.0, "publishing_s": 0.1,
                   "generators_waiting_s": 1.0, "trainer_waiting_s": 1.0}  # fmt: skip
        machine = {"processor": "made up", "cores": cores, "memory_gib": 1.0, "python": "3.11"}
        return {
            "cell": {"workload": workload}, "contender": who, "machine": machine, "versions": {"torch": "2.13"},
            "code": commit, "date": "2026-01-01", "settings": {"micro_batch": 4},
            "runs": [run | figures for run in runs(*seconds)],
        }  # fmt: skip

    found = [
        result("short", "onbeat", "aaa", 2, 1.0, 1.0, 2.0),
        result("short", "TRL", "aaa", 2, 4.0, 5.0, 6.0),
        result("chat", "onbeat", "bbb", 8, 10.0),
    ]
    (tmp_path / "bench-trl.json").write_text(json.dumps({"results": found}))
    page = results.page(tmp_path)
    assert "| `short` | 64 (32–64) | not measured | 12.8 (10.7–16) | **4** (3–5) | not measured |" in page
    assert "made up, 2 cores, 1.0 GiB: commit aaa, 2026-01-01 (short)" in page
    assert "made up, 8 cores, 1.0 GiB: commit bbb, 2026-01-01 (chat)" in page
    assert (tmp_path / "results-trl.png").exists()


def test_the_page_that_is_committed_is_that_of_the_files_that_are(tmp_path: Path) -> None:
    """Nobody wrote into it by hand, and nobody forgot `make results`."""
    import results

    for path in (ROOT / "docs").glob("bench-*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    assert results.page(tmp_path) == (ROOT / "docs" / "results.md").read_text()
    assert results.readme_rows(tmp_path) in (ROOT / "README.md").read_text()
