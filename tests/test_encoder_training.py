"""Training of models with an encoder: learning, saving, resuming, early stopping, options and errors."""

from __future__ import annotations

import gc
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import encoder_arguments, make_documents, make_tokenizer, make_vectors
from datasets import Dataset
from safetensors.torch import load_file
from small_problems import same_weights
from transformers import EarlyStoppingCallback, GPT2Config, GPT2Model, TrainerCallback, pipeline

from hf_xmc import LabelTree, XMCForTextClassification, XMCTrainer
from hf_xmc.cli.main import main
from hf_xmc.training import encoder_training

PREDICT_WITH = ["ranker", "heads", "both"]
LEVELS = [4, 16, 60]
TEXTS = make_documents(12, seed=11)["text"][:]


@pytest.fixture(scope="module", autouse=True)
def fast_garbage_collection():
    """Training collects garbage; what is there already need not be looked through every time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def few():
    """Fewer documents than `documents`: ten batches of 16 or five of 32."""
    return make_documents(160, seed=7)


@pytest.fixture
def train(tiny_encoder, few, tmp_path):
    """Trains into `tmp_path`; what is not an argument of the trainer is an option."""

    def run(resume=None, folder=tmp_path, model=tiny_encoder, data=few, eval_dataset=None, callbacks=(), **options):
        trainer = XMCTrainer(
            model=model,
            args=encoder_arguments(folder, **options),
            train_dataset=data,
            eval_dataset=eval_dataset,
            callbacks=list(callbacks),
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return run


def tensors_of(folder):
    return load_file(Path(folder) / "model.safetensors")


def assert_same_model(first, second):
    """That the models in two folders are equal to the last bit."""
    weights, others = tensors_of(first), tensors_of(second)
    assert weights.keys() == others.keys()
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []
    one, other = (XMCForTextClassification.from_pretrained(folder) for folder in (first, second))
    assert (one.ranker is None) == (other.ranker is None)
    assert one.ranker is None or same_weights(one.ranker, other.ranker)
    assert (Path(first) / "config.json").read_text() == (Path(second) / "config.json").read_text()


# ---- Learning, saving, predicting ----


@pytest.mark.parametrize("predict_with, least", [("ranker", 0.9), ("heads", 0.3), ("both", 0.9)])
def test_learns(encoder_model_folder, tmp_path, predict_with, least):
    # One of 60 labels at random is right for one document in thirty.
    model = XMCForTextClassification.from_pretrained(encoder_model_folder)
    model.config.predict_with = predict_with
    trainer = XMCTrainer(model=model, args=encoder_arguments(tmp_path), eval_dataset=make_documents(200, seed=1))
    assert trainer.evaluate()["eval_P@1"] > least


@pytest.mark.parametrize("loss", ["bce", "squared_hinge"])
def test_fine_tuning_makes_the_heads_better(train, loss, tmp_path):
    data, evaluation = make_documents(400, seed=12), make_documents(200, seed=1)
    results = []
    for steps in (0, 20):
        options = {"level_steps": [steps], "per_device_train_batch_size": 32, "level_loss": loss}
        trainer = train(folder=tmp_path / str(steps), data=data, predict_with="heads", save_strategy="no", **options)
        results.append(trainer.evaluate(evaluation)["eval_R@5"])
    frozen, tuned = results
    assert tuned > frozen + 0.05


def test_what_is_saved_predicts_the_same(train, tmp_path):
    trainer = train(eval_dataset=make_documents(30, seed=2))
    loaded = XMCForTextClassification.from_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path / "copy")
    copy = XMCForTextClassification.from_pretrained(tmp_path / "copy")
    for kind in PREDICT_WITH:
        expected = trainer.model.predict(TEXTS, predict_with=kind)
        assert loaded.predict(TEXTS, predict_with=kind) == expected
        assert copy.predict(TEXTS, predict_with=kind) == expected
    assert trainer.model.label_tree.level_sizes == LEVELS
    assert (loaded.config.head_levels, loaded.config.trained_levels) == ([1, 2, 3], 3)
    assert_same_model(tmp_path, tmp_path / "copy")


def test_pipeline(encoder_model_folder):
    tag = pipeline("extreme-text-classification", model=str(encoder_model_folder))
    model = XMCForTextClassification.from_pretrained(encoder_model_folder)
    expected = model.predict(TEXTS, top_k=3)
    for batch_size in (1, 5):
        found = tag(TEXTS, top_k=3, batch_size=batch_size)
        for row, pairs in zip(found, expected, strict=True):
            assert [entry["label"] for entry in row] == [label for label, _ in pairs]
            assert [entry["score"] for entry in row] == pytest.approx([score for _, score in pairs], abs=1e-5)
    assert len(tag("", top_k=3)) == 3


def test_commands(encoder_model_folder, tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    output = tmp_path / "labels.jsonl"
    arguments = [str(encoder_model_folder), str(tmp_path / "texts.txt"), "--output", str(output), "--top-k", "3"]
    assert main(["predict", *arguments]) == 0
    found = [json.loads(line)["labels"] for line in output.read_text().splitlines()]
    expected = XMCForTextClassification.from_pretrained(encoder_model_folder).predict(TEXTS, top_k=3)
    assert [[entry["label"] for entry in row] for row in found] == [[label for label, _ in row] for row in expected]


def test_the_command_that_trains(tiny_encoder, tmp_path, few):
    few.to_parquet(tmp_path / "train.parquet")
    options = vars(encoder_arguments(tmp_path / "unused"))
    names = ["method", "tree_clustering", "tree_branching", "tree_max_leaf_size", "tree_max_depth", "use_cpu"]
    recipe = {name: options[name] for name in names} | {
        "dataset": str(tmp_path / "train.parquet"),
        "encoder_name": str(tiny_encoder),
        "encoder_max_length": 16,
        "output_dir": str(tmp_path / "model"),
        "level_steps": [1, 0, 2],
        "level_indices": [1, 2, 3],
        "level_negatives": "tfn",
        "disable_tqdm": True,
        "report_to": "none",
    }
    (tmp_path / "recipe.yaml").write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in recipe.items()))
    assert main(["train", "--config", str(tmp_path / "recipe.yaml")]) == 0
    saved = json.loads((tmp_path / "model" / "training_args.json").read_text())
    assert (saved["level_steps"], saved["level_negatives"]) == ([1, 0, 2], ["tfn"])
    assert XMCForTextClassification.from_pretrained(tmp_path / "model").config.head_ranking == "path"


def test_logs(train):
    trainer = train(level_steps=[3, 2, 4], logging_steps=1, level_warmup=0.0)
    history = trainer.state.log_history
    steps = [entry for entry in history if "loss" in entry]
    assert [entry["level"] for entry in steps] == [1] * 3 + [2] * 2 + [3] * 4
    assert [entry["step"] for entry in steps] == list(range(1, 10))
    assert all(np.isfinite(entry["loss"]) and entry["loss"] > 0 for entry in steps)
    assert all(entry["documents_per_second"] > 0 for entry in steps)
    # One step rises to the highest rate, from which the others fall to 0.
    rates = [1e-3 * min(1.0, (n - i) / max(1, n - 1)) for n in (3, 2, 4) for i in range(n)]
    assert [entry["learning_rate"] for entry in steps] == pytest.approx(rates)
    assert [entry["head_learning_rate"] for entry in steps] == pytest.approx([10 * rate for rate in rates])
    stages = {name.removesuffix("_seconds") for entry in history for name in entry if name.endswith("_seconds")}
    assert {"labels", "features", "tree", "tokens", "embed", "ranker", "save"} < stages
    assert {f"level {level} {stage}" for level in (1, 2, 3) for stage in ("shortlist", "bootstrap")} < stages


def test_gradient_accumulation_is_a_larger_batch(train, tiny_encoder, tmp_path):
    encoder = tmp_path / "encoder"
    shutil.copytree(tiny_encoder, encoder)
    config = json.loads((encoder / "config.json").read_text())
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (encoder / "config.json").write_text(json.dumps(config | no_dropout))
    found = []
    for size, accumulated in ((16, 1), (4, 4)):
        trainer = train(
            folder=tmp_path / str(size),
            model=encoder,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulated,
            train_sampling_strategy="sequential",
            level_dropout=0.0,
            save_strategy="no",
            predict_with="heads",
        )
        assert trainer.state.global_step == 12
        found.append(tensors_of(tmp_path / str(size)))
    start = load_file(encoder / "model.safetensors")
    for name, expected in found[0].items():
        # Rounding may turn the sign of a tiny gradient, and with it a step of Adam: single numbers may differ.
        moved = expected - start.get(name.removeprefix("encoder."), torch.zeros(()))
        assert (found[1][name] - expected).norm() <= 0.02 * moved.norm() + 1e-4, name
    assert not torch.equal(found[0]["encoder.embeddings.LayerNorm.bias"], start["embeddings.LayerNorm.bias"])


# ---- Resuming ----

# An epoch has five steps: checkpoints are within epochs and at their ends, within levels and at their ends.
# The beam is so narrow that shortlists leave nodes out.
RESUMED = {"level_steps": [3, 4, 5], "level_beam_size": [2], "save_steps": 2, "per_device_train_batch_size": 32}


class Killed(Exception):
    pass


class KillAt(TrainerCallback):
    """Ends the process at an event of one step."""

    def __init__(self, event, step):
        self.step = step
        setattr(self, event, self._kill)

    def _kill(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Killed


def kill_in(name, when=lambda *arguments: True):
    """Ends the process in a function that `encoder_training` calls, where `when` says so."""

    def prepare(monkeypatch):
        function = getattr(encoder_training, name)

        def replacement(*arguments):
            if when(*arguments):
                raise Killed
            return function(*arguments)

        monkeypatch.setattr(encoder_training, name, replacement)

    return prepare


def kill_at(event, step):
    return lambda monkeypatch: KillAt(event, step)


def kill_while_writing(step):
    """Leaves a checkpoint that lacks its last files."""

    def prepare(monkeypatch):
        save = XMCTrainer._save_rng_state

        def replacement(self, folder):
            if folder.endswith(f"checkpoint-{step}"):
                raise Killed
            save(self, folder)

        monkeypatch.setattr(XMCTrainer, "_save_rng_state", replacement)

    return prepare


def kill_while_saving(monkeypatch):
    """Ends the process when the weights of the finished model, not those of a checkpoint, are to be written."""
    from transformers import modeling_utils

    write = modeling_utils.safe_save_file

    def replacement(tensors, path, *arguments, **options):
        if "checkpoint-" not in str(path):
            raise Killed
        write(tensors, path, *arguments, **options)

    monkeypatch.setattr(modeling_utils, "safe_save_file", replacement)


KILLS = {
    "in the first level": (kill_at("on_step_end", 3), 2),
    "in a later level and epoch": (kill_at("on_step_end", 7), 6),
    "late in an epoch": (kill_at("on_step_end", 10), 8),
    "in the last level": (kill_at("on_step_end", 12), 10),
    "at a level's end": (kill_at("on_save", 3), 3),
    "before anything was saved": (kill_at("on_step_end", 1), None),
    "while a checkpoint is written": (kill_while_writing(6), 4),
    "in a shortlist": (kill_in("make_level_data", lambda model, counts, index, *rest: index == 2), 7),
    "in a bootstrap": (kill_in("bootstrap_head", lambda head, data, *rest: data.level == 2), 3),
    "in the ranker": (kill_in("add_ranker"), 12),
    "while the model is saved": (kill_while_saving, 12),
}


@pytest.fixture(scope="module")
def uninterrupted(tiny_encoder, few, tmp_path_factory):
    """Folders of runs that nothing interrupted, by what sets them apart and by options."""
    folders = {}

    def get(what="", **options):
        key = what + json.dumps(options, sort_keys=True)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("uninterrupted")
            args = encoder_arguments(folders[key], **{**RESUMED, "save_strategy": "no", **options})
            XMCTrainer(model=tiny_encoder, args=args, train_dataset=few).train()
        return folders[key]

    return get


def kill(train, monkeypatch, prepare, **options):
    """A run that ends where `prepare` arranges it."""
    with monkeypatch.context() as patch:
        callback = prepare(patch)
        with pytest.raises(Killed):
            train(callbacks=[callback] if callback else [], **{**RESUMED, **options})


def complete_checkpoints(folder):
    """Numbers of the checkpoints in a folder that are complete."""
    return sorted(int(path.parent.name.split("-")[1]) for path in folder.glob("checkpoint-*/trainer_state.json"))


@pytest.mark.parametrize("point", KILLS)
def test_resuming_gives_the_model_of_an_uninterrupted_run(train, uninterrupted, tmp_path, monkeypatch, point):
    prepare, last = KILLS[point]
    kill(train, monkeypatch, prepare)
    assert complete_checkpoints(tmp_path)[-1:] == ([] if last is None else [last])
    trainer = train(resume=True, **RESUMED)
    assert_same_model(tmp_path, uninterrupted())
    # Predictions of what the trainer holds are those of what it saved.
    assert trainer.model.predict(TEXTS) == XMCForTextClassification.from_pretrained(tmp_path).predict(TEXTS)


@pytest.mark.parametrize(
    "options",
    [
        {"train_sampling_strategy": "random"},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 16},
        {"level_bootstrap": False, "level_negatives": ["tfn"], "level_loss": "squared_hinge"},
        {"level_steps": [0, 7, 5]},
        {"level_indices": (1, 3), "level_steps": [4, 8]},
    ],
    ids=str,
)
def test_resuming_with_other_options(train, uninterrupted, tmp_path, monkeypatch, options):
    kill(train, monkeypatch, kill_at("on_step_end", 7), **options)
    train(resume=True, **{**RESUMED, **options})
    assert_same_model(tmp_path, uninterrupted(**options))


def test_resuming_with_heads_of_which_a_step_touches_few_rows(train, uninterrupted, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_xmc.heads.SPARSE_ROWS", 20)
    kill(train, monkeypatch, kill_at("on_step_end", 12))
    trainer = train(resume=True, **RESUMED)
    assert [head.sparse for head in trainer.model.heads] == [False, False, True]
    assert_same_model(tmp_path, uninterrupted("sparse gradients"))


def test_resuming_after_a_level_that_ended_early(train, tmp_path, monkeypatch):
    options = {"level_steps": [6, 6, 6], "level_learning_rate": [0.0], "level_head_learning_rate": [0.0]}
    options |= {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "metric_for_best_model": "nDCG@5"}
    evaluation = make_documents(30, seed=2)

    def run(folder, **more):
        return train(
            folder=folder, callbacks=[EarlyStoppingCallback(1)], eval_dataset=evaluation, **{**options, **more}
        )

    whole = run(tmp_path / "whole")
    with monkeypatch.context() as patch:
        kill_in("make_level_data", lambda model, counts, index, *rest: index == 1)(patch)
        with pytest.raises(Killed):
            run(tmp_path / "parts")
    resumed = run(tmp_path / "parts", resume=True)
    assert resumed.state.global_step == whole.state.global_step == 12
    assert levels_of_steps(resumed, first=5) == levels_of_steps(whole, first=5)


KEEP_BEST = {
    "load_best_model_at_end": True,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "eval_dataset": make_documents(20, seed=2),
}


def rank_best(monkeypatch, steps):
    """Makes evaluations after some steps look better than all others."""
    evaluate = XMCTrainer.evaluate

    def replacement(self, *arguments, **options):
        value = 1.0 if self.state.global_step in steps else 0.5
        return {**evaluate(self, *arguments, **options), "eval_nDCG@5": value}

    monkeypatch.setattr(XMCTrainer, "evaluate", replacement)


def test_resuming_finds_the_best_model(train, tmp_path, monkeypatch):
    rank_best(monkeypatch, [6])
    options = {"level_steps": [2, 2, 6], **KEEP_BEST}
    train(folder=tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        kill_in("add_ranker")(patch)
        with pytest.raises(Killed):
            train(folder=tmp_path / "parts", **options)
    train(folder=tmp_path / "parts", resume=True, **options)
    assert_same_model(tmp_path / "parts", tmp_path / "whole")


def test_a_resumed_run_knows_what_went_before(train, tmp_path, monkeypatch):
    options = {"logging_steps": 2, "level_steps": [2, 2, 2]}
    kill(train, monkeypatch, kill_in("add_ranker"), **options)
    trainer = train(resume=True, **{**RESUMED, **options})
    assert trainer.state.global_step == 6
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [2, 4, 6]


def test_a_checkpoint_is_written_once(train, monkeypatch):
    """Also where a level and an epoch end together; what identifies the data is found once, too."""
    calls, written = [], []
    digest = encoder_training.tokens_digest
    monkeypatch.setattr(encoder_training, "tokens_digest", lambda tokens: calls.append(len(tokens)) or digest(tokens))

    class Note(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            written.append(state.global_step)

    train(callbacks=[Note()], **{**RESUMED, "level_steps": [5, 3, 2], "save_steps": 4})
    assert written == [4, 5, 8, 10]
    assert calls == [160]


def test_nothing_to_resume_from(train, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = train(resume=True, level_steps=[1])
    assert "no checkpoint" in caplog.text and str(tmp_path) in caplog.text
    assert trainer.state.global_step == 3


@pytest.fixture(scope="module")
def checkpoint(tiny_encoder, few, tmp_path_factory):
    """A checkpoint in the second level. Read only."""
    folder = tmp_path_factory.mktemp("killed")
    trainer = XMCTrainer(
        model=tiny_encoder,
        args=encoder_arguments(folder, **RESUMED),
        train_dataset=few,
        callbacks=[KillAt("on_step_end", 5)],
    )
    with pytest.raises(Killed):
        trainer.train()
    return folder / "checkpoint-4"


def test_a_checkpoint_holds_no_pickle(checkpoint):
    suffixes = {path.suffix for path in checkpoint.rglob("*") if path.is_file()}
    assert suffixes <= {".json", ".safetensors", ".txt"}


def test_a_checkpoint_may_be_named(train, checkpoint, uninterrupted, tmp_path):
    train(resume=str(checkpoint), **RESUMED)
    assert_same_model(tmp_path, uninterrupted())


def test_a_checkpoint_may_be_named_by_a_path(train, checkpoint):
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        train(resume=checkpoint.parent, **RESUMED)


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_what_is_no_checkpoint(train, tmp_path, name):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of hf_xmc.*checkpoint-"):
        train(resume=str(tmp_path / name), **RESUMED)


OTHER_LABELS = make_documents(160, seed=7).map(lambda row: {"labels": row["labels"][:1]})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"data": make_documents(160, seed=8)}, "documents"),
        ({"data": OTHER_LABELS}, "labels"),
        ({"level_steps": [3, 4, 6]}, "level_steps"),
        ({"level_negatives": ["tfn"]}, "level_negatives"),
        ({"level_indices": [1, 2], "level_steps": [3, 4]}, "level_indices"),
        ({"level_learning_rate": [2e-3]}, "level_learning_rate"),
        ({"seed": 1}, "seed"),
        ({"per_device_train_batch_size": 16}, "batch size"),
        ({"tree_branching": 8}, "tree"),
        ({"encoder_max_length": 12}, "max_length"),
        ({"tfidf_ngram_range": [1, 1]}, "tfidf"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_resuming_another_run(train, checkpoint, tmp_path, change, message):
    with pytest.raises(ValueError, match=f"of another run.*differ.*{message}"):
        train(resume=str(checkpoint), **{**RESUMED, **change})
    assert not (tmp_path / "model.safetensors").exists()


# ---- Steps, levels, stopping ----


def levels_of_steps(trainer, first=1):
    """Level of each logged step."""
    return [entry["level"] for entry in trainer.state.log_history if "loss" in entry and entry["step"] >= first]


def test_a_frozen_encoder(train, tiny_encoder, tmp_path):
    trainer = train(level_epochs=[0], level_steps=None, eval_dataset=make_documents(50, seed=2))
    assert trainer.state.global_step == 0
    start = XMCForTextClassification.from_encoder(tiny_encoder, max_length=16).encoder.state_dict()
    assert all(torch.equal(tensor, start[name]) for name, tensor in trainer.model.encoder.state_dict().items())
    for kind in PREDICT_WITH:
        assert XMCForTextClassification.from_pretrained(tmp_path).predict(
            TEXTS, predict_with=kind
        ) == trainer.model.predict(TEXTS, predict_with=kind)
    assert trainer.evaluate()["eval_P@1"] > 0.5
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("steps", [[0, 0, 3], [3, 0, 2], [2, 2, 0], [0, 3, 0]], ids=str)
def test_levels_without_steps(train, steps, tmp_path):
    trainer = train(level_steps=steps, logging_steps=1)
    assert levels_of_steps(trainer) == [level for level, number in enumerate(steps, start=1) for _ in range(number)]
    assert trainer.model.config.trained_levels == 3
    assert all(head.weight.any() for head in trainer.model.heads)
    assert XMCForTextClassification.from_pretrained(tmp_path).predict(TEXTS) == trainer.model.predict(TEXTS)


@pytest.mark.parametrize(
    "options, levels, sizes",
    [
        ({"level_indices": [1, 3]}, [1, 3], [4, 60]),
        ({"level_indices": None, "level_negatives": None}, [3], [60]),  # what is chosen where nothing is said
    ],
    ids=str,
)
def test_some_levels_only(train, tmp_path, options, levels, sizes):
    trainer = train(level_steps=[2], **options)
    loaded = XMCForTextClassification.from_pretrained(tmp_path)
    assert loaded.config.head_levels == levels and [len(head.bias) for head in loaded.heads] == sizes
    assert loaded.predict(TEXTS, predict_with="heads") == trainer.model.predict(TEXTS, predict_with="heads")


def test_levels_above_the_labels_leave_prediction_to_the_ranker(train, tmp_path):
    trainer = train(level_steps=[2], level_indices=[1, 2], eval_dataset=make_documents(20, seed=2))
    assert trainer.model.config.predict_with == "ranker" and trainer.model.config.head_levels == [1, 2]
    assert XMCForTextClassification.from_pretrained(tmp_path).predict(TEXTS) == trainer.model.predict(TEXTS)
    with pytest.raises(ValueError, match="no trained head for its labels"):
        trainer.model.predict(TEXTS, predict_with="heads")


def test_heads_that_cannot_predict_are_an_error_before_training(train):
    with pytest.raises(ValueError, match="predict_with"):
        train(level_indices=[1, 2], predict_with="heads")


def test_wrong_number_of_values_for_the_levels(train):
    with pytest.raises(ValueError, match="`level_steps` has 2 values, but 3 levels are trained"):
        train(level_steps=[1, 2])


@pytest.mark.parametrize(
    "eval_steps, ends",
    [
        (2, [4, 8, 12]),  # within each level the second evaluation is no better
        (3, [6, 12, 18]),  # it comes with the last step of each level
    ],
)
def test_early_stopping_ends_the_level_and_goes_on(train, eval_steps, ends):
    # Nothing moves, and so nothing gets better.
    trainer = train(
        level_steps=[6],
        level_learning_rate=[0.0],
        level_head_learning_rate=[0.0],
        eval_strategy="steps",
        eval_steps=eval_steps,
        metric_for_best_model="nDCG@5",
        logging_steps=1,
        save_strategy="no",
        eval_dataset=make_documents(30, seed=2),
        callbacks=[EarlyStoppingCallback(1)],
    )
    expected = [level for level, end in enumerate(ends, start=1) for _ in range(end - ([0, *ends])[level - 1])]
    assert levels_of_steps(trainer) == expected
    assert trainer.state.global_step == ends[-1]
    assert trainer.model.config.trained_levels == 3 and trainer.model.ranker is not None


@pytest.mark.parametrize("steps, best", [([2, 2, 6], 8), ([2, 6, 0], 4)], ids=str)
def test_the_best_model_of_the_last_level_is_kept(train, tmp_path, monkeypatch, steps, best):
    rank_best(monkeypatch, [2, best])
    trainer = train(level_steps=steps, **KEEP_BEST)
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    kept, final = tensors_of(tmp_path / f"checkpoint-{best}"), tensors_of(tmp_path)
    last = tensors_of(max(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1])))
    for name in kept:
        if name.startswith(("encoder.", "heads.0")):
            assert torch.equal(kept[name], final[name])
    assert not torch.equal(last["encoder.embeddings.LayerNorm.bias"], final["encoder.embeddings.LayerNorm.bias"])
    # What the trainer holds is what it saved.
    assert all(torch.equal(final[name], tensor) for name, tensor in trainer.model.state_dict().items())


def test_evaluation_between_the_steps_measures_the_level_at_work(train):
    trainer = train(
        level_steps=[2],
        eval_strategy="steps",
        eval_steps=2,
        eval_dataset=make_documents(40, seed=2),
        save_strategy="no",
    )
    measured = [entry for entry in trainer.state.log_history if "eval_P@1" in entry]
    assert [entry["step"] for entry in measured] == [2, 4, 6, 6]
    # Four nodes are easier to tell apart than sixty labels.
    assert measured[0]["eval_R@5"] == 1 and measured[2]["eval_R@5"] < 1


# ---- Ranker and heads ----


def test_refined_tree(train, tmp_path):
    trainer = train(refine_tree=True)
    assert (tmp_path / "ranker_tree.safetensors").is_file()
    loaded = XMCForTextClassification.from_pretrained(tmp_path)
    assert loaded.ranker.tree == trainer.model.ranker.tree != loaded.label_tree == trainer.model.label_tree
    for kind in PREDICT_WITH:
        assert loaded.predict(TEXTS, predict_with=kind) == trainer.model.predict(TEXTS, predict_with=kind)
    assert trainer.evaluate(make_documents(50, seed=2))["eval_P@1"] > 0.5


def test_heads_alone(train, tmp_path, monkeypatch):
    kill_in("add_ranker")(monkeypatch)
    trainer = train(predict_with="heads")
    assert trainer.model.ranker is None and not (tmp_path / "ranker.safetensors").exists()
    loaded = XMCForTextClassification.from_pretrained(tmp_path)
    assert loaded.config.predict_with == "heads" and loaded.predict(TEXTS) == trainer.model.predict(TEXTS)
    with pytest.raises(ValueError, match="no ranker"):
        loaded.predict(TEXTS, predict_with="ranker")
    assert trainer.evaluate(make_documents(50, seed=2))["eval_P@1"] > 0.1


def test_the_share_of_the_heads_is_the_best_on_the_evaluation_set(train):
    evaluation = make_documents(60, seed=2)
    # So few terms that TF-IDF alone does not tell the labels apart.
    trainer = train(level_steps=[10], tfidf_max_features=12, eval_dataset=evaluation)
    chosen = trainer.model.config.heads_share
    results = {}
    for share in range(0, 101, 5):
        trainer.model.config.heads_share = share / 100
        results[share / 100] = trainer.evaluate(evaluation)["eval_nDCG@5"]
    best = max(results.values())
    assert chosen == min(share for share, value in results.items() if value == best)
    assert best > results[0.0] and len(set(results.values())) > 5
    (logged,) = (entry for entry in trainer.state.log_history if "heads_share" in entry)
    assert logged["heads_share"] == chosen and logged["eval_nDCG@5"] == pytest.approx(best)


@pytest.mark.parametrize(
    "options, share",
    [
        ({}, 0.2),
        ({"heads_share": 0.7}, 0.7),
        ({"heads_share": 0.0, "eval_dataset": make_documents(20, seed=2)}, 0.0),
    ],
    ids=["no evaluation set", "given", "given 0"],
)
def test_the_share_of_the_heads(train, tmp_path, options, share):
    train(level_steps=[1], **options)
    assert XMCForTextClassification.from_pretrained(tmp_path).config.heads_share == share


@pytest.mark.parametrize("head_ranking", ["leaf", "path"])
def test_the_score_of_both_is_the_weighted_mean(encoder_model_folder, head_ranking):
    model = XMCForTextClassification.from_pretrained(encoder_model_folder)
    model.config.beam_size, model.config.heads_share, model.config.head_ranking = 0, 0.3, head_ranking
    ranked, own, both = (
        [dict(row) for row in model.predict(TEXTS, top_k=60, predict_with=kind)] for kind in PREDICT_WITH
    )
    for document in range(len(TEXTS)):
        assert len(both[document]) == 60
        for label, score in both[document].items():
            assert score == pytest.approx(0.7 * ranked[document][label] + 0.3 * own[document][label], abs=1e-5)


def test_the_length_of_the_embedding_beside_tfidf(train, tmp_path):
    trainer = train(level_steps=[0], embedding_scale=3.0)
    features = trainer.model.featurize(TEXTS)
    assert np.allclose(np.linalg.norm(trainer.model.ranker_features(features).dense, axis=1), 3, atol=1e-4)
    assert XMCForTextClassification.from_pretrained(tmp_path).predict(TEXTS) == trainer.model.predict(TEXTS)


def test_vectors_are_kept_for_a_later_run(train, tmp_path, monkeypatch):
    calls = []
    embed = XMCForTextClassification.embed
    monkeypatch.setattr(
        XMCForTextClassification, "embed", lambda self, *rest: calls.append(len(rest[0])) or embed(self, *rest)
    )
    for run in ("first", "second"):
        train(folder=tmp_path / run, level_steps=[2], embedding_cache=str(tmp_path / "cache"))
    assert calls == [160] * 4  # before each level and for the ranker; the second run finds them all
    assert_same_model(tmp_path / "first", tmp_path / "second")


# ---- Data ----


def test_labels_that_only_the_evaluation_set_has(train):
    rows = make_documents(30, seed=2)
    unseen = rows.map(lambda row: {"labels": [*row["labels"], "never seen"]})
    trainer = train(level_steps=[2], eval_strategy="steps", eval_steps=2, eval_dataset=unseen)
    final = trainer.state.log_history[-1]
    assert 0 < final["eval_R@10"] < 1 and final["eval_P@1"] > 0.5


def test_several_evaluation_sets(train):
    sets = {"a": make_documents(20, seed=2), "b": make_documents(20, seed=3)}
    trainer = train(level_steps=[2], eval_strategy="steps", eval_steps=2, eval_dataset=sets)
    names = {name for entry in trainer.state.log_history for name in entry}
    assert {"eval_a_P@1", "eval_b_P@1", "heads_share"} < names


@pytest.mark.parametrize("count", [1, 3])
def test_very_few_labels(train, tmp_path, count):
    words = [f"topic{label:02d}" for label in range(count)]
    rows = [[words[i % count]] for i in range(40)]
    data = Dataset.from_dict({"text": [" ".join([*row, "word1"]) for row in rows], "labels": rows})
    trainer = train(data=data, level_indices=None, level_steps=[2], eval_dataset=data, tfidf_min_df=1)
    assert trainer.evaluate()["eval_P@1"] == 1
    for kind in PREDICT_WITH:
        assert {label for label, _ in trainer.model.predict(["topic00"], predict_with=kind)[0]} == set(words)


def test_documents_without_labels_or_text(train):
    rows = make_documents(60, seed=4)
    rows = Dataset.from_dict({"text": [*rows["text"], "", "word1"], "labels": [*rows["labels"], ["label 03"], []]})
    trainer = train(data=rows, level_steps=[8], level_cost_sensitive=True)
    assert len(trainer.model.predict(["", "topic07"])[0]) == 10


def test_given_vectors_do_not_go_with_an_encoder(train, few):
    # At prediction there are texts only.
    both = make_vectors(160).remove_columns("labels")
    both = both.add_column("text", few["text"][:]).add_column("labels", few["labels"][:])
    with pytest.raises(ValueError, match="features='vectors'"):
        train(data=both, features="vectors", level_steps=[1])
    assert train(data=both, level_steps=[1]).model.tfidf is not None


@pytest.mark.parametrize("fits", [True, False])
def test_a_given_tree(train, tiny_encoder, fits):
    tree = LabelTree.from_parents([[0, 0], np.arange(60 if fits else 7) % 2])
    model = XMCForTextClassification.from_encoder(tiny_encoder, label_tree=tree, max_length=16)
    if fits:
        assert train(model=model, level_indices=[1, 2], level_steps=[2]).model.label_tree is tree
    else:
        with pytest.raises(ValueError, match="tree has 7 labels, but there are 60"):
            train(model=model)


# ---- Encoders ----


def test_an_encoder_without_a_padding_token(train, tmp_path):
    folder = tmp_path / "gpt"
    tokenizer = make_tokenizer(plain=True)
    tokenizer.save_pretrained(folder)
    GPT2Model(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=64,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).save_pretrained(folder)
    trainer = train(model=folder, level_steps=[3], folder=tmp_path / "model")
    assert trainer.model.tokenizer.pad_token_id is None and trainer.model.config.pooling == "last"
    loaded = XMCForTextClassification.from_pretrained(tmp_path / "model")
    for kind in PREDICT_WITH:
        # An empty text has no token at all.
        assert loaded.predict([*TEXTS, ""], predict_with=kind) == trainer.model.predict(
            [*TEXTS, ""], predict_with=kind
        )


def test_windows(train):
    rows = make_documents(160, seed=7).map(lambda row: {"text": " ".join([row["text"]] * 4)})
    trainer = train(data=rows, level_steps=[2], encoder_long_text="windows", encoder_max_windows=3)
    assert trainer.model.config.long_text == "windows"
    assert max(len(windows) for windows in trainer.model.tokenize(rows["text"][:20])) == 3


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_a_missing_encoder(name, few, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(OSError, match=rf"The encoder `.*{name}` cannot be loaded"):
        XMCTrainer(model=tmp_path / name, args=encoder_arguments(tmp_path / "model"), train_dataset=few)


def test_no_encoder_named(few, tmp_path):
    with pytest.raises(ValueError, match="needs an encoder to start from"):
        XMCTrainer(args=encoder_arguments(tmp_path), train_dataset=few)


def test_texts_longer_than_the_encoder_reads(tiny_encoder, few, tmp_path):
    with pytest.raises(ValueError, match="`max_length` is 100, but the encoder reads at most 64"):
        XMCTrainer(model=tiny_encoder, args=encoder_arguments(tmp_path, encoder_max_length=100), train_dataset=few)


def test_a_loss_that_is_no_number(train):
    class Break(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 5:
                with torch.no_grad():
                    model.head(2).bias.fill_(float("nan"))

    with pytest.raises(FloatingPointError, match=r"nan at step 5 \(level 2/3\).*level_learning_rate"):
        train(level_steps=[4], callbacks=[Break()])


def test_another_optimizer(train):
    with pytest.raises(ValueError, match="(?i)optim=.*adafactor.*not supported"):
        train(optim="adafactor")
