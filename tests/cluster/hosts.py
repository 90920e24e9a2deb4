"""Hosts for tests: network namespaces with addresses, processes and files of their own, and a Ray node in each.

    this machine
      ├─ namespace "home"   10.77.N.1    the run's controller, Ray's head
      ├─ namespace "away-1" 10.77.N.2    a link to home, no other; a Ray node
      └─ namespace "away-2" 10.77.N.3    …

A host away from home has no file of the test's and no model: empty file systems lie over them. It can be cut off
(its link goes down) and lose its power (every process of it is killed at once, and nobody hears of it).
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from onbeat.model_source import cache_dir

RAY = str(Path(sys.executable).with_name("ray"))
PORT = 6379
_TOKEN = secrets.token_hex(32)
"""One per process: Ray remembers the first it sees."""

RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": _TOKEN,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
}
LOOPBACK_ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""With which Ray stays on 127.0.0.1."""


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def why_no_hosts() -> str | None:
    """Why this machine lets us have no namespaces; None if it does."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "two hosts need network namespaces: run as root, with iproute2 installed"
    name = f"onbeat-{secrets.token_hex(4)}"
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"two hosts need network namespaces, which this machine does not permit: {error.stderr.strip()}"
    ip("netns", "delete", name)
    return None


class RayNode:
    """`ray start` and all it starts."""

    def __init__(self, log: Path, flags: list[str], *, prefix: list[str], environment: dict[str, str]) -> None:
        command = [RAY, "start", "--block", "--disable-usage-stats", *flags]
        self._log = log.open("w")
        self.process = subprocess.Popen(
            [*prefix, *command],
            env={**os.environ, **RAY_ENVIRONMENT, **environment},
            stdout=subprocess.PIPE,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def wait_until_started(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._log.write(line)
            if "Ray runtime started" in line:
                return
        raise AssertionError(f"Ray did not start:\n{Path(self._log.name).read_text()}")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()
        self._log.close()
        if self.process.stdout is not None:
            self.process.stdout.close()


class Host:
    def __init__(self, network: Network, name: str, address: str) -> None:
        self.network = network
        self.namespace = f"{network.name}-{name}"
        self.address = address
        self.node: RayNode | None = None
        ip("netns", "add", self.namespace)
        ip("-n", self.namespace, "link", "set", "lo", "up")

    @property
    def prefix(self) -> list[str]:
        """Before a command that is to run there."""
        return ["ip", "netns", "exec", self.namespace]

    def start_ray(self, resources: str, num_cpus: int = 8) -> None:
        head = self is self.network.home
        role = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={self.network.folder}"]
        if not head:
            role = [f"--address={self.network.address}"]
        flags = [*role, f"--node-ip-address={self.address}", f"--num-cpus={num_cpus}", f"--resources={resources}"]
        flags.append(f"--object-store-memory={200 << 20}")
        log = self.network.logs / f"{self.namespace}.log"
        self.node = RayNode(log, flags, prefix=self.prefix if head else self._apart(), environment={})
        self.node.wait_until_started()

    def _apart(self) -> list[str]:
        """With processes and files of its own: whoever ends the first process ends all."""
        hidden = [self.network.folder, *self.network.hidden, Path("/dev/shm")]
        mounts = " && ".join(f"mount -t tmpfs none '{path}'" for path in hidden)
        own = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"]
        return [*self.prefix, *own, "sh", "-c", f'{mounts} && exec "$@"', "sh"]

    def remove(self) -> None:
        if self.node is not None:
            self.node.process.send_signal(signal.SIGKILL if self is not self.network.home else signal.SIGTERM)
            self.node.stop()
        ip("netns", "delete", self.namespace)


class Network:
    def __init__(self, folder: Path, hidden: list[Path], *, models: bool = False) -> None:
        """`hidden`: what only home sees, beside Ray's files and, without `models`, the models."""
        self.name = f"ob{secrets.token_hex(3)}"
        self.folder = Path(tempfile.mkdtemp(prefix="obray-", dir="/tmp"))  # a socket's path is short
        self.logs = folder
        self.hidden = hidden if models else [*hidden, cache_dir()]
        cache_dir().mkdir(parents=True, exist_ok=True)
        self._number = secrets.randbelow(200) + 20
        self._away: list[Host] = []
        self.home = Host(self, "home", self._address(1))
        self._give_home_an_interface()

    def _give_home_an_interface(self) -> None:
        """Of its own: torch.distributed binds to one, and takes the first address it has."""
        home = self.home.namespace
        ip("-n", home, "link", "add", "eth0", "type", "veth", "peer", "other-end")
        ip("-n", home, "addr", "add", f"{self.home.address}/32", "dev", "eth0")
        for end in ("eth0", "other-end"):
            ip("-n", home, "link", "set", end, "up")

    def _address(self, number: int) -> str:
        return f"10.77.{self._number}.{number}"

    @property
    def address(self) -> str:
        """Of Ray."""
        return f"{self.home.address}:{PORT}"

    def add_host(self) -> Host:
        number = len(self._away) + 1
        host = Host(self, f"away{number}", self._address(number + 1))
        self._away.append(host)
        link = self.link_to(host)
        ip("-n", self.home.namespace, "link", "add", link, "type", "veth", "peer", "up0", "netns", host.namespace)
        ip("-n", host.namespace, "addr", "add", f"{host.address}/32", "dev", "up0")
        ip("-n", host.namespace, "link", "set", "up0", "up")
        ip("-n", host.namespace, "route", "add", self.home.address, "dev", "up0")
        self.connect(host)
        return host

    def link_to(self, host: Host) -> str:
        return f"to-{host.address.rpartition('.')[2]}"

    def cut_off(self, host: Host) -> None:
        ip("-n", self.home.namespace, "link", "set", self.link_to(host), "down")
        assert "state DOWN" in ip("-n", self.home.namespace, "link", "show", self.link_to(host))

    def connect(self, host: Host) -> None:
        ip("-n", self.home.namespace, "link", "set", self.link_to(host), "up")
        ip(
            "-n",
            self.home.namespace,
            "route",
            "replace",
            host.address,
            "dev",
            self.link_to(host),
            "src",
            self.home.address,
        )

    def power_off(self, host: Host) -> None:
        """Without a word to anybody."""
        self.cut_off(host)
        assert host.node is not None
        host.node.process.kill()
        host.node.process.wait()

    def bytes_to(self, host: Host) -> tuple[int, int]:
        """Over the link so far: to the host, and back."""
        command = [*self.home.prefix, "cat", f"/sys/class/net/{self.link_to(host)}/statistics/tx_bytes"]
        back = [*command[:-1], command[-1].replace("tx_bytes", "rx_bytes")]
        sent, received = (subprocess.run(each, check=True, capture_output=True, text=True) for each in (command, back))
        return int(sent.stdout), int(received.stdout)

    def remove(self) -> None:
        for host in [*reversed(self._away), self.home]:
            host.remove()
        shutil.rmtree(self.folder, ignore_errors=True)
