"""The features of the running round, for a row that ends or moves before they are read.

Context drafters (DFlash, DSpark) read the features of a verify step when the next round
begins.  A row may end before, or join another batch; they are read from here then.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .drafted_replies import current_batch


def note_features(features: Sequence[mx.array]) -> None:
    """Remember the features of the running round, [rows, tokens, features] each."""
    batch = current_batch()
    if batch is not None:
        batch.verified_features = features
