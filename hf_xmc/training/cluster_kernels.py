"""The compiled inner loops of label clustering: spherical k-means on sparse and dense rows."""

from __future__ import annotations

import numpy as np

from ..lanes import compiled


@compiled
def _add_row(indptr, indices, data, dense, row, factor, sparse_out, dense_out):
    for p in range(indptr[row], indptr[row + 1]):
        sparse_out[indices[p]] += factor * data[p]
    for j in range(dense.shape[1]):
        dense_out[j] += factor * dense[row, j]


@compiled
def _dot_row(indptr, indices, data, dense, row, sparse_vector, dense_vector):
    total = np.float32(0)
    for p in range(indptr[row], indptr[row + 1]):
        total += data[p] * sparse_vector[indices[p]]
    for j in range(dense.shape[1]):
        total += dense[row, j] * dense_vector[j]
    return total


@compiled
def _clear(indptr, indices, members, sparse_vector, dense_vector):
    """Zeroes only what the members touched: a node of sixteen labels must not pay for every feature there is."""
    for i in range(members.shape[0]):
        for p in range(indptr[members[i]], indptr[members[i] + 1]):
            sparse_vector[indices[p]] = 0
    dense_vector[:] = 0


@compiled
def _squared_length(indptr, indices, data, dense, members, sparse_vector, dense_vector):
    """`|c|^2` of a centre `c` that is the sum of the members, as the sum of their dot products with it."""
    total = np.float32(0)
    for i in range(members.shape[0]):
        total += _dot_row(indptr, indices, data, dense, members[i], sparse_vector, dense_vector)
    return total


@compiled
def bisect(indptr, indices, data, dense, members, left_count, max_iterations, seed, sparse_work, dense_work):
    """
    Reorders `members`: the first `left_count` are one cluster of a balanced spherical 2-means, the rest the other.

    `sparse_work` and `dense_work` come and leave zeroed. The two starting centres are a random member and the member
    least like it.
    """
    count = members.shape[0]
    margins = np.zeros(count, dtype=np.float32)
    first = members[(np.uint64(seed) * np.uint64(6364136223846793005) >> np.uint64(33)) % np.uint64(count)]
    _add_row(indptr, indices, data, dense, first, np.float32(1), sparse_work, dense_work)
    for i in range(count):
        margins[i] = _dot_row(indptr, indices, data, dense, members[i], sparse_work, dense_work)
    farthest = members[np.argmin(margins)]
    _add_row(indptr, indices, data, dense, farthest, np.float32(-1), sparse_work, dense_work)
    left = np.zeros(count, dtype=np.bool_)
    for iteration in range(max_iterations):
        for i in range(count):
            margins[i] = _dot_row(indptr, indices, data, dense, members[i], sparse_work, dense_work)
        order = np.argsort(-margins, kind="mergesort")
        changed = False
        for rank in range(count):
            side = rank < left_count
            changed |= left[order[rank]] != side
            left[order[rank]] = side
        _clear(indptr, indices, members, sparse_work, dense_work)
        if not changed or iteration == max_iterations - 1:
            break
        _difference_of_centres(indptr, indices, data, dense, members, left, sparse_work, dense_work)
    _clear(indptr, indices, members, sparse_work, dense_work)
    reordered = np.concatenate((members[left], members[~left]))
    members[:] = reordered


@compiled
def _difference_of_centres(indptr, indices, data, dense, members, left, sparse_work, dense_work):
    """Unit centre of the left members minus unit centre of the others."""
    sides = (members[left], members[~left])
    lengths = np.zeros(2, dtype=np.float32)
    for side in range(2):
        for i in range(sides[side].shape[0]):
            _add_row(indptr, indices, data, dense, sides[side][i], np.float32(1), sparse_work, dense_work)
        lengths[side] = np.sqrt(
            max(_squared_length(indptr, indices, data, dense, sides[side], sparse_work, dense_work), np.float32(0))
        )
        _clear(indptr, indices, members, sparse_work, dense_work)
    for side in range(2):
        factor = np.float32(1 if side == 0 else -1) / max(lengths[side], np.float32(1e-12))
        for i in range(sides[side].shape[0]):
            _add_row(indptr, indices, data, dense, sides[side][i], factor, sparse_work, dense_work)


@compiled
def nearest_centre(indptr, indices, data, dense, members, sparse_centres, dense_centres, assignment):
    """Writes the most similar centre of each member (columns of `(features, k)` centres); returns how many changed."""
    k = sparse_centres.shape[1] if sparse_centres.shape[0] > 0 else dense_centres.shape[1]
    similarity = np.zeros(k, dtype=np.float32)
    changed = 0
    for i in range(members.shape[0]):
        row = members[i]
        similarity[:] = 0
        for p in range(indptr[row], indptr[row + 1]):
            for j in range(k):
                similarity[j] += data[p] * sparse_centres[indices[p], j]
        for dimension in range(dense.shape[1]):
            for j in range(k):
                similarity[j] += dense[row, dimension] * dense_centres[dimension, j]
        best = np.argmax(similarity)
        changed += assignment[i] != best
        assignment[i] = best
    return changed


@compiled
def aggregate_rows(indptr, indices, data, groups_ptr, groups, limit, work):
    """
    Sums of groups of rows, cut to their `limit` largest entries (ties go to the lower column) and scaled to length 1.

    `work` (one zero per column) comes and leaves zeroed. Returns indptr, indices and data of the result.
    """
    count = groups_ptr.shape[0] - 1
    out_ptr = np.zeros(count + 1, dtype=np.int64)
    out_indices = np.empty(count * limit, dtype=np.int32)
    out_data = np.empty(count * limit, dtype=np.float32)
    touched = np.empty(work.shape[0], dtype=np.int32)
    at = 0
    for group in range(count):
        size = 0
        for g in range(groups_ptr[group], groups_ptr[group + 1]):
            for p in range(indptr[groups[g]], indptr[groups[g] + 1]):
                column = indices[p]
                if data[p] != 0:
                    if work[column] == 0:
                        touched[size] = column
                        size += 1
                    work[column] += data[p]
        columns = np.sort(touched[:size])
        values = work[columns]
        work[columns] = 0
        if size > limit:
            kept = np.sort(np.argsort(-values, kind="mergesort")[:limit])
            columns, values = columns[kept], values[kept]
        norm = np.sqrt((values * values).sum())
        out_indices[at : at + columns.shape[0]] = columns
        out_data[at : at + columns.shape[0]] = values / norm if norm > 0 else values
        at += columns.shape[0]
        out_ptr[group + 1] = at
    return out_ptr, out_indices[:at].copy(), out_data[:at].copy()
