"""Rows: what a dataset may hold, and what is said of one that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from onbeat.errors import InputError
from onbeat.prompts.rows import read_rows
from onbeat.prompts.source import hold_out


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def refusal(source: str) -> str:
    with pytest.raises(InputError) as error:
        read_rows(source)
    return str(error.value)


def test_a_jsonl_file_gives_its_rows_in_order_and_blank_lines_are_nothing(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+1=", "answer": "2"},
        {"prompt": [{"role": "user", "content": "naïve „ü“ 日本"}], "id": "x", "level": 3},
    ]
    lines = [json.dumps(rows[0]), "", "  ", json.dumps(rows[1], ensure_ascii=False)]
    assert read_rows(write(tmp_path / "rows.jsonl", "\n".join(lines))) == rows


def test_json_and_csv_files_give_their_rows_in_order(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": 'a "b", c\n日本', "answer": ""}]
    assert read_rows(write(tmp_path / "rows.json", json.dumps(rows))) == rows
    text = '\ufeffprompt,answer\r\n1+1=,2\r\n"a ""b"", c\n日本",\r\n'
    with (tmp_path / "rows.csv").open("w", encoding="utf-8", newline="") as file:
        file.write(text)
    assert read_rows(str(tmp_path / "rows.csv")) == rows


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("one.json", '{"prompt": "x"}', " holds one dict, not a list of rows"),
        ("bad.json", "[{]", " is not JSON: Expecting property name"),
        ("few.csv", "prompt,answer\n1,2\n3\n", ", line 3 has not as many fields as the first line"),
        ("many.csv", "prompt,answer\n1,2,3\n", ", line 2 has not as many fields as the first line"),
        ("open.csv", 'prompt\n"1', ", line 2 is not CSV: unexpected end of data"),
        ("none.csv", "prompt,answer\n", " has no rows"),
    ],
)
def test_a_file_that_is_not_what_it_is_called_is_refused_with_the_line(
    tmp_path: Path, name: str, text: str, complaint: str
) -> None:
    source = write(tmp_path / name, text)
    assert refusal(source).startswith(f"{source}{complaint}")


def test_columns_of_another_layout_are_named_by_a_map_and_keep_their_own_names_too(tmp_path: Path) -> None:
    row = {"question": "1+1=", "reward_model": {"ground_truth": "2"}, "a.b": 3}
    source = write(tmp_path / "rows.jsonl", json.dumps(row))
    columns = {"prompt": "question", "answer": "reward_model.ground_truth", "n": "a.b"}
    assert read_rows(source, columns=columns) == [row | {"prompt": "1+1=", "answer": "2", "n": 3}]
    with pytest.raises(
        InputError, match=r"row 1 has no 'reward_model.truth' \(data.columns\); its columns are \['a.b'"
    ):
        read_rows(source, columns={"prompt": "reward_model.truth"})


@given(
    st.lists(
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(st.characters(exclude_categories=())),
            lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["prompt", "role", "content", "x"]), inner),
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=200, deadline=None)
def test_a_fuzzed_row_is_taken_or_refused_by_its_number(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any]
) -> None:
    source = write(tmp_path_factory.getbasetemp() / "fuzz.jsonl", "\n".join(map(json.dumps, rows)))
    try:
        assert len(read_rows(source)) == len(rows)
    except InputError as error:
        number = int(str(error).removeprefix(f"{source}, row ").split(maxsplit=1)[0].rstrip(":"))
        with pytest.raises(InputError):
            read_rows(write(tmp_path_factory.getbasetemp() / "one.jsonl", json.dumps(rows[number - 1])))


def test_a_row_of_a_directory_is_named_by_its_file(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", '{"prompt": "1"}\n{"prompt": "2"}\n')
    write(tmp_path / "b.jsonl", '{"prompt": "3"}\n{"question": "4"}\n')
    assert refusal(str(tmp_path)).startswith(f"{tmp_path}/b.jsonl, row 2 has no 'prompt'")


def test_json_nested_too_deep_to_read_is_refused_with_its_line(tmp_path: Path) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    source = write(tmp_path / "deep.jsonl", '{"prompt": "1"}\n' + deep)
    assert refusal(source).startswith(f"{source}, line 2 is not JSON: ")
    source = write(tmp_path / "deep.json", deep)
    assert refusal(source).startswith(f"{source} is not JSON: ")


def test_a_function_that_exits_is_an_error_of_its_own(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.py", "import sys\n\ndef rows():\n    sys.exit(3)\n    yield\n")
    assert refusal(f"{file}:rows") == f"{file}:rows failed: SystemExit: 3"


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ([{"role": "user"}], "message 1 of its 'prompt' needs a 'role' and a 'content'"),
        ([{"role": "user", "content": "x"}, {"role": 3, "content": "y"}], "message 2 of its 'prompt' needs"),
        ([{"role": "user", "content": None}], "message 1 of its 'prompt' needs"),
        ("half \ud800", "its 'prompt' holds half of a surrogate pair"),
        ([{"role": "user", "content": "half \udc00"}], "its 'prompt' holds half of a surrogate pair"),
    ],
)
def test_a_prompt_the_tokenizer_could_not_take_is_refused_with_its_row(
    tmp_path: Path, prompt: Any, complaint: str
) -> None:
    source = write(tmp_path / "rows.jsonl", '{"prompt": "1"}\n' + json.dumps({"prompt": prompt}))
    assert refusal(source).startswith(f"{source}, row 2: {complaint}")


def test_a_function_gives_its_rows_in_order(tmp_path: Path) -> None:
    file = write(
        tmp_path / "rows.py",
        """
