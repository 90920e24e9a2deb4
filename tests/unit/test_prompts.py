"""From rows to prompts: what a dataset may hold, that our tokens are those of transformers, the order of training."""

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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from onbeat.errors import InputError
from onbeat.prompts.codec import Codec
from onbeat.prompts.rows import read_rows
from onbeat.prompts.source import PromptCursor, encode_rows, hold_out
from onbeat.types import Prompt

# Rows


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
            st.none() | st.booleans() | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["prompt", "role", "content", "x"]), inner),
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=200)
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
        ({"prompt": [{"content": "hi"}]}, """: 'prompt' must be text or chat messages, not "[{'content': 'hi'}]\""""),
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


# Tokens, as transformers has them

TEMPLATE = """
{%- if tools is not none or documents is not none %}{{ raise_exception("tools?") }}{% endif %}
{%- for message in messages %}
    {%- if message.role == "comment" %}{% continue %}{% endif %}
    {%- if message.role == "forbidden" %}{{ raise_exception("no such role") }}{% endif %}
    {{- "<|start|>" + message.role + "\\n" }}
    {%- if message.role == "assistant" %}
        {%- generation %}{{ message.content }}{% endgeneration %}
    {%- elif message.content is string %}
        {{- message.content }}
    {%- else %}
        {{- message.content | tojson(ensure_ascii=True, indent=2) }}{{ message.content | tojson }}
    {%- endif %}
    {{- eos_token }}
{% endfor %}
    {% if add_generation_prompt %}
<|start|>assistant ({{ strftime_now("%Y") }})
{% endif %}
"""
SPECIAL = ["<s>", "<|start|>", "<|end|>", "<pad>"]
CHATS = [
    [{"role": "user", "content": "What is 17 + 25?"}],
    [{"role": "system", "content": "Be brief. <b>&amp;</b>"}, {"role": "user", "content": " 'naïve' 日本 \n "}],
    [
        {"role": "user", "content": "hi"},
        {"role": "comment", "content": "left out"},
        {"role": "assistant", "content": "hello <|end|>"},
        {"role": "user", "content": [{"type": "text", "text": '<é> & "quotes"'}]},
    ],
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer that puts <s> in front, and truncates and pads unless told not to."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the user asks what the assistant answers: hello, what is 17 + 25?"] * 9, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(pad_id=3, pad_token="<pad>", length=5)
    directory = tmp_path_factory.mktemp("model")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|end|>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def theirs(model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def codec(model_dir: Path) -> Codec:
    return Codec(model_dir)


TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.lists(
    st.sampled_from([*SPECIAL, "hello", " the", "what ", " .", "n't", "\n", "日本"])
).map("".join)


@settings(deadline=None)
@given(text=TEXTS)
def test_text_has_the_ids_and_ids_the_text_of_transformers(text: str, codec: Codec, theirs: Any) -> None:
    ids = codec.encode(text)
    assert list(ids) == theirs(text, truncation=False, padding=False)["input_ids"]
    assert ids[0] == 0
    assert codec.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 299)))
def test_any_ids_have_the_text_of_transformers(ids: list[int], codec: Codec, theirs: Any) -> None:
    assert codec.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_a_completion_is_decoded_without_its_special_tokens(codec: Codec) -> None:
    assert codec.decode([*codec.encode("hello  the\n"), *codec.stop_token_ids]) == "hello  the\n"


@pytest.mark.parametrize("chat", CHATS)
def test_a_chat_has_the_text_and_the_ids_of_transformers(chat: Any, codec: Codec, theirs: Any) -> None:
    rendered = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert codec.render(chat) == rendered
    assert list(codec.encode(chat)) == theirs.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert codec.encode(chat)[0] == SPECIAL.index("<|start|>")


@pytest.mark.parametrize(
    "chat",
    [
        [{"role": "forbidden", "content": "x"}],
        [{"role": None, "content": "x"}],
        [{"role": "user"}],
    ],
)
def test_a_chat_the_template_refuses_is_told_with_model_and_chat(chat: Any, codec: Codec, model_dir: Path) -> None:
    with pytest.raises(InputError) as error:
        codec.encode(chat)
    assert str(error.value).startswith(f"the chat template of {model_dir} refuses {str(chat)!r}: ")


def with_config(model_dir: Path, directory: Path, **config: Any) -> Codec:
    """The same tokenizer with another tokenizer_config.json and no template file."""
    (directory / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return Codec(directory)


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        [
            {"name": "tool_use", "template": "wrong"},
            {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"},
        ],
    ],
)
def test_the_template_may_stand_in_the_tokenizers_configuration(template: Any, model_dir: Path, tmp_path: Path) -> None:
    codec = with_config(
        model_dir, tmp_path, chat_template=template, bos_token="<s>", eos_token={"content": "<|end|>", "lstrip": False}
    )
    assert codec.render([{"role": "user", "content": "hi"}]) == "<s>hi<|end|>"


def test_chats_need_a_template_and_text_does_not(model_dir: Path, tmp_path: Path) -> None:
    codec = with_config(model_dir, tmp_path)
    assert codec.encode("hello")
    with pytest.raises(InputError, match="has no chat template"):
        codec.encode([{"role": "user", "content": "hi"}])


