"""The compiled inner loops of label clustering: spherical k-means on sparse and dense rows."""

from __future__ import annotations

import numpy as np

from ..kernels_similarity import largest
from ..simd import compiled, prefetch_span

# Members that find the centres of a larger node, and the iterations that refine them on all members.
_SAMPLE = 8192
_REFINEMENTS = 2

# Rows lie anywhere in memory: that of the member so many places on is fetched meanwhile.
_AHEAD = 4

# So many features are zeroed one after the other in the time that one member's, which lie anywhere, take.
_ROWS_PER_CLEARING = 64


@compiled
def _prefetch_row(indptr, indices, data, members, i):
    if i < members.shape[0]:
        begin, end = np.int64(indptr[members[i]]), np.int64(indptr[members[i] + 1])
        prefetch_span(indices, begin, end)
        prefetch_span(data, begin, end)


@compiled
def _add_row(indptr, indices, data, dense, row, factor, side, sparse_sums, dense_sums):
    for p in range(indptr[row], indptr[row + 1]):
        sparse_sums[indices[p], side] += factor * data[p]
    for j in range(dense.shape[1]):
        dense_sums[j, side] += factor * dense[row, j]


@compiled
def _dot_row(indptr, indices, data, dense, row, sparse_sums, dense_sums):
    """Dot products of a row with the sums of both sides."""
    left, right = np.float32(0), np.float32(0)
    for p in range(indptr[row], indptr[row + 1]):
        left += data[p] * sparse_sums[indices[p], 0]
        right += data[p] * sparse_sums[indices[p], 1]
    for j in range(dense.shape[1]):
        left += dense[row, j] * dense_sums[j, 0]
        right += dense[row, j] * dense_sums[j, 1]
    return left, right


@compiled
def _clear(indptr, indices, members, sparse_sums, dense_sums):
    """Zeroes only what the members touched: a node of sixteen labels must not pay for every feature there is."""
    dense_sums[:] = 0
    if members.shape[0] > sparse_sums.shape[0] // _ROWS_PER_CLEARING:
        sparse_sums[:] = 0
        return
    for i in range(members.shape[0]):
        for p in range(indptr[members[i]], indptr[members[i] + 1]):
            sparse_sums[indices[p], :] = 0


@compiled
def bisect(indptr, indices, data, dense, members, left_count, max_iterations, seed, sparse_sums, dense_sums):
    """
    Reorders `members`: the first `left_count` become one cluster of a balanced spherical 2-means, the rest the other.

    The two starting centres are a random member and the member least like it. A large node finds its centres on a
    sample first and only refines them on all members. `sparse_sums` (features, 2) and `dense_sums` (dimensions, 2)
    come and leave zeroed; they hold the sum of each side's members. The order within a side stays, so that in a tree
    grown from a random order the first members of any node are a random sample of it.
    """
    count = members.shape[0]
    sample = members[:_SAMPLE]
    size = sample.shape[0]
    first = members[(np.uint64(seed) * np.uint64(6364136223846793005) >> np.uint64(33)) % np.uint64(count)]
    _add_row(indptr, indices, data, dense, first, np.float32(1), 0, sparse_sums, dense_sums)
    nobody = np.zeros(size, dtype=np.bool_)
    similarity, _, _, _ = _dots(indptr, indices, data, dense, sample, nobody, sparse_sums, dense_sums)
    farthest = sample[np.argmin(similarity)]
    _add_row(indptr, indices, data, dense, farthest, np.float32(1), 1, sparse_sums, dense_sums)
    ones = (np.float32(1), np.float32(1))
    left = _two_means(
        indptr, indices, data, dense, sample, left_count * size // count, max_iterations, ones, size < count,
        sparse_sums, dense_sums
    )  # fmt: skip
    if size < count:
        scales = _dots(indptr, indices, data, dense, sample, left, sparse_sums, dense_sums)[2:]
        left = _two_means(
            indptr, indices, data, dense, members, left_count, _REFINEMENTS, scales, False, sparse_sums, dense_sums
        )
    _clear(indptr, indices, members, sparse_sums, dense_sums)
    reordered = np.concatenate((members[left], members[~left]))
    members[:] = reordered


