"""Fits the last scorer on documents that the parts of the model have not seen, METHODS eq. 14."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from scipy.optimize import minimize
from scipy.sparse import csr_matrix
from scipy.special import expit

from ..features import Features
from ..modeling_xmc import XMCForTextClassification
from ..scorer import TEXT_PARTS, PartScores, Scorer, default_scorer, unite

# Documents that a scorer needs; with fewer the weights are fixed.
MIN_DOCUMENTS = 200
# Documents that are enough for a few dozen numbers.
MAX_DOCUMENTS = 5000
# Labels of each document that the calibration curve is fitted on, and where its points are among their logits.
_SHOWN_LABELS = 10
_CURVE_QUANTILES = (0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1)
# Penalties of the squared weights, relative to the standard deviation of what they multiply, and of the squared
# deviation of the calibration curve from the identity.
_L2, _CURVE_L2 = 1.0, 1.0
_LEAST_SLOPE, _LEAST_DEVIATION = 1e-3, 1e-3
# Labels without documents: slopes and constants of their logits that are compared, what they may cost of the nDCG@5 of
# other documents, and the values if there is none to compare.
_NDCG_AT = 5
_SLOPES, _CONSTANTS = (1.0, 0.5), np.arange(-8, 2.05, 0.1).tolist()
TOLERATED_LOSS = 0.002
UNSEEN_TRUST = (0.5, -2.25)


def held_out_documents(count: int, seed: int) -> np.ndarray:
    """Returns the rows of a random tenth of the documents, in order; none if they were too few to fit a scorer."""
    size = min(count // 10, MAX_DOCUMENTS)
    if size < MIN_DOCUMENTS:
        return np.empty(0, dtype=np.int64)
    return np.sort(np.random.default_rng(seed).choice(count, size, replace=False))


def score_candidates(
    model: XMCForTextClassification, features: Features, names: Sequence[str], num_threads: int | None = None
) -> dict[str, np.ndarray]:
    """
    Returns the scores of parts for the candidates of documents, see [`~XMCForTextClassification.featurize`].

    The arrays have a row for each candidate: `document` (row of `features`), `label`, `scores` of all parts, and their
    `differences` to the best scores of the document; `count` is the number of documents.
    """
    assert model.label_tree is not None
    num_labels = model.label_tree.num_labels
    blocks = model.part_scores(features, names, _SHOWN_LABELS, num_threads=num_threads)
    return join_candidates(candidates_of(parts, num_labels) for parts in blocks)


def join_candidates(chunks: Iterable[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Joins the candidates of consecutive documents, see [`score_candidates`]."""
    joined, first = [], 0
    for chunk in chunks:
        joined.append({**chunk, "document": chunk["document"] + first})
        first += int(chunk["count"][0])
    arrays = {name: np.concatenate([chunk[name] for chunk in joined]) for name in joined[0]}
    return {**arrays, "count": np.array([first])}


def candidates_of(parts: Mapping[str, PartScores], num_labels: int) -> dict[str, np.ndarray]:
    """Returns the scores of parts for all labels that any of them proposes, see [`score_candidates`]."""
    candidates = unite(parts, _SHOWN_LABELS)
    document, column = np.nonzero(candidates >= 0)
    scores = np.stack([part.of(candidates, num_labels)[document, column] for part in parts.values()], axis=1)
    best = np.stack([part.best[document] for part in parts.values()], axis=1)
    count, label = np.array([len(candidates)]), candidates[document, column]
    return {"count": count, "document": document, "label": label, "scores": scores, "differences": scores - best}


