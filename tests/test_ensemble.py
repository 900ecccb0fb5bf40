"""Ensembles: scores and ranks averaged, weights chosen, one folder that is used as any model."""

import json
import shutil
from functools import partial

import numpy as np
import oracles
import pytest
import torch
from conftest import command_fails, make_documents, make_vectors, refused, refused_each
from datasets import Dataset
from transformers import AutoConfig, AutoModel

from hf_xmc import XMCEnsemble, XMCEnsembleConfig, XMCForTextClassification
from hf_xmc.cli.main import main
from hf_xmc.ensemble_xmc import combine_members
from hf_xmc.inference.predict import evaluate_model
from hf_xmc.parallel.stage_cache import Runtime
from hf_xmc.scorer import Scorer
from hf_xmc.training.ensemble import make_ensemble

TEXTS = [*make_documents(20, seed=11)["text"], ""]


@pytest.fixture(scope="module")
def folders(model_folder, other_model_folder, encoder_model_folder):
    return [model_folder, other_model_folder, encoder_model_folder]


# ---- Averaging ----


@pytest.mark.parametrize("combine", ["scores", "ranks"])
@pytest.mark.parametrize("weights", [[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]])
def test_combination(combine, weights):
    rng = np.random.default_rng(0)
    scores, indices = np.zeros((3, 15, 8), np.float32), np.full((3, 15, 8), -1)
    for member in range(3):
        for document in range(15):
            count = rng.integers(0, 9)
            indices[member, document, :count] = rng.choice(12, count, replace=False)
            scores[member, document, :count] = np.sort(rng.integers(0, 5, count) / 4)[::-1]
    for top_k in (1, 5, 40):
        output = combine_members(torch.from_numpy(scores), torch.from_numpy(indices), weights, combine, top_k)
        assert output.scores.shape == output.indices.shape == (15, top_k)
        for document in range(15):
            pairs = [
                [(label, score) for label, score in zip(indices[m, document], scores[m, document]) if label >= 0]
                for m in range(3)
            ]
            expected = oracles.ensemble_scores(pairs, weights, combine)
            ranking = sorted(expected, key=lambda label: (-round(expected[label], 6), label))[:top_k]
            found = [label for label in output.indices[document].tolist() if label >= 0]
            values = output.scores[document, : len(found)].tolist()
            assert values == pytest.approx([expected[label] for label in ranking], abs=1e-6)
            assert values == pytest.approx([expected[label] for label in found], abs=1e-6)
            assert len(set(found)) == len(found) == len(ranking)
            assert not output.scores[document, len(found) :].any()


def test_equal_labels_are_in_the_order_of_their_ids():
    indices = torch.tensor([[[7, 3]], [[5, 2]]])
    output = combine_members(torch.ones(2, 1, 2), indices, [0.5, 0.5], "scores", 4)
    assert output.indices.tolist() == [[2, 3, 5, 7]]


@pytest.mark.parametrize("combine", ["scores", "ranks"])
def test_members_of_other_kinds_and_orders_of_labels(folders, combine):
    members = [XMCForTextClassification.from_pretrained(folder) for folder in folders]
    # The labels of a member in another order.
    order = np.random.default_rng(1).permutation(60)
    second = members[1]
    second.labels.names[:] = [second.labels.names[i] for i in order]
    ensemble = XMCEnsemble.from_members(members, weights=[2, 1, 1], combine=combine)
    assert ensemble.config.weights == [0.5, 0.25, 0.25]
    assert members[0].labels.names != second.labels.names
    own = [member.predict(TEXTS, top_k=60) for member in members]
    for document, found in enumerate(ensemble.predict(TEXTS, top_k=5)):
        expected = oracles.ensemble_scores([rows[document] for rows in own], [0.5, 0.25, 0.25], combine)
        assert [score for _, score in found] == pytest.approx(sorted(expected.values(), reverse=True)[:5], abs=1e-5)
        assert [expected[label] for label, _ in found] == pytest.approx([score for _, score in found], abs=1e-5)


def test_candidates_bound_what_a_member_puts_forward(folders):
    ensemble = XMCEnsemble.from_members(folders[:2], candidates=3)
    features = ensemble.featurize(TEXTS)
    assert len(features) == len(TEXTS)
    assert ensemble.member_scores(features, 2)[0].shape == (2, len(TEXTS), 3)
    assert ensemble.member_scores(features, 7)[0].shape == (2, len(TEXTS), 7)
    refused("top_k", ensemble, features, top_k=0)


