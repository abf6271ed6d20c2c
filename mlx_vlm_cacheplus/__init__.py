"""mlx-vlm-cacheplus: the stock `mlx_vlm.server`, reading every token once.

Three doors lead to one `activate()`: the flag `--cacheplus` on the stock server, the variable `MLX_VLM_CACHEPLUS`, and
the command `mlx-vlm-cacheplus serve`. Every interpreter of the environment imports this module at start-up, so it
stands on the standard library alone and imports its own modules late.
"""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["__version__", "activate", "deactivate", "status"]


def activate(names=None, *, defer=False):
    """Apply the changes to the stock package in this process, and return the Report.

    names: change names; None takes what the flag or the variable says, or else all of them.
    defer: wait until `mlx_vlm.server` is imported (the doors do); the Report is then None until it is.
    Applying twice is a no-op. `MLX_VLM_CACHEPLUS=0` wins over everything.
    Raises settings.UsageError for a name that does not exist, a value that cannot be used, or a change that was asked
    for by name and cannot be applied.
    """
    from . import activation

    return activation.activate(names, defer=defer)


def deactivate():
    """Give every target back its original object, newest first; return the names of the changes that were reverted.

    Raises patching.ForeignWrapper, and changes nothing, where somebody has wrapped on top.
    """
    from . import activation

    return activation.deactivate()


def status():
    """The Report of this process, or None while nothing has been checked."""
    from . import activation

    return activation.status()
