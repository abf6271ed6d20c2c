"""Positions in the padding of a row, and deltas that a batch lends the model."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_vlm_cacheplus.core import row_positions as core


def padded(row, tokens, name="position_ids", left=True):
    return core.continued_to_the_left(name, row, tokens, left=left)


@pytest.mark.parametrize("first", [0, 7])
def test_positions_count_on_through_the_padding(first):
    row = mx.arange(first, first + 3, dtype=mx.int32)[None]
    found = padded(row, 5)
    assert found.dtype == row.dtype
    assert found.tolist() == [list(range(first - 2, first + 3))]


def test_a_chunk_that_begins_in_the_padding_knows_where_its_row_is():
    """A family that reads the first column alone sees each token at its place."""
    row = mx.arange(5, dtype=mx.int32)[None]
    chunk = padded(row, 12)[:, 4:10]
    place = chunk[:, 0].item()
    assert [place + column for column in range(6)] == chunk[0].tolist()


@pytest.mark.parametrize(
    "given",
    [
        {"row": mx.arange(3)[None], "left": False},
        {"row": mx.arange(3)[None], "name": "token_type_ids"},
        {"row": mx.zeros((3, 1, 3), dtype=mx.int32)},
        {"row": mx.zeros((1, 3), dtype=mx.uint32)},
        {"row": mx.arange(5)[None]},
    ],
    ids=["right", "other", "three axes", "unsigned", "whole"],
)
def test_all_else_is_padded_by_the_generator(given):
    assert padded(tokens=5, **given) is None


def batch_of(model, deltas):
    return SimpleNamespace(model=model, _rope_deltas=deltas)


def test_a_batch_lends_the_model_its_deltas():
    language_model = SimpleNamespace(_rope_deltas=None)
    model = SimpleNamespace(language_model=language_model)
    deltas = mx.array([[0], [3]])
    core.seat_batch_positions(batch_of(model, deltas))
    assert language_model._rope_deltas is deltas
    core.seat_batch_positions(batch_of(model, None))
    assert language_model._rope_deltas is deltas
