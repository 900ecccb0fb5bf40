"""The `extreme-text-classification` pipeline."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence, Sized
from numbers import Real
from types import GeneratorType
from typing import Any

from torch.utils.data import DataLoader, Dataset
from transformers import Pipeline
from transformers.pipelines.pt_utils import PipelineDataset, PipelineIterator

# Remote code: transformers looks up configurations and ensembles in this module, too.
from .configuration_xmc import XMCConfig as XMCConfig
from .configuration_xmc import XMCEnsembleConfig as XMCEnsembleConfig
from .ensemble_xmc import XMCEnsemble as XMCEnsemble
from .modeling_utils import named
from .modeling_xmc import XMCForTextClassification
from .output import XMCOutput
from .remote_code import CLASSES
from .utils import check_count


class ExtremeTextClassificationPipeline(Pipeline):
    """
    Predicts the best of very many labels for each text.

    A document is a `str` or a dictionary with the text under `"text"`, or the columns of a model that was trained on
    several. A list of documents gives a list of results; generators, `KeyDataset`s and datasets are read as a stream
    and give an iterator. A `batch_size` above 1 is much faster.

    An empty text, or one without a known word, is not an error: its labels are ranked by their bias alone, with low
    scores. A `threshold` leaves them out.

    Args:
        model ([`XMCForTextClassification`] or [`XMCEnsemble`]): The model.
        top_k (`int`, *optional*): Labels per document. Default: the model's.
        threshold (`float`, *optional*): Labels with a lower score are left out, so a result may be empty.
        beam_size, predict_with, labels, exclude, under, level, with_parents:
            As in [`~XMCForTextClassification.predict`].
        batch_size (`int`, *optional*, defaults to 1):
            Documents that pass through the encoder, TF-IDF and ranker together.

    Example:

    ```python
    import hf_xmc
    from transformers import pipeline

    tag = pipeline("extreme-text-classification", model="my-tagger")
    tag("Prospects for renewable energy education in Jordan", top_k=2)
    # [{'label': 'renewable energy sources', 'score': 0.83}, {'label': 'Jordan', 'score': 0.71}]
    ```
    """

    model: XMCForTextClassification

    # With `None`, the value of the base class, transformers tries to load each of them and hides the failure.
    _load_tokenizer = False  # type: ignore[assignment]
    _load_processor = False  # type: ignore[assignment]
    _load_image_processor = False  # type: ignore[assignment]
    _load_video_processor = False  # type: ignore[assignment]
    _load_feature_extractor = False  # type: ignore[assignment]

    def __init__(self, model: XMCForTextClassification, **kwargs: Any) -> None:
        # By name, because remote code defines its own classes.
        if getattr(getattr(model, "config", None), "model_type", None) not in CLASSES:
            path = getattr(getattr(model, "config", None), "name_or_path", "unnamed")
            raise ValueError(
                f"The model (`{path}`) is a {type(model).__name__}, not a model of hf_xmc. Pass a model trained with "
                "`XMCTrainer`, not an encoder."
            )
        super().__init__(model=model, **kwargs)
        self.model.eval()

    # Without **kwargs, so that a misspelt parameter raises a TypeError.
    def _sanitize_parameters(  # type: ignore[override]
        self,
        top_k: int | None = None,
        threshold: float | None = None,
        beam_size: int | None = None,
        predict_with: str | None = None,
        labels: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        under: str | Sequence[str] | None = None,
        level: int | None = None,
        with_parents: bool | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        if top_k is not None:
            check_count("top_k", top_k)
        if beam_size is not None:
            check_count("beam_size", beam_size, least=0)
        if threshold is not None and (isinstance(threshold, bool) or not isinstance(threshold, Real)):
            raise TypeError(f"`threshold` must be a number, not {threshold!r:.80} ({type(threshold).__name__}).")
        if threshold is not None and math.isnan(threshold):
            raise ValueError("`threshold` is not a number (nan), so that no label would be returned. Leave it out.")
        self.model.restrict(labels, exclude, under)  # raises if a label is unknown
        self.model.check_hierarchy(level, False if with_parents is None else with_parents)
        search = {"top_k": top_k, "beam_size": beam_size, "predict_with": predict_with}
        choice = {"labels": labels, "exclude": exclude, "under": under, "level": level, "with_parents": with_parents}
        given = {name: value for name, value in {**search, **choice}.items() if value is not None}
        return {}, given, {} if threshold is None else {"threshold": threshold}

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """
        Predicts the labels of one document, several, or a stream of them.

        Args:
            inputs (`str`, `dict`, `list` or an iterable):
                A document, a list of documents, or a stream (generator, dataset, column of a dataset).
            args:
                Not supported.
            kwargs:
                `top_k`, `threshold`, `beam_size`, `predict_with`, `labels`, `exclude`, `under`, `level`,
                `with_parents` and `batch_size`, see the class.

        Returns:
            A list of `{"label": ..., "score": ...}`, best first, for each document. A label with a name in words other
            than itself has the key `"name"`, too.
        """
        if isinstance(inputs, (list, tuple)):
            if not inputs:
                return []
            inputs = list(inputs)
        elif isinstance(inputs, Iterable) and not isinstance(inputs, (str, bytes, dict, Dataset, GeneratorType)):
            inputs = (document for document in inputs)  # the base class streams generators only
        return super().__call__(inputs, *args, **kwargs)

    def preprocess(self, document: str | dict[str, Any]) -> dict[str, list[str]]:  # type: ignore[override]
        """One document as a batch of one."""
        return {"text": [self.model.text_of(document)]}

    def _forward(  # type: ignore[override]
        self,
        inputs: dict[str, list[str]],
        labels: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        under: str | Sequence[str] | None = None,
        **search: Any,
    ) -> XMCOutput:
        texts, restriction = inputs["text"], self.model.restrict(labels, exclude, under)
        features = self.model.featurize(texts, batch_size=len(texts))
        return self.model.find_labels(features, restriction=restriction, **search)

    def postprocess(self, output: XMCOutput, threshold: float | None = None) -> list[dict[str, Any]]:  # type: ignore[override]
        """The labels, their names and scores of one document."""
        (pairs,) = self.model.name_labels(output)
        assert self.model.labels is not None
        names = self.model.labels.other_names
        return [named(pair, names) for pair in pairs if threshold is None or pair[1] >= threshold]

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """
        Saves the model. The base class would add this module's code, so that loading needs `trust_remote_code`.

        Args:
            save_directory (`str` or `os.PathLike`): Folder; created if it does not exist.
            kwargs:
                Passed to [`~XMCForTextClassification.save_pretrained`].
        """
        self.model.save_pretrained(save_directory, **kwargs)

    def get_iterator(
        self,
        inputs: Any,
        num_workers: int,
        batch_size: int,
        preprocess_params: dict[str, Any],
        forward_params: dict[str, Any],
        postprocess_params: dict[str, Any],
    ) -> PipelineIterator:
        """Batches texts without padding; the base class can only batch what a tokenizer has padded."""
        check_count("batch_size", batch_size)
        dataset = (PipelineDataset if isinstance(inputs, Sized) else PipelineIterator)(
            inputs, self.preprocess, preprocess_params
        )
        # Each worker would read the whole stream.
        workers = num_workers if isinstance(inputs, Sized) else 0
        loader = DataLoader(dataset, num_workers=workers, batch_size=batch_size, collate_fn=_join)
        batches = PipelineIterator(loader, self.forward, forward_params, loader_batch_size=batch_size)
        return PipelineIterator(batches, self.postprocess, postprocess_params)


def _join(documents: list[dict[str, list[str]]]) -> dict[str, list[str]]:
    return {"text": [text for document in documents for text in document["text"]]}
