"""Trains a model with an encoder: what comes before, between and after the fine-tuning of its levels."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from scipy.sparse import csr_matrix

from ..evaluation.metrics import XMCMetrics
from ..features import Features
from ..modeling_xmc import XMCForTextClassification, mix_scores
from .checkpoints import load_level_state, save_level_state
from .embedding import embed_dataset, tokenize_dataset, tokens_digest
from .head_training import bootstrap_head, level_data, make_level_data, needs_vectors, start_from_frequency
from .levels import LevelData, Schedule
from .linear_training import add_ranker, build_label_tree, prepare_features_and_tree
from .prediction import feature_batches
from .progress import Stages
from .training_args import XMCTrainingArguments

# Shares of the heads that are tried on validation documents, and the share where there are none.
_SHARES = np.arange(0, 1.01, 0.05)
_DEFAULT_SHARE = 0.2
_CHOSEN_BY = "nDCG@5"


class EncoderRun:
    """
    One training of a model with an encoder, as far as it is not the trainer's loop.

    Args:
        model ([`XMCForTextClassification`]):
            The model; labels, TF-IDF, tree and heads are added where it has none.
        dataset (`datasets.Dataset`):
            Training documents in the columns of [`prepare_dataset`].
        args ([`XMCTrainingArguments`]):
            Options.
        stages ([`Stages`]):
            Times and logs the stages.
        label_texts (`dict[str, str]`, *optional*):
            Text by label name.
    """

    def __init__(
        self,
        model: XMCForTextClassification,
        dataset: Dataset,
        args: XMCTrainingArguments,
        stages: Stages,
        label_texts: dict[str, str] | None = None,
    ) -> None:
        self.model, self.args, self.stages = model, args, stages
        self.arguments = args.make_level_arguments()
        self.features, self.targets = prepare_features_and_tree(model, dataset, args, stages, label_texts)
        assert model.label_tree is not None
        self.counts = model.label_tree.targets(self.targets)
        self.levels = self.arguments.choose_levels(model.label_tree)
        if args.predict_with == "heads" and model.label_tree.depth not in self.levels:
            raise ValueError(
                f"`predict_with='heads'` needs a head for the labels, level {model.label_tree.depth}, but only the "
                f"levels {self.levels} are trained."
            )
        if model.config.head_levels != self.levels:
            model.add_heads(self.levels)
        model.config.head_loss, model.config.head_dropout = self.arguments.loss, self.arguments.dropout
        # A label that was told from its siblings only says nothing without the levels above.
        told_from_siblings = "tfn" in self.arguments.choose_negatives(model.label_tree, self.levels)
        model.config.head_ranking = "path" if told_from_siblings else "leaf"
        with stages.stage("tokens"):
            self.tokens = tokenize_dataset(model, dataset)
        per_step = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
        self.schedule = Schedule.from_arguments(self.arguments, len(self.levels), max(1, -(-len(dataset) // per_step)))
        # Index of the level at work and its data; -1 before the first.
        self.active = -1
        self.data: LevelData | None = None
        self._vectors: np.ndarray | None = None
        self._known_identity: dict[str, Any] | None = None

    # ---- Levels ----

    def enter_level(self, step: int) -> bool:
        """
        Begins the level that the next step belongs to, unless it is at work already.

        Args:
            step (`int`):
                Steps done.

        Returns:
            `bool`: whether a new level has begun.
        """
        index = self.schedule.index(step)
        begun = False
        while self.active < index:
            self._begin_level(self.active + 1)
            begun = True
        return begun

    def _begin_level(self, index: int) -> None:
        level, arguments = self.levels[index], self.arguments
        head = self.model.head(level)
        assert self.model.label_tree is not None
        needed = needs_vectors(arguments, self.model.label_tree, self.levels, index)
        vectors = self.vectors() if needed else None
        with self.stages.stage(f"level {level} shortlist") as facts:
            data = make_level_data(self.model, self.counts, index, arguments, vectors, self.stages.report)
            if data.shortlist is not None:
                facts["nodes_above_per_document"] = data.shortlist.nnz / data.shortlist.shape[0]
        if arguments.bootstrap:
            assert vectors is not None
            with self.stages.stage(f"level {level} bootstrap"):
                bootstrap_head(
                    head, data, vectors, arguments, self.args.seed, self.args.num_threads, self.stages.report
                )
        else:
            start_from_frequency(head, data, arguments.loss)
        self.active, self.data = index, data
        self.model.config.trained_levels = index + 1

    def vectors(self) -> np.ndarray:
        """The encoder's vectors of the training documents, made anew when the encoder has changed."""
        if self._vectors is None:
            with self.stages.stage("embed") as facts:
                batch_size = self.args.per_device_eval_batch_size
                cache = self.args.embedding_cache
                self._vectors = embed_dataset(self.model, self.tokens, batch_size, cache, self.stages.report)
                facts["documents"] = len(self._vectors)
        return self._vectors

    def encoder_changed(self) -> None:
        """Says that vectors made before are out of date."""
        self._vectors = None

    def level_inputs(self, documents: torch.Tensor) -> dict[str, Any]:
        """What the model takes beside the tokens of some documents to train the level at work."""
        assert self.data is not None
        batch = self.data.batch(documents.cpu().numpy())
        tensors = {name: torch.from_numpy(array).to(documents.device) for name, array in batch.items()}
        return {"level": self.data.level, **tensors}

    # ---- After the levels ----

    def finish(self, eval_dataset: Dataset | None) -> None:
        """
        Trains what comes after the last step: levels without steps, the ranker, the weight of the heads.

        Args:
            eval_dataset (`datasets.Dataset`, *optional*):
                Documents on which the weight of the heads is chosen.
        """
        while self.active + 1 < len(self.levels):
            self._begin_level(self.active + 1)
        model, args = self.model, self.args
        model.config.embedding_scale = args.embedding_scale
        model.config.predict_with = str(args.predict_with)
        if args.predict_with == "heads":
            return
        features = model.ranker_features(Features(self.features.sparse, self.vectors()))
        tree = None
        if args.refine_tree:
            with self.stages.stage("refined tree"):
                tree = build_label_tree(model, features, self.targets, args, self.stages)
        add_ranker(model, features, self.targets, args, self.stages, tree)
        has_label_head = model.label_tree is not None and model.label_tree.depth in self.levels
        if args.predict_with == "both" and not has_label_head:
            model.config.predict_with = "ranker"
        elif args.predict_with == "both":
            self._choose_share(eval_dataset)

    def _choose_share(self, eval_dataset: Dataset | None) -> None:
        config = self.model.config
        if self.args.heads_share is not None or eval_dataset is None:
            config.heads_share = _DEFAULT_SHARE if self.args.heads_share is None else self.args.heads_share
            return
        with self.stages.stage("heads' share") as facts:
            config.heads_share, best = choose_share(self.model, eval_dataset, self.args, self.stages)
            facts.update({"heads_share": config.heads_share, f"eval_{_CHOSEN_BY}": best})

    # ---- Checkpoints ----

    def save(self, folder: str) -> None:
        """Writes the level at work into a checkpoint."""
        shortlist = None if self.data is None else self.data.shortlist
        state = {"active": self.active, "schedule": self.schedule.state(), "run": self._identity()}
        save_level_state(folder, state, shortlist)

    def load(self, folder: str) -> None:
        """Goes on where a checkpoint was written. Raises where it is of another run."""
        state, shortlist = load_level_state(folder)
        mine = self._identity()
        different = [name for name, value in mine.items() if state["run"].get(name) != value]
        if different or state["schedule"]["steps"] != self.schedule.steps:
            what = ", ".join(different or ["number of steps"])
            raise ValueError(
                f"The checkpoint `{folder}` is of another run: these differ: {what}. Resume with the same data and "
                "options, or train anew into another `output_dir`."
            )
        self.schedule.ends = state["schedule"]["ends"]
        self.active = state["active"]
        if self.active >= 0:
            assert self.model.label_tree is not None
            level, above = self.levels[self.active], self.levels[self.active - 1] if self.active else 0
            self.data = level_data(self.model.label_tree, self.counts, level, above, shortlist, self.arguments)

    def _identity(self) -> dict[str, Any]:
        """What must be the same when training goes on. Reads all tokens, but only once."""
        if self._known_identity is not None:
            return self._known_identity
        assert self.model.label_tree is not None
        labels = hashlib.blake2b(self.targets.indptr.tobytes() + self.targets.indices.tobytes(), digest_size=16)
        options = {f"level_{name}": value for name, value in vars(self.arguments).items()}
        # Tree, TF-IDF and tokens are those of the checkpoint, whatever the options say: they must not say otherwise.
        prefixes = ("tree_", "tfidf_", "encoder_", "label_", "features", "vector_power")
        given = self.args.xmc_options()
        options |= {name: given[name] for name in given if name.startswith(prefixes) and name != "encoder_name"}
        identity = {
            "documents": tokens_digest(self.tokens),
            "labels": labels.hexdigest(),
            "label tree": self.model.label_tree.digest(),
            "seed": self.args.seed,
            "batch size": self.args.train_batch_size * self.args.world_size * self.args.gradient_accumulation_steps,
            **options,
        }
        # As it is read back: lists for tuples.
        self._known_identity = json.loads(json.dumps(identity))
        return self._known_identity


