"""How many threads training computes with: all it has while the generators wait, its share while they work.

    accumulate     changes between two products, as often as the generators begin and end: whoever waits at the end of
                   an operation for a thread that another process keeps from its core, keeps a core from that process
    all the rest   all it has: the bits of a few sums over whole tensors (a norm) depend on the number

That is allowed only if the bits of a micro-batch do not tell how many threads computed it, or when they changed. They
do not where every number of a result is summed up by one thread in an order of its own, and so it is in the kernels of
torch and oneDNN that training needs. Some activations of torch round what does not fill a vector register differently,
and each thread's share of numbers has an end. SiLU is our own therefore (activations.py); a model with others can be
trained so where every size of its layers is a whole number of vectors for each of 1, 2, 3 … threads: on two cores most,
on more hardly any. `why_fixed` asks all that, of this model on this machine; where it is not so, the trainer keeps its
number, and the run says why (environment.json).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onbeat.batch.layout import Layout
from onbeat.cores import beside_generators
from onbeat.lora import trained_parameters
from onbeat.training.attention import SharedPrompt
from onbeat.training.head import BLOCK_WORDS
from onbeat.training.merged import LONG_PROMPT
from onbeat.training.products import before_each, linear, product
from onbeat.training.tri_model import TriModel
from onbeat.types import TrainGroup

AT_ONCE = 16
"""Numbers that torch computes at once here: two registers of AVX2 (environment.py)."""
_FEW_ROWS = (8, 40, 64, 173)
_BY_PLACE = {
    "silu", "gelu", "glu", "sigmoid", "log_sigmoid", "log_sigmoid_forward", "softplus", "mish", "elu", "hardswish",
    "tanh", "erf", "logaddexp", "logaddexp2", "atan2", "addcmul", "addcdiv", "lerp",
}  # fmt: skip
"""Functions of torch that may round a number by where it lies."""
_MOVING = {
    "_to_copy", "_unsafe_view", "abs", "alias", "amax", "amin", "arange", "bitwise_and", "bitwise_not",
    "bitwise_or", "cat", "clamp", "clone", "constant_pad_nd", "contiguous", "copy", "detach", "empty",
    "empty_like", "eq", "expand", "fill", "full", "full_like", "gather", "ge", "gt", "index", "index_select",
    "isinf", "isnan", "le", "lift_fresh", "logical_and", "logical_not", "logical_or", "lt", "masked_fill",
    "masked_scatter", "maximum", "minimum", "narrow", "ne", "new_zeros", "ones", "ones_like", "permute",
    "promote_types", "repeat_interleave", "reshape", "scalar_tensor", "scatter", "select", "slice", "split",
    "split_with_sizes", "squeeze", "stack", "t", "transpose", "unbind", "unsqueeze", "view", "where", "zeros",
    "zeros_like",
}  # fmt: skip
"""Functions of torch that move, compare and choose numbers, and round nothing."""
_TRIED = {
    "_linear_pointwise", "_scaled_dot_product_flash_attention_for_cpu", "add", "bmm", "cos", "div", "embedding",
    "exp", "index_add", "index_put", "log", "mean", "mul", "neg", "pow", "rsqrt", "sin", "sub", "sum",
}  # fmt: skip
"""Functions that round a number the same wherever it lies: what the models of the tests call, whose gradients are
compared there."""


class SharedCores:
    def __init__(self, alone: int, listen: Callable[[], None]) -> None:
        """`listen` takes in what has been heard of the generators (`beside`)."""
        self._alone = alone
        self._wanted = alone
        self._listen = listen

    def beside(self, num_generators: int) -> None:
        """So many work now, on the same cores."""
        self._wanted = beside_generators(self._alone, num_generators)

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """For the forward and backward of a micro-batch."""
        with before_each(self._follow):
            self._follow()
            try:
                yield
            finally:
                torch.set_num_threads(self._alone)

    def _follow(self) -> None:
        self._listen()
        if self._wanted != torch.get_num_threads():
            torch.set_num_threads(self._wanted)


def why_fixed(models: TriModel, most_rows: Sequence[int], counts: Sequence[int]) -> str | None:
    """None if gradients of a small group, attention, and products of few rows and of `most_rows`, come out the same
    with each of these numbers of threads, and what the model calls is known to do so with more tokens too; else what is
    not so."""
    layers = _linear_layers(models.policy)
    if _has_other_matrices(models.policy):
        return "the model has weights that are no linear layer's"
    trained = trained_parameters(models.policy).values()
    if any(each.numel() == 1 or (each.dim() == 2 and len(each) == 1) for each in trained):
        return "the gradient of a number by itself, or of a weight with one row, is a sum that threads share"
    whole = [_gradients(models)]
    if models.why_not_shared is None:
        whole += _attentions(models.policy, max(most_rows))
    with _Calls() as calls:
        for compute in whole:
            compute()
    if unknown := sorted(calls.names - _MOVING - _TRIED - _BY_PLACE):
        return f"nobody has tried {unknown[0]} with different numbers of threads"
    if other := sorted(calls.names & _BY_PLACE):
        sizes = sorted({size for layer in layers for size in layer.weight.shape})
        # An operation that is small takes fewer threads than there are: any number of them.
        for size, count in itertools.product(sizes, range(1, max(counts) + 1)):
            if size % (AT_ONCE * count):
                return f"{other[0]} of {size} numbers does not fill whole vectors for each of {count} threads"
    before = torch.get_num_threads()
    products = (compute for rows in (*_FEW_ROWS, *most_rows) for compute in _products(models.policy, rows))
    try:
        same = all(_agree(compute, counts) for compute in itertools.chain(products, whole))
    finally:
        torch.set_num_threads(before)
    return None if same else f"gradients by {' and '.join(map(str, counts))} threads have other bits"


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what a forward and a backward call, by torch's names."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # In place or not, forward or backward.
        self.names.add(function.overloadpacket.__name__.rstrip("_").removesuffix("_backward"))
        return function(*args, **(kwargs or {}))


def _linear_layers(model: Any) -> list[torch.nn.Linear]:
    """But the head, whose logits come in blocks of their own size."""
    head = model.get_output_embeddings()
    return [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear) and layer is not head]


def _has_other_matrices(model: Any) -> bool:
    """Such as a mixture's experts in one tensor, whose products nobody here has tried."""
    usual = (torch.nn.Linear, torch.nn.Embedding)
    others = (module for module in model.modules() if not isinstance(module, usual))
    return any(parameter.dim() > 1 for module in others for parameter in module.parameters(recurse=False))


