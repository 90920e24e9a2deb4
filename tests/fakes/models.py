"""Small random models of several architectures, and the requests to make of them. Real transformers classes."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from onbeat.rollout.engine import Engine
from onbeat.types import Completion, GroupRequest, Sampling

VOCABULARY = 96
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.2,  # far from uniform, so that a wrong bit shows
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 16}),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_key_value_heads": 1,
            "intermediate_size": 100,  # no multiple of a vector register
        },
    ),
    "phi3": (Phi3Config, Phi3ForCausalLM, {"head_dim": 16}),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {"head_dim": 16}),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM, {"head_dim": 16, "no_rope_layers": [1, 0]}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "experts_implementation": "eager",
            "output_router_logits": False,
        },
    ),
}
ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral")
ALL_ARCHITECTURES = tuple(_FAMILIES)


@cache
def tiny_model(architecture: str) -> Any:
    """A random model, the same in every test."""
    config_class, model_class, extra = _FAMILIES[architecture]
    torch.manual_seed(0)
    return model_class(config_class(**{**_SIZES, **extra})).eval()


def sampling(max_new_tokens: int = 8, temperature: float = 1.0, stops: tuple[int, ...] = (), seed: int = 0) -> Sampling:
    return Sampling(temperature=temperature, max_new_tokens=max_new_tokens, stop_token_ids=stops, seed=seed)


def request(slot: int, prompt: tuple[int, ...], group_size: int, how: Sampling) -> GroupRequest:
    samples = tuple(range(group_size))
    return GroupRequest(stream="train", period=0, slot=slot, samples=samples, token_ids=prompt, sampling=how)


def drain(engine: Engine) -> dict[tuple[int, int], Completion]:
    """Everything the engine still has to say, by (slot, sample)."""
    found: dict[tuple[int, int], Completion] = {}
    while not engine.idle:
        found.update({(c.slot, c.sample): c for c in engine.step()})
    return found


def generate_alone(model: Any, wanted: GroupRequest) -> dict[tuple[int, int], Completion]:
    engine = Engine(model, max_sequences=len(wanted.samples))
    engine.version = 0
    engine.add(wanted)
    return drain(engine)
