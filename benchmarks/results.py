"""Everything that was measured, as people read it: tables, plots and the README's results, from docs/bench-*.json.

    make results

Nothing here is measured, and nothing is written by hand: what is not in the files is shown as "not measured".

    docs/results.md        every table, with its command, machine, versions and date
    docs/results-*.png     the plots
    README.md              the rows between <!-- results --> and <!-- /results -->

--from and --readme "" make the page of another folder (`make bench QUICK=1`).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from ablation import SWITCHES, USUAL, fitting, sides
from against_trl import BFLOAT16, IN_BFLOAT16, OTHER_WAYS, OURS, rates
from generate import CELLS, NUM_PARAMETERS, rates_over
from harness import ROOT, Figures, rounds, times_as_fast
from matplotlib.ticker import LogLocator
from overlap import EXACT, WAYS, fastest_first, same_bits
from scaling import AXES, NUM_GROUPS, WORKERS, slopes
from time_to_accuracy import TARGET, reached, seconds_to_target, times_sooner
from workloads import AGAINST_TRL, WORKLOADS

NOT_MEASURED = "not measured"
MARKS = ("<!-- results -->", "<!-- /results -->")
COLOURS = {"onbeat": "#2a6f97", "TRL": "#c8553d", "other": "#8d99ae", "also": "#e9c46a"}
AXIS_NAMES = {
    "num_prompts": "prompts", "group_size": "completions per prompt", "prompt_tokens": "prompt tokens",
    "new_tokens": "new tokens", "generators": "generators",
}  # fmt: skip


class Measured:
    """A benchmark's file; empty if it is not there."""

    def __init__(self, folder: Path, name: str) -> None:
        path = folder / f"bench-{name}.json"
        self.content: Figures = json.loads(path.read_text()) if path.exists() else {}

    def runs(self, cell: Figures, contender: str) -> list[Figures]:
        return self._result(cell, contender).get("runs", [])

    def settings(self, cell: Figures, contender: str) -> Figures:
        return self._result(cell, contender).get("settings", {})

    def start_s(self, cell: Figures, contender: str) -> float:
        """From its start to its first answer."""
        return self._result(cell, contender).get("start_s", math.nan)

    def _result(self, cell: Figures, contender: str) -> Figures:
        results = [result for result in self.content.get("results", []) if result["cell"] == cell]
        return next((result for result in results if result["contender"] == contender), {})

    def cells(self) -> list[Figures]:
        found: list[Figures] = []
        for result in self.content.get("results", []):
            if result["cell"] not in found and result["runs"]:
                found.append(result["cell"])
        return found

    @property
    def origin(self) -> str:
        """Machine, versions, commits and dates: a line under the table."""
        made = [result for result in self.content.get("results", []) if result["runs"]]
        if not made:
            return NOT_MEASURED
        packages = {(name, version) for result in made for name, version in result["versions"].items()}
        pythons = {("Python", result["machine"]["python"]) for result in made}
        versions = ", ".join(f"{name} {version}" for name, version in [*sorted(pythons), *sorted(packages)])
        made_by: dict[tuple[str, str, str], list[str]] = {}
        for result in made:
            cells = made_by.setdefault((described(result["machine"]), result["code"], result.get("date", "")), [])
            name = ", ".join(map(str, result["cell"].values()))
            if name not in cells:
                cells.append(name)
        machines = dict.fromkeys(machine for machine, _, _ in made_by)
        parts = []
        for machine in machines:
            commits = [
                f"commit {commit}, {date}" + (f" ({'; '.join(cells)})" if len(made_by) > 1 else "")
                for (where, commit, date), cells in made_by.items()
                if where == machine
            ]
            parts.append(f"{machine}: {', '.join(commits)}")
        return f"{versions}. {'. '.join(parts)}"


def described(machine: Figures) -> str:
    known = [machine["processor"], *([machine["instructions"]] if "instructions" in machine else [])]
    return ", ".join([*known, f"{machine['cores']} cores", f"{machine['memory_gib']} GiB"])


Table = list[Sequence[str]]
"""The head first."""


