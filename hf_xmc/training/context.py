"""What the stages of a training share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
from datasets import Dataset
from scipy.sparse import csr_matrix

from ..features import Features
from ..modeling_xmc import XMCForTextClassification
from ..parallel.stage_cache import Runtime
from .arguments import XMCTrainingArguments
from .callbacks import StageTimer
from .embedding import embed_dataset, tokens_digest
from .large_encoders import ShardedEncoder


@dataclass
class RunContext:
    """
    The state of a training. Each stage reads what earlier stages have set and adds its own result.

    Args:
        model ([`XMCForTextClassification`]): The model.
        args ([`XMCTrainingArguments`]): Options.
        dataset (`datasets.Dataset`): Training documents in the columns of [`prepare_dataset`].
        runtime ([`Runtime`]): Threads, progress and cache.
        timer ([`StageTimer`]): Measures and logs the stages.
        label_texts (`dict[str, str]`, *optional*): Label texts by label name.
        validation (`datasets.Dataset`, *optional*): Documents on which the weight of the heads is chosen.
    """

    model: XMCForTextClassification
    args: XMCTrainingArguments
    dataset: Dataset
    runtime: Runtime
    timer: StageTimer
    label_texts: dict[str, str] | None = None
    validation: Dataset | None = None
    features: Features = field(init=False)
    """Sparse features of the documents."""
    targets: csr_matrix = field(init=False)
    """`(documents, labels)` indicator of the true labels."""
    tokens: Dataset = field(init=False)
    """Tokenised documents, for methods with an encoder."""
    sharded: ShardedEncoder | None = field(default=None, init=False)
    """Set while FSDP shards the encoder."""

    def __post_init__(self) -> None:
        self._vectors: np.ndarray | None = None
        self._tokens_key: str | None = None

    def stage(self, name: str) -> AbstractContextManager[dict[str, float]]:
        """Measures a stage and logs it with the values that the block puts into the dictionary."""
        return self.timer.stage(name)

    def vectors(self) -> np.ndarray:
        """Returns the encoder's vectors of the training documents; computes them if the encoder has changed."""
        if self._vectors is None:
            with self.stage("embed") as metrics, self.whole_encoder():
                self._vectors = embed_dataset(
                    self.model,
                    self.tokens,
                    self.args.per_device_eval_batch_size,
                    self.args.embedding_cache,
                    self.runtime,
                    self.tokens_key,
                )
                metrics["documents"] = len(self._vectors)
        return self._vectors

    def encoder_changed(self) -> None:
        """Discards the document vectors."""
        self._vectors = None

    def tokens_key(self) -> str:
        """Returns the fingerprint of the tokenised documents, which is computed once."""
        if self._tokens_key is None:
            self._tokens_key = tokens_digest(self.tokens)
        return self._tokens_key

    def whole_encoder(self) -> AbstractContextManager[None]:
        """Gathers the encoder for a block of code, if FSDP shards it."""
        return nullcontext() if self.sharded is None else self.sharded.whole(self.model)
