"""What a run tells about itself: a trace that opens, and numbers that are None rather than made up."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.errors import InputError
from onbeat.observe.metrics import accuracy, group_metrics, mean, update_metrics
from onbeat.observe.recorder import Recorder, number, percent
from onbeat.observe.trace import Trace
from onbeat.protocols import UpdateReport
from onbeat.types import Completion, FinishReason, Group, Prompt, Rollout

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


def test_a_record_is_on_disk_when_its_period_has_closed(tmp_path: Path) -> None:
    lines: list[str] = []
    recorder = Recorder(tmp_path, accuracy_threshold=1.0, num_periods=2, say=lines.append, warn=lines.append)
    recorder.publishing(0)
    recorder.published(0)
    recorder.evaluated(0, [group(rollout(None))])
    recorder.period_closed(0, [group(rollout(1.0), rollout(0.0))], 0, [report(grad_norm=2.0, num_trained_tokens=2)])
    recorder.publishing(1)
    recorder.published(1)
    with pytest.raises(InputError, match="period 2: not one of 2 completions could be scored"):
        recorder.period_closed(1, [group(rollout(None), rollout(None))], 1, [report()])
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert records == recorder.records
    assert [record["period"] for record in records] == [0, 1]
    assert [record["accuracy"] for record in records] == [0.5, None]
    assert recorder.evaluations == {0: None}
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
