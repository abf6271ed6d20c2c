"""Restored and prefilled tokens per turn as a picture; needs matplotlib (the extra ``bench``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .rows import Row

MISSING = "--plot needs matplotlib, which is not installed: pip install 'mlx-vlm-cacheplus[bench]'"


class PlotUnavailable(RuntimeError):
    """There is no matplotlib, or no such kind of picture; the message says what to do."""


def require(path: str | Path) -> None:
    """Raise PlotUnavailable before any work is done, when the picture cannot be drawn."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise PlotUnavailable(MISSING) from None
    kinds = FigureCanvasBase.get_supported_filetypes()
    suffix = Path(path).suffix[1:].lower()
    if suffix and suffix not in kinds:
        raise PlotUnavailable(
            f"--plot {path}: no picture can be written as {suffix!r}: name a file that ends in .png, or one of "
            + ", ".join(sorted(kinds))
        )


def draw(rows: Sequence[Row], path: str | Path, title: str = "") -> None:
    """Write the picture; stacked bars, one a turn, summed over sessions."""
    require(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    turns = sorted({row.turn for row in rows})
    restored = [sum(row.restored for row in rows if row.turn == turn) for turn in turns]
    prefilled = [
        sum(row.prefilled for row in rows if row.turn == turn) for turn in turns
    ]
    new = [sum(row.new for row in rows if row.turn == turn) for turn in turns]
    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    axes.bar(turns, restored, label="restored", color="#9ecae1")
    axes.bar(turns, prefilled, bottom=restored, label="prefilled", color="#e6550d")
    ceiling = [sum(pair) for pair in zip(restored, new, strict=False)]
    axes.plot(
        turns,
        ceiling,
        "k_",
        markersize=14,
        label="restored + new (above it: read again)",
    )
    axes.set_xlabel("turn")
    axes.set_ylabel("prompt tokens")
    axes.set_title(title)
    axes.legend()
    figure.tight_layout()
    figure.savefig(str(path))
    pyplot.close(figure)
