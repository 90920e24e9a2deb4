"""What a generator proves with its first weights, before it serves: that the engine computes what the model does, and
that no bit of a sequence depends on its batch, nor on the number of threads.

    short     groups decoded together, and two samples of each by themselves: every bit compared
    far       steps long after the prompt, which would take long to reach, by one layer's attention on random keys
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from msgspec import structs

from onbeat.admission import positions
from onbeat.attention import heard_by_attention
from onbeat.device import HOST, device
from onbeat.errors import UndecodableError
from onbeat.lora import some_addition, with_values
from onbeat.rollout.cache import ATTENTION, CHUNK_TOKENS, CacheShape, GroupCache, Step, Tokens
from onbeat.rollout.engine import Engine, refuse_undecodable
from onbeat.rollout.invariant import StandIn, compiled_bits, stand_ins, unchanging
from onbeat.types import Completion, GroupRequest, Sampling

FAR_SAMPLES, FAR_PROMPT = 7, 40
"""Samples of a group, and tokens of its prompt, that a step by itself is tried with."""
FAR = (250, 1000)
"""Tokens after the prompt at which a step is tried by itself: to decode so many would take long."""
MAX_GAP = 1e-3
"""Between the engine's log-probabilities and the model's own, in float32; rounding makes some 1e-5."""


@torch.inference_mode()
def gap_to_own_forward(model: Any, request: GroupRequest, completion: Completion) -> float:
    model.set_attn_implementation("sdpa")
    try:
        logits = model(torch.tensor([request.token_ids + completion.token_ids]), use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(ATTENTION)
    predictions = torch.log_softmax(logits[len(request.token_ids) - 1 : -1], dim=-1)
    own = predictions.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return (own - torch.tensor(completion.sampler_logprobs)).abs().max().item()


class Invariance(NamedTuple):
    """What a sequence's bits do not depend on, for this model on this machine; else, what was seen."""

    rows: str | None
    """None: not on what shares its batch."""
    threads: str | None
    """None: not on the number of threads, of those that were tried."""


def probe_invariance(
    model: Any, other_threads: Sequence[int] = (), others: Sequence[StandIn] | None = None
) -> Invariance:
    """Decode two of a group by themselves, also with other numbers of threads, and in a batch; compare every bit.

    Run once per generator, with the first weights it loads; an adapter, which adds nothing at first, adds something for
    as long. `others` are the model's stand-ins, if there are any already. Raises UndecodableError if the
    log-probabilities are not those of the model's own forward: then the engine does not know something that the
    architecture does.
    """
    if others is None:
        refuse_undecodable(model)
        others = stand_ins(model)
    addition = some_addition(model)
    with with_values(model, addition):
        return _probe(model, other_threads, stand_ins(model, unchanging(others)) if addition else list(others))


class FarInto:
    """A step of one layer's attention, long after the prompt: on random keys, for some of a group's samples."""

    def __init__(self, shape: CacheShape, num_heads: int, length: int) -> None:
        """`num_heads` of queries."""
        self._shape = replace(shape, num_layers=1)
        self.length = length
        generator = torch.Generator(HOST).manual_seed(0)
        heads, dim = shape.num_heads, shape.dim

        def some(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, dim, generator=generator, device=HOST).to(device(), shape.dtype)

        self._prompt, self._own = some(2, heads, FAR_PROMPT), some(2, heads, FAR_SAMPLES, length)
        self._query, self._new = some(num_heads, FAR_SAMPLES), some(2, heads, FAR_SAMPLES)

    def attend(self, samples: list[int], window: int | None = None) -> torch.Tensor:
        cache = GroupCache(self._shape, FAR_PROMPT, len(samples), self.length + 1)
        cache.prompt[0] = self._prompt
        cache.own[0][:, :, : len(samples), : self.length] = self._own[:, :, samples]
        cache.length = self.length
        key, value = self._new[:, None, :, samples]
        return Step([Tokens(cache)], []).attend(0, self._query[None, :, samples], key, value, 1.0, window)[0]


def kernels_fingerprint(model: Any) -> str:
    """Equal where attention over a cache, norms and gates give equal bits (arithmetic.py): compiled, or by torch's
    operations."""
    step = FarInto(CacheShape.of(model), model.config.get_text_config().num_attention_heads, length=FAR_PROMPT)
    attended = step.attend(list(range(FAR_SAMPLES)))
    return hashlib.sha256(attended.cpu().numpy().tobytes() + compiled_bits(model)).hexdigest()[:16]


def _windows(model: Any) -> set[int | None]:
    heard = heard_by_attention(model)
    assert not isinstance(heard, str), heard
    return heard.windows


def _far_steps(model: Any) -> list[FarInto]:
    """Within the positions that the model knows."""
    config, shape = model.config.get_text_config(), CacheShape.of(model)
    most = positions(config.to_dict())
    lengths = [length for length in FAR if most is None or FAR_PROMPT + length < most]
    return [FarInto(shape, config.num_attention_heads, length) for length in lengths]


def _probe(model: Any, other_threads: Sequence[int], others: list[StandIn]) -> Invariance:
    threads = torch.get_num_threads()
    vocabulary = model.config.get_text_config().vocab_size
    sampling = Sampling(temperature=1.0, max_new_tokens=3, stop_token_ids=(), seed=0)
    most = positions(model.config.get_text_config().to_dict()) or CHUNK_TOKENS + 15
    lengths = [length for length in (1, 3, 12, 40, CHUNK_TOKENS + 12) if length + sampling.max_new_tokens <= most]
    prompts = [tuple(1 + (7 * i + 13 * n) % (vocabulary - 1) for i in range(n)) for n in lengths]
    requests = [
        GroupRequest(stream="eval", period=0, slot=slot, samples=tuple(range(7)), token_ids=prompt, sampling=sampling)
        for slot, prompt in enumerate(prompts)
    ]

    def run(batch: list[GroupRequest]) -> dict[tuple[int, int], Completion]:
        engine = Engine(model, max_sequences=7 * len(batch), stand_ins=others)
        for request in batch:
            engine.add(request)
        found = {}
        while not engine.idle:
            found.update({(completion.slot, completion.sample): completion for completion in engine.step()})
        return found

    together = run(requests[::-1])
    gap = max(gap_to_own_forward(model, request, together[request.slot, 0]) for request in requests)
    if gap > MAX_GAP:
        raise UndecodableError(
            f"the embedded generator does not compute {type(model).__name__}: its log-probabilities differ by "
            f"{gap:.2g} from those of the model's own forward"
        )

    steps = [(step, window) for step in _far_steps(model) for window in _windows(model)]
    far_together = [step.attend(list(range(FAR_SAMPLES)), window) for step, window in steps]

    def differs(num_threads: int) -> str | None:
        torch.set_num_threads(num_threads)
        try:
            for (step, window), together_then in zip(steps, far_together, strict=True):
                if not torch.equal(step.attend([2, 5], window), together_then[[2, 5]]):
                    return f"a sequence of {step.length} tokens comes out differently"
            for request in requests:
                for name, completion in run([structs.replace(request, samples=(2, 5))]).items():
                    if completion != together[name]:
                        return f"a sequence after {len(request.token_ids)} prompt tokens comes out differently"
            return None
        finally:
            torch.set_num_threads(threads)

    by_threads = next((f"{found} with {n} threads" for n in other_threads if (found := differs(n))), None)
    if other_threads and by_threads is None:
        return Invariance(None, None)
    by_rows = differs(threads)
    return Invariance(by_rows and f"{by_rows} in a batch", by_threads)
