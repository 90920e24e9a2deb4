"""Reward functions that misbehave, in real processes: the poisoned rollout is unscorable, its neighbours are right.

A reward file is written for each test, with a body that runs only if the completion "poison" is among the rows. The
honest reward of a completion is its length, so a reward that went to the wrong row shows.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from onbeat.cluster.local import LocalLauncher
from onbeat.errors import InputError, WorkerError
from onbeat.reward.scorer import RewardScorer, ScorerCounts
from onbeat.types import Messages, Rollout
from tests.fakes.rewards import (
    LONG_S,
    SHORT_S,
    TEXTS,
    Function,
    assert_gone,
    completions_of,
    decode,
    poisoned,
    prompt_of,
    rewards_of,
    run,
    with_scorer,
    write,
)

# One poisoned completion


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("raise ValueError('bad\\nanswer')", "raised ValueError: bad answer (line 6 of rewards.py)"),
        ("raise ValueError('\\ud800')", "raised ValueError: ?"),
        ("sys.exit(0)", "raised SystemExit: 0"),
        ("values[row] = float('nan')", "returned NaN"),
        ("values[row] = -float('inf')", "returned an infinite number"),
        ("values[row] = 10 ** 400", "returned an infinite number"),
        ("values[row] = 'high'", "returned a str ('high'), not a number or None"),
        ("return 'high'", "returned a str ('high'), not a list of 1 numbers"),
        ("return None", "returned None, not a list of 1 numbers"),
        ("values.append(1.0)", "returned 2 values for 1 completions"),
        ("return []", "returned 0 values for 1 completions"),
        ("os._exit(3)", "ended with its process: exit status 3"),
        ("os._exit(0)", "ended with its process: exit status 0"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "ended with its process: SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended with its process: SIGSEGV"),
        ("os.closerange(3, 1024); threading.Event().wait()", "ended with its process: SIGKILL"),
        ("for fd in range(3, 64):\n  os.path.lexists(f'/proc/self/fd/{fd}') and "
         "os.readlink(f'/proc/self/fd/{fd}').startswith('socket:') and os.write(fd, b'\\xff' * 64)",
         "wrote into our socket: a frame claims"),
    ],
)  # fmt: skip
def test_a_reward_that_fails_on_one_completion_leaves_its_neighbours_right(
    tmp_path: Path, body: str, cause: str
) -> None:
    function = poisoned(tmp_path, body)
    rollouts, counts = run(tmp_path, function)
    assert rewards_of(rollouts) == [1.0, 2.0, None, 4.0]
    assert [rollout.rewards for rollout in rollouts] == [(1.0,), (2.0,), (None,), (4.0,)]
    assert [rollout.scorable for rollout in rollouts] == [True, True, False, True]
    problem = rollouts[2].problem
    assert problem is not None
    assert problem.startswith(f"The reward function {function.path} {cause}"), problem
    assert all(rollout.problem is None for rollout in rollouts if rollout.scorable)
    assert (counts.calls, counts.failures, counts.timeouts) == (5, 2, 0)


@pytest.mark.parametrize(
    "body",
    [
        "threading.Event().wait()",
        "while True: pass",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()",
        "os.kill(os.getpid(), signal.SIGSTOP)",
    ],
)
def test_a_reward_that_hangs_on_one_completion_is_killed_and_its_neighbours_are_right(
    tmp_path: Path, body: str
) -> None:
    rollouts, counts = run(tmp_path, poisoned(tmp_path, body), timeout_s=SHORT_S)
    assert rewards_of(rollouts) == [1.0, 2.0, None, 4.0]
    assert "took longer than 0.5 s and was killed" in str(rollouts[2].problem)
    assert counts.timeouts == 2


def test_a_none_on_one_completion_means_no_function_applies_to_it(tmp_path: Path) -> None:
    rollouts, counts = run(tmp_path, poisoned(tmp_path, "values[row] = None"))
    assert rewards_of(rollouts) == [1.0, 2.0, None, 4.0]
    assert "No reward function applies" in str(rollouts[2].problem)
    assert counts.failures == 0


def test_a_reward_that_hangs_on_every_row_ends_with_every_rollout_unscorable(tmp_path: Path) -> None:
    file = write(tmp_path, "import threading\ndef reward(completions): threading.Event().wait()\n")
    rollouts, counts = run(tmp_path, Function(f"{file}:reward"), timeout_s=SHORT_S)
    assert rewards_of(rollouts) == [None] * 4
    assert counts.timeouts == counts.failures == counts.calls == 5


def test_several_poisoned_groups_at_once_and_any_number_of_workers_give_the_same_rollouts(tmp_path: Path) -> None:
    function = poisoned(tmp_path, "os._exit(3)")
    groups = [("a", "poison"), ("b", "cc"), ("poison",), ("ddd", "poison", "e")]

    async def score_all(scorer: RewardScorer) -> list[tuple[Rollout, ...]]:
        return await asyncio.gather(*(scorer.score(prompt_of(), completions_of(texts)) for texts in groups))

    results = [with_scorer(tmp_path / str(n), function, use=score_all, workers=n) for n in (1, 3)]
    assert results[0] == results[1]
    assert list(map(rewards_of, results[0])) == [[1.0, None], [1.0, 2.0], [None], [3.0, None, 1.0]]


def test_a_call_that_failed_only_once_is_made_good_by_the_retry(tmp_path: Path) -> None:
    function = poisoned(tmp_path, "if len(values) > 1:\n    raise ValueError('together, not alone')")
    rollouts, counts = run(tmp_path, function)
    assert rewards_of(rollouts) == [1.0, 2.0, 6.0, 4.0]
    assert counts.failures == 1


# Processes


FORKS = {
    "that stays in the group": "signal.pause()",
    "that moves to its own session": "os.setsid(); os.write(up, b'x'); signal.pause()",
    "that ignores SIGTERM": "signal.signal(15, signal.SIG_IGN); os.write(up, b'x'); signal.pause()",
}


@pytest.mark.parametrize("child", FORKS.values(), ids=FORKS.keys())
@pytest.mark.parametrize("parent", ["pass", "os._exit(3)", "signal.pause()"], ids=["returns", "dies", "hangs"])
def test_a_process_forked_by_a_reward_is_gone_after_close(tmp_path: Path, child: str, parent: str) -> None:
    pids = tmp_path / "pids"
    function = poisoned(
        tmp_path,
        f"""
        down, up = os.pipe()
        pid = os.fork()
        if pid == 0:
            {child if "write" in child else "os.write(up, b'x'); " + child}
        os.read(down, 1)
        with open({str(pids)!r}, "a") as file:
            file.write(f"{{pid}} {{os.getpid()}}\\n")
        {parent}
        """,
    )

    async def score(scorer: RewardScorer) -> tuple[Rollout, ...]:
        rollouts = await scorer.score(prompt_of(), completions_of(TEXTS))
        await scorer.close()
        for pid in map(int, pids.read_text().split()):
            assert_gone(pid)
        return rollouts

    rollouts = with_scorer(tmp_path, function, use=score, timeout_s=SHORT_S if parent == "signal.pause()" else LONG_S)
    assert rewards_of(rollouts) == [1.0, 2.0, 6.0 if parent == "pass" else None, 4.0]


def test_a_descendant_that_lives_on_does_not_hide_the_death_of_its_worker(tmp_path: Path) -> None:
    function = poisoned(
        tmp_path,
        """
        down, up = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.setsid()
                os.write(up, b"x")
            signal.pause()
        os.read(down, 1)
        os._exit(3)
        """,
    )
    rollouts, counts = run(tmp_path, function, workers=1)
    assert rewards_of(rollouts) == [1.0, 2.0, None, 4.0]
    assert (counts.failures, counts.timeouts) == (2, 0)


@pytest.mark.parametrize("child", ["return values", "raise ValueError('from the fork')", "sys.exit(0)"])
def test_a_fork_that_comes_back_from_the_reward_does_not_speak_for_the_worker(tmp_path: Path, child: str) -> None:
    function = poisoned(
        tmp_path,
        f"""
        pid = os.fork()
        if pid == 0:
            {child}
        if os.waitpid(pid, 0)[1] != 0:
            raise ValueError("the fork did not end well")
        """,
    )
    rollouts, counts = run(tmp_path, function)
    assert rewards_of(rollouts) == [1.0, 2.0, 6.0, 4.0]
    assert (counts.calls, counts.dropped, counts.restarts) == (1, 0, 0)


def test_a_result_that_nobody_asked_for_is_dropped_and_counted(tmp_path: Path) -> None:
    function = poisoned(
        tmp_path,
        """
        from onbeat.messages import ScoreResult
        from onbeat.wire import frame
        for fd in os.listdir("/proc/self/fd"):
            if os.path.lexists(f"/proc/self/fd/{fd}") and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                os.write(int(fd), frame(ScoreResult(999, [9.0, 9.0, 9.0, 9.0])))
        """,
    )
    rollouts, counts = run(tmp_path, function)
    assert rewards_of(rollouts) == [1.0, 2.0, 6.0, 4.0]
    assert (counts.dropped, counts.failures) == (1, 0)


def test_a_worker_that_dies_while_idle_costs_no_reward(tmp_path: Path) -> None:
    file = write(tmp_path, "import os\ndef reward(completions): return [os.getpid()] * len(completions)\n")

    async def score_twice(scorer: RewardScorer) -> tuple[int, int]:
        pids = []
        for _ in range(2):
            (rollout,) = await scorer.score(prompt_of(), completions_of("a"))
            assert rollout.reward is not None
            pids.append(int(rollout.reward))
            os.kill(pids[-1], signal.SIGKILL)
        return pids[0], pids[1]

    first, second = with_scorer(tmp_path, Function(f"{file}:reward"), use=score_twice, workers=1)
    assert first != second
    assert (tmp_path / "logs" / "reward-0.1.log").exists()


def test_giving_up_on_a_hanging_call_frees_its_worker_for_the_next(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "started")
    function = poisoned(tmp_path, f"open({str(tmp_path / 'started')!r}, 'w').close(); threading.Event().wait()")

    async def give_up(scorer: RewardScorer) -> tuple[tuple[Rollout, ...], ScorerCounts]:
        hanging = asyncio.create_task(scorer.score(prompt_of(), completions_of(["poison"])))
        await asyncio.to_thread((tmp_path / "started").read_text)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        return await scorer.score(prompt_of(), completions_of(["a"])), scorer.counts

    rollouts, counts = with_scorer(tmp_path, function, use=give_up, workers=1)
    assert rewards_of(rollouts) == [1.0]
    assert (counts.timeouts, counts.restarts) == (0, 1)


def test_close_ends_a_hanging_call_and_starts_nothing_new(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "started")
    function = poisoned(tmp_path, f"open({str(tmp_path / 'started')!r}, 'w').close(); threading.Event().wait()")

    async def close_early(scorer: RewardScorer) -> ScorerCounts:
        hanging = asyncio.create_task(scorer.score(prompt_of(), completions_of(["poison"])))
        waiting = asyncio.create_task(scorer.score(prompt_of(), completions_of(["a"])))
        await asyncio.to_thread((tmp_path / "started").read_text)
        await scorer.close()
        with pytest.raises(WorkerError, match="closed"):
            await hanging
        with pytest.raises(WorkerError, match="closed"):
            await waiting
        return scorer.counts

    counts = with_scorer(tmp_path, function, use=close_early, workers=1)
    assert (counts.timeouts, counts.restarts) == (0, 0)


def test_a_worker_that_cannot_be_replaced_stops_the_run_with_the_reason(tmp_path: Path) -> None:
    function = poisoned(tmp_path, "os.unlink(__file__); os._exit(3)")
    with pytest.raises(WorkerError, match=r"cannot be replaced: .* there is no file .*rewards\.py"):
        run(tmp_path, function, workers=1)


def test_what_user_code_does_to_its_process_ends_with_the_call(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        import os, signal, sys
        def reward(completions):
            print(f"scored {completions[0]}")
            fresh = (os.getcwd() != "/", signal.getitimer(signal.ITIMER_REAL)[0] == 0.0)
            signal.setitimer(signal.ITIMER_REAL, 1000.0)
            os.chdir("/")
            sys.stdout.close()
            sys.stdout = sys.stderr = None
            os.close(1)
            os.close(2)
            return [float(all(fresh))]
        """,
    )

    async def score_twice(scorer: RewardScorer) -> list[float | None]:
        first = await scorer.score(prompt_of(), completions_of(["a"]))
        second = await scorer.score(prompt_of(), completions_of(["b"]))
        return rewards_of(first + second)

    assert with_scorer(tmp_path, Function(f"{file}:reward"), use=score_twice, workers=1) == [1.0, 1.0]
    assert (tmp_path / "logs" / "reward-0.log").read_text() == "scored a\nscored b\n"