@torch.no_grad()
def choose_share(
    model: XMCForTextClassification, dataset: Dataset, args: XMCTrainingArguments, stages: Stages
) -> tuple[float, float]:
    """
    The part of the heads in a score that ranks validation documents best.

    Args:
        model ([`XMCForTextClassification`]):
            A model with heads for the labels and a ranker.
        dataset (`datasets.Dataset`):
            Documents with labels.
        args ([`XMCTrainingArguments`]):
            Options.
        stages ([`Stages`]):
            Reports the progress.

    Returns:
        `tuple[float, float]`: the share and the nDCG@5 with it.
    """
    assert model.labels is not None
    truth: csr_matrix = model.labels.encode(dataset, keep_unseen=True)
    results = {float(share): XMCMetrics(ks=(1, 5)) for share in _SHARES}
    start = 0
    for features in feature_batches(model, dataset, num_threads=args.num_threads, report=stages.report):
        ranked, own, indices = model.candidate_scores(features, 5, num_threads=args.num_threads)
        for share, metrics in results.items():
            best = mix_scores(ranked, own, indices, share, 5)
            assert best.indices is not None
            metrics.update(best.indices.cpu().numpy(), truth[start : start + len(features)])
        start += len(features)
    values = {share: metrics.compute()[_CHOSEN_BY] for share, metrics in results.items()}
    chosen = max(values, key=lambda share: (values[share], -share))
    return round(chosen, 4), values[chosen]
