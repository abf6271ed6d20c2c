"""What a change is, and what is said about it.

One change is one module in `changes/`, one patch, one PR text, joined by its name. Everything a reader needs to know about
it (why, upstream link, when to delete it) is data here; prose is generated from it.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .fingerprint import StockTree
    from .patching import ChangePatcher

SUPPORTED_VERSIONS = ("0.7.6", "0.7.8", "0.7.9", "0.7.10")


class State(str, enum.Enum):
    """Where a change stands in this process."""

    APPLIED = "applied"
    OFF = "off"
    ALREADY_UPSTREAM = "already_upstream"
    UNKNOWN_VERSION = "unknown_version"
    DRIFTED = "drifted"
    TOO_LATE = "too_late"
    FAILED = "failed"
    # Checked and not applied: what doctor says of a change that a server start would apply.
    READY = "ready"

    def __str__(self) -> str:
        return self.value

    @property
    def is_good(self) -> bool:
        """The stock has what the change gives, or nobody asked for it."""
        return self in (State.APPLIED, State.READY, State.ALREADY_UPSTREAM, State.OFF)


@dataclass(frozen=True)
class Target:
    """One symbol of the stock that a change wraps, replaces or (must_exist=False) adds."""

    module: str
    qualname: str
    must_exist: bool = True

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"


@dataclass(frozen=True)
class Option:
    """A command-line option that a change adds to the stock server. Its value is kept in a variable, so that child
    processes and `--reload` workers see it, and so that it can be set without the flag.
    """

    flag: str
    env: str
    help: str
    metavar: str = "VALUE"
    # Called with the text; raises ValueError with a sentence on a bad value.
    check: Callable[[str], Any] | None = None
    # Variables that a value sets where the user has not, also where the change is not applied.
    implies: Mapping[str, Mapping[str, str]] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Finding:
    """What is true of one change: its state and, where it is not applied, why and what to do."""

    name: str
    state: State
    reason: str = ""
    remedy: str = ""

    def line(self) -> str:
        detail = "; ".join(part for part in (self.reason, self.remedy) if part)
        return f"{self.name}: {self.state}" + (f" ({detail})" if detail else "")


@dataclass
class Report:
    """What happened in this process, one finding a change, in the order of the changes."""

    version: str
    stock_version: str
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> Finding:
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(name)

    def state(self, name: str) -> State:
        return self[name].state

    @property
    def applied(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.findings if f.state is State.APPLIED)

    def lines(self) -> list[str]:
        head = f"{self.version} on mlx-vlm {self.stock_version}"
        return [head, *(finding.line() for finding in self.findings), *self.notes]

    def as_dict(self) -> dict[str, Any]:
        changes = [
            {**asdict(finding), "state": finding.state.value}
            for finding in self.findings
        ]
        return {
            "version": self.version,
            "mlx_vlm": self.stock_version,
            "changes": changes,
            "notes": list(self.notes),
        }


class Change:
    """The contract. Subclass it, fill in the fields, implement `apply`.

    A module that holds a change is imported without mlx and without mlx_vlm: import those inside `apply`.
    """

    name: str = ""
    # One sentence for a list.
    summary: str = ""
    # Releases of mlx-vlm whose sources were read and tested with this change.
    versions: tuple[str, ...] = SUPPORTED_VERSIONS
    targets: tuple[Target, ...] = ()
    why: str = ""
    # Link to the issue or pull request, or the reason why there is none.
    upstream: str = ""
    remove_when: str = ""
    # A promise to the user (isolation): it never starts silently without it. Everything else is a speed-up.
    guarantee: bool = False
    # Names of changes that must be in effect, by us or by upstream.
    requires: tuple[str, ...] = ()
    # Names of changes whose files its patch uses; the plugin has these files whatever is in effect.
    patch_requires: tuple[str, ...] = ()
    # False for plumbing that only the plugin needs; it has no patch and no PR text.
    has_patch: bool = True
    # Modules, or "module:qualname", that exist once the change is in the stock; read by the default probe().
    marks: tuple[str, ...] = ()
    options: tuple[Option, ...] = ()
    # Variables of the stock that this change sets where the user has not.
    env_defaults: Mapping[str, str] = {}
    # {version: {"module:qualname": hash}} for a change from outside this package; ours are in fingerprints/.
    fingerprints: Mapping[str, Mapping[str, str | None]] | None = None

    def probe(self, stock: StockTree) -> bool:
        """Whether this stock has the change already. Reads files; imports nothing of the stock."""
        return bool(self.marks) and all(stock.has(mark) for mark in self.marks)

    def too_late(self) -> str:
        """Why the change can no longer take effect in this process; empty when it can. The general reasons (a model
        is being served, a target was replaced) are checked for every change; this is for special ones: an application
        that has answered a request takes no more middleware.
        """
        for target in self.targets:
            app = getattr(sys.modules.get(target.module), "app", None)
            if target.qualname == "app" and getattr(app, "middleware_stack", None):
                return "the server has answered requests already"
        return ""

    def apply(self, patcher: ChangePatcher) -> None:
        """Wrap the targets. Every check has passed; on an exception everything is rolled back."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<Change {self.name}>"
