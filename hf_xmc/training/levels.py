"""Fine-tuning level by level: heads, shortlist, bootstrap, batches, and the state that a checkpoint keeps."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from scipy.sparse import csr_matrix
from torch.utils.data import DataLoader

from ..evaluation import XMCMetrics
from ..inference.predict import evaluate_level
from ..modeling_heads import tail_sizes
from ..modeling_xmc import XMCForTextClassification
from ..output import XMCOutput
from ..text_encoder import padding_id
from .bootstrap import bootstrap_head, level_data, make_level_data, needs_vectors, start_from_frequency, starting_data
from .checkpoint import load_level_state, save_level_state
from .context import RunContext
from .head_prior import NodeVectors
from .large_encoders import Adapters
from .level_data import LevelCollator, LevelData, pass_batches
from .optimizer import WeightAverage
from .schedule import Schedule


class Levels:
    """
    The levels of the label tree that are fine-tuned, and the state of the group of levels in training.

    Levels that are trained in the same steps form a group; most methods train one level after the other. `context` is
    the training after the stages of `PREPARATION`; heads are added to its model.
    """

    def __init__(self, context: RunContext) -> None:
        assert context.model.label_tree is not None
        self.context, self.tree, args = context, context.model.label_tree, context.args
        # As the user set them: the trainer sets `max_steps` while it trains.
        self.options = args.xmc_options()
        self.arguments = args.make_level_arguments()
        self.counts: list[csr_matrix] = []
        self.levels: list[int] = []
        self.groups = self._choose_groups()
        self.batches_per_step = args.gradient_accumulation_steps
        per_step = args.train_batch_size * args.world_size * self.batches_per_step
        self.steps_per_pass = max(1, -(-len(context.dataset) // per_step))
        self.schedule = Schedule.from_arguments(args, len(self.groups), self.steps_per_pass)
        # Index of the group in training and the data of its levels; -1 before the first.
        self.active = -1
        self.data: list[LevelData] = []
        self.average = WeightAverage()
        rank = args.make_encoder_arguments().lora_rank
        self.adapters = Adapters(context.model, rank, seed=args.seed) if rank else None
        self._start = 0.0

    def _choose_groups(self) -> list[list[int]]:
        """Chooses the levels and adds their heads; returns the levels that are trained in the same steps, in order."""
        self.counts = self.tree.targets(self.context.targets)
        self.levels = self.arguments.choose_levels(self.tree)
        if self.context.args.predict_with == "heads" and self.tree.depth not in self.levels:
            raise ValueError(
                f"`predict_with='heads'` needs a head for the labels, level {self.tree.depth}, but only the levels "
                f"{self.levels} are trained."
            )
        self._add_heads()
        return self.arguments.group_levels(self.levels)

    def _add_heads(self) -> None:
        """Adds the heads, unless the model has them from a checkpoint, and configures them."""
        model, arguments, config = self.context.model, self.arguments, self.context.model.config
        if config.head_levels != self.levels:
            # A bottleneck saves memory only where there are many labels, that is, with a level above them.
            bottleneck = (arguments.bottleneck or None) if len(self.levels) > 1 else None
            tails = None if arguments.shrink is None else tail_sizes(self.tree)
            with self.context.stage("heads") as metrics:
                model.add_heads(self.levels, bottleneck, tails, arguments.shrink or config.head_shrink)
                metrics.update(heads_bytes=model.heads.num_bytes)
                if model.heads.full_width_bytes > model.heads.num_bytes:
                    metrics.update(full_width_bytes=model.heads.full_width_bytes)
        config.head_loss, config.head_dropout = arguments.loss, arguments.dropout
        # With teacher forcing alone a head only separates siblings, and joint levels are trained to be multiplied:
        # in both cases a label is scored by the product along its path.
        separates_siblings = "tfn" in arguments.choose_negatives(self.tree, self.levels)
        config.head_ranking = "path" if separates_siblings or arguments.joint else "leaf"

    @property
    def level(self) -> int:
        """The finest level in training."""
        return self.groups[self.active][-1]

    @property
    def padding(self) -> int:
        """Token id of padding."""
        model = self.context.model
        return padding_id(model.config.encoder_config, model.tokenizer)

    @property
    def name(self) -> str:
        """Name of the levels in training, for the progress bar and messages."""
        return f"level {'+'.join(map(str, self.groups[self.active]))}/{self.levels[-1]}"

    # ---- Stages of a level ----

    def begin_group(self, index: int) -> None:
        """Computes shortlists and initial heads of a group of levels."""
        self.apply_average()
        self.data = [self._begin_level(self.levels.index(level)) for level in self.groups[index]]
        self.active, self.schedule.elapsed = index, 0.0

    def _begin_level(self, index: int) -> LevelData:
        context, arguments, level, tree = self.context, self.arguments, self.levels[index], self.tree
        model = context.model
        vectors = context.vectors() if needs_vectors(arguments, tree, self.levels, index) else None
        with context.stage(f"level {level} shortlist") as metrics:
            data = make_level_data(model, self.counts, index, arguments, vectors, context.runtime)
            if data.shortlist is not None:
                metrics["nodes_above_per_document"] = data.shortlist.nnz / data.shortlist.shape[0]
        start = starting_data(data, tree, self.counts, self.levels, index, arguments.joint)
        if vectors is not None and arguments.bootstrap:
            with context.stage(f"level {level} bootstrap"):
                prior = self._prior(level, vectors) if arguments.bootstrap_prior else None
                seed = context.args.seed
                bootstrap_head(model.head(level), start, vectors, arguments, seed, context.runtime, prior)
        else:
            start_from_frequency(model.head(level), start, arguments.loss)
        model.config.trained_levels = index + 1
        return data

    def _prior(self, level: int, vectors: np.ndarray) -> NodeVectors:
        """Returns vectors of the nodes of a level, from their documents and, where there are any, label texts."""
        texts = self.context.text_features("bootstrap")
        return NodeVectors(self.tree, level, vectors, self.context.targets, None if texts is None else texts.dense)

    def complete(self) -> None:
        """Ends fine-tuning: applies averages and adapters, and begins the levels without training steps."""
        self.apply_average()
        if self.adapters is not None:
            self.adapters.merge()
            self.adapters = None
        for index in range(self.active + 1, len(self.groups)):
            self.begin_group(index)

    # ---- Steps ----

    def collator(self, pass_number: int) -> Callable[[Sequence[dict[str, Any]]], dict[str, Any]]:
        """Returns what makes the batches of a pass over the documents, counted from 0."""
        return LevelCollator(self.padding, self.data, self.arguments.joint)

    def compute_loss(self, model: Any, inputs: dict[str, Any]) -> XMCOutput:
        """Runs the model, which may be wrapped, on a batch."""
        return model(**inputs)

    def evaluate(
        self, model: XMCForTextClassification, dataset: Dataset, ks: Sequence[int] | None, **options: Any
    ) -> XMCMetrics:
        """Evaluates the level in training; options are those of [`evaluate_level`]."""
        return evaluate_level(model, dataset, self.level, ks, **options)

    def start_clock(self) -> None:
        """Starts or continues to measure the time of a group of levels."""
        self._start = time.perf_counter() - self.schedule.elapsed

    def plan_by_time(self, step: int) -> bool:
        """Plans the steps that are left after `step` steps, if the length of the training is a time."""
        if self.schedule.seconds is None:
            return False
        elapsed = self.context.runtime.cache.processes.from_main(lambda: time.perf_counter() - self._start)
        self.schedule.plan_by_time(step, elapsed)
        return True

    def update_average(self, step: int) -> None:
        """Adds the weights after `step` steps to the average, in the last part of a level."""
        done, planned = self.schedule.steps_done(step - 1)
        late = done + 1 - round(self.arguments.swa_start * planned)
        if self.active >= 0 and late > 0 and late % self.arguments.swa_steps == 0:
            self.average.add(self.context.model, step)

    def apply_average(self) -> None:
        """Replaces the weights by their average, if there is one."""
        if self.average.apply(self.context.model):
            self.context.encoder_changed()

    # ---- Checkpoints ----

    def save(self, folder: str, is_main: bool = True) -> None:
        """Writes the state into a checkpoint. Collective: every process must call it; only the main one writes."""
        self.average.save(folder, is_main)
        if is_main:
            state = {"active": self.active, "schedule": self.schedule.state(), "run": self._identity}
            save_level_state(folder, state, [data.shortlist for data in self.data])
            if self.adapters is not None:
                self.adapters.save(folder)

    def load(self, folder: str) -> None:
        """Restores the state from a checkpoint; raises if it belongs to another run."""
        state, shortlists = load_level_state(folder)
        identity = self._identity
        different = [name for name, value in identity.items() if state["run"].get(name) != value]
        if not self.schedule.load(state["schedule"]) or different:
            raise ValueError(
                f"The checkpoint `{folder}` belongs to another run. These differ: "
                f"{', '.join(different or ['number of steps'])}. Resume with the same data and options, or choose "
                "another `output_dir`."
            )
        self.active = state["active"]
        self.average.load(folder, self.context.model.device)
        if self.adapters is not None:
            self.adapters.load(folder)
        if self.active >= 0:
            self.data = [
                level_data(self.tree, self.counts, self.levels, self.levels.index(level), shortlist, self.arguments)
                for level, shortlist in zip(self.groups[self.active], shortlists, strict=True)
            ]

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What must be the same when the training is resumed."""
        args, targets = self.context.args, self.context.targets
        labels = hashlib.blake2b(targets.indptr.tobytes() + targets.indices.tobytes(), digest_size=16)
        options = {f"level_{name}": value for name, value in vars(self.arguments).items()}
        # Tree, TF-IDF and tokens come from the checkpoint: the options must agree with them.
        prefixes = ("tree_", "tfidf_", "encoder_", "label_", "feature", "warmup_", "lr_", "weight_decay", "time_")
        given = args.xmc_options()
        options |= {name: given[name] for name in given if name.startswith(prefixes) and name != "encoder_name"}
        identity = {
            "documents": self.context.tokens_key,
            "labels": labels.hexdigest(),
            "label tree": self.tree.digest(),
            "seed": args.seed,
            "batch size": args.train_batch_size * args.world_size * self.batches_per_step,
            **options,
        }
        return json.loads(json.dumps(identity))  # as it is read back: lists for tuples


