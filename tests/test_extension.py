"""Tests of hf_xmc.training.extension: further documents for trained models."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import encoder_arguments, make_documents, make_vectors, refused, refused_each, train_linear
from datasets import Dataset
from encoder_runs import KillAfter, Killed
from small_problems import TREE, random_problem, same_weights

import hf_xmc
from hf_xmc import XMCForTextClassification, XMCTrainer, XMCTrainingArguments
from hf_xmc.cli.main import main
from hf_xmc.label_tree import LabelTree
from hf_xmc.training.options import RankerArguments
from hf_xmc.training.ranker import KeptRanker, train_ranker
from hf_xmc.training.record import TrainingRecord


def blocks_of(ranker):
    """The arrays of each block as bytes, and the labels of those of the last level."""
    weights, width, tree = ranker.weights, ranker.num_dense + 1, ranker.tree
    blocks = []
    for block, (first, last) in enumerate(zip(ranker.block_child[:-1], ranker.block_child[1:], strict=True)):
        parts = [weights.dense[block * width : (block + 1) * width]]
        for name, begin in (("records", weights.row_begin), ("buckets", weights.bucket_begin)):
            parts.append(getattr(weights, name)[begin[block] : begin[block + 1]])
        leaf = first - (1 + sum(tree.level_sizes[:-1]))
        labels = tree.leaf_labels[leaf : leaf + last - first] if leaf >= 0 else []
        blocks.append((b"".join(np.ascontiguousarray(part).tobytes() for part in parts), set(map(int, labels))))
    return blocks


def documents_of(labels, count=6, seed=0):
    """Documents with some of the labels, as numbers."""
    generator = np.random.default_rng(seed)
    chosen = [generator.choice(labels, size=min(2, len(labels)), replace=False) for _ in range(count)]
    texts = [" ".join(f"topic{label:02d}" for label in row) + f" word{i:02d}" for i, row in enumerate(chosen)]
    return Dataset.from_dict({"text": texts, "labels": [[f"label {label:02d}" for label in row] for row in chosen]})


def extend(folder, model, previous, new, label_texts=None, callbacks=(), resume=None, **options):
    args = XMCTrainingArguments(str(folder), disable_tqdm=True, use_cpu=True, report_to="none", **options)
    trainer = XMCTrainer(
        model, args, new, previous_dataset=previous, label_texts=label_texts, callbacks=list(callbacks)
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def changed_labels(before, after):
    """The labels of the blocks that differ."""
    pairs = zip(blocks_of(before.ranker), blocks_of(after.ranker), strict=True)
    return {label for old, new in pairs if old != new for label in old[1]}


def mine_and_siblings(model, labels):
    """All labels of the blocks of some labels."""
    return {other for _, block in blocks_of(model.ranker) if block & labels for other in block}


def read_card(folder):
    return (folder / "README.md").read_text(encoding="utf-8")


def first_block(model):
    """The labels of the first block of the ranker."""
    return sorted(next(labels for _, labels in blocks_of(model.ranker) if labels))


@pytest.mark.parametrize("weight_dtype", ["int8", "float32"])
@pytest.mark.parametrize("tree", [TREE, LabelTree.flat(28)], ids=["tree", "flat"])
@pytest.mark.parametrize("negatives", ["tfn", "both"])
def test_changed_blocks_are_those_of_a_training_on_all_documents(weight_dtype, tree, negatives):
    features, targets = random_problem(documents=90)
    arguments = RankerArguments(negatives=negatives, train_beam_size=2, weight_dtype=weight_dtype)
    old = train_ranker(features[:80], targets[:80], tree, arguments)
    changed = np.zeros(28, np.bool_)
    changed[3] = True
    extended = train_ranker(features, targets, tree, arguments, kept=KeptRanker(old, changed))
    before, after = blocks_of(old), blocks_of(extended)
    whole = blocks_of(train_ranker(features, targets, tree, arguments))
    is_changed = [3 in labels or not labels for _, labels in before]
    assert 0 < sum(is_changed) < len(before)
    for block, (content, labels) in enumerate(after):
        assert labels == before[block][1]
        assert content == (whole if is_changed[block] else before)[block][0]
    assert any(is_changed[block] and before[block] != whole[block] for block in range(len(before)))


@pytest.mark.parametrize(
    "options", [{}, {"similar_documents": True}, {"method": "bonsai"}], ids=["default", "knn", "bonsai"]
)
def test_what_is_kept_and_what_is_made_again(options, documents, tmp_path):
    before = train_linear(tmp_path / "old", documents, **options).model
    files = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir() if path.is_file()}
    new = documents_of(first_block(before))
    trainer = extend(tmp_path / "new", str(tmp_path / "old"), documents, new)
    model = XMCForTextClassification.from_pretrained(tmp_path / "new")

    assert {name: Path(tmp_path, "old", name).read_bytes() for name in files} == files
    for name in ("tfidf.safetensors", "label_tree.safetensors", "training_args.json", "scorer.json"):
        if name in files:
            assert Path(tmp_path, "new", name).read_bytes() == files[name], name
    assert model.predict(new["text"], top_k=3) == trainer.model.predict(new["text"], top_k=3)

    mine = {before.labels.names.index(label) for row in new["labels"] for label in row}
    assert changed_labels(before, model) == mine_and_siblings(before, mine)
    assert 0 < len(changed_labels(before, model)) < 60

    together = Dataset.from_dict({name: [*documents[name], *new[name]] for name in ("text", "labels")})
    truth = model.labels.encode(together)
    assert model.labels.counts.tolist() == truth.sum(axis=0).A1.tolist()
    assert model.labels.num_documents == len(together)
    # The same labels, TF-IDF and tree in a training on all documents.
    parts = {"labels": model.labels, "label_tree": before.label_tree, "tfidf": before.tfidf}
    whole = XMCForTextClassification(type(before.config)(method=before.config.method), **parts)
    args = XMCTrainingArguments(str(tmp_path / "whole"), disable_tqdm=True, use_cpu=True, **options)
    XMCTrainer(whole, args, together).train()
    texts = make_documents(30, seed=4)["text"]
    for part in set(model.available_parts) - {"ranker"}:
        assert model.predict(texts, predict_with=part) == whole.predict(texts, predict_with=part), part
    blocks = zip(blocks_of(before.ranker), blocks_of(whole.ranker), blocks_of(model.ranker), strict=True)
    assert all(made == (new if not old[1] or old[1] & mine else old) for old, new, made in blocks)


def test_new_labels_are_learnt_and_recorded(documents, tmp_path):
    rare = {"label 07", "label 08"}
    old = documents.filter(lambda row: not rare & set(row["labels"]))
    new = documents.filter(lambda row: bool(rare & set(row["labels"])))
    train_linear(tmp_path / "old", old)
    trainer = extend(tmp_path / "new", str(tmp_path / "old"), old, new)
    model = XMCForTextClassification.from_pretrained(tmp_path / "new")
    assert model.labels.names[-2:] == sorted(rare)
    assert model.labels.counts[-2:].tolist() == [sum(name in row for row in new["labels"]) for name in sorted(rare)]
    found = [{label for label, _ in row} for row in model.predict(new["text"], top_k=3)]
    wanted = [rare & set(row) for row in new["labels"]]
    assert np.mean([own <= labels for own, labels in zip(wanted, found, strict=True)]) > 0.7
    record = TrainingRecord.load(tmp_path / "new")
    facts = {"model": "old", "previous_documents": len(old), "documents": len(new), "labels": 2}
    assert [{name: entry[name] for name in facts} for entry in record.extensions] == [facts]
    assert f": {len(new)} documents after the {len(old)} of `old`, 2 new labels |" in read_card(tmp_path / "new")

    # Once more: a ranker with blocks of other sizes.
    more = documents_of([7, 8, 30])
    again = extend(tmp_path / "again", str(tmp_path / "new"), trainer.train_dataset, more)
    mine = {model.labels.names.index(label) for row in more["labels"] for label in row}
    assert changed_labels(model, again.model) == mine_and_siblings(model, mine)
    assert [entry["documents"] for entry in again.recorder.record.extensions] == [len(new), 6]


def test_a_new_label_without_known_terms_is_left_out(documents, model_folder, tmp_path, caplog):
    new = Dataset.from_dict({"text": ["qqq zzz", "topic01 word03"], "labels": [["nothing"], ["label 01", "fresh"]]})
    model = extend(tmp_path, str(model_folder), documents, new).model
    assert model.labels.names[60:] == ["fresh"] and "'nothing'" in caplog.text


def test_labels_that_are_numbers_in_one_of_the_datasets(documents, tmp_path):
    numbers = Dataset.from_dict(
        {"text": documents["text"], "labels": [[int(label[-2:]) for label in row] for row in documents["labels"]]}
    )
    train_linear(tmp_path / "old", numbers)
    new = Dataset.from_dict({"text": ["topic01 word03", "topic02"], "labels": [["1"], ["2"]]})
    assert extend(tmp_path / "new", str(tmp_path / "old"), numbers, new).model.labels.counts[1] > 1


def test_vectors(vector_model_folder, tmp_path):
    new = make_vectors(10, seed=3)
    # A feature that the model does not know.
    new = new.map(
        lambda row, i: {
            "feature_ids": [*row["feature_ids"], 900 + i],
            "feature_values": [*row["feature_values"], 1.0],
        },
        with_indices=True,
    )
    old = XMCForTextClassification.from_pretrained(vector_model_folder)
    # Texts beside the vectors are not what the model reads.
    given = [data.add_column("text", ["word"] * len(data)) for data in (make_vectors(600), new)]
    model = extend(tmp_path, str(vector_model_folder), *given).model
    assert model.ranker.num_sparse == old.ranker.num_sparse and model.tfidf is None
    assert not same_weights(model.ranker, old.ranker)


@pytest.mark.parametrize("method", ["xr-transformer", "x-transformer"])
def test_an_encoder_is_kept(method, tiny_encoder, tmp_path):
    documents = make_documents(200)
    args = encoder_arguments(tmp_path / "old", method, embedding_cache=str(tmp_path / "cache"))
    XMCTrainer(tiny_encoder, args, documents).train()
    cached = {path.name for path in (tmp_path / "cache").iterdir()}
    before = XMCForTextClassification.from_pretrained(tmp_path / "old")
    options = {"embedding_cache": str(tmp_path / "cache")}
    extend(tmp_path / "new", str(tmp_path / "old"), documents, documents_of([4, 5]), **options)
    # The previous documents are not encoded again.
    assert len({path.name for path in (tmp_path / "cache").iterdir()} - cached) == 1
    model = XMCForTextClassification.from_pretrained(tmp_path / "new")
    weights = model.state_dict()
    assert all((tensor == weights[name]).all() for name, tensor in before.state_dict().items())
    assert not same_weights(model.ranker, before.ranker) and model.labels.num_documents == 206
    more = extend(tmp_path / "more", str(tmp_path / "old"), documents, documents_of([70])).model
    assert more.labels.names[-1] == "label 70"
    assert [len(head.bias) for head in more.heads] == [
        more.label_tree.level_sizes[i - 1] for i in more.config.head_levels
    ]


def test_an_interrupted_extension_is_resumed(documents, model_folder, tmp_path):
    new = documents_of([1, 2, 70])
    whole = extend(tmp_path / "whole", str(model_folder), documents, new)
    model = XMCForTextClassification.from_pretrained(model_folder)
    with pytest.raises(Killed):
        extend(tmp_path / "new", model, documents, new, callbacks=[KillAfter("ranker")])
    assert not (tmp_path / "new" / "config.json").exists()
    again = extend(tmp_path / "new", str(model_folder), documents, new, resume=True)
    assert same_weights(again.model.ranker, whole.model.ranker)
    # The trainer itself starts from the model as it was.
    stop = KillAfter("ranker")
    args = XMCTrainingArguments(str(tmp_path / "third"), disable_tqdm=True, use_cpu=True)
    trainer = XMCTrainer(str(model_folder), args, new, previous_dataset=documents, callbacks=[stop])
    with pytest.raises(Killed):
        trainer.train()
    trainer.remove_callback(stop)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.model.labels.names == whole.model.labels.names
    assert same_weights(trainer.model.ranker, whole.model.ranker)


NEW = documents_of([1, 2])


def test_what_cannot_be_extended(documents, model_folder, tmp_path):
    def attempt(previous=documents, new=NEW, model=str(model_folder), **options):
        extend(tmp_path / "new", model, previous, new, **options)

    refused("previous_dataset.*600", attempt, documents.select(range(500)))
    refused("train_dataset", attempt, new=None)
    refused("columns", attempt, new=make_vectors(5))
    refused("has a label", attempt, new=Dataset.from_dict({"text": ["a"], "labels": [[]]}))
    refused("can learn", attempt, new=Dataset.from_dict({"text": ["qq"], "labels": [["q"]]}))
    refused("NoneType", attempt, model=None, error=TypeError)
    refused("method='bonsai'.*method='xr-linear'", attempt, method="bonsai")
    refused_each(attempt, tfidf_min_df=2, tree_branching=4, ranker_C=2.0, num_train_epochs=1)
    assert not (tmp_path / "new" / "config.json").exists()


def test_models_that_cannot_be_extended(documents, model_folder, ensemble_folder, tiny_encoder, tmp_path):
    untrained = XMCForTextClassification.from_pretrained(model_folder)
    untrained.ranker = None
    refused("not trained", extend, tmp_path / "new", untrained, documents, NEW)
    unsaved = XMCForTextClassification.from_pretrained(model_folder)
    unsaved.config.name_or_path = unsaved.name_or_path = ""
    refused("training_args.json", extend, tmp_path / "new", unsaved, documents, NEW, error=FileNotFoundError)
    refused("ensemble", extend, tmp_path / "new", str(ensemble_folder), documents, NEW)
    shutil.copytree(model_folder, tmp_path / "copy")
    refused("output_dir", extend, tmp_path / "copy", str(tmp_path / "copy"), documents, NEW, overwrite=True)
    args = encoder_arguments(tmp_path / "heads", "lightxml")
    XMCTrainer(tiny_encoder, args, make_documents(160)).train()
    refused("heads alone", extend, tmp_path / "new", str(tmp_path / "heads"), make_documents(160), NEW)
    refused("previous_dataset", XMCTrainer, str(model_folder), XMCTrainingArguments(str(tmp_path), use_cpu=True), NEW)
    refused("model_init", XMCTrainer, train_dataset=NEW, previous_dataset=documents, model_init=lambda: None)


def write_csv(path, dataset):
    rows = [f"{text},{';'.join(labels)}" for text, labels in zip(dataset["text"], dataset["labels"], strict=True)]
    path.write_text("\n".join(["abstract,subjects", *rows, ""]))
    return str(path)


def test_the_command_extends_a_model(documents, tmp_path, capsys):
    old, more = documents.select(range(500)), documents.select(range(500, 600))
    files = [write_csv(tmp_path / "old.csv", old), write_csv(tmp_path / "more.csv", more)]
    plain = ["--use_cpu", "true", "--disable_tqdm", "true"]
    main(["train", files[0], "-o", str(tmp_path / "old"), *plain, "--holdout", "0"])
    extension = ["--extend", str(tmp_path / "old"), "--previous", files[0]]
    main(["train", files[1], "-o", str(tmp_path / "new"), *plain, *extension])
    said = capsys.readouterr().out
    assert "held out" in said and "trained again" in said
    model = XMCForTextClassification.from_pretrained(tmp_path / "new")
    assert model.labels.num_documents == 600
    record = json.loads((tmp_path / "new" / "training_record.json").read_text())
    assert record["extensions"][0]["documents"] == 100 and record["evaluations"][0]["documents"] == 5
    refused("--previous", hf_xmc.train, files[1], tmp_path / "other", extend=str(tmp_path / "old"))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"dataset: {files[1]}\nlabel_delimiter: ';'\noutput_dir: {tmp_path / 'third'}\nuse_cpu: true\n"
        f"extend: {tmp_path / 'old'}\nprevious: {files[0]}\n"
    )
    main(["train", "--config", str(recipe)])
    assert same_weights(XMCForTextClassification.from_pretrained(tmp_path / "third").ranker, model.ranker)
