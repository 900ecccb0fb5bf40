"""
The compiled loops of similarities: documents and the rows of an inverted index, votes of similar documents.

The rows that contain term `t` are `term_rows[term_begin[t] : term_begin[t + 1]]`, with their `term_weights`. Rows are
labels or training documents.
"""

from __future__ import annotations

import numba
import numpy as np

from .kernels_search import candidate_bits, candidate_node, candidate_of, select
from .simd import compiled

_NOT_SIMILAR = np.uint32(0)  # the bits of a similarity of 0
# Exponents of float32 are larger by this power of two than those of float16.
HALF_SCALE = np.float32(2.0**112)
_SIGN, _REST = np.uint32(0x8000), np.uint32(0x7FFF)


@compiled
def largest(values, count):
    """Marks the `count` largest values; of equal ones, those that come first."""
    threshold = np.partition(values, values.shape[0] - count)[values.shape[0] - count]
    equal_left = count - (values > threshold).sum()
    marked = np.zeros(values.shape[0], dtype=np.bool_)
    for i in range(values.shape[0]):
        if values[i] > threshold:
            marked[i] = True
        elif values[i] == threshold and equal_left > 0:
            marked[i] = True
            equal_left -= 1
    return marked


@compiled
def largest_of_rows(indptr, data, count):
    """Marks the `count` largest entries of each sparse row, all where there are no more."""
    marked = np.ones(data.shape[0], dtype=np.bool_)
    for row in range(indptr.shape[0] - 1):
        begin, end = indptr[row], indptr[row + 1]
        if end - begin > count:
            marked[begin:end] = largest(data[begin:end], count)
    return marked


@compiled
def add_products(
    indptr, indices, data, first_document, last_document, term_begin, term_rows, term_weights, columns, out
):  # fmt: skip
    """
    Writes the dot products of the documents with all rows of an inverted index to `out`, (documents, rows) of zeros.

    If `columns` is not empty, they are divided by the norm of the document over the columns that it marks.
    """
    for i in range(last_document - first_document):
        document = first_document + i
        _add_products(indptr, indices, data, document, term_begin, term_rows, term_weights, out[i])
        if columns.shape[0] > 0:
            square = np.float32(0)
            for p in range(indptr[document], indptr[document + 1]):
                square += columns[indices[p]] * data[p] * data[p]
            if square > 0:
                out[i] *= np.float32(1) / np.sqrt(square)


@compiled
def _add_products(indptr, indices, data, document, term_begin, term_rows, term_weights, products):
    for p in range(indptr[document], indptr[document + 1]):
        for q in range(term_begin[indices[p]], term_begin[indices[p] + 1]):
            products[term_rows[q]] += data[p] * term_weights[q]


# Sums in any order, so that the loops are vectorised; the order is the same for all rows and documents.
@numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
def multiply_halves(documents, halves, first_row, last_row, out):
    """
    Writes the dot products of documents with rows of float16 numbers to `out`, (documents, rows).

    `documents` are float32 multiplied by `HALF_SCALE`, `halves` the bits of the rows. The bits of a float16 number,
    shifted to those of float32, are a number that is too small by this factor.
    """
    size = halves.shape[1]
    bits = np.empty(size, np.uint32)
    row = bits.view(np.float32)
    for r in range(first_row, last_row):
        for j in range(size):
            half = np.uint32(halves[r, j])
            bits[j] = ((half & _REST) << np.uint32(13)) | ((half & _SIGN) << np.uint32(16))
        for i in range(documents.shape[0]):
            product = np.float32(0)
            for j in range(size):
                product += row[j] * documents[i, j]
            out[i, r] = product


@compiled
def best_columns(scores, out_scores, out_columns):
    """Writes the largest positive scores of each row, in descending order, and their columns; padded with 0 and -1."""
    top_k = out_scores.shape[1]
    best = np.empty(2 * top_k, dtype=np.uint64)
    for i in range(scores.shape[0]):
        size = _best_positive(scores[i], best, top_k)
        _write(best[:size], out_scores[i], out_columns[i])


@compiled
def _best_positive(scores, best, limit):
    """Collects the `limit` largest positive scores as candidates at the start of `best`; returns their number."""
    bits = scores.view(np.uint32)
    nothing = candidate_of(_NOT_SIMILAR, 0)  # worse than every candidate with a score
    worst, kept, bound = nothing, 0, np.float32(0)
    for column in range(scores.shape[0]):
        # Most columns fail this test.
        if scores[column] > bound:
            kept, worst = _keep(best, kept, worst, candidate_of(bits[column], column), limit)
            if worst > nothing:
                bound = scores[candidate_node(worst)]
    if kept > limit:
        select(best[:kept], limit)
        kept = limit
    return kept


@compiled
def _write(candidates, out_scores, out_columns):
    ordered = np.sort(candidates)[::-1]
    size = ordered.shape[0]
    for position in range(size):
        out_scores.view(np.uint32)[position] = candidate_bits(ordered[position])
        out_columns[position] = candidate_node(ordered[position])
    out_scores[size:], out_columns[size:] = 0, -1


