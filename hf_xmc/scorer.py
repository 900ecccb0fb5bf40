"""The last scorer: a logistic model that turns the scores of a model's parts into one probability per label."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import expit

from .kernels_similarity import add_logits, best_columns, look_up
from .serialization import read_json, resolve_file, write_json

SCORER_FILE = "scorer.json"

# Parts that can score labels. Those of TF-IDF and of the encoder's vectors are similarities (label_vectors.py) and
# votes (knn_ranker.py).
TFIDF_PARTS = ("text_tfidf", "centroid_tfidf", "knn_tfidf")
VECTOR_PARTS = ("text_vector", "centroid_vector", "knn_vector")
LOGIT_PARTS = ("ranker", "heads")
KNN_PARTS = ("knn_tfidf", "knn_vector")
PARTS = (*LOGIT_PARTS, *TFIDF_PARTS, *VECTOR_PARTS)
# Parts that know a label from its text alone.
TEXT_PARTS = ("text_tfidf", "text_vector")
# What the scorer sees of a part.
_VIEWS = ("score", "difference")
# Fixed weights of a part's score and difference, for rare and frequent labels: about those fitted on library records.
_DEFAULT_WEIGHTS = {"logit": [[4, 3], [0, 0]], "cosine": [[2, 1], [2, 1]], "share": [[1, 1], [0, 0]]}
_DEFAULT_BIAS = -0.5

# Labels that a part proposes for each document, at least `top_k`.
PROPOSALS = {"ranker": 50}
OTHER_PROPOSALS = 30
# Labels whose score by ranker or heads is known exactly; the others get the lowest score among these.
KNOWN_LABELS = 200
# Larger coefficients would make scores that are not numbers.
_MAX_WEIGHT = 1e6
# Scores in memory at a time, per part.
MAX_SCORES = 1 << 22


@dataclass(frozen=True)
class PartScores:
    """
    What one part says about the labels of some documents.

    Args:
        labels (`np.ndarray`):
            Its best labels, best first, padded with -1; int64 `(documents, labels)`.
        scores (`np.ndarray`):
            Their scores, float32 of the same shape.
        best (`np.ndarray`):
            The highest score of each document; its label may not be among `labels`.
        matrix (`np.ndarray`, *optional*):
            The scores of all labels, if the part computes them; float32 `(documents, all labels)`.
        others (`np.ndarray`, *optional*):
            Otherwise the score of labels that are not in `labels`, one for each document.
    """

    labels: np.ndarray
    scores: np.ndarray
    best: np.ndarray
    matrix: np.ndarray | None = None
    others: np.ndarray | None = None

    @classmethod
    def from_matrix(cls, matrix: np.ndarray, count: int) -> PartScores:
        """The scores of all labels; the best `count` positive ones are proposed."""
        scores = np.empty((len(matrix), count), dtype=np.float32)
        labels = np.empty((len(matrix), count), dtype=np.int64)
        best_columns(matrix, scores, labels)
        return cls(labels, scores, scores[:, 0].copy(), matrix=matrix)

    @classmethod
    def from_list(cls, scores: np.ndarray, labels: np.ndarray, others: float | None = None) -> PartScores:
        """The best labels with their scores; other labels have the score `others`, by default the lowest known one."""
        if others is None:
            lowest = np.where(labels >= 0, scores, np.inf).min(axis=1)
            filled = np.where(np.isfinite(lowest), lowest, 0).astype(np.float32)
        else:
            filled = np.full(len(scores), others, dtype=np.float32)
        scores = np.where(labels >= 0, scores, filled[:, None]).astype(np.float32)
        return cls(labels, scores, scores[:, 0].copy(), others=filled)

    def restricted(self, of_all: PartScores) -> PartScores:
        """These scores of permitted labels, with the highest scores of all labels for their differences."""
        return replace(self, best=np.maximum(self.best, of_all.best))

    def of(self, candidates: np.ndarray, num_labels: int) -> np.ndarray:
        """Returns the scores of `candidates`, int64 `(documents, candidates)` padded with -1."""
        if self.matrix is not None:
            return np.take_along_axis(self.matrix, np.maximum(candidates, 0), axis=1)
        scores = np.empty(candidates.shape, dtype=np.float32)
        places = np.zeros(num_labels, dtype=np.int32)
        look_up(self.labels, self.scores, candidates, self.others, places, scores)
        return scores


def unite(parts: Mapping[str, PartScores], top_k: int) -> np.ndarray:
    """Returns the labels that any part proposes for each document in ascending order, padded with -1 at the front."""
    counts = {name: max(top_k, PROPOSALS.get(name, OTHER_PROPOSALS)) for name in parts}
    labels = np.sort(np.concatenate([part.labels[:, : counts[name]] for name, part in parts.items()], axis=1), axis=1)
    labels[:, 1:][labels[:, 1:] == labels[:, :-1]] = -1
    labels = np.sort(labels, axis=1)
    width = int((labels >= 0).sum(axis=1).max(initial=0))
    return np.ascontiguousarray(labels[:, labels.shape[1] - max(width, 1) :])


class Scorer:
    """
    A logistic model over the scores of the parts.

    The logit of a label is a weighted sum of each part's score and of its difference to the document's best score.
    Each has two weights, for rare and for frequent labels; a label with `n` training documents takes a mixture of both
    in proportion to `log(1 + n)`. Terms in `log(1 + n)` and its square follow. A label without training documents has
    weights and a constant of its own. No weight of a part is negative, so that a higher score never lowers the
    probability. A calibration curve maps the logits to the logarithm of the odds without changing their order.

    Args:
        parts (`Sequence[str]`):
            Names of the parts: those of a model, see `PARTS`, or the models of an ensemble.
        weights (`np.ndarray`):
            Weights of the parts, `(parts, 2, 3)`: score and difference; rare labels, frequent labels, and labels
            without documents.
        count_weights (`np.ndarray`):
            Coefficients of `log(1 + n)` and its square.
        bias (`float`):
            The constant.
        unseen_bias (`float`):
            The constant of labels without documents.
        curve (`np.ndarray`, *optional*):
            Calibration curve, `(2, points)`: ascending logits and the logarithm of the odds at each. Linear in between
            and beyond. None by default.
        num_documents (`int`, *optional*, defaults to 0):
            Number of documents that the model was fitted on; 0 for the fixed weights of [`default_scorer`].
    """

    def __init__(
        self,
        parts: Sequence[str],
        weights: np.ndarray,
        count_weights: np.ndarray,
        bias: float,
        unseen_bias: float,
        curve: np.ndarray | None = None,
        num_documents: int = 0,
    ) -> None:
        self.parts = tuple(parts)
        self.weights = np.asarray(weights, dtype=np.float32)
        self.count_weights = np.asarray(count_weights, dtype=np.float32)
        self.curve = np.array([[-1.0, 1.0], [-1.0, 1.0]]) if curve is None else np.asarray(curve, dtype=np.float64)
        self.bias, self.unseen_bias, self.num_documents = float(bias), float(unseen_bias), int(num_documents)
        self._check()

    def _check(self) -> None:
        if not self.parts or len(set(self.parts)) < len(self.parts):
            raise ValueError(f"The parts {list(self.parts)} of a scorer must be different, and at least one.")
        if self.weights.shape != (len(self.parts), 2, 3) or self.count_weights.shape != (2,):
            raise ValueError(
                f"A scorer of {len(self.parts)} parts needs weights of the shapes {(len(self.parts), 2, 3)} and (2,), "
                f"not {self.weights.shape} and {self.count_weights.shape}."
            )
        for values in (self.weights, self.count_weights, self.curve, self.bias, self.unseen_bias):
            if not (np.abs(values) <= _MAX_WEIGHT).all():
                raise ValueError(f"The numbers of a scorer must be finite and not above {_MAX_WEIGHT:g}.")
        if (self.weights < 0).any():
            raise ValueError("The weights of the parts must not be negative.")
        if self.curve.ndim != 2 or len(self.curve) != 2 or self.curve.shape[1] < 2 or (np.diff(self.curve) <= 0).any():
            raise ValueError("The calibration curve of a scorer must ascend and have at least two points.")

    def __repr__(self) -> str:
        return f"Scorer({', '.join(self.parts)}, fitted on {self.num_documents} documents)"

    def logits(self, parts: Mapping[str, PartScores], candidates: np.ndarray, log_counts: np.ndarray) -> np.ndarray:
        """
        Returns the logits of candidates, before calibration.

        Args:
            parts (`Mapping[str, PartScores]`): The scores of each part.
            candidates (`np.ndarray`): Labels, int64 `(documents, candidates)` padded with -1.
            log_counts (`np.ndarray`): `log(1 + n)` of all labels, float32.
        """
        counts = log_counts[np.maximum(candidates, 0)]
        first, second = self.count_weights
        unseen = counts == 0
        logits = np.float32(self.bias) + counts * (first + second * counts)
        logits[unseen] = self.unseen_bias
        frequency = counts / max(log_counts.max(), np.float32(1e-6))
        frequency[unseen] = -1
        for name, weights in zip(self.parts, self.weights, strict=True):
            part = parts[name]
            add_logits(part.of(candidates, len(log_counts)), part.best, frequency, weights, logits)
        return logits

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Returns the calibrated probabilities of logits."""
        x, y = self.curve
        odds = np.interp(logits, x, y)
        for end, inner, beyond in ((0, 1, logits < x[0]), (-1, -2, logits > x[-1])):
            slope = (y[end] - y[inner]) / (x[end] - x[inner])
            odds = np.where(beyond, y[end] + slope * (logits - x[end]), odds)
        return expit(odds).astype(np.float32)

    def predict(
        self, parts: Mapping[str, PartScores], log_counts: np.ndarray, top_k: int, candidates: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """
        Returns the probabilities and ids of the `top_k` best labels of each document, padded with 0 and -1.

        `candidates` are by default the labels that any part proposes.
        """
        if candidates is None:
            candidates = unite(parts, top_k)
        logits = self.logits(parts, candidates, log_counts)
        logits[candidates < 0] = -np.inf
        # Candidates ascend, so that of equal labels the lower one comes first.
        order = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
        scores, labels = np.zeros((len(order), top_k), np.float32), np.full((len(order), top_k), -1, np.int64)
        labels[:, : order.shape[1]] = np.take_along_axis(candidates, order, axis=1)
        scores[:, : order.shape[1]] = self.probabilities(np.take_along_axis(logits, order, axis=1))
        return scores, labels

    def save_pretrained(self, save_directory: str | os.PathLike) -> None:
        """Writes `scorer.json`."""
        content: dict[str, Any] = {
            "parts": {
                name: dict(zip(_VIEWS, weights.tolist(), strict=True))
                for name, weights in zip(self.parts, self.weights.astype(float), strict=True)
            },
            "log_count": self.count_weights.astype(float).tolist(),
            "bias": self.bias,
            "unseen_bias": self.unseen_bias,
            "curve": self.curve.tolist(),
            "num_documents": self.num_documents,
        }
        write_json(os.path.join(save_directory, SCORER_FILE), content, indent=2)

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike, **hub_kwargs) -> Scorer:
        """Reads `scorer.json` of a saved model."""
        path = resolve_file(name_or_path, SCORER_FILE, **hub_kwargs)
        content = read_json(str(path))
        try:
            weights = np.array([[values[view] for view in _VIEWS] for values in content["parts"].values()])
            numbers = [content[name] for name in ("log_count", "bias", "unseen_bias", "curve", "num_documents")]
            return cls(list(content["parts"]), weights, *numbers)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(
                f"`{path}` is not a valid scorer ({type(error).__name__}: {error}). Save or download it again."
            ) from error


def default_scorer(parts: Sequence[str]) -> Scorer:
    """Returns a scorer with fixed weights, for models whose data is too small to fit one."""
    weights = np.zeros((len(parts), 2, 3))
    for row, name in zip(weights, parts, strict=True):
        own = _DEFAULT_WEIGHTS["logit" if name in LOGIT_PARTS else "share" if name in KNN_PARTS else "cosine"]
        row[:] = np.array(own)[:, [0, 1, 0]]
    curve = np.array([[-8.0, -2.0, 8.0], [-5.0, -2.0, 4.0]])
    return Scorer(parts, weights, np.zeros(2), _DEFAULT_BIAS, _DEFAULT_BIAS, curve)
