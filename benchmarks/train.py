"""Training time of a group: prompt copied for every completion, against prompt shared. One run, interleaved.

    make bench-train

SmolLM2-135M in float32 (recipes/smollm2.py fetches and caches it), policy forward and backward, all cores, in the
workers' environment. Replicated: the model's own forward over a batch of the completions, logits at completion
positions only, torch's own backward of everything but linear layers. Shared: onbeat's. The products of linear layers
are the same for both (training/products.py). Each in micro-batches of as many groups as fit into
trainer.pack_tokens, one at least; the time is that of one group. Where more fit with the prompt shared, replicated also
runs over the same groups, more tokens at once. Turns alternate, and each of replicated is compared with the mean of the
shared ones before and after; told are the median of these ratios and the ratio of the medians. Writes
docs/bench-train.json.

*Possible* is the ratio of FLOPs: the head and most of attention see the completions in both forms. Prefix: a pack of
groups whose prompts begin alike, against one whose prompts do not. Elisions: a group through the trainer, with each
model forced to run, and without.

Useful FLOPS are those of each token once, forward and backward, recomputation not counted; the peak is that of large
matrix products just before and just after the turn: the machine is not equally fast in every minute. Told are the
median of the shares, turn by turn, and the share of the medians. Peak memory is
that of a process that trains a group of 4,096 packed tokens: as the trainer does by default, in parts of
trainer.max_tokens; in one pass, the head some words at a time; and in one pass with the logits of all positions built.
Gradient checkpointing off and on, in the environment workers get then, beside that of the libraries alone.
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
from typing import Any, NamedTuple

from harness import ROOT, code, machine, smollm2
from rivals.peak import gemm_flops

from onbeat.environment import prepare_this_process, torch_environment

SHAPES = [(45, 8, 15), (128, 8, 128), (512, 8, 128), (512, 16, 32)]
"""(prompt tokens, group size, completion tokens)"""
PREFIX_TOKENS = 25
MEMORY_SHAPE = (512, 28, 128)
NUM_TOKENS = 4096
"""Of MEMORY_SHAPE, packed."""
WAYS = ("nothing", "as by default", "in one pass", "all logits")
REPEATS = 3
ENOUGH_S = 170.0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", choices=WAYS)
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
    result["prefix"] = measure_prefix(model, arguments.repeats)
    del model
    result["elisions"] = measure_elisions(arguments.repeats)
    (ROOT / "docs" / "bench-train.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0


def measure_memory() -> dict[str, int]:
    """Peak bytes of a process of its own, for each way to train MEMORY_SHAPE."""
    found: dict[str, int] = {}
    for checkpointing in (False, True):
        for how in WAYS:
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
    from onbeat.device import load_model, prepare_process

    prepare_process(0)
    return load_model(smollm2())


def random_group(shape: tuple[int, int, int], vocabulary: int, seed: int = 0, alike: int = 0) -> Any:
    """The first `alike` tokens of the prompt are the same for every seed."""
    from onbeat.types import TrainGroup

    rng, prefix = random.Random(seed), random.Random(0)
    prompt, size, length = shape
    completions = tuple(tuple(rng.randrange(vocabulary) for _ in range(length)) for _ in range(size))
    return TrainGroup(
        slot=0,
        prompt_ids=tuple((prefix if at < alike else rng).randrange(vocabulary) for at in range(prompt)),
        completion_ids=completions,
        sampler_logprobs=tuple((0.0,) * length for _ in completions),
        advantages=tuple(rng.gauss(0, 1) for _ in completions),
    )


def measure_shape(model: Any, shape: tuple[int, int, int], repeats: int) -> dict[str, Any]:
    from onbeat.config import TrainerConfig

    prompt, size, length = shape
    room = TrainerConfig().pack_tokens
    in_pack = max(1, room // (prompt + size * length))
    counts = {"replicated": max(1, room // (size * (prompt + length)))}
    if in_pack > counts["replicated"]:
        counts["replicated, the same groups"] = in_pack
    groups = [random_group(shape, model.config.vocab_size, seed) for seed in range(in_pack)]  # no two prompts alike
    shared = shared_pass(model, groups)
    token_ratio = size * (prompt + length) / (prompt + size * length)
    found: dict[str, Any] = {"prompt": prompt, "group": size, "completion": length, "token_ratio": token_ratio}
    found |= {"groups_in_pack": counts | {"shared": in_pack}, "seconds": {}, "ratios": {}}
    turns: list[Turn] = []
    for name, count in counts.items():
        others, between = bracketed(replicated_pass(model, groups[:count]), shared, repeats)
        turns += between
        found["seconds"][name] = [each.seconds / count for each in others]
        found["ratios"][name] = [
            (each.seconds / count) / ((before.seconds + after.seconds) / 2 / in_pack)
            for each, before, after in zip(others, between, between[1:], strict=False)
        ]
    useful = flops(model.config, shape, shared=True)
    shares = [in_pack * useful / each.seconds / each.peak for each in turns]
    found["seconds"]["shared"] = [each.seconds / in_pack for each in turns]
    found |= {
        "possible": flops(model.config, shape, shared=False) / useful / token_ratio,
        "gemm_peak_flops": [each.peak for each in turns],
        "useful_shares_of_peak": shares,
        "useful_share_of_medians": in_pack
        * useful
        / median(each.seconds for each in turns)
        / median(each.peak for each in turns),
    }
    tell_shape(found)
    return found


def replicated_pass(model: Any, groups: list[Any]) -> Callable[[], None]:
    """The model's own forward, and torch's own backward."""
    import torch

    from onbeat.batch.layout import Layout
    from onbeat.training.gradients import gradients_in_place

    layout = Layout.plain(groups)
    tokens, prompt = layout.tokens_S_L, len(groups[0].prompt_ids)

    def run() -> None:
        model.set_attn_implementation("sdpa")
        wanted = torch.arange(prompt - 1, tokens.shape[1] - 1)
        with gradients_in_place():
            logits = model(tokens, use_cache=False, logits_to_keep=wanted).logits
        backward(torch.log_softmax(logits, -1).gather(2, tokens[:, prompt:, None]).flatten(), layout)

    return run


def shared_pass(model: Any, groups: list[Any]) -> Callable[[], None]:
    from onbeat.batch.layout import Layout
    from onbeat.training.forward import completion_logprobs, share_prompts

    layout = Layout.shared(groups)

    def run() -> None:
        share_prompts(model)
        backward(completion_logprobs(model, layout, 1.0)[0], layout)

    return run


def backward(logprobs_T: Any, layout: Any) -> None:
    (layout.advantage_T * logprobs_T / layout.length_T).sum().backward()


def tell_shape(found: dict[str, Any]) -> None:
    shares, of_medians = found["useful_shares_of_peak"], found["useful_share_of_medians"]
    shared_s = median(found["seconds"]["shared"])
    print("P {prompt:3d}  G {group:2d}  R {completion:3d}:".format(**found), f"shared {shared_s:.2f} s a group")
    print(
        f"  useful FLOPS {100 * median(shares):.1f} % of the GEMM peak ({100 * min(shares):.0f} to "
        f"{100 * max(shares):.0f} in {len(shares)} turns), {100 * of_medians:.1f} % by the medians of both"
    )
    for name, ratios in found["ratios"].items():
        seconds = median(found["seconds"][name])
        share, low, high = (100 * each / found["token_ratio"] for each in (median(ratios), min(ratios), max(ratios)))
        of_medians = 100 * seconds / shared_s / found["token_ratio"]
        print(
            f"  {name} {seconds:.2f} s: {median(ratios):.2f} = {share:.1f} % of the token ratio "
            f"{found['token_ratio']:.2f} ({low:.0f} to {high:.0f} in {len(ratios)} turns), {of_medians:.1f} % by the "
            f"medians of both; {100 * found['possible']:.0f} possible"
        )
    print(end="", flush=True)


def measure_prefix(model: Any, repeats: int) -> dict[str, Any]:
    """Seconds of a pack whose prompts begin with PREFIX_TOKENS alike, and of one whose prompts do not."""
    from onbeat.batch.layout import Layout

    def way(alike: int) -> Callable[[], None]:
        groups = [random_group(SHAPES[0], model.config.vocab_size, seed, alike) for seed in range(4)]
        assert Layout.shared(groups).prefix_length >= alike
        return shared_pass(model, groups)

    times = interleaved({"different": way(0), "alike": way(PREFIX_TOKENS)}, repeats)
    different, alike = (median(values) for values in times.values())
    print(
        f"prefix, 4 groups of P 45 G 8 R 15: {different:.2f} s if prompts differ, {alike:.2f} s if {PREFIX_TOKENS} "
        "tokens of each are the same",
        flush=True,
    )
    return {"tokens": PREFIX_TOKENS, "seconds": times}


def measure_elisions(repeats: int) -> dict[str, Any]:
    """Seconds the trainer takes for a group (45, 8, 15), with every model forced to run, and with each left out."""
    import torch

    from onbeat.recipe import from_tree
    from onbeat.training.trainer import PolicyTrainer
    from onbeat.types import MicroBatch

    config = from_tree(
        {
            "model": {"path": smollm2()},
            "data": {"path": "unused.jsonl"},
            "reward": {"functions": [{"path": "exact_match"}]},
            "algorithm": {"beta": 0.02},
            "schedule": {"updates_per_period": 2},
        }
    )
    trainer = PolicyTrainer(config, smollm2())
    group = random_group(SHAPES[0], trainer.model.config.vocab_size)
    microbatch = MicroBatch(period=0, update=0, index=0, rank=0, groups=(group,))
    gradients: dict[str, list[torch.Tensor]] = {}

    def way(name: str, *, old: bool, reference: bool) -> Callable[[], None]:
        def run() -> None:
            trainer._models._moved, trainer._models.at_start = old, not reference
            trainer.accumulate(microbatch)
            if name not in gradients:
                gradients[name] = [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]
            trainer.model.zero_grad(set_to_none=False)

        return run

    ways = {
        "all three": way("all three", old=True, reference=True),
        "old left out": way("old left out", old=False, reference=True),
        "reference left out": way("reference left out", old=True, reference=False),
        "both left out": way("both left out", old=False, reference=False),
    }
    times = interleaved(ways, repeats)
    seconds = {name: median(values) for name, values in times.items()}
    same = all(
        torch.equal(one, other)
        for found in gradients.values()
        for one, other in zip(found, gradients["all three"], strict=True)
    )
    told = ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
    print(f"elisions, P 45 G 8 R 15: {told}; a group without advantage, none of it; same bits: {same}", flush=True)
    return {"seconds": times, "same_bits": same}


class Turn(NamedTuple):
    seconds: float
    peak: float
    """FLOPS of the machine around it."""


def timed(way: Callable[[], None]) -> Turn:
    before = gemm_flops()
    start = time.perf_counter()
    way()
    seconds = time.perf_counter() - start
    return Turn(seconds, (before + gemm_flops()) / 2)


def bracketed(
    other: Callable[[], None], shared: Callable[[], None], repeats: int, unmeasured: int = 2
) -> tuple[list[Turn], list[Turn]]:
    """Turns of the one, and of the other before, between and after them: the machine's speed changes by half within
    seconds, so each is compared with its neighbours. At least `repeats`, up to four times as many if they are short.
    """
    for _ in range(unmeasured):  # memory
        shared()
        other()
    others, between = [], [timed(shared)]
    began = time.perf_counter()
    while len(others) < repeats or (len(others) < 4 * repeats and time.perf_counter() - began < ENOUGH_S):
        others.append(timed(other))
        between.append(timed(shared))
    return others, between


def interleaved(ways: dict[str, Callable[[], None]], repeats: int, unmeasured: int = 2) -> dict[str, list[float]]:
    """Per way, A B A B …, after some unmeasured turns (memory): seconds of each turn.

    At least `repeats` turns, and up to three times as many if they are short.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    began = time.perf_counter()
    for turn in range(unmeasured + 3 * repeats):
        if turn >= unmeasured + repeats and time.perf_counter() - began > ENOUGH_S:
            break
        for name, way in ways.items():
            seconds = timed(way).seconds
            if turn >= unmeasured:
                times[name].append(seconds)
    return times