@compiled
def _keep(candidates, kept, worst, candidate, limit):
    """Adds a candidate if it is better than `worst`; reduces twice `limit` candidates to the `limit` best."""
    if candidate > worst:
        candidates[kept] = candidate
        kept += 1
        if kept == 2 * limit:
            select(candidates, limit)
            kept, worst = limit, candidates[limit - 1]
    return kept, worst


@compiled
def vote(
    indptr, indices, data, first_document, last_document, term_begin, term_rows, term_weights, label_begin, labels,
    votes, count, power, out_scores, out_labels
):  # fmt: skip
    """
    Finds the labels of the `count` training documents most similar to each of `first_document .. last_document`.

    The labels of a training document start at `label_begin[document]`. Each of the most similar documents votes for
    its labels with its similarity raised to `power`; a score is the share of a label of all votes. `votes` (one per
    label) is zero before and after. `out_labels` is padded with -1.
    """
    similarities = np.zeros(label_begin.shape[0] - 1, dtype=np.float32)
    voters = np.empty(2 * count, dtype=np.uint64)
    strengths = np.empty(count, dtype=np.float32)
    for i in range(last_document - first_document):
        similarities[:] = 0
        _add_products(indptr, indices, data, first_document + i, term_begin, term_rows, term_weights, similarities)
        kept = _best_positive(similarities, voters, count)
        nearest, largest = np.empty(kept, dtype=np.int64), np.float32(0)
        for v in range(kept):
            nearest[v] = candidate_node(voters[v])
            largest = max(largest, similarities[nearest[v]])
        # Relative to the largest similarity, shares are the same, and powers of small numbers do not underflow.
        for v in range(kept):
            strengths[v] = (similarities[nearest[v]] / largest) ** power
        _count_votes(nearest, strengths, label_begin, labels, votes, out_scores[i], out_labels[i])


@compiled
def count_votes(nearest, strengths, label_begin, labels, votes, out_scores, out_labels):
    """As [`vote`], for documents whose nearest training documents and their strengths are known."""
    for i in range(nearest.shape[0]):
        _count_votes(nearest[i], strengths[i], label_begin, labels, votes, out_scores[i], out_labels[i])


@compiled
def _count_votes(nearest, strengths, label_begin, labels, votes, out_scores, out_labels):
    top_k = out_scores.shape[0]
    best = np.empty(2 * top_k, dtype=np.uint64)
    vote_bits = votes.view(np.uint32)
    total = np.float32(0)
    for v in range(nearest.shape[0]):
        total += strengths[v]
        for q in range(label_begin[nearest[v]], label_begin[nearest[v] + 1]):
            votes[labels[q]] += strengths[v]
    worst, size = candidate_of(_NOT_SIMILAR, 0), 0
    for v in range(nearest.shape[0]):
        for q in range(label_begin[nearest[v]], label_begin[nearest[v] + 1]):
            label = labels[q]
            if votes[label] > 0:
                votes[label] /= total
                size, worst = _keep(best, size, worst, candidate_of(vote_bits[label], label), top_k)
                votes[label] = 0
    if size > top_k:
        select(best[:size], top_k)
        size = top_k
    _write(best[:size], out_scores, out_labels)


@compiled
def look_up(labels, scores, candidates, missing, places, out):
    """
    Writes the scores of `candidates`, (documents, candidates) padded with -1, as found in `labels` and `scores`.

    `missing[document]` is the score of other labels. `places` has a zero for each label before and after.
    """
    for i in range(labels.shape[0]):
        for position in range(labels.shape[1]):
            if labels[i, position] >= 0:
                places[labels[i, position]] = position + 1
        for position in range(candidates.shape[1]):
            out[i, position] = missing[i]
            if candidates[i, position] >= 0 and places[candidates[i, position]] > 0:
                out[i, position] = scores[i, places[candidates[i, position]] - 1]
        for position in range(labels.shape[1]):
            if labels[i, position] >= 0:
                places[labels[i, position]] = 0


@compiled
def add_logits(scores, best, frequency, weights, logits):
    """
    Adds what one part contributes to the logits of the last scorer, (documents, candidates).

    `weights` has a row for the score and one for its difference to the `best` score of the document, each with the
    weights of rare and of frequent labels, and of labels without documents; `frequency` is 0 for rare labels, 1 for
    frequent ones and -1 for those without documents.
    """
    for i in range(scores.shape[0]):
        for j in range(scores.shape[1]):
            share = frequency[i, j]
            if share < 0:
                score, difference = weights[0, 2], weights[1, 2]
            else:
                score = weights[0, 0] + share * (weights[0, 1] - weights[0, 0])
                difference = weights[1, 0] + share * (weights[1, 1] - weights[1, 0])
            logits[i, j] += score * scores[i, j] + difference * (scores[i, j] - best[i])
