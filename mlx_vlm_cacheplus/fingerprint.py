"""Hashes of the stock's source text, and the versions whose hashes are known.

A change was written against the text of its targets. Where the text differs, the change is not applied. Files are read and
parsed, never imported, so a check costs no mlx. Line endings are the only thing that is normalised: a comment that
moved is worth a look too.

`python -m mlx_vlm_cacheplus.fingerprint refresh [--stock DIR ...]` writes fingerprints/<version>.json.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from .change import Change, Target

FOLDER = Path(__file__).parent / "fingerprints"
HASH_LENGTH = 16
REFRESH = "python -m mlx_vlm_cacheplus.fingerprint refresh"


class StockMissing(RuntimeError):
    """No mlx_vlm can be found or read."""


class StockTree:
    """The files of one mlx_vlm package."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def installed(cls) -> StockTree:
        """The package that `import mlx_vlm` gives, found without importing it."""
        try:
            spec = importlib.util.find_spec("mlx_vlm")
        except (ImportError, ValueError) as problem:
            raise StockMissing(f"mlx_vlm cannot be found: {problem}") from problem
        if spec is None or spec.origin is None:
            raise StockMissing("mlx_vlm is not installed in this environment")
        return cls(Path(spec.origin).parent)

    @functools.cached_property
    def version(self) -> str:
        """From the tree itself: a source tree on the path has no metadata, or another release's."""
        try:
            text = (self.folder / "version.py").read_text(encoding="utf-8")
        except OSError as problem:
            raise StockMissing(
                f"{self.folder} is no mlx_vlm package: {problem}"
            ) from problem
        found = re.search(r"^__version__\s*=\s*[\"']([^\"']+)[\"']", text, re.MULTILINE)
        return found.group(1) if found else "unknown"

    def path(self, module: str) -> Path | None:
        """The file of a module of the package, or None where there is none."""
        package, *rest = module.split(".")
        if package != "mlx_vlm":
            return None
        place = self.folder.joinpath(*rest)
        candidates = (place / "__init__.py", place.parent / f"{place.name}.py")
        return next((path for path in candidates if path.is_file()), None)

    def relative(self, module: str) -> str:
        path = self.path(module)
        return (
            path.relative_to(self.folder.parent).as_posix()
            if path
            else module.replace(".", "/") + ".py"
        )

    def has(self, mark: str) -> bool:
        """Whether "module" or "module:qualname" exists."""
        module, _, qualname = mark.partition(":")
        if not qualname:
            return self.path(module) is not None
        return bool(self.nodes(Target(module, qualname)))

    def definition(self, target: Target) -> Target:
        """The target itself, or what a name that the module only imports stands for."""
        if "." not in target.qualname:
            for node in _statements(self._module(target.module)[0]):
                for alias in getattr(node, "names", ()):
                    if (alias.asname or alias.name) != target.qualname:
                        continue
                    origin = self._origin(target.module, node)
                    if origin is not None:
                        return self.definition(Target(origin, alias.name))
        return target

    def _origin(self, module: str, node: ast.stmt) -> str | None:
        """The module of this package that a "from ... import" names."""
        if not isinstance(node, ast.ImportFrom):
            return None
        path = self.path(module)
        is_package = path is not None and path.name == "__init__.py"
        parents = module.split(".")[: None if is_package else -1]
        if node.level > 1:
            parents = parents[: 1 - node.level]
        name = ".".join(
            [*(parents if node.level else []), *(node.module or "").split(".")]
        )
        return name.rstrip(".") if self.path(name.rstrip(".")) is not None else None

    def nodes(self, target: Target) -> list[ast.stmt]:
        """The statements that define the target: several for a property with a setter, or for a branch on the platform."""
        target = self.definition(target)
        body = self._module(target.module)[0]
        found: list[ast.stmt] = []
        for part in target.qualname.split("."):
            found = [node for node in _statements(body) if part in _names(node)]
            body = [
                child
                for node in found
                if isinstance(node, ast.ClassDef)
                for child in node.body
            ]
        return found

    def source(self, target: Target) -> str | None:
        """The text of the target with its decorators; None where it does not exist."""
        nodes = self.nodes(target)
        lines = self._module(self.definition(target).module)[1]
        texts = [
            "\n".join(lines[first_line(node) - 1 : node.end_lineno]) for node in nodes
        ]
        return "\n".join(texts) if nodes else None

    def hash(self, target: Target) -> str | None:
        text = self.source(target)
        return (
            None
            if text is None
            else hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]
        )

    def _module(self, module: str) -> tuple[list[ast.stmt], list[str]]:
        if module not in self._parsed:
            path = self.path(module)
            # Universal newlines: a checkout with CRLF is the same source.
            text = path.read_text(encoding="utf-8") if path else ""
            try:
                body = ast.parse(text).body
            except SyntaxError:
                body = []  # every symbol of a broken file is missing
            self._parsed[module] = (body, text.split("\n"))
        return self._parsed[module]

    @functools.cached_property
    def _parsed(self) -> dict[str, tuple[list[ast.stmt], list[str]]]:
        return {}