def test_vectors(vector_model_folder):
    ensemble = XMCEnsemble.from_members([vector_model_folder] * 2)
    data = make_vectors(30, seed=1)
    assert evaluate_model(ensemble, data).compute()["P@1"] == 1
    refused("vectors", ensemble.predict, ["topic31"])


# ---- The last scorer ----


def test_the_scorer_sees_the_log_odds_of_the_members(folders):
    members = [XMCForTextClassification.from_pretrained(folder) for folder in folders]
    weights = np.zeros((3, 2, 3))
    weights[:, 0] = [[1.0] * 3, [0.5] * 3, [0.0] * 3]  # of the scores, not of the differences
    ensemble, _ = make_ensemble(members, validation=make_documents(200, seed=2))
    assert ensemble.scorer.parts == ("member-1", "member-2", "member-3")
    ensemble.scorer = Scorer(ensemble.scorer.parts, weights, np.zeros(2), 0.3, 0.3)
    own = [member.predict(TEXTS, top_k=60) for member in members]
    for document, found in enumerate(ensemble.predict(TEXTS, top_k=5)):
        odds = [oracles.member_log_odds(rows[document], ensemble.labels.names) for rows in own]
        logits = 0.3 + odds[0] + 0.5 * odds[1]
        expected = np.sort(1 / (1 + np.exp(-logits)))[::-1][:5]
        assert [score for _, score in found] == pytest.approx(expected, abs=1e-4)


def test_members_that_complete_each_other(model_folder, monkeypatch):
    # Each is right for half of the labels, so that neither alone is the best.
    members = [XMCForTextClassification.from_pretrained(model_folder) for _ in range(2)]
    data = make_documents(200, seed=3)
    for kept, member in enumerate(members):

        def half(*arguments, forward=member.forward, kept=kept, **options):
            output = forward(*arguments, **options)
            output.scores = torch.where(output.indices % 2 == kept, output.scores, 0 * output.scores)
            order = output.scores.argsort(dim=1, descending=True, stable=True)
            output.scores, output.indices = output.scores.gather(1, order), output.indices.gather(1, order)
            return output

        monkeypatch.setattr(member, "forward", half)
    ensemble, facts = make_ensemble(members, validation=data)
    assert facts["validation_nDCG@5"] > max(facts["validation_nDCG@5_of_members"]) + 0.1
    assert (ensemble.scorer.weights.sum(axis=(1, 2)) > 0).all()


def test_results_are_those_of_an_evaluation(folders):
    data = make_documents(200, seed=2)
    ensemble, facts = make_ensemble(folders, validation=data, runtime=Runtime(num_threads=1))
    alone = [evaluate_model(XMCForTextClassification.from_pretrained(f), data).compute()["nDCG@5"] for f in folders]
    assert facts["validation_nDCG@5_of_members"] == pytest.approx(alone, abs=0.02)
    assert evaluate_model(ensemble, data).compute()["nDCG@5"] == pytest.approx(facts["validation_nDCG@5"])


def test_a_scorer_needs_documents(folders):
    refused("`weights`", make_ensemble, folders, weights=[1, 1, 1], validation=make_documents(5))
    refused("`combine='scorer'`", make_ensemble, folders, combine="scorer")
    refused("`combine='ranks'`", make_ensemble, folders, combine="ranks", validation=make_documents(5))
    refused("`validation`", make_ensemble, folders[:2], validation=make_documents(5))
    foreign = Dataset.from_dict({"text": ["topic01"] * 200, "labels": [["something else"]] * 200})
    refused("`validation`", make_ensemble, folders[:2], validation=foreign)


def test_a_scorer_is_saved(folders, tmp_path):
    ensemble, _ = make_ensemble(folders[:2], validation=make_documents(200, seed=2))
    ensemble.save_pretrained(tmp_path)
    expected = ensemble.predict(TEXTS)
    assert AutoModel.from_pretrained(tmp_path).predict(TEXTS) == expected
    scorer = json.loads((tmp_path / "scorer.json").read_text())
    scorer["parts"]["ranker"] = scorer["parts"].pop("member-2")
    (tmp_path / "scorer.json").write_text(json.dumps(scorer))
    refused("scorer.json", XMCEnsemble.from_pretrained, tmp_path)
    (tmp_path / "scorer.json").unlink()
    refused("scorer.json", XMCEnsemble.from_pretrained, tmp_path, error=FileNotFoundError)


# ---- One folder ----


