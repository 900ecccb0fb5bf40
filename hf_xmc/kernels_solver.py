"""
Dual coordinate descent for sixteen sibling classifiers at a time: the compiled inner loops of ranker training.

Each classifier minimises `1/2 |w - w0|^2 + sum_i C_i * loss(y_i * (w . x_i + prior))` over the documents its parent
shortlists, `loss` being the squared hinge or the logistic loss; `w0` is 0 except in the bootstrap of heads. The logit
starts from a constant `prior` (-1 by default): a classifier that has seen nothing already rejects everything, so that
only negatives which resemble a positive cost any work, where a zero start has to learn the rejection from every single
negative.
"""

from __future__ import annotations

import numpy as np

from .kernels_search import LOGISTIC, SQUARED_HINGE, bucket_bits, hash_order, pack_rows
from .simd import (
    HEADER,
    LANES,
    compiled,
    lane_add,
    lane_add_run,
    lane_dot,
    lane_dot_run,
    prefetch,
    prefetch_rows,
    prefetch_span,
)

# Marks a feature as seen even where its stored value is 0.
_TINY = np.float32(1e-30)

# A node's documents lie anywhere in memory: the one so many places on is fetched meanwhile.
_AHEAD = 8

# Of so many documents the few bytes that tell where each begins, and its norm, stay in the cache.
_CACHED_DOCUMENTS = 1 << 14


@compiled
def solve_block(
    indptr, indices, data, dense, norms, documents, rows, diagonal, num_lanes, loss, prior, max_passes, tolerance,
    seed, weights, dense_weights
):  # fmt: skip
    """
    Trains `num_lanes` sibling classifiers in place and returns the number of passes made.

    Document `documents[i]` has its dense part under this number, its sparse part and its norm in row `rows[i]`.
    `diagonal[i, lane]` is `+1/(2C)` for a positive document, `-1/(2C)` for a negative one (`C` and `-C` for the
    logistic loss). `weights` (features, LANES) come zeroed, `dense_weights` (dimensions, LANES) with the
    weights `w0` that the classifiers are drawn to.
    """
    count = documents.shape[0]
    width = dense.shape[1]
    flat_dense = dense.reshape(-1)
    alpha = np.zeros((count, LANES), dtype=np.float32)
    scores = np.zeros(LANES, dtype=np.float32)
    delta = np.zeros(LANES, dtype=np.float32)
    active = np.ones(count, dtype=np.bool_)
    order = np.empty(count, dtype=np.int64)
    state = np.uint64(2 * seed + 1)
    # Documents far from every logit are skipped; whole sweeps find those that moved back, ever less often.
    slack = np.float32(tolerance * 0.1)
    next_sweep, gap = 0, 1
    scattered = count > _CACHED_DOCUMENTS
    for step in range(max_passes):
        sweep = step == next_sweep
        if sweep:
            gap += 1
            next_sweep = step + gap
        visits = _gather(active, sweep, order)
        state = _shuffle(order, visits, state)
        if step == 0:
            _positives_first(order, visits, diagonal, num_lanes)
        worst = np.float32(0)
        for visit in range(visits):
            # What the next documents need is fetched while this one is worked on, and where to find it still earlier.
            if scattered and visit + 6 < visits:
                later = order[visit + 6]
                prefetch_span(rows, later, later + 1)
                prefetch_span(documents, later, later + 1)
                later = rows[order[visit + 4]]
                prefetch_span(indptr, later, later + 1)
                prefetch_span(norms, later, later + 1)
            if visit + 2 < visits:
                later = order[visit + 2]
                begin, end = np.int64(indptr[rows[later]]), np.int64(indptr[rows[later] + 1])
                prefetch_span(indices, begin, end)
                prefetch_span(data, begin, end)
                prefetch(alpha, later)
                prefetch(diagonal, later)
                prefetch(dense, documents[later])
            if visit + 1 < visits:
                following = rows[order[visit + 1]]
                prefetch_rows(indices, np.int64(indptr[following]), np.int64(indptr[following + 1]), weights)
            i = order[visit]
            row = rows[i]
            begin, end = np.int64(indptr[row]), np.int64(indptr[row + 1])
            first = np.int64(documents[i] * width)
            scores[:] = prior
            lane_dot(indices, data, begin, end, weights, scores)
            lane_dot_run(flat_dense, first, first + width, dense_weights, 0, scores)
            if loss == SQUARED_HINGE:
                violation = _squared_hinge_step(alpha[i], diagonal[i], scores, norms[row], num_lanes, slack, delta)
            else:
                violation = _logistic_step(alpha[i], diagonal[i], scores, norms[row], num_lanes, slack, delta)
            active[i] = violation > slack
            if active[i]:
                lane_add(indices, data, begin, end, weights, delta)
                lane_add_run(flat_dense, first, first + width, dense_weights, 0, delta)
            worst = max(worst, violation)
        if sweep and worst <= tolerance:
            return step + 1
    return max_passes


