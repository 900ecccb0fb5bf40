"""Tests of hf_xmc.training.arguments, options and presets."""

import dataclasses
import inspect
import math
import pydoc
from functools import partial
from typing import get_type_hints

import pytest
import torch
from conftest import refused, refused_each
from small_problems import uneven_tree
from transformers import HfArgumentParser, TrainingArguments

from hf_xmc import LabelTree, TfidfFeaturizer, XMCConfig, XMCForTextClassification, XMCTrainingArguments
from hf_xmc.training.arguments import PARTS
from hf_xmc.training.options import (
    REMOVED_OPTIONS,
    RENAMED_OPTIONS,
    EncoderArguments,
    KNNArguments,
    LevelArguments,
    RankerArguments,
    TreeArguments,
    per_level,
)
from hf_xmc.training.presets import ENCODER_METHODS, METHODS

TREE = uneven_tree()
INHERITED = {declared.name for declared in dataclasses.fields(TrainingArguments)}
OWN = {declared.name for declared in dataclasses.fields(XMCTrainingArguments)} - INHERITED


def arguments(**options):
    return XMCTrainingArguments("out", use_cpu=True, **options)


# ---- Flat options and their parts ----


def test_there_are_at_most_60_options():
    assert len(OWN) == 60
    prefixes = {name.split("_")[0] + "_" for name in OWN} & set(PARTS)
    assert prefixes == {"tfidf_", "tree_", "ranker_", "knn_", "encoder_", "level_"}


def test_every_option_is_documented():
    hints, shown = get_type_hints(XMCTrainingArguments), pydoc.plain(pydoc.render_doc(XMCTrainingArguments))
    for declared in dataclasses.fields(XMCTrainingArguments):
        if declared.name in OWN:
            assert declared.metadata["help"].endswith(".") and declared.name in hints
            assert f"{declared.name} (`" in shown


def test_defaults_are_those_of_the_parts():
    args = arguments(seed=7, method="dismec", tree_clustering="balanced", tfidf_min_df=1)
    assert args.make_tree_arguments() == TreeArguments(tree_seed=7)
    assert args.make_ranker_arguments() == RankerArguments(ranker_seed=7)
    assert args.make_knn_arguments() == KNNArguments()
    assert args.make_encoder_arguments() == EncoderArguments()
    assert args.make_level_arguments() == LevelArguments(learning_rate=1e-4)
    assert repr(args.make_tfidf()) == repr(TfidfFeaturizer())
    assert args.ranker_C == RankerArguments().C and args.tree_shares is not arguments().tree_shares


def test_values_reach_the_parts():
    given = {
        "tfidf_": {"analyzer": "char_wb", "ngram_range": [2, 4], "min_df": 5, "max_features": 0, "lead_words": 3,
                   "strip_accents": True},
        "tree_": {"clustering": "kmeans", "branching": 3, "max_leaf_size": 7, "max_depth": 4, "shares": [0.5, 0.5]},
        "ranker_": {"loss": "logistic", "C": 2.0, "negative_cost": 0.5, "cost_sensitive": False, "train_beam_size": 5,
                    "beam_size": 6, "prune_threshold": 0.5, "weight_dtype": "float32", "max_passes": 3,
                    "tolerance": 0.3},
        "encoder_": {"name": "some/encoder", "max_length": 9, "long_text": "windows", "max_windows": 2,
                     "pooling": "cls", "pooling_layers": 3, "attn_implementation": "eager", "dropout": 0.2,
                     "lora_rank": 0},
        "level_": {"indices": [1, 3], "epochs": 2, "steps": [3, 4], "learning_rate": 1e-5, "beam_size": 4,
                   "head_learning_rate": [1e-3, 1e-2], "loss": "squared_hinge", "negatives": ["all", "man"],
                   "bootstrap": False, "dropout": 0.3, "swa_start": 0.4},
    }  # fmt: skip
    flat = {prefix + name: value for prefix, part in given.items() for name, value in part.items()}
    args = arguments(method="xr-transformer", feature_power=1.25, **flat)
    tfidf, made = args.make_tfidf(), {prefix: getattr(args, f"make_{prefix}arguments") for prefix in list(given)[1:]}
    assert (tfidf.analyzer, tfidf.ngram_range, tfidf.min_df, tfidf.max_features) == ("char_wb", (2, 4), 5, None)
    assert (tfidf.lead_words, tfidf.power, tfidf.strip_accents) == (3, 1.25, True)
    for prefix, make in made.items():
        assert {name: getattr(make(), name) for name in given[prefix]} == given[prefix]
    knn = arguments(method="knn", knn_count=3, knn_exponent=1.5).make_knn_arguments()
    assert (knn.count, knn.exponent) == (3, 1.5)


