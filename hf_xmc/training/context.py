"""What the stages of a training share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
from datasets import Dataset, concatenate_datasets
from scipy.sparse import csr_matrix

from ..features import Features
from ..modeling_xmc import XMCForTextClassification
from ..parallel.stage_cache import Runtime
from ..scorer import Scorer
from ..vocabulary import LabelVocabulary
from .arguments import XMCTrainingArguments
from .embedding import embed_dataset, tokens_digest
from .large_encoders import ShardedEncoder
from .ranker import KeptRanker
from .scoring import held_out_documents


@dataclass
class RunContext:
    """The state of a training. Each stage reads what earlier stages have set and adds its own result."""

    model: XMCForTextClassification
    args: XMCTrainingArguments
    dataset: Dataset
    runtime: Runtime
    log: Callable[[dict[str, float]], None]
    begin_stage: Callable[[str], None]  # called with the name of each stage
    # What is known about the labels; `False` if no texts are to be used, not even names that are words.
    label_texts: LabelVocabulary | Literal[False] | None = None
    validation: Dataset | None = None  # documents on which the last scorer is fitted
    scorer: Scorer | None = None  # one that was fitted before, on other parts of the same data
    labels_seen_only: bool = False  # whether labels without documents are left out
    kept: KeptRanker | None = None  # the ranker of a model that gets further documents
    num_previous: int = 0  # number of documents that it was trained on; the first ones
    text_uses: dict[str, None] = field(default_factory=dict)  # parts of the training that have used label texts
    seconds: dict[str, float] = field(default_factory=dict)  # of each stage
    features: Features = field(init=False)  # sparse features of the documents
    targets: csr_matrix = field(init=False)  # `(documents, labels)` indicator of the true labels
    tokens: Dataset = field(init=False)  # tokenised documents, for methods with an encoder
    sharded: ShardedEncoder | None = field(default=None, init=False)  # set while FSDP shards the encoder
    whole: RunContext | None = field(default=None, init=False)  # the context that this one is a subset of
    rows: np.ndarray | None = field(default=None, init=False)  # the documents of the subset

    def __post_init__(self) -> None:
        self._vectors: np.ndarray | None = None
        self._text_features: Features | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[dict[str, float]]:
        """Measures its block and logs `<name>_seconds` with the values that the block puts into the dictionary."""
        self.begin_stage(name)
        start = time.perf_counter()
        metrics: dict[str, float] = {}
        yield metrics
        seconds = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.log({f"{name}_seconds": round(seconds, 2), **metrics})

    def vectors(self) -> np.ndarray:
        """Returns the encoder's vectors of the training documents; computes them if the encoder has changed."""
        if self.whole is not None:
            return self.whole.vectors()[self.rows]
        if self._vectors is None:
            with self.stage("embed") as metrics, self.whole_encoder():
                self._vectors = self._embed()
                metrics["documents"] = len(self._vectors)
        return self._vectors

    def _embed(self) -> np.ndarray:
        model, tokens, runtime = self.model, self.tokens, self.runtime
        options = self.args.per_device_eval_batch_size, self.args.embedding_cache
        if not self.num_previous:
            return embed_dataset(model, tokens, *options, runtime, lambda: self.tokens_key)
        # Apart, because the first training may have cached the vectors of its documents.
        within = replace(runtime, cache=runtime.cache.within("previous"))
        first, count = self.num_previous, len(tokens)
        previous = embed_dataset(model, tokens.select(range(first)), *options, within)
        return np.concatenate([previous, embed_dataset(model, tokens.select(range(first, count)), *options, runtime)])

    def readable_texts(self) -> list[str]:
        """Returns the texts of the labels, see [`Labels`]; empty ones if they are switched off."""
        labels = self.model.checked_labels()
        return [""] * len(labels) if self.label_texts is False else labels.readable_texts()

    def text_features(self, use: str) -> Features | None:
        """
        Returns TF-IDF and vectors of the label texts, a zero row for a label without text; `None` without texts.

        `use` is the part of the model that uses them, for the log.
        """
        if self.whole is not None:
            return self.whole.text_features(use)
        model, args = self.model, self.args
        texts = self.readable_texts()
        if model.tfidf is None or not any(texts):
            return None
        self.text_uses[use] = None
        if self._text_features is None:
            dense = None
            if model.encoder is not None:
                with self.stage("embed label texts"), self.whole_encoder():
                    dense = model.embed(texts, args.per_device_eval_batch_size)
                # The vector of an empty text is meaningless.
                dense[[not text for text in texts]] = 0
            self._text_features = Features(model.tfidf.transform(texts, num_threads=self.runtime.num_threads), dense)
        return self._text_features

    def encoder_changed(self) -> None:
        """Discards the vectors of documents and label texts."""
        self.root._vectors = self.root._text_features = None

    @property
    def root(self) -> RunContext:
        """The context of all documents."""
        return self if self.whole is None else self.whole

    def held_out(self) -> np.ndarray:
        """Returns the documents on which the last scorer is fitted, in place of validation documents."""
        if self.args.predict_with != "all" or self.validation is not None or self.scorer is not None:
            return np.empty(0, dtype=np.int64)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return held_out_documents(len(self.dataset), seed)

    def for_tuning(self) -> RunContext:
        """Returns the context of fine-tuning, which must not see the documents held out for the last scorer."""
        held_out = self.held_out()
        if not len(held_out):
            return self
        rows = np.setdiff1d(np.arange(len(self.dataset)), held_out)
        part = replace(self, dataset=self.dataset.select(rows))
        part.features, part.targets, part.whole, part.rows = self.features[rows], self.targets[rows], self, rows
        column = Dataset.from_dict({"document": np.arange(len(rows))})
        part.tokens = concatenate_datasets([self.tokens.select(rows).remove_columns("document"), column], axis=1)
        return part

    @cached_property
    def tokens_key(self) -> str:
        """The fingerprint of the tokenised documents."""
        return tokens_digest(self.tokens)

    def whole_encoder(self) -> AbstractContextManager[None]:
        """Gathers the encoder for a block of code, if FSDP shards it."""
        if self.whole is not None:
            return self.whole.whole_encoder()
        return nullcontext() if self.sharded is None else self.sharded.whole(self.model)
