"""Ray, as far as the launcher needs it: a cluster to be in, places for processes, processes in them.

    Cluster ── one thread of its own for every call that may block: start or join, places, actors, kills, leave
            ── asyncio: `await` on what takes long (a place, an actor's end); Ray's own threads wake the loop

That thread lives as long as the cluster: the processes of a Ray that it started die with it, if the controller is
killed (PR_SET_PDEATHSIG looks at the thread).

A Ray of our own listens on loopback alone, asks everybody for a token that only this process and its children know,
has no dashboard, tells nobody about itself, and leaves no file behind. It does not ration cores: processes of one host
share them, as under the local launcher. What a cluster that is joined does is its owner's decision.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from onbeat.cluster.guardian import MARK, ONLY_MARKED, guard
from onbeat.control import split_address
from onbeat.errors import ConfigError, WorkerError

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

T = TypeVar("T")
Resources = Mapping[str, float]

_OWN_CPUS = 4096
_OWN_STORE_BYTES = 100 << 20
"""Nothing goes through the object store where memory is shared; Ray wants one all the same."""
_KNOCK_S = 10.0
_LOOPBACK = "127.0.0.1"
TRAINER = "the trainer"


@functools.cache
def _own_token() -> str:
    """One per process: Ray remembers the first it sees."""
    return secrets.token_hex(32)


def _own_environment() -> dict[str, str]:
    """Read by Ray when it is imported, and by the processes it starts."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": _own_token(),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # whatever it is called: stay on loopback
        "RAY_worker_niceness": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
    }


@dataclass(frozen=True, slots=True)
class Node:
    id: str
    address: str
    resources: dict[str, float]


def written(resources: Resources) -> str:
    """As in a recipe."""
    return "{ " + ", ".join(f"{name} = {value:g}" for name, value in sorted(resources.items())) + " }"


def fits(asked: Resources, has: Resources) -> bool:
    return all(has.get(name, 0.0) >= value for name, value in asked.items())


def what_there_is(nodes: list[Node]) -> str:
    def plain(node: Node) -> dict[str, float]:
        hidden = ("node:", "memory", "object_store_memory")
        return {name: value for name, value in node.resources.items() if not name.startswith(hidden)}

    return "; ".join(f"{node.address} has {written(plain(node))}" for node in nodes) or "there is no node"