def markdown(table: Table) -> str:
    head, *rows = table
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def told(values: Iterable[float], unit: str = "", digits: int = 3) -> str:
    """Median and range, or that there is none."""
    known = list(values)
    if not known:
        return NOT_MEASURED
    spread = f" ({min(known):.{digits}g}–{max(known):.{digits}g})" if len(known) > 1 else ""
    return f"{statistics.median(known):.{digits}g}{spread}{unit}"


def percent(values: Iterable[float]) -> str:
    return told([100 * value for value in values], " %")


# -- against TRL ---------------------------------------------------------------------------------------------


def against_trl(measured: Measured) -> Table:
    table: Table = [("workload", "onbeat", "in completion order", "TRL", "onbeat is faster by", "in completion order")]
    for name in AGAINST_TRL:
        cell = {"workload": name}
        runs = {who: measured.runs(cell, who) for who in (*OURS, "TRL")}
        speeds = [told(rates(runs[who], WORKLOADS[name])) for who in (*OURS, "TRL")]
        gains = [told(times_as_fast(runs[who], runs["TRL"])) for who in OURS]
        table.append((f"`{name}`", *speeds, *(bold(gain) for gain in gains)))
        if name == IN_BFLOAT16:
            for ours, what in ((BFLOAT16[0], "both in bfloat16"), (OURS[0], "TRL in bfloat16")):
                pair = [measured.runs(cell, who) for who in (ours, BFLOAT16[1])]
                both = [told(rates(each, WORKLOADS[name])) for each in pair]
                table.append((f"`{name}`, {what}", both[0], "", both[1], told(times_as_fast(*pair)), ""))
    return table


def bold(text: str) -> str:
    return text if text == NOT_MEASURED else f"**{text.split(' ')[0]}** {text.partition(' ')[2]}".strip()


def trl_settings(measured: Measured, tuned: Measured) -> Table:
    table: Table = [("workload", "TRL, seconds per update by its settings (one update each)", "used")]
    for name in AGAINST_TRL:
        cell = {"workload": name}
        tries = [each for each in tuned.content.get("results", []) if each["cell"] == cell]
        found = [f"{each['contender'].removeprefix('TRL, ')}: {outcome(each)}" for each in tries]
        used = measured.settings(cell, "TRL")
        how = f"micro-batches of {used['micro_batch']}" if used else NOT_MEASURED
        others = [way for way, keys in OTHER_WAYS.items() if used.keys() & keys.keys()]
        how += "".join(way.removeprefix("TRL") for way in others)
        table.append((f"`{name}`", "; ".join(found) or NOT_MEASURED, how))
    return table


def outcome(tried: Figures) -> str:
    """Of one way to run TRL."""
    return f"{tried['runs'][0]['seconds']:.1f}" if tried["runs"] else str(tried.get("ended", NOT_MEASURED))


def trl_where(measured: Measured) -> Table:
    """Where the time of an update went."""
    table: Table = [
        (
            "workload", "seconds per update", "generators wait", "trainer waits", "publishing", "equal groups",
            "tokens of a completion", "TRL's",
        )
    ]  # fmt: skip
    for name in AGAINST_TRL:
        runs, completions = measured.runs({"workload": name}, "onbeat"), WORKLOADS[name].completions
        columns = [
            told(run[key] / run["periods"] for run in runs)
            for key in ("seconds", "generators_waiting_s", "trainer_waiting_s", "publishing_s")
        ]
        ours = told(run["generated_tokens"] / (run["periods"] * completions) for run in runs)
        theirs = told(run["mean_length"] for run in measured.runs({"workload": name}, "TRL"))
        table.append((f"`{name}`", *columns, percent(run["zero_variance_share"] for run in runs), ours, theirs))
    return table


