"""A stock tree in memory, and the edits that turn it into a patched one.

An edit names a short exact anchor in one file, or a class or function by its name.
What it names must be there exactly once (within a class or function, where ``within``
names one), so that an edit can never land in another place than the one it was written
for.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import black
import isort

PACKAGE = "mlx_vlm"
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class PatchProblem(Exception):
    """Something that a person has to look at; the message says what and where."""


@dataclass(frozen=True)
class Edit:
    """Put ``replacement`` in the place of ``anchor`` in ``path``.

    within: dotted name of the class or function that the anchor must be looked for in.
    """

    path: str
    anchor: str
    replacement: str
    within: str | None = None


def after(path: str, anchor: str, text: str, within: str | None = None) -> Edit:
    """Insert ``text`` behind the anchor."""
    return Edit(path, anchor, anchor + text, within)


def before(path: str, anchor: str, text: str, within: str | None = None) -> Edit:
    """Insert ``text`` in front of the anchor."""
    return Edit(path, anchor, text + anchor, within)


@dataclass(frozen=True)
class Cut:
    """Put ``replacement`` in the place of all from ``first`` up to and without ``last``.

    last: the next of its kind behind ``first``; None for the end of ``within``.
    """

    path: str
    first: str
    last: str | None
    replacement: str = ""
    within: str | None = None


@dataclass(frozen=True)
class Delete:
    """Remove a class or function with its decorators and the comment right above it."""

    path: str
    name: str


@dataclass(frozen=True)
class Body:
    """Give a function another body, docstring included; its signature stays.

    text: the new body, indented as if the function stood at the margin.
    """

    path: str
    name: str
    text: str


@dataclass(frozen=True)
class DeleteFile:
    """Remove a file."""

    path: str


@dataclass(frozen=True)
class WithFile:
    """An edit that is made where a file is there that an earlier patch may bring or remove.

    there: that file; where it is not named, the edited one.
    """

    edit: AnyEdit
    there: str | None = None

    @property
    def path(self) -> str:
        """The file that is edited."""
        return self.edit.path


@dataclass(frozen=True)
class Either:
    """The one of these edits whose place is there, which depends on the patches before."""

    edits: tuple[AnyEdit, ...]

    @property
    def path(self) -> str:
        """The file that is edited."""
        return self.edits[0].path


AnyEdit = Edit | Cut | Delete | Body | DeleteFile | WithFile | Either


def either(*edits: AnyEdit) -> Either:
    """Return the edit that is the one of these that fits."""
    return Either(edits)


def within_either(edit: Edit, *names: str) -> Either:
    """Return an edit that is looked for within the one of these functions that has its anchor."""
    return Either(tuple(dataclasses.replace(edit, within=name) for name in names))


@dataclass
class Tree:
    """The files of a package by path, read on demand; what was written stays here."""

    folder: Path
    files: dict[str, str | None] = field(default_factory=dict)

    def read(self, path: str) -> str | None:
        """Return the text of a file, or None where there is none."""
        if path not in self.files:
            place = self.folder / Path(path).relative_to(PACKAGE)
            self.files[path] = (
                place.read_text(encoding="utf-8") if place.is_file() else None
            )
        return self.files[path]

    def write(self, path: str, text: str | None) -> None:
        """Set the text of a file, None for none; the folder on disk is left alone."""
        self.files[path] = text

    def copy(self) -> Tree:
        """Return a tree that can be written without changing this one."""
        return Tree(self.folder, dict(self.files))


def apply_edit(tree: Tree, edit: AnyEdit, change: str) -> None:
    """Apply one edit; raises PatchProblem where what it names is not there once."""
    text = tree.read(edit.path)
    where = f"{change}: {edit.path}"
    if isinstance(edit, WithFile):
        if tree.read(edit.there or edit.path) is not None:
            apply_edit(tree, edit.edit, change)
        return
    if isinstance(edit, Either):
        apply_edit(tree, _the_one_that_fits(tree, edit, change), change)
        return
    if text is None:
        raise PatchProblem(f"{where} does not exist in this stock: find its new place")
    if isinstance(edit, DeleteFile):
        tree.write(edit.path, None)
        return
    if isinstance(edit, Edit):
        start = _find(text, edit.anchor, edit.within, where)
        end, new = start + len(edit.anchor), edit.replacement
    elif isinstance(edit, Cut):
        start = _find(text, edit.first, edit.within, where)
        end, new = _end_of_cut(text, edit, start, where), edit.replacement
    elif isinstance(edit, Delete):
        (start, end), new = _whole_span(text, edit.name, where), ""
    else:
        (start, end), new = _body_span(text, edit.name, where), edit.text
        margin = "    " * edit.name.count(".")
        new = textwrap.indent(new, margin)
    tree.write(edit.path, text[:start] + new + text[end:])


def _the_one_that_fits(tree: Tree, either: Either, change: str) -> AnyEdit:
    fitting, problems = [], []
    for edit in either.edits:
        try:
            apply_edit(tree.copy(), edit, change)
            fitting.append(edit)
        except PatchProblem as problem:
            problems.append(problem)
    if len(fitting) > 1:
        raise PatchProblem(f"{change}: {either.path}: several edits fit: {fitting}")
    if not fitting:
        raise PatchProblem("\nor else ".join(map(str, problems)))
    return fitting[0]


def _find(text: str, anchor: str, within: str | None, where: str) -> int:
    """Return where the anchor begins, which must be there once."""
    start, end = 0, len(text)
    if within:
        start, end = _span(text, within, where)
    count = text[start:end].count(anchor)
    if count != 1:
        hint = (
            "upstream has rewritten it: read the new code and choose a new anchor"
            if count == 0
            else "make the anchor longer, or name the function with within="
        )
        scope = f" within {within}" if within else ""
        raise PatchProblem(
            f"{where}: the anchor occurs {count} times{scope}, not once ({hint}):\n"
            f"{anchor}"
        )
    return text.index(anchor, start, end)


def _end_of_cut(text: str, edit: Cut, start: int, where: str) -> int:
    end = _span(text, edit.within, where)[1] if edit.within else len(text)
    if edit.last is None:
        return end
    at = text.find(edit.last, start + len(edit.first), end)
    if at < 0:
        raise PatchProblem(
            f"{where}: the end of the cut is not behind its start:\n{edit.last}"
        )
    return at


@functools.lru_cache(maxsize=4)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _node(text: str, qualname: str, where: str) -> Definition:
    """Return the syntax tree of a class or function."""
    body = _parsed(text).body
    node: Definition | None = None
    for part in qualname.split("."):
        node = next(
            (n for n in body if isinstance(n, DEFINITIONS) and n.name == part), None
        )
        if node is None:
            raise PatchProblem(f"{where} has no {qualname}: find where it has gone")
        body = node.body
    assert node is not None
    return node


def _lines_span(text: str, first: int, last: int | None) -> tuple[int, int]:
    """Return the character range of lines, counted from 1, both included."""
    lines = text.splitlines(keepends=True)
    start = sum(len(line) for line in lines[: first - 1])
    return start, start + sum(len(line) for line in lines[first - 1 : last])


def _span(text: str, qualname: str, where: str) -> tuple[int, int]:
    """Return the character range of a class or function, decorators excluded."""
    node = _node(text, qualname, where)
    return _lines_span(text, node.lineno, node.end_lineno)


def _whole_span(text: str, qualname: str, where: str) -> tuple[int, int]:
    """Return its range with its decorators and the comment right above them."""
    node = _node(text, qualname, where)
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    lines = text.splitlines()
    while first > 1 and lines[first - 2].lstrip().startswith("#"):
        first -= 1
    return _lines_span(text, first, node.end_lineno)


def _body_span(text: str, qualname: str, where: str) -> tuple[int, int]:
    """Return the range of what stands below its signature."""
    node = _node(text, qualname, where)
    return _lines_span(text, node.body[0].lineno, node.end_lineno)


# -- core files ----------------------------------------------------------------


def as_upstream(text: str, source: str, target: str, moved: dict[str, str]) -> str:
    """Return a core file as it stands in upstream's package: other imports, no other change.

    source, target: paths of the core file and of its place upstream.
    moved: every core path and its upstream path, of this change and those before it.
    """
    lines = text.splitlines(keepends=True)
    modules = {_module(path): _module(place) for path, place in moved.items()}
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom):
            continue
        line = lines[node.lineno - 1]
        full = _absolute(node, _module(source))
        siblings = [f"{full}.{alias.name}" for alias in node.names]
        if full not in modules and all(name in modules for name in siblings):
            # ``from . import a, b``, where a and b are modules of their own.
            lines[node.lineno - 1] = "".join(
                _import_of(modules[f"{full}.{alias.name}"], alias, _module(target))
                for alias in node.names
            )
            continue
        if full.split(".")[0] not in (PACKAGE, _module(source).split(".")[0]):
            continue
        if full.split(".")[0] != PACKAGE and full not in modules:
            raise PatchProblem(
                f"{source}:{node.lineno} imports {full}, which no patch up to here brings"
            )
        there = modules.get(full, full)
        spelled = "." * node.level + (node.module or "")
        relative = _relative(there, _module(target))
        lines[node.lineno - 1] = line.replace(
            f"from {spelled} import", f"from {relative} import", 1
        )
    return formatted("".join(lines))


def formatted(text: str) -> str:
    """Return a file as upstream's hooks, run in upstream's tree, leave it.

    Formatting large files is what the making of patches waits for, and what a step
    has formatted the next one starts from: no text is formatted twice.
    """
    if text not in _formatted:
        ordered = isort.code(text, profile="black", known_first_party=[PACKAGE])
        result = black.format_str(ordered, mode=black.Mode())
        _formatted[text] = _formatted[result] = result
    return _formatted[text]


_formatted: dict[str, str] = {}


def code_without_imports(text: str) -> list[str]:
    """Return the lines that are neither import statements nor blank."""
    drop: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            drop.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = text.splitlines()
    return [s for i, s in enumerate(lines, 1) if i not in drop and s.strip()]


def imported_names(text: str) -> set[str]:
    """Return the absolute dotted names that a file imports; what is imported from a module too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _absolute(node: ast.ImportFrom, module: str) -> str:
    if not node.level:
        return node.module or ""
    parent = module.split(".")[: -node.level]
    return ".".join([*parent, *([node.module] if node.module else [])])


def _import_of(module: str, alias: ast.alias, importer: str) -> str:
    """Return the line that imports a module under the name that the core file uses."""
    parent, _, name = module.rpartition(".")
    used = alias.asname or alias.name
    renamed = "" if name == used else f" as {used}"
    return f"from {_relative(parent, importer)} import {name}{renamed}\n"


def _relative(module: str, importer: str) -> str:
    """Return ``module`` as upstream's file ``importer`` would spell it."""
    here, there = importer.split(".")[:-1], module.split(".")
    same = 0
    while same < min(len(here), len(there)) and here[same] == there[same]:
        same += 1
    return "." * (len(here) - same + 1) + ".".join(there[same:])
