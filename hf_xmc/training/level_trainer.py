"""The optimisation of encoder and heads: optimizer, learning rates, loss, gradients, checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from ..modeling_heads import LevelHead
from ..modeling_xmc import XMCForTextClassification
from ..parallel.stage_cache import StageCache
from ..serialization import new_folder, partial_name
from .arguments import XMCTrainingArguments
from .checkpoint import (
    TRAINER_STATE_FILE,
    load_optimizer,
    load_random_state,
    save_optimizer,
    save_random_state,
    seal_checkpoint,
)
from .large_encoders import ShardedEncoder, choose_modules, gathered, spread
from .levels import LevelBatches, Levels
from .optimizer import RowAdamW
from .progress import StageProgressCallback


class LevelTrainer(Trainer):
    """
    Fine-tunes the levels of the label tree, `self._levels`, in one loop of [`~transformers.Trainer`].

    Checkpoints hold safetensors and JSON only.
    """

    args: XMCTrainingArguments
    model: XMCForTextClassification
    optimizer: torch.optim.Optimizer
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler
    cache: StageCache
    publisher: Any
    _progress: StageProgressCallback
    # `None` outside of fine-tuning.
    _levels: Levels = None  # type: ignore[assignment]
    # Step and time of the last log entry.
    _last_log: tuple[int, float] = (0, 0.0)
    # Step from which a resumed training continues.
    _first_step = 0
    # Parameters whose gradients are averaged over processes here and not by DDP or FSDP.
    _dense_rows: Sequence[nn.Parameter] = ()
    _sparse_rows: Sequence[nn.Parameter] = ()

    # ---- Data, optimizer, learning rates ----

    def get_train_dataloader(self) -> Any:
        """Returns the batches of all levels."""
        return LevelBatches(self._levels, self._first_step, self._on_level_begin)

    def _on_level_begin(self, is_new: bool) -> None:
        if is_new:
            # Metrics of different levels are not comparable.
            self.state.best_metric = self.state.best_model_checkpoint = self.state.best_global_step = None
        self._last_log = (self.state.global_step, time.perf_counter())
        self._progress.show_level(self._levels.name, self.state)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Creates AdamW with parameter groups for the encoder with and without weight decay, projections and heads."""
        model = self.model if model is None else model
        if self.optimizer is not None:
            self._check_optimizer(self.optimizer, model)
            return self.optimizer
        decaying = set(self.get_decay_parameter_names(model))
        groups: dict[str, list[nn.Parameter]] = {"encoder": [], "no decay": [], "projections": [], "heads": []}
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if name.startswith("heads."):
                group = "projections" if ".projection." in name else "heads"
            else:
                group = "encoder" if name in decaying else "no decay"
            groups[group].append(parameter)
        decay = {name: 0.0 if name == "no decay" else self.args.weight_decay for name in groups}
        self.optimizer = RowAdamW(
            [{"params": groups[name], "weight_decay": decay[name]} for name in groups],
            lr=1.0,  # the scheduler sets the learning rates
            betas=(self.args.adam_beta1, self.args.adam_beta2),
            eps=self.args.adam_epsilon,
            fused=True,
        )
        return self.optimizer

    @staticmethod
    def _check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Raises if an optimizer passed by the user cannot train the model."""
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        missing = [name for name, own in model.named_parameters() if own.requires_grad and id(own) not in known]
        if missing:
            raise ValueError(
                f"`optimizers`: the optimizer lacks {len(missing)} parameters, such as `{missing[0]}`. `train` adds "
                "the heads: pass `optimizers` only with a model that has its heads, or leave it out."
            )

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Creates the scheduler, whose learning rates rise and fall in every level."""
        if self.lr_scheduler is None:
            schedule = self._levels.schedule
            optimizer = self.optimizer if optimizer is None else optimizer
            rates: Any = [schedule.learning_rate] * 2
            rates += [schedule.projection_learning_rate, schedule.head_learning_rate]
            if not isinstance(getattr(optimizer, "optimizer", optimizer), RowAdamW):
                rates = schedule.factor  # an optimizer of the user has its own learning rates
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    # ---- Steps ----

    def prepare_parallel(self) -> None:
        """Excludes what DDP and FSDP must not handle, before the model is wrapped."""
        heads = [(name, head) for name, head in self.model.named_modules() if isinstance(head, LevelHead)]
        names = [f"{name}.weight" for name, head in heads if head.sparse]
        shares = self.cache.is_shared
        self._sparse_rows = [self.model.get_parameter(name) for name in names] if shares else []
        self._dense_rows = []
        # DDP would send all rows of these gradients, of which a step touches few.
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, names)
        if self.is_fsdp_enabled:
            self._levels.context.root.sharded = ShardedEncoder(self.model)
            choose_modules(self.accelerator.state.fsdp_plugin, self.model)
            sparse = {id(parameter) for parameter in self._sparse_rows}
            self._dense_rows = [own for own in self.model.heads.parameters() if id(own) not in sparse]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Computes the loss of the levels in training."""
        output = self._levels.compute_loss(model, inputs)
        assert output.loss is not None
        if not torch.isfinite(output.loss):
            raise FloatingPointError(
                f"The loss is {output.loss.item()} at step {self.state.global_step} ({self._levels.name}). Lower "
                "`learning_rate` or `level_head_learning_rate`, or train in float32, and resume from the last "
                "checkpoint."
            )
        return (output.loss, output) if return_outputs else output.loss

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Runs one batch, and averages the gradients that neither DDP nor FSDP handles."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._levels.context.encoder_changed()
        if self.accelerator.sync_gradients:
            processes = self.cache.processes
            for parameter in self._dense_rows:
                parameter.grad = processes.average(parameter.grad, parameter)
            for parameter in self._sparse_rows:
                parameter.grad = processes.average_rows(parameter.grad, parameter)
        return loss

    def _clip_grad_norm(self, model: nn.Module, max_norm: float | None = None) -> Any:
        """
        Clips the gradients of encoder and heads separately: one common norm would be dominated by the heads.

        Overridden also because the base class cannot clip sparse gradients. Returns the encoder's gradient norm.
        """
        max_norm = self.args.max_grad_norm if max_norm is None else max_norm
        groups: dict[str, list[nn.Parameter]] = {"encoder": [], "heads": []}
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            if not parameter.grad.is_sparse:
                groups["heads" if "heads." in name else "encoder"].append(parameter)
            else:
                gradient = parameter.grad.coalesce()
                excess = gradient.values().norm() / max_norm
                parameter.grad = gradient / excess if excess > 1 else gradient
        norms = {name: self.accelerator.clip_grad_norm_(own, max_norm) for name, own in groups.items()}
        return gathered(norms["encoder"])

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Overridden because the base class cannot compute the norm of sparse gradients."""
        return self._clip_grad_norm(model, float("inf")) if grad_norm is None else grad_norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs; entries with a loss also get the level, the learning rate of the heads and the speed."""
        if self._levels is not None and "loss" in logs and self._levels.active >= 0:
            step, now = self.state.global_step, time.perf_counter()
            batch = self.args.train_batch_size * self.args.world_size * self.args.gradient_accumulation_steps
            if self._levels.levels:
                logs["head_learning_rate"] = self._levels.schedule.head_learning_rate(step - 1)
            logs["level"] = self._levels.level
            logs["documents_per_second"] = round((step - self._last_log[0]) * batch / (now - self._last_log[1]), 2)
            self._last_log = (step, now)
        super().log(logs, start_time)

    # ---- Checkpoints ----

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """
        Writes a checkpoint under a temporary name and renames it when it is complete.

        Overridden because the base class writes in place, and pickles.
        """
        step, processes = self.state.global_step, self.cache.processes
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run_folder = str(self.args.output_dir)
        folder = os.path.join(run_folder, f"{PREFIX_CHECKPOINT_DIR}-{step}")
        with ExitStack() as stack:
            temporary = partial_name(folder)
            if processes.is_main:
                stack.enter_context(new_folder(folder))
            processes.wait()
            self.save_model(temporary, _internal_call=True)
            self._levels.save(temporary, processes.is_main)
            if self.state.best_global_step == step:
                self.state.best_model_checkpoint = folder
            if not self.args.save_only_model:
                self._write_optimizer(temporary)
                self._save_scaler(temporary)
                save_random_state(temporary, self.args.process_index)
            if processes.is_main:
                self._note_callbacks()
                self.state.save_to_json(os.path.join(temporary, TRAINER_STATE_FILE))
            processes.wait()
            if processes.is_main:
                seal_checkpoint(temporary)
        processes.wait()
        if self.args.push_to_hub:
            self.publisher.push_checkpoint(folder)
        if processes.is_main:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(run_folder, save_total_limit=self.args.save_total_limit, best_model_checkpoint=best)

    def _note_callbacks(self) -> None:
        """Copies the state of the callbacks into the state of the trainer, as the base class does."""
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name, content = type(callback).__name__, callback.state()
                if isinstance(self.state.stateful_callbacks[name], list):
                    self.state.stateful_callbacks[name].append(content)
                else:
                    self.state.stateful_callbacks[name] = content

    def _write_optimizer(self, folder: str) -> None:
        """Collective: every process gathers sharded moments; only the main process keeps and writes them."""
        optimizer = self.optimizer.state_dict()
        state: dict[int, dict[str, torch.Tensor]] = {index: {} for index in optimizer["state"]}
        for index, entries in optimizer["state"].items():
            for name, value in entries.items():
                whole = gathered(value)
                if self.args.should_save:
                    state[index][name] = whole.cpu()
        if self.args.should_save:
            save_optimizer(folder, {**optimizer, "state": state}, self.lr_scheduler.state_dict())

    def load_training_state(self, checkpoint: str) -> None:
        """Restores optimizer, learning rates and random numbers, after the model has been wrapped."""
        optimizer, scheduler = load_optimizer(checkpoint)
        parameters = [own for group in self.optimizer.param_groups for own in group["params"]]
        for index, entries in optimizer["state"].items():
            entries.update({name: spread(value, parameters[index]) for name, value in entries.items()})
        self.optimizer.load_state_dict(optimizer)
        self.lr_scheduler.load_state_dict(scheduler)
        load_random_state(checkpoint, self.args.process_index)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Does nothing. Overridden because `train` has loaded the whole model of the checkpoint already."""