@compiled
def _gather(active, everything, order):
    """Writes the documents to visit to the front of `order` and returns how many they are."""
    visits = 0
    for i in range(active.shape[0]):
        if everything or active[i]:
            order[visits] = i
            visits += 1
    return visits


@compiled
def _shuffle(order, visits, state):
    """Fisher-Yates with a linear congruential generator of its own: the same on every platform and thread."""
    for i in range(visits - 1, 0, -1):
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        j = np.int64((state >> np.uint64(33)) % np.uint64(i + 1))
        order[i], order[j] = order[j], order[i]
    return state


@compiled
def _positives_first(order, visits, diagonal, num_lanes):
    front = 0
    for i in range(visits):
        positive = False
        for lane in range(num_lanes):
            positive |= diagonal[order[i], lane] > 0
        if positive:
            order[i], order[front] = order[front], order[i]
            front += 1


@compiled
def _squared_hinge_step(alpha, diagonal, scores, norm, num_lanes, slack, delta):
    """Exact minimiser of the dual in each lane's coordinate; returns the largest violation seen."""
    worst = np.float32(0)
    for lane in range(num_lanes):
        shift = abs(diagonal[lane])
        sign = np.float32(1) if diagonal[lane] > 0 else np.float32(-1)
        old = alpha[lane]
        gradient = sign * scores[lane] - np.float32(1) + shift * old
        violation = abs(gradient) if old > 0 else max(-gradient, np.float32(0))
        delta[lane] = np.float32(0)
        if violation > slack:
            new = max(old - gradient / (norm + shift), np.float32(0))
            alpha[lane] = new
            delta[lane] = (new - old) * sign
            worst = max(worst, violation)
    return worst


@compiled
def _logistic_step(alpha, diagonal, scores, norm, num_lanes, slack, delta):
    """
    Newton steps on `norm * (C * sigmoid(u) - old) + y * score + u = 0`, the optimality of one dual coordinate.

    Written in `u = logit(alpha / C)` the equation is increasing with a slope of at least one, and its root lies
    between the values for `alpha = C` and `alpha = 0`. Long documents or large costs make the curve a steep step,
    around which Newton's method jumps to and fro: a step out of what remains of the interval halves it instead.
    """
    worst = np.float32(0)
    for lane in range(num_lanes):
        cost = np.float64(abs(diagonal[lane]))
        sign = 1.0 if diagonal[lane] > 0 else -1.0
        old = np.float64(alpha[lane])
        logit = sign * scores[lane]
        u = -logit
        low, high = u - norm * (cost - old), u + norm * old
        for _ in range(50):
            share = 1.0 / (1.0 + np.exp(-u))
            residual = norm * (cost * share - old) + logit + u
            if residual > 0:
                high = u
            else:
                low = u
            u -= residual / (norm * cost * share * (1.0 - share) + 1.0)
            if abs(residual) < 1e-6:
                break
            if not low < u < high:
                u = 0.5 * (low + high)
        new = np.float32(cost / (1.0 + np.exp(-u)))
        change = new - alpha[lane]
        violation = norm * abs(change)
        delta[lane] = np.float32(0)
        if violation > slack:
            alpha[lane] = new
            delta[lane] = change * np.float32(sign)
            worst = max(worst, np.float32(violation))
    return worst