def draw_trl(measured: Measured, path: Path) -> bool:
    names = [name for name in AGAINST_TRL if measured.runs({"workload": name}, "TRL")]
    if not names:
        return False
    figure, axis = plt.subplots(figsize=(8, 0.7 * len(names) + 1.4), layout="constrained")
    contenders = (("onbeat", COLOURS["onbeat"]), (OURS[1], COLOURS["other"]), ("TRL", COLOURS["TRL"]))
    for place, name in enumerate(names):
        trl = measured.runs({"workload": name}, "TRL")
        for row, (who, colour) in enumerate(contenders):
            if runs := measured.runs({"workload": name}, who):
                speeds = times_as_fast(runs, trl)
                middle = statistics.median(speeds)
                spread = [[middle - min(speeds)], [max(speeds) - middle]]
                label = who if place == 0 else None
                axis.barh(place + 0.27 * (row - 1), middle, 0.25, xerr=spread, color=colour, label=label)
                axis.text(max(speeds) + 0.05, place + 0.27 * (row - 1), f"{middle:.2f}", va="center", fontsize=8)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel("completions trained per second, TRL = 1, round by round")
    figure.legend(loc="outside upper right", ncols=3, frameon=False, fontsize=8)
    return save(figure, axis, path)


# -- generation ----------------------------------------------------------------------------------------------

RIVALS = ("vLLM", "transformers generate", "transformers continuous")


def generation(measured: Measured) -> Table:
    table: Table = [
        ("threads, in flight, prompt", "onbeat", *RIVALS, "of the GEMM limit", *(f": {name}" for name in RIVALS))
    ]
    for cell in CELLS:
        name = f"{cell['threads']}, {cell['in_flight']}, {cell['prompt_tokens']} tokens"
        speeds = [_tokens_per_second(measured, cell, who) for who in ("onbeat", *RIVALS)]
        gains = [told(generation_gains(measured, cell, rival)) for rival in RIVALS]
        ours = measured.runs(cell, "onbeat")
        shares = [run["tokens"] / run["seconds"] / (run["gemm_flops"] / (2 * NUM_PARAMETERS)) for run in ours]
        table.append((name, *speeds, percent(shares), *gains))
    return table


def _tokens_per_second(measured: Measured, cell: Figures, who: str) -> str:
    runs = measured.runs(cell, who)
    start = f", {measured.start_s(cell, who):.1f} s" if runs else ""
    return told(run["tokens"] / run["seconds"] for run in runs) + start


def generation_gains(measured: Measured, cell: Figures, rival: str) -> list[float]:
    """How many times as fast, job by job."""
    return rates_over(measured.runs(cell, "onbeat"), measured.runs(cell, rival))


# -- the ablation --------------------------------------------------------------------------------------------


def overlap(measured: Measured) -> Table:
    table: Table = [("workload", "way", "seconds", "generators wait", "trainer waits", "periodic is faster by")]
    for cell in measured.cells():
        base = measured.runs(cell, "onbeat periodic")
        for way in WAYS:
            runs = measured.runs(cell, f"onbeat {way}")
            waits = [told(run[f"{side}_waiting_s"] for run in runs) for side in ("generators", "trainer")]
            seconds = told(run["seconds"] for run in runs)
            table.append((f"`{cell['workload']}`", way, seconds, *waits, told(times_as_fast(base, runs))))
    return table


def same_work(measured: Measured) -> str:
    """Whether those that are exact did the same, bit for bit, and how often periodic was the fastest of them."""
    told: list[str] = []
    for cell in measured.cells():
        runs = [measured.runs(cell, f"onbeat {way}") for way in EXACT]
        turns = rounds(*runs)
        same = sum(same_bits(turn) for turn in turns)
        first = fastest_first(turns)
        told.append(f"of {len(turns)} rounds of `{cell['workload']}` {same} the same bits, periodic fastest in {first}")
    found = "; ".join(told) or NOT_MEASURED
    return f"Tokens, log-probabilities and norm of the gradient by {', '.join(EXACT)}: {found}."