def test_a_traceback_is_logged_once_however_often_the_function_raises(tmp_path: Path) -> None:
    file = write(tmp_path, "def reward(completions):\n    raise ValueError(completions[0])\n")
    run(tmp_path, Function(f"{file}:reward"), workers=1)
    assert (tmp_path / "logs" / "reward-0.log").read_text().count("Traceback") == 1


def test_time_limits_by_alarm_work_because_functions_run_in_the_main_thread(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        import signal
        def out_of_time(*_):
            raise TimeoutError
        def reward(completions):
            signal.signal(signal.SIGALRM, out_of_time)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            try:
                while True:
                    signal.pause()
            except TimeoutError:
                return [0.25] * len(completions)
        """,
    )
    rollouts, counts = run(tmp_path, Function(f"{file}:reward"), texts=["a", "b"])
    assert rewards_of(rollouts) == [0.25, 0.25]
    assert counts.failures == 0


def test_a_reward_worker_holds_no_torch(tmp_path: Path) -> None:
    file = write(tmp_path, "import sys\ndef reward(completions): return ['torch' in sys.modules] * len(completions)\n")
    assert rewards_of(run(tmp_path, Function(f"{file}:reward"), texts=["a"])[0]) == [0.0]


# What functions are given, and what becomes of their values


def test_the_reward_is_the_weighted_sum_of_the_functions_that_apply(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        def length(completions, **_): return [len(c) for c in completions]
        def if_short(completions, **_): return [1.0 if len(c) < 3 else None for c in completions]
        def if_tiny(completions, **_): return tuple(True if len(c) < 2 else None for c in completions)
        """,
    )
    functions = (Function(f"{file}:length", 0.5), Function(f"{file}:if_short", 10.0), Function(f"{file}:if_tiny", -1.0))
    rollouts, _ = run(tmp_path, *functions, texts=["a", "bb", "cccc"])
    assert rewards_of(rollouts) == [0.5 + 10.0 - 1.0, 1.0 + 10.0, 2.0]
    assert [rollout.rewards for rollout in rollouts] == [(1.0, 1.0, 1.0), (2.0, 1.0, None), (4.0, None, None)]


