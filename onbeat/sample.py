"""`onbeat sample`: talk to a model, by the engine that generates in training."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TextIO

import torch
from msgspec import structs

from onbeat.device import load_model, prepare_process
from onbeat.prompts.codec import Codec
from onbeat.rollout.engine import Engine
from onbeat.types import GroupRequest, Messages, Sampling


class Sampler:
    def __init__(self, model_dir: str, *, temperature: float, max_new_tokens: int, seed: int) -> None:
        prepare_process(0)
        self._codec = Codec(Path(model_dir))
        self._sampling = Sampling(
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            stop_token_ids=self._codec.stop_token_ids,
            seed=seed,
        )
        self._engine = Engine(load_model(model_dir), max_sequences=1)
        self._engine.version = 0
        self._slots = itertools.count()

    def complete(self, text: str) -> str:
        """The answer, if the model chats; else what it goes on with."""
        return self._answer([{"role": "user", "content": text}] if self._codec.chats else text)

    def talk(self, lines: TextIO, out: TextIO) -> None:
        """Line by line until the input ends; a model that chats remembers what was said."""
        said: Messages = []
        asks = lines.isatty()
        while True:
            if asks:
                print("> ", end="", file=out, flush=True)
            line = lines.readline()
            if not line:
                return
            if not line.strip():
                continue
            said.append({"role": "user", "content": line.strip()})
            answer = self._answer(said if self._codec.chats else line.strip())
            said.append({"role": "assistant", "content": answer})
            print(answer, file=out, flush=True)

    @torch.inference_mode()
    def _answer(self, prompt: str | Messages) -> str:
        slot = next(self._slots)
        token_ids, sampling = self._codec.encode(prompt), self._sampling
        if (most := self._codec.max_positions) is not None and len(token_ids) < most:
            sampling = structs.replace(sampling, max_new_tokens=min(sampling.max_new_tokens, most - len(token_ids)))
        self._engine.add(
            GroupRequest(stream="eval", period=0, slot=slot, samples=(0,), token_ids=token_ids, sampling=sampling)
        )
        while not (done := self._engine.step()):
            pass
        return self._codec.decode(done[0].token_ids)
