"""How near hf_xmc comes to the speed of the bare encoder, in fine-tuning and in prediction.

Both sides take turns on the same documents within one process: what else the machine does slows both alike.
"""

from __future__ import annotations

import logging
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModel, AutoTokenizer, TrainerCallback

from hf_xmc import XMCForTextClassification, XMCTrainer, XMCTrainingArguments
from hf_xmc.labels import Labels
from hf_xmc.text_encoder import set_dropout

from .report import table

logger = logging.getLogger(__name__)

LABELS_PER_DOCUMENT = 5
# Steps, and batches of prediction, between two turns.
STEPS_PER_TURN = 5
BATCHES_PER_TURN = 10

Batch = tuple[torch.Tensor, torch.Tensor]


class BareEncoder:
    """The encoder alone: mean pooling, the sum of the vectors as loss, AdamW in its fastest form.

    Args:
        folder (`str`):
            The encoder.
    """

    def __init__(self, folder: str) -> None:
        # Without dropout, as hf_xmc trains it: with it the limit would be lower.
        config = AutoConfig.from_pretrained(folder)
        set_dropout(config, 0.0)
        self.encoder = AutoModel.from_pretrained(folder, config=config, dtype=torch.float32)
        if getattr(self.encoder, "pooler", None) is not None:
            self.encoder.pooler = None  # nobody reads its output
        self.encoder.train()
        # A learning rate of 0 costs as much as any other and keeps the weights in order.
        self.optimizer = torch.optim.AdamW(self.encoder.parameters(), lr=0.0, fused=True)

    def step(self, batch: Batch) -> None:
        """One step of training."""
        pooled(self.encoder, batch).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Turns(TrainerCallback):
    """Lets the bare encoder do the last batches whenever the trainer has done some, and times both.

    Args:
        bare ([`BareEncoder`]):
            The encoder alone.
        steps (`int`):
            Steps to do.
    """

    class Finished(Exception):
        """Ends a training whose later parts nobody needs."""

    def __init__(self, bare: BareEncoder, steps: int) -> None:
        self.bare, self.steps = bare, steps
        self.batches: list[Batch] = []
        self.trainer_s: list[float] = []
        self.bare_s: list[float] = []
        self.begin = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the clock of the first turn."""
        self.begin = self.begin or time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Changes turns."""
        if len(self.batches) < STEPS_PER_TURN:
            return
        self.trainer_s.append(time.perf_counter() - self.begin)
        start = time.perf_counter()
        for batch in self.batches:
            self.bare.step(batch)
        self.bare_s.append(time.perf_counter() - start)
        self.batches.clear()
        if len(self.trainer_s) * STEPS_PER_TURN >= self.steps:
            raise self.Finished
        self.begin = time.perf_counter()


class ListeningTrainer(XMCTrainer):
    """Trains as ever and keeps the batches for the other side."""

    turns: Turns

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """One step; see [`~transformers.Trainer.training_step`]."""
        self.turns.batches.append((inputs["input_ids"], inputs["attention_mask"]))
        return super().training_step(model, inputs, *args, **kwargs)


def fine_tuning(
    encoder: str, num_labels: int, *, tokens: int, batch_size: int, steps: int, threads: int
) -> dict[str, Any]:
    """Documents per second of fine-tuning at the level of the labels, and of the bare encoder.

    Args:
        encoder (`str`):
            Folder of the encoder.
        num_labels (`int`):
            Labels; those of a document are random, and so is its text.
        tokens (`int`):
            Tokens of every document.
        batch_size (`int`):
            Documents per step.
        steps (`int`):
            Steps of the trainer which are measured, after one turn of warming up.
        threads (`int`):
            Threads of everything.
    """
    dataset = random_documents(encoder, num_labels, tokens, (steps + STEPS_PER_TURN) * batch_size)
    turns = Turns(BareEncoder(encoder), steps + STEPS_PER_TURN)
    with tempfile.TemporaryDirectory(prefix="hf-xmc-speed-") as folder:
        arguments = XMCTrainingArguments(
            folder,
            method="xr-transformer",
            per_device_train_batch_size=batch_size,
            encoder_max_length=tokens,
            # The level above is bootstrapped only: it gives the labels the shortlists which they have in earnest.
            level_indices=[-2, -1],
            level_steps=[0, steps + STEPS_PER_TURN],
            num_threads=threads,
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            report_to="none",
        )
        labels = Labels([str(label) for label in range(num_labels)])
        model = XMCForTextClassification.from_encoder(encoder, dropout=0.0, labels=labels, max_length=tokens)
        trainer = ListeningTrainer(model=model, args=arguments, train_dataset=dataset, callbacks=[turns])
        trainer.turns = turns
        try:
            trainer.train()
        except Turns.Finished:
            pass
    return in_turns(turns.bare_s[1:], turns.trainer_s[1:], STEPS_PER_TURN * batch_size)