def first_line(node: ast.stmt) -> int:
    """The line of the first decorator, or of the statement."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body, those under if/try/with included."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for block in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, block, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {
            leaf.id
            for goal in node.targets
            for leaf in ast.walk(goal)
            if isinstance(leaf, ast.Name)
        }
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return set()


def known_versions() -> tuple[str, ...]:
    return tuple(
        sorted((path.stem for path in FOLDER.glob("*.json")), key=_version_key)
    )


def load(version: str) -> Mapping[str, str | None] | None:
    """{"module:qualname": hash}; hash None where the symbol must be absent. None for a version that is not known."""
    path = FOLDER / f"{version}.json"
    if not path.is_file():
        return None
    return json.loads(path.read_text(encoding="utf-8"))["symbols"]


def expected_hashes(change: Change, version: str) -> Mapping[str, str | None] | None:
    """The hashes this change was written against; a change from outside brings its own."""
    if change.fingerprints is not None:
        return change.fingerprints.get(version)
    return load(version)


def measure(changes: Iterable[Change], stock: StockTree) -> dict[str, str | None]:
    targets = {
        str(t): t
        for change in changes
        if change.fingerprints is None
        for t in change.targets
    }
    return {name: stock.hash(targets[name]) for name in sorted(targets)}


def differences(
    change: Change, stock: StockTree, expected: Mapping[str, str | None]
) -> list[str]:
    """One sentence for each target whose text is not the expected one."""
    found = []
    for target in change.targets:
        place = f"{target.qualname} in {stock.relative(target.module)}"
        actual = stock.hash(target)
        if not target.must_exist and actual is not None:
            found.append(f"{place} exists already")
        elif target.must_exist and actual is None:
            found.append(f"{place} is gone")
        elif str(target) not in expected:
            found.append(f"{place} has no fingerprint")
        elif actual != expected[str(target)]:
            found.append(f"{place} differs")
    return found


def refresh(changes: Iterable[Change], stock: StockTree) -> Path:
    """Write fingerprints/<version>.json. Read the diff before committing it: it says that you have read the sources."""
    path = FOLDER / f"{stock.version}.json"
    content = {"mlx_vlm": stock.version, "symbols": measure(changes, stock)}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _stock_at(folder: str) -> StockTree:
    path = Path(folder)
    return StockTree(path / "mlx_vlm" if (path / "mlx_vlm").is_dir() else path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mlx_vlm_cacheplus.fingerprint",
        description=__doc__.split("\n")[0],
    )
    parser.add_argument("action", choices=("refresh",))
    parser.add_argument(
        "--stock",
        nargs="+",
        default=[],
        metavar="DIR",
        help="trees to read (default: the installed one)",
    )
    options = parser.parse_args(arguments)
    from .changes import load_changes

    trees = [_stock_at(folder) for folder in options.stock] or [StockTree.installed()]
    changes = load_changes()
    try:
        for tree in trees:
            gone = [
                f"{c.name}: {t} is gone"
                for c in changes
                for t in c.targets
                if t.must_exist and not tree.nodes(t)
            ]
            for line in gone:
                print(f"mlx-vlm {tree.version}: {line}", file=sys.stderr)
            print(refresh(changes, tree))
    except StockMissing as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
