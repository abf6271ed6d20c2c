"""Wrap and restore symbols of the stock; the only module that imports wrapt.

Invariants, checked by `check_invariants()`:
1. For every patch on the list, the holder's own dictionary holds the object that the patch installed, or the one that a
   later patch of the list installed over it.
2. A patch remembers the raw object it replaced (descriptor and all), so that a revert restores identity, not equality.
3. Patches leave in the opposite order. Where somebody else wrapped on top, nothing leaves.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import wrapt

from .change import Target

ABSENT = object()


class PatchError(RuntimeError):
    """A patch that cannot be made; the change it belongs to is rolled back."""


class ForeignWrapper(PatchError):
    """A target no longer holds what we installed: somebody wrapped on top."""


@dataclass(frozen=True)
class _Patch:
    owner: str
    target: Target
    holder: Any
    attribute: str
    original: Any
    installed: Any


def when_imported(module: str, hook: Callable[[Any], None]) -> None:
    """Call hook(module) after the module's import, or now where it is imported already."""
    wrapt.register_post_import_hook(hook, module)


def resolve_holder(module: str, qualname: str) -> tuple[Any, str]:
    """The object that owns the symbol, and the symbol's own name.

    The module comes from sys.modules: as an attribute, `mlx_vlm.generate` is a function that hides the package.
    """
    holder: Any = sys.modules.get(module) or importlib.import_module(module)
    *path, attribute = qualname.split(".")
    for part in path:
        holder = vars(holder)[part]
    return holder, attribute


def raw_value(holder: Any, attribute: str) -> Any:
    """What the holder itself stores, without binding and without looking at base classes; ABSENT where nothing."""
    return vars(holder).get(attribute, ABSENT)


class Patcher:
    """Owns every patch of this process."""

    def __init__(self) -> None:
        self._patches: list[_Patch] = []

    def __len__(self) -> int:
        return len(self._patches)

    def owners(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(patch.owner for patch in self._patches))

    def targets(self) -> tuple[Target, ...]:
        return tuple(patch.target for patch in self._patches)

    def holds(self, holder: Any, attribute: str, value: Any) -> bool:
        """Whether the value at that place is one of ours."""
        return any(
            p.holder is holder and p.attribute == attribute and p.installed is value
            for p in self._patches
        )

    def for_change(self, owner: str, targets: Iterable[Target]) -> ChangePatcher:
        return ChangePatcher(self, owner, targets)

    def install(
        self,
        owner: str,
        target: Target,
        build: Callable[[Any], Any],
        within: str = "",
    ) -> None:
        """Put build(original raw object) in the original's place. The original is ABSENT where nothing is there.

        within: a dotted path from the object that the target names to the attribute, where that object stays.
        """
        path = f"{target.qualname}.{within}" if within else target.qualname
        holder, attribute = resolve_holder(target.module, path)
        original = raw_value(holder, attribute)
        installed = build(original)
        setattr(holder, attribute, installed)
        self._patches.append(
            _Patch(owner, target, holder, attribute, original, installed)
        )

    def revert(self, owner: str | None = None) -> tuple[str, ...]:
        """Undo the patches of one owner, or all, newest first. All or nothing: raises ForeignWrapper before touching
        anything. Returns the owners, newest first."""
        leaving = [
            p for p in reversed(self._patches) if owner is None or p.owner == owner
        ]
        simulated: dict[tuple[int, str], Any] = {}
        for patch in leaving:
            place = (id(patch.holder), patch.attribute)
            current = simulated.get(place, raw_value(patch.holder, patch.attribute))
            if current is not patch.installed:
                raise ForeignWrapper(
                    f"{patch.target} is wrapped by somebody else on top of {patch.owner}"
                )
            simulated[place] = patch.original
        for patch in leaving:
            if patch.original is ABSENT:
                delattr(patch.holder, patch.attribute)
            else:
                setattr(patch.holder, patch.attribute, patch.original)
            self._patches.remove(patch)
        return tuple(dict.fromkeys(patch.owner for patch in leaving))

    def check_invariants(self) -> None:
        newest: dict[tuple[int, str], _Patch] = {}
        for patch in self._patches:
            below = newest.get((id(patch.holder), patch.attribute))
            assert (
                below is None or patch.original is below.installed
            ), f"{patch.target}: chain broken"
            newest[(id(patch.holder), patch.attribute)] = patch
        for patch in newest.values():
            held = raw_value(patch.holder, patch.attribute)
            assert (
                held is patch.installed
            ), f"{patch.target}: not what {patch.owner} installed"