def fit_scorer(
    names: Sequence[str], chunks: Iterable[Mapping[str, np.ndarray]], truth: csr_matrix, log_counts: np.ndarray
) -> Scorer:
    """
    Returns the last scorer, whose weights minimise the logistic loss over the candidates.

    The weights are fixed if there are fewer than `MIN_DOCUMENTS` documents or no candidate is true.

    Args:
        names (`Sequence[str]`): The parts.
        chunks (`Iterable[Mapping[str, np.ndarray]]`): Results of [`score_candidates`] for the documents in order.
        truth (`csr_matrix`): `(documents, labels)` indicator of their true labels; further columns are ignored.
        log_counts (`np.ndarray`): `log(1 + n)` with the number of training documents of each label.
    """
    chunk = join_candidates(chunks)
    document, label = chunk["document"], chunk["label"]
    scores, differences = (chunk[view].astype(np.float64) for view in ("scores", "differences"))
    is_true = np.asarray(truth[document, label]).ravel() > 0
    unseen = log_counts[label] == 0
    texts = np.array([name in TEXT_PARTS for name in names])
    # Where nothing knows labels by their texts, those without documents are like the rarest ones.
    fitted = ~unseen if texts.any() else np.ones(len(label), dtype=np.bool_)
    if truth.shape[0] < MIN_DOCUMENTS or not is_true[fitted].any() or is_true[fitted].all():
        return default_scorer(names)
    counts = log_counts[label].astype(np.float64)
    frequency = (counts / max(log_counts.max(), 1e-6))[:, None]
    columns = np.stack([scores, differences], axis=2)
    # For each part: score and difference, each for rare and for frequent labels.
    views = np.stack([columns * (1 - frequency[:, None]), columns * frequency[:, None]], axis=3)
    design = np.hstack([views.reshape(len(label), -1), counts[:, None], counts[:, None] ** 2])
    num_weights = 4 * len(names)
    found, bias = _fit_logistic(design[fitted], is_true[fitted], num_weights)
    logits = design @ found + bias
    best, _ = _best_rows(document[fitted], logits[fitted], _SHOWN_LABELS)
    curve = _fit_curve(logits[fitted][best], is_true[fitted][best])
    pairs = found[:num_weights].reshape(-1, 2, 2)
    weights, unseen_bias = pairs[:, :, [0, 1, 0]], bias
    if texts.any():
        # Labels without documents: what the texts say about other labels.
        known = columns[:, texts].reshape(len(label), -1)
        by_text, text_bias = _fit_logistic(known[fitted], is_true[fitted], known.shape[1])
        logits[unseen] = (known @ by_text + text_bias)[unseen]
        trust, unseen_bias = _trust_in_texts(document, logits, is_true, unseen, np.diff(truth.indptr))
        weights[:, :, 2] = 0
        weights[texts, :, 2] = trust * by_text.reshape(-1, 2)
        unseen_bias += trust * text_bias
    return Scorer(names, weights, found[num_weights:], bias, unseen_bias, curve, num_documents=truth.shape[0])


def _trust_in_texts(
    document: np.ndarray, logits: np.ndarray, truth: np.ndarray, unseen: np.ndarray, positives: np.ndarray
) -> tuple[float, float]:
    """
    Returns a slope and a constant for the logits of labels without documents.

    How often such labels will be true is not known: they may be new. These are the values that show most of them among
    the ten best labels, at an nDCG@5 of documents that have none of them that is almost that without them.
    """
    others = np.ones(len(positives), dtype=np.bool_)
    others[document[unseen & truth]] = False
    if not unseen.any() or not others.any():
        return UNSEEN_TRUST
    (known, hits), (new, _) = (
        _best_of(document[kind], logits[kind], truth[kind], len(positives)) for kind in (~unseen, unseen)
    )
    known, hits, new = known[others], np.hstack([hits, np.zeros_like(hits)])[others], new[others]
    discounts = 1 / np.log2(np.arange(2, _NDCG_AT + 2))
    ideal = np.append(1.0, np.cumsum(discounts))[np.minimum(positives[others], _NDCG_AT)]

    def measure(slope: float, constant: float) -> tuple[float, int]:
        # Of equal logits, labels with documents come first, and places without a label last.
        order = np.argsort(-np.hstack([known, slope * new + constant]), axis=1, kind="stable")[:, :_SHOWN_LABELS]
        gains = np.take_along_axis(hits, order[:, :_NDCG_AT], axis=1) @ discounts
        return float((gains / ideal).mean()), int((order >= _SHOWN_LABELS).sum())

    least = measure(1.0, -np.inf)[0] - TOLERATED_LOSS
    best, chosen = -1, (_SLOPES[0], _CONSTANTS[0])
    for slope in _SLOPES:
        for constant in _CONSTANTS:
            value, shown = measure(slope, constant)
            if value < least:
                break
            if shown > best:
                best, chosen = shown, (slope, constant)
    return chosen