class Cluster:
    def __init__(self, address: str) -> None:
        """`address`: empty for a Ray of our own."""
        self._address = address
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._folder: str | None = None
        self._guardian: subprocess.Popen[bytes] | None = None
        self._before: dict[str, str | None] = {}
        self._joined_before = False
        self.node = ""
        """This host's name in the cluster."""
        self.host = ""
        """This host's address in the cluster."""

    @property
    def is_ours(self) -> bool:
        return not self._address

    async def call(self, function: Callable[..., T], *arguments: object) -> T:
        """In the cluster's thread, one after another."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def soon(self, function: Callable[..., None], *arguments: object) -> None:
        """The same, without waiting; whether it worked is seen by its effect. Nothing after the end."""
        with contextlib.suppress(RuntimeError):
            self._thread.submit(function, *arguments)

    # -- start or join ------------------------------------------------------------------------------------------

    def open(self) -> None:
        if self.is_ours:
            self._set_environment(_own_environment())
        try:
            import ray
        except ImportError:
            raise ConfigError(
                'cluster.launcher = "ray" needs Ray, which is not installed: pip install "onbeat[cluster]"'
            ) from None
        logging.getLogger("ray").setLevel(logging.ERROR)
        self._joined_before = ray.is_initialized()
        if not self._joined_before:
            self._start(ray) if self.is_ours else self._join(ray)
        self.node = ray.get_runtime_context().get_node_id()
        self.host = ray.util.get_node_ip_address()
        if self.is_ours and not self._joined_before and self.host != _LOOPBACK:
            self.close()
            raise ConfigError(f"Ray would listen at {self.host}, beyond this machine: import onbeat before ray")

    def _start(self, ray: Any) -> None:
        self._folder = tempfile.mkdtemp(prefix="onbeat-ray-")
        mark = secrets.token_hex(16)
        self._set_environment({MARK: mark})
        self._guardian = guard(mark, ONLY_MARKED, (self._folder,))
        ray.init(
            address="local",
            num_cpus=_OWN_CPUS,
            object_store_memory=_OWN_STORE_BYTES,
            include_dashboard=False,
            _temp_dir=self._folder,
            **_quietly(),
        )

    def _join(self, ray: Any) -> None:
        if self._address != "auto":
            try:  # Ray itself would try for minutes, and cannot be interrupted
                socket.create_connection(split_address(self._address, "cluster.address"), _KNOCK_S).close()
            except OSError as error:
                raise ConfigError(f'cluster.address = "{self._address}": nobody answers there: {error}') from None
        try:
            ray.init(address=self._address, **_quietly())
        except Exception as error:  # of many kinds, and none of them ours
            raise ConfigError(
                f'cluster.address = "{self._address}": this host cannot join that cluster ({type(error).__name__}: '
                f"{error}); it must be a node of it (`ray start --address=…`), with the cluster's token if it wants one"
            ) from None

    def _set_environment(self, values: dict[str, str]) -> None:
        self._before |= {name: os.environ.get(name) for name in values}
        os.environ.update(values)

    def close(self) -> None:
        """Leave; end what we started."""
        import ray

        if not self._joined_before:
            ray.shutdown()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._guardian is not None:
            self._guardian.kill()
            self._guardian.wait()

    def stop_thread(self) -> None:
        self._thread.shutdown(wait=False)

    # -- places -------------------------------------------------------------------------------------------------

    def nodes(self) -> list[Node]:
        import ray

        return [
            Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]
        ]

    async def place(
        self, who: str, key: str, asked: Resources, count: int, wait_s: float, warn: Callable[[str], None]
    ) -> PlacementGroup:
        """Room for `count` processes, reserved at once or not at all. Raises WorkerError if there is none in time."""
        nodes = await self.call(self.nodes)
        if not any(fits(asked, node.resources) for node in nodes):
            sentence = (
                f"{who} asks for {key} = {written(asked)}, and no node of the cluster has that: {what_there_is(nodes)}"
            )
            if self.is_ours:
                raise WorkerError(f"{sentence}; ask for less, or join a cluster that has it (cluster.address)")
            warn(f"{sentence}; waiting {wait_s:.0f} s for one that has")
        group = await self.call(self._reserve, asked, count, who == TRAINER and count == 1)
        try:
            async with asyncio.timeout(wait_s):
                await group.ready()
        except TimeoutError:
            await self.call(self.give_back, group)
            nodes = await self.call(self.nodes)
            processes = f"{count} processes with " if count > 1 else ""
            raise WorkerError(
                f"{who} was not placed within cluster.wait_s = {wait_s:.0f} s: it asks for {processes}{key} = "
                f"{written(asked)}; {what_there_is(nodes)}, of which others use a part; ask for less, end something "
                "else, or add a node"
            ) from None
        except BaseException:
            self.soon(self.give_back, group)
            raise
        return group

    def _reserve(self, asked: Resources, count: int, beside: bool) -> PlacementGroup:
        from ray.util.placement_group import placement_group

        bundles = [dict(asked) for _ in range(count)]
        if beside:  # the controller, if there is room: memory is shared there
            return placement_group(bundles, strategy="STRICT_PACK", _soft_target_node_id=self.node)
        return placement_group(bundles, strategy="PACK")

    def give_back(self, group: PlacementGroup) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(group)

    # -- processes ----------------------------------------------------------------------------------------------

    def start_actor(
        self, group: PlacementGroup, index: int, asked: Resources, environment: dict[str, str]
    ) -> ActorHandle:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from onbeat.cluster.actor import WorkerActor

        others = {name: value for name, value in asked.items() if name not in ("CPU", "GPU", "memory")}
        return (
            ray.remote(concurrency_groups={"mail": 1})(WorkerActor)
            .options(
                num_cpus=asked.get("CPU", 0),
                num_gpus=asked.get("GPU", 0),
                memory=asked.get("memory"),
                resources=others,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
                runtime_env={"env_vars": environment},
            )
            .remote()
        )

    def kill(self, actor: ActorHandle) -> None:
        import ray

        ray.kill(actor, no_restart=True)

    def start_reading(self, node: str, log: str, environment: dict[str, str]) -> Any:
        """The end of a file there."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from onbeat.cluster.actor import read_tail

        return (
            ray.remote(read_tail)
            .options(
                num_cpus=0,
                max_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                runtime_env={"env_vars": environment},
            )
            .remote(log)
        )


def _quietly() -> dict[str, Any]:
    return {"configure_logging": False, "logging_level": logging.ERROR, "log_to_driver": False, "namespace": "onbeat"}