def _agree(compute: Callable[[], list[torch.Tensor]], counts: Sequence[int]) -> bool:
    expected: list[torch.Tensor] | None = None
    for count in counts:
        torch.set_num_threads(count)
        found = compute()
        if expected is not None and not all(map(torch.equal, found, expected)):
            return False
        expected = found
    return True


def _gradients(models: TriModel) -> Callable[[], list[torch.Tensor]]:
    vocabulary: int = models.policy.config.get_text_config().vocab_size
    tokens = [(7 * n) % vocabulary for n in range(173)]
    completions = tuple(tuple(tokens[first:last]) for first, last in itertools.pairwise((64, 101, 138, 165, 173)))
    group = _group(tuple(tokens[:64]), completions)
    parameters = list(trained_parameters(models.policy).values())

    def compute() -> list[torch.Tensor]:
        logprobs = models.logprobs(models.layout((group,)))
        logprobs.policy_T.sum().backward()  # type: ignore[no-untyped-call]
        found = [parameter.grad for parameter in parameters if parameter.grad is not None]
        found += [logprobs.policy_T.detach(), logprobs.entropy_T]
        for parameter in parameters:
            parameter.grad = None
        return found

    return compute


def _group(prompt: tuple[int, ...], completions: tuple[tuple[int, ...], ...], slot: int = 0) -> TrainGroup:
    return TrainGroup(
        slot=slot, prompt_ids=prompt, completion_ids=completions,
        sampler_logprobs=tuple((0.0,) * len(each) for each in completions), advantages=(1.0,) * len(completions),
    )  # fmt: skip


def _attentions(model: Any, num_tokens: int) -> list[Callable[[], list[torch.Tensor]]]:
    """Forward and backward of a group that fills a pass, after a long prompt, and of two that begin alike."""
    config = model.config.get_text_config()
    heads: int = config.num_attention_heads
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    generator = torch.Generator().manual_seed(0)

    def attention(prompt_length: int, num_groups: int) -> Callable[[], list[torch.Tensor]]:
        length = max(4, (num_tokens // num_groups - prompt_length) // 8)
        completions = ((2,) * length,) * 7 + ((2,) * (length - 3),)
        layout = Layout.shared([_group((1,) * prompt_length, completions, slot) for slot in range(num_groups)])
        assert layout.segments is not None
        shared = SharedPrompt(layout.segments, layout.prefix_length)
        rows = layout.tokens_S_L.shape[1]
        query, key, value, grad = (
            torch.randn(1, number, rows, dim, generator=generator) for number in (heads, kv_heads, kv_heads, heads)
        )

        def compute() -> list[torch.Tensor]:
            leaves = [each.requires_grad_() for each in (query, key, value)]
            attended = shared.attend(0, query, key, value, dim**-0.5, None)
            return [attended.detach(), *torch.autograd.grad(attended, leaves, grad.transpose(1, 2))]

        return compute

    return [attention(LONG_PROMPT, 1), attention(LONG_PROMPT // 4, 2)]


def _products(model: Any, rows: int) -> Iterator[Callable[[], list[torch.Tensor]]]:
    """Forward and both backward, for every size of weight there is, and for a block of the head's words."""
    vocabulary, width = model.get_output_embeddings().weight.shape
    sizes = {tuple(layer.weight.shape) for layer in _linear_layers(model)} | {(min(BLOCK_WORDS, vocabulary), width)}
    generator = torch.Generator().manual_seed(0)
    for wide, deep in sorted(sizes):
        x, grad, weight = (torch.randn(*of, generator=generator) for of in ((rows, deep), (rows, wide), (wide, deep)))
        yield lambda x=x, grad=grad, weight=weight: [  # type: ignore[misc]
            linear(x, weight), product(grad, weight), product(grad.T, x)
        ]  # fmt: skip
