"""Small data and a small model for all tests."""

from __future__ import annotations

import dataclasses
import gc
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

# Some virtual machines announce AMX and end a program that uses it. oneDNN reads this when torch first needs it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import numpy as np
import pytest
from datasets import Dataset
from filelock import FileLock
from local_hub import LocalHub

if os.environ.get("NUMBA_BOUNDSCHECK") == "1":
    from checked_lanes import use_checked_lanes

    use_checked_lanes()

NUM_LABELS = 60
NUM_FILLERS = 40

# Options that give 60 labels a tree of the levels 4, 16 and 60.
THREE_LEVELS = {"tree_clustering": "kmeans", "tree_branching": 4, "tree_max_leaf_size": 4, "tree_max_depth": 3}

# Texts of the labels of `make_documents` in words that the tokenizer knows.
TOPICS = {f"label {label:02d}": f"topic{label:02d}" for label in range(NUM_LABELS)}

# Loads a model of the Hub from the cache. With peft, transformers also looks for adapters, and online.
OFFLINE: dict[str, Any] = {"local_files_only": True, "adapter_kwargs": {"local_files_only": True}}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts files with slow tests first, so that no worker starts one of them when the others have finished."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pairs(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of one value of each list, such that any two values of different lists are together in a row."""
    rows = list(product(*(range(len(values)) for values in choices)))
    covered = {row: set(combinations(enumerate(row), 2)) for row in rows}
    missing = set().union(*covered.values())
    result = []
    while missing:
        best = max(rows, key=lambda row: len(covered[row] & missing))
        missing -= covered[best]
        result.append(tuple(values[index] for values, index in zip(choices, best, strict=True)))
    return result


def refused(match: str, call: Callable[..., Any], /, *arguments: Any, error: Any = ValueError, **options: Any) -> None:
    """Checks that a call is refused by an error that names something, such as an option or a file."""
    with pytest.raises(error, match=match):
        call(*arguments, **options)


def refused_each(call: Callable[..., Any], /, error: Any = ValueError, **options: Any) -> None:
    """Checks that a call is refused with each of some options alone, by an error that names it."""
    for name, value in options.items():
        refused(name, call, error=error, **{name: value})


def command_fails(capsys: Any, name: str, argv: Sequence[str]) -> str:
    """Checks that a command ends with an error that names something; returns what it says."""
    from hf_xmc.cli.main import main

    capsys.readouterr()
    assert main(list(argv)) == 1
    error = capsys.readouterr().err
    assert name in error and "Traceback" not in error
    return error


def make_documents(count: int, seed: int = 0) -> Dataset:
    """Documents that name their labels: the word `topicNN` stands for the label `label NN`."""
    generator = np.random.default_rng(seed)
    texts, labels = [], []
    for _ in range(count):
        chosen = generator.choice(NUM_LABELS, size=generator.integers(1, 4), replace=False)
        filler = generator.choice(NUM_FILLERS, size=6)
        words = [f"topic{label:02d}" for label in chosen] + [f"word{word}" for word in filler]
        texts.append(" ".join(generator.permutation(words)))
        labels.append([f"label {label:02d}" for label in chosen])
    return Dataset.from_dict({"text": texts, "labels": labels})


def make_vectors(count: int, seed: int = 0) -> Dataset:
    """The same as vectors: feature NN, of a length other than 1, stands for the label NN."""
    generator = np.random.default_rng(seed)
    ids, values, labels = [], [], []
    for _ in range(count):
        chosen = generator.choice(NUM_LABELS, size=generator.integers(1, 4), replace=False)
        ids.append(sorted(chosen.tolist()))
        values.append([3.0] * len(chosen))
        labels.append(chosen.tolist())
    return Dataset.from_dict({"feature_ids": ids, "feature_values": values, "labels": labels})


