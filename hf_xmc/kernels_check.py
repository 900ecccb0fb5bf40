"""
The compiled loops that check arrays of a file. Each returns where the first block with a fault begins, or -1.

Comparisons are between neighbours, not with their difference, which overflows for values made for that purpose.
"""

from __future__ import annotations

import numpy as np

from .kernels_search import bucket_bits
from .simd import compiled

# Elements of a block, after which the result is looked at: inner loops without branches are vectorised.
_BLOCK = 1024
_FLOAT16_EXPONENT = 0x7C00  # all ones: infinity or not a number


@compiled
def first_outside(values, begin, end, limit):
    """Looks in `values[begin:end]` for one that is not in `0..limit` (exclusive)."""
    for start in range(begin, end, _BLOCK):
        stop = min(start + _BLOCK, end)
        bad = False
        for i in range(start, stop):
            bad |= (values[i] < 0) | (values[i] >= limit)
        if bad:
            return start
    return -1


@compiled
def first_descent(values, begin, end):
    """Looks in `values[begin:end]` for one that is smaller than the value before it."""
    for start in range(begin, end, _BLOCK):
        stop = min(start + _BLOCK, end)
        bad = False
        for i in range(max(start, 1), stop):
            bad |= values[i] < values[i - 1]
        if bad:
            return start
    return -1


@compiled
def first_beyond(values, begin, end, limit):
    """Looks in `values[begin:end]` for one that is not a number or has an absolute value above `limit`."""
    for start in range(begin, end, _BLOCK):
        stop = min(start + _BLOCK, end)
        bad = False
        for i in range(start, stop):
            bad |= not abs(values[i]) <= limit
        if bad:
            return start
    return -1


@compiled
def first_not_finite(bits, begin, end):
    """The same for float16 values, given as uint16, without a limit."""
    for start in range(begin, end, _BLOCK):
        stop = min(start + _BLOCK, end)
        bad = False
        for i in range(start, stop):
            bad |= (bits[i] & _FLOAT16_EXPONENT) == _FLOAT16_EXPONENT
        if bad:
            return start
    return -1


@compiled
def first_bad_record(features, floats, begin, end, num_features, last_float, limit):
    """
    The first record of the ranker (`RankerWeights.records`) with an unknown feature, or a number as in `first_beyond`.

    `features` and `floats` are views of the records. The numbers are the scale and, up to `last_float`, the weights.
    """
    for row in range(begin, end):
        bad = features[row, 0] < 0 or features[row, 0] >= num_features
        for column in range(1, last_float):
            bad |= not abs(floats[row, column]) <= limit
        if bad:
            return row
    return -1


@compiled
def first_bad_table(row_begin, bucket_begin, buckets, begin, end):
    """The first block of the ranker whose bucket table has the wrong size or does not divide the block's records."""
    for block in range(begin, end):
        num_rows = row_begin[block + 1] - row_begin[block]
        first, last = bucket_begin[block], bucket_begin[block + 1] - 1
        if last - first != 1 << bucket_bits(num_rows) or buckets[first] != 0 or buckets[last] != num_rows:
            return block
        bad = False
        for i in range(first, last):
            bad |= buckets[i + 1] < buckets[i]
        if bad:
            return block
    return -1


@compiled
def is_canonical(indptr, indices, data, num_columns):
    """Whether the rows of a sparse matrix have ascending columns that exist, each once, and finite values."""
    if indptr[0] != 0 or indptr[-1] > min(indices.shape[0], data.shape[0]):
        return False
    for row in range(indptr.shape[0] - 1):
        if indptr[row + 1] < indptr[row]:
            return False
    for row in range(indptr.shape[0] - 1):
        last = np.int64(-1)
        bad = False
        for p in range(indptr[row], indptr[row + 1]):
            bad |= (indices[p] <= last) | (not np.isfinite(data[p]))
            last = np.int64(indices[p])
        if bad or last >= num_columns:
            return False
    return True