class ChangePatcher:
    """What `Change.apply` gets: the patcher, restricted to the targets that the change declared."""

    def __init__(self, patcher: Patcher, owner: str, targets: Iterable[Target]) -> None:
        self._patcher = patcher
        self._owner = owner
        self._targets = {(t.module, t.qualname): t for t in targets}

    def wrap(self, module: str, qualname: str, wrapper: Callable[..., Any]) -> None:
        """Wrap a callable: wrapper(wrapped, instance, args, kwargs). Costs a proxy a call: not for the decode path."""

        def build(original: Any) -> Any:
            return wrapt.FunctionWrapper(
                self._existing(original, module, qualname), wrapper
            )

        self._patcher.install(self._owner, self._declared(module, qualname), build)

    def replace_method(
        self, module: str, qualname: str, factory: Callable[[Callable], Callable]
    ) -> None:
        """Put factory(original function) in its place: a plain function, no proxy. A staticmethod, classmethod or
        property stays one; of a property the getter is replaced."""

        def build(original: Any) -> Any:
            return _rebuild(self._existing(original, module, qualname), factory)

        self._patcher.install(self._owner, self._declared(module, qualname), build)

    def surround(
        self,
        module: str,
        qualname: str,
        context: Callable[[Any], AbstractContextManager[Any]],
    ) -> None:
        """Let each call of a method run within context(self)."""

        def factory(original: Callable) -> Callable:
            def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
                with context(self):
                    return original(self, *args, **kwargs)

            return wrapper

        self.replace_method(module, qualname, factory)

    def precede(self, module: str, qualname: str, note: Callable[..., Any]) -> None:
        """Before each call of a method call note with the same arguments, self included."""

        def factory(original: Callable) -> Callable:
            def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
                note(self, *args, **kwargs)
                return original(self, *args, **kwargs)

            return wrapper

        self.replace_method(module, qualname, factory)

    def set(self, module: str, qualname: str, value: Any) -> None:
        """Replace or add an attribute; a revert restores or deletes it."""
        self._patcher.install(
            self._owner, self._declared(module, qualname), lambda original: value
        )

    def set_within(self, module: str, qualname: str, path: str, value: Any) -> None:
        """Replace an attribute inside the object that a target names, such as ("...app", "app", "router.routes")."""
        self._patcher.install(
            self._owner, self._declared(module, qualname), lambda original: value, path
        )

    def _declared(self, module: str, qualname: str) -> Target:
        try:
            return self._targets[(module, qualname)]
        except KeyError:
            raise PatchError(
                f"{module}:{qualname} is not among the targets that {self._owner} declares"
            ) from None

    @staticmethod
    def _existing(original: Any, module: str, qualname: str) -> Any:
        if original is ABSENT:
            raise PatchError(
                f"{module}:{qualname} does not exist (an inherited method has its target on the base)"
            )
        return original


def _rebuild(raw: Any, factory: Callable[[Callable], Callable]) -> Any:
    if isinstance(raw, (staticmethod, classmethod)):
        return type(raw)(_renamed(raw.__func__, factory))
    if isinstance(raw, property):
        if raw.fget is None:
            raise PatchError("a property without a getter cannot be replaced")
        return property(_renamed(raw.fget, factory), raw.fset, raw.fdel, raw.__doc__)
    return _renamed(raw, factory)


def _renamed(function: Any, factory: Callable[[Callable], Callable]) -> Callable:
    replacement = factory(function)
    if isinstance(replacement, FunctionType) and not hasattr(
        replacement, "__wrapped__"
    ):
        functools.update_wrapper(replacement, function)
    return replacement
