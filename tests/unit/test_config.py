"""The recipe: how files and flags compose, where paths point, and the sentence for everything that is wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from onbeat.errors import ConfigError
from onbeat.recipe import from_tree, keys, load, parse_flag, to_toml

RECIPE = """
[model]
path = "a-model"

[data]
path = "package.rows:train"

[reward]
functions = [{ path = "exact_match" }]
"""
KEYS = [key for key, _ in keys()]
SECTIONS = sorted({key.partition(".")[0] for key in KEYS if "." in key})


def write(directory: Path, text: str, name: str = "recipe.toml") -> Path:
    file = directory / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write(tmp_path, RECIPE)


def refusal(recipes: list[Path], overrides: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        load(recipes, overrides)
    return str(error.value)


# Composition


def test_a_later_file_wins_key_by_key(recipe: Path, tmp_path: Path) -> None:
    first = write(tmp_path, "seed = 1\n[schedule]\nmode = 'sync'\nperiods = 7", "first.toml")
    second = write(tmp_path, "seed = 2\n[schedule]\nperiods = 9", "second.toml")
    config = load([recipe, first, second])
    assert (config.seed, config.schedule.mode, config.schedule.periods) == (2, "sync", 9)
    config = load([second, first, recipe])
    assert (config.seed, config.schedule.mode, config.schedule.periods) == (1, "sync", 7)


def test_a_later_list_of_rewards_replaces_the_earlier_as_a_whole(recipe: Path, tmp_path: Path) -> None:
    later = write(
        tmp_path, '[reward]\nfunctions = [{ path = "format" }, { path = "a.b:c", weight = 2.0 }]', "later.toml"
    )
    functions = load([recipe, later]).reward.functions
    assert [(function.path, function.weight) for function in functions] == [("format", 1.0), ("a.b:c", 2.0)]


def test_a_flag_wins_over_every_file(recipe: Path, tmp_path: Path) -> None:
    later = write(tmp_path, "seed = 1\n[schedule]\nmode = 'sync'\nperiods = 7", "later.toml")
    config = load([recipe, later], {"schedule.mode": "periodic", "seed": 5})
    assert (config.seed, config.schedule.mode, config.schedule.periods) == (5, "periodic", 7)


def test_flags_alone_make_a_configuration() -> None:
    config = load([], {"model.path": "m", "data.path": "a.b:c", "reward.functions": [{"path": "format"}]})
    assert (config.model.path, config.data.path, config.reward.functions[0].path) == ("m", "a.b:c", "format")


def test_the_configuration_cannot_be_changed(recipe: Path) -> None:
    config = load([recipe])
    with pytest.raises(ValidationError):
        config.seed = 1  # type: ignore[misc]
    with pytest.raises(ValidationError):
        config.schedule.mode = "sync"  # type: ignore[misc]
    with pytest.raises(ValidationError):
        config.reward.functions[0].weight = 2.0  # type: ignore[misc]


# Paths


def test_paths_in_a_file_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes/model").mkdir(parents=True)
    text = """
    [model]
    path = "model"
    [data]
    path = "rows.py:train"
    eval_path = "../held_out.jsonl"
    [reward]
    functions = [{ path = "rewards.py:correct" }, { path = "./sub/more.py:short" }]
    """
    file = write(tmp_path, text, "recipes/recipe.toml")
    monkeypatch.chdir(tmp_path)
    for name in (file, Path("recipes/recipe.toml")):
        config = load([name])
        assert config.model.path == str(tmp_path / "recipes/model")
        assert config.data.path == str(tmp_path / "recipes/rows.py") + ":train"
        assert config.data.eval_path == str(tmp_path / "held_out.jsonl")
        assert [function.path for function in config.reward.functions] == [
            str(tmp_path / "recipes/rewards.py") + ":correct",
            str(tmp_path / "recipes/sub/more.py") + ":short",
        ]


def test_paths_in_a_flag_are_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, RECIPE, "recipes/recipe.toml")
    monkeypatch.chdir(tmp_path)
    config = load(
        [file],
        {
            "model.path": "./model",
            "data.path": "rows.jsonl",
            "data.eval_path": "rows.py:held_out",
            "reward.functions": [{"path": "rewards.py:correct"}],
        },
    )
    assert config.model.path == str(tmp_path / "model")
    assert config.data.path == str(tmp_path / "rows.jsonl")
    assert config.data.eval_path == str(tmp_path / "rows.py") + ":held_out"
    assert config.reward.functions[0].path == str(tmp_path / "rewards.py") + ":correct"


def test_the_home_directory_is_known_and_an_unknown_one_is_left_to_fail_later(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert load([recipe], {"model.path": "~/model"}).model.path == str(tmp_path / "home/model")
    assert load([recipe], {"model.path": "~nobody-of-this-name/model"}).model.path.endswith("/model")


@pytest.mark.parametrize("name", ["package.module:function", "organisation/model", "numeric_answer", "a" * 5000])
def test_names_that_are_no_paths_stay_as_they_are(recipe: Path, name: str) -> None:
    config = load([recipe], {"model.path": name, "reward.functions": [{"path": name}]})
    assert (config.model.path, config.reward.functions[0].path) == (name, name)


def test_the_run_directory_stays_as_written(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    file = write(tmp_path, RECIPE + '[run]\ndir = "runs"')
    assert load([file]).run.dir == "runs"
    assert load([file], {"run.dir": "./other.jsonl"}).run.dir == "./other.jsonl"


# Refusals


def misspelt(name: str) -> Iterator[str]:
    """A letter dropped, doubled, or swapped with the next."""
    for i in range(len(name)):
        yield name[:i] + name[i + 1 :]
        yield name[: i + 1] + name[i:]
        yield name[:i] + name[i + 1 : i + 2] + name[i] + name[i + 2 :]


def as_toml(key: str) -> str:
    """A file that sets the key to 1; the items of reward.functions are tables in a list."""
    *sections, name = key.split(".")
    if sections == ["reward", "functions"]:
        return f"[reward]\nfunctions = [{{ {name} = 1 }}]"
    return (f"[{'.'.join(sections)}]\n" if sections else "") + f"{name} = 1"


@pytest.mark.parametrize("key", KEYS)
def test_a_misspelt_key_is_answered_with_the_right_one(key: str, tmp_path: Path) -> None:
    section, dot, name = key.rpartition(".")
    for wrong_name in misspelt(name):
        wrong = section + dot + wrong_name
        if wrong_name and wrong not in KEYS:
            file = write(tmp_path, as_toml(wrong))
            assert refusal([file]) == f"{file}: there is no key {wrong!r}: did you mean {key!r}?"
            assert refusal([], {wrong: 1}) == f"there is no key {wrong!r}: did you mean {key!r}?"


@pytest.mark.parametrize("section", SECTIONS)
def test_a_misspelt_section_is_answered_with_the_right_one(section: str, tmp_path: Path) -> None:
    for wrong in misspelt(section):
        if wrong != section:
            file = write(tmp_path, f"[{wrong}]\nx = 1")
            assert refusal([file]) == f"{file}: there is no key {wrong!r}: did you mean {section!r}?"


def test_a_misspelt_key_within_a_flag_is_found_too() -> None:
    message = refusal([], {"reward.functions": [{"pth": "exact_match"}]})
    assert message.endswith("there is no key 'reward.functions.pth': did you mean 'reward.functions.path'?")


def test_a_key_in_the_wrong_section_is_answered_with_its_place() -> None:
    assert refusal([], {"learning_rate": 1}).endswith("did you mean 'trainer.learning_rate'?")


def test_a_key_like_no_other_is_answered_with_the_way_to_the_list() -> None:
    assert refusal([], {"zzz": 1}) == "there is no key 'zzz'; `onbeat config` lists them all"


@pytest.mark.parametrize("key", ["sampling.top_p", "sampling.top_k", "sampling.min_p"])
def test_a_distribution_cut_short_is_refused_with_the_reason(key: str) -> None:
    assert refusal([], {key: 1}).startswith(f"there is no key {key!r}, for what is trained is what is sampled from")


def test_a_section_is_no_value(recipe: Path, tmp_path: Path) -> None:
    file = write(tmp_path, "schedule = 3", "odd.toml")
    sentence = f"{file}: 'schedule' is a section with keys of its own, not 3"
    assert refusal([recipe, file]) == sentence
    assert refusal([file, recipe], {"schedule.mode": "sync"}) == sentence
    assert refusal([recipe], {"model": "a-model"}) == "there is no key 'model': did you mean 'model.path'?"


def test_a_flag_cannot_reach_into_the_list_of_rewards(recipe: Path) -> None:
    assert refusal([recipe], {"reward.functions.path": "format"}) == (
        "'reward.functions.path' is part of 'reward.functions': set that as a whole, with --reward.functions"
    )


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("seed", "many", "seed = 'many': input should be a valid integer"),
        ("seed", -1, "seed = -1: input should be greater than or equal to 0"),
        ("schedule.mode", "asynk", "schedule.mode = 'asynk': input should be 'periodic' or 'sync'"),
        ("schedule.periods", 1.5, "schedule.periods = 1.5: input should be a valid integer"),
        ("algorithm.group_size", 1, "algorithm.group_size = 1: input should be greater than or equal to 2"),
        ("algorithm.scale_advantages", 3, "algorithm.scale_advantages = 3: input should be a valid boolean"),
        ("sampling.temperature", 0, "sampling.temperature = 0: input should be greater than 0"),
        ("trainer.betas", [0.9], "trainer.betas.1"),
        ("trainer.betas", 0.9, "trainer.betas = 0.9: input should be a valid array"),
        ("trainer.tensor_parallel", 2, "trainer.tensor_parallel = 2 does not divide trainer.ranks = 1"),
        ("run.dir", 3, "run.dir = 3: input should be a valid string"),
        ("model.path", ["a"], "model.path = ['a']: input should be a valid string"),
        ("reward.functions", [], "reward.functions = []: tuple should have at least 1 item"),
        ("reward.functions", "format", "reward.functions = 'format': input should be a valid array"),
        ("reward.functions", [{"weight": 1}], "the key 'reward.functions.0.path' is missing"),
        ("schedule.updates_per_period", 9, "updates_per_period = 9 exceeds prompts_per_period = 8"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_key_and_value(
    recipe: Path, key: str, value: object, complaint: str
) -> None:
    assert complaint in refusal([recipe], {key: value})


def test_a_wrong_value_in_a_file_is_refused_with_the_files(recipe: Path, tmp_path: Path) -> None:
    file = write(tmp_path, "[schedule]\nperiods = 0", "zero.toml")
    assert refusal([recipe, file]) == (
        f"{recipe}, {file}: schedule.periods = 0: input should be greater than or equal to 1"
    )


@pytest.mark.parametrize("missing", ["model", "data", "reward"])
def test_a_required_section_that_is_missing_is_named(tmp_path: Path, missing: str) -> None:
    parts = [part for part in RECIPE.split("\n\n") if f"[{missing}]" not in part]
    file = write(tmp_path, "\n".join(parts))
    assert refusal([file]) == f"{file}: the key {missing!r} is missing"


def test_every_problem_gets_a_sentence(tmp_path: Path) -> None:
    file = write(tmp_path, "[model]\n[data]\n[reward]\n[schedule]\nperiods = 0")
    assert refusal([file]).splitlines() == [
        f"{file}: the key 'model.path' is missing",
        f"{file}: schedule.periods = 0: input should be greater than or equal to 1",
        f"{file}: the key 'data.path' is missing",
        f"{file}: the key 'reward.functions' is missing",
    ]


def test_a_file_that_is_no_toml_is_named_with_the_line(recipe: Path, tmp_path: Path) -> None:
    file = write(tmp_path, "seed = 1\nseed ==", "broken.toml")
    message = refusal([recipe, file])
    assert message.startswith(f"{file} is not TOML: ")
    assert "line 2" in message


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "binary.toml"
    file.write_bytes(b'run.dir = "\xff"')
    assert refusal([file]).startswith(f"{file} is not TOML: ")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert (
        refusal([tmp_path / "no.toml"]) == f"cannot read the recipe {tmp_path / 'no.toml'}: No such file or directory"
    )
    assert refusal([tmp_path]) == f"cannot read the recipe {tmp_path}: Is a directory"


def test_a_wrong_recipe_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    file = write(tmp_path, RECIPE + "[schedule]\nperiods = 0")
    script = (
        "import sys; from onbeat.cli import main; code = main(['train', sys.argv[1]]);"
        "print(code, sorted({'torch', 'transformers', 'ray', 'vllm'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout == "2 []\n"


# Flags


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("seed", "3", 3),
        ("trainer.learning_rate", "1e-5", 1e-5),
        ("data.shuffle", "false", False),
        ("trainer.betas", "[0.9, 0.99]", [0.9, 0.99]),
        ("reward.functions", '[{ path = "format", weight = 0.5 }]', [{"path": "format", "weight": 0.5}]),
        ("schedule.mode", "sync", "sync"),
        ("schedule.mode", "'sync'", "sync"),
        ("run.dir", "runs/a b", "runs/a b"),
        ("run.dir", "2024-01-31", "2024-01-31"),
        ("run.dir", "7", "7"),
        ("run.dir", "", ""),
        ("data.eval_path", "1.5", "1.5"),
    ],
)
def test_a_flag_is_toml_or_else_text(key: str, text: str, value: object) -> None:
    assert parse_flag(key, text) == value


# The way back

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
FUNCTION = TEXT.map("package.module:".__add__)
SHARE = st.floats(0.0, 1.0)
POSITIVE = st.floats(min_value=0.0, exclude_min=True, allow_infinity=False)
COUNT = st.integers(1, 10**12)


def section(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=values)


FUNCTIONS = st.lists(
    st.fixed_dictionaries({"path": FUNCTION}, optional={"weight": st.floats(allow_nan=False, allow_infinity=False)}),
    min_size=1,
    max_size=3,
)
TREES = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries({"path": FUNCTION}),
        "data": st.fixed_dictionaries(
            {"path": FUNCTION}, optional={"eval_path": st.none() | FUNCTION, "shuffle": st.booleans()}
        ),
        "reward": st.fixed_dictionaries({"functions": FUNCTIONS}, optional={"timeout_s": POSITIVE, "workers": COUNT}),
    },
    optional={
        "seed": st.integers(0, 2**63 - 1),
        "run": section(dir=TEXT),
        "schedule": section(
            mode=st.sampled_from(["periodic", "sync"]),
            order=st.sampled_from(["dispatch", "completion"]),
            periods=COUNT,
            prompts_per_period=COUNT,
        ),
        "algorithm": section(beta=POSITIVE, clip_low=SHARE, scale_advantages=st.booleans()),
        "trainer": section(learning_rate=POSITIVE, betas=st.tuples(SHARE, SHARE), threads=st.integers(0, 512)),
    },
)


ODD = "\x00\x1f\x7f\x85\u2028\U0001f600 \"'\\ \t\r\n #"


@settings(deadline=None)
@given(tree=TREES)
@example(
    tree={"run": {"dir": ODD}, "model": {"path": "m:" + ODD}, "data": {"path": "d:" + ODD}}
    | {"reward": {"functions": [{"path": "r:" + ODD, "weight": 1e300}]}}
)
def test_the_written_configuration_gives_itself_again(
    tree: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = from_tree(tree)
    file = write(tmp_path_factory.getbasetemp(), to_toml(config), "again.toml")
    assert load([file]) == config


def test_resolved_paths_stay_when_the_configuration_is_written_elsewhere(tmp_path: Path) -> None:
    text = RECIPE.replace("package.rows:train", "rows.py:train").replace("exact_match", "../rewards.py:correct")
    config = load([write(tmp_path, text, "recipes/recipe.toml")])
    assert load([write(tmp_path, to_toml(config), "runs/latest/config.toml")]) == config