class LevelBatches:
    """
    Training batches of all levels in order. The `Trainer` iterates over it once for each pass over the documents.

    When the last step of a group of levels is done, the next batch that is asked for begins the next group. A resumed
    training begins after `step` steps. `on_begin` is called before the first batch of a group, with whether the group
    is new.
    """

    def __init__(self, levels: Levels, step: int, on_begin: Callable[[bool], None]) -> None:
        self.levels, self.on_begin = levels, on_begin
        self.dataset = levels.context.tokens  # the Trainer reads its length
        self._done = step * levels.batches_per_step
        self._lengths = list(self.dataset["length"])
        if levels.context.args.train_sampling_strategy == "random":
            self._lengths = [1] * len(self._lengths)  # equal lengths: the order is random
        self._stream = self._all_levels()

    def __len__(self) -> int:
        return self.levels.steps_per_pass * self.levels.batches_per_step

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # A resumed pass has fewer batches left.
        for _ in range(len(self) - self._done % len(self)):
            try:
                yield next(self._stream)
            except StopIteration:
                return
            except (ConnectionError, EOFError) as error:
                # How the death of a worker may show, beside the RuntimeError of torch.
                raise RuntimeError(f"DataLoader worker: {error!r}") from error

    def _all_levels(self) -> Iterator[dict[str, Any]]:
        levels = self.levels
        for index in range(max(levels.active, 0), len(levels.groups)):
            is_new = levels.active < index
            if is_new:
                levels.begin_group(index)
            levels.start_clock()
            self.on_begin(is_new)
            while self._is_in(index):
                for batch in self._loader():
                    self._done += 1
                    yield batch
                    if not self._is_in(index):
                        break

    def _is_in(self, index: int) -> bool:
        """Whether the next batch belongs to a group of levels. Early stopping may have ended it."""
        return self._done // self.levels.batches_per_step < self.levels.schedule.ends[index]

    def _loader(self) -> DataLoader:
        """Returns the rest of the current pass."""
        levels, args = self.levels, self.levels.context.args
        number, start = divmod(self._done, len(self))
        seed = args.seed if args.data_seed is None else args.data_seed
        batches = pass_batches(
            self._lengths,
            args.train_batch_size,
            (levels.steps_per_pass, levels.batches_per_step),
            (args.process_index, args.world_size),
            None if args.train_sampling_strategy == "sequential" else seed + number,
        )
        workers = args.dataloader_num_workers
        return DataLoader(
            self.dataset,  # type: ignore[arg-type]
            batch_sampler=batches[start:],  # type: ignore[arg-type]
            collate_fn=levels.collator(number),
            num_workers=workers,
            prefetch_factor=args.dataloader_prefetch_factor if workers else None,
            pin_memory=args.dataloader_pin_memory and torch.accelerator.is_available(),
            # The default generator would be advanced, and a resumed training would not be the same.
            generator=torch.Generator().manual_seed(seed),
        )
