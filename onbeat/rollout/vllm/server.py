"""A vLLM server, seen over HTTP: started here in vLLM's own environment, or running already. We never import vLLM.

    worker.py ── HTTP over a Unix socket, or loopback ──▶ API server ─▶ engine ─▶ its workers (+ our extension)

Its control routes (pause, load, reset) have no lock, so a server that listens to other machines is refused. What
onbeat needs of a server it did not start is said in docs/vllm.md, and checked here: version, model, extension, which
log-probabilities it reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import ipaddress
import itertools
import json
import os
import re
import shutil
import signal
import socket
import sys
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx2
import msgspec

from onbeat.cluster.forkserver import die_with_parent
from onbeat.config import Config
from onbeat.cores import generator_threads
from onbeat.environment import TORCH_ENVIRONMENT
from onbeat.errors import InputError, WorkerError
from onbeat.rollout.vllm.folders import make_folder

VERSIONS = "0.32."
SERVED_NAME = "policy"
_EXTENSION = Path(__file__).parent / "extension"
_SOCKETS = "onbeat-vllm-"
_CONTROL_S = 600.0
"""For an answer to anything but a request for tokens."""
_MAX_LINE_BYTES = 1 << 24
_START_S = 900.0
"""A compiled server on a slow machine takes minutes."""
_END_S = 10.0
_TAIL_LINES = 400


class Counts(NamedTuple):
    sampled: int
    """Tokens."""
    computed: int
    """Those of prompts, too."""


class ServerDescription(msgspec.Struct, frozen=True):
    """As the extension tells it."""

    architectures: list[str]
    sizes: dict[str, int | None]
    logprobs_mode: str
    max_model_len: int
    max_num_seqs: int
    max_lora_rank: int


class Server:
    def __init__(self, place: str) -> None:
        """`place`: unix:PATH, or http://HOST:PORT of this machine."""
        self.place = place
        self.version = self.model = ""
        """As `check` found it: of vLLM, and the name under which the model is served."""
        self._process: asyncio.subprocess.Process | None = None
        self._copying: asyncio.Task[None] | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        socket_path = place.removeprefix("unix:") if place.startswith("unix:") else None
        self._client = httpx2.AsyncClient(
            base_url="http://vllm" if socket_path else place,
            # A connection each: the server ends those that are idle for some seconds, perhaps as we send.
            transport=httpx2.AsyncHTTPTransport(
                uds=socket_path, limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0)
            ),
            timeout=None,  # see _sent
        )

    @classmethod
    async def start(cls, config: Config, model_dir: str, name: str) -> Server:
        folder = make_folder(_SOCKETS)
        server = cls(f"unix:{folder}/server.sock")
        try:
            await server._begin(config, model_dir, name, folder)
        except BaseException:
            await server.close()
            raise
        return server

    async def _begin(self, config: Config, model_dir: str, name: str, folder: Path) -> None:
        python = Path(config.generator.vllm.environment) / "bin" / "python"
        self._process = await asyncio.create_subprocess_exec(
            str(python.absolute()),
            *command_line(config, model_dir, f"{folder}/server.sock"),
            env=server_environment(config, claim_slot(), folder),
            limit=_MAX_LINE_BYTES,
            start_new_session=True,  # a terminal's Ctrl-C is not for it
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            preexec_fn=functools.partial(die_with_parent, os.getpid(), signal.SIGTERM),
        )
        self._copying = asyncio.create_task(self._copy_log())
        try:
            async with asyncio.timeout(_START_S):
                while not await self.healthy():
                    if self._process.returncode is not None:
                        raise WorkerError(await self.why_ended())
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise WorkerError(f"{name}: vLLM did not start within {_START_S:.0f} s", self.log_tail()) from None

    async def _copy_log(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            text = line.decode(errors="replace")
            self._tail.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()

    def log_tail(self) -> str:
        return "".join(list(self._tail)[-20:]).rstrip()

    async def ended(self) -> None:
        """Until a server of ours has ended; for ever if it is not ours."""
        if self._process is None:
            await asyncio.Event().wait()
        else:
            await self._process.wait()

    async def why_ended(self) -> str:
        assert self._process is not None
        if self._copying is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._copying), 2.0)
        status, cause = self._process.returncode, why(self._tail)
        if status == -signal.SIGKILL or "memory" in cause.lower():
            cause += " (if it was memory: generator.cache_gib and generator.max_sequences decide how much it takes)"
        return f"vLLM ended with status {status}: {cause}"

    async def close(self) -> None:
        """A server of ours ends, and those it has started with it."""
        await self._client.aclose()
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # whatever it has left behind
        await self._process.wait()
        if self._copying is not None:
            self._copying.cancel()
        shutil.rmtree(Path(self.place.removeprefix("unix:")).parent, ignore_errors=True)

    # -- what it is asked --------------------------------------------------------------------------------------

    async def healthy(self) -> bool:
        try:
            return (await self._client.get("/health", timeout=5.0)).status_code == 200
        except httpx2.TransportError:
            return False

    async def get(self, route: str) -> Any:
        return self._content(await self._sent("GET", route), route)

    async def post(self, route: str, body: Any = None, **query: str) -> Any:
        return self._content(await self._sent("POST", route, body, query), route)

    async def generate(self, body: Any) -> Any:
        """However long it takes: who is silent for too long is given up by the pool."""
        route = "/inference/v1/generate"
        return self._content(await self._sent("POST", route, body, timeout_s=None), route)

    async def _sent(
        self,
        method: str,
        route: str,
        body: Any = None,
        query: dict[str, str] | None = None,
        timeout_s: float | None = _CONTROL_S,
    ) -> httpx2.Response:
        content = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"} if content is not None else {}
        try:
            return await self._client.request(
                method, route, content=content, params=query, headers=headers, timeout=timeout_s
            )
        except httpx2.TransportError as error:
            raise WorkerError(f"vLLM at {self.place} does not answer {route} ({type(error).__name__})") from None

    def _content(self, response: httpx2.Response, route: str) -> Any:
        if response.status_code != 200:
            raise WorkerError(f"vLLM at {self.place} answered {route} with {response.status_code}: {_said(response)}")
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return msgspec.json.decode(response.content) if is_json and response.content else None

    async def rpc(self, method: str, **arguments: str | int) -> list[Any]:
        """Call a method on every worker of the server."""
        answer = await self.post("/collective_rpc", {"method": method, "kwargs": arguments})
        results: list[Any] = answer["results"]
        return results

    async def counts(self) -> Counts:
        """Since the server was started."""
        text = (await self._sent("GET", "/metrics")).text

        def total(name: str) -> int:
            found = re.findall(rf"^vllm:{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
            return int(sum(map(float, found)))

        return Counts(total("generation_tokens_total"), total("iteration_tokens_total_sum"))

    # -- whether it will do ------------------------------------------------------------------------------------

    async def check(self, config: Config, model_dir: str) -> ServerDescription:
        """Raises InputError with what is wrong with the server and how to start it instead."""
        self.version = (await self.get("/version"))["version"]
        if not self.version.startswith(VERSIONS):
            raise InputError(f"the server at {self.place} is vLLM {self.version}; onbeat drives {VERSIONS}x")
        answer = await self._sent("POST", "/collective_rpc", {"method": "onbeat_describe"})
        if answer.status_code != 200:
            raise InputError(
                f"the server at {self.place} does not have onbeat's extension ({answer.status_code}: {_said(answer)}); "
                f"start it with VLLM_SERVER_DEV_MODE=1 PYTHONPATH={_EXTENSION} and --worker-extension-cls "
                "onbeat_vllm.Extension"
            )
        found = msgspec.convert(msgspec.json.decode(answer.content)["results"][0], ServerDescription)
        self.model = (await self.get("/v1/models"))["data"][0]["id"]
        answer = await self._sent("POST", "/inference/v1/generate", {})
        if answer.status_code in (403, 404):
            raise InputError(f"the server at {self.place} takes no tokens; start it with --enable-scale-out")
        wanted = json.loads((Path(model_dir) / "config.json").read_text())
        text = wanted.get("text_config", wanted)
        model = (wanted.get("architectures"), {name: text.get(name) for name in found.sizes})
        if model != (found.architectures, found.sizes):
            raise InputError(
                f"the server at {self.place} serves another model: {found.architectures} {found.sizes} instead of "
                f"{model[0]} {model[1]} (model.path)"
            )
        if found.logprobs_mode != "processed_logprobs":
            raise InputError(
                f"the server at {self.place} reports {found.logprobs_mode}, which are not of the distribution it "
                "samples from; start it with --logprobs-mode processed_logprobs"
            )
        if found.max_model_len < (longest := longest_sequence(config, model_dir)):
            raise InputError(
                f"the server at {self.place} takes sequences of {found.max_model_len} tokens at most; start it with "
                f"--max-model-len {longest}, or lower data.max_prompt_tokens or sampling.max_new_tokens"
            )
        if found.max_lora_rank < config.lora.rank:
            raise InputError(
                f"the server at {self.place} takes adapters of rank {found.max_lora_rank} at most; start it with "
                f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-lora-rank {_lora_rank(config.lora.rank)}"
            )
        return found


def check_config(config: Config) -> None:
    """What can be known before a server is there. Raises InputError."""
    vllm, most = config.generator.vllm, config.generator.bounds[1]
    for place in vllm.servers:
        check_place(place)
    if vllm.servers and most > len(vllm.servers):
        raise InputError(f"generator.vllm.servers names {len(vllm.servers)} servers; generator.count wants {most}")
    if not vllm.servers and not (Path(vllm.environment) / "bin" / "python").exists():
        raise InputError(
            f"generator.vllm.environment = {vllm.environment!r}: no Python environment there; `make vllm-env` makes "
            "one with vLLM for CPUs (docs/vllm.md)"
        )
    command_line(config, "", "")


def check_place(place: str) -> None:
    """Raises InputError unless the server is one that nobody elsewhere can reach."""
    if place.startswith("unix:"):
        return
    with contextlib.suppress(ValueError):
        url = urlsplit(place)
        host, port = url.hostname or "", url.port or 80
        if url.scheme == "http" and (host == "localhost" or ipaddress.ip_address(host).is_loopback):
            if open_to_others(port):
                raise InputError(
                    f"generator.vllm.servers: the server at {place} listens to other machines, too, and its control "
                    "routes have no lock; start it with --host 127.0.0.1 or --uds PATH"
                )
            return
    raise InputError(
        f"generator.vllm.servers: {place!r} is neither unix:PATH nor http://127.0.0.1:PORT. vLLM's control routes have "
        "no lock, so onbeat uses servers of its own machine alone; on another one, `onbeat worker --join` starts one"
    )


def open_to_others(port: int) -> bool:
    """Whether somebody on this machine listens at the port on more than loopback."""
    for table, is_loopback in (
        ("tcp", lambda address: address.endswith("7F")),
        ("tcp6", lambda address: address in ("00000000000000000000000001000000", "0000000000000000FFFF00000100007F")),
    ):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                address, _, number = fields[1].partition(":")
                if fields[3] == "0A" and int(number, 16) == port and not is_loopback(address):
                    return True
    return False


def command_line(config: Config, model_dir: str, socket_path: str) -> list[str]:
    """What follows `python`."""
    generator, vllm = config.generator, config.generator.vllm
    ours: dict[str, Any] = {
        "uds": socket_path,
        "enable-scale-out": True,  # tokens in, tokens out
        "served-model-name": SERVED_NAME,
        "worker-extension-cls": "onbeat_vllm.Extension",
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
        "tensor-parallel-size": vllm.tensor_parallel,
        "max-num-seqs": max(generator.max_sequences, config.algorithm.group_size),
    }
    if vllm.transfer == "nccl":
        ours["weight-transfer-config"] = '{"backend": "nccl"}'
    if config.lora.rank:
        ours |= {"enable-lora": True, "max-lora-rank": _lora_rank(config.lora.rank), "max-loras": 1}
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "enforce-eager": True,
        "block-size": 32,  # the CPU's 128 would share no short prompt
        "max-model-len": longest_sequence(config, model_dir),
        "kv-cache-memory-bytes": int(generator.cache_gib * 2**30),
        "disable-uvicorn-access-log": True,
    }
    if model_dir and not any(Path(model_dir).glob("*.safetensors")):
        defaults["load-format"] = "dummy"  # on another machine: the weights come before anything is served
    theirs = {name.replace("_", "-"): value for name, value in vllm.arguments.items()}
    for name in theirs:
        plain = name.removeprefix("no-")
        if any(own.startswith(plain) for own in (*ours, *_NOT_FOR_RECIPES)):  # vLLM understands beginnings of names
            raise InputError(
                f"generator.vllm.arguments.{name.replace('-', '_')}: onbeat sets this itself; the keys of [generator] "
                "say how many sequences, how much cache and how many ranks"
            )
    # Not `vllm serve`, which does not start with the build for CPUs: it looks for a package named "vllm".
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", model_dir]
    for name, value in (ours | defaults | theirs).items():
        if value is True:
            words.append(f"--{name}")
        elif value is False:
            words += [] if name in defaults else [f"--no-{name}"]
        else:
            words += [f"--{name}", str(value)]
    return words


