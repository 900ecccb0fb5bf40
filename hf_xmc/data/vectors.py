"""Checks that every sparse vector passes, whatever file it comes from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def check_rows(
    offsets: np.ndarray,
    ids: np.ndarray,
    values: np.ndarray,
    place: Callable[[int], str],
    num_features: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """
    Checks the sparse rows of a block and brings each into the order of its feature ids.

    Args:
        offsets (`np.ndarray`):
            Row i holds the entries `offsets[i]` to `offsets[i + 1]`; the first offset is 0.
        ids (`np.ndarray`):
            Feature ids, in any order within a row.
        values (`np.ndarray`):
            Feature values.
        place (`Callable[[int], str]`):
            Says where row i of the block comes from, for error messages.
        num_features (`int`, *optional*):
            Ids must be smaller than this.

    Returns:
        `ids` and `values`, sorted within rows (the arrays given where they were sorted already).
    """
    _raise_at(ids < 0, offsets, lambda i: f"the negative feature id {ids[i]}", "Feature ids start at 0.", place)
    if num_features is not None:
        way_out = f"Ids must be smaller than the number of features, {num_features}."
        _raise_at(ids >= num_features, offsets, lambda i: f"the feature id {ids[i]}", way_out, place)
    _raise_at(
        ~np.isfinite(values),
        offsets,
        lambda i: f"the value {values[i]} for feature {ids[i]}",
        "Feature values must be finite float32 numbers.",
        place,
    )
    if len(ids) < 2:
        return ids, values
    step = np.diff(ids.astype(np.int64, copy=False))
    starts = offsets[1:-1]
    # The step into the first entry of a row compares two rows: any order is right there.
    step[starts[(starts > 0) & (starts < len(ids))] - 1] = 1
    if (step < 0).any():
        rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        order = np.lexsort((ids, rows))
        return check_rows(offsets, ids[order], values[order], place)
    way_out = "Add up or remove repeated features first."
    _raise_at(np.append(step == 0, False), offsets, lambda i: f"feature {ids[i]} twice", way_out, place)
    return ids, values


def _raise_at(
    bad: np.ndarray, offsets: np.ndarray, what: Callable[[int], str], way_out: str, place: Callable[[int], str]
) -> None:
    if bad.any():
        entry = int(np.argmax(bad))
        row = int(np.searchsorted(offsets, entry, side="right")) - 1
        raise ValueError(f"{place(row)} has {what(entry)}. {way_out}")
