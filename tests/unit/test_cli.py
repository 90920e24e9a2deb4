"""The command line: what it prints, what it returns, and what it does not import."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from onbeat import compiled
from onbeat.cli import main
from onbeat.recipe import keys, load

RECIPE = """
[model]
path = "a-model"

[data]
path = "package.rows:train"

[reward]
functions = [{ path = "exact_match" }]
"""
HEAVY = ("torch", "transformers", "ray", "vllm")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("recipe.toml").write_text(RECIPE)
    return "recipe.toml"


def imported_after(script: str, *names: str) -> list[str]:
    """Which of the modules a fresh interpreter holds after running the script. `main` of the script may exit."""
    code = (
        f"import sys\ntry:\n    {script}\nexcept SystemExit: pass\n"
        f"print('HELD', *[name for name in {names!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()[1:]


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"]])
def test_help_imports_next_to_nothing(words: list[str]) -> None:
    assert imported_after(f"from onbeat.cli import main; main({words!r})", *HEAVY, "pydantic", "jinja2") == []


def test_the_check_for_imports_sees_what_is_imported() -> None:
    assert imported_after("import onbeat.config", *HEAVY, "pydantic") == ["pydantic"]


def test_the_controllers_side_imports_no_torch() -> None:
    """Whole packages are walked, so that a module that is new is looked at too."""
    script = """
    import importlib, pkgutil
    names = ["onbeat", "onbeat.cli", "onbeat.config", "onbeat.controller", "onbeat.errors", "onbeat.functions",
             "onbeat.keyed", "onbeat.ledger", "onbeat.loader", "onbeat.messages", "onbeat.model_source",
             "onbeat.own_loop", "onbeat.period", "onbeat.protocols", "onbeat.recipe", "onbeat.session",
             "onbeat.types", "onbeat.wire", "onbeat.batch.pack", "onbeat.rollout.client", "onbeat.rollout.pool",
             "onbeat.training.client", "onbeat.weights.memory"]
    for package in ("prompts", "reward", "group", "observe", "cluster"):
        folder = importlib.import_module(f"onbeat.{package}").__path__
        names += [f"onbeat.{package}.{module.name}" for module in pkgutil.iter_modules(folder)]
    assert {"onbeat.prompts.codec", "onbeat.reward.scorer", "onbeat.cluster.local"} <= set(names)
    for name in names: importlib.import_module(name)
    """
    assert imported_after(script.strip(), *HEAVY) == []


def test_a_dry_run_prints_a_recipe_that_gives_the_same_configuration(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", recipe, "--dry-run", "--schedule.mode", "sync", "--run.dir", 'a "b" c', "--seed=7"]
    assert main(words) == 0
    Path("again.toml").write_text(capsys.readouterr().out)
    config = load(["again.toml"])
    assert config == load([recipe], {"schedule.mode": "sync", "run.dir": 'a "b" c', "seed": 7})
    assert not Path(config.run.dir).exists()


def test_a_dry_run_imports_no_torch(recipe: str) -> None:
    assert (
        imported_after(f"from onbeat.cli import main; assert main(['train', {recipe!r}, '--dry-run']) == 0", *HEAVY)
        == []
    )


@pytest.mark.parametrize(
    ("backdrop", "models", "state"),
    [
        ([], "holds policy", "MISSING"),
        (["--algorithm.beta", "0.1"], "holds policy, reference", "MISSING"),
        (["--schedule.updates_per_period", "2"], "holds policy, old policy", "MISSING"),
        (["--model.path", "make.py:model"], "holds policy", "to be made"),
        (["--model.path", "./made"], "holds policy", "found"),
    ],
)
def test_a_dry_run_says_which_models_there_will_be(
    recipe: str, backdrop: list[str], models: str, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("make.py").touch()
    Path("made").mkdir()
    Path("made/config.json").touch()
    assert main(["train", recipe, "--dry-run", *backdrop]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# ")]
    assert any(f" {models};" in line for line in notes)
    assert notes[0].endswith(f"({state})")


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ({"num_attention_heads": 4, "hidden_size": 64}, "attention    compiled"),
        ({"num_attention_heads": 4, "hidden_size": 48}, "SLOWER: the model has heads of 12 numbers, which is no"),
        ({"text_config": {"num_attention_heads": 4, "head_dim": 20}}, "SLOWER: the model has heads of 20 numbers"),
        ({"text_config": "strange"}, "attention    compiled"),
        (["strange"], "attention    compiled"),
    ],
)
def test_a_dry_run_says_how_attention_will_be_computed(
    recipe: str, described: object, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("made").mkdir()
    Path("made/config.json").write_text(json.dumps(described))
    assert main(["train", recipe, "--dry-run", "--model.path", "./made"]) == 0
    assert said in capsys.readouterr().out


def test_a_dry_run_says_why_nothing_is_compiled(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "compiled_kernels", lambda: None)
    assert main(["train", recipe, "--dry-run"]) == 0
    assert "by torch's operations, SLOWER: no compiler was there" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--generator.threads", "3"], "generators   1 processes; each 3 threads, as the recipe says"),
        (["--generator.threads", "0"], "generators   1 processes; each "),
        (["--trainer.threads", "0", "--trainer.ranks", "64"], "1 threads each, its share of the cores"),
        (["--trainer.threads", "0"], f"{len(os.sched_getaffinity(0))} threads: all cores, and its share of them"),
        (["--generator.max_sequences", "16", "--schedule.prompts_per_period", "9"], "take about 5 turns"),
        (["--generator.max_sequences", "64", "--schedule.prompts_per_period", "8"], "overlap      LITTLE"),
    ],
)
def test_a_dry_run_says_how_cores_and_groups_are_used_and_why(
    recipe: str, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe, "--dry-run", *flags]) == 0
    assert said in capsys.readouterr().out


def test_a_dry_run_does_not_call_the_overlap_little_where_groups_take_turns(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--generator.max_sequences", "32", "--schedule.prompts_per_period", "8", "--algorithm.group_size", "8"]
    assert main(["train", recipe, "--dry-run", *flags]) == 0
    assert "LITTLE" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cache_gib", "said"),
    [
        (0.1, "at once      8 groups of 8 in each generator (generator.max_sequences)"),
        (
            0.005,
            "at once      4 groups of 8 in each generator (generator.cache_gib: so many of 100 tokens and 8 x 16 more",
        ),
        (0.001, "at once      NONE of the longest groups there may be, 100 tokens and 8 x 16 more"),
    ],
)
def test_a_dry_run_says_how_many_groups_the_cache_holds(
    recipe: str, cache_gib: float, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys and values of a token take 5 KiB here, of a group up to 228 tokens."""
    Path("model").mkdir()
    sizes = {"num_hidden_layers": 10, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
    Path("model/config.json").write_text(json.dumps(sizes))
    flags = {
        "model.path": "./model", "algorithm.group_size": 8, "generator.max_sequences": 64,
        "generator.cache_gib": cache_gib, "data.max_prompt_tokens": 100, "sampling.max_new_tokens": 16,
    }  # fmt: skip
    assert main(["train", recipe, "--dry-run", *(f"--{key}={value}" for key, value in flags.items())]) == 0
    assert said in capsys.readouterr().out


def test_config_lists_every_key_with_its_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    out = capsys.readouterr().out
    listed = re.findall(r"^(\S+) \((.+)\)\n    (.+)$", out, flags=re.MULTILINE)
    assert [key for key, _, _ in listed] == [key for key, _ in keys()]
    assert ("schedule.mode", "'periodic'") in [(key, default) for key, default, _ in listed]
    assert ("model.path", "required") in [(key, default) for key, default, _ in listed]
    assert all(meaning != "None" for _, _, meaning in listed)


@pytest.mark.parametrize(
    "words",
    [
        ["recipe.toml", "--schedule.mode", "sync", "--seed", "3"],
        ["--schedule.mode", "sync", "--seed", "3", "recipe.toml"],
        ["--schedule.mode", "sync", "recipe.toml", "--seed=3"],
        ["recipe.toml", "--seed=3", "more.toml"],
        ["recipe.toml", "--dry-run", "more.toml", "--seed=3"],
    ],
)
def test_flags_and_recipes_may_stand_in_any_order(
    recipe: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("more.toml").write_text('schedule.mode = "sync"')
    assert main(["train", "--dry-run", *words]) == 0
    Path("out.toml").write_text(capsys.readouterr().out)
    assert load(["out.toml"]) == load([recipe], {"schedule.mode": "sync", "seed": 3})


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        (["--run.dir=a b=c"], "run.dir", "a b=c"),
        (["--reward.accuracy_threshold", "-1"], "reward.accuracy_threshold", -1.0),
        (["--trainer.betas", "[0.5, 0.25]"], "trainer.betas", (0.5, 0.25)),
        (["--seed", "1", "--seed", "2"], "seed", 2),
    ],
)
def test_a_flag_takes_what_follows_as_its_value(
    recipe: str, flags: list[str], key: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe, *flags, "--dry-run"]) == 0
    Path("out.toml").write_text(capsys.readouterr().out)
    assert load(["out.toml"]) == load([recipe], {key: value})


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train", "recipe.toml", "--run.dri", "x"], "there is no key 'run.dri': did you mean 'run.dir'?"),
        (["train", "recipe.toml", "--sed=3"], "there is no key 'sed': did you mean 'seed'?"),
        (["train", "recipe.toml", "--zzz"], "there is no key 'zzz'; `onbeat config` lists them all"),
        (["train", "--zzz", "recipe.toml"], "there is no key 'zzz'; `onbeat config` lists them all"),
        (["train", "no.toml"], "cannot read the recipe no.toml: No such file or directory"),
        (["train", "recipe.toml", "--seed"], "--seed needs a value"),
        (["train", "recipe.toml", "--seed", "--dry-run"], "--seed needs a value"),
        (["train", "recipe.toml", "--run.dir", "--seed", "3"], "--run.dir needs a value"),
        (["train", "recipe.toml", "stray"], "cannot read the recipe stray: No such file or directory"),
        (["train", "recipe.toml", "seed=3"],
         "cannot read the recipe seed=3: No such file or directory; to set a key, write --seed 3"),
        (["train", "recipe.toml", "--seed", "3", "stray"], "cannot read the recipe stray: No such file or directory"),
        (["train", "recipe.toml", "-x"], "`onbeat train` takes recipes and --section.key VALUE, and got -x"),
        (["worker", "--join", "run", "--seed", "3"],
         "`onbeat worker` takes --join and perhaps --token-file, --vllm-environment, and got --seed 3"),
        (["worker", "--vllm-environment", "/opt/vllm", "--join", "nowhere"],
         "--join nowhere: not the directory of a run; to join one on another machine, give HOST:PORT and --token-file"),
        (["sample", "model", "--sampling.temperature", "-1"], "--sampling.temperature -1: give a number, 0 or more"),
        (["sample", "model", "--sampling.temperature=nan"], "--sampling.temperature nan: give a number, 0 or more"),
        (["sample", "model", "--sampling.max_new_tokens", "ten"],
         "--sampling.max_new_tokens ten: give a whole number, 1 or more"),
        (["sample", "model", "--seed", "true"], "--seed True: give a whole number, 0 or more"),
        (["sample", "model", "--run.dir", "x"],
         "`onbeat sample` knows --sampling.max_new_tokens, --sampling.temperature, --seed, and got --run.dir"),
        (["train", "recipe.toml", "--seed=-1"], "recipe.toml: seed = -1: input should be greater than or equal to 0"),
        (["config", "seed"], "`onbeat config` takes no arguments, and got seed"),
        (["config", "--seed", "3"], "`onbeat config` takes no arguments, and got --seed 3"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_one_line_and_exit_code_2(
    recipe: str, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err == f"onbeat: {sentence}\n"
    assert captured.out == ""


@pytest.mark.parametrize("words", [[], ["train"], ["trian", "recipe.toml"], ["train", "--dry-run"]])
def test_a_command_line_without_command_or_recipe_is_answered_with_the_usage(
    recipe: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2
    assert capsys.readouterr().err.startswith("usage: onbeat")


def test_a_model_that_cannot_be_found_is_an_input_error(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", recipe, "--dry-run", "--model.path", "no.py:make"]) == 3
    assert capsys.readouterr().err == f"onbeat: model.path: there is no file {Path.cwd() / 'no.py'}\n"


def test_the_process_exits_with_the_code_and_no_traceback(recipe: str) -> None:
    done = subprocess.run([sys.executable, "-m", "onbeat.cli", "train", "no.toml"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "onbeat: cannot read the recipe no.toml: No such file or directory\n"
