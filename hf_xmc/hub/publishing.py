"""Forwards cards and uploads of a trainer to its [`Publisher`]; goes as soon as the trainer does it itself."""

from __future__ import annotations

from typing import Any

from ..training.record import TrainingRecorder
from .publisher import Publisher


class PublishingMixin:
    """Gives a [`~transformers.Trainer`] a recorder and a publisher."""

    train_dataset: Any
    eval_dataset: Any
    add_callback: Any

    def _watch_for_card(self) -> None:
        self.card = self.recorder = TrainingRecorder(self.train_dataset, self.eval_dataset)
        self.publisher = Publisher(self)
        self.add_callback(self.recorder)

    def _update_card(self) -> None:
        self.publisher.update_model_card()

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes the model card; see [`Publisher`]."""
        self.publisher.create_model_card(*args, **kwargs)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Uploads the model; see [`Publisher`]."""
        return self.publisher.push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self.publisher.push_checkpoint(checkpoint_folder)
