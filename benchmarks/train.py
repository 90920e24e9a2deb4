"""Training time of a group: prompt copied for every completion, against prompt shared. One run, interleaved.

    make bench-train

SmolLM2-135M in float32 (recipes/smollm2.py fetches and caches it), policy forward and backward, all cores, in the
workers' environment. Replicated: the model's own forward over a batch of the group's completions, logits at completion
positions only, torch's own backward. Shared: onbeat's, as many groups in a micro-batch as trainer.pack_tokens puts
there; the time is that of one group. Medians of interleaved turns. Writes docs/bench-train.json.

Useful FLOPS are those of each token once, forward and backward, recomputation not counted; the peak is that of large
matrix products just before and just after the turn: the machine is not equally fast in every minute. Peak memory is
that of a process that trains 4,096 packed tokens, with the head in chunks and with the logits of all positions built,
gradient checkpointing off and on, in the environment workers get then, beside that of the libraries alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from harness import ROOT, code, gemm_flops, machine, smollm2

from onbeat.environment import prepare_this_process, torch_environment

SHAPES = [(45, 8, 15), (128, 8, 128), (512, 8, 128), (512, 16, 32)]
"""(prompt tokens, group size, completion tokens)"""
MEMORY_SHAPE = (512, 28, 128)
NUM_TOKENS = 4096
"""Of MEMORY_SHAPE, packed."""
REPEATS = 3
ENOUGH_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", choices=["nothing", "chunked", "all logits"])
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--shape", type=int, help="only the n-th shape, nothing written")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    arguments = parser.parse_args()
    if not os.environ.get("MKL_CBWR"):
        # Before torch is imported: in an environment like the workers'.
        environment = os.environ | torch_environment(compact=arguments.checkpointing)
        return subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode
    prepare_this_process()
    if arguments.memory:
        print(peak_memory(arguments.memory, arguments.checkpointing))
        return 0
    if arguments.shape is not None:
        measure_shape(load(), SHAPES[arguments.shape], arguments.repeats)
        return 0
    # Memory first: what follows keeps most of the machine's to itself.
    result = {"machine": machine(), "code": code(), "memory_bytes": measure_memory(), "shapes": [], "elisions": {}}
    model = load()
    result["shapes"] = [measure_shape(model, shape, arguments.repeats) for shape in SHAPES]
    measure_elisions(result, model, arguments.repeats)
    (ROOT / "docs" / "bench-train.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0


def measure_memory() -> dict[str, int]:
    """Peak bytes of a process of its own, for each way to train MEMORY_SHAPE."""
    found: dict[str, int] = {}
    for checkpointing in (False, True):
        for how in ("nothing", "chunked", "all logits"):
            flags = ["--memory", how, *(["--checkpointing"] if checkpointing else [])]
            environment = {key: value for key, value in os.environ.items() if key != "MKL_CBWR"}
            done = subprocess.run(
                [sys.executable, __file__, *flags], env=environment, capture_output=True, text=True, check=True
            )
            name = f"{how}, checkpointing {'on' if checkpointing else 'off'}"
            found[name] = int(done.stdout.split()[-1])
            print(f"peak memory, {name}: {found[name] / 2**30:.2f} GiB", flush=True)
    return found


def load() -> Any:
    import torch

    from onbeat.device import load_model

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    return load_model(smollm2()).train()


def random_group(shape: tuple[int, int, int], vocabulary: int, seed: int = 0) -> Any:
    from onbeat.types import TrainGroup

    rng = random.Random(seed)
    prompt, size, length = shape
    completions = tuple(tuple(rng.randrange(vocabulary) for _ in range(length)) for _ in range(size))
    return TrainGroup(
        slot=0,
        prompt_ids=tuple(rng.randrange(vocabulary) for _ in range(prompt)),
        completion_ids=completions,
        sampler_logprobs=tuple((0.0,) * length for _ in completions),
        advantages=tuple(rng.gauss(0, 1) for _ in completions),
    )


def measure_shape(model: Any, shape: tuple[int, int, int], repeats: int) -> dict[str, Any]:
    import torch

    from onbeat.batch.layout import Layout
    from onbeat.config import TrainerConfig
    from onbeat.training.forward import completion_logprobs, share_prompts

    prompt, size, length = shape
    in_pack = max(1, TrainerConfig().pack_tokens // (prompt + size * length))
    groups = [random_group(shape, model.config.vocab_size, seed) for seed in range(in_pack)]  # no two prompts alike
    plain, packed = Layout.plain(groups[:1]), Layout.shared(groups)

    def backward(logprobs_T: torch.Tensor, layout: Layout) -> None:
        (layout.advantage_T * logprobs_T / layout.length_T).sum().backward()

    def replicated() -> None:
        model.set_attn_implementation("sdpa")
        tokens = plain.tokens_S_L
        logits = model(tokens, use_cache=False, logits_to_keep=torch.arange(prompt - 1, prompt + length - 1)).logits
        backward(torch.log_softmax(logits, -1).gather(2, tokens[:, prompt:, None]).flatten(), plain)

    def shared() -> None:
        share_prompts(model)
        backward(completion_logprobs(model, packed, 1.0)[0], packed)

    times, peaks = interleaved({"replicated": replicated, "shared": shared}, repeats)
    times["shared"] = [seconds / in_pack for seconds in times["shared"]]
    middle = {name: median(values) for name, values in times.items()}
    token_ratio = size * (prompt + length) / (prompt + size * length)
    ratio = median(a / b for a, b in zip(times["replicated"], times["shared"], strict=True))
    useful = useful_flops(model.config, shape)
    shares = [useful / seconds / peak for seconds, peak in zip(times["shared"], peaks["shared"], strict=True)]
    share = median(shares)
    print(
        f"P {prompt:3d}  G {size:2d}  R {length:3d}: replicated {middle['replicated']:.2f} s, "
        f"shared {middle['shared']:.2f} s: {ratio:.2f} = {100 * ratio / token_ratio:.0f} % of the token ratio "
        f"{token_ratio:.2f}; useful FLOPS {100 * share:.0f} % of the GEMM peak "
        f"({100 * min(shares):.0f} to {100 * max(shares):.0f} in {len(shares)} turns)",
        flush=True,
    )
    return {
        "prompt": prompt,
        "group": size,
        "completion": length,
        "groups_in_pack": in_pack,
        "seconds": times,
        "ratio": ratio,
        "of_token_ratio": ratio / token_ratio,
        "token_ratio": token_ratio,
        "gemm_peak_flops": peaks["shared"],
        "useful_shares_of_peak": shares,
    }


def measure_elisions(result: dict[str, Any], model: Any, repeats: int) -> None:
    """Seconds of a group (45, 8, 15) with each of the passes that can be left out."""
    import torch

    from onbeat.batch.layout import Layout
    from onbeat.training.forward import completion_logprobs, share_prompts

    share_prompts(model)
    layout = Layout.shared([random_group(SHAPES[0], model.config.vocab_size)])

    def train() -> None:
        logprobs, _ = completion_logprobs(model, layout, 1.0)
        (layout.advantage_T * logprobs / layout.length_T).sum().backward()

    def forward_only() -> None:
        with torch.no_grad():
            completion_logprobs(model, layout, 1.0)

    times, _ = interleaved({"forward and backward": train, "one more forward": forward_only}, repeats)
    whole, forward = (median(values) for values in times.values())
    result["elisions"] = {
        "seconds": times,
        "old not run": forward / (whole + forward),
        "reference not run": forward / (whole + forward),
        "group without advantage not run": 1.0,
    }
    print(
        f"elisions, P 45 G 8 R 15: old or reference not run saves {forward:.2f} s of {whole + forward:.2f} s each; "
        f"a group without advantage, {whole:.2f} s (with a reference {whole + forward:.2f} s)",
        flush=True,
    )


def interleaved(
    ways: dict[str, Callable[[], None]], repeats: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Per way, A B A B …, after two unmeasured turns (memory): seconds of each turn, FLOPS of the machine around it.

    At least `repeats` turns, and up to three times as many if they are short.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, list[float]] = {name: [] for name in ways}
    began = time.perf_counter()
    for turn in range(2 + 3 * repeats):
        if turn >= 2 + repeats and time.perf_counter() - began > ENOUGH_S:
            break
        for name, way in ways.items():
            before = gemm_flops()
            start = time.perf_counter()
            way()
            seconds = time.perf_counter() - start
            if turn >= 2:
                times[name].append(seconds)
                peaks[name].append((before + gemm_flops()) / 2)
    return times, peaks


def useful_flops(config: Any, shape: tuple[int, int, int]) -> float:
    """Forward (1) and backward (2) of every token once; head at completion positions; attention over what is seen."""
    prompt, size, length = shape
    hidden, layers, dim = config.hidden_size, config.num_hidden_layers, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    per_token = 2 * hidden * (dim * (2 * heads + 2 * kv_heads) + 3 * config.intermediate_size)
    tokens = prompt + size * length
    seen = prompt * prompt / 2 + size * (length * prompt + length * length / 2)
    attention = 4 * heads * dim * seen
    head = 2 * hidden * config.vocab_size * size * length
    return 3 * (layers * (per_token * tokens + attention) + head)


def peak_memory(how: str, checkpointing: bool) -> int:
    """Bytes of this process at its largest, while it trains MEMORY_SHAPE once; `nothing`: libraries alone."""
    import torch

    from onbeat.batch.layout import Layout
    from onbeat.training import forward
    from onbeat.training.forward import checkpoint_layers, completion_logprobs, share_prompts

    def all_logits(head: Any, hidden: torch.Tensor, target: torch.Tensor, temperature: float) -> Any:
        """Of every position, as a model's own forward gives them: here of as many rows as there are positions."""
        others = hidden.new_zeros(NUM_TOKENS - len(hidden), hidden.shape[1])
        logprobs = torch.log_softmax(head(torch.cat([hidden, others])) / temperature, dim=-1)
        return logprobs[: len(target)].gather(1, target[:, None])[:, 0], None

    if how == "nothing":
        return _largest()
    if how == "all logits":
        forward.head_logprobs = all_logits
    model = load()
    if checkpointing:
        checkpoint_layers(model)
    share_prompts(model)
    layout = Layout.shared([random_group(MEMORY_SHAPE, model.config.vocab_size)])
    assert layout.tokens_S_L.shape[1] == NUM_TOKENS
    logprobs, _ = completion_logprobs(model, layout, 1.0)
    (layout.advantage_T * logprobs / layout.length_T).sum().backward()
    return _largest()


def _largest() -> int:
    status = Path("/proc/self/status").read_text()  # ru_maxrss would be the parent's, if that was larger
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    sys.exit(main())
