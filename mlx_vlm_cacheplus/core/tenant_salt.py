"""The salt under which a tenant's prompts and pictures are cached.

Invariants:

1. A tenant's salt is 256 bits of a keyed hash of its name and of what the prompt holds
   beside its tokens (pictures, sound).  So no two tenants meet in one, and nobody
   without the key can say which salt a name has.
2. Whoever names no tenant has the payload's own 64-bit hash, as before: these requests
   share what they have in common, and no tenant's salt is among theirs.
3. The key is a file's, where :data:`KEY_FILE` names one; a salt is then the same in
   every process that has the file.  Otherwise it is drawn when the process first needs
   it: what a tenant has stored is not found again after a restart.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

KEY_FILE = "APC_TENANT_KEY_FILE"
SHORTEST_SECRET = 32  # bytes
# What an untold payload hash fits into; a tenant's salt does not.
PAYLOAD_BITS = 64


def read_secret(path: str) -> bytes:
    """The secret in a file, white space around it left out, as 64 bytes.

    Raises:
        ValueError: the file cannot be read, or holds too little to be a secret.
    """
    return hashlib.blake2b(secret_in(path)).digest()


def secret_in(path: str) -> bytes:
    """The secret itself; raises ValueError as ``read_secret`` does."""
    try:
        secret = Path(path).expanduser().read_bytes().strip()
    except OSError as problem:
        raise ValueError(f"the file cannot be read: {problem.strerror}") from None
    if len(secret) < SHORTEST_SECRET:
        raise ValueError(
            f"the file holds fewer than {SHORTEST_SECRET} bytes: "
            "`openssl rand -hex 32` makes a secret"
        )
    return secret


@functools.cache
def _key(path: str | None) -> bytes:
    return secrets.token_bytes(64) if path is None else read_secret(path)


def tenant_salt(tenant: str | None, payload_hash: int) -> int:
    """The salt of a tenant's prompt.

    Args:
        tenant: None or empty for a request that names none.
        payload_hash: of the prompt's pictures and the like, signed, of 64 bits.

    Raises:
        ValueError: the key's file cannot be read.
    """
    if not tenant:
        return payload_hash
    key = _key(os.environ.get(KEY_FILE))
    digest = hashlib.blake2b(key=key, digest_size=32, person=b"apc tenant salt")
    digest.update(payload_hash.to_bytes(PAYLOAD_BITS // 8, "little", signed=True))
    digest.update(str(tenant).encode())
    return int.from_bytes(digest.digest(), "little")


# The tenant's salt of the request whose pictures are being embedded.
_pictures_of: ContextVar[int | None] = ContextVar("pictures_of", default=None)


@contextlib.contextmanager
def pictures_of(salt: int | None) -> Iterator[None]:
    """Features of pictures are a tenant's own while this is open.

    Args:
        salt: the request's; None, or that of no tenant, shares them as before.
    """
    token = _pictures_of.set(salt)
    try:
        yield
    finally:
        _pictures_of.reset(token)


def picture_key(key: str) -> str:
    """The key of a picture's features, with the tenant they belong to."""
    salt = _pictures_of.get()
    if salt is None or salt.bit_length() <= PAYLOAD_BITS:
        return key
    return f"{int(salt):x}:{key}"
