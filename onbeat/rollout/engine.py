"""The embedded engine: samples groups from a transformers model, continuously batched, batch-invariant.

    add(request) ─▶ queue ─▶ admitted, cache reserved ─▶ prompt in chunks ─▶ a token per sample and step ─▶ Completion

One thread, no clock: `step` is one forward over everything there is to do (a chunk or more of prompts, the next token
of every sample) and returns the completions that ended. Groups are admitted whole and in the order they were added,
when enough samples have ended and the cache has room for the longest they may become. Prompts take turns with tokens:
at most PREFILL_TOKENS of them per step while something is being decoded, so that a long prompt stalls nobody.

What a sequence becomes depends on its prompt, its key (keyed.py) and the weights: never on its neighbours, its row,
or when it was admitted (see cache.py for how).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from onbeat.admission import MIN_ROWS, Room, cache_tokens, needs, positions
from onbeat.attention import heard_by_attention, why_not_attended
from onbeat.errors import InputError, UndecodableError
from onbeat.keyed import sequence_key, uniform
from onbeat.rollout.cache import ATTENTION, CHUNK_TOKENS, CacheShape, Chunk, GroupCache, Step, Tokens
from onbeat.rollout.invariant import StandIn, stand_ins, standing_in, unchanging
from onbeat.rollout.sampling import sample
from onbeat.rollout.stop import Decode, ends_with_stop, no_text
from onbeat.types import Completion, FinishReason, GroupKey, GroupRequest

PREFILL_TOKENS = 128
"""Of prompts in one step, beside the samples being decoded."""
PREFILL_TOKENS_ALONE = 512
"""If nothing is being decoded."""


@dataclass(slots=True)
class _Sequence:
    """A sample being decoded."""

    sample: int
    temperature: float
    key: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def draw(self) -> float:
        return uniform(self.key, len(self.token_ids))


class _Group:
    """A group in the cache: its prompt first, then its samples, in the order in which the cache has them."""

    def __init__(self, request: GroupRequest, cache: GroupCache) -> None:
        self.request = request
        self.cache = cache
        self.prefilled = 0
        """Prompt tokens in the cache."""
        self.sequences = [
            _Sequence(sample, request.sampling.temperature, _key(request, sample)) for sample in request.samples
        ]

    @property
    def cache_tokens(self) -> int:
        """Reserved for it now: rows that were given back do not count."""
        return cache_tokens(len(self.request.token_ids), self.cache.rows, self.request.sampling.max_new_tokens)

    @property
    def decoding(self) -> bool:
        return self.prefilled == len(self.request.token_ids)

    def next_chunk(self) -> Chunk:
        return Chunk(self.cache, self.prefilled, min(self.prefilled + CHUNK_TOKENS, len(self.request.token_ids)))

    def ended(self, version: int, decode: Decode) -> list[Completion]:
        """Take out what has ended."""
        sampling = self.request.sampling
        completions, going_on = [], []
        for place, sequence in enumerate(self.sequences):
            tokens = sequence.token_ids
            stopped = bool(tokens) and (
                tokens[-1] in sampling.stop_token_ids or ends_with_stop(tokens, sampling.stop, decode)
            )
            if stopped or len(tokens) == sampling.max_new_tokens:
                completions.append(self._completion(sequence, version, "stop" if stopped else "length"))
            else:
                going_on.append(place)
        if completions and going_on:
            self.cache.keep(going_on)
        self.sequences = [self.sequences[place] for place in going_on]
        return completions

    def _completion(self, sequence: _Sequence, version: int, reason: FinishReason) -> Completion:
        request = self.request
        return Completion(
            stream=request.stream,
            period=request.period,
            slot=request.slot,
            sample=sequence.sample,
            version=version,
            token_ids=tuple(sequence.token_ids),
            sampler_logprobs=tuple(sequence.logprobs),
            finish_reason=reason,
        )


_DECODED_LAYERS = {"full_attention", "sliding_attention"}


def why_not_decodable(model: Any) -> str | None:
    """None if the engine can decode the model; else the reason, for the user."""
    name = type(model).__name__
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ()) - _DECODED_LAYERS
    if layers:
        return f"{name} has layers of a kind the embedded generator does not decode ({', '.join(sorted(layers))})"
    if not getattr(model, "_supports_attention_backend", False) or not hasattr(config, "num_attention_heads"):
        return f"{name} does not let its attention be replaced, which the embedded generator needs"
    heard = heard_by_attention(model)
    if (reason := why_not_attended(model, heard)) is not None:
        return reason
    assert not isinstance(heard, str)
    shape = CacheShape.of(model)
    dim = shape.dim
    if heard.heads != {shape.num_heads}:
        return (
            f"{name} has layers with {', '.join(map(str, sorted(heard.heads)))} heads of keys, and its configuration "
            f"says {shape.num_heads}: the embedded generator's cache has no place for them"
        )
    if heard.dims != {(dim, dim)}:
        found = ", ".join(f"{keys} and {values}" for keys, values in sorted(heard.dims))
        return (
            f"{name} has keys and values of {found} numbers a head, and its configuration says {dim}: the embedded "
            "generator's cache has no place for them"
        )
    return None


def refuse_undecodable(model: Any) -> None:
    if (reason := why_not_decodable(model)) is not None:
        raise UndecodableError(reason)


class Engine:
    def __init__(
        self,
        model: Any,
        max_sequences: int,
        cache_bytes: int = 4 << 30,
        decode: Decode = no_text,
        stand_ins: list[StandIn] | None = None,
    ) -> None:
        """`stand_ins` are those of the model's weights, if there are any already: then it is known to be decodable."""
        if stand_ins is None:
            refuse_undecodable(model)
        model.set_attn_implementation(ATTENTION)
        self._model = model.eval()
        self._decode = decode
        self._shape = CacheShape.of(model)
        per_token = self._shape.bytes_per_token
        config = model.config.get_text_config()
        self.room = Room(
            max_sequences=max_sequences, cache_tokens=cache_bytes // per_token, bytes_per_token=per_token,
            max_positions=positions(config.to_dict()), vocabulary=config.vocab_size,
        )  # fmt: skip
        self._queue: deque[GroupRequest] = deque()
        self._groups: list[_Group] = []
        """Admitted, in that order."""
        self._version = -1
        self._stand_ins = stand_ins or []
        self._packed = stand_ins is not None
        """Whether they are all there, with the weights of the current version: they are made when they are needed."""
        self.num_tokens = 0
        """Sampled since the engine was made."""

    @property
    def version(self) -> int:
        """Of the model's weights. Setting it says that they have changed."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = version
        self._stand_ins, self._packed = unchanging(self._stand_ins), False  # first the memory is given back

    def stand_ins(self) -> list[StandIn]:
        """For the current version."""
        if not self._packed:
            self._stand_ins, self._packed = stand_ins(self._model, self._stand_ins), True
        return self._stand_ins

    @property
    def idle(self) -> bool:
        return not self._groups and not self._queue

    def add(self, request: GroupRequest) -> None:
        if (reason := self.room.why_never(request)) is not None:
            raise InputError(reason)
        self._queue.append(request)

    def cancel(self, key: GroupKey) -> None:
        """Forget what is left of a group; no completion of it will come."""
        self._queue = deque(waiting for waiting in self._queue if waiting.key != key)
        self._groups = [group for group in self._groups if group.request.key != key]

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Admit what fits, run one forward, and return what ended."""
        self._admit()
        chunks, decoding = self._plan()
        if not chunks and not decoding:
            return []
        self._forward(chunks, decoding)
        ended = [completion for group in self._groups for completion in group.ended(self.version, self._decode)]
        self._groups = [group for group in self._groups if group.sequences]
        return ended

    def _admit(self) -> None:
        while self._queue:
            request = self._queue[0]
            rows = sum(len(group.sequences) for group in self._groups)
            taken = sum(group.cache_tokens for group in self._groups)
            if rows + len(request.samples) > self.room.max_sequences or taken + needs(request) > self.room.cache_tokens:
                return
            self._queue.popleft()
            sizes = (len(request.token_ids), len(request.samples), request.sampling.max_new_tokens)
            self._groups.append(_Group(request, GroupCache(self._shape, *sizes)))

    def _plan(self) -> tuple[list[tuple[_Group, Chunk]], list[_Group]]:
        """What the coming forward does: chunks of prompts, and groups that get a token."""
        decoding = [group for group in self._groups if group.decoding]
        budget = PREFILL_TOKENS if decoding else PREFILL_TOKENS_ALONE
        chunks: list[tuple[_Group, Chunk]] = []
        for group in self._groups:
            while not group.decoding:
                chunk = group.next_chunk()
                if chunk.num_tokens > budget:
                    return chunks, decoding
                chunks.append((group, chunk))
                budget -= chunk.num_tokens
                group.prefilled = chunk.last
        return chunks, decoding

    def _forward(self, chunks: list[tuple[_Group, Chunk]], decoding: list[_Group]) -> None:
        """One forward; every prompt that is complete and every decoding sample gets its next token."""
        token_ids: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []  # tokens whose logits are wanted
        takers: list[tuple[_Sequence, int]] = []  # and who samples from which of them
        for group in decoding:
            for sequence in group.sequences:
                takers.append((sequence, len(wanted)))
                wanted.append(len(token_ids))
                token_ids.append(sequence.token_ids[-1])
                positions.append(group.cache.prompt_length + group.cache.length)
        for group, chunk in chunks:
            token_ids += group.request.token_ids[chunk.first : chunk.last]
            positions += range(chunk.first, chunk.last)
            if chunk.last == len(group.request.token_ids):
                takers += [(sequence, len(wanted)) for sequence in group.sequences]
                wanted.append(len(token_ids) - 1)
        token_ids += [0] * (MIN_ROWS - len(token_ids))
        positions += [0] * (MIN_ROWS - len(positions))
        wanted += [0] * (MIN_ROWS - len(wanted))
        with standing_in(self.stand_ins()):
            output = self._model(
                input_ids=torch.tensor([token_ids]),
                position_ids=torch.tensor([positions]),
                use_cache=False,
                cache_step=Step([Tokens(group.cache) for group in decoding], [chunk for _, chunk in chunks]),
                logits_to_keep=torch.tensor(wanted),
            )
        for group in decoding:
            group.cache.length += 1
        self._extend(takers, output.logits[0])

    def _extend(self, takers: list[tuple[_Sequence, int]], logits: torch.Tensor) -> None:
        """Sample the next token of each sequence from its row of logits."""
        if not takers:
            return
        rows = [row for _, row in takers]
        mine = logits[: len(rows)] if rows == list(range(len(rows))) else logits[rows]
        draws = torch.tensor([sequence.draw() for sequence, _ in takers], dtype=torch.float64)
        tokens, logprobs = sample(mine, torch.tensor([sequence.temperature for sequence, _ in takers]), draws)
        for (sequence, _), token, logprob in zip(takers, tokens.tolist(), logprobs.tolist(), strict=True):
            sequence.token_ids.append(token)
            sequence.logprobs.append(logprob)
        self.num_tokens += len(takers)


def _key(request: GroupRequest, sample: int) -> int:
    seed = request.sampling.seed
    return sequence_key(seed=seed, stream=request.stream, version=request.period, slot=request.slot, sample=sample)