def test_save_and_load(ensemble_folder, tmp_path):
    assert {path.name for path in ensemble_folder.iterdir()} == {"config.json", "member-1", "member-2", "member-3"}
    assert type(AutoConfig.from_pretrained(ensemble_folder)) is XMCEnsembleConfig
    loaded = XMCEnsemble.from_pretrained(ensemble_folder)
    expected = loaded.predict(TEXTS)
    auto = AutoModel.from_pretrained(ensemble_folder)
    assert type(auto) is XMCEnsemble and not auto.training and auto.predict(TEXTS) == expected
    copy = shutil.copytree(ensemble_folder, tmp_path / "some" / "where")
    XMCEnsemble.from_pretrained(copy).save_pretrained(copy)  # onto itself
    again = AutoModel.from_pretrained(tmp_path, subfolder="some/where")
    assert again.predict(TEXTS) == expected and again.config.weights == [0.5, 0.25, 0.25]


def test_commands(folders, tmp_path, capsys):
    make_documents(200, seed=2).to_parquet(tmp_path / "validation.parquet")
    output, models = tmp_path / "ensemble", [str(folder) for folder in folders[:2]]
    flags = ["--output_dir", str(output), "--validation", str(tmp_path)]
    assert main(["ensemble", *models, *flags]) == 0
    facts = json.loads((output / "ensemble.json").read_text())
    assert facts["models"] == models and facts["combine"] == "scorer" and facts["weights"] is None
    command_fails(capsys, "--overwrite", ["ensemble", *models, *flags])
    assert main(["evaluate", str(output), str(tmp_path), "--split", "validation"]) == 0
    results = json.loads((output / "validation_results.json").read_text())
    assert results["metrics"]["nDCG@5"] == pytest.approx(facts["validation_nDCG@5"])
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    labels = tmp_path / "labels.jsonl"
    assert main(["predict", str(output), str(tmp_path / "texts.txt"), "--output", str(labels), "--top-k", "3"]) == 0
    found = [[entry["label"] for entry in json.loads(line)["labels"]] for line in labels.read_text().splitlines()]
    expected = AutoModel.from_pretrained(output).predict(TEXTS, top_k=3)
    assert found == [[label for label, _ in row] for row in expected]


def test_an_ensemble_and_a_model_in_the_same_folder_replace_each_other(folders, tmp_path, capsys):
    folder, models = tmp_path / "model", [str(folder) for folder in folders[:2]]
    shutil.copytree(folders[2], folder)
    assert main(["card", str(folder)]) == 0
    (folder / "notes.txt").write_text("of the user")
    assert main(["ensemble", *models, str(folder), "--output_dir", str(folder), "--overwrite"]) == 1
    assert "--output" in capsys.readouterr().err
    assert main(["ensemble", *models, "--output_dir", str(folder), "--overwrite"]) == 0
    ensemble = {"config.json", "ensemble.json", "member-1", "member-2", "notes.txt"}
    assert {path.name for path in folder.iterdir()} == ensemble
    make_documents(300).to_parquet(tmp_path / "train.parquet")
    flags = ["--dataset", str(tmp_path), "--output_dir", str(folder), "--overwrite", "true"]
    assert main(["train", *flags]) == 0
    left = {path.name for path in folder.iterdir()}
    assert "notes.txt" in left and not left & {"ensemble.json", "member-1", "member-2", "tokenizer.json"}


# ---- What is wrong ----


def test_different_labels(model_folder, vector_model_folder):
    refused("member-1.*member-2.*'0'.*member-1", XMCEnsemble.from_members, [model_folder, vector_model_folder])


def test_settings_are_checked(folders):
    make = partial(XMCEnsemble.from_members, folders[:2])
    for weights in ([1], [1, -1], [0, 0], [1, float("nan")]):
        refused("weights", make, weights=weights)
    refused_each(make, combine="votes", candidates=0)


def test_missing_members_and_other_models(ensemble_folder, tiny_encoder, model_folder, tmp_path):
    folder = shutil.copytree(ensemble_folder, tmp_path / "copy")
    shutil.rmtree(folder / "member-2")
    refused(r"member-2.*config\.json", AutoModel.from_pretrained, folder, error=FileNotFoundError)
    refused("members", XMCEnsemble.from_members, [])
    for folder, kind in ((ensemble_folder, "hf-xmc-ensemble"), (tiny_encoder, "bert")):
        refused(f"'{kind}'.*'hf-xmc'", XMCEnsemble.from_members, [model_folder, folder])
    refused("'hf-xmc'.*'hf-xmc-ensemble'", XMCEnsemble.from_pretrained, model_folder)


def test_commands_that_cannot_work(folders, tiny_encoder, tmp_path, capsys):
    command_fails(capsys, "two models", ["ensemble", str(folders[0]), "--output_dir", str(tmp_path / "out")])
    command_fails(capsys, "BertModel", ["predict", str(tiny_encoder), "-", "--output", "-"])
