"""Predictions in terms of the hierarchy of labels, against slow versions; trees from hierarchies."""

import json

import numpy as np
import pytest
from conftest import NUM_LABELS, make_documents, refused, train_linear

import hf_xmc
from hf_xmc.cli.main import main
from hf_xmc.hierarchy import Hierarchy
from hf_xmc.label_tree import LabelTree

TEXTS = make_documents(30, seed=3)["text"]
NAMES = [f"label {i:02d}" for i in range(NUM_LABELS)]
# Six tops, six labels below each of some of them, and the others below one or two of these.
PARENTS = {
    name: [] if i < 6 else [NAMES[i % 6]] if i < 12 else [NAMES[6 + i % 6], *([NAMES[i % 5]] if i % 7 == 0 else [])]
    for i, name in enumerate(NAMES)
}


@pytest.fixture(scope="session")
def hierarchy_folder(make_once, documents):
    """A linear model of labels with parents."""
    entries = {name: {"parents": parents} for name, parents in PARENTS.items()}
    return make_once("hierarchy-model", lambda folder: train_linear(folder, documents, label_texts=entries))


@pytest.fixture(scope="module")
def model(hierarchy_folder):
    return hf_xmc.XMCForTextClassification.from_pretrained(hierarchy_folder)


def slow_ancestors(name):
    return {name}.union(*map(slow_ancestors, PARENTS[name]))


def slow_level(name):
    return 1 + min(map(slow_level, PARENTS[name]), default=0)


def highest(pairs):
    """The highest score of each label."""
    scores = {}
    for label, score in pairs:
        scores[label] = max(score, scores.get(label, 0.0))
    return scores


def random_hierarchy(size, seed):
    rng = np.random.default_rng(seed)
    return Hierarchy(
        [sorted({int(x) for x in rng.integers(0, i, rng.integers(0, 3))}) if i else [] for i in range(size)]
    )


@pytest.mark.parametrize("seed", range(4))
def test_arrays_equal_the_slow_version(seed):
    rng, hierarchy = np.random.default_rng(seed), random_hierarchy(50, seed)
    assert hierarchy.depth == hierarchy.levels.max() > 2
    scores = -np.sort(-rng.random((20, 8)).round(1).astype(np.float32), axis=1)
    indices = np.array([rng.permutation(50)[:8] for _ in range(20)])
    indices[rng.random((20, 8)) < 0.2] = -1
    indices[3] = -1
    above = [set(hierarchy.ancestors([i]).tolist()) for i in range(50)]
    for level in (None, *range(1, hierarchy.depth + 1)):
        if level is None:
            found = hierarchy.with_ancestors(scores, indices)
        else:
            found = hierarchy.roll_up(scores, indices, level)
        for row in range(20):
            wanted = []
            for label, score in zip(indices[row].tolist(), scores[row], strict=True):
                if label >= 0:
                    targets = above[label]
                    if level is not None and hierarchy.levels[label] >= level:
                        targets = {i for i in targets if hierarchy.levels[i] == level}
                    elif level is not None:
                        targets = {label}
                    wanted += [(target, score) for target in targets]
            values, ids = found[0][row], found[1][row]
            kept = ids >= 0
            assert dict(zip(ids[kept].tolist(), values[kept], strict=True)) == highest(wanted)
            assert (np.diff(values) <= 0).all() and not kept[kept.argmin() :].any() or kept.all()
            assert (values[~kept] == 0).all()


def test_labels_come_before_their_ancestors():
    # 3 → 2 → 1, 3 → 0, and 1 is below 0.
    hierarchy = Hierarchy([[], [0], [1], [2, 0]])
    scores, ids = hierarchy.with_ancestors(np.array([[0.5, 0.1]], np.float32), np.array([[3, 1]]))
    assert ids.tolist() == [[3, 2, 1, 0]] and (scores == np.float32(0.5)).all()
    scores, ids = hierarchy.roll_up(np.array([[0.5, 0.25]], np.float32), np.array([[3, 1]]), 2, top_k=1)
    # 3 is on level 2 by its parent 0.
    assert ids.tolist() == [[3]] and scores.tolist() == [[0.5]]
    empty = hierarchy.with_ancestors(np.zeros((0, 2), np.float32), np.zeros((0, 2), np.int64))
    assert empty[1].shape == (0, 0)


def test_a_long_chain():
    hierarchy = Hierarchy([[], *([i] for i in range(300))])
    assert hierarchy.depth == 301 and hierarchy.closure[300].nnz == 301
    assert hierarchy.roll_up(np.ones((1, 1), np.float32), np.array([[300]]), 7)[1].tolist() == [[6]]


