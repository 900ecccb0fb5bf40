"""
The compiled inner loops of prediction: beam search through blocks of sibling classifiers.

The children of a node are split into blocks of at most [`LANES`] siblings. A block stores one record per feature: the
feature, a scale and sixteen weights, next to each other because a search needs either all or none of them. Records
are sorted by a hash of the feature, and a table has the first record of every hash bucket. So finding a feature costs
one look-up in the table and rarely more than one comparison.
"""

from __future__ import annotations

import numpy as np

from .simd import HEADER, LANES, compiled, lane_dot_float, lane_dot_int8, lane_dot_run, prefetch

SQUARED_HINGE, LOGISTIC = 0, 1

_SIGN = np.uint32(1 << 31)
_LAST_NODE = np.int64((1 << 32) - 1)
_MULTIPLIER = np.uint32(2654435769)  # 2^32 / golden ratio: spreads neighbouring feature ids over the table
_ROWS_PER_LOOKUP = 4  # rows that are entered in a table in the time that it saves over one hash look-up


@compiled
def squared_norms(indptr, data):
    """Returns the squared norm of each sparse row."""
    norms = np.zeros(indptr.shape[0] - 1, dtype=np.float32)
    for row in range(norms.shape[0]):
        total = 0.0
        for p in range(indptr[row], indptr[row + 1]):
            total += np.float64(data[p]) * data[p]
        norms[row] = total
    return norms


@compiled
def scaled_rows(indptr, data, factors):
    """Returns the values of a sparse matrix, each row multiplied by its factor."""
    scaled = np.empty_like(data)
    for row in range(factors.shape[0]):
        for p in range(indptr[row], indptr[row + 1]):
            scaled[p] = data[p] * factors[row]
    return scaled


@compiled
def bucket_bits(num_rows):
    """Binary logarithm of the number of hash buckets for `num_rows` rows: half as many buckets as rows, or more."""
    bits = 0
    while (1 << bits) * 2 < num_rows:
        bits += 1
    return bits


@compiled
def hash_order(features, bits):
    """Returns the stable order of rows by hash bucket, and the first row of each bucket."""
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
def _hash(feature):
    # numba widens the product to 64 bits: truncate it.
    return np.uint64(np.uint32(np.uint32(feature) * _MULTIPLIER))


@compiled
def _bucket(feature, bits):
    """The highest `bits` of the hash."""
    return np.int64(_hash(feature) >> np.uint64(32 - bits))


@compiled
def _places_by_hash(indptr, indices, first_document, last_document):
    """Returns the places of the features of each document within its row, in the order of their hashes."""
    first = np.int64(indptr[first_document])
    places = np.empty(np.int64(indptr[last_document]) - first, dtype=np.int32)
    for document in range(first_document, last_document):
        begin, end = np.int64(indptr[document]), np.int64(indptr[document + 1])
        keys = np.empty(end - begin, dtype=np.uint64)
        for p in range(begin, end):
            keys[p - begin] = _hash(indices[p]) << np.uint64(32) | np.uint64(p - begin)
        keys.sort()
        for p in range(begin, end):
            places[p - first] = np.int32(keys[p - begin] & np.uint64(_LAST_NODE))
    return places


@compiled
def quantize(row, codes):
    """Writes sixteen int8 codes and returns their scale: the largest weight becomes 127."""
    largest = np.abs(row).max()
    scale = largest / np.float32(127) if largest > 0 else np.float32(1)
    for lane in range(LANES):
        codes[lane] = np.int8(np.rint(row[lane] / scale))
    return scale