@compiled
def block_diagonal(
    target_ptr, targets, relevance, documents, first, num_lanes, loss, positive_cost, negative_cost, weighted, diagonal
):
    """
    Fills `diagonal` (see [`solve_block`]) for the siblings `first .. first + num_lanes` of one level.

    With `weighted`, the cost of a positive is multiplied by its share `relevance / sum(relevance of the document)`,
    equation (6).
    """
    negative = np.float32(-negative_cost if loss == LOGISTIC else -0.5 / negative_cost)
    for i in range(documents.shape[0]):
        if i + _AHEAD < documents.shape[0]:
            begin, end = target_ptr[documents[i + _AHEAD]], target_ptr[documents[i + _AHEAD] + 1]
            prefetch_span(targets, begin, end)
            prefetch_span(relevance, begin, end)
        diagonal[i, :] = negative
        begin, end = target_ptr[documents[i]], target_ptr[documents[i] + 1]
        total = np.float32(0)
        for p in range(begin, end):
            total += relevance[p]
        for p in range(begin, end):
            lane = targets[p] - first
            if 0 <= lane < num_lanes:
                cost = positive_cost * relevance[p] / total if weighted else positive_cost
                diagonal[i, lane] = np.float32(cost if loss == LOGISTIC else 0.5 / cost)


@compiled
def collect_rows(indptr, indices, data, documents, weights, threshold, energy):
    """
    The weights of a trained block that matter: `|weight| * (root mean square of the feature here) >= threshold`.

    The product is how much dropping a weight would change the logits of the block's documents: a large weight of a
    word that hardly occurs goes, a small one of a frequent word stays. Returns the ids of features with a weight left
    and their rows; `weights` and `energy` (one zero per feature) are zero again afterwards.
    """
    touched = np.empty(min(_count_nonzeros(indptr, documents), weights.shape[0]), dtype=np.int32)
    count = 0
    for i in range(documents.shape[0]):
        for p in range(indptr[documents[i]], indptr[documents[i] + 1]):
            feature = indices[p]
            if energy[feature] == 0:
                touched[count] = feature
                count += 1
            energy[feature] += data[p] * data[p] + _TINY
    kept = 0
    for t in range(count):
        feature = touched[t]
        limit = threshold / np.sqrt(energy[feature] / documents.shape[0])
        energy[feature] = 0
        left = False
        for lane in range(LANES):
            if abs(weights[feature, lane]) >= limit:
                left = True
            else:
                weights[feature, lane] = 0
        if left:
            touched[kept] = feature
            kept += 1
    features = touched[:kept].copy()
    rows = np.empty((kept, LANES), dtype=np.float32)
    for t in range(kept):
        rows[t] = weights[features[t]]
        weights[features[t], :] = 0
    return features, rows


@compiled
def gather_documents(indptr, indices, data, documents, numbers):
    """
    Copies documents with their features renumbered in the order in which they first appear.

    What a node's documents and their weights need lies side by side then: taken from among a million documents and
    hundreds of thousands of features, nearly every access would miss the cache. `numbers` (one zero per feature) is
    zero again afterwards. Returns the three arrays of the copy and the feature behind each new number.
    """
    count = documents.shape[0]
    begin = np.zeros(count + 1, dtype=indptr.dtype)
    for i in range(count):
        begin[i + 1] = begin[i] + indptr[documents[i] + 1] - indptr[documents[i]]
    numbered = np.empty(begin[count], dtype=indices.dtype)
    values = np.empty(begin[count], dtype=data.dtype)
    features = np.empty(min(begin[count], numbers.shape[0]), dtype=np.int32)
    seen, position = 0, 0
    for i in range(count):
        if i + _AHEAD < count:
            later, later_end = np.int64(indptr[documents[i + _AHEAD]]), np.int64(indptr[documents[i + _AHEAD] + 1])
            prefetch_span(indices, later, later_end)
            prefetch_span(data, later, later_end)
        for p in range(indptr[documents[i]], indptr[documents[i] + 1]):
            feature = indices[p]
            if numbers[feature] == 0:
                features[seen] = feature
                seen += 1
                numbers[feature] = seen
            numbered[position] = numbers[feature] - 1
            values[position] = data[p]
            position += 1
    for t in range(seen):
        numbers[features[t]] = 0
    return begin, numbered, values, features[:seen]