def generated():
    for n in range(3):
        yield {"prompt": f"{n}", "n": n}

def listed():
    return list(generated())
""",
    )
    expected = [{"prompt": str(n), "n": n} for n in range(3)]
    assert read_rows(f"{file}:generated") == expected
    assert read_rows(f"{file}:listed") == expected


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ([1], "is a list, not an object with a 'prompt'"),
        ("text", "is a str, not an object with a 'prompt'"),
        ({"question": "?", "answer": 1}, "has no 'prompt'; its columns are ['answer', 'question']"),
        ({"prompt": ""}, ": 'prompt' must be text or chat messages, not ''"),
        ({"prompt": []}, ": 'prompt' must be text or chat messages, not '[]'"),
        ({"prompt": None}, ": 'prompt' must be text or chat messages, not 'None'"),
        ({"prompt": ["hi"]}, """: 'prompt' must be text or chat messages, not "['hi']\""""),
        (
            {"prompt": [{"content": "hi"}]},
            """: message 1 of its 'prompt' needs a 'role' and a 'content', and is "{'content': 'hi'}\"""",
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_its_file(tmp_path: Path, row: object, complaint: str) -> None:
    source = write(tmp_path / "rows.jsonl", "\n".join([json.dumps({"prompt": "fine"}), json.dumps(row)]))
    message = refusal(source)
    assert message.startswith(f"{source}, row 2")
    assert message.endswith(complaint)


def test_a_line_that_is_no_json_is_named_with_its_file(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", '{"prompt": "fine"}\n\n{"prompt": oops}')
    assert refusal(source).startswith(f"{source}, line 3 is not JSON: ")


def test_a_row_of_a_function_is_named_too(tmp_path: Path) -> None:
    source = write(tmp_path / "bad_rows.py", "def rows():\n    return [{'prompt': 'fine'}, {'prompt': 'fine'}, {}]")
    assert refusal(f"{source}:rows") == f"{source}:rows, row 3 has no 'prompt'; its columns are []"


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("yield {'prompt': 'fine'}; raise ValueError('no more')", "ValueError: no more"),
        ("return None", "TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_a_function_that_fails_is_named(tmp_path: Path, body: str, complaint: str) -> None:
    source = write(tmp_path / "failing_rows.py", f"def rows():\n    {body}") + ":rows"
    assert refusal(source) == f"{source} failed: {complaint}"


def test_a_source_without_rows_or_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    empty = write(tmp_path / "empty.jsonl", "\n\n")
    assert refusal(empty) == f"{empty} has no rows"
    assert refusal("rows.xml") == (
        "data.path = 'rows.xml' is neither a .jsonl, .json, .csv, .parquet file, nor a directory, nor file.py:function,"
        " nor the name of a Hugging Face dataset (owner/name)"
    )
    assert refusal(str(tmp_path / "no.jsonl")).startswith(f"cannot read {tmp_path / 'no.jsonl'}: ")
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    assert refusal(str(tmp_path / "latin.jsonl")).startswith(f"cannot read {tmp_path / 'latin.jsonl'}: ")


# Other formats


def saved_rows(count: int = 5) -> list[dict[str, Any]]:
    return [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "info": {"level": n}} for n in range(count)]


def test_parquet_files_and_directories_of_files_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    rows = saved_rows()
    parquet.write_table(pa.Table.from_pylist(rows[3:]), tmp_path / "b.parquet", row_group_size=1)
    assert read_rows(str(tmp_path / "b.parquet")) == rows[3:]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    (tmp_path / "README.md").write_text("not data")
    assert read_rows(str(tmp_path)) == rows


def test_a_hugging_face_dataset_on_disk_is_read_by_split(tmp_path: Path) -> None:
    rows = saved_rows()
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "one"))
    splits = {"train": datasets.Dataset.from_list(rows[:3]), "test": datasets.Dataset.from_list(rows[3:])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "both"))
    assert read_rows(str(tmp_path / "one")) == rows
    assert read_rows(str(tmp_path / "both")) == rows[:3]
    assert read_rows(str(tmp_path / "both"), split="test") == rows[3:]
    with pytest.raises(InputError, match=r"has no split 'validation' \(data.split\); it has \['test', 'train'\]"):
        read_rows(str(tmp_path / "both"), split="validation")
    (tmp_path / "one" / "state.json").write_text("{}")
    assert "cannot be read as a dataset saved to disk" in refusal(str(tmp_path / "one"))


