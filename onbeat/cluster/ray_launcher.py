"""Workers as actors of a Ray cluster: Ray places, watches and ends them; what is said goes over our own wire.

    RayLauncher ─┬─ reward workers, the model's maker: LocalLauncher, processes beside the controller
                 ├─ trainer-i     a place in the trainer's pool: one placement group of all ranks
                 └─ generator-i   a place of its own: the pool grows and shrinks by one

    spawn: place (waits, cluster.wait_s) ─▶ actor ─▶ it comes to the meeting (meeting.py) ─▶ Work ─▶ the worker speaks
    watch: the actor's `run` ends, or Ray says that it died ─▶ its log's last lines are fetched ─▶ exited() ─▶ the place
           is given back

Who waits for whom: a spawn waits for Ray, its place and its actor; nobody else waits. An actor that dies before it has
come fails its spawn; one that dies later ends its connection, and `exited` tells when Ray knows. A host that is cut off
says nothing: the pool's patience or Ray's own gives it up, and `kill` closes our end. When the controller dies, its
actors see the end of their connection, and Ray ends them as well.

Weights: on this host a descriptor passes. To another, the snapshot goes into Ray's object store once per version (the
Shelf), from there once to each host that has a generator, where every generator reads it from the host's own memory.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import onbeat
from onbeat.cluster.actor import code_digest
from onbeat.cluster.guardian import MARK
from onbeat.cluster.local import LocalLauncher, log_tail
from onbeat.cluster.meeting import Arrival, Invitation, Meeting, Work
from onbeat.cluster.ray_cluster import TRAINER, Cluster, Resources
from onbeat.config import Config
from onbeat.environment import torch_environment
from onbeat.errors import WorkerError
from onbeat.inputs import model_digest
from onbeat.messages import WorkerSettings
from onbeat.model_source import small_files
from onbeat.protocols import Child, Courier, Snapshot
from onbeat.rollout.arriving import DELIVERED
from onbeat.wire import Connection

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

ARRIVE_S = 300.0
"""For an actor that has a place to come to the meeting: a host may be busy, its disk slow."""
_GONE_S = 20.0
"""For Ray to tell the end of an actor whose connection has ended. Longer: its host is out of reach."""
_LOG_S = 20.0
"""For the last lines of a log to come from another host."""
_KILLED = -9


class Shelf:
    """The snapshot that is on its way to other hosts, in Ray's object store. The one before is free to go."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray-put")
        self._key: tuple[int, str] | None = None
        self._object: asyncio.Future[Any] | None = None

    async def put(self, snapshot: Snapshot) -> Any:
        """Once per version, however many want it."""
        key = snapshot.version, snapshot.digest
        if self._object is None or self._key != key:
            fd = os.dup(snapshot.handle)  # the run may publish the next one meanwhile
            loop = asyncio.get_running_loop()
            self._key, self._object = key, loop.run_in_executor(self._thread, _put, fd, snapshot.num_bytes)
        putting = self._object
        try:
            return await asyncio.shield(putting)
        except Exception:
            if self._object is putting:  # the next one who asks tries again
                self._object = None
            raise

    def close(self) -> None:
        self._key = self._object = None
        self._thread.shutdown(wait=False)


def _put(fd: int, num_bytes: int) -> Any:
    import numpy as np
    import ray

    try:
        with mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ) as memory:
            content = np.frombuffer(memory, np.uint8)
            try:
                return ray.put(content)
            finally:
                del content
    finally:
        os.close(fd)


class RayCourier:
    """Brings weights to one generator on another host."""

    def __init__(self, name: str, shelf: Shelf, actor: ActorHandle) -> None:
        self._name = name
        self._shelf = shelf
        self._actor = actor

    @asynccontextmanager
    async def sending(self, snapshot: Snapshot) -> AsyncIterator[str]:
        from ray.exceptions import RayError

        try:
            found = await self._shelf.put(snapshot)
            deliver: Any = self._actor.deliver
            await deliver.options(concurrency_group="mail").remote(snapshot.version, [found])
        except RayError as error:
            raise WorkerError(f"{self._name} did not get version {snapshot.version}: {_first_line(error)}") from None
        yield DELIVERED

    def stop(self) -> None:
        """It has nothing of its own."""


class RayChild:
    def __init__(
        self, name: str, arrival: Arrival, courier: Courier | None, kill: Callable[[], None], log_dir: Path
    ) -> None:
        self.name = name
        self.pid = arrival.who.pid
        self.host = arrival.who.host
        self.connection: Connection[Any] = arrival.connection
        self.shares_memory = arrival.shares_memory
        self.courier = courier
        self._kill = kill
        self._log_file = log_dir / f"{name}.log"
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._log = ""

    def kill(self) -> None:
        self._kill()
        self.connection.close()  # whatever becomes of its host

    async def exited(self) -> int:
        """0: it ended well. 1: it raised. Else -9: Ray knows no more than that it died."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_GONE_S):
                return await asyncio.shield(self._status)
        self.kill()
        return _KILLED

    def ended(self, status: int, log: str) -> None:
        if log and not self.shares_memory:
            self._log_file.write_text(log + "\n")
        self._log = log
        self._status.set_result(status)

    def log_tail(self) -> str:
        return self._log or f"(it is on {self.host}, which does not answer)"


class _Pool:
    """The trainer's places: one placement group, reserved when the first rank asks, given back after the last."""

    def __init__(self) -> None:
        self.group: asyncio.Task[PlacementGroup] | None = None
        self.num_ranks = 0
        self.in_use: set[int] = set()


