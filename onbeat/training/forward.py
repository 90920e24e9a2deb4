"""The forward pass of training: log-probabilities of completion tokens under one model.

    shared   the body runs over the packed sequence, the head over completion positions, some words at a time
    plain    for architectures that cannot share a prompt: the model's own forward over every completion

`why_not_shared` decides once per model, by asking the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from onbeat.attention import heard_by_attention, why_not_attended
from onbeat.batch.layout import Layout
from onbeat.training.attention import ATTENTION, KeysValues, SharedPrompt
from onbeat.training.gradients import gradients_in_place
from onbeat.training.head import head_logprobs
from onbeat.training.parallel import ShardRoot
from onbeat.types import TrainGroup

_ATTENDING_LAYERS = {"full_attention", "sliding_attention"}


class PromptState:
    """A split group's prompt under one model: what its completions need of it.

    No dataclass, for the reason that SharedPrompt is none.
    """

    def __init__(self, kept: dict[int, KeysValues], last_hidden: torch.Tensor) -> None:
        self.kept = kept
        self.last_hidden = last_hidden
        """[1, H], where the first tokens are predicted."""

    def leaves(self) -> PromptState:
        """A copy cut off from the graph, which collects gradients where there are any (under LoRA not everywhere)."""
        kept = {layer: (_leaf(key), _leaf(value)) for layer, (key, value) in self.kept.items()}
        return PromptState(kept, _leaf(self.last_hidden))

    def tensors(self) -> list[torch.Tensor]:
        return [*(tensor for pair in self.kept.values() for tensor in pair), self.last_hidden]


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _called(model: Any, function: Callable[..., Any], *args: Any) -> Any:
    """function(model, …): through its door, if the model is sharded (parallel.py)."""
    return model(function, *args) if isinstance(model, ShardRoot) else function(model, *args)


def completion_logprobs(
    model: Any, layout: Layout, temperature: float, prompt: PromptState | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per completion token, [T]: its log-probability, and the entropy (without gradient) of its prediction."""
    logprobs_T, entropy_T = _called(model, _completion_logprobs, layout, temperature, prompt)
    return logprobs_T, entropy_T


