"""The ledger refuses what must not be trained and writes the same bytes for the same training; packs depend on the
groups alone."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.batch.pack import Packer
from onbeat.errors import MissingSlotsError, StaleRolloutError, TrainedTwiceError
from onbeat.ledger import Ledger, digest
from onbeat.types import Completion, Group, Prompt, Rollout, TrainGroup


def make_rollout(sample: int, *, slot: int = 0, version: int = 0, reward: float | None = 1.0) -> Rollout:
    completion = Completion(
        stream="train",
        period=version,
        slot=slot,
        sample=sample,
        version=version,
        token_ids=(10 + sample, 11, 12),
        sampler_logprobs=(-0.5, -0.25, -float(sample)),
        finish_reason="stop",
    )
    return Rollout(completion=completion, text="text", reward=reward, rewards=(reward,))


def make_group(slot: int = 0, *, version: int = 0) -> Group:
    prompt = Prompt(prompt_id=f"row-{slot}", token_ids=(1, 2, 3), source="a prompt", columns={})
    return Group(
        slot=slot, prompt=prompt, rollouts=tuple(make_rollout(n, slot=slot, version=version) for n in range(3))
    )


def changed(group: Group, sample: int, *, reward: float | str | None = "same", **completion: Any) -> Group:
    """The group with one thing about one of its rollouts changed."""
    rollouts = list(group.rollouts)
    old = rollouts[sample]
    rollouts[sample] = msgspec.structs.replace(
        old,
        completion=msgspec.structs.replace(old.completion, **completion),
        reward=old.reward if reward == "same" else reward,
    )
    return msgspec.structs.replace(group, rollouts=tuple(rollouts))


# The digest


def test_the_digest_changes_with_every_token_reward_and_logprob() -> None:
    group = make_group()
    variants = [group, msgspec.structs.replace(group, rollouts=group.rollouts[:2])]
    for place in range(3):
        ids = list(group.prompt.token_ids)
        ids[place] += 1
        prompt = msgspec.structs.replace(group.prompt, token_ids=tuple(ids))
        variants.append(msgspec.structs.replace(group, prompt=prompt))
    for sample, rollout in enumerate(group.rollouts):
        variants += [changed(group, sample, reward=reward) for reward in (0.0, 1.0 + 2**-52, None)]
        for place in range(3):
            ids = list(rollout.completion.token_ids)
            ids[place] += 1
            variants.append(changed(group, sample, token_ids=tuple(ids)))
            logprobs = list(rollout.completion.sampler_logprobs)
            logprobs[place] += 2**-40
            variants.append(changed(group, sample, sampler_logprobs=tuple(logprobs)))
    variants.append(msgspec.structs.replace(group, rollouts=group.rollouts[::-1]))
    assert len({digest(variant) for variant in variants}) == len(variants)


def test_the_digest_does_not_tell_where_one_completion_ends_by_chance() -> None:
    """The same tokens cut elsewhere are another group."""
    group = make_group()
    first = changed(changed(group, 0, token_ids=(1, 2)), 1, token_ids=(3,))
    second = changed(changed(group, 0, token_ids=(1,)), 1, token_ids=(2, 3))
    assert digest(first) != digest(second)


def test_the_digest_is_blind_to_what_the_gradient_cannot_see() -> None:
    group = make_group()
    renamed = msgspec.structs.replace(group.prompt, columns={"x": 1}, source="other")
    assert digest(msgspec.structs.replace(group, prompt=renamed)) == digest(group)
    assert digest(changed(group, 1, finish_reason="length")) == digest(group)


# The guard


def test_a_slot_cannot_be_trained_twice() -> None:
    ledger = Ledger()
    ledger.open(5)
    ledger.record(make_group(2, version=5), "trained")
    for outcome in ("trained", "elided"):
        with pytest.raises(TrainedTwiceError) as error:
            ledger.record(make_group(2, version=5), outcome)  # type: ignore[arg-type]
        assert (error.value.period, error.value.slot) == (5, 2)
        assert "(period 5, slot 2)" in str(error.value)


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("sample", [0, 2])
def test_a_rollout_of_another_version_cannot_be_trained(version: int, sample: int) -> None:
    ledger = Ledger()
    ledger.open(5)
    with pytest.raises(StaleRolloutError, match=f"sample {sample} was sampled from version {version}") as error:
        ledger.record(changed(make_group(2, version=5), sample, version=version), "trained")
    assert (error.value.period, error.value.slot) == (5, 2)
    ledger.record(make_group(2, version=5), "trained")


def test_a_period_cannot_close_with_a_slot_missing() -> None:
    ledger = Ledger()
    ledger.open(5)
    for slot in (0, 3, 1):
        ledger.record(make_group(slot, version=5), "trained")
    with pytest.raises(MissingSlotsError, match=r"2 of 5 groups were never trained: slots \[2, 4\]") as error:
        ledger.close(5)
    assert (error.value.period, error.value.slot) == (5, 2)


def test_a_period_cannot_open_before_the_last_one_closed() -> None:
    ledger = Ledger()
    ledger.open(5)
    with pytest.raises(MissingSlotsError, match="period 6 was opened before this one was closed") as error:
        ledger.open(6)
    assert error.value.period == 5


def test_the_next_period_starts_afresh() -> None:
    ledger = Ledger()
    for period in range(3):
        ledger.open(period)
        ledger.record(make_group(0, version=period), "trained")
        assert [entry.period for entry in ledger.close(1)] == [period]


@settings(deadline=None)
@given(order=st.permutations(range(5)), elided=st.sets(st.integers(0, 4)))
def test_the_written_ledger_does_not_depend_on_the_order_of_arrival(
    order: list[int], elided: set[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    def written(slots: list[int]) -> bytes:
        path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
        ledger = Ledger(path)
        for period in range(2):
            ledger.open(period)
            for slot in slots:
                ledger.record(make_group(slot, version=period), "elided" if slot in elided else "trained")
            ledger.close(5)
        return path.read_bytes()

    content = written(order)
    assert content == written(list(range(5)))
    entries = [json.loads(line) for line in content.splitlines()]
    assert [(entry["period"], entry["slot"]) for entry in entries] == [(p, s) for p in range(2) for s in range(5)]
    assert {entry["slot"] for entry in entries if entry["outcome"] == "elided"} == elided
    assert all(entry.keys() == {"period", "slot", "prompt_id", "outcome", "digest"} for entry in entries)


# Packing


@st.composite
def train_groups(draw: st.DrawFn) -> list[TrainGroup]:
    lengths = draw(st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(1, 30), max_size=4)), max_size=30))
    return [
        TrainGroup(
            slot=slot,
            prompt_ids=(1,) * prompt,
            completion_ids=tuple((2,) * length for length in completions),
            sampler_logprobs=tuple((0.0,) * length for length in completions),
            advantages=(1.0,) * len(completions),
        )
        for slot, (prompt, completions) in enumerate(lengths)
    ]


def packed(groups: list[TrainGroup], max_tokens: int) -> list[tuple[TrainGroup, ...]]:
    packer = Packer(max_tokens)
    packs = [pack for group in groups for pack in packer.add(group)]
    return [*packs, *filter(None, [packer.flush()])]


@settings(deadline=None)
@given(groups=train_groups(), max_tokens=st.integers(1, 200))
def test_every_group_is_in_one_pack_and_in_order(groups: list[TrainGroup], max_tokens: int) -> None:
    packs = packed(groups, max_tokens)
    assert [group.slot for pack in packs for group in pack] == [group.slot for group in groups]
    assert all(packs)


@settings(deadline=None)
@given(groups=train_groups(), max_tokens=st.integers(1, 200))
def test_only_a_group_that_is_larger_by_itself_exceeds_the_budget(groups: list[TrainGroup], max_tokens: int) -> None:
    for pack in packed(groups, max_tokens):
        assert len(pack) == 1 or sum(group.num_tokens for group in pack) <= max_tokens


@settings(deadline=None)
@given(groups=train_groups(), max_tokens=st.integers(1, 200))
def test_packs_are_no_smaller_than_they_must_be(groups: list[TrainGroup], max_tokens: int) -> None:
    packs = packed(groups, max_tokens)
    for pack, after in itertools.pairwise(packs):
        larger = max(pack[-1].num_tokens, after[0].num_tokens)
        assert sum(group.num_tokens for group in pack) + larger > max_tokens


@settings(deadline=None)
@given(groups=train_groups(), max_tokens=st.integers(1, 200))
def test_a_pack_closes_as_soon_as_it_is_full(groups: list[TrainGroup], max_tokens: int) -> None:
    """Whoever trains must not wait for a group that will go into another pack."""
    packer = Packer(max_tokens)
    open_tokens = 0
    for group in groups:
        closed = packer.add(group)
        open_tokens += group.num_tokens - sum(g.num_tokens for pack in closed for g in pack)
        assert open_tokens == 0 or open_tokens + group.num_tokens <= max_tokens


def test_groups_of_one_size_leave_the_moment_no_other_fits() -> None:
    """Four of 165 tokens in a pack of 768: the fourth closes it, not the fifth, which may come much later."""
    packer = Packer(768)
    group = TrainGroup(
        slot=0,
        prompt_ids=(1,) * 45,
        completion_ids=((1,) * 15,) * 8,
        sampler_logprobs=((0.0,) * 15,) * 8,
        advantages=(1.0,) * 8,
    )
    assert [len(packer.add(group)) for _ in range(8)] == [0, 0, 0, 1] * 2


@settings(deadline=None)
@given(groups=train_groups(), max_tokens=st.integers(1, 200), cut=st.integers(0, 30))
def test_packs_depend_on_the_groups_so_far_alone(groups: list[TrainGroup], max_tokens: int, cut: int) -> None:
    """Neither on what comes later, nor on what the packer held before its last flush."""
    whole = [pack for packer in [Packer(max_tokens)] for group in groups for pack in packer.add(group)]
    part = [pack for packer in [Packer(max_tokens)] for group in groups[:cut] for pack in packer.add(group)]
    assert whole[: len(part)] == part
    used = Packer(max_tokens)
    for group in groups:
        used.add(group)
    used.flush()
    assert [pack for group in groups for pack in used.add(group)] == whole