@compiled
def _count_nonzeros(indptr, documents):
    total = 0
    for i in range(documents.shape[0]):
        total += indptr[documents[i] + 1] - indptr[documents[i]]
    return total


@compiled
def train_blocks(
    indptr, indices, data, dense, norms, target_ptr, targets, relevance, shortlist_ptr, shortlist, blocks, loss,
    positive_cost, negative_cost, weighted, prior, initial, max_passes, tolerance, seed, threshold, quantized,
    copied_nonzeros, weights, energy, numbers
):  # fmt: skip
    """
    Trains and packs blocks of one level, each given as (parent, first child, number of children).

    A large tree has tens of thousands of blocks with a millisecond of work each: one call takes many of them.
    A node's documents are copied unless they have more than `copied_nonzeros`, see [`gather_documents`].
    `initial` has the dense weights that each node of the level is drawn to, or no rows for zeros.
    `weights` (features, LANES), `energy` and `numbers` (features) come and leave zeroed. Returns the number of records
    and of bucket table entries of each block, then all records, bucket tables and dense weights.
    """
    count, width = blocks.shape[0], dense.shape[1]
    sizes = np.empty((count, 2), dtype=np.int64)
    dense_weights = np.zeros((count * width, LANES), dtype=np.float32)
    records = np.empty((0, HEADER + LANES * (1 if quantized else 4)), dtype=np.int8)
    buckets = np.empty(0, dtype=np.int32)
    num_records, num_buckets = 0, 0
    documents = shortlist[:0]
    copy_ptr, copy_indices, copy_data, copied = gather_documents(indptr, indices, data, documents, numbers)
    small = False
    for block in range(count):
        parent, first, num_lanes = blocks[block]
        if block == 0 or parent != blocks[block - 1, 0]:
            documents = shortlist[shortlist_ptr[parent] : shortlist_ptr[parent + 1]]
            small = _count_nonzeros(indptr, documents) <= copied_nonzeros
            if small:
                copy_ptr, copy_indices, copy_data, copied = gather_documents(indptr, indices, data, documents, numbers)
        diagonal = np.empty((documents.shape[0], LANES), dtype=np.float32)
        block_diagonal(
            target_ptr, targets, relevance, documents, first, num_lanes, loss, positive_cost, negative_cost, weighted,
            diagonal
        )  # fmt: skip
        block_dense = dense_weights[block * width : (block + 1) * width]
        if initial.shape[0] > 0:
            for lane in range(num_lanes):
                block_dense[:, lane] = initial[first + lane]
        if small:
            every = np.arange(documents.shape[0])
            solve_block(
                copy_ptr, copy_indices, copy_data, dense, norms[documents], documents, every, diagonal, num_lanes,
                loss, prior, max_passes, tolerance, seed + first, weights, block_dense
            )  # fmt: skip
            features, rows = collect_rows(copy_ptr, copy_indices, copy_data, every, weights, threshold, energy)
            features = copied[features]
        else:
            solve_block(
                indptr, indices, data, dense, norms, documents, documents, diagonal, num_lanes, loss, prior,
                max_passes, tolerance, seed + first, weights, block_dense
            )  # fmt: skip
            features, rows = collect_rows(indptr, indices, data, documents, weights, threshold, energy)
        block_dense[-1] += prior
        order, starts = hash_order(features, bucket_bits(features.shape[0]))
        sizes[block, 0], sizes[block, 1] = order.shape[0], starts.shape[0]
        records = _with_room(records, num_records, order.shape[0])
        buckets = _with_room(buckets, num_buckets, starts.shape[0])
        packed = records[num_records : num_records + order.shape[0]]
        pack_rows(features, rows, order, packed, packed.view(np.int32), packed.view(np.float32), quantized)
        buckets[num_buckets : num_buckets + starts.shape[0]] = starts
        num_records += order.shape[0]
        num_buckets += starts.shape[0]
    return sizes, records[:num_records], buckets[:num_buckets], dense_weights


@compiled
def _with_room(array, used, more):
    """`array`, or a larger copy, with room for `more` rows after the first `used`."""
    if used + more <= array.shape[0]:
        return array
    larger = np.empty((2 * (used + more),) + array.shape[1:], dtype=array.dtype)
    larger[:used] = array[:used]
    return larger