def test_encoder_options_are_arguments_of_the_model():
    given = {"max_length": 9, "pooling_layers": 2, "dropout": 0.1, "pooling": "cls", "attn_implementation": "eager"}
    options = EncoderArguments(**given).model_kwargs()
    assert "max_length" not in EncoderArguments().model_kwargs()
    known = {*inspect.signature(XMCForTextClassification.from_encoder).parameters, *vars(XMCConfig())}
    assert set(options) <= known
    assert (options["max_length"], options["pooling_layers"], options["dropout"]) == (9, 2, 0.1)
    assert set(options) == {declared.name for declared in dataclasses.fields(EncoderArguments)} - {
        "name",
        "lora_rank",
    }


# ---- Presets ----


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_preset_sets_fields_of_its_parts(method):
    args = arguments(method=method)
    for part, values in METHODS[method].items():
        prefix = "" if part == "general" else f"{part}_"
        fields = {declared.name: declared for declared in dataclasses.fields(PARTS[prefix])}
        flat = part in ("general", "tfidf")
        made = args if flat else getattr(args, f"make_{part}_arguments")()
        for name, value in values.items():
            assert getattr(made, prefix + name if flat else name) == value
            assert (prefix + name in OWN) == (not fields[name].metadata.get("preset_only"))
    assert args.trains_encoder == (method in ENCODER_METHODS) and args.uses_knn == (method == "knn")


def test_an_explicit_value_wins_over_the_preset():
    default = TreeArguments().branching
    assert METHODS["parabel"]["tree"]["branching"] != default
    args = arguments(method="parabel", tree_branching=default, ranker_beam_size=33)
    assert (args.tree_branching, args.ranker_beam_size) == (default, 33)
    assert args.make_ranker_arguments().ranking == "path"


@pytest.mark.parametrize("method", sorted(METHODS))
def test_arguments_can_be_copied(method):
    args = arguments(method=method)
    again = dataclasses.replace(args, seed=3)
    assert {**args.xmc_options(), "seed": 3} == again.xmc_options()


def test_options_from_the_parser_of_transformers():
    argv = ["--output_dir", "out", "--method", "lightxml", "--tfidf_ngram_range", "1", "3", "--use_cpu"]
    levels = ["--level_steps", "5", "--level_learning_rate", "1e-3", "2e-3", "--level_negatives", "dynamic"]
    (args,) = HfArgumentParser(XMCTrainingArguments).parse_args_into_dataclasses([*argv, *levels, "--ranker_C", "2"])
    assert args.tree_max_leaf_size == 100 and args.ranker_C == 2.0 and args.make_tfidf().ngram_range == (1, 3)
    assert (args.level_steps, args.level_learning_rate, args.level_negatives) == (5, [1e-3, 2e-3], "dynamic")


# ---- Wrong options ----


@pytest.mark.parametrize("name", sorted({**RENAMED_OPTIONS, **REMOVED_OPTIONS}))
def test_names_of_earlier_versions(name):
    assert name not in OWN
    with pytest.raises(TypeError, match=f"`{name}`") as error:
        arguments(**{name: 1})
    if name in RENAMED_OPTIONS:
        assert RENAMED_OPTIONS[name] in OWN | INHERITED and f"`{RENAMED_OPTIONS[name]}`" in str(error.value)


@pytest.mark.parametrize(
    "flags, is_fast", [({"avx512_bf16"}, True), ({"avx512_bf16", "amx_tile"}, False), ({}, False)]
)
def test_auto_uses_bfloat16_where_it_is_fast(monkeypatch, flags, is_fast):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(flags, True))
    chosen = arguments(method="auto", encoder_name="some/encoder")
    assert chosen.bf16 == is_fast == chosen.method_reason.endswith("bfloat16")
    for options in ({"bf16": False}, {"fp16": True}, {"method": "xr-transformer"}, {"encoder_name": None}):
        assert not arguments(**{"method": "auto", "encoder_name": "some/encoder", **options}).bf16
    assert arguments(method="xr-transformer", encoder_name="some/encoder", bf16=True).bf16


def test_bad_options():
    refused_each(arguments, tree_clustering="round", tree_shares=[0.5, 0.4], tree_branching=1, ranker_C=-1.0)
    refused_each(arguments, ranker_tolerance=math.inf, ranker_beam_size=0, tfidf_min_df=0, tfidf_ngram_range=[2, 1])
    refused_each(arguments, features="pictures", feature_power=0.0, label_features="both of them", eval_ks=[0, 1])
    refused_each(arguments, predict_with="both", num_threads=-1, embedding_scale=math.inf, optim="adafactor")
    refused_each(arguments, label_text_weight=math.inf, label_smoothing_factor=0.1, num_train_epochs=-2)
    refused_each(arguments, lr_scheduler_kwargs={"num_cycles": 2}, tfidf_ngram_range=2, label_features="embedding")
    refused_each(arguments, num_train_epochs=math.nan)
    refused_each(arguments, error=TypeError, ranker_beam_size="20", tree_shares="a")
    # YAML reads 2e-4, without a point, as a string.
    refused_each(arguments, error=TypeError, learning_rate="2e-4", warmup_steps="1", per_device_eval_batch_size=None)
    refused("level_learning_rate", arguments, error=TypeError, learning_rate=[1e-4, 5e-5])
    refused("parabel", arguments, method="parable")
    refused("knn", arguments, method="neighbours")
    refused("linear, cosine, constant, constant_with_warmup", arguments, lr_scheduler_type="polynomial")


