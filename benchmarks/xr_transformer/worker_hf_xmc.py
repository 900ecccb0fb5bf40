"""hf_xmc: its XR-Transformer as a user trains and loads it."""

from __future__ import annotations

import functools
import json
import shutil
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from benchmarks.linear.worker_common import load_matrix, pad_ids

from .worker_common import LABEL_TEXTS_FILE, Options, Predict, read_texts, serve

WARM_UP_DOCUMENTS = 100
WARM_UP_STEPS = 2


# ---- The calls to hf_xmc: everything that depends on its interface is in these two functions. ----


def fit(
    texts: list[str],
    labels: list[list[str]],
    model: str,
    threads: int,
    options: Options,
    label_texts: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Trains from texts, label names and, where an option asks for them, texts of labels, and saves."""
    from datasets import Dataset
    from transformers import TrainerCallback

    from hf_xmc import XMCTrainer, XMCTrainingArguments

    # Further options may train other levels, with `level_steps` for each.
    steps = {} if "level_steps" in options.hf_xmc else {"max_steps": options.steps}
    arguments = XMCTrainingArguments(
        model,
        method="xr-transformer",
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        encoder_max_length=options.max_length,
        num_threads=threads,
        seed=0,
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        report_to="none",
        **{"level_indices": -1, **steps, **options.hf_xmc},
    )
    if np.sum(arguments.level_steps or arguments.max_steps) != options.steps:
        raise ValueError(f"`level_steps={arguments.level_steps}` are not the {options.steps} steps of the others.")
    parts: defaultdict[str, float] = defaultdict(float)

    class Listener(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            for name, value in logs.items():
                if name.endswith("_seconds") and not name.startswith("train_"):
                    parts[name.removesuffix("_seconds")] += value

    trainer = XMCTrainer(
        model=options.encoder,
        args=arguments,
        train_dataset=Dataset.from_dict({"text": texts, "labels": labels}),
        callbacks=[Listener()],
        label_texts=label_texts,
    )
    runtime = trainer.train().metrics["train_runtime"]
    return {
        "parts_s": {**parts, "fine-tuning": runtime - sum(parts.values())},
        "level_steps": arguments.level_steps or arguments.max_steps,
        "tree": trainer.model.config.level_sizes,
    }


def load(model: str, threads: int, options: Options) -> Predict:
    """Loads the model as a user does."""
    from hf_xmc import XMCForTextClassification

    loaded = XMCForTextClassification.from_pretrained(model)

    def predict(texts: list[str], vectors: sp.csr_matrix, top_k: int) -> list[list[tuple[str, float]]]:
        return loaded.predict(texts, top_k=top_k, num_threads=threads)

    return predict


# ---- The rest follows the protocol. ----


def setup(work: str, model: str, threads: int, options: Options) -> None:
    """Fills the compiler's cache on disk with a small training and prediction; the report says how long that took."""
    texts, folder = read_texts(work, "trn")[:WARM_UP_DOCUMENTS], model + ".warm-up"
    shutil.rmtree(folder, ignore_errors=True)
    small = replace(options, steps=WARM_UP_STEPS, hf_xmc={})
    fit(texts, label_names(work)[:WARM_UP_DOCUMENTS], folder, threads, small)
    predict = load(folder, threads, options)
    predict(texts, sp.csr_matrix((len(texts), 0)), 20)
    predict(texts[:1], sp.csr_matrix((1, 0)), 10)
    shutil.rmtree(folder)


def train(work: str, model: str, threads: int, options: Options) -> dict[str, Any]:
    """Trains on the texts of the training split."""
    label_texts = None
    if options.hf_xmc.get("label_text_weight"):
        with open(f"{work}/{LABEL_TEXTS_FILE}", encoding="utf-8") as file:
            label_texts = json.load(file)
    return fit(read_texts(work, "trn"), label_names(work), model, threads, options, label_texts)


def label_names(work: str) -> list[list[str]]:
    """Names of the labels of each training document."""
    names, labels = all_names(work), load_matrix(work, "Y.trn")
    return [[names[label] for label in row.tolist()] for row in np.split(labels.indices, labels.indptr[1:-1])]


@functools.cache
def all_names(work: str) -> list[str]:
    """Names of the labels by id."""
    with open(f"{work}/labels.json", encoding="utf-8") as file:
        return json.load(file)


@functools.cache
def all_ids(work: str) -> dict[str, int]:
    """Ids of the labels by name."""
    return {name: label for label, name in enumerate(all_names(work))}


def top_ids(result: list[list[tuple[str, float]]], work: str, top_k: int) -> np.ndarray:
    """Drops the scores, which come best first, and looks up the names."""
    ids = all_ids(work)
    return pad_ids([[ids[name] for name, _ in row] for row in result], top_k)


if __name__ == "__main__":
    serve("hf_xmc.modeling_xmc", train=train, load=load, top_ids=top_ids, setup=setup)
