"""Prediction from several parts of a model: ranker, heads, label vectors and similar documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from .features import Features
from .knn_ranker import KNNRanker, KNNVectors
from .label_tree import LabelTree
from .label_vectors import LabelVectors
from .labels import Labels
from .linear_ranker import LinearRanker
from .restriction import Restriction
from .scorer import KNOWN_LABELS, MAX_SCORES, OTHER_PROPOSALS, PARTS, PartScores, Scorer

# Least number of candidates of ranker and heads that `candidate_scores` compares.
_CANDIDATES = (100, 20)
# Scores of labels by heads in memory at a time, if all of a restriction are scored.
MAX_HEAD_SCORES = 1 << 20


class PartsMixin:
    """
    Mixin that scores labels by the parts of a model, by several or by one of them.

    The class has the search of a level by the heads. `search` are the arguments `beam_size` and `num_threads`.
    """

    config: Any
    device: Any
    anchor: Any
    encoder: Any
    heads: Any
    labels: Labels | None
    label_tree: LabelTree | None
    ranker: LinearRanker | KNNRanker | None
    label_vectors: LabelVectors | None
    knn: KNNRanker | None
    knn_vectors: KNNVectors | None
    scorer: Scorer | None
    match: Any
    search_level: Any

    @property
    def available_parts(self) -> list[str]:
        """The parts that can score labels, see [`Scorer`]."""
        levels, tree = self.config.head_levels or [], self.label_tree
        present = {
            "ranker": self.ranker is not None,
            "heads": tree is not None and tree.depth in levels and self.config.trained_levels >= len(levels),
            **dict.fromkeys([] if self.label_vectors is None else self.label_vectors.names, True),
            "knn_tfidf": self.knn is not None,
            "knn_vector": self.knn_vectors is not None,
        }
        return [name for name in PARTS if present.get(name)]

    def _predict_with_parts(
        self, features: Features, top_k: int, predict_with: str, restriction: Restriction | None, **search: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        names: Sequence[str] = (predict_with,)
        if predict_with == "all":
            if self.scorer is None:
                raise ValueError(
                    "The model has no scorer for `predict_with='all'`, the default in `config.json` perhaps. Set "
                    "`predict_with='ranker'`, or train it with `XMCTrainer`."
                )
            assert self.labels is not None
            log_counts, names = self.labels.log_counts, self.scorer.parts
        elif predict_with not in self.available_parts:
            raise ValueError(
                f"`predict_with={predict_with!r}` (by default of `config.json`), but the model has only "
                f"{', '.join(self.available_parts)}."
            )
        scores, labels = np.empty((len(features), top_k), np.float32), np.empty((len(features), top_k), np.int64)
        done = 0
        for parts in self.part_scores(features, names, top_k, restriction=restriction, **search):
            if predict_with == "all":
                count = len(parts[names[0]].labels)
                candidates = None if restriction is None else restriction.candidates(count)
                found = self.scorer.predict(parts, log_counts, top_k, candidates)  # type: ignore[union-attr]
            else:
                found = parts[predict_with].scores[:, :top_k], parts[predict_with].labels[:, :top_k]
            rows = slice(done, done + len(found[0]))
            scores[rows], labels[rows] = found
            done = rows.stop
        return scores, labels

    @torch.no_grad()
    def part_scores(
        self,
        features: Features,
        names: Sequence[str],
        top_k: int = 10,
        beam_size: int | None = None,
        num_threads: int | None = None,
        restriction: Restriction | None = None,
    ) -> Iterator[dict[str, PartScores]]:
        """
        Yields the scores of parts for consecutive blocks of documents, small enough to score all labels.

        Args:
            features ([`Features`]): Documents, see [`~XMCForTextClassification.featurize`].
            names (`Sequence[str]`): The parts.
            top_k (`int`, *optional*, defaults to 10): Least number of labels that each part proposes.
            beam_size, num_threads, restriction:
                See [`~XMCForTextClassification.forward`]. Ranker and heads have separate defaults of `beam_size`.
        """
        assert self.label_tree is not None
        num_labels = self.label_tree.num_labels
        count = min(max(top_k, OTHER_PROPOSALS), num_labels)
        size = max(1, MAX_SCORES // num_labels)
        search: dict[str, Any] = {"beam_size": beam_size, "num_threads": num_threads}
        for start in range(0, len(features), size):
            block = features if len(features) <= size else features[start : start + size]
            if restriction is None:
                known = min(max(count, KNOWN_LABELS), num_labels)
                yield {name: self._score_part(name, block, count, known, **search) for name in names}
            else:
                yield {name: self._score_permitted(name, block, count, restriction, **search) for name in names}

    def _score_permitted(
        self, name: str, features: Features, count: int, restriction: Restriction, **search: Any
    ) -> PartScores:
        """As `_score_part`, with permitted labels only; a score is the same as without the restriction."""
        of_all = self._score_part(name, features, 1, 1, **search)
        if of_all.matrix is not None:
            permitted = np.ascontiguousarray(of_all.matrix[:, restriction.ids])
            best = PartScores.from_matrix(permitted, min(count, len(restriction)))
            labels = np.where(best.labels >= 0, restriction.ids[best.labels], -1)
            return replace(best, labels=labels, matrix=of_all.matrix).restricted(of_all)
        known = len(restriction) if restriction.is_exhaustive else max(count, KNOWN_LABELS)
        known = min(known, len(restriction.permitted))
        return self._score_part(name, features, count, known, restriction=restriction, **search).restricted(of_all)

    def _score_part(
        self,
        name: str,
        features: Features,
        count: int,
        known: int,
        beam_size: int | None,
        num_threads: int | None,
        restriction: Restriction | None = None,
    ) -> PartScores:
        """Returns the scores of one part: of `known` labels for ranker, heads and votes."""
        if name == "ranker":
            found = self._search_ranker("logits", features, known, beam_size, num_threads, restriction)
            return PartScores.from_list(*found)
        if name == "heads":
            scores, indices = self._predict_with_heads(features, known, beam_size, restriction)
            odds = torch.logit(scores.float(), eps=1e-6)
            return PartScores.from_list(odds.cpu().numpy(), indices.cpu().numpy())
        if name == "knn_tfidf":
            assert self.knn is not None
            sparse = Features(features.sparse)
            votes = self.knn.predict(sparse, known, num_threads=num_threads, restriction=restriction)
            return PartScores.from_list(*votes, others=0.0)
        if name == "knn_vector":
            assert self.knn_vectors is not None and features.dense is not None
            return PartScores.from_list(*self.knn_vectors.predict(features.dense, known, restriction), others=0.0)
        assert self.label_vectors is not None
        return PartScores.from_matrix(self.label_vectors.scores(name, features, num_threads), count)

    def candidate_scores(
        self,
        features: Features,
        top_k: int,
        beam_size: int | None = None,
        num_threads: int | None = None,
        restriction: Restriction | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Returns the best labels of the ranker and of the heads, each with both scores.

        There are more than `top_k`, so that each side can promote labels of the other. The arguments are those of
        [`~PartsMixin.part_scores`].

        Returns:
            `tuple[torch.Tensor, torch.Tensor, torch.Tensor]`: scores of the ranker (0 for labels that it did not
            find), scores of the heads and label ids (padded with -1), of one shape.
        """
        self._check_label_head()
        assert self.label_tree is not None
        tree = self.label_tree
        num_ranker, num_heads = (min(max(top_k, count), tree.num_labels) for count in _CANDIDATES)
        ranked = self._search_ranker("predict", features, num_ranker, beam_size, num_threads, restriction)
        scores, indices = (torch.from_numpy(array).to(self.anchor.device) for array in ranked)
        positions = torch.from_numpy(tree.leaf_positions).to(indices.device)
        nodes, vectors = positions[indices.clamp(min=0)], self._dense_part(features)
        parts = zip(vectors.split(256), nodes.split(256), strict=True)
        head_scores = torch.cat([self.heads.label_probabilities(*part, tree) for part in parts])
        more_scores, more = self._predict_with_heads(features, num_heads, beam_size, restriction)
        repeated = (more.unsqueeze(2) == indices.unsqueeze(1)).any(dim=2)
        return (
            torch.cat([scores, torch.zeros_like(more_scores)], dim=1),
            torch.cat([head_scores, more_scores], dim=1),
            torch.cat([indices, more.masked_fill(repeated, -1)], dim=1),
        )

    # ---- Single parts ----

    def _search_ranker(
        self,
        kind: str,
        features: Features,
        top_k: int,
        beam_size: int | None,
        num_threads: int | None,
        restriction: Restriction | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the result of `ranker.predict` or, for classifiers, `ranker.logits`."""
        if self.ranker is None:
            raise ValueError("The model is not trained: it has no ranker. Call `XMCTrainer.train` first.")
        initial_beam, search = None, self.ranker.predict
        if isinstance(self.ranker, LinearRanker):
            search = getattr(self.ranker, kind)
            if self.ranker.first_level > 1:
                beam = self.ranker.beam_size if beam_size is None else beam_size
                beam = 0 if restriction is not None and restriction.is_exhaustive else beam
                initial_beam = self.match(self._dense_part(features), self.ranker.first_level - 1, beam)
        return search(
            self.ranker_features(features),
            top_k,
            beam_size=beam_size,
            num_threads=num_threads,
            initial_beam=initial_beam,
            restriction=restriction,
        )

    def ranker_features(self, features: Features) -> Features:
        """Returns the features of the ranker: document vectors scaled to `config.embedding_scale`."""
        if self.encoder is None or features.dense is None or self.config.embedding_scale == 1:
            return features
        return Features(features.sparse, features.dense * np.float32(self.config.embedding_scale))

    def _check_label_head(self) -> None:
        if "heads" not in self.available_parts:
            raise ValueError(
                "The model has no trained head for its labels by `head_levels` and `trained_levels` in `config.json`. "
                "Set `predict_with='ranker'`, or train all levels."
            )

    def _dense_part(self, features: Features) -> torch.Tensor:
        if features.dense is None:
            raise ValueError("The heads need document vectors: pass the result of `featurize`.")
        return torch.from_numpy(features.dense).to(self.device)

    def _predict_with_heads(
        self, features: Features, top_k: int, beam_size: int | None, restriction: Restriction | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._check_label_head()
        assert self.label_tree is not None
        vectors = self._dense_part(features)
        if restriction is not None:
            return self._best_by_heads(vectors, top_k, restriction.ids)
        scores, nodes = self.search_level(vectors, self.label_tree.depth, top_k, beam_size)
        labels = torch.from_numpy(self.label_tree.leaf_labels).to(nodes.device)[nodes.clamp(min=0)]
        return scores, labels.masked_fill(nodes < 0, -1)

    def _best_by_heads(self, vectors: torch.Tensor, top_k: int, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores all the given labels and returns the best ones."""
        tree, device, top_k = self.label_tree, vectors.device, min(top_k, len(ids))
        assert tree is not None
        nodes, labels = (torch.from_numpy(array).to(device) for array in (tree.leaf_positions[ids], ids))
        blocks = vectors.split(max(1, MAX_HEAD_SCORES // len(ids)))
        found = [self.heads.label_probabilities(rows, nodes, tree).topk(top_k, dim=1) for rows in blocks]
        scores, places = map(torch.cat, zip(*found, strict=True))
        return scores, labels[places]
