"""bench-generate: the embedded engine, as a generator process runs it."""

from __future__ import annotations

import os
import time
from typing import Any

import contender
from peak import gemm_flops

from onbeat.environment import EXACT_ENVIRONMENT, importing, prepare_this_process

STOP = 2


def prepare(settings: dict[str, Any]) -> contender.Run:
    prepare_this_process()
    if not settings.get("invariant", True):
        for name in EXACT_ENVIRONMENT:
            del os.environ[name]
    with importing():
        import torch

        from onbeat import admission
        from onbeat.device import load_model, prepare_process
        from onbeat.rollout import cache, invariant
        from onbeat.rollout import engine as engines
        from onbeat.rollout.engine import Engine, _key, _Sequence
        from onbeat.rollout.probe import probe_invariance
        from onbeat.types import GroupRequest, Sampling

    prepare_process(settings["threads"])
    model = load_model(settings["model"])
    invariant_rows = settings.get("invariant", True)
    if not invariant_rows:
        admission.MIN_ROWS = cache.MIN_ROWS = engines.MIN_ROWS = 1
        cache._SHARED = 0
        invariant._ACTIVATIONS.clear()

    class FixedLengths(Engine):
        """Every completion ends where the workload says: its last token is made the stop token, no other is."""

        lengths: dict[int, int]

        def _extend(self, takers: list[tuple[_Sequence, int]], logits: torch.Tensor) -> None:
            super()._extend(takers, logits)
            for sequence, _ in takers:
                if len(sequence.token_ids) == self.lengths[sequence.key]:
                    sequence.token_ids[-1] = STOP
                elif sequence.token_ids[-1] == STOP:
                    sequence.token_ids[-1] = STOP + 1

    engine = FixedLengths(model, settings["in_flight"])
    engine.version = 0
    if invariant_rows:
        probe_invariance(model, (), engine.stand_ins())  # as a generator does with its first weights

    def run(job: dict[str, Any]) -> dict[str, Any]:
        lengths = job["lengths"]
        most = max(map(max, lengths))
        sampling = Sampling(temperature=1.0, max_new_tokens=most, stop_token_ids=(STOP,), seed=job["seed"])
        requests = [
            GroupRequest(
                stream="train", period=0, slot=slot, samples=tuple(range(len(lengths[slot]))),
                token_ids=tuple(prompt), sampling=sampling,
            )
            for slot, prompt in enumerate(job["prompts"])
        ]  # fmt: skip
        engine.lengths = {_key(r, sample): lengths[r.slot][sample] for r in requests for sample in r.samples}
        counts = len(requests) > 1  # the first job of all only tells when the first token is there
        before, peak = engine.num_tokens, gemm_flops() if counts else 0.0
        began_s = time.perf_counter()
        for request in requests:
            engine.add(request)
        while not engine.idle:
            engine.step()
        seconds = time.perf_counter() - began_s
        peak = (peak + gemm_flops()) / 2 if counts else 0.0
        return {"seconds": seconds, "tokens": engine.num_tokens - before, "gemm_flops": peak}

    return run


if __name__ == "__main__":
    contender.main(prepare, ["onbeat", "torch", "transformers"])
