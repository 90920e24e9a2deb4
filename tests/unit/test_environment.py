"""What the processes with torch are given before they start."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from onbeat.cores import generator_threads
from onbeat.environment import torch_environment

_CHECKPOINTED_PASS = """
import sys
from onbeat import environment

environment.COMPACT_BYTES = int(sys.argv[1])
environment.prepare_this_process()

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from onbeat.batch.layout import Layout
from onbeat.training.forward import checkpoint_layers, completion_logprobs, share_prompts
from onbeat.types import TrainGroup

def status_kib(key):
    return int(open("/proc/self/status").read().partition(key + ":")[2].split()[0])

config = LlamaConfig(
    vocab_size=64, hidden_size=128, intermediate_size=384,
    num_hidden_layers=40, num_attention_heads=4, num_key_value_heads=2,
)
model = LlamaForCausalLM(config).train()
checkpoint_layers(model)
share_prompts(model)
tokens = tuple(range(60)) * 2
group = TrainGroup(
    slot=0, prompt_ids=tokens, completion_ids=(tokens,) * 16,
    sampler_logprobs=((0.0,) * 120,) * 16, advantages=(1.0,) * 16,
)
layout = Layout.shared([group])
before = status_kib("VmRSS")
completion_logprobs(model, layout, 1.0)[0].sum().backward()
print((status_kib("VmHWM") - before) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_compact_process_uses_the_room_between_the_inputs_that_checkpointing_keeps_and_gives_back_what_it_freed():
    """40 layers' inputs are 39 MiB; a process that cannot use the room between them again takes 650 MiB."""
    keeps_all, gives_back = (_mebibytes_of_a_compact_pass(limit) for limit in (1 << 40, 1 << 20))
    assert keeps_all < 250
    assert gives_back < 0.9 * keeps_all


def _mebibytes_of_a_compact_pass(compact_bytes: int) -> int:
    environment = os.environ | torch_environment(compact=True)
    command = [sys.executable, "-c", _CHECKPOINTED_PASS, str(compact_bytes)]
    return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize(
    ("asked", "num_generators", "cores", "expected"),
    [(0, 1, 2, (2, 1)), (0, 2, 2, (1, 1)), (0, 3, 2, (1, 1)), (0, 1, 8, (8, 4)), (0, 3, 8, (2, 2)), (5, 2, 8, (5, 5))],
)
def test_a_generator_has_its_share_of_the_cores_unless_the_recipe_says_otherwise(
    asked: int, num_generators: int, cores: int, expected: tuple[int, int]
):
    assert generator_threads(asked, num_generators, cores) == expected
