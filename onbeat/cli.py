"""The command line. Imports what a command needs when the command is known: `--help` answers at once."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onbeat.errors import ConfigError, OnbeatError

_INTERRUPTED = 130
Run = Callable[[argparse.Namespace, dict[str, Any]], int]
"""A command: what it was given, and the keys of a recipe that were set."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `onbeat`. Returns the exit code (errors.py lists them)."""
    parser, own_flags = _parser()
    words, flags = _split(sys.argv[1:] if argv is None else argv, own_flags)
    try:
        overrides = parse_overrides(flags)
        arguments, rest = parser.parse_known_args(words)
        if unknown := rest if arguments.takes_keys else [*rest, *flags]:
            raise ConfigError(f"`onbeat {arguments.command}` takes {arguments.takes}, and got {' '.join(unknown)}")
        code: int = arguments.run(arguments, overrides)
        return code
    except OnbeatError as error:
        print(f"onbeat: {error}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("onbeat: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _parser() -> tuple[argparse.ArgumentParser, dict[str, bool]]:
    """And the flags that are not keys of a recipe: whether each takes a value."""
    parser = argparse.ArgumentParser(
        prog="onbeat",
        description="On-policy reinforcement learning of language models: generation and training at the same time.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, run: Run, takes: str, *, keys: bool = False, help: str, description: str | None = None
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help, description=description)
        made.set_defaults(run=run, takes=takes, takes_keys=keys)
        return made

    train = command(
        "train",
        _train,
        "recipes and --section.key VALUE",
        keys=True,
        help="train by one or more recipes",
        description="Train by TOML recipes, composed left to right; any key may be set with --section.key VALUE.",
    )
    train.add_argument("recipes", nargs="+", metavar="RECIPE")
    train.add_argument("--resume", action="store_true", help="go on with the run in run.dir, from its last checkpoint")
    train.add_argument("--dry-run", action="store_true", help="print what would be used, and stop")
    status = command(
        "status",
        _status,
        "a run's directory, perhaps --json, and nothing else",
        help="what a run is doing, and what exactly it waits for",
    )
    status.add_argument("directory", metavar="RUN", help="its directory")
    status.add_argument("--json", action="store_true", help="for programs")
    scale = command(
        "scale",
        _scale,
        "a run's directory and generators=N or trainer=N",
        help="change the number of generators, or of trainer ranks, of a run that is going on",
    )
    scale.add_argument("directory", metavar="RUN", help="its directory")
    scale.add_argument("what", metavar="generators=N|trainer=N")
    worker = command(
        "worker",
        _worker,
        "--join and perhaps --token-file, --vllm-environment",
        help="generate for a run that is going on, here or on another machine",
    )
    worker.add_argument(
        "--join", required=True, metavar="RUN", help="the run's directory, or HOST:PORT (cluster.listen)"
    )
    worker.add_argument("--token-file", metavar="FILE", help="with the run's token; for HOST:PORT")
    worker.add_argument(
        "--vllm-environment", metavar="DIR", help="where vLLM is on this machine, if the run generates with it"
    )
    export = command(
        "export",
        _export,
        "a run's directory, a directory to make, and perhaps --version",
        help="make a model directory of a run's checkpoint",
        description="Of the checkpoint that evaluated best, if none is named; of the newest, if none was evaluated.",
    )
    export.add_argument("directory", metavar="RUN", help="the run's directory")
    export.add_argument("model", metavar="MODEL", help="the directory to make")
    export.add_argument("--version", type=int, metavar="N", help="of the checkpoint")
    evaluate = command(
        "eval",
        _eval,
        "a model directory, recipes and --section.key VALUE",
        keys=True,
        help="held-out accuracy of a model, by a recipe's data and rewards",
    )
    evaluate.add_argument("model", metavar="MODEL", help="a model directory")
    evaluate.add_argument("recipes", nargs="+", metavar="RECIPE")
    sample = command(
        "sample",
        _sample,
        "a model directory and prompts",
        keys=True,
        help="talk to a model",
        description="Completes the prompts; asks for them if none is given.",
    )
    sample.add_argument("model", metavar="MODEL", help="a model directory")
    sample.add_argument("prompts", nargs="*", metavar="PROMPT")
    check = command(
        "check",
        _check,
        "a model directory and nothing else",
        help="compare onbeat's arithmetic on a model with the model's own",
    )
    check.add_argument("model", metavar="MODEL", help="a model directory")
    command("config", _config, "no arguments", help="list every key with its default and what it means")
    actions = [action for made in commands.choices.values() for action in made._actions]
    return parser, {flag: action.nargs != 0 for action in actions for flag in action.option_strings}


def _split(argv: Sequence[str], own_flags: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """The command line without the flags that set keys; and those flags with their values. argparse knows none of them
    and would take their values for recipes."""
    words: list[str] = []
    own: list[str] = []
    flags: list[str] = []
    takes_value = owns_value = False
    for word in argv:
        if owns_value:
            own.append(word)
            owns_value = False
        elif word.partition("=")[0] in own_flags:
            own.append(word)
            owns_value = own_flags.get(word, False)
            takes_value = False
        elif word.startswith("--"):
            flags.append(word)
            takes_value = "=" not in word
        else:
            (flags if takes_value else words).append(word)
            takes_value = False
    return [*words, *own], flags


def parse_overrides(flags: Sequence[str]) -> dict[str, Any]:
    """`--section.key value` and `--section.key=value`, in any number."""
    if not flags:
        return {}
    from onbeat.recipe import check_key, parse_flag

    overrides: dict[str, Any] = {}
    remaining = list(flags)
    while remaining:
        flag = remaining.pop(0)
        key, equals, value = flag[2:].partition("=")
        check_key(key)
        if not equals:
            if not remaining or remaining[0].startswith("--"):
                raise ConfigError(f"{flag} needs a value")
            value = remaining.pop(0)
        overrides[key] = parse_flag(key, value)
    return overrides


def _train(arguments: argparse.Namespace, overrides: dict[str, Any]) -> int:
    from onbeat.recipe import load

    config = load(arguments.recipes, overrides)
    if arguments.dry_run:
        from onbeat.dry_run import describe

        print(describe(config))
        return 0
    from onbeat.controller import run

    asyncio.run(run(config, say=_say, warn=_warn, resume=arguments.resume, **_display()))  # it handles signals
    return 0


def _display() -> dict[str, Any]:
    """The live one on a terminal; lines alone into a file."""
    if not sys.stdout.isatty():
        return {}
    from onbeat.observe.display import live

    return {"display": live}


def _status(arguments: argparse.Namespace, overrides: dict[str, Any]) -> int:
    from pathlib import Path

    import msgspec

    from onbeat.control import ask_status
    from onbeat.run_dir import check_is_run, held_by
    from onbeat.status import describe
    from onbeat.watch import status_at_rest

    run_dir = Path(arguments.directory)
    check_is_run(run_dir)
    status = ask_status(run_dir)
    if status is None and (holder := held_by(run_dir)) is not None:
        raise ConfigError(
            f"the run in {arguments.directory!r} is going on (process {holder}), but gives no answer: it belongs to "
            "somebody else, or is about to begin or to end"
        )
    status = status or status_at_rest(run_dir)
    print(msgspec.json.encode(status).decode() if arguments.json else "\n".join(describe(status)))
    return 0


def _scale(arguments: argparse.Namespace, overrides: dict[str, Any]) -> int:
    from pathlib import Path

    from onbeat.control import ask_to_scale

    run_dir, what = arguments.directory, arguments.what
    name, _, count = what.partition("=")
    if name not in ("generators", "trainer") or not count.isdecimal():
        raise ConfigError(f"`onbeat scale` takes generators=N or trainer=N, and got {what!r}")
    if not Path(run_dir).is_dir() or (answer := ask_to_scale(Path(run_dir), name, int(count))) is None:
        raise ConfigError(f"no run is going on in {run_dir!r}")
    if not answer.done:
        raise ConfigError(answer.sentence)
    _say(answer.sentence)
    return 0


def _worker(arguments: argparse.Namespace, overrides: dict[str, Any]) -> int:
    from onbeat.own_loop import prepare_environment
    from onbeat.rollout.joiner import serve_run

    prepare_environment()  # before torch is imported
    serve_run(arguments.join, arguments.token_file, _say, arguments.vllm_environment)
    return 0


def _export(arguments: argparse.Namespace, overrides: dict[str, Any]) -> int:
    from pathlib import Path

    from onbeat.export import export_checkpoint

    exported = export_checkpoint(Path(arguments.directory), Path(arguments.model), arguments.version)
    _say(f"model: {arguments.model}, of version {exported}")
    return 0


def _say(line: str) -> None:
    try:
        print(line, flush=True)
    except BrokenPipeError:  # nobody reads it any more (`| head`): the run goes on, and writes everything down
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _warn(sentence: str) -> None:
    print(f"onbeat: {sentence}", file=sys.stderr, flush=True)


def _eval(arguments: argparse.Namespace, overrides: dict[str, Any]) -> int:
    import tempfile

    from onbeat.evaluate import evaluate
    from onbeat.recipe import load

    with tempfile.TemporaryDirectory(prefix="onbeat-eval-") as folder:
        own = {"model.path": arguments.model, "run.dir": folder}
        record = asyncio.run(evaluate(load(arguments.recipes, overrides | own), warn=_warn))
    _say("  ".join(f"{name} {value}" for name, value in record.items()))
    return 0


def _sample(arguments: argparse.Namespace, overrides: dict[str, Any]) -> int:
    from onbeat.own_loop import prepare_environment

    values: dict[str, Any] = {"sampling.temperature": 0.7, "sampling.max_new_tokens": 256, "seed": 0}
    least = {"sampling.max_new_tokens": 1}
    for key, value in overrides.items():
        if key not in values:
            raise ConfigError(f"`onbeat sample` knows --{', --'.join(sorted(values))}, and got --{key}")
        kinds = (int, float) if isinstance(values[key], float) else (int,)
        if type(value) not in kinds or not value >= least.get(key, 0):
            kind = "a number" if float in kinds else "a whole number"
            raise ConfigError(f"--{key} {value}: give {kind}, {least.get(key, 0)} or more")
        values[key] = value
    prepare_environment()  # before torch is imported
    from onbeat.sample import Sampler

    sampler = Sampler(
        arguments.model,
        temperature=values["sampling.temperature"],
        max_new_tokens=values["sampling.max_new_tokens"],
        seed=values["seed"],
    )
    for prompt in arguments.prompts:
        _say(sampler.complete(prompt))
    if not arguments.prompts:
        sampler.talk(sys.stdin, sys.stdout)
    return 0


def _check(arguments: argparse.Namespace, overrides: dict[str, Any]) -> int:
    from onbeat.own_loop import prepare_environment

    prepare_environment()  # before torch is imported
    from onbeat.check import check_model

    report = check_model(arguments.model, _say)
    for line in report.lines():
        _say(line)
    return 0 if report.agrees else 1


def _config(arguments: argparse.Namespace, overrides: dict[str, Any]) -> int:
    from pydantic_core import PydanticUndefined

    from onbeat.recipe import keys

    for key, field in keys():
        default = "required" if field.default is PydanticUndefined else repr(field.default)
        print(f"{key} ({default})\n    {field.description}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