def test_one_failing_function_makes_a_rollout_unscorable_though_another_scored_it(tmp_path: Path) -> None:
    bad = poisoned(tmp_path, "raise ValueError")
    good = Function(write(tmp_path, "def good(completions): return [1.0] * len(completions)\n", "good.py") + ":good")
    rollouts, _ = run(tmp_path, good, bad)
    assert rewards_of(rollouts) == [2.0, 3.0, None, 5.0]
    assert rollouts[2].rewards == (1.0, None)
    assert bad.path in str(rollouts[2].problem)
    assert good.path not in str(rollouts[2].problem)


def test_a_sum_that_overflows_is_unscorable_and_not_infinite(tmp_path: Path) -> None:
    file = write(tmp_path, "def big(completions): return [1e308] * len(completions)\n")
    rollouts, _ = run(tmp_path, Function(f"{file}:big"), Function(f"{file}:big"), texts=["a"])
    assert rewards_of(rollouts) == [None]
    assert "not a finite number" in str(rollouts[0].problem)


def test_a_trl_function_gets_prompts_completions_ids_and_columns_by_name(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        def reward(prompts, completions, completion_ids, **columns):
            assert prompts == ["say", "say"] and completions == ["a", "b"] and completion_ids == [[97], [98]]
            assert columns == {"answer": ["a", "a"], "level": [3, 3]}, columns
            return [float(c == a) for c, a in zip(completions, columns["answer"])]
        """,
    )
    rollouts, _ = run(tmp_path, Function(f"{file}:reward"), texts=["a", "b"], prompt=prompt_of(answer="a", level=3))
    assert [rollout.problem for rollout in rollouts] == [None, None]
    assert rewards_of(rollouts) == [1.0, 0.0]


def test_token_ids_go_by_the_other_name_that_trls_examples_have(tmp_path: Path) -> None:
    file = write(tmp_path, "def longest(completions_ids, **columns): return [len(ids) for ids in completions_ids]")
    rollouts, _ = run(tmp_path, Function(f"{file}:longest"))
    assert rewards_of(rollouts) == [float(len(text)) for text in TEXTS]


def test_a_function_is_given_only_the_columns_it_has_parameters_for(tmp_path: Path) -> None:
    file = write(tmp_path, "def reward(completions, answer, *, weight=2.0): return [weight] * len(answer)\n")
    rollouts, _ = run(tmp_path, Function(f"{file}:reward"), texts=["a"], prompt=prompt_of(answer="a", other=1))
    assert rewards_of(rollouts) == [2.0]


def test_a_column_that_the_data_lacks_is_named_in_the_problem(tmp_path: Path) -> None:
    file = write(tmp_path, "def reward(completions, solution): return [1.0]\n")
    rollouts, _ = run(tmp_path, Function(f"{file}:reward"), texts=["a"], prompt=prompt_of(answer="a"))
    assert "needs 'solution'; the data offers answer, completion_ids, completions, prompts" in str(rollouts[0].problem)


def test_a_column_that_cannot_be_sent_makes_its_rollouts_unscorable_and_not_the_run_fail(tmp_path: Path) -> None:
    file = write(tmp_path, "def reward(completions, **_): return [1.0] * len(completions)\n")

    async def score_twice(scorer: RewardScorer) -> tuple[Rollout, ...]:
        bad = await scorer.score(prompt_of(row=object()), completions_of(["a"]))
        return bad + await scorer.score(prompt_of(), completions_of(["a"]))

    bad, good = with_scorer(tmp_path, Function(f"{file}:reward"), use=score_twice, workers=1)
    assert (bad.reward, good.reward) == (None, 1.0)
    assert "cannot be given its arguments" in str(bad.problem)


def test_a_chat_prompt_is_answered_by_messages(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        def reward(prompts, completions):
            assert prompts == [[{"role": "user", "content": "hi"}]] * 2
            assert all(len(c) == 1 and c[0]["role"] == "assistant" for c in completions)
            return [float(len(c[0]["content"])) for c in completions]
        """,
    )
    chat = prompt_of([{"role": "user", "content": "hi"}])
    rollouts, _ = run(tmp_path, Function(f"{file}:reward"), texts=["a", "bb"], prompt=chat)
    assert rewards_of(rollouts) == [1.0, 2.0]
    assert [rollout.text for rollout in rollouts] == ["a", "bb"]


