"""The embedded engine: samples groups from a transformers model, continuously batched, batch-invariant.

    add(request) ─▶ queue ─▶ admit: prefill the prompt once, give each sample a row
                                │
                    step(): one token for every row ─▶ a finished row gives its place to the last ─▶ Completion

One thread, no clock: `step` does what there is to do and returns the completions that ended. Groups are admitted
whole and in the order they were added, when enough rows are free.

What a sequence becomes depends on its prompt, its key (keyed.py) and the weights: never on its neighbours, its row,
or when it was admitted (see cache.py for how).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from onbeat.errors import InputError
from onbeat.keyed import sequence_key, uniform
from onbeat.rollout.cache import ATTENTION, MIN_ROWS, KVCache
from onbeat.types import Completion, GroupKey, GroupRequest, Sampling


@dataclass(slots=True)
class _Sequence:
    """One row: a sample being decoded."""

    request: GroupRequest
    sample: int
    key: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Where the last token, whose keys are not in the cache yet, stands."""
        return len(self.request.token_ids) + len(self.token_ids) - 1

    @property
    def finished(self) -> bool:
        sampling = self.request.sampling
        return len(self.token_ids) >= sampling.max_new_tokens or self.token_ids[-1] in sampling.stop_token_ids

    def draw(self) -> float:
        return uniform(self.key, len(self.token_ids))

    def completion(self, version: int) -> Completion:
        request = self.request
        return Completion(
            stream=request.stream,
            period=request.period,
            slot=request.slot,
            sample=self.sample,
            version=version,
            token_ids=tuple(self.token_ids),
            sampler_logprobs=tuple(self.logprobs),
            finish_reason="stop" if self.token_ids[-1] in request.sampling.stop_token_ids else "length",
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
    return None


class Engine:
    def __init__(self, model: Any, max_sequences: int) -> None:
        if (reason := why_not_decodable(model)) is not None:
            raise InputError(reason)
        model.set_attn_implementation(ATTENTION)
        self._model = model.eval()
        self._cache = KVCache(model.config.get_text_config(), max_sequences, model.dtype)
        self._max_sequences = max_sequences
        self._queue: deque[GroupRequest] = deque()
        self._rows: list[_Sequence] = []
        self.version = -1

    @property
    def idle(self) -> bool:
        return not self._rows and not self._queue

    def add(self, request: GroupRequest) -> None:
        if len(request.samples) > self._max_sequences:
            raise ValueError(f"a group of {len(request.samples)} does not fit the engine's {self._max_sequences} rows")
        self._queue.append(request)

    @torch.inference_mode()
    def cancel(self, key: GroupKey) -> None:
        """Forget what is left of a group; no completion of it will come."""
        self._queue = deque(waiting for waiting in self._queue if _name(waiting) != key)
        for row in reversed(range(len(self._rows))):
            if _name(self._rows[row].request) == key:
                self._release(row)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Admit what fits, decode one token per row, and return what ended."""
        while self._queue and len(self._rows) + len(self._queue[0].samples) <= self._max_sequences:
            self._admit(self._queue.popleft())
        ended = self._collect()
        if self._rows:
            self._decode()
            ended += self._collect()
        return ended

    def _admit(self, request: GroupRequest) -> None:
        """Prefill the prompt alone, into the first new row; copy it to its siblings; sample their first tokens."""
        length = len(request.token_ids)
        first = len(self._rows)
        input_ids = torch.zeros(1, max(length, MIN_ROWS), dtype=torch.long)
        input_ids[0, :length] = torch.tensor(request.token_ids)
        self._cache.prefill(first, length, length + request.sampling.max_new_tokens)
        logits = self._forward(
            input_ids, torch.arange(input_ids.shape[1])[None], logits_to_keep=torch.full((MIN_ROWS,), length - 1)
        )
        for row in range(first + 1, first + len(request.samples)):
            self._cache.copy(first, row, length)
        new = [_Sequence(request, sample, _key(request, sample)) for sample in request.samples]
        self._rows += new
        self._extend(new, logits[0, :1].expand(len(new), -1))

    def _decode(self) -> None:
        num_rows = max(len(self._rows), MIN_ROWS)
        input_ids = torch.zeros(num_rows, 1, dtype=torch.long)
        positions = torch.zeros(num_rows, dtype=torch.long)
        for row, sequence in enumerate(self._rows):
            input_ids[row, 0] = sequence.token_ids[-1]
            positions[row] = sequence.position
        self._cache.decode(positions)
        logits = self._forward(input_ids, positions[:, None])
        self._extend(self._rows, logits[: len(self._rows), 0])

    def _forward(self, input_ids: torch.Tensor, positions: torch.Tensor, **options: Any) -> torch.Tensor:
        output = self._model(
            input_ids=input_ids, position_ids=positions, use_cache=False, kv_cache=self._cache, **options
        )
        logits: torch.Tensor = output.logits
        return logits

    def _extend(self, sequences: list[_Sequence], logits: torch.Tensor) -> None:
        """Sample the next token of each sequence from its row of logits."""
        draws = torch.tensor([sequence.draw() for sequence in sequences], dtype=torch.float64)
        temperatures = [sequence.request.sampling.temperature for sequence in sequences]
        tokens, logprobs = sample(logits, torch.tensor(temperatures), draws)
        for sequence, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
            sequence.token_ids.append(token)
            sequence.logprobs.append(logprob)

    def _collect(self) -> list[Completion]:
        """Take out what has ended."""
        ended = []
        for row in reversed(range(len(self._rows))):
            if self._rows[row].finished:
                ended.append(self._rows[row].completion(self.version))
                self._release(row)
        return ended

    def _release(self, row: int) -> None:
        """Free a row by moving the last one into it."""
        last = self._rows.pop()
        if row < len(self._rows):
            self._cache.copy(len(self._rows), row, last.position)
            self._rows[row] = last


def sample(logits: torch.Tensor, temperatures: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their log-probabilities, by inverting each row's cumulative distribution at its draw.

    logits [N, V]; temperatures, draws [N], draws in [0, 1). A temperature of 0 takes the most likely token and
    reports its log-probability at temperature 1. Sums are in float64: rounding must not choose the token.
    """
    greedy = temperatures == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperatures)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = torch.minimum(draws[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
    tokens = torch.where(greedy, scaled.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _name(request: GroupRequest) -> GroupKey:
    return request.stream, request.period, request.slot


def _key(request: GroupRequest, sample: int) -> int:
    seed = request.sampling.seed
    return sequence_key(seed=seed, stream=request.stream, version=request.period, slot=request.slot, sample=sample)


MAX_GAP = 1e-3
"""Between the engine's log-probabilities and the model's own, in float32; rounding makes some 1e-5."""


@torch.inference_mode()
def _gap_to_own_forward(model: Any, request: GroupRequest, completion: Completion) -> float:
    model.set_attn_implementation("sdpa")
    try:
        logits = model(torch.tensor([request.token_ids + completion.token_ids]), use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(ATTENTION)
    predictions = torch.log_softmax(logits[len(request.token_ids) - 1 : -1], dim=-1)
    own = predictions.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return (own - torch.tensor(completion.sampler_logprobs)).abs().max().item()


def probe_row_invariance(model: Any) -> str | None:
    """Decode a few sequences alone and together, on this machine; None if not a bit differs, else what did.

    Run once per generator, with the first weights it loads. Raises InputError if the log-probabilities are not those of
    the model's own forward: then the engine does not know something that the architecture does.
    """
    vocabulary = model.config.get_text_config().vocab_size
    sampling = Sampling(temperature=1.0, max_new_tokens=4, stop_token_ids=(), seed=0)
    prompts = [tuple(1 + (7 * i + 13 * n) % (vocabulary - 1) for i in range(n)) for n in (3, 21, 40, 70)]
    requests = [
        GroupRequest(stream="eval", period=0, slot=slot, samples=(0, 1, 2), token_ids=prompt, sampling=sampling)
        for slot, prompt in enumerate(prompts)
    ]

    def run(batch: list[GroupRequest]) -> dict[tuple[int, int], Completion]:
        engine = Engine(model, max_sequences=3 * len(batch))
        for request in batch:
            engine.add(request)
        found = {}
        while not engine.idle:
            found.update({(completion.slot, completion.sample): completion for completion in engine.step()})
        return found

    together = run(requests[::-1])
    gap = max(_gap_to_own_forward(model, requests[slot], completion) for (slot, _), completion in together.items())
    if gap > MAX_GAP:
        raise InputError(
            f"the embedded generator does not compute {type(model).__name__}: its log-probabilities differ by "
            f"{gap:.2g} from those of the model's own forward"
        )
    for request in requests:
        for name, completion in run([request]).items():
            if completion != together[name]:
                return f"a sequence after {len(request.token_ids)} prompt tokens comes out differently in a batch"
    return None
