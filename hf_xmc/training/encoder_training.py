"""Trains a model with an encoder: what comes before, between and after the fine-tuning of its levels."""

from __future__ import annotations

import hashlib
import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from scipy.sparse import csr_matrix

from ..evaluation.metrics import XMCMetrics
from ..features import Features
from ..inference.predict import map_batches
from ..linear_ranker import Beam
from ..modeling_heads import tail_sizes
from ..modeling_utils import mix_scores
from ..modeling_xmc import XMCForTextClassification
from ..parallel.runtime import Runtime
from .arguments import XMCTrainingArguments
from .averaging import WeightAverage
from .bootstrap import (
    bootstrap_head,
    level_data,
    make_level_data,
    match_documents,
    needs_vectors,
    start_from_frequency,
    starting_data,
)
from .checkpoint import load_level_state, save_level_state
from .embedding import embed_dataset, tokenize_dataset, tokens_digest
from .fsdp import ShardedEncoder
from .level_data import LevelData
from .lora import Adapters
from .progress import StageTimer
from .schedule import Schedule
from .stages import add_ranker, build_label_tree, prepare_features, prepare_tree

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
        stages ([`StageTimer`]):
            Times and logs the stages.
        label_texts (`dict[str, str]`, *optional*):
            Text by label name.
    """

    def __init__(
        self,
        model: XMCForTextClassification,
        dataset: Dataset,
        args: XMCTrainingArguments,
        stages: StageTimer,
        label_texts: dict[str, str] | None = None,
    ) -> None:
        self.model, self.args, self.stages = model, args, stages
        self.arguments = args.make_level_arguments()
        # While FSDP spreads the encoder over processes.
        self.sharded: ShardedEncoder | None = None
        self._vectors: np.ndarray | None = None
        self._documents_digest: str | None = None
        self.features, self.targets = prepare_features(model, dataset, args, stages, label_texts)
        with stages.stage("tokens"):
            self.tokens = stages.work.once(
                "tokens", lambda: tokenize_dataset(model, dataset), Dataset.save_to_disk, Dataset.load_from_disk
            )
        described = self.features
        if args.label_features == "embedding" and model.label_tree is None:
            described = Features(None, self.vectors())
        prepare_tree(model, described, self.targets, args, stages)
        assert model.label_tree is not None
        self.counts = model.label_tree.targets(self.targets)
        self.levels = self.arguments.choose_levels(model.label_tree)
        if args.predict_with == "heads" and model.label_tree.depth not in self.levels:
            raise ValueError(
                f"`predict_with='heads'` needs a head for the labels, level {model.label_tree.depth}, but only the "
                f"levels {self.levels} are trained."
            )
        # Levels that are trained in the same steps.
        self.groups = self.arguments.group_levels(self.levels)
        self._prepare_heads()
        per_step = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
        self.schedule = Schedule.from_arguments(args, len(self.groups), max(1, -(-len(dataset) // per_step)))
        # Index of the group at work and the data of its levels; -1 before the first.
        self.active = -1
        self.data: list[LevelData] = []
        self.average = WeightAverage()
        self._known_identity: dict[str, Any] | None = None
        encoder = args.make_encoder_arguments()
        self.adapters: Adapters | None = None
        if encoder.lora_rank:
            self.adapters = Adapters(model, encoder.lora_rank, encoder.lora_alpha, args.seed)

    def _prepare_heads(self) -> None:
        """Gives the model its heads, unless it has them from a checkpoint, and says how they work."""
        model, arguments, config = self.model, self.arguments, self.model.config
        assert model.label_tree is not None
        if config.head_levels != self.levels:
            # Without a level above there are few labels, and nothing to save.
            bottleneck = (arguments.bottleneck or None) if len(self.levels) > 1 else None
            tails = None if arguments.shrink is None else tail_sizes(model.label_tree)
            with self.stages.stage("heads") as facts:
                model.add_heads(self.levels, bottleneck, tails, arguments.shrink or config.head_shrink)
                facts.update(heads_bytes=model.heads.num_bytes, full_width_bytes=model.heads.full_width_bytes)
        config.head_loss, config.head_dropout = arguments.loss, arguments.dropout
        # A label that was told from its siblings only says nothing without the levels above, and levels trained
        # together are meant to be multiplied.
        told_from_siblings = "tfn" in arguments.choose_negatives(model.label_tree, self.levels)
        config.head_ranking = "path" if told_from_siblings or arguments.joint else "leaf"

    # ---- Levels ----

    @property
    def level(self) -> int:
        """The level at work; of several the finest."""
        return self.groups[self.active][-1]

    def enter_level(self, step: int) -> bool:
        """
        Begins the levels that the next step belongs to, unless they are at work already.

        Args:
            step (`int`):
                Steps done.

        Returns:
            `bool`: whether a new group of levels has begun.
        """
        index = self.schedule.index(step)
        begun = False
        while self.active < index:
            self._begin_group(self.active + 1)
            begun = True
        return begun

    def _begin_group(self, index: int) -> None:
        self._take_average()
        self.data = [self._begin_level(self.levels.index(level)) for level in self.groups[index]]
        self.active = index

    def _begin_level(self, index: int) -> LevelData:
        level, arguments, tree = self.levels[index], self.arguments, self.model.label_tree
        head = self.model.head(level)
        assert tree is not None
        vectors = self.vectors() if needs_vectors(arguments, tree, self.levels, index) else None
        with self.stages.stage(f"level {level} shortlist") as facts:
            data = make_level_data(
                self.model, self.counts, index, arguments, vectors, self.stages.report, self.stages.work
            )
            if data.shortlist is not None:
                facts["nodes_above_per_document"] = data.shortlist.nnz / data.shortlist.shape[0]
        start = starting_data(data, tree, self.counts, self.levels, index, arguments.joint)
        if arguments.bootstrap:
            assert vectors is not None
            with self.stages.stage(f"level {level} bootstrap"):
                bootstrap_head(
                    head,
                    start,
                    vectors,
                    arguments,
                    self.args.seed,
                    self.args.num_threads,
                    self.stages.report,
                    self.stages.work,
                )
        else:
            start_from_frequency(head, start, arguments.loss)
        self.model.config.trained_levels = index + 1
        return data

    def after_step(self, step: int) -> None:
        """Averages the weights after `step` steps, where it is their turn."""
        if self.active < 0:
            return
        done, planned = self.schedule.steps_done(step - 1)
        late = done + 1 - round(self.arguments.swa_start * planned)
        if late > 0 and late % self.arguments.swa_steps == 0:
            self.average.add(self.model, step)

    def _take_average(self) -> None:
        if self.average.take(self.model):
            self.encoder_changed()

    def vectors(self) -> np.ndarray:
        """The encoder's vectors of the training documents, made anew when the encoder has changed."""
        if self._vectors is None:
            with self.stages.stage("embed") as facts:
                batch_size = self.args.per_device_eval_batch_size
                cache = self.args.embedding_cache
                with self.whole_encoder():
                    self._vectors = embed_dataset(
                        self.model,
                        self.tokens,
                        batch_size,
                        cache,
                        self.stages.report,
                        self.stages.work,
                        self._documents,
                    )
                facts["documents"] = len(self._vectors)
        return self._vectors

    def whole_encoder(self) -> AbstractContextManager[None]:
        """Within this the model has a whole encoder, also where FSDP spreads it over processes."""
        return nullcontext() if self.sharded is None else self.sharded.whole(self.model)

    def gather_model(self) -> XMCForTextClassification:
        """The model as an ordinary one again, after its last step under FSDP."""
        assert self.sharded is not None
        self.average.gather()
        self.model, self.sharded = self.sharded.whole_model(self.model), None
        return self.model

    def encoder_changed(self) -> None:
        """Says that vectors made before are out of date."""
        self._vectors = None

    def level_inputs(self, documents: torch.Tensor) -> dict[str, Any]:
        """What the model takes beside the tokens of some documents to train the levels at work."""
        batches = []
        for data in self.data:
            batch = data.batch(documents.cpu().numpy())
            for name, value in batch.items():
                if isinstance(value, np.ndarray):
                    batch[name] = torch.from_numpy(value).to(documents.device)
            batches.append({"level": data.level, **batch})
        return {"levels": batches} if self.arguments.joint else batches[0]

    # ---- After the levels ----

    def finish(self, eval_dataset: Dataset | None) -> None:
        """
        Trains what comes after the last step: levels without steps, the ranker, the weight of the heads.

        Args:
            eval_dataset (`datasets.Dataset`, *optional*):
                Documents on which the weight of the heads is chosen.
        """
        self._take_average()
        if self.adapters is not None:
            self.adapters.merge()
            self.adapters = None
        while self.active + 1 < len(self.groups):
            self._begin_group(self.active + 1)
        model, args = self.model, self.args
        model.config.embedding_scale = args.embedding_scale
        model.config.predict_with = str(args.predict_with)
        if args.predict_with == "heads":
            return
        features = model.ranker_features(Features(self.features.sparse, self.vectors()))
        tree = None
        shape = args.make_tree_arguments()
        if args.refine_tree or shape.clustering == "frequency":
            # Labels that share a tail have nothing in common but being rare: no tree for a ranker.
            if shape.clustering == "frequency":
                shape = replace(shape, clustering="balanced")
            with self.stages.stage("refined tree"):
                tree = build_label_tree(model, features, self.targets, args, self.stages, shape)
        add_ranker(model, features, self.targets, args, self.stages, tree, self._matched_nodes())
        has_label_head = model.label_tree is not None and model.label_tree.depth in self.levels
        if args.predict_with == "both" and not has_label_head:
            model.config.predict_with = "ranker"
        elif args.predict_with == "both":
            self._choose_share(eval_dataset)

    def _matched_nodes(self) -> Beam | None:
        """What the heads find above the labels for the training documents, where they do it for the ranker."""
        model, args = self.model, self.args
        assert model.label_tree is not None
        above = [level for level in self.levels if level < model.label_tree.depth]
        if args.make_ranker_arguments().matcher != "heads" or not above:
            return None
        vectors, beam_size = self.vectors(), args.make_ranker_arguments().train_beam_size
        with self.stages.stage("match"):
            return match_documents(model, vectors, above[-1], beam_size, self.stages.work)

    def _choose_share(self, eval_dataset: Dataset | None) -> None:
        config = self.model.config
        if self.args.heads_weight is not None or eval_dataset is None:
            config.heads_weight = _DEFAULT_SHARE if self.args.heads_weight is None else self.args.heads_weight
        else:
            with self.stages.stage("heads' share") as facts:
                config.heads_weight, best = choose_share(self.model, eval_dataset, self.args, self.stages)
                facts.update({"heads_weight": config.heads_weight, f"eval_{_CHOSEN_BY}": best})
        if config.heads_weight == 0:
            # The same labels, without asking the heads for nothing.
            config.predict_with = "ranker"

    # ---- Checkpoints ----

    def save(self, folder: str, writes: bool = True) -> None:
        """Writes the levels at work into a checkpoint; of several processes all come here, and one `writes`."""
        self.average.save(folder, writes)
        if not writes:
            return
        state = {"active": self.active, "schedule": self.schedule.state(), "run": self._identity()}
        save_level_state(folder, state, [data.shortlist for data in self.data])
        if self.adapters is not None:
            self.adapters.save(folder)

    def load(self, folder: str) -> None:
        """Goes on where a checkpoint was written. Raises where it is of another run."""
        state, shortlists = load_level_state(folder)
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
        self.average.load(folder, self.model.device)
        if self.adapters is not None:
            self.adapters.load(folder)
        if self.active >= 0:
            tree, counts, levels = self.model.label_tree, self.counts, self.levels
            assert tree is not None
            self.data = [
                level_data(tree, counts, levels, levels.index(level), shortlist, self.arguments)
                for level, shortlist in zip(self.groups[self.active], shortlists, strict=True)
            ]

    def _documents(self) -> str:
        """Fingerprint of the tokens. Reads all of them, but only once."""
        if self._documents_digest is None:
            self._documents_digest = tokens_digest(self.tokens)
        return self._documents_digest

    def _identity(self) -> dict[str, Any]:
        """What must be the same when training goes on."""
        if self._known_identity is not None:
            return self._known_identity
        assert self.model.label_tree is not None
        labels = hashlib.blake2b(self.targets.indptr.tobytes() + self.targets.indices.tobytes(), digest_size=16)
        options = {f"level_{name}": value for name, value in vars(self.arguments).items()}
        # Tree, TF-IDF and tokens are those of the checkpoint, whatever the options say: they must not say otherwise.
        prefixes = ("tree_", "tfidf_", "encoder_", "label_", "feature", "warmup_", "lr_", "weight_decay")
        given = self.args.xmc_options()
        options |= {name: given[name] for name in given if name.startswith(prefixes) and name != "encoder_name"}
        identity = {
            "documents": self._documents(),
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
    model: XMCForTextClassification, dataset: Dataset, args: XMCTrainingArguments, stages: StageTimer
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
        stages ([`StageTimer`]):
            Reports the progress.

    Returns:
        `tuple[float, float]`: the share and the nDCG@5 with it.
    """
    assert model.labels is not None
    truth: csr_matrix = model.labels.encode(dataset, keep_unseen=True)
    results = {float(share): XMCMetrics(ks=(1, 5)) for share in _SHARES}

    def rank(features: Features) -> dict[str, np.ndarray]:
        ranked, own, indices = model.candidate_scores(features, 5, num_threads=args.num_threads)
        best = [mix_scores(ranked, own, indices, share, 5).indices for share in results]
        return {str(share): found.cpu().numpy() for share, found in zip(results, best, strict=True)}  # type: ignore[union-attr]

    start = 0
    runtime = Runtime(args.num_threads, stages.report, stages.work)
    for best in map_batches(model, dataset, rank, args.per_device_eval_batch_size, runtime):
        count = len(next(iter(best.values())))
        for share, metrics in results.items():
            metrics.update(best[str(share)], truth[start : start + count])
        start += count
    values = {share: metrics.compute()[_CHOSEN_BY] for share, metrics in results.items()}
    chosen = max(values, key=lambda share: (values[share], -share))
    return round(chosen, 4), values[chosen]
