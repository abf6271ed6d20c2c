"""Is a stock tree as it was published?  Patches are made from such a tree alone."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from base64 import urlsafe_b64encode
from pathlib import Path

from tools.patch_tree import PACKAGE, PatchProblem


def stock_hashes(folder: Path) -> dict[str, str]:
    """Return {path: sha256} of the package as it was published, from the wheel's RECORD."""
    for info in sorted(folder.parent.glob("mlx_vlm-*.dist-info")):
        record = info / "RECORD"
        if record.is_file():
            dist = importlib.metadata.PathDistribution(info)
            return {
                str(file): file.hash.value
                for file in dist.files or []
                if file.hash is not None and file.hash.mode == "sha256"
            }
    raise PatchProblem(
        f"{folder} has no RECORD beside it, so nobody can say whether it is pristine: "
        "use an installed or unpacked wheel of mlx-vlm"
    )


def require_pristine(folder: Path, version: str) -> None:
    """Raise PatchProblem unless ``folder`` is mlx_vlm of that version as published."""
    found = "unknown"
    for line in (folder / "version.py").read_text(encoding="utf-8").splitlines():
        if line.startswith("__version__"):
            found = json.loads(line.split("=")[1].strip().replace("'", '"'))
    if found != version:
        raise PatchProblem(
            f"these patches are for mlx-vlm {version}, and {folder} is {found}: "
            f"install mlx-vlm=={version}, or give its folder with --stock"
        )
    changed = []
    for path, published in stock_hashes(folder).items():
        if path.startswith(PACKAGE + "/") and path.endswith(".py"):
            place = folder.parent / path
            digest = hashlib.sha256(place.read_bytes()).digest()
            if urlsafe_b64encode(digest).rstrip(b"=").decode() != published:
                changed.append(path)
    if changed:
        raise PatchProblem(
            f"{folder} is not as published: {', '.join(changed)} differ; "
            f"reinstall mlx-vlm=={version}"
        )