def make_tokenizer(plain: bool = False) -> Any:
    """
    A tokenizer of the words of `make_documents`. The padding token is 0.

    It adds [CLS] and [SEP] to a text. A `plain` one adds nothing and has no padding token.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    words = [f"topic{label:02d}" for label in range(NUM_LABELS)] + [f"word{word}" for word in range(NUM_FILLERS)]
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    if plain:
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", model_max_length=64)
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names)


# Options of each method with an encoder that make a small model of 60 labels.
SMALL_METHODS: dict[str, dict[str, Any]] = {
    "xr-transformer": {"level_indices": [1, 2, 3], "level_negatives": ["both"], **THREE_LEVELS},
    "x-transformer": {
        "level_indices": [1],
        "tree_max_leaf_size": 8,
        "ranker_train_beam_size": 3,
        "ranker_beam_size": 4,
    },
    # Two levels although the labels are few; a beam that leaves clusters out.
    "lightxml": {
        "level_indices": [1, 2],
        "level_beam_size": [2],
        "encoder_pooling_layers": 2,
        "tree_max_leaf_size": 8,
    },
    "aplc-xlnet": {"level_indices": [1, 2], "tree_shares": [0.4, 0.3, 0.3]},
}
# Fields of `LevelArguments` that are not options, by method.
SMALL_SETTINGS: dict[str, dict[str, Any]] = {"lightxml": {"bottleneck": 16, "swa_steps": 2}}


def encoder_arguments(
    folder: Path, method: str = "xr-transformer", level_settings: dict[str, Any] | None = None, **options: Any
) -> Any:
    """
    Options of a short training of `tiny_encoder`, by default on a tree of three levels.

    `level_settings` are fields of `LevelArguments` that are not options; outside of tests the preset sets them.
    """
    from hf_xmc import XMCTrainingArguments

    settings = {**SMALL_SETTINGS.get(method, {}), **(level_settings or {})}

    class Arguments(XMCTrainingArguments):
        def make_level_arguments(self) -> Any:
            return dataclasses.replace(super().make_level_arguments(), **settings)

    defaults: dict[str, Any] = {
        "method": method,
        "encoder_max_length": 16,
        "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 64,
        "level_steps": [4],
        "level_learning_rate": [1e-3],
        "level_head_learning_rate": [1e-2],
        "num_threads": 1,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
    }
    return Arguments(str(folder), **{**defaults, **SMALL_METHODS[method], **options})


@pytest.fixture(scope="module")
def hub() -> Iterator[LocalHub]:
    """A Hub on this machine, empty at first."""
    hub = LocalHub()
    yield hub
    hub.close()


@pytest.fixture(scope="session")
def documents() -> Dataset:
    """Training documents."""
    return make_documents(600)


@pytest.fixture(scope="session")
def make_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], Any]], Path]:
    """Folder of a name, filled by a function: once for all workers of a test run. Tests must not write into it."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def make(name: str, fill: Callable[[Path], Any]) -> Path:
        folder, done = root / f"shared-{name}", root / f"shared-{name}.done"
        with FileLock(root / f"shared-{name}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                fill(folder)
                done.touch()
        return folder

    return make


def train_linear(
    folder: Path,
    data: Dataset,
    label_texts: dict[str, str] | None = None,
    labels_seen_only: bool = False,
    **options: Any,
) -> Any:
    """Trains a linear model into a folder."""
    from hf_xmc import XMCTrainer, XMCTrainingArguments

    args = XMCTrainingArguments(str(folder), disable_tqdm=True, use_cpu=True, **options)
    trainer = XMCTrainer(args=args, train_dataset=data, label_texts=label_texts, labels_seen_only=labels_seen_only)
    trainer.train()
    return trainer


@pytest.fixture(scope="session")
def model_folder(documents: Dataset, make_once: Any) -> Path:
    """Folder of a model trained on `documents`."""
    return make_once("model", lambda folder: train_linear(folder, documents))


@pytest.fixture(scope="session")
def parts_model_folder(make_once: Any) -> Path:
    """Folder of a linear model of all parts, with a scorer fitted on a tenth of 2,000 documents."""
    options = {"similar_documents": True, "method": "xr-linear"}
    return make_once("parts-model", lambda folder: train_linear(folder, make_documents(2000), **options))


@pytest.fixture(scope="session")
def vector_model_folder(make_once: Any) -> Path:
    """Folder of a model trained on vectors."""
    return make_once("vector-model", lambda folder: train_linear(folder, make_vectors(600)))


def save_tiny_encoder(folder: Path) -> None:
    """Writes a random BERT with a tokenizer of the words of `make_documents`."""
    import torch
    from transformers import BertConfig, BertModel

    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertModel(config).save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_encoder(make_once: Any) -> Path:
    """Folder of a tiny encoder."""
    return make_once("encoder", save_tiny_encoder)


@pytest.fixture(scope="session")
def encoder_model_folder(documents: Dataset, tiny_encoder: Path, make_once: Any) -> Path:
    """Folder of a model with an encoder, heads of three levels and a ranker, trained on `documents`."""
    from hf_xmc import XMCTrainer

    def fill(folder: Path) -> None:
        options = {"level_steps": [10, 10, 40], "per_device_train_batch_size": 32}
        args = encoder_arguments(folder, save_strategy="no", **options)
        XMCTrainer(model=tiny_encoder, args=args, train_dataset=documents).train()

    return make_once("encoder-model", fill)


@pytest.fixture(scope="session")
def x_transformer_folder(tiny_encoder: Path, make_once: Any) -> Path:
    """Folder of a model whose heads find the clusters in which a ranker ranks labels."""
    from hf_xmc import XMCTrainer

    def fill(folder: Path) -> None:
        options = {"level_steps": [30], "per_device_train_batch_size": 32, "save_strategy": "no"}
        args = encoder_arguments(folder, "x-transformer", **options)
        XMCTrainer(model=tiny_encoder, args=args, train_dataset=make_documents(300, seed=5)).train()

    return make_once("x-transformer-model", fill)


@pytest.fixture(scope="session")
def other_model_folder(make_once: Any) -> Path:
    """Folder of a linear model with the labels of `model_folder` and other features."""
    options: dict[str, Any] = {"method": "parabel", "tfidf_analyzer": "char_wb", "tfidf_ngram_range": [2, 3]}
    data = make_documents(300, seed=9)
    return make_once("other-model", lambda folder: train_linear(folder, data, num_threads=1, **options))


@pytest.fixture(scope="session")
def ensemble_folder(model_folder: Path, other_model_folder: Path, encoder_model_folder: Path, make_once: Any) -> Path:
    """Folder of an ensemble of three models."""
    from hf_xmc import XMCEnsemble

    def fill(folder: Path) -> None:
        members = [model_folder, other_model_folder, encoder_model_folder]
        XMCEnsemble.from_members(members, weights=[2, 1, 1]).save_pretrained(folder)

    return make_once("ensemble", fill)


@pytest.fixture(scope="session")
def few() -> Dataset:
    """Fewer documents than `documents`: ten batches of 16 or five of 32."""
    return make_documents(160, seed=7)


@pytest.fixture
def train(tiny_encoder: Path, few: Dataset, tmp_path: Path) -> Any:
    """Trains in `tmp_path`. Keywords that are not arguments of the trainer are options."""
    from hf_xmc import XMCTrainer

    def run(
        resume=None,
        folder=tmp_path,
        model=tiny_encoder,
        data=few,
        eval_dataset=None,
        callbacks=(),
        label_texts=None,
        **options,
    ):
        trainer = XMCTrainer(
            model=model,
            args=encoder_arguments(folder, **options),
            train_dataset=data,
            eval_dataset=eval_dataset,
            callbacks=list(callbacks),
            label_texts=label_texts,
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return run


@pytest.fixture(scope="module")
def fast_garbage_collection() -> Any:
    """Keeps the garbage collections of trainings from looking through all that is loaded already."""
    gc.freeze()
    yield
    gc.unfreeze()
