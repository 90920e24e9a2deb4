"""What a reward process may use up, and, in a strict sandbox, what it may reach.

    limits      memory and processor time of each process, by the kernel: MemoryError, or SIGXCPU
    strict      for rewards that execute what the model wrote. Own namespaces: no network, no other process to see or
                signal, the whole file system read-only but an empty /dev/shm (and TMPDIR there), no socket by path,
                no privilege to get any of it back

In a strict sandbox the worker becomes three processes: the outer one, which the fork server knows; the first of the new
process namespace, with which everything in there ends; and the one that runs user code. The first two only wait, and
pass on how the third ended.

A file that the user may read can still be read in there. SECURITY.md tells what that means.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import socket
import struct
from pathlib import Path

from onbeat.errors import InputError
from onbeat.messages import Limits

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_ALL_NAMESPACES = _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWUSER | _CLONE_NEWPID | _CLONE_NEWNET
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_PRIVATE = 2, 4, 8, 1 << 18
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY, _SYS_MOUNT_SETATTR = -100, 0x8000, 1, 442
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_CAPABILITY_VERSION_3 = 0x20080522
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_SECCOMP_MACHINES = {"x86_64": (0xC000003E, 41, 425), "aarch64": (0xC00000B7, 198, 425)}
"""Architecture, and the numbers of socket and io_uring_setup."""
_X32_CALLS = 0x40000000
"""From here on x86-64 has the same calls once more, with numbers of their own."""
_SCRATCH = "/dev/shm"
_SCRATCH_BYTES = 256 << 20
_MAX_PROCESSES = 128
_SIGNALLED = 128


def confine(limits: Limits) -> None:
    """Before any user code. In a strict sandbox this returns in the innermost process alone."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limits.strict:
        try:
            _isolate()
        except OSError as error:
            raise InputError(
                f'reward.sandbox = "strict" needs Linux namespaces, which this kernel does not give here ({error}); '
                'allow unprivileged user namespaces, or set reward.sandbox = "off" and trust what is executed'
            ) from None
        resource.setrlimit(resource.RLIMIT_NPROC, (_MAX_PROCESSES, _MAX_PROCESSES))
    _limit(resource.RLIMIT_DATA, limits.memory_bytes, for_good=limits.strict)


def begin_call(limits: Limits) -> None:
    """Give the call its processor time, whatever earlier ones have used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + limits.cpu_s) + 1)


def _limit(what: int, value: int, *, for_good: bool = False) -> None:
    """The soft one, as far as the hard one goes; for good: the hard one, too."""
    _, hard = resource.getrlimit(what)
    lower = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (lower, lower if for_good else hard))


def _isolate() -> None:
    uid, gid = os.getuid(), os.getgid()
    _check(_libc().unshare(_ALL_NAMESPACES), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    if first := os.fork():
        code = _end_of(first)
        if code > _SIGNALLED:
            os.kill(os.getpid(), code - _SIGNALLED)
        os._exit(code)
    _check(_libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    _make_read_only()
    if worker := os.fork():
        os._exit(_end_of(worker))
    _drop_privileges()
    os.environ["TMPDIR"] = _SCRATCH


def _end_of(child: int) -> int:
    """Wait for it, and for whoever else is left to us meanwhile; its exit code, a signal added to _SIGNALLED."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return _SIGNALLED - code if code < 0 else code


def _make_read_only() -> None:
    libc = _libc()
    attributes = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY, 0, _MS_PRIVATE, 0)
    _check(
        libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, len(attributes)), "mount_setattr"
    )
    options = f"size={_SCRATCH_BYTES},mode=1777".encode()
    flags = _MS_NOSUID | _MS_NODEV
    _check(libc.mount(b"tmpfs", _SCRATCH.encode(), b"tmpfs", flags, options), f"mount {_SCRATCH}")
    if libc.mount(b"proc", b"/proc", b"proc", flags | _MS_NOEXEC, None) != 0:
        # Some containers mask parts of /proc, and the kernel allows no other view of it then: rather none.
        _check(libc.mount(b"tmpfs", b"/proc", b"tmpfs", flags | _MS_NOEXEC, b"size=4096,mode=555"), "mount /proc")


def _drop_privileges() -> None:
    """For good: no capability is left, and none comes back through a program that is executed."""
    libc = _libc()
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    capability = 0
    while libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _check(libc.capset(header, bytes(24)), "capset")
    _forbid_unix_sockets()


def _forbid_unix_sockets() -> None:
    """A socket with a path can be reached on a read-only file system, and behind it somebody outside: a session bus, a
    container daemon. So no new one is made (socketpairs are, of which nobody outside holds an end)."""
    if (machine := os.uname().machine) not in _SECCOMP_MACHINES:
        raise OSError(errno.ENOSYS, f"seccomp: the numbers of system calls on {machine} are not known")
    architecture, socket_call, uring_call = _SECCOMP_MACHINES[machine]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06  # of classic BPF: load a word, jump if, return
    refuse, allow = 0x00050000 | errno.EACCES, 0x7FFF0000
    program = [
        (load, 0, 0, 4),  # the architecture
        (equal, 1, 0, architecture),
        (give, 0, 0, refuse),  # another one's calls have other numbers
        (load, 0, 0, 0),  # the call
        (at_least, 4, 0, _X32_CALLS),
        (equal, 3, 0, uring_call),
        (equal, 0, 3, socket_call),
        (load, 0, 0, 16),  # its first argument, the family
        (equal, 0, 1, socket.AF_UNIX),
        (give, 0, 0, refuse),
        (give, 0, 0, allow),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    filter_ = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    _check(_libc().prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, filter_, 0, 0), "prctl(seccomp)")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
