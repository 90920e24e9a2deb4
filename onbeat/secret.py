"""Who knows the run's token may talk to it from another machine. The token itself never crosses the wire.

    run ── Challenge(nonce) ──▶ stranger
        ◀─ Proof(nonce, mac) ──          mac = HMAC(token, "worker" + both nonces)
        ── Proven(mac) ─────────▶        mac = HMAC(token, "run" + both nonces): the run knows it too

A nonce is used once, so what was overheard proves nothing later. What follows is neither encrypted nor signed: across
a network that is not yours, go through a tunnel (SECURITY.md).
"""

from __future__ import annotations

import hmac
import os
import stat
from pathlib import Path

from msgspec import Struct

from onbeat.errors import ConfigError

NONCE_BYTES = 32
MIN_TOKEN_BYTES = 16


class Challenge(Struct, frozen=True, tag=True):
    nonce: bytes


class Proof(Struct, frozen=True, tag=True):
    nonce: bytes
    mac: bytes


class Proven(Struct, frozen=True, tag=True):
    mac: bytes


def new_nonce() -> bytes:
    return os.urandom(NONCE_BYTES)


def _mac(token: bytes, who: bytes, challenge: Challenge, nonce: bytes) -> bytes:
    return hmac.digest(token, b"onbeat " + who + challenge.nonce + nonce, "sha256")


def prove(token: bytes, challenge: Challenge) -> Proof:
    nonce = new_nonce()
    return Proof(nonce, _mac(token, b"worker", challenge, nonce))


def is_proof(token: bytes, challenge: Challenge, proof: Proof) -> bool:
    """In a time that tells nothing about the token."""
    right = hmac.compare_digest(proof.mac, _mac(token, b"worker", challenge, proof.nonce))
    return right and len(proof.nonce) == NONCE_BYTES


def prove_back(token: bytes, challenge: Challenge, proof: Proof) -> Proven:
    return Proven(_mac(token, b"run", challenge, proof.nonce))


def is_proven(token: bytes, challenge: Challenge, proof: Proof, proven: Proven) -> bool:
    return hmac.compare_digest(proven.mac, _mac(token, b"run", challenge, proof.nonce))


def read_token(path: str, key: str) -> bytes:
    """The token in a file that only its owner may read. `key` is what the user called it by."""
    try:
        mode = os.stat(path).st_mode
        token = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{key} = {path!r} cannot be read: {error.strerror}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{key} = {path!r} can be read by others (mode {stat.S_IMODE(mode):o}): chmod 600 it")
    if len(token) < MIN_TOKEN_BYTES:
        raise ConfigError(
            f"{key} = {path!r} holds {len(token)} bytes; a token has at least {MIN_TOKEN_BYTES}: "
            "head -c 32 /dev/urandom | base64"
        )
    return token