@compiled
def _rows_by_hash(
    block, indices, data, begin, end, order, row_begin, bucket_begin, buckets, records, features, scales, starts, ends,
    rows, hits, factors
):  # fmt: skip
    """
    Writes the rows of a block for the features of a document to `hits`, and their factors to `factors`.

    Returns the number of rows. Features are looked up in `order`, their places within the document; the result does
    not depend on it. The loops are separate because loops without branches overlap their cache misses.
    """
    first_row, first_bucket = row_begin[block], bucket_begin[block]
    bits = bucket_bits(row_begin[block + 1] - first_row)
    for k in range(end - begin):
        slot = first_bucket + _bucket(indices[begin + order[k]], bits)
        starts[k] = buckets[slot]
        ends[k] = buckets[slot + 1]
    for k in range(end - begin):
        prefetch(records, first_row + starts[k])
    for k in range(end - begin):
        feature = indices[begin + order[k]]
        found_row = np.int64(-1)
        for row in range(first_row + starts[k], first_row + ends[k]):
            if features[row, 0] == feature:
                found_row = row
                break
        rows[order[k]] = found_row
    found = 0
    for p in range(begin, end):
        hits[found] = rows[p - begin]
        factors[found] = data[p]
        found += rows[p - begin] >= 0
    for hit in range(found):
        factors[hit] *= scales[hits[hit], 1]
    return found


@compiled
def _rows_by_table(indices, data, begin, end, first_row, table, scales, hits, factors):
    """As [`_rows_by_hash`], with a table of the row of each feature (counted from 1), without branches."""
    found = 0
    for p in range(begin, end):
        row = table[indices[p]]
        hits[found] = first_row + row - 1
        factors[found] = data[p]
        found += row > 0
    for hit in range(found):
        factors[hit] *= scales[hits[hit], 1]
    return found


@compiled
def _fill_table(features, first_row, last_row, table):
    for row in range(first_row, last_row):
        table[features[row, 0]] = row - first_row + 1


@compiled
def _clear_table(features, first_row, last_row, table):
    for row in range(first_row, last_row):
        table[features[row, 0]] = 0


@compiled
def _log_probability(logit, loss):
    if loss == SQUARED_HINGE:
        gap = max(np.float32(0), np.float32(1) - logit)
        return -gap * gap
    return -np.log1p(np.exp(-logit)) if logit > -30 else logit


@compiled
def candidate_of(bits, node):
    """
    Packs a score and a node into one number, ordered by score; of equal scores the lower node is larger.

    `bits` is the float32 score read as uint32. All numbers are different, so the best ones do not depend on the order
    of the search.
    """
    ordered = ~bits if bits & _SIGN else bits | _SIGN
    return np.uint64(ordered) << np.uint64(32) | np.uint64(_LAST_NODE - node)


@compiled
def candidate_node(candidate):
    return _LAST_NODE - np.int64(candidate & np.uint64(_LAST_NODE))


@compiled
def candidate_bits(candidate):
    ordered = np.uint32(candidate >> np.uint64(32))
    return ordered ^ _SIGN if ordered & _SIGN else ~ordered


@compiled
def select(candidates, limit):
    """Moves the `limit` best candidates to the front, the worst of them last: quickselect with a branchless loop."""
    first, last = 0, candidates.shape[0] - 1
    target = limit - 1
    while first < last:
        middle = (first + last) // 2
        a, b, c = candidates[first], candidates[middle], candidates[last]
        pivot = max(min(a, b), min(max(a, b), c))
        at = first if pivot == a else middle if pivot == b else last
        candidates[at], candidates[last] = candidates[last], pivot
        better = first
        for i in range(first, last):
            candidate = candidates[i]
            candidates[i] = candidates[better]
            candidates[better] = candidate
            better += candidate > pivot
        candidates[last], candidates[better] = candidates[better], pivot
        if better == target:
            return
        if better < target:
            first = better + 1
        else:
            last = better - 1


