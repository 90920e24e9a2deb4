"""What a run tells about itself: a trace that opens, and numbers that are None rather than made up."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from onbeat.errors import ConfigError, InputError, NumbersError
from onbeat.observe.health import EQUAL_PERIODS, MAX_GAP, Health
from onbeat.observe.intervals import length, of_lane, overlap
from onbeat.observe.metrics import accuracy, evaluation_metrics, group_metrics, mean, update_metrics
from onbeat.observe.recorder import Recorder, number, percent
from onbeat.observe.trace import Trace
from onbeat.observe.trackers import TensorBoard, Trackers, open_trackers
from onbeat.protocols import Evaluated, UpdateReport
from onbeat.recipe import load
from onbeat.run_dir import RunDir
from onbeat.types import Completion, FinishReason, Group, Prompt, Rollout
from tests.fakes.runs import RECIPE

# The trace


def written(path: Path, spans: list[tuple[str, str, float, float]], *, close: bool) -> str:
    trace = Trace(path, zero_s=100.0)
    for span in spans:
        trace.span(*span)
    text = path.read_text()
    trace.close()
    return path.read_text() if close else text


LANE = st.sampled_from(["generator-0", "trainer-0", 'a "lane"\\'])
SECOND = st.integers(0, 40)
SPANS = st.lists(st.tuples(LANE, st.text(), SECOND, SECOND)).map(
    lambda spans: sorted(
        [(lane, name, 100.0 + min(a, b), 100.0 + max(a, b)) for lane, name, a, b in spans], key=lambda span: span[3]
    )
)


def spans_of(events: list[dict[str, Any]]) -> list[tuple[str, str, float, float]]:
    lanes = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name" and "args" in event
    }
    return [
        (lanes[event["pid"]], event["name"], 100.0 + event["ts"] / 1e6, 100.0 + (event["ts"] + event["dur"]) / 1e6)
        for event in events
        if event["ph"] == "X"
    ]


@settings(deadline=None)
@given(spans=SPANS)
def test_a_trace_is_json_when_closed_and_needs_only_its_bracket_when_cut(
    spans: list[tuple[str, str, float, float]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "trace.json"
    assert spans_of(json.loads(written(path, spans, close=True))) == spans
    cut = written(path, spans, close=False)
    assert spans_of(json.loads(cut.rstrip().removesuffix(",") + "]")) == spans


@settings(deadline=None)
@given(spans=SPANS)
def test_spans_that_overlap_never_share_a_row_of_a_lane(
    spans: list[tuple[str, str, float, float]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "trace.json"
    events = [event for event in json.loads(written(path, spans, close=True)) if event["ph"] == "X"]
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        for (_, earlier_end), (later_start, _) in itertools.pairwise(row):
            assert earlier_end <= later_start


def test_spans_one_after_another_share_a_row(tmp_path: Path) -> None:
    spans = [("lane", "x", 100.0 + n, 101.0 + n) for n in range(5)]
    events = json.loads(written(tmp_path / "trace.json", spans, close=True))
    assert {event["tid"] for event in events if event["ph"] == "X"} == {0}


def test_a_trace_may_be_closed_twice(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json", zero_s=0.0)
    trace.close()
    trace.close()
    assert spans_of(json.loads((tmp_path / "trace.json").read_text())) == []


# Metrics


def rollout(
    reward: float | None,
    main: float | None = None,
    *,
    tokens: int = 1,
    finish_reason: FinishReason = "stop",
) -> Rollout:
    completion = Completion(
        stream="train",
        period=0,
        slot=0,
        sample=0,
        version=0,
        token_ids=(1,) * tokens,
        sampler_logprobs=(0.0,) * tokens,
        finish_reason=finish_reason,
    )
    return Rollout(completion=completion, text="", reward=reward, rewards=(reward if main is None else main, 0.0))


def group(*rollouts: Rollout) -> Group:
    return Group(slot=0, prompt=Prompt(prompt_id="p", token_ids=(1,), source="", columns={}), rollouts=tuple(rollouts))


def test_a_mean_or_share_over_nothing_is_none() -> None:
    assert mean([]) is None
    assert accuracy([], 1.0) is None
    metrics = group_metrics([], 1.0)
    assert metrics.pop("num_generated_tokens") == 0
    assert set(metrics.values()) == {None}


def test_rewards_of_unscorable_rollouts_are_in_no_mean() -> None:
    metrics = group_metrics([group(rollout(None), rollout(None)), group(rollout(None), rollout(None))], 1.0)
    assert (metrics["reward_mean"], metrics["reward_std"], metrics["accuracy"]) == (None, None, None)
    assert metrics["unscorable_share"] == 1.0
    metrics = group_metrics([group(rollout(None), rollout(3.0)), group(rollout(1.0), rollout(None))], 1.0)
    assert (metrics["reward_mean"], metrics["reward_std"], metrics["unscorable_share"]) == (2.0, 1.0, 0.5)


def test_accuracy_is_the_share_of_scorable_completions_whose_main_reward_reaches_the_threshold() -> None:
    groups = [group(rollout(1.0), rollout(0.99), rollout(None)), group(rollout(0.0, main=1.0), rollout(5.0, main=0.0))]
    assert accuracy(groups, 1.0) == 0.5
    assert accuracy(groups, 0.9) == 0.75
    assert accuracy([group(rollout(None), rollout(1.0))], 1.0) == 1.0


def test_a_completion_is_right_by_its_main_reward_only_if_it_was_scored() -> None:
    """A second function that fails leaves the rollout unscorable, whatever the first one said."""
    failed = Rollout(completion=rollout(1.0).completion, text="", reward=None, rewards=(1.0, None), problem="hung")
    assert accuracy([group(failed, rollout(0.0))], 1.0) == 0.0
    does_not_apply = Rollout(completion=rollout(1.0).completion, text="", reward=1.0, rewards=(None, 1.0))
    assert accuracy([group(does_not_apply)], 1.0) is None


def test_shares_and_lengths_are_over_all_rollouts() -> None:
    groups = [
        group(rollout(1.0, tokens=3), rollout(1.0, tokens=5, finish_reason="length")),
        group(rollout(0.0, tokens=1), rollout(1.0, tokens=7)),
        group(rollout(None, tokens=2), rollout(1.0, tokens=6)),
        group(rollout(0.0, tokens=4), rollout(1.0, tokens=4)),
    ]
    metrics = group_metrics(groups, 1.0)
    assert metrics["truncated_share"] == 1 / 8
    assert (metrics["completion_tokens_mean"], metrics["num_generated_tokens"]) == (4.0, 32)
    assert metrics["zero_variance_share"] == 0.5


def report(**values: Any) -> UpdateReport:
    nothing = dict.fromkeys(("loss", "entropy", "kl", "clip_share", "gap_mean", "gap_max"))
    defaults = {"grad_norm": 0.0, "learning_rate": 0.0, "stepped": True, "num_trained_tokens": 0}
    return UpdateReport(**(nothing | defaults | values))


def test_the_updates_of_a_period_make_one_record() -> None:
    reports = [
        report(loss=1.0, gap_max=0.25, gap_mean=0.1, learning_rate=0.5, num_trained_tokens=10, grad_norm=1.0),
        report(grad_norm=3.0, learning_rate=0.25),
        report(
            loss=2.0,
            gap_max=0.125,
            gap_mean=0.3,
            learning_rate=0.125,
            num_trained_tokens=5,
            stepped=False,
            grad_norm=5.0,
        ),
    ]
    assert update_metrics(reports) == {
        "loss": 1.5,
        "grad_norm": 3.0,
        "entropy": None,
        "kl": None,
        "clip_share": None,
        "gap_mean": pytest.approx(0.2),
        "gap_max": 0.25,
        "learning_rate": 0.125,
        "num_skipped_updates": 1,
        "num_trained_tokens": 15,
    }


def recorder_in(run_dir: Path, lines: list[str]) -> Recorder:
    (run_dir / "rollouts").mkdir(exist_ok=True)
    return Recorder(
        RunDir(run_dir, None),
        accuracy_threshold=1.0,
        num_periods=2,
        rollout_groups=8,
        trackers=Trackers([], lines.append),
        say=lines.append,
        warn=lines.append,
    )


def test_a_resumed_run_has_the_records_of_the_one_before(tmp_path: Path) -> None:
    for period in (0, 1):
        recorder = recorder_in(tmp_path, [])
        recorder.publishing(period)
        recorder.published(period)
        recorder.period_closed(period, [group(rollout(1.0), rollout(0.0))], 0, [report()])
        recorder.evaluated(period, Evaluated(greedy=[group(rollout(period))], sampled=[]))
        recorder.close()
    recorder = recorder_in(tmp_path, [])
    assert [record["period"] for record in recorder.records] == [0, 1]
    assert (recorder.accuracy_of(0), recorder.accuracy_of(1), recorder.accuracy_of(2)) == (0.0, 1.0, None)
    assert recorder.best_of([0, 1, 2]) == 1
    assert recorder.best_of([0, 2]) == 0
    assert recorder.best_of([2]) is None


# Where the time went

INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair))))


@given(left=INTERVALS, right=INTERVALS)
def test_lengths_and_overlaps_are_those_of_the_seconds_one_by_one(left: Any, right: Any) -> None:
    def seconds(intervals: list[tuple[int, int]]) -> set[int]:
        return {second for began, ended in intervals for second in range(began, ended)}

    assert length(left) == len(seconds(left))
    assert overlap(left, right) == len(seconds(left) & seconds(right))


def test_a_lane_is_told_from_one_whose_name_goes_on() -> None:
    spans = [("generator-1", 0.0, 1.0), ("generator-10", 2.0, 5.0), ("generator-host-3", 6.0, 7.0)]
    assert length(of_lane(spans, "generator-1", 0.0, 10.0)) == 1.0
    assert length(of_lane(spans, "generator", 0.0, 10.0)) == 5.0


def test_a_periods_seconds_are_accounted_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 101.0, 103.0, 120.0])  # made, publishing, published, closed
    monkeypatch.setattr("onbeat.observe.recorder.time.monotonic", lambda: next(clock))
    recorder = recorder_in(tmp_path, [])
    recorder.publishing(0)
    recorder.published(0)
    for lane, began_s, ended_s in (
        ("generator-0", 103.0, 109.0), ("generator-0", 105.0, 113.0), ("generator-1", 103.0, 107.0),
        ("trainer-0", 108.0, 112.0), ("trainer-0", 112.0, 119.0),
    ):  # fmt: skip
        recorder.span(lane, "", began_s, ended_s)
    recorder.period_closed(0, [group(rollout(1.0, tokens=14))], 0, [report(num_trained_tokens=22)])
    record = recorder.records[0]
    assert (record["period_s"], record["publish_s"], record["training_s"]) == (19.0, 2.0, 11.0)
    assert record["trainer_waiting_s"] == 6.0
    assert record["generators_busy_s"] == (10.0 + 4.0) / 2
    assert record["overlap_s"] == 5.0
    assert (record["generated_tokens_per_s"], record["trained_tokens_per_s"]) == (2.0, 2.0)


# A run that gets nowhere


def judge(health: Health, period: int, groups: list[Group], *reports: UpdateReport) -> None:
    record = {"period": period, **group_metrics(groups, 1.0)}
    health.check(record, groups, reports)


def test_three_skipped_steps_in_a_row_stop_the_run() -> None:
    told: list[str] = []
    health = Health(told.append)
    varied = [group(rollout(1.0), rollout(0.0))]
    bad = report(stepped=False, grad_norm=float("nan"), loss=float("nan"))
    judge(health, 0, varied, bad, bad, report(), bad)
    assert len(told) == 3
    judge(health, 1, varied, bad)
    with pytest.raises(NumbersError, match="period 3: 3 optimizer steps in a row had to be skipped"):
        judge(health, 2, varied, bad)


def test_a_run_whose_rewards_never_differ_is_told_so_once() -> None:
    told: list[str] = []
    health = Health(told.append)
    equal, varied = [group(rollout(0.0), rollout(0.0))], [group(rollout(1.0), rollout(0.0))]
    for period in range(EQUAL_PERIODS - 1):
        judge(health, period, equal, report())
    judge(health, 4, varied, report())
    assert told == []
    for period in range(5, 5 + EQUAL_PERIODS + 3):
        judge(health, period, equal, report())
    assert len(told) == 1
    assert f"for {EQUAL_PERIODS} periods all completions of every prompt have had the same reward (now 0.0)" in told[0]


def test_a_sampler_far_from_the_trainer_is_told_once() -> None:
    told: list[str] = []
    health = Health(told.append)
    varied = [group(rollout(1.0), rollout(0.0))]
    judge(health, 0, varied, report(gap_mean=MAX_GAP), report(gap_mean=0.5))  # the second one after a step
    judge(health, 1, varied, report(gap_mean=None))
    assert told == []
    judge(health, 2, varied, report(gap_mean=0.02))
    judge(health, 3, varied, report(gap_mean=float("nan")))
    assert len(told) == 1
    assert "period 3: the sampler's log-probabilities are 0.02 from the trainer's" in told[0]
    assert "algorithm.importance_cap" in told[0]


def test_pass_at_k_counts_prompts_with_a_right_answer() -> None:
    right, wrong, unscored = rollout(1.0), rollout(0.0), rollout(None)
    evaluated = Evaluated(
        greedy=[group(right), group(wrong), group(wrong)],
        sampled=[
            group(right, right, wrong, wrong),
            group(wrong, wrong, wrong, right),
            group(wrong, unscored, wrong, wrong),
        ],
    )
    assert evaluation_metrics(evaluated, 1.0) == {
        "accuracy": pytest.approx(1 / 3),
        "num_prompts": 3,
        "unscorable_share": 0.0,
        "truncated_share": 0.0,
        "pass@1": pytest.approx(0.25),
        "pass@4": pytest.approx(2 / 3),
    }


def test_a_held_out_answer_that_cannot_be_scored_is_not_right() -> None:
    evaluated = Evaluated(greedy=[group(rollout(1.0)), group(rollout(None))], sampled=[group(rollout(None))])
    metrics = evaluation_metrics(evaluated, 1.0)
    assert (metrics["accuracy"], metrics["unscorable_share"], metrics["pass@1"]) == (0.5, 0.5, 0.0)


# Trackers


def test_tensorboard_gets_every_number_by_name_and_period(tmp_path: Path) -> None:
    trackers = Trackers([TensorBoard(tmp_path)], pytest.fail)
    trackers.log({"reward_mean": 0.5, "kl": None, "note": "text", "num_groups": 3}, step=7)
    trackers.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(events.Tags()["scalars"]) == ["num_groups", "reward_mean"]
    assert [(event.step, event.value) for event in events.Scalars("reward_mean")] == [(7, 0.5)]


def test_a_tracker_that_fails_costs_its_own_figures_and_a_warning() -> None:
    class Broken:
        def log(self, numbers: Any, step: int) -> None:
            raise OSError("no network")

        def close(self) -> None:
            raise AssertionError("it is out")

    class Good:
        logged: ClassVar[list[int]] = []

        def log(self, numbers: Any, step: int) -> None:
            self.logged.append(step)

        def close(self) -> None: ...

    told: list[str] = []
    trackers = Trackers([Broken(), Good()], told.append)
    for step in range(3):
        trackers.log({"loss": 1.0}, step)
    trackers.close()
    assert Good.logged == [0, 1, 2]
    assert told == ["Broken gets no more figures: OSError: no network"]


def test_a_tracker_that_is_not_installed_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = load([RECIPE], {"track.trackio": "mine"})
    with pytest.raises(ConfigError, match=r"track.trackio is set, but trackio cannot be imported"):
        open_trackers(config, tmp_path, pytest.fail)


def test_a_record_is_on_disk_when_its_period_has_closed(tmp_path: Path) -> None:
    lines: list[str] = []
    recorder = recorder_in(tmp_path, lines)
    recorder.publishing(0)
    recorder.published(0)
    recorder.evaluated(0, Evaluated(greedy=[group(rollout(None))], sampled=[]))
    recorder.period_closed(0, [group(rollout(1.0), rollout(0.0))], 0, [report(grad_norm=2.0, num_trained_tokens=2)])
    recorder.publishing(1)
    recorder.published(1)
    with pytest.raises(InputError, match="period 2: not one of 2 completions could be scored"):
        recorder.period_closed(1, [group(rollout(None), rollout(None))], 1, [report()])
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert records == recorder.records
    assert [record["period"] for record in records] == [0, 1]
    assert [record["accuracy"] for record in records] == [0.5, None]
    assert recorder.evaluations == [
        {"version": 0, "accuracy": 0.0, "num_prompts": 1, "unscorable_share": 1.0, "truncated_share": 0.0}
    ]
    assert records[0]["trainer_waiting_s"] >= 0.0
    assert records[0]["trained_tokens_per_s"] is None
    rollouts = [json.loads(line) for line in (tmp_path / "rollouts" / "period-000000.jsonl").read_text().splitlines()]
    assert [record["reward"] for record in rollouts] == [1.0, 0.0]
    assert len(lines) == 3
    assert "accuracy 50.0 %" in lines[1]
    assert "accuracy –" in lines[2]
    assert "no gradient" in lines[2]
    recorder.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    assert [name for _, name, _, _ in spans_of(events)] == ["version 0", "version 1"]


def test_none_is_shown_as_a_dash() -> None:
    assert (percent(None), percent(0.0), percent(0.1234)) == ("–", "0.0 %", "12.3 %")
    assert (number(None), number(0.0), number(1.23456, 1)) == ("–", "0.000", "1.2")
