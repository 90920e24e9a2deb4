"""onbeat's own workers with one of its savings taken away: entries for the launcher, made for the ablation.

    prompt_copied    the trainer runs every completion with its own copy of the prompt
    nothing_elided   old policy and reference run over every micro-batch, whether they can matter or not
    by_torch         products of training by torch, which on an x86-64 CPU means MKL, instead of oneDNN
    all_of_it        the three of them
    transformers     the generator samples by transformers' `generate`, as many sequences at a time as it may have

`Launching` starts the first four in place of the usual trainer.
"""

from __future__ import annotations

import socket
from typing import Any

TRAINER = "onbeat.training.worker:main"
OFF = "switched off by the benchmark"


class Launching:
    """A launcher that starts another trainer; everything else is as it was."""

    def __init__(self, launcher: Any, trainer: str) -> None:
        """`trainer`: the name of a function here."""
        self._launcher = launcher
        self._trainer = f"{__name__}:{trainer}"

    async def spawn(self, *, entry: str, **order: Any) -> Any:
        return await self._launcher.spawn(entry=self._trainer if entry == TRAINER else entry, **order)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launcher, name)


def prompt_copied(sock: socket.socket, settings: bytes) -> None:
    from onbeat.training import tri_model, worker

    tri_model.why_not_shared = lambda model: OFF
    worker.main(sock, settings)


def nothing_elided(sock: socket.socket, settings: bytes) -> None:
    from onbeat.training import trainer, worker
    from onbeat.training.tri_model import TriModel

    class Always(TriModel):
        """All three models run."""

        def __init__(self, *arguments: Any, **how: Any) -> None:
            super().__init__(*arguments, **how | {"needs_old": True, "needs_reference": True})

        def open_period(self) -> None:
            super().open_period()
            self.before_step()  # it keeps the weights, and says that they may have moved since
            self.at_start = False

    trainer.TriModel = Always
    worker.main(sock, settings)


def by_torch(sock: socket.socket, settings: bytes) -> None:
    from onbeat.training import products, worker

    products._HAVE_ONEDNN = False
    worker.main(sock, settings)


def all_of_it(sock: socket.socket, settings: bytes) -> None:
    from onbeat.training import products, tri_model

    products._HAVE_ONEDNN = False
    tri_model.why_not_shared = lambda model: OFF
    nothing_elided(sock, settings)


def transformers(sock: socket.socket, settings: bytes) -> None:
    import torch

    from onbeat.rollout import worker
    from onbeat.rollout.engine import Engine
    from onbeat.types import Completion, GroupRequest

    class Generate(Engine):
        """Batch after batch; no log-probabilities (the trainer does not need them)."""

        @torch.inference_mode()
        def step(self) -> list[Completion]:
            batch: list[GroupRequest] = []
            while (
                self._queue and sum(len(each.samples) for each in [*batch, self._queue[0]]) <= self.room.max_sequences
            ):
                batch.append(self._queue.popleft())
            rows = [(request, sample) for request in batch for sample in request.samples]
            longest = max(len(request.token_ids) for request in batch)
            padding = [longest - len(request.token_ids) for request, _ in rows]
            tokens = torch.tensor([[0] * pad + list(r.token_ids) for pad, (r, _) in zip(padding, rows, strict=True)])
            mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
            self._model.set_attn_implementation("sdpa")
            sampling = batch[0].sampling
            found = self._model.generate(
                input_ids=tokens, attention_mask=mask, do_sample=True, temperature=sampling.temperature, top_k=0,
                top_p=1.0, max_new_tokens=sampling.max_new_tokens, eos_token_id=list(sampling.stop_token_ids) or None,
                pad_token_id=0,
            )  # fmt: skip
            return [self._completed(*row, ids) for row, ids in zip(rows, found[:, longest:].tolist(), strict=True)]

        def _completed(self, request: GroupRequest, sample: int, ids: list[int]) -> Completion:
            stops = [place for place, token in enumerate(ids) if token in request.sampling.stop_token_ids]
            ids = ids[: stops[0] + 1] if stops else ids
            self.num_tokens += len(ids)
            return Completion(
                stream=request.stream, period=request.period, slot=request.slot, sample=sample, version=self.version,
                token_ids=tuple(ids), sampler_logprobs=(0.0,) * len(ids), finish_reason="stop" if stops else "length",
            )  # fmt: skip

    worker.Engine = Generate
    worker.main(sock, settings)
