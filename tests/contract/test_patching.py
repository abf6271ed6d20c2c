"""The patcher on classes of its own: identity, descriptors, order, refusal."""

from __future__ import annotations

import contextlib
import sys
import types

import pytest

from mlx_vlm_cacheplus.change import Target
from mlx_vlm_cacheplus.patching import ForeignWrapper, Patcher, PatchError

NAME = "patching_subject"


class Subject:
    value = 1

    def method(self, number):
        return number

    @staticmethod
    def static(number):
        return number

    @classmethod
    def klass(cls, number):
        return (cls, number)

    @property
    def prop(self):
        return self.value

    class Inner:
        def method(self):
            return "inner"


class Child(Subject):
    """Inherits all."""


def function(number):
    return number


QUALNAMES = (
    "Subject.method",
    "Subject.static",
    "Subject.klass",
    "Subject.prop",
    "Subject.value",
    "Subject.added",
    "Subject.Inner.method",
    "Child.method",
    "function",
    "added",
)


@pytest.fixture
def patcher(monkeypatch):
    module = types.ModuleType(NAME)
    module.Subject, module.Child, module.function = Subject, Child, function
    monkeypatch.setitem(sys.modules, NAME, module)
    made = Patcher()
    yield made
    made.check_invariants()
    made.revert()


def bound(patcher, owner="change"):
    return patcher.for_change(owner, [Target(NAME, name) for name in QUALNAMES])


def doubled(original):
    def replacement(*args):
        return ("doubled", original(*args))

    return replacement


def wrapped(wrapped, instance, args, kwargs):
    return ("wrapped", instance, wrapped(*args, **kwargs))


def raw(name):
    holder = sys.modules[NAME] if "." not in name else Subject
    return vars(holder)[name.split(".")[-1]]


@pytest.mark.parametrize(
    "name", ["Subject.method", "Subject.static", "Subject.klass", "function"]
)
@pytest.mark.parametrize("verb", ["wrap", "replace_method"])
def test_callables_keep_their_kind_and_come_back_identical(patcher, name, verb):
    original = raw(name)
    change = bound(patcher)
    getattr(change, verb)(NAME, name, wrapped if verb == "wrap" else doubled)
    subject = Subject()
    call = (
        sys.modules[NAME].function
        if name == "function"
        else getattr(subject, name.split(".")[-1])
    )
    result = call(3)
    expected = (Subject, 3) if name == "Subject.klass" else 3
    assert result[-1] == expected and result[0] in ("wrapped", "doubled")
    if verb == "wrap":
        owner = {"Subject.method": subject, "Subject.klass": Subject}.get(name)
        assert result[1] is owner
    else:
        assert type(raw(name)) is type(original)
    assert patcher.revert() == ("change",)
    assert raw(name) is original


def test_replaced_method_is_a_plain_function_with_the_stocks_name(patcher):
    bound(patcher).replace_method(NAME, "Subject.method", doubled)
    assert type(Subject.method) is types.FunctionType
    assert (
        Subject.method.__name__ == "method"
        and Subject.method.__qualname__ == "Subject.method"
    )


def test_a_method_runs_within_a_context(patcher):
    seen = []

    @contextlib.contextmanager
    def context(subject):
        seen.append(("in", subject))
        try:
            yield
        finally:
            seen.append(("out", subject))

    original, subject = raw("Subject.method"), Subject()
    expected = subject.method(3)
    bound(patcher).surround(NAME, "Subject.method", context)
    assert subject.method(3) == expected
    with pytest.raises(TypeError):
        subject.method(3, 4, 5, 6, 7)
    assert seen == [("in", subject), ("out", subject)] * 2
    patcher.revert()
    assert raw("Subject.method") is original


def test_a_method_is_preceded_by_what_sees_its_arguments(patcher):
    seen, subject = [], Subject()
    expected = subject.method(3)
    bound(patcher).precede(NAME, "Subject.method", lambda *args: seen.append(args))
    assert subject.method(3) == expected and seen == [(subject, 3)]


def test_property(patcher):
    original = raw("Subject.prop")
    bound(patcher).replace_method(NAME, "Subject.prop", doubled)
    assert Subject().prop == ("doubled", 1)
    patcher.revert()
    assert raw("Subject.prop") is original


def test_set_replaces_adds_and_deletes(patcher):
    change = bound(patcher)
    change.set(NAME, "Subject.value", 2)
    change.set(NAME, "Subject.added", None)
    change.set(NAME, "added", 5)
    assert (Subject.value, Subject.added, sys.modules[NAME].added) == (2, None, 5)
    patcher.revert()
    assert Subject.value == 1
    assert not hasattr(Subject, "added") and not hasattr(sys.modules[NAME], "added")


def test_set_on_a_subclass_uncovers_the_base_again(patcher):
    bound(patcher).set(NAME, "Child.method", lambda self, number: "child")
    assert Child().method(1) == "child" and Subject().method(1) == 1
    patcher.revert()
    assert "method" not in vars(Child) and Child().method(1) == 1


def test_inner_class(patcher):
    bound(patcher).replace_method(NAME, "Subject.Inner.method", doubled)
    assert Subject.Inner().method() == ("doubled", "inner")


@pytest.mark.parametrize("verb", ["wrap", "replace_method"])
def test_inherited_method_is_refused(patcher, verb):
    with pytest.raises(PatchError, match="base"):
        getattr(bound(patcher), verb)(NAME, "Child.method", doubled)
    assert len(patcher) == 0


def test_undeclared_target_is_refused(patcher):
    change = patcher.for_change("change", [Target(NAME, "Subject.method")])
    with pytest.raises(PatchError, match="not among the targets"):
        change.set(NAME, "Subject.value", 2)
    assert Subject.value == 1


def test_two_owners_on_one_target_leave_newest_first(patcher):
    original = raw("Subject.method")
    bound(patcher, "one").replace_method(NAME, "Subject.method", doubled)
    bound(patcher, "two").wrap(NAME, "Subject.method", wrapped)
    patcher.check_invariants()
    assert Subject().method(1)[0] == "wrapped"
    with pytest.raises(ForeignWrapper):
        patcher.revert("one")
    assert len(patcher) == 2
    assert patcher.revert("two") == ("two",)
    assert Subject().method(1) == ("doubled", 1)
    assert patcher.revert() == ("one",)
    assert raw("Subject.method") is original


def test_foreign_wrapper_keeps_everything_in_place(patcher):
    change = bound(patcher)
    change.set(NAME, "Subject.value", 2)
    change.replace_method(NAME, "Subject.method", doubled)
    ours = raw("Subject.method")
    Subject.method = lambda self, number: ours(self, number)
    with pytest.raises(ForeignWrapper, match="Subject.method"):
        patcher.revert()
    assert Subject.value == 2
    with pytest.raises(AssertionError):
        patcher.check_invariants()
    Subject.method = ours


def test_foreign_deletion_is_foreign_too(patcher):
    bound(patcher).set(NAME, "Subject.added", 1)
    del Subject.added
    with pytest.raises(ForeignWrapper):
        patcher.revert()
    Subject.added = 1


def test_wrapping_an_equal_value_is_still_told_apart(patcher):
    """Identity, not equality: 1.0 == 1, and somebody put it there."""
    bound(patcher).set(NAME, "Subject.value", 10**6)
    Subject.value = float(10**6)
    with pytest.raises(ForeignWrapper):
        patcher.revert()
    Subject.value = patcher._patches[0].installed
