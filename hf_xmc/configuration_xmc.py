"""Configuration of an extreme multi-label text classifier."""

from __future__ import annotations

from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec


class XMCConfig(PreTrainedConfig):
    """
    What a model is made of and how it predicts by default.

    The number and the names of the labels are not in here (`id2label` of a million labels makes a slow `config.json`):
    names are in `labels.json`, numbers in `level_sizes`.

    Args:
        encoder_config (`PreTrainedConfig` or `dict`, *optional*):
            Configuration of the transformer encoder. `None` is a linear tagger: a ranker on sparse features.
        method (`str`, *optional*):
            Name of the method that the model was trained by.
        level_sizes (`list[int]`, *optional*):
            Nodes of each level of the label tree, the root's children first, the labels last.
        has_tfidf (`bool`, *optional*, defaults to `False`):
            Whether the model makes TF-IDF features of text. A model without takes vectors only.
        vector_power (`float`, *optional*, defaults to 1.0):
            Power that the values of given vectors are raised to before they are scaled to unit length. 0.5 damps terms
            that one document repeats, where the vectors hold raw counts.
        has_ranker (`bool`, *optional*, defaults to `False`):
            Whether the model has a linear ranker.
        top_k (`int`, *optional*, defaults to 10):
            Labels predicted for a document unless asked otherwise.
        beam_size (`int`, *optional*):
            Nodes kept per level in a search unless asked otherwise; by default as many as the ranker was trained for.
            0 keeps all: exact search.
    """

    model_type = "hf-xmc"
    sub_configs_defaults = {"encoder_config": SubConfigSpec(config_class=AutoConfig, model_type="bert", optional=True)}

    encoder_config: dict | PreTrainedConfig | None = None
    method: str | None = None
    level_sizes: list[int] | None = None
    has_tfidf: bool = False
    has_ranker: bool = False
    vector_power: float = 1.0
    top_k: int = 10
    beam_size: int | None = None
