"""What every benchmark here shares: contenders in environments of their own, turn and turn about, figures kept.

    contenders  ── A ─ B ─ C ─ A ─ B ─ C ─ …      one machine, one run, nobody else working
                        │
                        ▼
    docs/NAME.json    per cell and contender: versions and every single run; medians and spread are printed

A contender is a process (rivals/contender.py) that stays up during a cell and waits, asleep, while another has its
turn, which begins when nobody works any more. A benchmark that was interrupted goes on where it was: rounds that are in
the file are not made again (--again makes them), if they are of this machine, the same code (onbeat, rivals, recipes,
pinned versions) and the same settings, and if they are whole: what is compared has taken turns. Cells that are not
asked for stay as they are, with --again too and whatever machine they are of; those of one cell are of one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onbeat.environment import ALLOCATOR_ENVIRONMENT, TORCH_ENVIRONMENT

ROOT = Path(__file__).parents[1]
RIVALS = Path(__file__).parent / "rivals"
ENVIRONMENTS = ROOT / ".rivals"
QUIET = 0.1
"""Of a core: less than that is nobody at work."""
QUIET_WITHIN_S = 60
Cell = dict[str, Any]
Figures = dict[str, Any]


def rival_python(name: str) -> str:
    """The interpreter of a rival's own environment, made on first use from rivals/NAME.txt: exactly these packages."""
    if name == "vllm":
        subprocess.run(["make", "--silent", "vllm-env"], cwd=ROOT, check=True)
        return str(ROOT / ".vllm" / "bin" / "python")
    directory = ENVIRONMENTS / name
    python = directory / "bin" / "python"
    wanted, installed = (RIVALS / f"{name}.txt").read_text(), directory / ".installed"
    if not installed.exists() or installed.read_text() != wanted:
        print(f"installing {name} into {directory.relative_to(ROOT)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "torch==2.13.0"], check=True)
        subprocess.run([*pip, "--no-deps", "--requirement", str(RIVALS / f"{name}.txt")], check=True)
        installed.write_text(wanted)
    return str(python)


def parser(repeats: int) -> argparse.ArgumentParser:
    """The flags every benchmark with contenders has."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--again", action="store_true", help="forget the runs there are of what is asked for")
    flags.add_argument("--repeats", type=int, default=repeats)
    flags.add_argument("--to", type=Path, default=ROOT / "docs", help="the folder the figures are written to")
    return flags


def smollm2() -> str:
    """The directory of SmolLM2-135M-Instruct, fetched and cached on first use."""
    from onbeat.model_source import make_model, model_directory

    source = str(ROOT / "recipes" / "smollm2.py") + ":make_model"
    directory = model_directory(source)
    if not (directory / "config.json").is_file():
        make_model(source, directory)
    return str(directory)


def machine() -> Figures:
    first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    flags = f" {told.get('flags', '')} "
    # The name alone may be that of a whole range of processors, some twice as wide as others.
    which = [f"{key} {told[key]}" for key in ("cpu family", "model") if key in told]
    return {
        "processor": ", ".join([told.get("model name", platform.processor()), *which]),
        "cores": len(os.sched_getaffinity(0)),
        "instructions": next((name for name in ("avx512f", "avx2") if f" {name} " in flags), "none of AVX"),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
    }


def code() -> str:
    """What is measured: the commit, and a digest of what differs from it in the code."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changes = git("diff", "HEAD", "--", "onbeat", "benchmarks")
    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    return commit + (f" with changes {hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else "")


def sources(ours: bool) -> str:
    """A digest of what is measured: the contenders' scripts, tasks, and the versions they are pinned to; of `ours` the
    package, too."""
    digest = hashlib.sha256()
    paths = [*RIVALS.iterdir(), *(ROOT / "recipes").glob("smollm2*"), ROOT / "vllm-env.txt"]
    if ours:
        paths += [path for kind in ("*.py", "*.c") for path in (ROOT / "onbeat").rglob(kind)]
        paths += [ROOT / "constraints.txt", *(ROOT / "recipes").iterdir(), *(ROOT / "tests" / "fakes").iterdir()]
    for path in sorted({path for path in paths if path.is_file()}):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def command() -> str:
    """As it was called, for the record; where the figures went is no part of it."""
    script = Path(sys.argv[0]).resolve()
    told = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    told.add_argument("--to")
    told.add_argument("--again", action="store_true")
    _, words = told.parse_known_args()
    return shlex.join(["python", str(script.relative_to(ROOT)), *words])


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    script: str
    """In rivals/."""
    settings: Figures = field(default_factory=dict)
    environment: str | None = None
    """The rival's own, by name; None: onbeat's."""
    job: Figures = field(default_factory=dict)
    """What it is told with every job. Contenders that differ in this alone are one process."""
    repeats: int = 1000
    """At most so many jobs: for one that is slow, and far behind."""

    @property
    def process(self) -> str:
        return json.dumps([self.script, self.settings, self.environment])

    @property
    def described(self) -> Figures:
        """Its settings for the record: everything but where on this machine things are."""
        known = {key: value for key, value in (self.settings | self.job).items() if key != "model"}
        found: Figures = json.loads(json.dumps(known).replace(f"{ROOT}/", "").replace(f"{sys.prefix}/", ""))
        return found

    def start(self, cell: Cell, log: Path) -> Running:
        python = sys.executable if self.environment is None else rival_python(self.environment)
        environment = os.environ | (TORCH_ENVIRONMENT if self.environment is None else ALLOCATOR_ENVIRONMENT)
        return Running([python, str(RIVALS / self.script), json.dumps(self.settings | cell)], environment, log)


class EndedError(RuntimeError):
    """A contender is no more; its first line says why."""


class Running:
    """A contender at work. Its output goes to a log, whose end is shown if it dies."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        self._process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w")
        )
        self.versions = self._answer()

    def run(self, job: Figures) -> Figures:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Figures:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            why = f"killed by signal {-code}" if code < 0 else f"ended with {code}"
            if code == -signal.SIGKILL:
                why += ", most likely for want of memory"
            raise EndedError(f"{why}\n{self._process.args!r}:\n{self._log.read_text()[-3000:]}")
        figures: Figures = json.loads(line)
        return figures

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def wait_until_quiet() -> None:
    """Some go on for a while after they have answered (vLLM looks for more to do, on a core of its own, for a second or
    two): whoever is next waits for that, off the clock."""
    deadline_s = time.monotonic() + QUIET_WITHIN_S
    while time.monotonic() < deadline_s:
        before, began_s = _busy_s(), time.monotonic()
        time.sleep(0.5)
        if (_busy_s() - before) / (time.monotonic() - began_s) < QUIET:
            return
    raise RuntimeError(
        f"something else has been using more than {QUIET:.0%} of a core for {QUIET_WITHIN_S} s: stop it (`top` shows "
        "it), and call this again; it goes on where it was"
    )


def _busy_s() -> float:
    """Of all processes, on all cores, since the machine started."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


class Results:
    """The file of a benchmark: written after every run."""

    def __init__(self, path: Path, again: bool) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._content: Figures = {"results": []}
        self._machine = machine()
        self._again = again
        self._asked: list[Cell] = []
        if path.exists():
            self._content = json.loads(path.read_text())

    def of(self, cell: Cell, contender: str) -> Figures:
        for result in self._content["results"]:
            if (result["cell"], result["contender"]) == (cell, contender):
                found: Figures = result
                return found
        result = {"cell": cell, "contender": contender, "machine": self._machine, "versions": {}, "runs": []}
        self._content["results"].append(result)
        return result

    def expect(self, cell: Cell, contender: Contender, jobs: Sequence[Figures] = ({},)) -> Figures:
        """What there is of the contender; runs of other code, settings or jobs are forgotten, and those of other
        machines with whatever they were compared with. Of a cell that is to be made again, all are, the first time."""
        again = self._again and cell not in self._asked
        self._asked.append(cell)
        for other in [each for each in self._content["results"] if each["cell"] == cell]:
            if again or other["machine"] != self._machine:
                self._content["results"].remove(other)
        result = self.of(cell, contender.name)
        asked = hashlib.sha256(json.dumps(jobs[0], sort_keys=True).encode()).hexdigest()[:16]
        now = {"settings": contender.described, "sources": sources(contender.environment is None), "job": asked}
        if any(result.get(name) != value for name, value in now.items()):
            result |= {"versions": {}, **now, "code": code(), "command": command(), "runs": []}
            for name in result.keys() - {"cell", "contender", "machine", "versions", "code", "command", "runs", *now}:
                del result[name]
        return result

    def runs(self, cell: Cell, contender: str) -> list[Figures]:
        """Runs that are there; nothing is added."""
        found = [result for result in self._content["results"] if result["cell"] == cell]
        return next((result["runs"] for result in found if result["contender"] == contender), [])

    def is_of_this_machine(self, cell: Cell, contender: str) -> bool:
        return bool(self.of(cell, contender)["machine"] == self._machine)

    def add(self, cell: Cell, contender: str, versions: Figures, figures: Figures) -> None:
        result = self.of(cell, contender)
        result |= {"versions": versions, "date": time.strftime("%Y-%m-%d")}
        result["runs"].append(figures)
        self.write()

    def note(self, **figures: Any) -> None:
        """Something about the run as a whole."""
        self._content |= figures
        self.write()

    def write(self) -> None:
        beside = self._path.with_suffix(".tmp")
        beside.write_text(json.dumps(self._content, indent=1) + "\n")
        beside.replace(self._path)


def summary(values: Sequence[float]) -> str:
    """Median, and the range the runs lay in."""
    return f"{statistics.median(values):.4g} ({min(values):.4g}-{max(values):.4g})"


def rounds(*contenders: Sequence[Figures]) -> list[tuple[Figures, ...]]:
    """The runs of several contenders, those of the same seed together; of the seeds that all of them have had."""
    by_seed = [{run["seed"]: run for run in runs} for runs in contenders]
    shared = set.intersection(*(set(runs) for runs in by_seed))
    return [tuple(runs[seed] for runs in by_seed) for seed in sorted(shared)]


def times_as_fast(ours: Sequence[Figures], theirs: Sequence[Figures]) -> list[float]:
    """Per update or period, round by round."""
    return [
        (other["seconds"] / other.get("periods", 1)) / (run["seconds"] / run.get("periods", 1))
        for run, other in rounds(ours, theirs)
    ]


def take_turns(
    results: Results,
    cell: Cell,
    contenders: Iterable[Contender],
    jobs: Sequence[Figures],
    warm_up: Figures,
    logs: Path,
    rehearsal: Callable[[Contender], Figures] | None = None,
) -> None:
    """Give every contender every job, job by job; the first answer of each, to `warm_up`, tells how long it took to
    start and to come up with something. When the last has started all do their `rehearsal`, off the record: who has
    slept through the minutes another takes to start is cold, and would be measured so."""
    contenders = list(contenders)
    found = {contender.name: results.expect(cell, contender, jobs)["runs"] for contender in contenders}
    whole = min(
        (len(found[c.name]) for c in contenders if len(found[c.name]) < min(len(jobs), c.repeats)), default=None
    )
    if whole is not None:
        for runs in found.values():
            del runs[whole:]
    missing = [contender for contender in contenders if len(found[contender.name]) < min(len(jobs), contender.repeats)]
    first_of: dict[str, Contender] = {}
    for contender in missing:
        first_of.setdefault(contender.process, contender)
    running: dict[str, Running] = {}
    try:
        for process, contender in first_of.items():
            if contender.environment is not None:
                rival_python(contender.environment)
            wait_until_quiet()
            began_s = time.monotonic()
            log = logs / f"{contender.name.replace(' ', '-')}.log"
            running[process] = contender.start(cell, log)
            running[process].run(warm_up | contender.job)
            results.of(cell, contender.name)["start_s"] = round(time.monotonic() - began_s, 2)
        if rehearsal is not None:
            for process, contender in first_of.items():
                wait_until_quiet()
                running[process].run(rehearsal(contender) | contender.job)
        for number, job in enumerate(jobs):
            for contender in missing:
                if len(results.of(cell, contender.name)["runs"]) <= number < contender.repeats:
                    it = running[contender.process]
                    wait_until_quiet()
                    figures = it.run(job | contender.job) | {"seed": job["seed"]}
                    results.add(cell, contender.name, it.versions, figures)
    finally:
        for it in running.values():
            it.close()
