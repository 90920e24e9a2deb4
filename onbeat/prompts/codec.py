"""Text to tokens and back, by the model's own files, without importing torch.

`transformers.AutoTokenizer` would bring torch into the controller (4 s); `tokenizers` reads the same tokenizer.json,
and jinja2 renders the same chat template.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from onbeat.admission import positions
from onbeat.errors import InputError
from onbeat.types import Messages


class Codec:
    def __init__(self, model_dir: Path) -> None:
        self._dir = model_dir
        file = model_dir / "tokenizer.json"
        if not file.is_file():
            raise InputError(f"the model directory {model_dir} has no tokenizer.json")
        self._tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._config = _json(model_dir / "tokenizer_config.json")

    def encode(self, source: str | Messages) -> tuple[int, ...]:
        """Text as it is, with the special tokens the tokenizer adds; a chat by the model's template."""
        if isinstance(source, str):
            return tuple(self._tokenizer.encode(source).ids)
        return tuple(self._tokenizer.encode(self.render(source), add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a completion, special tokens left out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def render(self, messages: Messages) -> str:
        """The chat as the model was taught to read it, up to where the assistant speaks."""
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise InputError(f"the chat template of {self._dir} refuses {str(messages)[:80]!r}: {error}") from None

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion: the generation config's, else the model's, else the tokenizer's."""
        for name in ("generation_config.json", "config.json"):
            ends = _json(self._dir / name).get("eos_token_id")
            if ends is not None:
                return tuple(ends) if isinstance(ends, list) else (int(ends),)
        end = self._tokenizer.token_to_id(self._special_tokens.get("eos_token", ""))
        return () if end is None else (end,)

    @cached_property
    def max_positions(self) -> int | None:
        """How long a sequence the model can see; None if it does not say."""
        return positions(_json(self._dir / "config.json"))

    def special_token(self, text: str) -> int | None:
        """The token that stands for this text and leaves no text behind; None if there is none."""
        added = self._tokenizer.get_added_tokens_decoder()
        return next((token for token, known in added.items() if known.special and known.content == text), None)

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        found = {}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            value = self._config.get(name)
            if value is not None:
                found[name] = value["content"] if isinstance(value, dict) else value
        return found

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return isinstance(self._template_text, str)

    @cached_property
    def _template_text(self) -> Any:
        file = self._dir / "chat_template.jinja"
        text = file.read_text(encoding="utf-8") if file.is_file() else self._config.get("chat_template")
        if isinstance(text, list):
            text = next((item["template"] for item in text if item.get("name") == "default"), None)
        return text

    @cached_property
    def _template(self) -> Template:
        text = self._template_text
        if not isinstance(text, str):
            raise InputError(f"the prompts are chats, but the model in {self._dir} has no chat template")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = _to_json
        return environment.from_string(text)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for others; to us it is a plain block."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike jinja's own, without escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {file}: {error}") from None
    return content if isinstance(content, dict) else {}