def test_with_parents(model):
    plain = model.predict(TEXTS, top_k=3)
    for pairs, found in zip(plain, model.predict(TEXTS, top_k=3, with_parents=True), strict=True):
        wanted = highest((above, score) for label, score in pairs for above in slow_ancestors(label))
        assert dict(found) == wanted and [score for _, score in found] == sorted(wanted.values(), reverse=True)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_level(model, level):
    everything = model.predict(TEXTS, top_k=NUM_LABELS)
    for pairs, found in zip(everything, model.predict(TEXTS, top_k=4, level=level), strict=True):
        wanted = highest(
            (above, score)
            for label, score in pairs
            for above in slow_ancestors(label)
            if (above == label if slow_level(label) < level else slow_level(above) == level)
        )
        assert len(found) == 4 and dict(found).items() <= wanted.items()
        assert [score for _, score in found] == sorted(wanted.values(), reverse=True)[:4]


def test_both_at_once_and_with_a_restriction(model):
    rolled = model.predict(TEXTS[:5], top_k=2, level=2, with_parents=True)
    assert any(slow_level(label) == 1 for label, _ in rolled[0]) and len(rolled[0]) > 2
    restricted = model.predict(TEXTS[:5], top_k=1, labels=["label 12"], with_parents=True)
    assert {label for label, _ in restricted[0]} == slow_ancestors("label 12")


def test_pipeline_jobs_and_command(model, hierarchy_folder, tmp_path, capsys):
    wanted = model.predict(TEXTS, top_k=2, level=1, with_parents=True)
    tag = hf_xmc.pipeline(hierarchy_folder, level=1, with_parents=True, top_k=2)
    assert [[(entry["label"], entry["score"]) for entry in entries] for entries in tag(TEXTS, batch_size=8)] == wanted
    plain = [entry["label"] for entry in tag(TEXTS[0], with_parents=False)]
    assert plain == [label for label, _ in model.predict(TEXTS[:1], top_k=2, level=1)[0]]
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    flags = ["--top-k", "2", "--level", "2", "--with-parents"]
    for output in ("out.jsonl", "out.parquet"):
        command = ["predict", str(hierarchy_folder), str(tmp_path / "texts.txt"), "--output", str(tmp_path / output)]
        assert main([*command, *flags]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    both = model.predict(TEXTS, top_k=2, level=2, with_parents=True)
    assert [[entry["label"] for entry in line["labels"]] for line in lines] == [
        [label for label, _ in row] for row in both
    ]


def test_ensembles(hierarchy_folder):
    ensemble = hf_xmc.XMCEnsemble.from_members([hierarchy_folder, hierarchy_folder])
    found = ensemble.predict(TEXTS[:3], top_k=2, with_parents=True)
    assert all(slow_ancestors(label) <= {label for label, _ in row} for row in found for label, _ in row)


def test_evaluation(model, hierarchy_folder, tmp_path, capsys):
    make_documents(50, seed=5).to_parquet(tmp_path / "test.parquet")
    output = tmp_path / "results.json"
    assert main(["evaluate", str(hierarchy_folder), str(tmp_path / "test.parquet"), "--output", str(output)]) == 0
    metrics = json.loads(output.read_text())["metrics"]
    assert 0 < metrics["hF1@1"] < 1 and metrics["hP@1"] >= metrics["P@1"]
    assert "hF1" in capsys.readouterr().out


@pytest.mark.parametrize("options", [{"level": 1}, {"with_parents": True}])
def test_without_hierarchy(model_folder, options, tmp_path):
    model = hf_xmc.XMCForTextClassification.from_pretrained(model_folder)
    refused("no hierarchy.*`parents`", model.predict, TEXTS, **options)
    refused("no hierarchy", hf_xmc.pipeline, model, **options)
    with pytest.raises(ValueError, match="no hierarchy"):
        from hf_xmc.inference.corpus import PredictionArguments, predict_corpus

        predict_corpus(model, [str(tmp_path)], tmp_path / "out", PredictionArguments(**options))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("level", "error"), [(0, ValueError), (4, ValueError), (1.5, TypeError), ("1", TypeError)])
def test_wrong_levels(model, level, error):
    refused("`level", model.predict, TEXTS, level=level, error=error)


# ---- Trees ----


def test_tree_from_hierarchy(model):
    hierarchy = model.labels.hierarchy
    tree = LabelTree.from_hierarchy(hierarchy)
    assert tree.num_labels == NUM_LABELS and tree.level_sizes[0] == 6
    tops = tree.parents(tree.depth)
    for level in range(tree.depth - 1, 1, -1):
        tops = tree.parents(level)[tops]
    for node, label in zip(tops, tree.leaf_labels, strict=True):
        mates = tree.leaf_labels[tops == node]
        # All labels of a node of the first level have one top among their ancestors.
        assert any(all(f"label {top:02d}" in slow_ancestors(NAMES[mate]) for mate in mates) for top in range(6)), label


def test_training_on_the_hierarchy(documents, tmp_path):
    entries = {name: {"parents": parents} for name, parents in PARENTS.items()}
    data = documents.select(range(300))
    model = train_linear(tmp_path / "a", data, label_texts=entries, tree_clustering="hierarchy").model
    assert model.label_tree == LabelTree.from_hierarchy(model.labels.hierarchy)
    assert model.predict(["topic07 topic08"], top_k=2)[0][0][0] in ("label 07", "label 08")
    refused("no hierarchy", train_linear, tmp_path / "b", data, tree_clustering="hierarchy")