@pytest.mark.parametrize("name", ["rows.jsonl", "folder", "one", "rows.py:rows"])
def test_a_source_without_splits_cannot_be_asked_for_one(tmp_path: Path, name: str) -> None:
    """Else `data.eval_split` would evaluate on what is trained on."""
    write(tmp_path / "rows.jsonl", '{"prompt": "1"}')
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "rows.jsonl", '{"prompt": "1"}')
    write(tmp_path / "rows.py", "def rows():\n    return [{'prompt': '1'}]\n")
    datasets.Dataset.from_list(saved_rows()).save_to_disk(str(tmp_path / "one"))
    assert read_rows(str(tmp_path / name))
    with pytest.raises(InputError, match="has no splits, and cannot be asked for 'test'"):
        read_rows(str(tmp_path / name), split="test")


def test_a_dataset_that_is_nowhere_is_refused_with_the_name_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*arguments: Any, **keywords: Any) -> Any:
        raise ConnectionError("the hub cannot be reached\nmore")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(InputError, match=r"'nobody/nothing' is not on this disk, and as a .* ConnectionError: the hub"):
        read_rows("nobody/nothing")


def test_a_file_that_is_not_parquet_and_a_directory_without_data_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"not parquet")
    with pytest.raises(InputError, match=r"rows.parquet is not parquet"):
        read_rows(str(tmp_path / "rows.parquet"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"has no .jsonl, .json, .csv, .parquet file"):
        read_rows(str(tmp_path / "empty"))
    with pytest.raises(InputError, match=r"cannot read .*missing.parquet"):
        read_rows(str(tmp_path / "missing.parquet"))


@given(count=st.integers(2, 50), held=st.integers(0, 60), seed=st.integers(0, 5))
def test_held_out_rows_are_chosen_by_the_seed_and_trained_on_by_nobody(count: int, held: int, seed: int) -> None:
    rows = saved_rows(count)
    if held >= count:
        with pytest.raises(InputError, match=f"data.eval_rows = {held} would leave nothing to train on"):
            hold_out(rows, held, seed)
        return
    train, held_out = hold_out(rows, held, seed)
    assert len(held_out) == held
    assert sorted(train + held_out, key=lambda row: row["info"]["level"]) == rows
    assert (train, held_out) == hold_out(rows, held, seed)