@compiled
def search(
    indptr, indices, data, dense, first_document, last_document, child_begin, block_begin, block_child, row_begin,
    bucket_begin, buckets, records, features, scales, dense_weights, loss, beam_scores, beam_nodes, num_levels,
    beam_size, by_path, permitted, table, out_scores, out_nodes
):  # fmt: skip
    """
    Finds the best nodes `num_levels` below the first ones for the documents `first_document .. last_document`.

    The search starts from `beam_nodes`, (documents, nodes) padded with -1, with the log-probabilities `beam_scores`. A
    beam of `beam_size` nodes descends the tree, ranked by the product of the probabilities along the path. The last
    level is ranked by that product (`by_path`; its logarithm is returned) or by its logit alone. `out_nodes` has the
    numbers of nodes in the whole tree, padded with -1. If `permitted` is not empty, other nodes are left out.

    All documents descend together, node by node: the classifiers of a node are fetched once for all documents that
    visit it. If these have enough non-zeros, the rows of the node are first entered in `table` (one zero per feature,
    or empty; zero again afterwards), in which a look-up is several times as fast as by hash.
    """
    count, top_k = out_scores.shape
    sizes = np.zeros(count, dtype=np.int64)
    for i in range(count):
        while sizes[i] < beam_nodes.shape[1] and beam_nodes[i, sizes[i]] >= 0:
            sizes[i] += 1
    longest = np.int64(0)
    for document in range(first_document, last_document):
        longest = max(longest, np.int64(indptr[document + 1] - indptr[document]))
    starts, ends = np.empty(longest, dtype=np.int32), np.empty(longest, dtype=np.int32)
    rows, hits = np.empty(longest, dtype=np.int64), np.empty(longest, dtype=np.int64)
    factors = np.empty(longest, dtype=np.float32)
    # In the order of hashes, buckets and records are read from front to back, with fewer cache and TLB misses. Sorting
    # takes longer than it saves if most look-ups are in the table.
    tables = table.shape[0] > 0
    orders = np.arange(longest).astype(np.int32)
    if not tables:
        orders = _places_by_hash(indptr, indices, first_document, last_document)
    mean_nonzeros = (indptr[last_document] - indptr[first_document]) // max(count, 1)
    scores = np.zeros(LANES, dtype=np.float32)
    score_bits = scores.view(np.uint32)
    width = dense.shape[1]
    restricted = permitted.shape[0] > 0
    for level in range(num_levels):
        last = level == num_levels - 1
        limit = top_k if last else beam_size
        summed = by_path or not last
        # Candidates better than the `limit` best so far are appended; twice as many are reduced to the best.
        candidates = np.empty((count, 2 * limit + LANES), dtype=np.uint64)
        kept = np.zeros(count, dtype=np.int64)
        worst = np.zeros(count, dtype=np.uint64)
        # The best nodes of a beam are visited first: then few other candidates are good enough.
        positions = np.array([0, _first_visits(limit), beam_nodes.shape[1]])
        for part in range(2):
            visits = _visits_by_node(
                beam_scores.view(np.uint32), beam_nodes, sizes, positions[part], positions[part + 1], child_begin,
                summed, worst
            )  # fmt: skip
            group = 0
            while group < visits.shape[0]:
                node = beam_nodes[visits[group, 0], visits[group, 1]]
                group_end = group + 1
                while group_end < visits.shape[0] and beam_nodes[visits[group_end, 0], visits[group_end, 1]] == node:
                    group_end += 1
                for block in range(block_begin[node], block_begin[node + 1]):
                    first_child = block_child[block]
                    num_lanes = block_child[block + 1] - first_child
                    if restricted and not permitted[first_child : first_child + num_lanes].any():
                        continue
                    first_row, last_row = row_begin[block], row_begin[block + 1]
                    lookups = (group_end - group) * mean_nonzeros
                    tabled = tables and lookups * _ROWS_PER_LOOKUP > last_row - first_row
                    if tabled:
                        _fill_table(features, first_row, last_row, table)
                    for visit in range(group, group_end):
                        i, position = np.int64(visits[visit, 0]), np.int64(visits[visit, 1])
                        document = first_document + i
                        begin, end = np.int64(indptr[document]), np.int64(indptr[document + 1])
                        if tabled:
                            found = _rows_by_table(indices, data, begin, end, first_row, table, scales, hits, factors)
                        else:
                            at = np.int64(0) if tables else begin - np.int64(indptr[first_document])
                            found = _rows_by_hash(
                                block, indices, data, begin, end, orders[at:], row_begin, bucket_begin, buckets,
                                records, features, scales, starts, ends, rows, hits, factors
                            )  # fmt: skip
                        scores[:] = 0
                        lane_dot_run(dense[document], 0, width, dense_weights, block * width, scores)
                        if records.shape[1] == HEADER + LANES:
                            lane_dot_int8(hits, factors, 0, found, records, scores)
                        else:
                            lane_dot_float(hits, factors, 0, found, records, scores)
                        if summed:
                            for lane in range(LANES):
                                scores[lane] = beam_scores[i, position] + _log_probability(scores[lane], loss)
                        size, bound = kept[i], worst[i]
                        if restricted:
                            for lane in range(num_lanes):
                                candidate = candidate_of(score_bits[lane], first_child + lane)
                                candidates[i, size] = candidate
                                size += candidate > bound and permitted[first_child + lane]
                        else:  # without branches
                            for lane in range(num_lanes):
                                candidate = candidate_of(score_bits[lane], first_child + lane)
                                candidates[i, size] = candidate
                                size += candidate > bound
                        if size > 2 * limit:
                            select(candidates[i, :size], limit)
                            size, worst[i] = limit, candidates[i, limit - 1]
                        kept[i] = size
                    if tabled:
                        _clear_table(features, first_row, last_row, table)
                group = group_end
            for i in range(count):
                if kept[i] > limit:
                    select(candidates[i, : kept[i]], limit)
                    kept[i], worst[i] = limit, candidates[i, limit - 1]
        beam_scores, beam_nodes = np.empty((count, limit), np.float32), np.empty((count, limit), np.int64)
        sizes = kept
        for i in range(count):
            best = candidates[i, : sizes[i]]
            if last:
                best[:] = np.sort(best)[::-1]
            elif sizes[i] > 0:
                select(best, min(_first_visits(limit), sizes[i]))
            _write_beam(best, beam_scores.view(np.uint32)[i], beam_nodes[i])
    for i in range(count):
        size = sizes[i]
        out_scores[i, :size], out_nodes[i, :size] = beam_scores[i, :size], beam_nodes[i, :size]
        out_scores[i, size:], out_nodes[i, size:] = -np.inf, -1