def _best_of(document: np.ndarray, logits: np.ndarray, truth: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits and truth of the best candidates of each document, `(documents, candidates)` padded with -inf."""
    order, place = _best_rows(document, logits, _SHOWN_LABELS)
    found, is_true = np.full((count, _SHOWN_LABELS), -np.inf), np.zeros((count, _SHOWN_LABELS))
    found[document[order], place], is_true[document[order], place] = logits[order], truth[order]
    return found, is_true


def _best_rows(document: np.ndarray, logits: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of the best candidates of each document, and the rank of each."""
    order = np.lexsort((-logits, document))
    rank = np.arange(len(order)) - np.searchsorted(document[order], document[order])
    return order[rank < top_k], rank[rank < top_k]


def rank_candidates(
    scorer: Scorer, names: Sequence[str], chunk: Mapping[str, np.ndarray], log_counts: np.ndarray, top_k: int
) -> tuple[np.ndarray, np.ndarray]:
    """
    Returns the best candidates of each document and their probabilities, padded with -1 and 0.

    `scorer` is of some of the parts, `names` are all of them in the order of the scores; the other arguments are those
    of [`fit_scorer`].
    """
    columns = [list(names).index(name) for name in scorer.parts]
    document, label = chunk["document"], chunk["label"]
    counts = log_counts[label]
    frequency = (counts / max(log_counts.max(), 1e-6))[:, None, None]
    views = np.stack([chunk["scores"][:, columns], chunk["differences"][:, columns]], axis=2)
    weights = scorer.weights[..., 0] * (1 - frequency) + scorer.weights[..., 1] * frequency
    first, second = scorer.count_weights
    bias, unseen = scorer.bias + counts * (first + second * counts), counts == 0
    weights[unseen], bias[unseen] = scorer.weights[..., 2], scorer.unseen_bias
    logits = (views * weights).sum(axis=(1, 2)) + bias
    shown, place = _best_rows(document, logits, top_k)
    labels = np.full((int(chunk["count"][0]), top_k), -1)
    probabilities = np.zeros(labels.shape, dtype=np.float32)
    labels[document[shown], place] = label[shown]
    probabilities[document[shown], place] = scorer.probabilities(logits[shown])
    return labels, probabilities


def gain_of_parts(
    optional: Sequence[str],
    names: Sequence[str],
    chunk: Mapping[str, np.ndarray],
    truth: csr_matrix,
    log_counts: np.ndarray,
) -> tuple[float, float]:
    """
    Returns what some of the parts add to nDCG@5, as a fraction, and its standard error.

    Each half of the documents is ranked by the scorer that was fitted on the other half. `optional` are the parts in
    question, `names` all parts; the other arguments are those of [`fit_scorer`].
    """
    half = chunk["document"] % 2
    results = []
    for parts in (names, [name for name in names if name not in optional]):
        columns = [list(names).index(name) for name in parts]
        ranked = np.full((truth.shape[0], 5), -1)
        for fold in (0, 1):
            fitted = {key: values if key == "count" else values[half == fold] for key, values in chunk.items()}
            fitted.update({key: fitted[key][:, columns] for key in ("scores", "differences")})
            labels, _ = rank_candidates(fit_scorer(parts, [fitted], truth, log_counts), names, chunk, log_counts, 5)
            ranked[1 - fold :: 2] = labels[1 - fold :: 2]
        results.append(_ndcg(ranked, truth))
    gains = results[0] - results[1]
    return float(gains.mean()), float(gains.std() / np.sqrt(len(gains)))


def _ndcg(ranked: np.ndarray, truth: csr_matrix) -> np.ndarray:
    """The nDCG of each document at the number of labels in `ranked`, which is padded with -1."""
    discounts = 1 / np.log2(np.arange(2, ranked.shape[1] + 2))
    rows = np.arange(len(ranked))[:, None]
    hits = np.where(ranked >= 0, np.asarray(truth[rows, np.maximum(ranked, 0)].todense()) > 0, False)
    possible = np.cumsum(discounts)[np.clip(np.diff(truth.indptr), 1, ranked.shape[1]) - 1]
    return hits @ discounts / possible


def _fit_logistic(design: np.ndarray, truth: np.ndarray, num_positive: int) -> tuple[np.ndarray, float]:
    """Logistic regression with an L2 penalty on standardised columns; the first coefficients are not negative."""
    # Scores that are nearly equal everywhere would get huge weights.
    mean, deviation = design.mean(axis=0), np.maximum(design.std(axis=0), _LEAST_DEVIATION)
    columns = (design - mean) / deviation

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        weights, bias = parameters[:-1], parameters[-1]
        logits = columns @ weights + bias
        error = expit(logits) - truth
        value = np.logaddexp(0, logits).sum() - logits[truth].sum() + _L2 * (weights @ weights) / 2
        return value, np.append(columns.T @ error + _L2 * weights, error.sum())

    share = truth.mean()
    start = np.append(np.zeros(design.shape[1]), np.log(share / (1 - share)))
    bounds = [(0 if i < num_positive else None, None) for i in range(len(start))]
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 1000}).x
    weights = found[:-1] / deviation
    return weights, float(found[-1] - weights @ mean)


def _fit_curve(logits: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """A piecewise linear, ascending map from logits to the logarithm of the odds, drawn towards the identity."""
    points = np.unique(np.quantile(logits, _CURVE_QUANTILES))
    if len(points) < 2:
        points = logits[0] + np.array([-1.0, 1.0])
    widths = np.diff(points)
    # How far each logit has come within each interval, from 0 to 1.
    ramps = np.clip((logits[:, None] - points[:-1]) / widths, 0, 1)

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        rises, start = parameters[:-1], parameters[-1]
        odds = ramps @ rises + start
        error = expit(odds) - truth
        apart = np.append(rises / widths - 1, 0)
        value = np.logaddexp(0, odds).sum() - odds[truth].sum() + _CURVE_L2 * (apart @ apart) / 2
        gradient = np.append(ramps.T @ error, error.sum())
        gradient[:-1] += _CURVE_L2 * apart[:-1] / widths
        return value, gradient

    identity = np.append(widths, points[0])
    bounds = [*((_LEAST_SLOPE * width, None) for width in widths), (None, None)]
    found = minimize(loss, identity, jac=True, method="L-BFGS-B", bounds=bounds).x
    return np.stack([points, found[-1] + np.append(0, np.cumsum(found[:-1]))])
