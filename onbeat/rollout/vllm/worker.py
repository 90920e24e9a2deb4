"""A generator process whose engine is a vLLM server: the same messages as the embedded one's (rollout/worker.py).

    controller ◀── messages.py ──▶ this process ◀── HTTP ──▶ vLLM server (ours, or running already)

    Stage + fd ──▶ check the digest, and each tensor's
    Activate ────▶ pause (abort) ─▶ load from that fd ─▶ same checksums? ─▶ empty the prefix cache ─▶ name the version
                   ─▶ resume ──▶ Activated                                 nothing is served in between
    Submit ──────▶ a request per sample, by token ids, with its own seed; the prompt is shared by the prefix cache
                   ─▶ Completed, with the version the server put on it
    Cancel ──────▶ hang up: vLLM aborts the request

Who waits for whom: orders are carried out one after another; requests are tasks of their own, as many as the pool has
given us rows for. When the server ends, refuses something or answers from another version, this process says so and
ends (what it owes is sent to others, and a new one is started). When the controller is gone, it ends, and the server
with it. A server that hangs stops counting tokens, so nothing is said, and the pool gives it up.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import msgspec

from onbeat.admission import Room
from onbeat.config import Config
from onbeat.errors import InputError, NumbersError, WorkerError
from onbeat.functions import raised
from onbeat.keyed import sequence_key
from onbeat.messages import (
    Activate,
    Activated,
    Cancel,
    Completed,
    Failed,
    FirstToken,
    GeneratorReady,
    Leaving,
    Progress,
    Refused,
    ShareCores,
    Stage,
    Staged,
    Submit,
    ToGenerator,
    WeightBytes,
    WorkerSettings,
)
from onbeat.pieces import WHOLE, Share
from onbeat.rollout.arriving import Arriving
from onbeat.rollout.vllm.adapter import adapter_directory, in_our_names
from onbeat.rollout.vllm.server import Server, ServerDescription, check_place, claim
from onbeat.types import Completion, GroupKey, GroupRequest
from onbeat.weights.nccl import PIECE_BYTES
from onbeat.weights.snapshot import Mapped
from onbeat.wire import Connection

_NO_NUMBER = -9999.0
"""What vLLM writes for a log-probability that is none."""
WHY_NOT_EXACT = "vLLM's tokens depend on what shares their batch"
_ASK_S = 1.0
"""Between two questions about progress."""
_ENDS_S = 3.0
"""For a server whose requests fail to be seen to have ended."""
_ATTACH_S = 120.0
"""For a server that runs already to answer: somebody may be restarting it."""
_EMPTY_S = 20.0
"""For the prefix cache to let go of what was aborted."""


class Staging:
    """A snapshot that has come and is not served yet: the descriptor stays open until it is loaded."""

    def __init__(self, version: int, fd: int, num_bytes: int, share: Share = WHOLE) -> None:
        self.version = version
        self.fd = fd
        self.mapped = Mapped(os.dup(fd), num_bytes)
        self.digest = self.mapped.digest(share)
        self.checksums = self.mapped.checksums()

    @property
    def path(self) -> str:
        """Where another process finds it."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def close(self) -> None:
        self.mapped.close()
        os.close(self.fd)


