"""
Fine-tuning on label texts: variants that the package has and has not, compared on the sample's validation documents.

    export OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE
    python -m benchmarks.label_tuning --encoder FOLDER --passes 3 --batch_size 256 --learning_rate 2e-4 --head 1e-3

Prints one line of JSON: nDCG@5 of the cosine with the label's text, with the centroid of its documents and with both,
of the votes of the 32 nearest training documents, of the head, and of a logistic regression on all of them (fitted on
one half of the documents, measured on the other, both ways). `--minutes` is CPU time of two threads, so that other
programs matter less.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_matrix
from sklearn.linear_model import LogisticRegression
from transformers.trainer_pt_utils import get_length_grouped_indices

from hf_xmc import load_sample
from hf_xmc.evaluation import XMCMetrics
from hf_xmc.labels import Labels
from hf_xmc.modeling_xmc import XMCForTextClassification
from hf_xmc.text_encoder import pad_batch
from hf_xmc.training.contrastive import FREQUENCY_POWER, TEMPERATURE, decoupled_softmax, draw_positives

NEIGHBOURS, CANDIDATES, NEAREST_LABELS, WARMUP = 32, 30, 30, 0.1


class Trial:
    """The sample, its tokens and an encoder."""

    def __init__(self, args: argparse.Namespace) -> None:
        data = load_sample()
        train, validation = data["train"], data["validation"]
        self.labels = Labels.from_dataset(train)
        self.targets = self.labels.encode(train)
        self.truth = self.labels.encode(validation, keep_unseen=True)
        self.model = XMCForTextClassification.from_encoder(
            args.encoder, dropout=args.dropout, max_length=48, attn_implementation="eager"
        )
        self.model.autocast_dtype = torch.bfloat16 if args.bf16 else None
        self.head: torch.nn.Parameter | None = None
        self.documents, self.held_out, self.texts = (
            self.model.tokenize(texts) for texts in (train["text"][:], validation["text"][:], self.labels.names)
        )

    def encode(self, tokens: list[Any], chosen: np.ndarray) -> torch.Tensor:
        """Vectors with gradients."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.model.autocast_dtype is not None):
            return self.model.encode(*pad_batch([tokens[i][0] for i in chosen], 0))

    def tune(self, args: argparse.Namespace) -> dict[str, Any]:
        """Fine-tunes for some minutes or passes; returns how much was done."""
        torch.manual_seed(args.seed)
        rng = np.random.default_rng(args.seed)
        parameters = list(self.model.encoder.parameters())  # type: ignore[union-attr]
        groups: list[dict[str, Any]] = [{"params": parameters, "highest": args.learning_rate}]
        if args.head:
            vectors, texts = (self.model.embed(tokens, 64) for tokens in (self.documents, self.texts))
            rows = normalised(texts + normalised(self.targets.T @ vectors))
            self.head = torch.nn.Parameter(torch.from_numpy(rows.astype(np.float32)))
            groups.append({"params": [self.head], "highest": args.head})
        optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, weight_decay=0.0, fused=True)
        weights = self.labels.counts.astype(float) ** FREQUENCY_POWER
        lengths = [len(windows[0]) for windows in self.documents]
        self.model.train()
        start, seen, number, part = time.process_time(), 0, 0, 0.0
        all_vectors = torch.empty(0)
        while part < 1:
            drawn = draw_positives(self.targets, weights, rng)
            if args.negatives != "batch":
                all_vectors = torch.from_numpy(self.model.embed(self.texts, 64))
            order = get_length_grouped_indices(
                lengths, args.batch_size, generator=torch.Generator().manual_seed(number)
            )
            number += 1
            for first in range(0, len(order), args.batch_size):
                part = (time.process_time() - start) / (120 * args.minutes) if args.minutes else 0.0
                part = max(part, seen / (args.passes * len(order)) if args.passes else 0.0)
                if part >= 1:
                    break
                rate = min((part + 0.01) / WARMUP, (1 - part) / (1 - WARMUP), 1)
                for group in optimizer.param_groups:
                    group["lr"] = group["highest"] * rate
                rows = np.array(order[first : first + args.batch_size])
                optimizer.zero_grad()
                self._loss(rows, drawn[rows], all_vectors, args, rng).backward()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                seen += len(rows)
        self.model.eval()
        return {"documents": seen, "passes": round(seen / len(order), 2)}

    def _loss(
        self,
        rows: np.ndarray,
        drawn: np.ndarray,
        all_vectors: torch.Tensor,
        args: argparse.Namespace,
        rng: np.random.Generator,
    ) -> torch.Tensor:
        labels = np.unique(drawn[drawn >= 0])
        if args.negatives == "nearest":  # one more label for each, out of the nearest ones
            near = (all_vectors[labels] @ all_vectors.T).topk(NEAREST_LABELS + 1, dim=1).indices[:, 1:].numpy()
            labels = np.unique([*labels, *near[np.arange(len(near)), rng.integers(NEAREST_LABELS, size=len(near))]])
        vectors = self.encode(self.documents, rows)
        scores = vectors @ self.encode(self.texts, labels).T
        if args.negatives == "cached":  # all other labels, with their vectors at the begin of the pass
            rest = np.setdiff1d(np.arange(len(self.texts)), labels)
            scores = torch.cat([scores, vectors @ all_vectors[rest].T], dim=1)
            labels = np.concatenate([labels, rest])
        true = torch.from_numpy(self.targets[rows][:, labels].toarray() > 0)
        positives = true if args.positives == "all" else torch.from_numpy(drawn[:, None] == labels)
        loss = decoupled_softmax(scores / TEMPERATURE, positives, true)
        if self.head is None:
            return loss
        true = torch.from_numpy(self.targets[rows].toarray() > 0)
        hidden = torch.nn.functional.dropout(vectors, args.head_dropout)
        logits = hidden @ torch.nn.functional.normalize(self.head).T / TEMPERATURE
        return loss + decoupled_softmax(logits, true, true)

    def measure(self) -> dict[str, float]:
        """nDCG@5 in percent of each way to score labels."""
        vectors, documents, texts = (
            self.model.embed(tokens, 64) for tokens in (self.held_out, self.documents, self.texts)
        )
        centroids = normalised(self.targets.T @ documents)
        similarity = vectors @ documents.T
        nearest = np.argpartition(-similarity, NEIGHBOURS, axis=1)[:, :NEIGHBOURS]
        votes = np.exp(np.take_along_axis(similarity, nearest, 1) / TEMPERATURE)
        votes /= votes.sum(axis=1, keepdims=True)
        offsets = np.arange(0, votes.size + 1, NEIGHBOURS)
        scores = {
            "text": vectors @ texts.T,
            "centroid": vectors @ centroids.T,
            "knn": (csr_matrix((votes.ravel(), nearest.ravel(), offsets)) @ self.targets).toarray(),
        }
        if self.head is not None:
            scores["head"] = vectors @ normalised(self.head.detach().numpy()).T
        fused = self._fuse(list(scores.values()))
        scores["text+centroid"] = vectors @ normalised(texts + centroids).T
        return {name: self._ndcg(array) for name, array in {**scores, "fused": fused}.items()}

    def _fuse(self, parts: list[np.ndarray]) -> np.ndarray:
        chosen = np.zeros(parts[0].shape, dtype=bool)
        for part in parts:
            np.put_along_axis(chosen, np.argpartition(-part, CANDIDATES, axis=1)[:, :CANDIDATES], True, axis=1)
        rows, labels = np.nonzero(chosen)
        columns = [part[rows, labels] for part in parts]
        columns += [part[rows, labels] - part.max(axis=1)[rows] for part in parts]
        inputs = np.stack([*columns, np.log1p(self.labels.counts)[labels]], axis=1)
        inputs = (inputs - inputs.mean(axis=0)) / inputs.std(axis=0)
        is_true = np.asarray(self.truth[rows, labels]).ravel() > 0
        fused = np.full(parts[0].shape, -np.inf)
        half = np.random.default_rng(0).permutation(len(fused)) % 2
        for fold in (0, 1):
            fitted, measured = half[rows] == fold, half[rows] != fold
            classifier = LogisticRegression(max_iter=300).fit(inputs[fitted], is_true[fitted])
            fused[rows[measured], labels[measured]] = classifier.decision_function(inputs[measured])
        return fused

    def _ndcg(self, scores: np.ndarray) -> float:
        metrics = XMCMetrics(ks=(5,))
        metrics.update(np.argsort(-scores, axis=1)[:, :5], self.truth)
        return round(100 * metrics.compute()["nDCG@5"], 2)


def normalised(rows: np.ndarray) -> np.ndarray:
    """Rows of unit length."""
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)


def main() -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", required=True)
    parser.add_argument("--minutes", type=float, default=0)
    parser.add_argument("--passes", type=float, default=0, help="without minutes: 0 measures the encoder as it is")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--head", type=float, default=0.0, help="learning rate of a head; 0 for none")
    parser.add_argument("--head_dropout", type=float, default=0.0)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--negatives", choices=("batch", "nearest", "cached"), default="batch")
    parser.add_argument("--positives", choices=("one", "all"), default="one")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    trial = Trial(args)
    done = trial.tune(args) if args.minutes or args.passes else {}
    sys.stdout.write(json.dumps({**vars(args), **done, **trial.measure()}) + "\n")


if __name__ == "__main__":
    main()
