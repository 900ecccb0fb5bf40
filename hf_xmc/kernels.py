"""
The compiled inner loops of prediction: beam search through blocks of sibling classifiers.

The children of a node are cut into blocks of at most [`LANES`] siblings. A block stores one row of weights per feature it
knows. Its rows are sorted by a hash of the feature, with the first row of every hash bucket in a table: finding a
document's feature costs one look into the table and rarely more than one comparison.
"""

from __future__ import annotations

import numpy as np

from .lanes import LANES, compiled, lane_dot, lane_dot_int8, lane_dot_run

SQUARED_HINGE, LOGISTIC = 0, 1

_MULTIPLIER = np.uint32(2654435769)  # 2^32 / golden ratio: spreads neighbouring feature ids over the table


@compiled
def bucket_bits(num_rows):
    """Binary logarithm of the number of hash buckets for `num_rows` rows: half as many buckets as rows, or more."""
    bits = 0
    while (1 << bits) * 2 < num_rows:
        bits += 1
    return bits


@compiled
def hash_order(features, bits):
    """The order that sorts rows by hash bucket (ties stay as they are) and the first row of each bucket."""
    buckets = 1 << bits
    starts = np.zeros(buckets + 1, dtype=np.int32)
    for row in range(features.shape[0]):
        starts[_bucket(features[row], bits) + 1] += 1
    for bucket in range(buckets):
        starts[bucket + 1] += starts[bucket]
    fill = starts[:-1].copy()
    order = np.empty(features.shape[0], dtype=np.int64)
    for row in range(features.shape[0]):
        bucket = _bucket(features[row], bits)
        order[fill[bucket]] = row
        fill[bucket] += 1
    return order, starts


@compiled
def _bucket(feature, bits):
    # numba widens the product to 64 bits: cut it back, then take the highest `bits` of the 32.
    return np.int64(np.uint64(np.uint32(np.uint32(feature) * _MULTIPLIER)) >> np.uint64(32 - bits))


@compiled
def quantize_rows(rows, codes, scales):
    """int8 codes with one float32 scale per row: the largest weight of a row becomes 127."""
    for row in range(rows.shape[0]):
        largest = np.abs(rows[row]).max()
        scale = largest / np.float32(127) if largest > 0 else np.float32(1)
        scales[row] = scale
        for lane in range(LANES):
            codes[row, lane] = np.int8(np.rint(rows[row, lane] / scale))


@compiled
def _block_scores(
    block, indices, data, begin, end, dense, row_begin, bucket_begin, buckets, features, scales, weights, codes, dense_weights,
    hits, factors, scores
):  # fmt: skip
    """Margins of the siblings of one block for one document, in `scores`."""
    first_row, first_bucket = row_begin[block], bucket_begin[block]
    bits = bucket_bits(row_begin[block + 1] - first_row)
    found = 0
    for p in range(begin, end):
        feature = indices[p]
        slot = first_bucket + _bucket(feature, bits)
        for row in range(first_row + buckets[slot], first_row + buckets[slot + 1]):
            if features[row] == feature:
                hits[found] = row
                factors[found] = data[p] * scales[row] if codes.shape[0] > 0 else data[p]
                found += 1
                break
    width = dense.shape[0]
    scores[:] = 0
    lane_dot_run(dense, 0, width, dense_weights, block * width, scores)
    if codes.shape[0] > 0:
        lane_dot_int8(hits, factors, 0, found, codes, scores)
    else:
        lane_dot(hits, factors, 0, found, weights, scores)


@compiled
def _log_probability(margin, loss):
    if loss == SQUARED_HINGE:
        gap = max(np.float32(0), np.float32(1) - margin)
        return -gap * gap
    return -np.log1p(np.exp(-margin)) if margin > -30 else margin


@compiled
def _better(score, node, other_score, other_node):
    """Order of candidates: higher score first, then the lower node number, so that results never depend on the search."""
    return score > other_score or (score == other_score and node < other_node)


