"""From which length on a prompt is worth attending to without copies (training/merged.py: LONG_PROMPT).

    python benchmarks/attention.py

One layer's attention of SmolLM2-135M (9 heads over 3 of keys and values, 64 numbers each) over a group, forward and
backward on all cores: with the prompt's keys copied for every completion, and merged. The two take turns; the best of
each is told, for what disturbs a turn of milliseconds only ever adds to it. Prints, and writes nothing.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from train import random_group

from onbeat.environment import prepare_this_process

SHAPES = [(45, 8, 15), (128, 8, 128), (192, 8, 32), (256, 8, 32), (256, 8, 128), (512, 8, 128), (512, 16, 32),
          (1024, 8, 64), (1024, 8, 256)]  # fmt: skip
"""Prompt, completions, their tokens."""
HEADS, KV_HEADS, DIM = 9, 3, 64
WAYS = {"copied": 1 << 30, "merged": 0}
"""Tokens from which on a prompt is long."""


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--repeats", type=int, default=25)
    repeats = flags.parse_args().repeats
    prepare_this_process()
    import torch

    from onbeat.batch.layout import Layout
    from onbeat.training import merged

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    for shape in SHAPES:
        layout = Layout.shared([random_group(shape, vocabulary=1000)])
        best_s = {way: float("inf") for way in WAYS}
        for _ in range(repeats):
            for way, merged.LONG_PROMPT in WAYS.items():
                best_s[way] = min(best_s[way], forward_and_backward(layout))
        told = ", ".join(f"{way} {1000 * seconds:.1f} ms" for way, seconds in best_s.items())
        more = best_s["merged"] / best_s["copied"] - 1
        print(
            "P {:4}  G {:2}  R {:3}: ".format(*shape)
            + f"{told}, {abs(100 * more):.0f} % {'more' if more > 0 else 'less'}",
            flush=True,
        )


def forward_and_backward(layout: Any) -> float:
    import torch

    from onbeat.training.attention import SharedPrompt

    num_tokens = layout.tokens_S_L.shape[1]
    query, key, value = (
        torch.randn(1, num_tokens, heads, DIM).transpose(1, 2).requires_grad_() for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    gradient = torch.randn(1, num_tokens, HEADS, DIM)
    prompt = SharedPrompt(layout.segments, layout.prefix_length)
    began_s = time.perf_counter()
    attended = prompt.attend(0, query, key, value, DIM**-0.5, None)
    torch.autograd.grad(attended, (query, key, value), gradient)
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