def _completion_logprobs(
    model: Any, layout: Layout, temperature: float, prompt: PromptState | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if layout.segments is None:
        with gradients_in_place():
            return _plain_logprobs(model, layout, temperature)
    hidden = _body(
        model, layout, SharedPrompt(layout.segments, layout.prefix_length, kept=prompt.kept if prompt else {})
    )
    if prompt is not None:
        hidden = torch.cat([prompt.last_hidden, hidden])
    # index_select: the backward of plain indexing adds rows that repeat (the prompt's last) in any order of threads.
    predictions = hidden.index_select(0, layout.prediction_T)
    keep = not model.is_gradient_checkpointing
    return head_logprobs(model.get_output_embeddings(), predictions, layout.target_T, temperature, keep=keep)


def prompt_state(model: Any, prompt_ids: Sequence[int]) -> PromptState:
    """The first step of a split group."""
    kept, last_hidden = _called(model, _prompt_state, prompt_ids)
    return PromptState(kept, last_hidden)


def _prompt_state(model: Any, prompt_ids: Sequence[int]) -> tuple[dict[int, KeysValues], torch.Tensor]:
    """In plain containers: a sharded model looks into them for the tensors from which a backward may come."""
    layout = Layout.prompt_only(prompt_ids)
    assert layout.segments is not None
    shared = SharedPrompt(layout.segments, keep=True)
    hidden = _body(model, layout, shared)
    return shared.kept, hidden[-1:]


@contextmanager
def split_prompt(
    model: Any, prompt_ids: Sequence[int], precision: AbstractContextManager[Any] | None = None
) -> Iterator[PromptState]:
    """The prompt of a split group, for as long as its parts come.

    Inside, its keys and values are leaves whose gradients sum up over the parts; at the end one backward brings them
    through the prompt.
    """
    with precision or nullcontext():
        attached = prompt_state(model, prompt_ids)
    leaves = attached.leaves()
    yield leaves
    if leaves.last_hidden.requires_grad and leaves.last_hidden.grad is None:
        # No part was of this group: the backward runs all the same, for other ranks.
        leaves.last_hidden.grad = torch.zeros_like(leaves.last_hidden)
    pairs = zip(attached.tensors(), leaves.tensors(), strict=True)
    reached = [(tensor, leaf.grad) for tensor, leaf in pairs if leaf.grad is not None]
    torch.autograd.backward([tensor for tensor, _ in reached], [gradient for _, gradient in reached])


def _body(model: Any, layout: Layout, shared: SharedPrompt) -> torch.Tensor:
    """Last hidden states of the one packed sequence, [L, H]."""
    with gradients_in_place():
        output = model.base_model(
            input_ids=layout.tokens_S_L, position_ids=layout.positions_S_L, use_cache=False, shared_prompt=shared
        )
    hidden: torch.Tensor = output.last_hidden_state
    return hidden[0]


def _plain_logprobs(model: Any, layout: Layout, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    longest = layout.tokens_S_L.shape[1]
    sequence_T, position_T = layout.prediction_T // longest, layout.prediction_T % longest
    first = int(position_T.min())  # the head has nothing to say before the first prediction
    output = model(input_ids=layout.tokens_S_L, use_cache=False, logits_to_keep=torch.arange(first, longest))
    logits = output.logits[:, first - longest :]  # of all positions, if the model does not know how to keep few
    logits_T_V = logits[sequence_T, position_T - first]
    logits_T_V = logits_T_V.to(torch.promote_types(logits_T_V.dtype, torch.float32)) / temperature
    logprobs_T_V = torch.log_softmax(logits_T_V, dim=-1)
    with torch.no_grad():
        entropy_T = -(logprobs_T_V.exp() * logprobs_T_V).sum(dim=-1)
    return logprobs_T_V.gather(1, layout.target_T[:, None])[:, 0], entropy_T


def why_not_shared(model: Any) -> str | None:
    """None if the model can share prompts; else the reason, for the user. Asks the model, then tries it."""
    name = type(model).__name__
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ()) - _ATTENDING_LAYERS
    if layers:
        return f"{name} has layers without attention ({', '.join(sorted(layers))}), whose state cannot be shared"
    if not getattr(model, "_supports_attention_backend", False):
        return f"{name} does not let its attention be replaced"
    if not isinstance(model.get_output_embeddings(), torch.nn.Linear):
        return f"the head of {name} is not a linear layer"
    return why_not_attended(model, heard_by_attention(model)) or _why_forms_differ(model, config.vocab_size)


@torch.no_grad()
def _why_forms_differ(model: Any, vocabulary: int) -> str | None:
    """A small group in both forms: whatever the model does that we do not know of shows here."""
    tokens = [1 + (7 * n) % (vocabulary - 1) for n in range(40)]
    completions = (tuple(tokens[20:33]), tuple(tokens[33:38]), tuple(tokens[38:]))
    group = TrainGroup(
        slot=0,
        prompt_ids=tuple(tokens[:20]),
        completion_ids=completions,
        sampler_logprobs=tuple((0.0,) * len(completion) for completion in completions),
        advantages=(0.0,) * len(completions),
    )
    before = model.config._attn_implementation
    plain, shared = Layout.plain([group]), Layout.shared([group])
    expected_T = completion_logprobs(model, plain, 1.0)[0]
    try:
        share_prompts(model)
        found_T = completion_logprobs(model, shared, 1.0)[0]
    except (TypeError, NotImplementedError) as error:
        return f"{type(model).__name__} cannot run them: {error}"
    finally:
        model.set_attn_implementation(before)
    # The plain form keeps the group's order, the shared one sorts by length.
    expected = torch.cat(sorted(torch.split(expected_T, [len(c) for c in completions]), key=len))
    if torch.allclose(found_T, expected, rtol=1e-3, atol=1e-3):
        return None
    gap = (found_T - expected).abs().max().item()
    return f"log-probabilities of {type(model).__name__} differ by {gap:.2g} from those of its own forward"


def share_prompts(model: Any) -> None:
    """From now on the model's attention is ours: it can run shared layouts, and nothing else."""
    model.set_attn_implementation(ATTENTION)


def checkpoint_layers(model: Any) -> None:
    """Keep each layer's input alone and compute the layer again in backward, in the mode the forward ran in."""
    model.gradient_checkpointing_enable(
        {"use_reentrant": False, "context_fn": lambda: (nullcontext(), gradients_in_place())}
    )
    for module in model.modules():  # transformers does so in training alone, which nothing else is to notice
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