class VllmWorker:
    def __init__(
        self, connection: Connection[ToGenerator], server: Server, described: ServerDescription, config: Config
    ) -> None:
        self._connection = connection
        self._server = server
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._version = -1
        self._staging: Staging | None = None
        self._arriving: Arriving | None = None
        self._adapter: str | None = None
        """The name under which the current adapter is served."""
        self._adapter_files = ExitStack()
        self._tasks: dict[asyncio.Task[None], GroupKey] = {}
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._activated_s: float | None = None
        """Set until the first token of the active version."""
        self._tokens_before = 0
        capacity = max(config.generator.max_sequences, config.algorithm.group_size)
        self.room = Room(  # vLLM puts a sequence off when its cache is full, so none is refused for it
            max_sequences=min(capacity, described.max_num_seqs), cache_tokens=2**62, bytes_per_token=1
        )

    async def run(self) -> None:
        """Until the controller is gone. Raises what went wrong."""
        self._tokens_before = (await self._server.counts()).sampled
        work = [asyncio.create_task(part) for part in (self._read(), self._count_tokens(), self._watch())]
        try:
            await asyncio.wait([*work, self._failed], return_when=asyncio.FIRST_COMPLETED)
            await self._tell_apart(work)
            for done in (self._failed, *work):
                if done.done():
                    done.result()
        finally:
            for task in [*work, *self._tasks]:
                task.cancel()
            await asyncio.gather(*work, *self._tasks, return_exceptions=True)
            if self._staging is not None:
                self._staging.close()
            self._adapter_files.close()

    async def _tell_apart(self, work: list[asyncio.Task[None]]) -> None:
        """Something failed: did it, or has the server ended? That is the better reason."""
        if any(done.done() and done.exception() is not None for done in (self._failed, *work)):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._server.ended(), _ENDS_S)
                raise WorkerError(await self._server.why_ended())

    def leave(self) -> None:
        """From a signal handler."""
        self._loop.call_soon_threadsafe(self._connection.send, Leaving())

    async def _watch(self) -> None:
        await self._server.ended()
        raise WorkerError(await self._server.why_ended())

    async def _count_tokens(self) -> None:
        """Tell about progress while there is some."""
        told = await self._server.counts()
        while True:
            await asyncio.sleep(_ASK_S)
            if not self._tasks:
                continue
            counts = await self._server.counts()
            if counts != told:
                self._sampled(counts.sampled)
                self._connection.send(Progress(counts.sampled))
                told = counts

    def _sampled(self, num_tokens: int) -> None:
        if self._activated_s is not None and num_tokens > self._tokens_before:
            self._connection.send(FirstToken(self._version, time.monotonic() - self._activated_s))
            self._activated_s = None

    async def _read(self) -> None:
        async for message in self._connection.messages():
            match message:
                case Submit(request=request):
                    self._submit(request)
                case Cancel(key=key):
                    for task in [task for task, of in self._tasks.items() if of == key]:
                        task.cancel()
                case Stage(version=version, num_bytes=num_bytes, attached=True, share=share):
                    await self._stage(version, self._connection.take_fd(), num_bytes, share)
                case Stage(version=version, num_bytes=num_bytes, group=str(group)):
                    await self._stage(version, await self._receive(group, num_bytes), num_bytes)
                case Stage(version=version, num_bytes=num_bytes):
                    self._arriving = Arriving(version, num_bytes)
                case WeightBytes(data=data):
                    arriving = self._arriving
                    if arriving is not None and arriving.take(data):
                        self._arriving = None
                        await self._stage(arriving.version, arriving.fd, arriving.num_bytes)
                case Activate(version=version):
                    await self._activate(version)
                    self._connection.send(Activated(version, WHY_NOT_EXACT))
                case ShareCores():
                    pass  # its threads are bound when it starts
                case Refused(reason=reason):
                    raise InputError(f"the run refuses this worker: {reason}")

    # -- weights -----------------------------------------------------------------------------------------------

    async def _stage(self, version: int, fd: int, num_bytes: int, share: Share = WHOLE) -> None:
        if self._staging is not None:  # another version came before this one was used
            self._staging.close()
            self._staging = None
        self._staging = await asyncio.to_thread(Staging, version, fd, num_bytes, share)
        self._connection.send(Staged(version, self._staging.digest, share))

    async def _receive(self, group: str, num_bytes: int) -> int:
        """Have the server's workers take a snapshot from the group; returns the descriptor of where it is now."""
        memory = Arriving(-1, num_bytes)
        ranks = transfer_group(group, self._config.generator.vllm.tensor_parallel)
        await self._server.post("/init_weight_transfer_engine", {"init_info": ranks})
        path = f"/proc/{os.getpid()}/fd/{memory.fd}"
        await self._server.rpc("onbeat_receive", path=path, num_bytes=num_bytes, piece_bytes=PIECE_BYTES)
        await self._server.post("/shutdown_weight_transfer_engine")
        return memory.fd

    async def _activate(self, version: int) -> None:
        staging = self._staging
        if staging is None or staging.version != version:
            raise RuntimeError(f"asked to activate version {version}, which is not staged")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.post("/pause", mode="abort")
        if self._config.lora.rank:
            await self._load_adapter(staging)
        else:
            verify(staging.checksums, await self._server.rpc("onbeat_load", path=staging.path), version)
        staging.close()
        self._staging = None
        await self._empty_prefix_cache()
        await self._server.post("/update_weight_version", {"new_version": str(version)})
        await self._server.post("/resume")
        self._version = version
        self._activated_s, self._tokens_before = time.monotonic(), (await self._server.counts()).sampled

    async def _load_adapter(self, staging: Staging) -> None:
        """Each version under a name of its own: a server that missed one cannot serve it."""
        name = f"{self._server.model}-{staging.version}"
        for model in (await self._server.get("/v1/models"))["data"]:  # the version before, or another run's
            if model["id"].startswith(f"{self._server.model}-"):
                await self._server.post("/v1/unload_lora_adapter", {"lora_name": model["id"]})
        self._adapter_files.close()
        directory = self._adapter_files.enter_context(
            adapter_directory(staging.mapped.tensors(), self._config.lora)
        )  # vLLM may want to read it again
        loaded = await self._server.rpc("onbeat_adapter", path=str(directory))
        verify(staging.checksums, [in_our_names(one) for one in loaded], staging.version)
        await self._server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)})
        self._adapter = name

    async def _empty_prefix_cache(self) -> None:
        deadline_s = time.monotonic() + _EMPTY_S
        while not (await self._server.post("/reset_prefix_cache"))["success"]:
            if time.monotonic() > deadline_s:
                raise WorkerError("vLLM did not empty its prefix cache, which holds keys of the version before")
            await asyncio.sleep(0.05)

    # -- samples -----------------------------------------------------------------------------------------------

    def _submit(self, request: GroupRequest) -> None:
        if request.period != self._version:
            raise RuntimeError(f"asked for version {request.period} while serving {self._version}")
        for sample in request.samples:
            task = asyncio.create_task(self._sample(request, sample))
            self._tasks[task] = (request.stream, request.period, request.slot)
            task.add_done_callback(self._sampled_one)

    def _sampled_one(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _sample(self, request: GroupRequest, sample: int) -> None:
        body = request_body(request, sample, self._adapter or self._server.model)
        reply = await self._server.generate(body)
        completion = completion_of(reply, request, sample)
        self._sampled(self._tokens_before + 1)
        self._connection.send(Completed(completion))


def transfer_group(group: str, num_ranks: int) -> dict[str, Any]:
    """For /init_weight_transfer_engine: the server's ranks come after the courier."""
    return {"nccl_unique_id_b64": group, "rank_offset": 1, "world_size": 1 + num_ranks}


def request_body(request: GroupRequest, sample: int, model: str) -> dict[str, Any]:
    """For /inference/v1/generate: what the embedded engine would sample from, and nothing else."""
    sampling = request.sampling
    key = sequence_key(
        seed=sampling.seed, stream=request.stream, version=request.period, slot=request.slot, sample=sample
    )
    return {
        "model": model,
        "token_ids": request.token_ids,
        "sampling_params": {
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_new_tokens,
            "stop_token_ids": sampling.stop_token_ids,
            "stop": sampling.stop,
            "include_stop_str_in_output": True,
            "detokenize": bool(sampling.stop),
            "ignore_eos": True,  # what ends a completion is in stop_token_ids
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "seed": key >> 1,  # vLLM's are signed
            "logprobs": 0,
        },
    }


def completion_of(reply: Any, request: GroupRequest, sample: int) -> Completion:
    """Raises WorkerError if it is not a whole completion of the version that was asked for."""
    (choice,) = reply["choices"]
    versions = {span["version"] for span in choice["weight_versions"] or ()}
    if versions != {str(request.period)}:
        raise WorkerError(f"vLLM answered from version {sorted(versions)} instead of {request.period}")
    if choice["finish_reason"] not in ("stop", "length"):
        raise WorkerError(f"vLLM ended a completion with {choice['finish_reason']!r}")
    logprobs = tuple(entry["logprob"] for entry in choice["logprobs"]["content"])
    if len(logprobs) != len(choice["token_ids"]):
        raise WorkerError(f"vLLM sent {len(choice['token_ids'])} tokens with {len(logprobs)} log-probabilities")
    if min(logprobs, default=0.0) <= _NO_NUMBER:
        raise NumbersError(f"version {request.period}: the model's logits are not finite")
    return Completion(
        stream=request.stream,
        period=request.period,
        slot=request.slot,
        sample=sample,
        version=request.period,
        token_ids=tuple(choice["token_ids"]),
        sampler_logprobs=logprobs,
        finish_reason=choice["finish_reason"],
    )


def verify(published: dict[str, str], loaded: list[Any], version: int) -> None:
    """That every worker of the server gave the published tensors to its model."""
    for rank, checksums in enumerate(loaded):
        wrong = sorted(name for name in {*published, *checksums} if published.get(name) != checksums.get(name))
        if wrong:
            raise WorkerError(
                f"vLLM's worker {rank} loaded other weights than version {version}: {len(wrong)} of {len(published)} "
                f"tensors differ, {wrong[0]} first"
            )


def main(
    sock: socket.socket, settings_bytes: bytes, started: Callable[[VllmWorker], None] = lambda worker: None
) -> None:
    """`started` is given the worker before it begins to serve."""
    settings = msgspec.msgpack.decode(settings_bytes, type=WorkerSettings)
    asyncio.run(_serve(sock, settings, started))


async def _obtain(config: Config, settings: WorkerSettings) -> Server:
    """One of our own, or the first of those named that answers and that no other generator uses."""
    places = config.generator.vllm.servers
    if not places:
        return await Server.start(config, settings.model_dir, settings.name)
    deadline_s = time.monotonic() + _ATTACH_S
    ours: set[str] = set()
    while time.monotonic() < deadline_s:
        for place in places:
            check_place(place)
            if place in ours or claim(place):
                ours.add(place)  # tried again, if it does not answer
                server = Server(place)
                if await server.healthy():
                    return server
                await server.close()
        await asyncio.sleep(1.0)
    raise WorkerError(
        f"none of the servers of generator.vllm.servers is free and answers (tried for {_ATTACH_S:.0f} s: "
        f"{', '.join(sorted(ours)) or 'all are used by other generators'})"
    )


async def _serve(sock: socket.socket, settings: WorkerSettings, started: Callable[[VllmWorker], None]) -> None:
    connection: Connection[ToGenerator] = Connection(sock, ToGenerator)
    server: Server | None = None
    try:
        config = Config.model_validate_json(settings.config)
        server = await _obtain(config, settings)
        described = await server.check(config, settings.model_dir)
        worker = VllmWorker(connection, server, described, config)
        started(worker)
        connection.send(GeneratorReady(worker.room, f"vLLM {server.version}", repeatable=False))
        if config.lora.rank and config.generator.vllm.servers:  # it may have served something else before
            await server.rpc("reload_weights", weights_path=settings.model_dir)
        await worker.run()
    except Exception as error:
        known = isinstance(error, InputError | WorkerError | NumbersError)
        connection.send(Failed(str(error) if known else raised(error), diverged=isinstance(error, NumbersError)))
        with suppress(TimeoutError):  # the run may be gone
            await asyncio.wait_for(connection.drained(), 5.0)
        raise
    finally:
        if server is not None:
            await server.close()
        connection.close()
