"""What a trainer publishes: card, model, checkpoints."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, ClassVar

from transformers.trainer_utils import HubStrategy
from transformers.utils import PushInProgress

from .card_callback import ModelCardCallback
from .card_data import CardOptions
from .model_card import write_model_card
from .push import Destination, create_repo, push_checkpoint, push_folder

logger = logging.getLogger(__name__)


class PublishingMixin:
    """Gives a [`~transformers.Trainer`] cards of extreme classifiers and uploads of all their files."""

    # Patterns of what is in a checkpoint and not of the model.
    _checkpoint_files: ClassVar[Sequence[str]] = ()

    args: Any
    state: Any
    control: Any
    callback_handler: Any
    train_dataset: Any
    eval_dataset: Any
    hub_model_id: str | None
    push_in_progress: Any
    add_callback: Any
    save_model: Any
    is_world_process_zero: Any
    _finish_current_push: Any

    def _watch_for_card(self) -> None:
        """Begins to gather what the card says."""
        self.card = ModelCardCallback(self.train_dataset, self.eval_dataset)
        self._card_options = CardOptions()
        self.add_callback(self.card)

    def _update_card(self) -> None:
        """Writes the card anew. What was trained or measured must not be lost because that fails."""
        try:
            self.create_model_card()
        except (OSError, ValueError) as error:
            logger.warning("The card of the model could not be written: %s", error)

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        dataset: str | None = None,
    ) -> None:
        """
        Writes the card of the model in `args.output_dir`; `train` and `evaluate` do so by themselves.

        A card that was written or edited by hand stays as it is.

        Args:
            language (`str`, *optional*): Language of the texts, such as `en`.
            license (`str`, *optional*): Licence of the model, such as `cc-by-4.0`.
            tags (`str` or `list[str]`, *optional*): Further tags.
            model_name (`str`, *optional*): Id on the Hub; the name of the folder by default.
            finetuned_from (`str`, *optional*): Id on the Hub of the encoder.
            dataset (`str`, *optional*): Name of the training data, or its id on the Hub.
        """
        given: dict[str, Any] = {
            "language": language,
            "license": license,
            "model_name": model_name,
            "dataset": dataset,
        }
        given |= {"base_model": finetuned_from, "tags": [tags] if isinstance(tags, str) else tags}
        for name, value in given.items():
            if value is not None:
                setattr(self._card_options, name, value)
        if self.is_world_process_zero():
            self.card.record.save(str(self.args.output_dir))
            write_model_card(str(self.args.output_dir), self._card_options)

    def push_to_hub(
        self,
        repo_id: str | None = None,
        *,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        create_pr: bool = False,
        self_contained: bool = True,
        **card: Any,
    ) -> Any:
        """
        Saves the model and its card and uploads all of it.

        Args:
            repo_id (`str`, *optional*):
                Repository; `args.hub_model_id` or the name of `args.output_dir` by default.
            commit_message (`str`, *optional*, defaults to `"End of training"`):
                Message of the commit.
            blocking (`bool`, *optional*, defaults to `True`):
                Whether to wait for the end of the upload.
            token (`str`, *optional*):
                Token; `args.hub_token` by default.
            revision (`str`, *optional*):
                Branch; `args.hub_revision` by default.
            private (`bool`, *optional*):
                Whether a new repository is private; `args.hub_private_repo` by default.
            create_pr (`bool`, *optional*, defaults to `False`):
                Whether to open a pull request instead of committing.
            self_contained (`bool`, *optional*, defaults to `True`):
                Whether the code that loads the model goes along, so that it can be used without this package.
            card:
                Passed to [`~XMCTrainer.create_model_card`].

        Returns:
            `CommitInfo`, or a `Future` of it with `blocking=False`.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        destination = self._destination(repo_id)
        for name, value in (("token", token), ("revision", revision), ("private", private)):
            if value is not None:
                setattr(destination, name, value)
        destination.repo_id = create_repo(destination)
        destination.commit_message, destination.create_pr = commit_message, create_pr
        destination.run_as_future = not blocking
        self.create_model_card(**{"model_name": destination.repo_id, **card})
        self._finish_current_push()
        return push_folder(str(self.args.output_dir), destination, self_contained=self_contained)

    def _destination(self, repo_id: str | None = None) -> Destination:
        folder = os.path.basename(os.path.abspath(str(self.args.output_dir)))
        return Destination(
            repo_id or self.hub_model_id or self.args.hub_model_id or folder,
            token=self.args.hub_token,
            revision=self.args.hub_revision,
            private=self.args.hub_private_repo,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Uploads all files of the model; the base class knows only those that every model has, and adds a pickle."""
        strategy, running = self.args.hub_strategy, self.push_in_progress
        if not self.is_world_process_zero() or strategy == HubStrategy.END:
            return
        if running is not None and not running.is_done() and not self.args.hub_always_push:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        destination = self._destination()
        destination.commit_message = f"Training in progress, step {self.state.global_step}"
        jobs = [push_checkpoint(checkpoint_folder, destination, self._checkpoint_files)]
        if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            name = "last-checkpoint" if strategy == HubStrategy.CHECKPOINT else os.path.basename(checkpoint_folder)
            jobs.append(push_checkpoint(checkpoint_folder, destination, path_in_repo=name))
        if running is not None and not running.is_done():
            running.jobs.extend(jobs)
        else:
            self.push_in_progress = PushInProgress(jobs)
