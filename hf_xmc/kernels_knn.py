"""The compiled loops of the k-nearest-neighbour ranker."""

from __future__ import annotations

import numpy as np

from .kernels_search import candidate_bits, candidate_node, candidate_of, select
from .simd import compiled

_NOT_SIMILAR = np.uint32(0)  # the bits of a similarity of 0


@compiled
def vote(
    indptr, indices, data, first_document, last_document, term_begin, term_documents, term_weights, label_begin,
    labels, votes, count, power, out_scores, out_labels
):  # fmt: skip
    """
    Finds the labels of the `count` training documents most similar to each of `first_document .. last_document`.

    The training documents with term `t` and its weights start at `term_begin[t]`, the labels of a training document at
    `label_begin[document]`. Each votes for its labels with its similarity raised to `power`; a score is the share of a
    label of all votes. `votes` (one per label) is zero before and after. `out_labels` is padded with -1.
    """
    top_k = out_scores.shape[1]
    similarities = np.zeros(label_begin.shape[0] - 1, dtype=np.float32)
    similarity_bits, vote_bits = similarities.view(np.uint32), votes.view(np.uint32)
    voters = np.empty(2 * count, dtype=np.uint64)
    best = np.empty(2 * top_k, dtype=np.uint64)
    nothing = candidate_of(_NOT_SIMILAR, 0)  # worse than every candidate with a score
    for i in range(last_document - first_document):
        document = first_document + i
        similarities[:] = 0
        for p in range(indptr[document], indptr[document + 1]):
            for q in range(term_begin[indices[p]], term_begin[indices[p] + 1]):
                similarities[term_documents[q]] += data[p] * term_weights[q]
        worst, kept, bound = nothing, 0, np.float32(0)
        for known in range(similarities.shape[0]):
            # Most documents fail this test.
            if similarities[known] > bound:
                kept, worst = _keep(voters, kept, worst, candidate_of(similarity_bits[known], known), count)
                if worst > nothing:
                    bound = similarities[candidate_node(worst)]
        if kept > count:
            select(voters[:kept], count)
            kept = count
        # Relative to the largest similarity, shares are the same, and powers of small numbers do not underflow.
        largest, total = np.float32(0), np.float32(0)
        for v in range(kept):
            largest = max(largest, similarities[candidate_node(voters[v])])
        for v in range(kept):
            known = candidate_node(voters[v])
            strength = (similarities[known] / largest) ** power
            total += strength
            for q in range(label_begin[known], label_begin[known + 1]):
                votes[labels[q]] += strength
        worst, size = nothing, 0
        for v in range(kept):
            known = candidate_node(voters[v])
            for q in range(label_begin[known], label_begin[known + 1]):
                label = labels[q]
                if votes[label] > 0:
                    votes[label] /= total
                    size, worst = _keep(best, size, worst, candidate_of(vote_bits[label], label), top_k)
                    votes[label] = 0
        if size > top_k:
            select(best[:size], top_k)
            size = top_k
        ordered = np.sort(best[:size])[::-1]
        for position in range(size):
            out_scores.view(np.uint32)[i, position] = candidate_bits(ordered[position])
            out_labels[i, position] = candidate_node(ordered[position])
        out_scores[i, size:], out_labels[i, size:] = 0, -1


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
