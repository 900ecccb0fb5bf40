"""
Plain loops in place of the vector intrinsics of `hf_xmc.simd`, for runs with the bounds checks of numba.

Intrinsics read and write memory without checks. `conftest.py` calls `use_checked_lanes` with `NUMBA_BOUNDSCHECK=1`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from hf_xmc import simd
from hf_xmc.simd import HEADER, LANES

FLOATS_AT = HEADER // 4


@njit
def lane_dot(rows, values, begin, end, weights, out):
    for p in range(begin, end):
        for lane in range(LANES):
            out[lane] += values[p] * weights[rows[p], lane]


@njit
def lane_add(rows, values, begin, end, weights, delta):
    for p in range(begin, end):
        for lane in range(LANES):
            weights[rows[p], lane] += values[p] * delta[lane]


@njit
def lane_dot_run(values, begin, end, weights, first_row, out):
    for p in range(begin, end):
        for lane in range(LANES):
            out[lane] += values[p] * weights[first_row + p - begin, lane]


@njit
def lane_add_run(values, begin, end, weights, first_row, delta):
    for p in range(begin, end):
        for lane in range(LANES):
            weights[first_row + p - begin, lane] += values[p] * delta[lane]


@njit
def lane_dot_int8(rows, values, begin, end, records, out):
    for p in range(begin, end):
        for lane in range(LANES):
            out[lane] += values[p] * records[rows[p], HEADER + lane]


@njit
def lane_dot_float(rows, values, begin, end, records, out):
    floats = records.view(np.float32)
    for p in range(begin, end):
        for lane in range(LANES):
            out[lane] += values[p] * floats[rows[p], FLOATS_AT + lane]


# A prefetch may go beyond the end: it loads nothing.


@njit
def prefetch(records, row):
    pass


@njit
def prefetch_span(array, begin, end):
    pass


@njit
def prefetch_rows(rows, begin, end, weights):
    pass


def use_checked_lanes() -> None:
    """Replaces the intrinsics; the kernels must not have been imported yet."""
    for function in (
        lane_dot, lane_add, lane_dot_run, lane_add_run, lane_dot_int8, lane_dot_float, prefetch, prefetch_span,
        prefetch_rows,
    ):  # fmt: skip
        assert hasattr(simd, function.__name__)
        setattr(simd, function.__name__, function)
