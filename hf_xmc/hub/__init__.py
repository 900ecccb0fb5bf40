"""Publishing: model cards, self-contained copies, uploads of models and datasets."""
