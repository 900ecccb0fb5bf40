"""Ensembles: several trained models under one last scorer, or the weighted mean of their scores or ranks."""

from __future__ import annotations

import math
import os
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers.utils import CONFIG_NAME

from .configuration_xmc import XMCEnsembleConfig
from .features import Features
from .labels import Labels
from .loading import HUB_KWARGS, verify_files
from .modeling_utils import PredictMixin
from .modeling_xmc import XMCForTextClassification
from .output import XMCOutput, padded
from .remote_code import SelfContainedModel
from .restriction import Restriction
from .scorer import SCORER_FILE, PartScores, Scorer
from .serialization import MAX_SHARD_SIZE, check_link, check_model_type, check_plain_name
from .utils import check_count

AVERAGES = ("scores", "ranks")
COMBINATIONS = ("scorer", *AVERAGES)
# Probabilities of 0 and 1 have no finite log-odds.
_EPS = 1e-6


@dataclass(frozen=True)
class MemberFeatures:
    """The features of documents for each model of an ensemble."""

    members: Sequence[Features]

    def __len__(self) -> int:
        return len(self.members[0])


class XMCEnsemble(PredictMixin, SelfContainedModel):
    """
    Predicts labels from the scores of several models.

    With a [`Scorer`], a logistic model turns the log-odds of the models into one probability. Without one, the
    weighted mean of their scores or ranks decides. The models may be of any method and must have the same labels, in
    any order. An ensemble is saved as one folder with a subfolder for each model. It is loaded, evaluated and used in
    pipelines like any other model.

    Args:
        config ([`XMCEnsembleConfig`]):
            Configuration.
        members (`Sequence[XMCForTextClassification]`):
            The trained models, one for each entry of `config.members`.
        scorer ([`Scorer`], *optional*):
            Its parts are the entries of `config.members`. For `config.combine="scorer"`.

    Example:

    ```python
    ensemble = XMCEnsemble.from_members(["my-tagger", "my-transformer"], weights=[0.3, 0.7])
    ensemble.save_pretrained("my-ensemble")
    ```
    """

    config: XMCEnsembleConfig
    config_class = XMCEnsembleConfig
    base_model_prefix = "ensemble"

    def __init__(
        self, config: XMCEnsembleConfig, members: Sequence[XMCForTextClassification], scorer: Scorer | None = None
    ) -> None:
        super().__init__(config)
        self.members = nn.ModuleList()
        self.post_init()
        # After `post_init`, which would initialise the weights of models that were not loaded from files.
        self.members.extend(members)
        _check_config(config, len(members))
        _check_scorer(config, scorer)
        self.scorer = scorer
        self.labels: Labels = _common_labels(members, config.members or ())
        # For each model, the ids of its labels in the ensemble.
        self._label_ids = [torch.from_numpy(self.labels.ids(member.labels.names)) for member in members]  # type: ignore[union-attr]

    @classmethod
    def from_members(
        cls,
        members: Sequence[XMCForTextClassification | str | os.PathLike],
        weights: Sequence[float] | None = None,
        combine: str = "scores",
        **config_kwargs: Any,
    ) -> XMCEnsemble:
        """
        Creates an ensemble of trained models.

        Args:
            members (`Sequence[XMCForTextClassification or str]`):
                Models, or their folders or Hub ids.
            weights (`Sequence[float]`, *optional*):
                Weight of each model, of any sum; equal by default.
            combine (`str`, *optional*, defaults to `"scores"`):
                `"scores"` or `"ranks"`, see [`XMCEnsembleConfig`].
            config_kwargs:
                Further fields of [`XMCEnsembleConfig`].
        """
        loaded = [
            member
            if isinstance(member, XMCForTextClassification)
            else XMCForTextClassification.from_pretrained(member)
            for member in members
        ]
        values = [1.0] * len(loaded) if weights is None else [float(weight) for weight in weights]
        total = sum(values)
        config = XMCEnsembleConfig(
            members=[f"member-{place}" for place in range(1, len(loaded) + 1)],
            weights=[weight / total for weight in values] if total else values,
            combine=combine,
            **config_kwargs,
        )
        return cls(config, loaded)

    # ---- Prediction ----

    @property
    def text_columns(self) -> list[str]:
        """Columns that the texts of documents come from, those of the first model."""
        return self.models[0].text_columns

    def featurize(self, texts: Sequence[str], num_threads: int | None = None, batch_size: int = 32) -> MemberFeatures:
        """Returns the features of texts for each model, see [`~XMCForTextClassification.featurize`]."""
        return MemberFeatures([member.featurize(texts, num_threads, batch_size) for member in self.models])

    def prepare_vectors(self, vectors: Features) -> MemberFeatures:
        """Returns input vectors as each model takes them."""
        return MemberFeatures([member.prepare_vectors(vectors) for member in self.models])

    def forward(
        self,
        features: MemberFeatures,
        top_k: int | None = None,
        beam_size: int | None = None,
        num_threads: int | None = None,
        predict_with: str | None = None,
        *,
        restriction: Restriction | None = None,
    ) -> XMCOutput:
        """
        Finds the best labels of each document.

        Args:
            features ([`MemberFeatures`]): Documents, see [`~XMCEnsemble.featurize`].
            top_k, num_threads, restriction: See [`~XMCForTextClassification.forward`].
            beam_size, predict_with: The same, for all models; each model has its own by default.

        Returns:
            [`XMCOutput`]: `scores` and `indices` of shape `(batch, top_k)`.
        """
        top_k = check_count("top_k", self.config.top_k if top_k is None else top_k)
        top_k = min(top_k, len(self.labels) if restriction is None else len(restriction))
        search = beam_size, num_threads, predict_with
        scores, indices = self.member_scores(features, top_k, *search, restriction)
        if self.scorer is not None:
            parts, labels = self.part_scores(scores, indices), None
            if restriction is not None:
                labels = restriction.candidates(len(indices[0]))
                of_all = self.part_scores(*self.member_scores(features, 1, *search, candidates=1))
                parts = {name: part.restricted(of_all[name]) for name, part in parts.items()}
            found = self.scorer.predict(parts, self.labels.log_counts, top_k, labels)
            return XMCOutput.from_numpy(*found, indices.device)
        assert self.config.weights is not None
        return combine_members(scores, indices, self.config.weights, self.config.combine, top_k)

    def member_scores(
        self,
        features: MemberFeatures,
        top_k: int,
        beam_size: int | None = None,
        num_threads: int | None = None,
        predict_with: str | None = None,
        restriction: Restriction | None = None,
        candidates: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Returns the candidates of each model, at least `top_k` and `candidates` (by default of the configuration).

        The other arguments are those of `forward`.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: scores and label ids in the ensemble (padded with -1) of shape
            `(models, batch, labels)`, best first.
        """
        check_count("top_k", top_k)
        beam_size = self.config.beam_size if beam_size is None else beam_size
        predict_with = self.config.predict_with if predict_with is None else predict_with
        candidates = self.config.candidates if candidates is None else candidates
        count, scores, indices = min(max(top_k, candidates), len(self.labels)), [], []
        if restriction is not None:
            count = len(restriction) if restriction.is_exhaustive else min(count, len(restriction))
        for member, inputs, ids in zip(self.models, features.members, self._label_ids, strict=True):
            own = None
            if restriction is not None:
                own = Restriction(np.flatnonzero(restriction.permitted[ids.numpy()]), len(ids))
            output = member(inputs, count, beam_size, num_threads, predict_with, restriction=own)
            scores.append(output.scores)
            known = ids.to(output.indices.device)[output.indices.clamp(min=0)]
            indices.append(known.masked_fill(output.indices < 0, -1))
        return torch.stack(scores), torch.stack(indices)

    def part_scores(self, scores: torch.Tensor, indices: torch.Tensor) -> dict[str, PartScores]:
        """Returns the results of `member_scores` as the scorer takes them: the log-odds of each model."""
        odds = torch.logit(scores.float(), eps=_EPS).cpu().numpy()
        parts = zip(self.config.members or (), odds, indices.cpu().numpy(), strict=True)
        return {name: PartScores.from_list(own, labels) for name, own, labels in parts}

    @property
    def models(self) -> list[XMCForTextClassification]:
        """The models, in the order of their weights."""
        return list(self.members)  # type: ignore[arg-type]

    # ---- Files ----

    def _save_parts(self, folder: str | os.PathLike, max_shard_size: int | str = MAX_SHARD_SIZE) -> None:
        """Writes each model into its subfolder, without code: the code of the ensemble loads them."""
        for name, member in zip(self.config.members or (), self.models, strict=True):
            member.save_pretrained(os.path.join(folder, name), self_contained=False, max_shard_size=max_shard_size)
        if self.scorer is not None:
            self.scorer.save_pretrained(folder)

    def _save_weights(  # type: ignore[override]
        self, folder: str | os.PathLike, is_main_process: bool, max_shard_size: int | str, token: Any = None
    ) -> None:
        """Writes the configuration; the ensemble itself has no weights."""
        if is_main_process:
            self.config.architectures = [type(self).__name__]
            self.config.save_pretrained(folder)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: str | os.PathLike, *args: Any, **kwargs: Any
    ) -> XMCEnsemble:
        """
        Loads an ensemble from a folder or the Hub.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`):
                A folder written by [`~XMCEnsemble.save_pretrained`], or a model id on the Hub.
            args:
                Not supported.
            kwargs:
                Passed to [`~XMCForTextClassification.from_pretrained`] of each model.
        """
        if args or kwargs.pop("output_loading_info", False):
            raise TypeError("`XMCEnsemble.from_pretrained` takes no positional arguments or `output_loading_info`.")
        config = kwargs.pop("config", None)
        hub_kwargs = {name: kwargs[name] for name in HUB_KWARGS if kwargs.get(name) is not None}
        if not isinstance(config, XMCEnsembleConfig):
            check_model_type(pretrained_model_name_or_path, XMCEnsembleConfig.model_type, **hub_kwargs)
            config = XMCEnsembleConfig.from_pretrained(pretrained_model_name_or_path, **hub_kwargs)
        config.name_or_path = pretrained_model_name_or_path
        source = f"`{os.path.join(pretrained_model_name_or_path, CONFIG_NAME)}`"
        names = [check_plain_name(name, source) for name in config.members or ()]
        if not names:
            raise ValueError(f"{source} has no `members`: an ensemble has at least one model. Download it again.")
        for name in names:
            check_link(Path(pretrained_model_name_or_path, name))
        if kwargs.pop("verify", False):
            verify_files(pretrained_model_name_or_path, **hub_kwargs)
        scorer = None
        if config.combine == "scorer":
            scorer = Scorer.from_pretrained(pretrained_model_name_or_path, **hub_kwargs)
        above = kwargs.pop("subfolder", None) or ""
        members = [
            XMCForTextClassification.from_pretrained(
                pretrained_model_name_or_path, subfolder=posixpath.join(above, name), **kwargs
            )
            for name in names
        ]
        return cls(config, members, scorer).eval()


def combine_members(
    scores: torch.Tensor, indices: torch.Tensor, weights: Sequence[float], combine: str, top_k: int
) -> XMCOutput:
    """
    Returns the best labels by the weighted mean over several models; ties are broken by label id.

    `scores` (best first) and `indices` (padded with -1) have the shape `(models, batch, labels)`.
    """
    places = torch.arange(1, scores.shape[2] + 1, device=scores.device)
    values = scores if combine == "scores" else (1 / places).expand_as(scores)
    factors = torch.tensor(list(weights), device=scores.device).view(-1, 1, 1)
    values = (values * factors).masked_fill(indices < 0, 0)
    # Sorts the labels of all models, so that equal labels form runs, and sums over each run.
    labels, order = torch.cat(list(indices), dim=1).sort(dim=1, stable=True)
    values = torch.cat(list(values), dim=1).gather(1, order)
    run = functional.pad((labels[:, 1:] != labels[:, :-1]).cumsum(dim=1), (1, 0))
    sums = torch.zeros_like(values).scatter_add_(1, run, values)
    names = torch.full_like(labels, -1).scatter_(1, run, labels)
    # -1 ranks padding after labels of score 0.
    best, order = sums.masked_fill(names < 0, -1).sort(dim=1, descending=True, stable=True)
    best, names = padded(best[:, :top_k].clamp(min=0), names.gather(1, order)[:, :top_k], top_k)
    return XMCOutput(scores=best, indices=names)


def _check_config(config: XMCEnsembleConfig, count: int) -> None:
    weights, names = config.weights or [], config.members or []
    if config.combine not in COMBINATIONS:
        raise ValueError(f"`combine={config.combine!r}` is not one of {', '.join(COMBINATIONS)}.")
    if config.candidates < 1:
        raise ValueError(f"`candidates` must be at least 1, not {config.candidates}.")
    if not count or len(names) != count:
        raise ValueError(f"`members` has {len(names)} names for {count} models. At least one model is needed.")
    if config.combine == "scorer":
        return
    if len(weights) != count:
        raise ValueError(f"`weights` has {len(weights)} values for {count} models. Pass one for each model.")
    if not all(weight >= 0 and math.isfinite(weight) for weight in weights) or not sum(weights) > 0:
        raise ValueError(f"`weights` is {weights}; the values must not be negative, and not all 0.")


def _check_scorer(config: XMCEnsembleConfig, scorer: Scorer | None) -> None:
    if (config.combine == "scorer") != (scorer is not None):
        raise ValueError(
            f"`combine={config.combine!r}` {'needs a' if scorer is None else 'takes no'} scorer. Make the ensemble "
            "with `make_ensemble(..., validation=...)`."
        )
    if scorer is not None and list(scorer.parts) != config.members:
        raise ValueError(f"`{SCORER_FILE}` is for {list(scorer.parts)}, but `members` is {config.members}.")


def _common_labels(members: Sequence[XMCForTextClassification], names: Sequence[str]) -> Labels:
    """Returns the labels of the first model; raises an error if the others have different labels."""
    for member, name in zip(members, names, strict=True):
        if member.labels is None:
            raise ValueError(f"The model `{name}` has no labels: train it first.")
    first = members[0].labels
    assert first is not None
    known = set(first.names)
    for member, name in zip(members[1:], names[1:], strict=True):
        others = set(member.labels.names)  # type: ignore[union-attr]
        if others != known:
            example = sorted(others ^ known)[0]
            missing = name if example in known else names[0]
            raise ValueError(
                f"The models `{names[0]}` and `{name}` have different labels ({len(known)} and {len(others)}): "
                f"{example!r:.80} is missing in `{missing}`. Train all models on the same labels."
            )
    return first