class RayLauncher:
    def __init__(self, config: Config, log_dir: Path, warn: Callable[[str], None]) -> None:
        """Ray starts in the background; the first spawn waits for it."""
        compact = config.trainer.gradient_checkpointing
        self._local = LocalLauncher(log_dir, compact=compact, keep=config.reward.environment)
        self._config = config
        self._log_dir = log_dir
        self._warn = warn
        self._cluster = Cluster(config.cluster.address)
        self._meeting = Meeting()
        self._shelf = Shelf()
        self._environment = _environment(compact=compact)
        self._trainers: defaultdict[str, _Pool] = defaultdict(_Pool)
        """By generation: after `onbeat scale RUN trainer=N` the next one's ranks are placed while the last one's go."""
        self._children: set[asyncio.Task[None]] = set()
        self._actors: set[ActorHandle] = set()
        self._opening = asyncio.create_task(self._open())
        self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())  # a spawn tells

    async def _open(self) -> None:
        await self._cluster.call(self._cluster.open)
        self._meeting.open(None if self._cluster.is_ours else self._cluster.host)

    def prepare(self, *, uses_torch: bool) -> None:
        if not uses_torch:
            self._local.prepare(uses_torch=False)

    async def spawn(
        self, *, name: str, entry: str, settings: msgspec.Struct, receives: object, uses_torch: bool
    ) -> Child[Any]:
        kind = name.partition("-")[0]
        if not uses_torch or kind not in ("trainer", "generator") or not isinstance(settings, WorkerSettings):
            return await self._local.spawn(
                name=name, entry=entry, settings=settings, receives=receives, uses_torch=uses_torch
            )
        await asyncio.shield(self._opening)
        asked = self._config.trainer.resources if kind == "trainer" else self._config.generator.resources
        group, index, give_back = await self._place(kind, name, asked, settings)
        try:
            arrival, actor, run = await self._start(name, group, index, asked)
        except BaseException:
            await asyncio.shield(give_back())
            raise
        try:
            child = self._receive(name, entry, settings, receives, arrival, actor)
        except BaseException:
            arrival.connection.close()
            run.cancel()
            self._kill(actor)
            self._actors.discard(actor)
            await asyncio.shield(give_back())
            raise
        self._watch(child, arrival, actor, run, give_back)
        return child

    # -- places -------------------------------------------------------------------------------------------------

    async def _place(self, kind: str, name: str, asked: Resources, settings: WorkerSettings) -> Any:
        """A placement group, the place in it, and how to give that back."""
        wait_s = self._config.cluster.wait_s
        if kind == "generator":
            group = await self._cluster.place(name, "generator.resources", asked, 1, wait_s, self._warn)
            return group, 0, lambda: self._cluster.call(self._cluster.give_back, group)
        pool, rank = self._trainers[name.removeprefix(f"trainer-{settings.rank}")], settings.rank
        if pool.group is None:
            pool.num_ranks = Config.model_validate_json(settings.config).trainer.ranks
            pool.group = asyncio.create_task(
                self._cluster.place(TRAINER, "trainer.resources", asked, pool.num_ranks, wait_s, self._warn)
            )
        pool.in_use.add(rank)

        async def give_back() -> None:
            pool.in_use.discard(rank)
            if not pool.in_use and pool.group is not None:
                whole, pool.group = pool.group, None
                with suppress(WorkerError):  # there was none
                    await self._cluster.call(self._cluster.give_back, await whole)

        try:
            return await asyncio.shield(pool.group), rank, give_back
        except BaseException:
            await asyncio.shield(give_back())
            raise

    # -- actors -------------------------------------------------------------------------------------------------

    async def _start(self, name: str, group: PlacementGroup, index: int, asked: Resources) -> Any:
        """Its arrival, the actor, and what tells its end."""
        invitation = self._meeting.invite(name, str((self._log_dir / f"{name}.log").absolute()))
        above = os.environ.get(MARK)  # of a Ray of our own: its guardian ends its actors, too
        environment = self._environment | {MARK: f"{above}.{invitation.ticket}" if above else invitation.ticket}
        arriving = asyncio.create_task(self._meeting.expect(invitation))
        actor = await self._cluster.call(self._cluster.start_actor, group, index, asked, environment)
        self._actors.add(actor)
        run = asyncio.ensure_future(_outcome(actor.run.remote(msgspec.msgpack.encode(invitation))))
        try:
            await asyncio.wait((arriving, run), timeout=ARRIVE_S, return_when=asyncio.FIRST_COMPLETED)
            if not arriving.done():
                raise WorkerError(_why_not_there(invitation, run))
            arrival = arriving.result()
            if arrival.who.code != code_digest():
                arrival.connection.close()
                raise WorkerError(f"{name}: {arrival.who.host} has another onbeat than we have; install the same there")
            return arrival, actor, run
        except BaseException:
            arriving.cancel()
            run.cancel()
            self._kill(actor)
            self._actors.discard(actor)
            raise

    def _receive(
        self,
        name: str,
        entry: str,
        settings: WorkerSettings,
        receives: object,
        arrival: Arrival,
        actor: ActorHandle,
    ) -> RayChild:
        embedded = self._config.generator.backend == "embedded"
        courier = RayCourier(name, self._shelf, actor) if embedded and not arrival.shares_memory else None
        child = RayChild(name, arrival, courier, lambda: self._kill(actor), self._log_dir)
        if not arrival.shares_memory:
            child.connection.accept_copies()
        child.connection.expect(receives)
        settings = msgspec.structs.replace(settings, host=arrival.who.host)  # where ranks find each other
        arrival.connection.send(self._work(name, entry, settings, arrival))
        return child

    def _work(self, name: str, entry: str, settings: WorkerSettings, arrival: Arrival) -> Work:
        """On another host, a generator needs the model's small files alone (its weights are published), a trainer and
        whoever publishes an adapter only (LoRA) the model itself."""
        elsewhere, model_dir = not arrival.shares_memory, Path(settings.model_dir)
        whole = name.startswith("trainer") or self._config.lora.rank > 0
        return Work(
            entry=entry,
            settings=msgspec.msgpack.encode(settings),
            files=small_files(model_dir) if elsewhere and not whole else {},
            model=model_digest(model_dir) if elsewhere and whole else "",
            run=str(self._log_dir.parent.absolute()) if name.startswith("trainer") else "",
            folder=os.getcwd(),
        )

    def _watch(self, child: RayChild, arrival: Arrival, actor: ActorHandle, run: Any, give_back: Any) -> None:
        async def watch() -> None:
            status, _ = await run
            child.ended(status, "" if status == 0 else await self._last_lines(arrival))
            self._kill(actor)
            self._actors.discard(actor)
            await give_back()

        task = asyncio.create_task(watch())
        self._children.add(task)
        task.add_done_callback(self._children.discard)

    async def _last_lines(self, arrival: Arrival) -> str:
        if arrival.shares_memory:
            return log_tail(Path(arrival.who.log))
        from ray.exceptions import RayError

        with suppress(RayError, TimeoutError):
            async with asyncio.timeout(_LOG_S):
                start, who = self._cluster.start_reading, arrival.who
                return str(await (await self._cluster.call(start, who.node, who.log, self._environment)))
        return ""

    def _kill(self, actor: ActorHandle) -> None:
        self._cluster.soon(self._cluster.kill, actor)

    async def close(self) -> None:
        with suppress(Exception):
            await asyncio.shield(self._opening)
        for actor in list(self._actors):
            self._kill(actor)
        with suppress(TimeoutError):
            async with asyncio.timeout(_GONE_S):
                await asyncio.gather(*self._children, return_exceptions=True)
        for task in list(self._children):
            task.cancel()
        self._shelf.close()
        await self._meeting.close()
        await self._local.close()
        if not self._opening.cancelled() and self._opening.exception() is None:
            await self._cluster.call(self._cluster.close)
        self._cluster.stop_thread()


async def _outcome(run: Any) -> tuple[int, str]:
    """The exit status of an actor's `run`, and what Ray says of it."""
    from ray.exceptions import RayError, RayTaskError

    try:
        await run
    except RayTaskError as error:
        return 1, str(error)
    except RayError as error:
        return _KILLED, str(error)
    return 0, ""


def _why_not_there(invitation: Invitation, run: asyncio.Future[tuple[int, str]]) -> str:
    where = f" at {invitation.there}" if invitation.there else ""
    if run.done():
        return f"{invitation.name} died before it came to the controller{where}: {run.result()[1]}"
    return f"{invitation.name} was started, and has not come to the controller{where} within {ARRIVE_S:.0f} s"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _environment(*, compact: bool) -> dict[str, str]:
    """What an actor must find when its process starts; and the same onbeat as ours, where its host has it."""
    ours = {name: value for name, value in os.environ.items() if name.startswith("ONBEAT_")}
    home = Path(onbeat.__file__).parents[1]
    found = [str(home)] if home.name != "site-packages" else []
    path = os.pathsep.join([*found, *filter(None, [os.environ.get("PYTHONPATH")])])
    return ours | torch_environment(compact=compact) | ({"PYTHONPATH": path} if path else {})