def ablation(measured: Measured) -> Table:
    head = ("workload", "switch", "way", "seconds", "default is faster by", "generators wait", "trainer waits")
    table: Table = [(*head, "over max(generate, train)")]
    for cell in measured.cells():
        base, sync = measured.runs(cell, "periodic"), measured.runs(cell, "sync")
        bounds = {run["seed"]: max(sides(run)) + run["publish_s"] for run in sync}
        for way in SWITCHES[cell["switch"]]:
            runs = measured.runs(cell, way)
            waits = [told(run[f"{side}_waiting_s"] for run in runs) for side in ("generators", "trainer")]
            distance = [run["seconds"] / bounds[run["seed"]] for run in runs if run["seed"] in bounds]
            gain = told(times_as_fast(base, runs)) if way != "periodic" else "1"
            columns = (told(run["seconds"] for run in runs), gain, *waits, told(distance) if distance else "")
            table.append((f"`{cell['workload']}`", cell["switch"], way, *columns))
    return table


def not_switched(measured: Measured) -> str:
    """What of the ablation is missing."""
    cells = [{"workload": name, "switch": switch} for name in USUAL for switch in fitting(name)]
    missing = [f"`{cell['workload']}` {cell['switch']}" for cell in cells if cell not in measured.cells()]
    return f"Switches that were not measured: {', '.join(missing) or 'none'}."


def draw_ablation(measured: Measured, path: Path) -> bool:
    bars = [
        (f"{cell['workload']}: {way}", times_as_fast(measured.runs(cell, "periodic"), measured.runs(cell, way)))
        for cell in measured.cells()
        for way in SWITCHES[cell["switch"]]
        if way != "periodic" and cell["switch"] != "overlap, separated" and measured.runs(cell, way)
    ]
    if not bars:
        return False
    figure, axis = plt.subplots(figsize=(8, 0.3 * len(bars) + 1.2), layout="constrained")
    for place, (_, found) in enumerate(bars):
        middle = statistics.median(found)
        spread = [[middle - min(found)], [max(found) - middle]]
        axis.barh(place, middle, xerr=spread, color=COLOURS["onbeat"])
        axis.text(max(found) + 0.03, place, f"{middle:.2f}", va="center", fontsize=8)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("a period's seconds, default = 1")
    return save(figure, axis, path)


# -- time to accuracy ----------------------------------------------------------------------------------------


LEARNERS = {
    "onbeat": COLOURS["onbeat"], "onbeat, sync": "#14374b", "TRL": COLOURS["TRL"],
    "one period stale": COLOURS["also"],
}  # fmt: skip


def accuracy(measured: Measured) -> Table:
    table: Table = [("", f"seconds to {TARGET:.0%}", "updates", "there", "accuracy before", "after")]
    (cell,) = measured.cells() or [{}]
    for who in LEARNERS:
        runs = measured.runs(cell, who)
        there = [record for run in runs if (record := reached(run)) is not None]
        seconds = told(seconds_to_target(run) for run in runs) if who != "one period stale" else ""
        ends = [percent(run["curve"][place]["accuracy"] for run in runs) for place in (0, -1)]
        updates = told(record["updates"] for record in there)
        table.append((who, seconds, updates, f"{len(there)} of {len(runs)}" if runs else NOT_MEASURED, *ends))
    return table


def identical(measured: Measured) -> str:
    (cell,) = measured.cells() or [{}]
    pairs = rounds(measured.runs(cell, "onbeat"), measured.runs(cell, "onbeat, sync"))
    same = sum(one["digest"] == other["digest"] for one, other in pairs)
    if not pairs:
        return f"Weights of sync and periodic at the end: {NOT_MEASURED}."
    return f"Weights of sync and periodic at the end: equal in {same} of {len(pairs)} seeds, by digest."


def sooner(measured: Measured) -> list[float]:
    """How many times sooner than TRL, seed by seed."""
    (cell,) = measured.cells() or [{}]
    return times_sooner(measured.runs(cell, "onbeat"), measured.runs(cell, "TRL"))


