"""The recipe: TOML files composed left to right, dotted flags over them, checked before anything is started.

    onbeat train recipes/arithmetic.toml mine.toml --schedule.mode sync --seed 3

A later file wins over an earlier one key by key; a flag wins over all files. A key nobody knows, or a value of the
wrong type, is refused with its place and the closest right key. Paths in a file are relative to that file; paths in
a flag to the working directory. What can be derived is a property, not a key. No torch here.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from onbeat.errors import ConfigError

_Positive = Annotated[int, Field(ge=1)]
_Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


_FILE_SUFFIXES = {".jsonl", ".json", ".csv", ".parquet", ".gguf", ".py"}


class PathMark:
    """Marks a key whose text starts with a path to be resolved against the recipe's folder."""


def _absolute(value: object, base: Path) -> object:
    """`file.py:function` or a plain path, made absolute; `package.module:function` and built-ins stay as they are."""
    if not isinstance(value, str):
        return value
    file, colon, function = value.partition(":")
    path = base / os.path.expanduser(file)
    if colon:
        is_path = file.endswith(".py")
    else:
        is_path = file.startswith(("/", ".", "~")) or path.suffix in _FILE_SUFFIXES or os.path.exists(path)
    return str(path.resolve()) + colon + function if is_path else value


SourcePath = Annotated[str, PathMark()]
"""A file, a directory, or `file.py:function`."""


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class RunConfig(_Section):
    dir: str = "runs/latest"
    """Where everything the run writes goes; relative to the working directory."""
    rollout_groups: Annotated[int, Field(ge=0)] = 8
    """Groups per period whose prompts, completions and rewards are written to rollouts/, for people to read."""


class ModelConfig(_Section):
    path: SourcePath
    """A Hugging Face model directory, or `file.py:function`, called once with an empty directory to fill."""


class ScheduleConfig(_Section):
    mode: Literal["periodic", "sync"] = "periodic"
    """periodic: train on each group when it is ready. sync: wait for the whole period first. The same weights."""
    order: Literal["dispatch", "completion"] = "dispatch"
    """dispatch: groups are trained in slot order (exact). completion: in order of arrival (equal up to rounding)."""
    periods: _Positive = 100
    """How many periods to train."""
    prompts_per_period: _Positive = 8
    """Groups per period."""
    updates_per_period: _Positive = 1
    """Optimizer steps per period."""

    @model_validator(mode="after")
    def _updates_have_groups(self) -> ScheduleConfig:
        if self.updates_per_period > self.prompts_per_period:
            raise ValueError(
                f"updates_per_period = {self.updates_per_period} exceeds prompts_per_period = "
                f"{self.prompts_per_period}: an optimizer step needs at least one group"
            )
        return self


class AlgorithmConfig(_Section):
    name: Literal["grpo"] = "grpo"
    """The loss and the advantage."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Completions per prompt."""
    beta: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the KL to the reference; 0: no reference is loaded."""
    clip_low: _Fraction = 0.2
    """The ratio to the old policy is clipped below 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0.0)] = 0.2
    """… and above 1 + clip_high."""
    scale_advantages: bool = True
    """Divide a group's advantages by the standard deviation of its rewards."""
    loss_mean: Literal["sequence", "token", "constant"] = "sequence"
    """What the loss is a mean over: sequences of token means; all tokens; sequences of token sums / max_new_tokens."""


class SamplingConfig(_Section):
    max_new_tokens: _Positive = 128
    """A completion ends at a stop token or here."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Of sampling and of the trained log-probabilities alike."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """A completion also ends with the token that completes one of these texts, and keeps it."""


class GeneratorConfig(_Section):
    backend: Literal["embedded"] = "embedded"
    """The engine that samples."""
    count: _Positive = 1
    """Generator processes."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Threads per generator; 0: an equal share of the cores, which is larger while the trainer waits."""
    max_sequences: _Positive = 32
    """Sequences decoded at once per generator, admitted by whole groups."""
    cache_gib: Annotated[float, Field(gt=0.0)] = 4.0
    """Memory for keys and values per generator. A group reserves what its completions may need at most, and waits if
    that is not free; one that can never fit is refused."""


class TrainerConfig(_Section):
    ranks: _Positive = 1
    """Trainer processes."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Threads per rank; 0: all cores, shared with the generators without spinning."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 1e-6
    """AdamW's, after warm-up."""
    warmup_updates: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after warm-up; linear and cosine end at 0 with the run."""
    betas: tuple[_Fraction, _Fraction] = (0.9, 0.95)
    """AdamW's moments."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """AdamW's, on matrices."""
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Gradients are clipped to this norm."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: a quarter of the memory, a third more time."""
    pack_tokens: _Positive = 768
    """Small groups are packed into one forward/backward until it holds this many tokens: more fills the cores no
    better and makes the trainer wait."""
    max_tokens: _Positive = 4096
    """A group with more tokens than this, its prompt counted once, is split: bounds the memory of a pass."""