@compiled
def _first_visits(limit):
    """Number of nodes that are visited first: they give twice as many candidates as are kept."""
    return -(-2 * limit // LANES)


@compiled
def _write_beam(best, beam_bits, beam_nodes):
    for position in range(best.shape[0]):
        beam_bits[position] = candidate_bits(best[position])
        beam_nodes[position] = candidate_node(best[position])


@compiled
def _visits_by_node(beam_bits, beam_nodes, sizes, first, last, child_begin, summed, worst):
    """
    Returns (document, position in its beam) of the visits at positions `first .. last`, grouped by node.

    If scores are `summed`, no child is better than its parent: nodes whose children are all worse than `worst` are
    skipped.
    """
    longest = np.int64(0)
    for i in range(sizes.shape[0]):
        longest += max(min(sizes[i], last) - first, 0)
    nodes = np.empty(longest, dtype=np.int64)
    visits = np.empty((longest, 2), dtype=np.int32)
    total = 0
    for i in range(sizes.shape[0]):
        for position in range(first, min(sizes[i], last)):
            node = beam_nodes[i, position]
            if not summed or candidate_of(beam_bits[i, position], child_begin[node]) > worst[i]:
                nodes[total] = node
                visits[total, 0], visits[total, 1] = i, position
                total += 1
    nodes, visits = nodes[:total], visits[:total]
    if total == 0:
        return visits
    lowest = nodes.min()
    distinct = nodes.max() - lowest + 1
    if distinct > total:
        return visits[np.argsort(nodes, kind="mergesort")]
    # Counting sort is faster for this many visits.
    begin = np.zeros(distinct + 1, dtype=np.int64)
    for at in range(total):
        begin[nodes[at] - lowest + 1] += 1
    for node in range(distinct):
        begin[node + 1] += begin[node]
    ordered = np.empty_like(visits)
    for at in range(total):
        node = nodes[at] - lowest
        ordered[begin[node]] = visits[at]
        begin[node] += 1
    return ordered


@compiled
def pack_rows(features, rows, order, records, record_features, record_scales, quantized):
    """Writes records in `order`; the last three arrays are views of one memory as int8, int32 and float32."""
    floats_at = HEADER // 4
    for at in range(order.shape[0]):
        row = order[at]
        record_features[at, 0] = features[row]
        if quantized:
            record_scales[at, 1] = quantize(rows[row], records[at, HEADER:])
        else:
            record_scales[at, 1] = 1
            record_scales[at, floats_at:] = rows[row]
