"""Self-contained models without hf_xmc: the same labels and scores from the code beside the model."""

import json

import pytest
from conftest import refused
from hub_worker import Worker, assert_same_tags
from transformers import AutoModel

from hf_xmc import XMCForTextClassification, pipeline
from hf_xmc.hub.upload import export_model
from hf_xmc.remote_code import code_files
from hf_xmc.training.presets import ENCODER_METHODS

TEXTS = ["topic07 word1 topic31", "topic59 topic02", ""]
TAG = """
import sys
from transformers import pipeline
tag = pipeline(model=name, trust_remote_code=True)
result = [tag(texts, top_k=3, batch_size=2), type(tag).__module__, type(tag.model).__module__]
assert not [name for name in sys.modules if name.split(".")[0] == "hf_xmc"]
"""


@pytest.fixture(scope="module")
def stranger(hub, tmp_path_factory):
    """A process without the package."""
    folder = tmp_path_factory.mktemp("stranger")
    worker = Worker(hub.environment(folder / "home"), folder / "log", without_package=True)
    yield worker
    worker.close()


@pytest.fixture(scope="module", params=["linear", "encoder", "ensemble"])
def model(request):
    """Name and folder of a linear model, a model with an encoder, and an ensemble of both."""
    folders = {"linear": "model_folder", "encoder": "encoder_model_folder", "ensemble": "ensemble_folder"}
    return request.param, request.getfixturevalue(folders[request.param])


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / model[0]
    files = export_model(model[1], folder)
    assert {path.name for path in code_files()} < set(files)
    return folder


def test_the_package_cannot_be_imported_there(stranger):
    refused("No module named 'hf_xmc'", stranger.run, "import hf_xmc", error=RuntimeError)


@pytest.mark.slow  # compiles the kernels of each model's code
def test_same_labels_and_scores(hub, stranger, model, exported, tmp_path):
    kind, folder = model
    # One from its folder, the others from the Hub.
    name = str(exported) if kind == "encoder" else f"me/{kind}"
    hub.add(f"me/{kind}", exported)
    tagged, pipeline_module, model_module = stranger.run(TAG, name=name, texts=TEXTS)
    assert_same_tags(tagged, pipeline(str(folder), top_k=3)(TEXTS))
    assert pipeline_module.startswith("transformers_modules.") and model_module.startswith("transformers_modules.")
    # A model saved by its own code is complete.
    save = """
from transformers import AutoModelForSequenceClassification, pipeline
pipeline(model=name, trust_remote_code=True).save_pretrained(folder)
model = AutoModelForSequenceClassification.from_pretrained(name, trust_remote_code=True)
result = model.predict(texts[:1], top_k=3)
"""
    (rows,) = stranger.run(save, name=name, folder=str(tmp_path / "again"), texts=TEXTS)
    assert_same_tags([rows], tagged[:1])
    for path in exported.rglob("*"):
        name = path.relative_to(exported)
        if path.suffix not in (".safetensors", ".py", ".txt") and path.name not in ("config.json", "labels.json"):
            continue
        assert (tmp_path / "again" / name).read_bytes() == path.read_bytes(), name


def test_without_trust_nothing_is_run(hub, stranger, model, exported):
    hub.add("me/untrusted", exported)
    code = "from transformers import pipeline; pipeline(model=name, trust_remote_code=False)"
    refused("trust_remote_code=True", stranger.run, code, name="me/untrusted", error=RuntimeError)


def test_the_copy_and_its_original(model, exported):
    kind, folder = model
    assert "auto_map" not in json.loads((folder / "config.json").read_text())
    config = json.loads((exported / "config.json").read_text())
    name = "XMCEnsemble" if kind == "ensemble" else "XMCForTextClassification"
    assert config["auto_map"]["AutoModel"] == f"pipeline_xmc.{name}"
    assert not list(exported.glob("member-*/*.py"))  # only one copy of the code
    refused("exported", export_model, folder, exported, error=FileExistsError)
    refused("config.json", export_model, exported.parent, exported.parent / "other", error=FileNotFoundError)


def test_saving_with_and_without_code(model, exported, tmp_path):
    kept = AutoModel.from_pretrained(exported)
    kept.save_pretrained(tmp_path)
    assert (tmp_path / "pipeline_xmc.py").is_file()
    assert (tmp_path / "config.json").read_text() == (exported / "config.json").read_text()
    kept.save_pretrained(tmp_path, self_contained=False)
    assert not list(tmp_path.glob("*.py"))
    assert not {"auto_map", "custom_pipelines"} & json.loads((tmp_path / "config.json").read_text()).keys()
    AutoModel.from_pretrained(tmp_path).save_pretrained(tmp_path, self_contained=True)
    assert {path.name for path in tmp_path.glob("*.py")} == {path.name for path in code_files()}
    assert pipeline(str(tmp_path))(TEXTS[0], top_k=2) == pipeline(str(exported))(TEXTS[0], top_k=2)


OTHER_METHODS = [method for method in ENCODER_METHODS if method not in ("xr-transformer", "x-transformer")]


@pytest.mark.parametrize(
    "method", ["x-transformer", *(pytest.param(method, marks=pytest.mark.slow) for method in OTHER_METHODS)]
)
def test_every_method(stranger, train, tmp_path, method):
    train(method=method, folder=tmp_path / "trained", level_steps=[2], save_strategy="no")
    # Under one folder name, transformers reuses the code, which is compiled only once.
    export_model(tmp_path / "trained", tmp_path / "exported")
    tagged, _, model_module = stranger.run(TAG, name=str(tmp_path / "exported"), texts=TEXTS)
    assert_same_tags(tagged, pipeline(str(tmp_path / "trained"), top_k=3, batch_size=2)(TEXTS))
    assert model_module.startswith("transformers_modules.")


EDIT = """
from transformers import AutoModel
model = AutoModel.from_pretrained(name, trust_remote_code=True)
model.add_labels({"new": "topic07 word1"}, {"new": ["word1 topic07 word2"]})
model.remove_labels(["label 03"])
model.save_pretrained(output)
result = model.predict(texts)
"""


@pytest.mark.slow  # compiles the kernels of the model's code
def test_labels_are_edited_without_the_package(stranger, model_folder, tmp_path):
    export_model(model_folder, tmp_path / "exported")
    folders = {"name": str(tmp_path / "exported"), "output": str(tmp_path / "edited")}
    predicted = stranger.run(EDIT, texts=TEXTS, **folders)
    assert "auto_map" in json.loads((tmp_path / "edited" / "config.json").read_text())
    model = XMCForTextClassification.from_pretrained(tmp_path / "edited")
    assert predicted == [[list(pair) for pair in row] for row in model.predict(TEXTS)]
    assert "new" in dict(predicted[0])