_NOT_FOR_RECIPES = (
    "host", "port", "model", "api-key", "config", "load-format", "disable-log-stats", "data-parallel-size",
    "api-server-count", "tokens-only", "skip-tokenizer-init",
    "trust-remote-code",
)  # fmt: skip


def longest_sequence(config: Config, model_dir: str) -> int:
    """That may occur: no longer than the recipe allows, and than the model has positions for."""
    wanted = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    try:
        model = json.loads((Path(model_dir) / "config.json").read_text())
    except OSError:
        return wanted
    return min(wanted, model.get("text_config", model).get("max_position_embeddings") or wanted)


def _lora_rank(rank: int) -> int:
    """The next one that vLLM has."""
    return next((size for size in (1, 8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)


def server_environment(config: Config, slot: int, folder: Path) -> dict[str, str]:
    """Without what onbeat gives its own processes; with the slot's share of the cores, for vLLM on a CPU, and of
    CUDA_VISIBLE_DEVICES. `folder`: for its sockets and temporary files."""
    dropped = {*TORCH_ENVIRONMENT, "LD_PRELOAD", "VIRTUAL_ENV", "VLLM_API_KEY"}
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    ranks = config.generator.vllm.tensor_parallel
    devices = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    if len(devices) >= (slot + 1) * ranks:
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(devices[slot * ranks : (slot + 1) * ranks])
    return kept | {
        "VLLM_RPC_BASE_PATH": str(folder),
        "TMPDIR": str(folder),
        "PYTHONPATH": str(_EXTENSION),
        "PATH": f"{Path(config.generator.vllm.environment).absolute()}/bin:{os.environ.get('PATH', '')}",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1" if config.lora.rank else "0",
        "VLLM_CPU_OMP_THREADS_BIND": _cores(config, slot),
    }


_claims: list[socket.socket] = []


def claim(what: str) -> bool:
    """Whether it is ours from now on, until this process ends; nobody else of this machine has it."""
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0onbeat-vllm-{hashlib.sha256(what.encode()).hexdigest()}")
    except OSError:
        lock.close()
        return False
    _claims.append(lock)
    return True


def claim_slot() -> int:
    """The lowest number that no other server of this machine and user has: it decides about cores and devices."""
    return next(slot for slot in itertools.count() if claim(f"slot {os.getuid()} {slot}"))


def _cores(config: Config, slot: int) -> str:
    """Which cores the server's ranks bind their threads to: `0-1`, `0|1`."""
    cores = sorted(os.sched_getaffinity(0))
    ranks = config.generator.vllm.tensor_parallel
    each = max(1, generator_threads(config.generator.threads, config.generator.bounds[1], len(cores)).alone // ranks)
    bound = []
    for rank in range(ranks):
        first = (slot * ranks + rank) * each
        bound.append(",".join(str(core) for core in sorted({cores[(first + i) % len(cores)] for i in range(each)})))
    return "|".join(bound)


_CAUSE = re.compile(r"(?:[\w.]*(?:Error|Exception)\b|\berror): .*")


_NOT_THE_ROOT = ("Engine core initialization failed", "EngineDeadError", "EngineCore encountered an issue")


def why(log: deque[str] | list[str]) -> str:
    """The sentence of a server's log that says why it ended."""
    causes = [match.group() for line in log if (match := _CAUSE.search(line)) is not None]
    root = [cause for cause in causes if not any(mark in cause for mark in _NOT_THE_ROOT)]
    return (root or ["see its log"])[-1].strip()


def _said(response: httpx2.Response) -> str:
    """The reason in an error response, in one line."""
    try:
        content = response.json()
        found = content.get("error", content.get("detail", content))
        text = found.get("message", found) if isinstance(found, dict) else found
    except ValueError:
        text = response.text
    return str(text).strip().split("\n")[-1][:500]