def draw_accuracy(measured: Measured, path: Path) -> bool:
    (cell,) = measured.cells() or [{}]
    if not any(measured.runs(cell, who) for who in LEARNERS):
        return False
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    for axis, by in zip(axes, ("seconds", "updates"), strict=True):
        for who, colour in LEARNERS.items():
            if by == "seconds" and who == "one period stale":
                continue
            for number, run in enumerate(measured.runs(cell, who)):
                values = [100 * record["accuracy"] for record in run["curve"]]
                style = {"linestyle": ":", "linewidth": 2.5} if who == "onbeat, sync" else {"linewidth": 1.3}
                label = who if number == 0 else None
                axis.plot([record[by] for record in run["curve"]], values, color=colour, label=label, **style)
        axis.axhline(100 * TARGET, color="black", linewidth=0.6, linestyle=":")
        axis.set_xlabel("seconds of training" if by == "seconds" else "updates")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("held-out accuracy, %")
    axes[1].legend(frameon=False, fontsize=8)
    return save(figure, axes[0], path)


def demo(measured: Measured) -> Table:
    table: Table = [("held-out question", "before", "after")]
    (cell,) = measured.cells() or [{}]
    for run in measured.runs(cell, "demo")[:1]:
        lines = zip(run["questions"], run["answers_before"], run["answers_after"], strict=True)
        table += [tuple(" ".join(text.split()).replace("|", "\\|") for text in line) for line in lines]
        ends = [percent([run[f"accuracy_{when}"]]) for when in ("before", "after")]
        table.append((f"accuracy, {run['periods']} periods, {run['wall_s']:.0f} s with start and end", *ends))
    return table if len(table) > 1 else [*table, (NOT_MEASURED,) * 3]


# -- how cost grows ------------------------------------------------------------------------------------------


def growth(measured: Measured, axis: str) -> dict[int, list[float]]:
    runs = {value: measured.runs({"axis": axis}, str(value)) for value in AXES[axis]}
    return {value: [run["seconds"] for run in found] for value, found in runs.items() if found}


def scaling(measured: Measured) -> Table:
    table: Table = [("what grows", "seconds per period", "power", "seconds for each one more")]
    for axis, name in AXIS_NAMES.items():
        found = growth(measured, axis)
        points = ", ".join(f"{value}: {told(seconds)}" for value, seconds in found.items())
        medians = {value: statistics.median(seconds) for value, seconds in found.items()}
        fit = [f"{slope:.3g}" for slope in slopes(medians)] if len(found) > 1 else [NOT_MEASURED] * 2
        table.append((name, points or NOT_MEASURED, *fit))
    return table


def overhead(measured: Measured) -> Table:
    table: Table = [("workers", "groups", "ms per group")]
    cells = [(workers, max(NUM_GROUPS)) for workers in WORKERS] + [(max(WORKERS), groups) for groups in NUM_GROUPS[:-1]]
    for workers, groups in cells:
        runs = measured.runs({"workers": workers, "groups": groups}, "the loop")
        table.append((f"{workers:,}", f"{groups:,}", told(run["ms_per_group"] for run in runs)))
    return table