def test_options_without_effect():
    refused("level_epochs", arguments, level_epochs=[2.0])
    refused_each(partial(arguments, method="dismec"), encoder_max_length=64)
    refused_each(partial(arguments, method="xr-linear"), knn_exponent=2.0)
    refused_each(partial(arguments, method="knn"), ranker_C=2.0, tree_branching=4, knn_count=0, knn_exponent=0.0)
    refused_each(partial(arguments, method="xr-transformer", level_epochs=1), num_train_epochs=3)
    refused_each(partial(arguments, method="xr-transformer", level_steps=1), max_steps=3)
    refused_each(partial(arguments, method="x-transformer"), refine_tree=True, label_text_weight=0.5)


# ---- Levels ----


def test_bad_level_options():
    wrong = {"loss": "hinge", "negatives": "none", "epochs": math.nan, "steps": -1, "beam_size": 0, "dropout": 1.0}
    wrong |= {"learning_rate": -1e-4, "head_learning_rate": -1.0, "projection_learning_rate": -1.0}
    wrong |= {"min_lr_ratio": 1.1, "swa_start": 1.1}
    for name, value in wrong.items():
        refused(f"level_{name}", LevelArguments, **{name: value})
    for name, values in {"negatives": ["both", "none"], "epochs": [1, -1], "learning_rate": [-1.0]}.items():
        refused(f"level_{name}", LevelArguments, **{name: values})
    refused("level_beam_size", LevelArguments, beam_size=[20, 0])
    refused("level_dropout", LevelArguments, dropout=-0.1)
    refused_each(LevelArguments, bootstrap_cost=0.0, negative_weight=-1.0, epoch_shares=[1, 0], swa_steps=0)
    refused_each(LevelArguments, bottleneck=-1)
    refused("level_negatives", LevelArguments, negatives="dynamic")
    refused("shrink", LevelArguments, shrink=0.5, joint=True)
    refused("joint", LevelArguments, shrink=2.0)
    refused("bottleneck", LevelArguments, shrink=2.0, joint=True, bottleneck=4)
    refused("level_negatives", LevelArguments, shrink=2.0, joint=True, negatives="both")


def test_one_value_for_all_levels_or_one_for_each():
    assert per_level(7, 3, "steps") == per_level([7], 3, "steps") == [7, 7, 7]
    assert per_level([1, 2, 3], 3, "steps") == [1, 2, 3] and per_level("tfn", 2, "negatives") == ["tfn", "tfn"]
    for values in ([1, 2], [1, 2, 3, 4], []):
        refused("level_steps", per_level, values, 3, "steps")


@pytest.mark.parametrize(
    "options, levels",
    [
        ({"indices": [3, 1]}, [1, 3]),
        ({"indices": -1}, [3]),
        ({"indices": [-3, 1, -1]}, [1, 3]),
        ({"indices": [3], "max_nodes": 5}, [3]),
    ],
    ids=str,
)
def test_chosen_levels(options, levels):
    assert LevelArguments(**options).choose_levels(TREE) == levels


@pytest.mark.parametrize(
    "together, options, levels, negatives",
    [
        (28, {}, [3], ["all"]),
        (27, {}, [2, 3], ["all", "both"]),
        (5, {}, [2, 3], ["both", "both"]),
        (27, {"max_nodes": 6}, [2], ["all"]),
        (5, {"indices": [1, 2, 3]}, [1, 2, 3], ["all", "both", "both"]),
        (27, {"negatives": "tfn"}, [2, 3], ["tfn", "tfn"]),
        (27, {"negatives": ["all", "man"]}, [2, 3], ["all", "man"]),
    ],
    ids=str,
)
def test_levels_and_negatives_by_the_nodes_that_can_be_scored_together(
    together, options, levels, negatives, monkeypatch
):
    # The tree has 3, 6 and 28 nodes.
    monkeypatch.setattr("hf_xmc.modeling_heads.SPARSE_ROWS", together)
    chosen = LevelArguments(**options)
    assert chosen.choose_levels(TREE) == levels
    assert chosen.choose_negatives(TREE, levels) == negatives


def test_a_tree_without_levels_above_the_labels(monkeypatch):
    monkeypatch.setattr("hf_xmc.modeling_heads.SPARSE_ROWS", 5)
    assert LevelArguments().choose_levels(LabelTree.flat(9)) == [1]


def test_levels_that_the_tree_does_not_have():
    for options in ({"indices": [0]}, {"indices": [4]}, {"indices": [-4]}, {"indices": []}, {"max_nodes": 2}):
        refused("level_indices", LevelArguments(**options).choose_levels, TREE)


def test_groups_of_levels():
    assert LevelArguments(joint=True).group_levels([1, 3]) == [[1, 3]]
    assert LevelArguments().group_levels([1, 3]) == [[1], [3]]
