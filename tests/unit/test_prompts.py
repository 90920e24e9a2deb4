"""From rows to prompts: that our tokens are those of transformers, and the order of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from onbeat.errors import InputError
from onbeat.prompts.codec import Codec
from onbeat.prompts.rows import Row
from onbeat.prompts.source import PromptCursor, encode_rows
from onbeat.recipe import from_tree
from onbeat.session import sampling_of
from onbeat.types import Prompt

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


def placed(*columns: dict[str, Any]) -> list[Row]:
    """As they are read from a file."""
    rows = [Row(each) for each in columns]
    for number, row in enumerate(rows, 1):
        row.place = f"rows.jsonl, row {number}"
    return rows


def test_rows_become_prompts_with_stable_names_and_their_other_columns(codec: Codec) -> None:
    chat = [{"role": "user", "content": "hi"}]
    rows = placed({"prompt": "hello", "answer": "x"}, {"prompt": chat, "id": "named"}, {"prompt": "hello", "id": 7})
    prompts, dropped = encode_rows(rows, codec, 1000)
    assert dropped == []
    assert prompts == [
        Prompt(prompt_id="1", token_ids=codec.encode("hello"), source="hello", columns={"answer": "x"}),
        Prompt(prompt_id="named", token_ids=codec.encode(chat), source=chat, columns={"id": "named"}),
        Prompt(prompt_id="7", token_ids=codec.encode("hello"), source="hello", columns={"id": 7}),
    ]


def test_prompts_that_are_too_long_are_left_out_and_named(codec: Codec) -> None:
    rows = placed(
        {"prompt": "hello"},
        {"prompt": "hello, what is 17?"},
        {"prompt": "the"},
        {"prompt": "q" * 50, "id": "long"},
    )
    limit = len(codec.encode("hello, what is 17?"))
    prompts, dropped = encode_rows(rows, codec, limit)
    assert ([prompt.prompt_id for prompt in prompts], dropped) == (["1", "2", "3"], ["long"])
    prompts, dropped = encode_rows(rows, codec, limit - 1)
    assert ([prompt.prompt_id for prompt in prompts], dropped) == (["1", "3"], ["rows.jsonl, row 2", "long"])


def test_a_dataset_of_which_nothing_is_left_is_refused(codec: Codec) -> None:
    with pytest.raises(InputError, match="none of the 2 prompts has between 1 and 3 tokens"):
        encode_rows(placed({"prompt": "q" * 50}, {"prompt": "z" * 50}), codec, 3)


def test_a_chat_the_template_refuses_is_told_with_its_row(codec: Codec) -> None:
    chat = [{"role": "forbidden", "content": "x"}]
    with pytest.raises(InputError, match=r"rows.jsonl, row 2: the chat template of .* refuses"):
        encode_rows(placed({"prompt": "fine"}, {"prompt": chat}), codec, 1000)


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


def test_a_special_token_is_found_by_its_text_and_no_other_text_is(codec: Codec, theirs: Any) -> None:
    text = theirs.eos_token
    assert codec.special_token(text) == theirs.eos_token_id
    assert codec.special_token("hello") is None
    assert codec.special_token(text[:-1]) is None


def test_a_stop_string_that_is_a_special_token_stops_by_its_number(codec: Codec, theirs: Any) -> None:
    """It leaves no text behind in which it could be found."""
    config = from_tree(
        {
            "model": {"path": "unused"},
            "data": {"path": "unused.jsonl"},
            "reward": {"functions": [{"path": "exact_match"}]},
            "sampling": {"stop": ["\n\n", theirs.bos_token, theirs.eos_token]},
        }
    )
    sampling = sampling_of(config, codec)
    assert sampling.stop == ("\n\n",)
    assert {theirs.bos_token_id, theirs.eos_token_id} <= set(sampling.stop_token_ids)
    assert len(set(sampling.stop_token_ids)) == len(sampling.stop_token_ids)