def flops(config: Any, shape: tuple[int, int, int], *, shared: bool) -> float:
    """Forward (1) and backward (2); head at completion positions; attention over what is seen."""
    prompt, size, length = shape
    hidden, layers, dim = config.hidden_size, config.num_hidden_layers, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    per_token = 2 * hidden * (dim * (2 * heads + 2 * kv_heads) + 3 * config.intermediate_size)
    copies = 1 if shared else size
    tokens = copies * prompt + size * length
    seen = copies * prompt * prompt / 2 + size * (length * prompt + length * length / 2)
    attention = 4 * heads * dim * seen
    head = 2 * hidden * config.vocab_size * size * length
    return 3 * (layers * (per_token * tokens + attention) + head)


def peak_memory(how: str, checkpointing: bool) -> int:
    """Bytes of this process at its largest, while it trains MEMORY_SHAPE once; `nothing`: libraries alone."""
    import torch

    from onbeat.batch.layout import Layout
    from onbeat.batch.pack import split_group
    from onbeat.config import TrainerConfig
    from onbeat.training import forward
    from onbeat.training.forward import checkpoint_layers, completion_logprobs, share_prompts, split_prompt

    def all_logits(head: Any, hidden: torch.Tensor, target: torch.Tensor, temperature: float, *, keep: bool) -> Any:
        """Of every position, as a model's own forward gives them: here of as many rows as there are positions."""
        others = hidden.new_zeros(NUM_TOKENS - len(hidden), hidden.shape[1])
        logprobs = torch.log_softmax(head(torch.cat([hidden, others])) / temperature, dim=-1)
        return logprobs[: len(target)].gather(1, target[:, None])[:, 0], None

    def run(layout: Layout, *prompt: Any) -> None:
        backward(completion_logprobs(model, layout, 1.0, *prompt)[0], layout)

    if how == "nothing":
        return _largest()
    if how == "all logits":
        forward.head_logprobs = all_logits
    model = load()
    if checkpointing:
        checkpoint_layers(model)
    share_prompts(model)
    group = random_group(MEMORY_SHAPE, model.config.vocab_size)
    assert group.num_tokens == NUM_TOKENS
    if how == "as by default":
        with split_prompt(model, group.prompt_ids) as prompt:
            for part in split_group(group, TrainerConfig().max_tokens):
                run(Layout.completions_only(part), prompt)
    else:
        run(Layout.shared([group]))
    return _largest()


def _largest() -> int:
    status = Path("/proc/self/status").read_text()  # ru_maxrss would be the parent's, if that was larger
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    sys.exit(main())