def draw_scaling(measured: Measured, loop: Measured, path: Path) -> bool:
    drawn = {axis: found for axis in AXES if (found := growth(measured, axis))}
    per_group = {
        workers: [run["ms_per_group"] for run in runs]
        for workers in WORKERS
        if (runs := loop.runs({"workers": workers, "groups": max(NUM_GROUPS)}, "the loop"))
    }
    panels = [*((AXIS_NAMES[axis], "s per period", "log", found) for axis, found in drawn.items())]
    panels += [("workers (fakes)", "ms per group", "linear", per_group)] if per_group else []
    if not panels:
        return False
    figure, axes = plt.subplots(1, len(panels), figsize=(2.5 * len(panels), 2.6), layout="constrained", squeeze=False)
    for axis, (name, unit, scale, found) in zip(axes[0], panels, strict=True):
        middle = [statistics.median(values) for values in found.values()]
        spread = [
            [m - min(values) for m, values in zip(middle, found.values(), strict=True)],
            [max(values) - m for m, values in zip(middle, found.values(), strict=True)],
        ]
        axis.errorbar(
            list(found), middle, yerr=spread, marker="o", markersize=3, color=COLOURS["onbeat"], linewidth=1.2
        )
        axis.set_xscale("log")
        axis.set_yscale(scale)
        if scale == "log":
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
        else:
            axis.set_ylim(bottom=0)
        axis.minorticks_off()
        axis.set_xticks(list(found), [f"{value:,}" for value in found])
        axis.set_xlabel(name, fontsize=8)
        axis.set_ylabel(unit, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    return save(figure, axes[0][0], path)


def save(figure: Any, axis: Any, path: Path) -> bool:
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


# -- the page ------------------------------------------------------------------------------------------------


def section(title: str, command: str, text: str, measured: Measured, *tables: Table) -> str:
    parts = [f"## {title}", text, *map(markdown, tables), f"`{command}`: {measured.origin}"]
    return "\n\n".join(parts)


def picture(draw: Callable[[Path], bool], path: Path, words: str) -> str:
    return f"![{words}]({path.name})" if draw(path) else f"*{words}: {NOT_MEASURED}*"


HEAD = """# Results

Written by `make results` from `docs/bench-*.json`, not by hand. Medians, and in brackets the range over all runs; a
ratio is taken round by round, between runs that took turns on one machine. How each was measured stands at the head of
its script in [benchmarks/](../benchmarks), and in [benchmarks.md](benchmarks.md)."""
TRL = """Completions trained per second, SmolLM2-135M, groups of 8: onbeat in its default, bit-exact configuration; in
completion order, which is not exact; and TRL's `GRPOTrainer` at the best of the settings that were tried. TRL's
`AsyncGRPOTrainer` cannot run without a GPU: its attention is a FlashAttention 3 kernel, and it sends weights to a vLLM
server by NCCL. All completions of an update are generated at once here, and groups end together, so next to nothing
overlaps: the factor is that of the engine, the shared prompt, the elisions and the products (below, *What each part is
worth*), and overlap comes on top where a period has more groups than are generated at once (*Overlap*)."""
ACCURACY = "Held-out accuracy on `recipes/smollm2-arithmetic.toml`, after every update; evaluation is not on the clock."
GENERATION = """Tokens per second of SmolLM2-135M in float32, and seconds from start to first token: groups of 8
completions of 8 to 56 tokens, prefill on the clock. Then how many times as fast onbeat is, job by job."""
ABLATION = """A period over warm workers, with one thing switched off at a time. *Over max(generate, train)*: its
seconds over those of its slower side alone."""
DEMO = "SmolLM2-135M-Instruct learns small sums by `recipes/smollm2-arithmetic.toml`; greedy answers."
SCALING = "8 prompts of 64 tokens, groups of 8, 16 new tokens, 1 generator; one of these at a time grows."
OVERHEAD = "Real loop, loader, pool and ledger, fake workers; processor time per group of 8."


def page(folder: Path) -> str:
    trl, learned, parts = Measured(folder, "trl"), Measured(folder, "accuracy"), Measured(folder, "ablation")
    overlapping, grown, loop = Measured(folder, "overlap"), Measured(folder, "scaling"), Measured(folder, "overhead")
    shown, generated = Measured(folder, "demo"), Measured(folder, "generate")
    tables = [against_trl(trl), trl_where(trl), trl_settings(trl, Measured(folder, "trl-tune"))]
    sections = [
        HEAD,
        section("Against TRL", "make bench-trl", TRL, trl, *tables),
        picture(lambda path: draw_trl(trl, path), folder / "results-trl.png", "onbeat and TRL"),
        section("Time to accuracy", "make bench-accuracy", ACCURACY, learned, accuracy(learned)),
        identical(learned),
        f"How many times sooner than TRL onbeat is there, seed by seed: {told(sooner(learned))}.",
        picture(lambda path: draw_accuracy(learned, path), folder / "results-accuracy.png", "Learning curves"),
        section("The demo with a real model", "make bench-demo", DEMO, shown, demo(shown)),
        section("Generation", "make bench-generate", GENERATION, generated, generation(generated)),
        section("What each part is worth", "make bench-ablation", ABLATION, parts, ablation(parts)),
        not_switched(parts),
        picture(lambda path: draw_ablation(parts, path), folder / "results-ablation.png", "Each part switched off"),
        section("Overlap", "make bench-overlap", "A period over warm workers.", overlapping, overlap(overlapping)),
        same_work(overlapping),
        section("How cost grows", "make bench-scaling", SCALING, grown, scaling(grown)),
        section("The loop's own work", "make bench-scaling", OVERHEAD, loop, overhead(loop)),
        picture(lambda path: draw_scaling(grown, loop, path), folder / "results-scaling.png", "How cost grows"),
    ]
    return "\n\n".join(sections) + "\n"


def readme_rows(folder: Path) -> str:
    trl, learned = Measured(folder, "trl"), Measured(folder, "accuracy")
    overlapping, loop = Measured(folder, "overlap"), Measured(folder, "overhead")
    rows: Table = [("what", "figure", "command")]
    for name in AGAINST_TRL:
        workload = WORKLOADS[name]
        gains = times_as_fast(*(trl.runs({"workload": name}, who) for who in ("onbeat", "TRL")))
        size = f"{workload.prompts} × {workload.group_size} completions of up to {workload.max_new_tokens} tokens"
        what = f"completions trained per second against TRL, SmolLM2-135M on 2 cores: `{name}`, {size}"
        rows.append((what, f"{told(gains)} times as fast" if gains else NOT_MEASURED, "`make bench-trl`"))
        if name == IN_BFLOAT16 and (gains := times_as_fast(*(trl.runs({"workload": name}, who) for who in BFLOAT16))):
            rows.append((f"the same, both in bfloat16: `{name}`", f"{told(gains)} times as fast", "`make bench-trl`"))
    gains = sooner(learned)
    rows.append(
        (
            f"seconds to {TARGET:.0%} held-out accuracy against TRL, `recipes/smollm2-arithmetic.toml`",
            f"{told(gains)} times sooner" if gains else NOT_MEASURED,
            "`make bench-accuracy`",
        )
    )
    shown = Measured(folder, "demo")
    for run in (run for cell in shown.cells() for run in shown.runs(cell, "demo")[:1]):
        figure = " → ".join(percent([run[f"accuracy_{when}"]]) for when in ("before", "after"))
        rows.append((f"held-out accuracy of the demo, {run['periods']} periods", figure, "`make bench-demo`"))
    generated = Measured(folder, "generate")
    for rival in RIVALS:
        found = [statistics.median(gains) for cell in CELLS if (gains := generation_gains(generated, cell, rival))]
        figure = f"{min(found):.3g} to {max(found):.3g} times as fast, by cell" if found else NOT_MEASURED
        rows.append((f"tokens generated per second against {rival}, SmolLM2-135M", figure, "`make bench-generate`"))
    base = overlapping.runs({"workload": "balanced"}, "onbeat periodic")
    for way in ("sync, all cores", "sync, separated"):
        gains = times_as_fast(base, overlapping.runs({"workload": "balanced"}, f"onbeat {way}"))
        figure = f"{told(gains)} times as fast" if gains else NOT_MEASURED
        what = f"a period of {WORKLOADS['balanced'].prompts} groups, periodic against {way}"
        rows.append((what, figure, "`make bench-overlap`"))
    runs = loop.runs({"workers": max(WORKERS), "groups": max(NUM_GROUPS)}, "the loop")
    cost = told([run["ms_per_group"] for run in runs], " ms")
    rows.append(("the loop's own work per group, 1,000 workers, 10,000 groups", cost, "`make bench-scaling`"))
    return markdown(rows)


def write_between(path: Path, content: str) -> None:
    text = path.read_text()
    before, _, rest = text.partition(MARKS[0])
    _, mark, after = rest.partition(MARKS[1])
    assert mark, f"{path} has no {MARKS[0]} … {MARKS[1]}"
    path.write_text(f"{before}{MARKS[0]}\n{content}\n{MARKS[1]}{after}")


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--from", dest="folder", type=Path, default=ROOT / "docs")
    flags.add_argument("--readme", default=str(ROOT / "README.md"), help="empty: leave it alone")
    arguments = flags.parse_args()
    (arguments.folder / "results.md").write_text(page(arguments.folder))
    if arguments.readme:
        write_between(Path(arguments.readme), readme_rows(arguments.folder))
    print(f"{arguments.folder / 'results.md'}")


if __name__ == "__main__":
    main()