@compiled
def _two_means(
    indptr, indices, data, dense, members, left_count, max_iterations, scales, last_sums, sparse_sums, dense_sums
):  # fmt: skip
    """
    Marks the members of the left side, starting from centres that are the sums times `scales`.

    Members that change sides are moved from one sum to the other, so that an iteration reads every member once.
    Without `last_sums` the sums are not those of the sides that are returned.
    """
    left = np.zeros(members.shape[0], dtype=np.bool_)
    left_scale, right_scale = scales
    for iteration in range(max_iterations):
        left_dots, right_dots, new_left_scale, new_right_scale = _dots(
            indptr, indices, data, dense, members, left, sparse_sums, dense_sums
        )
        if iteration > 0:
            left_scale, right_scale = new_left_scale, new_right_scale
        now_left = largest(left_dots * left_scale - right_dots * right_scale, left_count)
        if iteration == max_iterations - 1 and not last_sums:
            return now_left
        if iteration == 0:
            _clear(indptr, indices, members, sparse_sums, dense_sums)
        changed = False
        for i in range(members.shape[0]):
            if iteration == 0:
                _prefetch_row(indptr, indices, data, members, i + _AHEAD)
            moved = now_left[i] != left[i]
            changed |= moved
            if iteration > 0 and moved:
                side = 0 if left[i] else 1
                _add_row(indptr, indices, data, dense, members[i], np.float32(-1), side, sparse_sums, dense_sums)
            if iteration == 0 or moved:
                side = 0 if now_left[i] else 1
                _add_row(indptr, indices, data, dense, members[i], np.float32(1), side, sparse_sums, dense_sums)
        left = now_left
        if not changed:
            break
    return left


@compiled
def _dots(indptr, indices, data, dense, members, left, sparse_sums, dense_sums):
    """Dot products of the members with the two sums, and the factors that make the sums unit centres."""
    left_dots, right_dots = np.empty(members.shape[0], np.float32), np.empty(members.shape[0], np.float32)
    left_square, right_square = 0.0, 0.0
    for i in range(members.shape[0]):
        _prefetch_row(indptr, indices, data, members, i + _AHEAD)
        left_dots[i], right_dots[i] = _dot_row(indptr, indices, data, dense, members[i], sparse_sums, dense_sums)
        # The dot products of a side's members with their sum add up to its squared length.
        if left[i]:
            left_square += left_dots[i]
        else:
            right_square += right_dots[i]
    left_scale = np.float32(1 / np.sqrt(max(left_square, 1e-24)))
    return left_dots, right_dots, left_scale, np.float32(1 / np.sqrt(max(right_square, 1e-24)))


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
def entry_bounds(indptr, groups_ptr, groups, limit):
    """Where each group's sum begins if none is longer than all its rows together, nor than `limit`."""
    begin = np.zeros(groups_ptr.shape[0], dtype=np.int64)
    for group in range(begin.shape[0] - 1):
        size = 0
        for g in range(groups_ptr[group], groups_ptr[group + 1]):
            size += indptr[groups[g] + 1] - indptr[groups[g]]
        begin[group + 1] = begin[group] + min(size, limit)
    return begin


@compiled
def aggregate_rows(
    indptr, indices, data, groups_ptr, groups, first, last, limit, begin, sizes, out_indices, out_data, work, touched,
    seen
):  # fmt: skip
    """
    Sums of the groups `first .. last` of rows, cut to their `limit` largest entries and scaled to length 1.

    Of equal entries the lower column is kept. A group is written from `begin[group]` on and its number of entries to
    `sizes`. `work` and `seen` (one per column) come and leave zeroed, `touched` is as long.
    """
    for group in range(first, last):
        size = 0
        for g in range(groups_ptr[group], groups_ptr[group + 1]):
            _prefetch_row(indptr, indices, data, groups, g + _AHEAD)
            for p in range(indptr[groups[g]], indptr[groups[g] + 1]):
                column = indices[p]
                if data[p] != 0:
                    # Not `work[column] != 0`: values of opposite sign may cancel on the way.
                    if not seen[column]:
                        seen[column] = True
                        touched[size] = column
                        size += 1
                    work[column] += data[p]
        columns = np.sort(touched[:size])
        values = work[columns]
        work[columns] = 0
        seen[columns] = False
        if size > limit:
            kept = np.sort(np.argsort(-values, kind="mergesort")[:limit])
            columns, values = columns[kept], values[kept]
        norm = np.sqrt((values * values).sum())
        at, sizes[group] = begin[group], columns.shape[0]
        out_indices[at : at + columns.shape[0]] = columns
        out_data[at : at + columns.shape[0]] = values / norm if norm > 0 else values


@compiled
def close_gaps(begin, sizes, indices, data):
    """Moves rows of `sizes` entries, row `i` from `begin[i]` on, together; returns where each begins now."""
    indptr = np.zeros(begin.shape[0], dtype=np.int64)
    for row in range(sizes.shape[0]):
        at = indptr[row]
        for p in range(begin[row], begin[row] + sizes[row]):
            indices[at], data[at] = indices[p], data[p]
            at += 1
        indptr[row + 1] = at
    return indptr
