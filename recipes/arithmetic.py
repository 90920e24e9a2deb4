"""Learning to carry: two-digit addition with a model of 105 000 parameters, small enough for one core.

The task. A prompt is `17+25=`, a completion the digits of the sum and the end token, the reward 1 for the
right sum and 0 for everything else. Both operands have two digits. Three rows in four need a carry from the
ones.

The start. `make_model` trains a small Llama from scratch, briefly, on the answers of a careless pupil: of 100
sums that need a carry, 65 are written without it (17+25=32). What comes out writes well-formed answers, knows
the digits fairly well and forgets the carry more often than not: greedily it solves about 30 % of the
held-out problems.

What is left to learn from the reward alone: when to carry, and to be surer of the digits. It has to hold for
prompts that neither the warm start nor the training has seen: held-out and training rows share no prompt
(`17+25=` and `25+17=` count as two prompts). The yardstick: never to carry solves 24 % of the held-out rows,
always to carry 76 %. A short run goes past the second and overshoots: nearly all sums with a carry come out
right, while some without one get a carry too many.

Importing this module imports no torch; only `make_model` does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor
    from transformers import LlamaForCausalLM

NUM_HELD_OUT = 200
CORRECT_SHARE = 0.35
"""Of the warm start's answers to problems with a carry. Below one half, so that the greedy answer forgets it; far
enough above 0 that most groups of 8 samples hold both outcomes, which is what GRPO learns from."""

SPECIAL_TOKENS = ("<eos>", "<pad>", "<unk>")
EOS_ID, PAD_ID = 0, 1
VOCABULARY = (*SPECIAL_TOKENS, *"0123456789+=")
VOCABULARY_SIZE = 16
"""`VOCABULARY` rounded up to a multiple of 16."""
MAX_ANSWER_TOKENS = 4
"""Three digits and the end token."""

WARM_START_STEPS = 600
WARM_START_BATCH_SIZE = 96
WARM_START_LEARNING_RATE = 6e-3


def train_rows() -> Iterator[dict[str, str]]:
    """The rows to train on, shuffled once and for all: the same on every machine."""
    for a, b in _problems()[NUM_HELD_OUT:]:
        yield _row(a, b)


def held_out_rows() -> Iterator[dict[str, str]]:
    """The rows to evaluate on. No prompt of theirs is in `train_rows`."""
    for a, b in _problems()[:NUM_HELD_OUT]:
        yield _row(a, b)


def correct(
    prompts: list[Any],
    completions: list[str],
    completion_ids: list[list[int]],
    answer: list[str],
    **columns: Any,
) -> list[float]:
    """1.0 where the whole completion is the answer. No credit for an answer with anything around it."""
    return [float(completion.strip() == expected) for completion, expected in zip(completions, answer, strict=True)]


def make_model(directory: Path) -> None:
    """Write the warm-started model and its tokenizer to `directory`, in Hugging Face format.

    Seeded: the same machine, library versions and thread count give the same weights.
    """
    import torch
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    model = _untrained_model()
    _warm_start(model, torch.Generator().manual_seed(0))
    model.save_pretrained(directory)
    PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(),
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)


def _problems() -> list[tuple[int, int]]:
    """Every problem with a carry and a third as many without one, in a fixed shuffled order."""
    shuffled = random.Random(0)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    shuffled.shuffle(pairs)
    carrying = [(a, b) for a, b in pairs if _carries(a, b)]
    plain = [(a, b) for a, b in pairs if not _carries(a, b)]
    problems = carrying + plain[: len(carrying) // 3]
    shuffled.shuffle(problems)
    return problems


def _carries(a: int, b: int) -> bool:
    return a % 10 + b % 10 >= 10


def _row(a: int, b: int) -> dict[str, str]:
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def _sum_without_carry(a: int, b: int) -> int:
    """The careless pupil's answer: every column is right by itself."""
    return a + b - 10 if _carries(a, b) else a + b


def _tokenizer() -> Tokenizer:
    """One token per character; nothing is added around a text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _untrained_model() -> LlamaForCausalLM:
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        # The usual 0.02 is meant for wider models: so narrow a one then learns less in the same steps.
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    return model


def _warm_start(model: LlamaForCausalLM, generator: Any) -> None:
    """Supervised training on the careless pupil's answers to the training problems."""
    import torch
    from torch.nn.functional import cross_entropy

    problems = _problems()[NUM_HELD_OUT:]
    prompts = _encoded([f"{a}+{b}=" for a, b in problems])
    right = _encoded_answers([a + b for a, b in problems])
    careless = _encoded_answers([_sum_without_carry(a, b) for a, b in problems])

    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(WARM_START_STEPS):
        for parameters in optimizer.param_groups:
            parameters["lr"] = _learning_rate(step)
        rows = torch.randint(len(problems), (WARM_START_BATCH_SIZE,), generator=generator)
        is_right = torch.rand(WARM_START_BATCH_SIZE, 1, generator=generator) < CORRECT_SHARE
        answers = torch.where(is_right, right[rows], careless[rows])
        input_ids = torch.cat([prompts[rows], answers], dim=1)[:, :-1]
        logits = model(input_ids=input_ids, use_cache=False).logits[:, -MAX_ANSWER_TOKENS:]
        loss = cross_entropy(logits.flatten(0, 1), answers.flatten(), ignore_index=PAD_ID)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _learning_rate(step: int) -> float:
    """Up within 20 steps, down to almost zero over the last 40 %."""
    rise = (step + 1) / 20
    fall = (WARM_START_STEPS - step) / (0.4 * WARM_START_STEPS)
    return WARM_START_LEARNING_RATE * min(1.0, rise, fall)


def _encoded(texts: list[str]) -> Tensor:
    """Token ids of texts of one length."""
    import torch

    tokenizer = _tokenizer()
    return torch.tensor([encoding.ids for encoding in tokenizer.encode_batch(texts)])


def _encoded_answers(values: list[int]) -> Tensor:
    """Digits, end token, padding: each row `MAX_ANSWER_TOKENS` long."""
    texts = [f"{value}<eos>" + "<pad>" * (MAX_ANSWER_TOKENS - 1 - len(str(value))) for value in values]
    return _encoded(texts)
