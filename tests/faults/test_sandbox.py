"""What reward code may use up, and what it cannot reach: real processes, real limits, real namespaces."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from onbeat.environment import scrubbed
from onbeat.errors import InputError
from onbeat.reward.sandbox import _libc
from onbeat.reward.scorer import RewardScorer
from tests.fakes.rewards import (
    Function,
    completions_of,
    poisoned,
    prompt_of,
    rewards_of,
    run,
    with_scorer,
    write,
)

MEMORY_BYTES = 512 << 20


def has_namespaces() -> bool:
    """Whether this kernel gives a process its own ones: tried in a child."""
    if (pid := os.fork()) == 0:
        os._exit(_libc().unshare(0x10000000) != 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


strict = pytest.mark.skipif(not has_namespaces(), reason="this kernel gives no user namespaces")


def test_a_reward_that_takes_too_much_memory_gets_an_error_and_its_neighbours_their_rewards(tmp_path: Path) -> None:
    rollouts, counts = run(tmp_path, poisoned(tmp_path, "block = b'x' * (4 << 30)"), memory_bytes=MEMORY_BYTES)
    assert rewards_of(rollouts) == [1.0, 2.0, None, 4.0]
    assert "raised MemoryError" in str(rollouts[2].problem)
    assert counts.restarts == 0


def test_a_process_that_a_reward_left_behind_burning_the_processor_is_ended(tmp_path: Path) -> None:
    body = """
        child = os.fork()
        if child == 0:
            while True:
                pass
        status = os.waitpid(child, 0)[1]
        values[row] = float(os.WTERMSIG(status) == signal.SIGXCPU)
    """
    rollouts, _ = run(tmp_path, poisoned(tmp_path, body), workers=1, cpu_s=1.0)
    assert rewards_of(rollouts) == [1.0, 2.0, 1.0, 4.0]


def test_a_call_has_its_own_processor_time_however_many_there_were(tmp_path: Path) -> None:
    body = "import time\nbegan = time.process_time()\nwhile time.process_time() - began < 0.7: pass"

    async def score_five_groups(scorer: RewardScorer) -> list[list[float | None]]:
        return [rewards_of(await scorer.score(prompt_of(), completions_of(["poison"]))) for _ in range(5)]

    found = with_scorer(tmp_path, poisoned(tmp_path, body), use=score_five_groups, workers=1, cpu_s=1.0)
    assert found == [[6.0]] * 5


def test_reward_processes_see_no_secrets_but_those_they_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("JUDGE_KEY", "needed")
    file = write(
        tmp_path,
        "import os\ndef reward(completions):\n"
        "    return [float('HF_TOKEN' in os.environ), float(os.environ.get('JUDGE_KEY') == 'needed')]\n",
    )
    function = Function(f"{file}:reward")
    assert rewards_of(run(tmp_path, function, texts=["a", "b"])[0]) == [0.0, 0.0]
    assert rewards_of(run(tmp_path, function, texts=["a", "b"], keep=("JUDGE_KEY",))[0]) == [0.0, 1.0]


def test_what_python_needs_is_kept() -> None:
    found = scrubbed({"PATH": "/bin", "LC_ALL": "C", "AWS_SECRET_ACCESS_KEY": "x", "PYTHONPATH": "y", "K": "z"}, ("K",))
    assert found == {"PATH": "/bin", "LC_ALL": "C", "PYTHONPATH": "y", "K": "z"}


ESCAPES = {
    "write a file": "open({place!r}, 'w').write('x')",
    "remove a file": "os.remove({file!r})",
    "reach the network": "import socket; socket.create_connection(('127.0.0.1', {port}), 5)",
    "signal somebody": "os.kill({pid}, 0)",
    "see other processes": "open('/proc/{pid}/environ', 'rb').read()",
    "reach somebody by a socket's path": "import socket; socket.socket(socket.AF_UNIX).connect({unix!r})",
    "the same by its other number": (
        "import ctypes, errno; libc = ctypes.CDLL(None, use_errno=True); libc.syscall(0x40000029, 1, 1, 0); "
        "raise_it = ctypes.get_errno() == errno.EACCES and (_ for _ in ()).throw(PermissionError())"
    ),
    "take more memory": "import resource; resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))",
    "become root again": "os.setuid(0) if os.getuid() else os.mkdir('/root/x')",
    "mount it back": (
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True); "
        "result = libc.mount(b'none', b'/', None, 32 | 4096, None); "
        "raise_it = result != 0 and (_ for _ in ()).throw(PermissionError(ctypes.get_errno(), 'mount'))"
    ),
    "leave the namespace": (
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True); "
        "result = libc.setns(os.open('/proc/1/ns/mnt', os.O_RDONLY), 0); "
        "raise_it = result != 0 and (_ for _ in ()).throw(PermissionError(ctypes.get_errno(), 'setns'))"
    ),
}


@strict
@pytest.mark.parametrize("escape", ESCAPES)
def test_from_a_strict_sandbox_nobody_can(tmp_path: Path, escape: str) -> None:
    (tmp_path / "file").write_text("precious")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as by_path:
        by_path.bind(str(tmp_path / "socket"))
        by_path.listen()
        body = ESCAPES[escape].format(
            place=str(tmp_path / "new"),
            file=str(tmp_path / "file"),
            port=server.getsockname()[1],
            pid=os.getpid(),
            unix=str(tmp_path / "socket"),
        )
        told = f"try:\n    {body}\nexcept (OSError, ValueError):\n    values[row] = -1.0"
        outside, _ = run(tmp_path, poisoned(tmp_path, told))
        inside, _ = run(tmp_path, poisoned(tmp_path, told), strict=True)
    assert rewards_of(inside) == [1.0, 2.0, -1.0, 4.0]
    if escape not in ("remove a file", "become root again", "mount it back", "leave the namespace"):
        assert rewards_of(outside) == [1.0, 2.0, 6.0, 4.0]  # so it is the sandbox that forbade it


@strict
def test_a_strict_sandbox_has_a_place_of_its_own_to_write(tmp_path: Path) -> None:
    body = "import tempfile\nwith tempfile.NamedTemporaryFile() as file: values[row] = float(file.write(b'abc'))"
    rollouts, _ = run(tmp_path, poisoned(tmp_path, body), strict=True)
    assert rewards_of(rollouts) == [1.0, 2.0, 3.0, 4.0]
    assert not any(name.startswith("tmp") for name in os.listdir("/dev/shm"))


@strict
@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("os._exit(3)", "ended with its process: exit status 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended with its process: SIGSEGV"),
        ("while True: os.fork()", "took longer than 2 s"),
    ],
)
def test_what_happens_in_a_strict_sandbox_is_told_and_over_with_it(tmp_path: Path, body: str, cause: str) -> None:
    rollouts, _ = run(tmp_path, poisoned(tmp_path, body), strict=True, timeout_s=2.0)
    assert rewards_of(rollouts) == [1.0, 2.0, None, 4.0]
    assert cause in str(rollouts[2].problem)


def test_where_the_kernel_gives_no_namespaces_strict_is_refused_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import onbeat.reward.sandbox as sandbox\n"
        "def refuse(): raise PermissionError(1, 'unshare: Operation not permitted')\n"
        "sandbox._isolate = refuse\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    with pytest.raises(InputError, match=r'reward\.sandbox = "strict" needs Linux namespaces'):
        run(tmp_path, poisoned(tmp_path, "pass"), strict=True)
