"""Cards and uploads of a trainer."""

from __future__ import annotations

import logging
import os
from typing import Any

from transformers.trainer_utils import HubStrategy
from transformers.utils import PushInProgress

from ..training.checkpoint import STATE_FILES
from .model_card import CardOptions, forget_model, write_model_card
from .upload import Destination, create_repo, push_checkpoint, push_folder

logger = logging.getLogger(__name__)


class Publisher:
    """
    Writes the card of a trainer's model and uploads the model and its checkpoints.

    [`XMCTrainer`] imports it by name when it is first needed, because `hub` is the layer above `training`.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._card_options = CardOptions()

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
        Writes the training record and the model card, with these [`CardOptions`], into `args.output_dir`.

        `train` and `evaluate` call it. A card that was written or edited by hand is kept.
        """
        options: dict[str, Any] = {
            "language": language,
            "license": license,
            "tags": [tags] if isinstance(tags, str) else tags,
            "model_name": model_name,
            "base_model": finetuned_from,
            "dataset": dataset,
        }
        for name, value in options.items():
            if value is not None:
                setattr(self._card_options, name, value)
        if self.trainer.is_world_process_zero():
            folder = str(self.trainer.args.output_dir)
            self.trainer.recorder.record.save(folder)
            write_model_card(folder, self._card_options)

    def update_model_card(self) -> None:
        """Writes the card again; a failure is logged, so that the training or evaluation is not lost."""
        try:
            self.create_model_card()
        except (OSError, ValueError) as error:
            logger.warning("The model card could not be written: %s", error)

    def forget_model(self, folder: str | os.PathLike) -> None:
        """Removes record, results, plots and generated card of an earlier model in `folder`."""
        forget_model(folder)

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
        Saves the model and its card and uploads them. Collective: only the main process uploads.

        Args:
            repo_id (`str`, *optional*): Repository; `args.hub_model_id` or the name of the folder by default.
            commit_message (`str`, *optional*, defaults to `"End of training"`): Message of the commit.
            blocking (`bool`, *optional*, defaults to `True`): Whether to wait for the end of the upload.
            token (`str`, *optional*): Token; `args.hub_token` by default.
            revision (`str`, *optional*): Branch; `args.hub_revision` by default.
            private (`bool`, *optional*): Whether a new repository is private; `args.hub_private_repo` by default.
            create_pr (`bool`, *optional*, defaults to `False`): Whether to open a pull request.
            self_contained (`bool`, *optional*, defaults to `True`):
                Whether to upload the code that loads the model, so that it works without this package.
            card: Arguments of [`~Publisher.create_model_card`].

        Returns:
            `CommitInfo`, or a `Future` of it with `blocking=False`. `None` on other processes.
        """
        trainer = self.trainer
        trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
        trainer.save_model(_internal_call=True)
        if not trainer.is_world_process_zero():
            return None
        destination = self._destination(repo_id)
        for name, value in (("token", token), ("revision", revision), ("private", private)):
            if value is not None:
                setattr(destination, name, value)
        destination.repo_id = create_repo(destination)
        destination.commit_message, destination.create_pr = commit_message, create_pr
        destination.run_as_future = not blocking
        self.create_model_card(**{"model_name": destination.repo_id, **card})
        trainer._finish_current_push()
        return push_folder(str(trainer.args.output_dir), destination, self_contained=self_contained)

    def push_checkpoint(self, folder: str) -> None:
        """
        Uploads a checkpoint in the background according to `args.hub_strategy`.

        The base class uploads only the files that every model has, and a pickle.
        """
        trainer = self.trainer
        strategy, running = trainer.args.hub_strategy, trainer.push_in_progress
        if not trainer.is_world_process_zero() or strategy == HubStrategy.END:
            return
        is_running = running is not None and not running.is_done()
        if is_running and not trainer.args.hub_always_push:
            return
        trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
        destination = self._destination()
        destination.commit_message = f"Training in progress, step {trainer.state.global_step}"
        jobs = [push_checkpoint(folder, destination, STATE_FILES)]
        if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            name = "last-checkpoint" if strategy == HubStrategy.CHECKPOINT else os.path.basename(folder)
            jobs.append(push_checkpoint(folder, destination, path_in_repo=name))
        if is_running:
            running.jobs.extend(jobs)
        else:
            trainer.push_in_progress = PushInProgress(jobs)

    def _destination(self, repo_id: str | None = None) -> Destination:
        args = self.trainer.args
        folder = os.path.basename(os.path.abspath(str(args.output_dir)))
        return Destination(
            repo_id or self.trainer.hub_model_id or args.hub_model_id or folder,
            token=args.hub_token,
            revision=args.hub_revision,
            private=args.hub_private_repo,
        )