def test_asynchronous_functions_are_awaited_on_one_loop_for_all_calls(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        import asyncio
        loops = set()
        async def one(completion):
            await asyncio.sleep(0)
            if completion == "poison":
                raise ValueError("asynchronous")
            return len(completion)
        async def reward(completions, **_):
            loops.add(asyncio.get_running_loop())
            assert len(loops) == 1
            return await asyncio.gather(*map(one, completions))
        """,
    )
    rollouts, _ = run(tmp_path, Function(f"{file}:reward"), workers=1)
    assert rewards_of(rollouts) == [1.0, 2.0, None, 4.0]
    assert "raised ValueError: asynchronous" in str(rollouts[2].problem)


@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
@pytest.mark.parametrize("nested", [False, True], ids=["column", "reward_model"])
@pytest.mark.parametrize("form", ["{s}", "{{'score': {s}, 'acc': True}}"], ids=["float", "dict"])
@pytest.mark.parametrize("keyword", ["def", "async def"])
def test_a_verl_function_is_called_row_by_row(
    tmp_path: Path, keyword: str, form: str, nested: bool, chat: bool
) -> None:
    file = write(
        tmp_path,
        f"""
        {keyword} compute_score(data_source, solution_str, ground_truth, extra_info=None):
            assert data_source == "sums" and extra_info == {{"split": "train"}}
            return {form.format(s="float(solution_str == ground_truth)")}
        """,
    )
    truth = {"reward_model": {"ground_truth": "7", "style": "rule"}} if nested else {"ground_truth": "7"}
    source: str | Messages = [{"role": "user", "content": "3+4"}] if chat else "3+4"
    prompt = prompt_of(source, data_source="sums", extra_info={"split": "train"}, **truth)
    rollouts, counts = run(tmp_path, Function(f"{file}:compute_score"), texts=["7", "8"], prompt=prompt)
    assert [rollout.problem for rollout in rollouts] == [None, None]
    assert rewards_of(rollouts) == [1.0, 0.0]
    assert counts.calls == 1


@pytest.mark.parametrize(
    ("columns", "returned", "cause"),
    [
        ({"answer": "7"}, "1.0", "needs a column 'ground_truth', or 'reward_model'"),
        ({"ground_truth": "7"}, "{'acc': 1.0}", "returned a dict without 'score'"),
        ({"ground_truth": "7"}, "{'score': float('nan')}", "returned NaN"),
    ],
)
def test_a_verl_function_that_cannot_score_says_why(
    tmp_path: Path, columns: dict[str, Any], returned: str, cause: str
) -> None:
    file = write(tmp_path, f"def compute_score(data_source, solution_str, ground_truth): return {returned}\n")
    rollouts, _ = run(tmp_path, Function(f"{file}:compute_score"), texts=["7"], prompt=prompt_of(**columns))
    assert rollouts[0].reward is None
    assert cause in str(rollouts[0].problem)


def test_built_in_rewards_run_in_the_same_processes(tmp_path: Path) -> None:
    prompt = prompt_of(answer="1,000", pattern="It is .*")
    functions = (Function("numeric_answer"), Function("exact_match", 10.0), Function("format", 100.0))
    rollouts, _ = run(tmp_path, *functions, texts=["It is $1000.", "1,000", "1"], prompt=prompt)
    assert rewards_of(rollouts) == [101.0, 11.0, 0.0]


def test_a_group_without_completions_has_no_rollouts(tmp_path: Path) -> None:
    rollouts, counts = run(tmp_path, Function("exact_match"), texts=[])
    assert rollouts == ()
    assert counts.calls == 0


# Loading


def test_a_file_is_imported_once_and_finds_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, "BONUS = 3.0\n", "neighbour_of_rewards.py")
    file = write(
        tmp_path,
        """
        from neighbour_of_rewards import BONUS
        shared = []
        def first(completions): shared.append(1); return [BONUS]
        def second(completions): return [len(shared) * 10.0]
        """,
    )

    async def score_twice(scorer: RewardScorer) -> tuple[float | None, ...]:
        await scorer.score(prompt_of(), completions_of("a"))
        return (await scorer.score(prompt_of(), completions_of("a")))[0].rewards

    functions = (Function(f"{file}:first"), Function(f"{file}:second"))
    assert with_scorer(tmp_path, *functions, use=score_twice, workers=1) == (3.0, 20.0)


def test_a_function_is_found_by_its_module(tmp_path: Path) -> None:
    path = "onbeat.reward.builtin:exact_match"
    assert rewards_of(run(tmp_path, Function(path), texts=["a"], prompt=prompt_of(answer="a"))[0]) == [1.0]


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("{dir}/none.py:reward", r"none\.py:reward' cannot be loaded: there is no file .*none\.py\. Correct the path"),
        ("{dir}/rewards.py:rewrad", r"rewards\.py has no function 'rewrad'; did you mean 'reward'\? It has reward"),
        ("{dir}/rewards.py:zzz", r"rewards\.py has no function 'zzz'\. It has reward"),
        ("{dir}/rewards.py:NUMBER", r"'NUMBER' in .*rewards\.py is a int \(3\)\. Name a function"),
        ("{dir}/rewards.py:Class", r"'Class' in .*rewards\.py is a class\. Name a function"),
        ("{dir}/broken.py:reward", r"raised ModuleNotFoundError: .*'no_such_thing' \(line 2 of broken\.py\)"),
        ("{dir}/syntax.py:reward", r"syntax\.py raised SyntaxError: .*line 1"),
        ("{dir}/leaves.py:reward", r"leaves\.py raised SystemExit: 4"),
        ("{dir}/dies.py:reward", r"reward-0 ended with its process: exit status 3 while it loaded(.|\n)*last words"),
        ("no_such_package.rewards:reward", r"there is no module no_such_package\. Install it, or name a file"),
        ("onbeat.reward.builtin:exact_mach", r"has no function 'exact_mach'; did you mean 'exact_match'"),
        ("builtins:max", r"the parameters of 'builtins:max' cannot be read"),
        ("exact_mach", r"there is no built-in reward 'exact_mach'; did you mean 'exact_match'\? The built-in ones"),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_loaded_is_an_input_error_with_the_place_and_the_way_out(
    tmp_path: Path, path: str, sentence: str
) -> None:
    write(tmp_path, "NUMBER = 3\nclass Class: pass\ndef reward(completions): return [1.0]\n")
    write(tmp_path, "import os\nimport no_such_thing\n", "broken.py")
    write(tmp_path, "def reward(:\n", "syntax.py")
    write(tmp_path, "import sys\nsys.exit(4)\n", "leaves.py")
    write(tmp_path, "import os\nprint('last words')\nos._exit(3)\n", "dies.py")
    with pytest.raises(InputError, match=sentence):
        run(tmp_path, Function(path.format(dir=tmp_path)), workers=1)


def test_an_import_that_hangs_is_an_input_error_and_leaves_no_process(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        f"""
        import os, threading
        with open({str(tmp_path / "pids")!r}, "a") as file: file.write(f"{{os.getpid()}}\\n")
        threading.Event().wait()
        """,
    )

    async def start() -> None:
        launcher = LocalLauncher(tmp_path / "logs")
        try:
            with pytest.raises(InputError, match=r"reward-0 did not load its reward functions within 1 s"):
                await RewardScorer(launcher, [Function(f"{file}:reward")], decode, 2, LONG_S, 1.0).start()
            for pid in map(int, (tmp_path / "pids").read_text().split()):
                assert_gone(pid)
        finally:
            await launcher.close()

    asyncio.run(start())


def test_the_scorer_itself_imports_no_torch() -> None:
    code = "import sys, onbeat.reward.scorer, onbeat.reward.worker; sys.exit('torch' in sys.modules)"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
