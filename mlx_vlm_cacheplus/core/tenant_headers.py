"""Which tenant a request may name, and how.

A request names its tenant in one of :data:`HEADERS`, or in the one that the operator
has chosen (:data:`HEADER_NAME`).  What is behind this middleware finds it in the first
of :data:`HEADERS`, and no other.

- A name is 1 to 128 visible ASCII characters without commas, in a header that is sent
  once; anything else, nothing included, is refused with 400.  Of two headers the first
  of the list counts, as it always did.
- A header that does not name tenants here is refused with 400 as well, unless one that
  does is there too: whoever asks to be kept apart is never served from what all share.
- With a proxy's secret (:data:`PROXY_SECRET_FILE`) a tenant's name counts only in a
  request that brings the secret in :data:`PROXY_SECRET`, and in one header alone, the
  chosen one or the first of the list; without the secret, or with another one, the
  request is refused with 403.  The address that a request comes from says nothing:
  servers put a forwarded one in its place.
- Who names no tenant is served as before.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from .tenant_salt import KEY_FILE, read_secret, secret_in

HEADERS = ("x-apc-tenant", "x-tenant-id")
PROXY_SECRET = "x-apc-proxy-secret"

HEADER_NAME = "APC_TENANT_HEADER"
PROXY_SECRET_FILE = "APC_TENANT_PROXY_SECRET_FILE"

# Visible ASCII; a comma would be two headers that somebody has joined.
TENANT = re.compile(r"[!-+\--~]{1,128}")
NAME_OF_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


class Refused(Exception):
    """A request that is not served; status and message are its answer's."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Rules:
    """What counts as a tenant's name.

    Attributes:
        names: headers that name a tenant, lower case; the first one sent counts.
        proxy_secret: what ``read_secret`` makes of the proxy's; None trusts everybody.
    """

    names: tuple[str, ...] = HEADERS
    proxy_secret: bytes | None = None

    def tenant(self, sent: Headers) -> str | None:
        """The tenant that a request names, or None; raises Refused."""
        if self.proxy_secret is not None:
            self._check_proxy(sent, self.proxy_secret)
        found = [self._value(sent, name) for name in self.names if name in sent]
        if found:
            return found[0]
        for name in HEADERS:
            if name in sent:
                message = f"{name} does not name a tenant here: {self.names[0]} does."
                raise Refused(400, message)
        return None

    def _check_proxy(self, sent: Headers, secret: bytes) -> None:
        given = sent.getlist(PROXY_SECRET)
        if not given and not any(name in sent for name in (*self.names, *HEADERS)):
            return
        digests = [hashlib.blake2b(value.encode("latin-1")).digest() for value in given]
        if len(digests) != 1 or not hmac.compare_digest(digests[0], secret):
            raise Refused(403, "Only the server's proxy may name a tenant.")

    @staticmethod
    def _value(sent: Headers, name: str) -> str:
        values = sent.getlist(name)
        if len(values) != 1 or not TENANT.fullmatch(values[0]):
            form = "1 to 128 visible ASCII characters and no comma"
            raise Refused(400, f"{name} must be sent once, with {form}.")
        return values[0]


def check_header_name(name: str) -> None:
    """Raises ValueError where this cannot be a header's name."""
    if not NAME_OF_HEADER.fullmatch(name):
        raise ValueError("it is not the name of a header")
    if name.lower() == PROXY_SECRET:
        raise ValueError("that header brings the proxy's secret")


def check_proxy_secret(path: str) -> None:
    """Raises ValueError where a file holds no secret that a header can bring."""
    if not re.fullmatch(rb"[!-~]+", secret_in(path)):
        raise ValueError("the secret is not one line of visible ASCII characters")


@functools.cache
def _rules(name: str | None, secret_file: str | None) -> Rules:
    if name is not None:
        check_header_name(name)
    if secret_file is None:
        return Rules(HEADERS if name is None else (name.lower(),))
    # One header alone: a proxy sets that, and may pass a client's other one on.
    return Rules(((name or HEADERS[0]).lower(),), read_secret(secret_file))


def current_rules() -> Rules:
    """The rules that the environment sets; raises ValueError where it sets none."""
    return _rules(os.environ.get(HEADER_NAME), os.environ.get(PROXY_SECRET_FILE))


# Variables, and what says whether a value will do.
SETTINGS = {
    HEADER_NAME: check_header_name,
    KEY_FILE: read_secret,
    PROXY_SECRET_FILE: check_proxy_secret,
}


def check_settings() -> None:
    """Raises ValueError where a server must not start with what the environment sets."""
    for name, check in SETTINGS.items():
        if name in os.environ:
            try:
                check(os.environ[name])
            except ValueError as problem:
                raise ValueError(f"{name}: {problem}") from None


def refusal(refused: Refused) -> JSONResponse:
    """The answer, with the message where each protocol's clients look for it."""
    message = str(refused)
    kind = "permission_error" if refused.status == 403 else "invalid_request_error"
    body = {
        "type": "error",
        "error": {"type": kind, "message": message},
        "detail": message,
    }
    return JSONResponse(body, refused.status)


class TenantsAreNamedAsAgreed:
    """ASGI middleware: what is behind it sees one sound tenant header, or none."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            tenant = current_rules().tenant(Headers(scope=scope))
        except Refused as refused:
            await refusal(refused)(scope, receive, send)
            return
        scope["headers"] = _with_tenant(scope["headers"], tenant)
        await self.app(scope, receive, send)


def _with_tenant(
    headers: Sequence[tuple[bytes, bytes]], tenant: str | None
) -> list[tuple[bytes, bytes]]:
    """The raw headers with this tenant alone, and without the proxy's secret."""
    left_out = {name.encode() for name in (*HEADERS, PROXY_SECRET)}
    kept = [(name, value) for name, value in headers if name.lower() not in left_out]
    if tenant is not None:
        kept.append((HEADERS[0].encode(), tenant.encode()))
    return kept