def prediction(folder: Path, data: Path, *, documents: int, batch_size: int, threads: int) -> dict[str, Any]:
    """Documents per second of a model from text to labels, and of its encoder alone on ready batches.

    Args:
        folder (`Path`):
            The trained model.
        data (`Path`):
            Folder with ``test.parquet``.
        documents (`int`):
            Documents to predict.
        batch_size (`int`):
            Documents per batch of the encoder.
        threads (`int`):
            Threads of everything.
    """
    model = XMCForTextClassification.from_pretrained(folder)
    model.eval()
    texts = pq.read_table(data / "test.parquet", columns=["text"])["text"].slice(0, documents).to_pylist()
    part = BATCHES_PER_TURN * batch_size
    turns = [texts[start : start + part] for start in range(0, len(texts) - part + 1, part)]
    if not turns:
        raise ValueError(f"{documents} documents are fewer than the {part} of one turn: raise `--documents`.")
    bare_s, whole_s = [], []
    for turn in [turns[0], *turns]:
        batches = sorted_batches(model, turn, batch_size)
        start = time.perf_counter()
        with torch.inference_mode():
            for batch in batches:
                pooled(model.encoder, batch)
        bare_s.append(time.perf_counter() - start)
        start = time.perf_counter()
        model.predict(turn, top_k=10, num_threads=threads)
        whole_s.append(time.perf_counter() - start)
    return in_turns(bare_s[1:], whole_s[1:], part)


def in_turns(bare_s: list[float], own_s: list[float], documents: int) -> dict[str, Any]:
    """Medians over the turns; the ratio is that of the speeds within a turn."""
    ratios = [bare / own for bare, own in zip(bare_s, own_s, strict=True)]
    return {
        "bare_documents_per_s": documents / statistics.median(bare_s),
        "documents_per_s": documents / statistics.median(own_s),
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "documents_per_turn": documents,
        # Of the process so far: label sets have to be measured in ascending order.
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "bare_s": bare_s,
        "own_s": own_s,
    }


def pooled(encoder: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Mean of the states of each document's tokens."""
    ids, mask = batch
    states = encoder(input_ids=ids, attention_mask=mask)[0]
    return torch.einsum("bt,btd->bd", mask / mask.sum(dim=1, keepdim=True), states)


def random_documents(encoder: str, num_labels: int, tokens: int, documents: int) -> Dataset:
    """Documents of random words, all longer than `tokens`, with random labels."""
    vocabulary = AutoTokenizer.from_pretrained(encoder).get_vocab()
    words = np.array(sorted(word for word in vocabulary if word.isascii() and word.isalpha() and len(word) > 2))
    generator = np.random.default_rng(0)
    texts = [" ".join(row) for row in generator.choice(words, (documents, tokens))]
    labels = [
        [str(label) for label in generator.choice(num_labels, LABELS_PER_DOCUMENT, replace=False)]
        for _ in range(documents)
    ]
    return Dataset.from_dict({"text": texts, "labels": labels})


def sorted_batches(model: XMCForTextClassification, texts: list[str], batch_size: int) -> list[Batch]:
    """Batches of documents of similar length, padded to the longest."""
    limit = model.config.max_length
    ids = model.tokenizer(texts, truncation=True, max_length=limit)["input_ids"]
    ids.sort(key=len, reverse=True)
    padded = [
        model.tokenizer.pad({"input_ids": ids[start : start + batch_size]}, return_tensors="pt")
        for start in range(0, len(ids), batch_size)
    ]
    return [(batch["input_ids"], batch["attention_mask"]) for batch in padded]


def format_speed(measured: dict[str, dict[str, Any]]) -> str:
    """Markdown of what was measured."""
    head = ["", "bare encoder, docs/s", "hf-xmc, docs/s", "ratio", "range", "peak memory, GB"]
    rows = []
    for name, answer in measured.items():
        low, high = answer["ratio_range"]
        speeds = [f"{answer[key]:,.1f}" for key in ("bare_documents_per_s", "documents_per_s")]
        spread = f"{low:.3f} to {high:.3f}"
        rows.append([name, *speeds, f"{answer['ratio']:.3f}", spread, f"{answer['peak_gb']:.1f}"])
    return "\n".join(table(head, rows))