@compiled
def _keep_best(heap_scores, heap_nodes, size, limit, score, node):
    """Offers a candidate to a heap whose top is the worst of the `limit` best; returns the new size."""
    if size < limit:
        i = size
        size += 1
        while i > 0:
            above = (i - 1) // 2
            if not _better(heap_scores[above], heap_nodes[above], score, node):
                break
            heap_scores[i], heap_nodes[i] = heap_scores[above], heap_nodes[above]
            i = above
    elif not _better(score, node, heap_scores[0], heap_nodes[0]):
        return size
    else:
        i = _sift_down(heap_scores, heap_nodes, size, score, node)
    heap_scores[i], heap_nodes[i] = score, node
    return size


@compiled
def _sift_down(heap_scores, heap_nodes, size, score, node):
    """Position for a candidate that replaces the top of the heap."""
    i = 0
    while True:
        below = 2 * i + 1
        if below >= size:
            return i
        if below + 1 < size and _better(
            heap_scores[below], heap_nodes[below], heap_scores[below + 1], heap_nodes[below + 1]
        ):
            below += 1
        if not _better(score, node, heap_scores[below], heap_nodes[below]):
            return i
        heap_scores[i], heap_nodes[i] = heap_scores[below], heap_nodes[below]
        i = below


@compiled
def _sort_heap(heap_scores, heap_nodes, size):
    """Turns the heap into a list, best first."""
    for last in range(size - 1, 0, -1):
        score, node = heap_scores[last], heap_nodes[last]
        heap_scores[last], heap_nodes[last] = heap_scores[0], heap_nodes[0]
        i = _sift_down(heap_scores, heap_nodes, last, score, node)
        heap_scores[i], heap_nodes[i] = score, node


@compiled
def search(
    indptr, indices, data, dense, first_document, last_document, child_begin, block_begin, row_begin, bucket_begin, buckets,
    features, scales, weights, codes, dense_weights, loss, depth, beam_size, by_path, out_scores, out_nodes
):  # fmt: skip
    """
    Best nodes of level `depth` for the documents `first_document .. last_document`, best first.

    A beam of `beam_size` nodes goes down the tree, ranked by the product of the probabilities along the path. The last
    level is ranked by that product as well (`by_path`; logarithms are returned) or by its own margin alone.
    `out_nodes` gets node numbers of the whole tree, -1 where a document has fewer candidates than columns.
    """
    top_k = out_scores.shape[1]
    width = max(beam_size, top_k)
    beam_scores, beam_nodes = np.empty(width, dtype=np.float32), np.empty(width, dtype=np.int64)
    heap_scores, heap_nodes = np.empty(width, dtype=np.float32), np.empty(width, dtype=np.int64)
    scores = np.zeros(LANES, dtype=np.float32)
    longest = 0
    for document in range(first_document, last_document):
        longest = max(longest, indptr[document + 1] - indptr[document])
    hits, factors = np.empty(longest, dtype=np.int64), np.empty(longest, dtype=np.float32)
    for document in range(first_document, last_document):
        begin, end = np.int64(indptr[document]), np.int64(indptr[document + 1])
        beam_nodes[0], beam_scores[0], size = 0, np.float32(0), 1
        for level in range(1, depth + 1):
            last = level == depth
            limit = top_k if last else beam_size
            kept = 0
            for position in range(size):
                node = beam_nodes[position]
                for block in range(block_begin[node], block_begin[node + 1]):
                    _block_scores(
                        block, indices, data, begin, end, dense[document], row_begin, bucket_begin, buckets, features, scales,
                        weights, codes, dense_weights, hits, factors, scores
                    )  # fmt: skip
                    first_child = child_begin[node] + (block - block_begin[node]) * LANES
                    for lane in range(min(LANES, child_begin[node + 1] - first_child)):
                        score = scores[lane]
                        if by_path or not last:
                            score = beam_scores[position] + _log_probability(score, loss)
                        kept = _keep_best(heap_scores, heap_nodes, kept, limit, score, first_child + lane)
            if last:
                _sort_heap(heap_scores, heap_nodes, kept)
            beam_scores, heap_scores = heap_scores, beam_scores
            beam_nodes, heap_nodes = heap_nodes, beam_nodes
            size = kept
        row = document - first_document
        out_scores[row, :size], out_nodes[row, :size] = beam_scores[:size], beam_nodes[:size]
        out_scores[row, size:], out_nodes[row, size:] = -np.inf, -1