def test_a_template_cannot_change_what_it_is_given(model_dir: Path, tmp_path: Path) -> None:
    codec = with_config(model_dir, tmp_path, chat_template="{{ messages.clear() }}")
    with pytest.raises(InputError, match="refuses"):
        codec.encode([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("files", "stop_token_ids"),
    [
        ({"generation_config.json": {"eos_token_id": [5, 6]}, "config.json": {"eos_token_id": 7}}, (5, 6)),
        ({"generation_config.json": {"eos_token_id": 0}, "config.json": {"eos_token_id": 7}}, (0,)),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 7}}, (7,)),
        ({"config.json": {"eos_token_id": None}}, (2,)),
        ({}, (2,)),
        ({"tokenizer_config.json": {}}, ()),
    ],
)
def test_a_completion_stops_where_the_model_says(
    model_dir: Path, tmp_path: Path, files: dict[str, Any], stop_token_ids: tuple[int, ...]
) -> None:
    with_config(model_dir, tmp_path, eos_token="<|end|>")
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert Codec(tmp_path).stop_token_ids == stop_token_ids


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no tokenizer\.json"):
        Codec(tmp_path)


# Prompts


def test_rows_become_prompts_with_stable_names_and_their_other_columns(codec: Codec) -> None:
    chat = [{"role": "user", "content": "hi"}]
    rows = [{"prompt": "hello", "answer": "x"}, {"prompt": chat, "id": "named"}, {"prompt": "hello", "id": 7}]
    prompts, dropped = encode_rows(rows, codec, 1000)
    assert dropped == []
    assert prompts == [
        Prompt(prompt_id="1", token_ids=codec.encode("hello"), source="hello", columns={"answer": "x"}),
        Prompt(prompt_id="named", token_ids=codec.encode(chat), source=chat, columns={"id": "named"}),
        Prompt(prompt_id="7", token_ids=codec.encode("hello"), source="hello", columns={"id": 7}),
    ]


def test_prompts_that_are_too_long_are_left_out_and_named(codec: Codec) -> None:
    rows = [
        {"prompt": "hello"},
        {"prompt": "hello, what is 17?"},
        {"prompt": "the"},
        {"prompt": "q" * 50, "id": "long"},
    ]
    limit = len(codec.encode("hello, what is 17?"))
    prompts, dropped = encode_rows(rows, codec, limit)
    assert ([prompt.prompt_id for prompt in prompts], dropped) == (["1", "2", "3"], ["long"])
    prompts, dropped = encode_rows(rows, codec, limit - 1)
    assert ([prompt.prompt_id for prompt in prompts], dropped) == (["1", "3"], ["2", "long"])


def test_a_dataset_of_which_nothing_is_left_is_refused(codec: Codec) -> None:
    with pytest.raises(InputError, match="none of the 2 prompts has between 1 and 3 tokens"):
        encode_rows([{"prompt": "q" * 50}, {"prompt": "z" * 50}], codec, 3)


# The order of training


def numbered(count: int) -> list[Prompt]:
    return [Prompt(prompt_id=str(n), token_ids=(n,), source="", columns={}) for n in range(count)]


def order(cursor: PromptCursor, sizes: list[int]) -> list[int]:
    return [prompt.token_ids[0] for size in sizes for prompt in cursor.take(size)]


@settings(deadline=None)
@given(
    count=st.integers(1, 30), seed=st.integers(0, 2**63 - 1), sizes=st.lists(st.integers(1, 70), min_size=1, max_size=8)
)
def test_every_epoch_is_a_permutation_and_the_order_depends_on_the_seed_alone(
    count: int, seed: int, sizes: list[int]
) -> None:
    cursor = PromptCursor(numbered(count), seed=seed, shuffle=True)
    taken = order(cursor, sizes)
    assert cursor.position == len(taken) == sum(sizes)
    for start in range(0, len(taken) - count + 1, count):
        assert sorted(taken[start : start + count]) == list(range(count))
    assert taken == order(PromptCursor(numbered(count), seed=seed, shuffle=True), [1] * sum(sizes))


@settings(deadline=None)
@given(count=st.integers(1, 30), before=st.integers(0, 100))
def test_a_cursor_put_at_a_position_goes_on_as_if_it_had_come_there(count: int, before: int) -> None:
    walked = PromptCursor(numbered(count), seed=3, shuffle=True)
    walked.take(before)
    jumped = PromptCursor(numbered(count), seed=3, shuffle=True)
    jumped.position = before
    assert order(walked, [2 * count]) == order(jumped, [2 * count])


def test_seeds_and_epochs_differ_in_their_order() -> None:
    orders = [
        tuple(order(cursor, [50]))
        for seed in range(3)
        for cursor in [PromptCursor(numbered(50), seed=seed, shuffle=True)]
        for _ in range(3)
    ]
    assert len(set(orders)) == 9
    assert tuple(range(50)) not in orders


def test_without_shuffling_the_rows_come_as_they_are_and_again() -> None:
    assert order(PromptCursor(numbered(3), seed=1, shuffle=False), [2, 5]) == [0, 1, 2, 0, 1, 2, 0]


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