class DataConfig(_Section):
    path: SourcePath
    """Rows with a `prompt`: a .jsonl, .json, .csv or .parquet file, a directory of them, a Hugging Face dataset (by
    directory or name), or `file.py:function` yielding dicts."""
    split: str = "train"
    """Of a Hugging Face dataset."""
    eval_path: SourcePath | None = None
    """Held-out rows, to evaluate on."""
    eval_rows: Annotated[int, Field(ge=0)] = 0
    """Without eval_path and eval_split: so many rows, chosen by the seed, are held out of `path`."""
    eval_split: str = ""
    """The split to evaluate on, of a Hugging Face dataset."""
    columns: dict[str, str] = {}
    """What the columns are called in the data, where it differs: { prompt = "question", answer = "info.answer" }."""
    shuffle: bool = True
    """Shuffle each epoch by the seed."""
    max_prompt_tokens: _Positive = 1024
    """Longer prompts are dropped and counted."""


class EvaluationConfig(_Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Periods between evaluations on the held-out prompts; 0: before the first period and after the last."""
    samples: Annotated[int, Field(ge=0)] = 0
    """Completions per held-out prompt for pass@k, sampled as in training, beside the greedy one; 0: greedy alone."""


class CheckpointConfig(_Section):
    every: Annotated[int, Field(ge=0)] = 10
    """Periods between checkpoints; 0: only at the end, and when the run is interrupted."""
    keep: _Positive = 2
    """The newest so many are kept, and the one that evaluated best."""


class TrackConfig(_Section):
    tensorboard: bool = False
    """Write TensorBoard events to run.dir/tensorboard."""
    wandb: str = ""
    """A Weights & Biases project to log to."""
    trackio: str = ""
    """A trackio project to log to."""


class RewardFunction(_Section):
    path: SourcePath
    """`file.py:function`, `package.module:function`, or a built-in: exact_match, numeric_answer, format."""
    weight: float = 1.0
    """Its share in the reward."""


class RewardConfig(_Section):
    functions: tuple[RewardFunction, ...] = Field(min_length=1)
    """Reward functions; the first is the main one, which accuracy looks at."""
    timeout_s: Annotated[float, Field(gt=0.0)] = 30.0
    """A call that takes longer is killed, and its rollouts are unscorable."""
    workers: _Positive = 1
    """Reward processes."""
    accuracy_threshold: float = 1.0
    """A completion is right if its main reward is at least this."""


class ClusterConfig(_Section):
    launcher: Literal["local"] = "local"
    """Where workers run: processes of this machine."""


class Config(_Section):
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of sampling and shuffling."""
    run: RunConfig = RunConfig()
    model: ModelConfig
    schedule: ScheduleConfig = ScheduleConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    sampling: SamplingConfig = SamplingConfig()
    generator: GeneratorConfig = GeneratorConfig()
    trainer: TrainerConfig = TrainerConfig()
    data: DataConfig
    reward: RewardConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    track: TrackConfig = TrackConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _supported(self) -> Config:
        if self.trainer.ranks > 1:
            raise ValueError(f"trainer.ranks = {self.trainer.ranks}: more than one trainer rank is not available yet")
        return self

    @property
    def num_updates(self) -> int:
        return self.schedule.periods * self.schedule.updates_per_period


def load(recipes: Sequence[str | os.PathLike[str]], overrides: Mapping[str, Any] | None = None) -> Config:
    """The configuration of the recipes, composed left to right, with dotted overrides on top."""
    merged: dict[str, Any] = {}
    for recipe in recipes:
        _merge(merged, _read(Path(recipe)))
    for key, value in (overrides or {}).items():
        check_key(key)
        _merge(merged, _known(_nested(key, value), Config, f"--{key}", Path.cwd(), ""))
    try:
        return from_tree(merged)
    except ValidationError as error:
        raise ConfigError(_explain(error, recipes)) from None


def from_tree(tree: Mapping[str, Any]) -> Config:
    """The configuration of plain tables. Strict, as JSON is: a list is a tuple, an integer a float, and that is all."""
    return Config.model_validate_json(json.dumps(tree, default=str))


def _read(path: Path) -> dict[str, Any]:
    """One TOML file with its keys known and its paths absolute."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the recipe {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    return _known(tree, Config, str(path), path.resolve().parent, "")


def _known(tree: Mapping[str, Any], model: type[BaseModel], place: str, base: Path, prefix: str) -> dict[str, Any]:
    """The tree with its keys known and its paths, relative to `base`, absolute."""
    known: dict[str, Any] = {}
    for name, value in tree.items():
        field = model.model_fields.get(name)
        if field is None:
            raise ConfigError(f"{place}: there is no key {prefix + name!r}{suggestion(prefix + name)}")
        section = _section_of(field.annotation)
        if section is not None and isinstance(value, dict):
            known[name] = _known(value, section, place, base, f"{prefix}{name}.")
        elif section is not None and section is field.annotation:
            raise ConfigError(f"{place}: {prefix + name!r} is a section with keys of its own, not {value!r}")
        elif section is not None and isinstance(value, list):
            known[name] = [
                _known(item, section, place, base, f"{prefix}{name}.") if isinstance(item, dict) else item
                for item in value
            ]
        else:
            known[name] = _resolved(prefix + name, value, base)
    return known


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The model behind a field: itself, or the items of a tuple of models."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key with its pydantic field, in the order of the file."""
    for name, field in model.model_fields.items():
        section = _section_of(field.annotation)
        if section is not field.annotation:
            yield f"{prefix}{name}", field
        if section is not None:
            yield from keys(section, f"{prefix}{name}.")


_KEYS: dict[str, Any] = dict(keys())
_PATH_KEYS = {key for key, field in _KEYS.items() if any(isinstance(mark, PathMark) for mark in field.metadata)}
_PATH_KEYS.add("data.eval_path")  # optional: pydantic keeps the mark inside the union


def check_key(key: str) -> None:
    """Refuse a key that cannot be set with a flag."""
    if key not in _KEYS:
        raise ConfigError(f"there is no key {key!r}{suggestion(key)}")
    section = key.rpartition(".")[0]
    if section in _KEYS:
        raise ConfigError(f"{key!r} is a key of the items of {section!r}: set the list as a whole, with --{section}")


def suggestion(key: str) -> str:
    """The closest right key, as the end of a sentence."""
    sections = {known.rpartition(".")[0] for known in _KEYS} - {""}
    last = key.rpartition(".")[2]
    by_last_name = [known for known in _KEYS if known.rpartition(".")[2] == last]
    close = difflib.get_close_matches(key, {*_KEYS, *sections} - {key}, n=1, cutoff=0.6) or by_last_name[:1]
    return f": did you mean {close[0]!r}?" if close else "; `onbeat config` lists them all"


def _resolved(key: str, value: Any, base: Path) -> Any:
    return _absolute(value, base) if key in _PATH_KEYS else value


def _merge(into: dict[str, Any], tree: Mapping[str, Any]) -> None:
    for name, value in tree.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


def _nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    tree: dict[str, Any] = value
    return tree


def _explain(error: ValidationError, recipes: Sequence[str | os.PathLike[str]]) -> str:
    """One sentence per problem: key, value, what is wrong."""
    where = ", ".join(str(recipe) for recipe in recipes) or "the configuration"
    sentences = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "missing":
            sentences.append(f"{where}: the key {key!r} is missing")
        elif problem["type"] == "value_error":
            sentences.append(f"{where}: {problem['ctx']['error']!s}")
        else:
            sentences.append(f"{where}: {key} = {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}")
    return "\n".join(sentences)


def parse_flag(key: str, text: str) -> Any:
    """A flag's value: TOML if it is TOML (numbers, booleans, lists, tables), else the text itself. A key that holds
    text gets it though it look like a number or a date."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    holds_text = key in _PATH_KEYS or (key in _KEYS and _KEYS[key].annotation is str)
    return text if holds_text and not isinstance(value, str) else value


def to_toml(config: Config) -> str:
    """The resolved configuration as a recipe that gives it again."""
    lines = [f"seed = {config.seed}"]
    for name, section in config:
        if isinstance(section, BaseModel):
            lines += ["", f"[{name}]"]
            lines += [f"{key} = {_toml_value(value)}" for key, value in section if value is not None]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case tuple() | list():
            return "[" + ", ".join(_toml_value(item) for item in value) + "]"
        case dict():
            return "{ " + ", ".join(f"{_toml_value(key)} = {_toml_value(item)}" for key, item in value.items()) + " }"
        case BaseModel():
            return "{ " + ", ".join(f"{key} = {_toml_value(item)}" for key, item in value) + " }"
        case _:
            raise TypeError(f"no TOML for {value!r}")
