"""`file.py:function` and `package.module:function`: the function, or a sentence that says why not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onbeat.errors import InputError
from onbeat.functions import load_function


@pytest.fixture(autouse=True)
def modules_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The files of a test and the folders it makes importable are forgotten after it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text("THRESHOLD = 3\n\ndef correct(x):\n    return x + THRESHOLD\n\ndef _private():\n    pass\n")
    return path


def refusal(path: str) -> str:
    with pytest.raises(InputError) as error:
        load_function(path, "reward.functions.path")
    return str(error.value)


def test_a_function_of_a_file_is_found(file: Path) -> None:
    assert load_function(f"{file}:correct", "key")(4) == 7


def test_a_function_of_a_module_is_found() -> None:
    assert load_function("json:dumps", "key") is json.dumps
    assert load_function("os.path:join", "key")("a", "b") == "a/b"


def test_a_file_is_run_once_however_it_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    function = load_function(f"{file}:correct", "key")
    assert load_function(f"{file}:correct", "key") is function
    assert load_function("rewards.py:correct", "key") is function


def test_files_of_one_name_in_two_folders_are_two_modules(file: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = tmp_path / "other/rewards.py"
    other.write_text("def correct(x):\n    return -x\n")
    assert load_function(f"{file}:correct", "key")(4) == 7
    assert load_function(f"{other}:correct", "key")(4) == -4


def test_a_file_may_import_a_helper_beside_it_and_hold_dataclasses(tmp_path: Path) -> None:
    (tmp_path / "helper_of_the_test.py").write_text("VALUE = 5\n")
    (tmp_path / "main.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from helper_of_the_test import VALUE\n"
        "@dataclass\nclass Row:\n    value: int\n"
        "def make():\n    return Row(VALUE).value\n"
    )
    assert load_function(f"{tmp_path / 'main.py'}:make", "key")() == 5


@pytest.mark.parametrize("path", ["correct", "rewards.py", ":correct", "rewards.py:", ""])
def test_what_is_not_of_the_form_is_refused_with_the_form(path: str) -> None:
    assert refusal(path) == (
        f"reward.functions.path = {path!r} is not of the form file.py:function or package.module:function"
    )


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = f"{tmp_path}/no.py:f"
    assert refusal(path) == (
        f"reward.functions.path = {path!r} cannot be loaded: there is no file {tmp_path}/no.py. "
        "Correct the path in the recipe."
    )


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("corect", "has no function 'corect'; did you mean 'correct'? It has correct."),
        ("private", "has no function 'private'. It has correct."),
        ("THRESHOLD", "is a int (3). Name a function."),
    ],
)
def test_a_function_that_is_not_there_is_answered_with_what_is(file: Path, name: str, complaint: str) -> None:
    path = f"{file}:{name}"
    assert refusal(path).startswith(f"reward.functions.path = {path!r} cannot be loaded: ")
    assert refusal(path).endswith(complaint)


def test_a_function_that_a_module_does_not_have_is_answered_with_the_closest() -> None:
    assert "json has no function 'dump_s'; did you mean 'dumps'?" in refusal("json:dump_s")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("def f(:\n", "SyntaxError: "),
        ("1 / 0\n", "ZeroDivisionError: division by zero (line 1 of broken.py)"),
        ("import no_such_module_at_all\n", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("import sys\nsys.exit(4)\n", "SystemExit: 4"),
    ],
)
def test_a_file_that_cannot_be_imported_is_told_with_the_reason_and_may_be_mended(
    tmp_path: Path, text: str, complaint: str
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)
    assert f"cannot be loaded: importing {file} raised {complaint}" in refusal(f"{file}:f")
    file.write_text("def f():\n    return 'mended'\n")
    assert load_function(f"{file}:f", "key")() == "mended"


def test_a_module_that_does_not_exist_is_told_with_the_way_out() -> None:
    assert "there is no module no. Install it, or name a file instead" in refusal("no.such.module:f")
