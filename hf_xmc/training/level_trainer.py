"""The trainer's loop over the levels of the tree: batches, loss, learning rates, checkpoints."""

from __future__ import annotations

import copy
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler
from transformers import EarlyStoppingCallback, Trainer
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import LengthGroupedSampler, get_length_grouped_indices
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
from .encoder_training import EncoderRun
from .fsdp import ShardedEncoder, choose_modules, gathered, spread
from .optimizer import RowAdamW
from .progress import StageProgressCallback
from .termination import EXIT_CODE, Termination

logger = logging.getLogger(__name__)


class EpochLengthSampler(LengthGroupedSampler):
    """
    Documents of similar length together, in an order that depends on seed and epoch alone: resuming finds it again.

    Args:
        batch_size (`int`): Documents of a step.
        lengths (`list[int]`): Length of each document.
        seed (`int`): Seed.
    """

    def __init__(self, batch_size: int, lengths: list[int], seed: int) -> None:
        super().__init__(batch_size, lengths=lengths)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of an epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(get_length_grouped_indices(self.lengths, self.batch_size, generator=generator))


class LevelTrainer(Trainer):
    """
    Fine-tunes the levels of an [`EncoderRun`], `self._run`, one after the other in one training loop.

    A level begins when the first of its steps does; its shortlist and bootstrap are made there and then. Checkpoints
    hold no pickle.
    """

    args: XMCTrainingArguments
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None
    _run: EncoderRun | None = None
    _progress: StageProgressCallback | None = None
    # Step and time of the last line in the log.
    _last_log: tuple[int, float] = (0, 0.0)
    _last_save = 0
    # Batches of the step at work that came before, where gradients are accumulated.
    _batches_before = 0
    # Parameters whose gradients no wrapper averages over processes, and those of them whose gradients hold few rows.
    _dense_rows: Sequence[nn.Parameter] = ()
    _sparse_rows: Sequence[nn.Parameter] = ()
    work: StageCache
    termination: Termination
    # What was logged before the loop, which starts a log of its own.
    _earlier_logs: Sequence[dict[str, float]] = ()

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._init_training_state(*args, **kwargs)
        self.state.log_history.extend(self._earlier_logs)
        return result

    def set_initial_training_values(self, args: Any, dataloader: DataLoader) -> Any:
        """The values of the base class, with the number of steps of the schedule; `args` keeps its `max_steps`."""
        assert self._run is not None
        args = copy.copy(args)
        args.max_steps = self._run.schedule.total
        return super().set_initial_training_values(args, dataloader)

    def get_train_dataloader(self) -> DataLoader:
        """Batches of tokenised documents."""
        assert self._run is not None
        return self._get_dataloader(
            dataset=self._run.tokens,
            description="Training",
            batch_size=self._train_batch_size,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        if self.args.train_sampling_strategy != "group_by_length":
            return super()._get_train_sampler(train_dataset)
        # The base class hands over a column that is read from disk for every comparison.
        # Of all processes: the order is then that of one process with as large a batch.
        batch_size = self.args.train_batch_size * self.args.world_size * self.args.gradient_accumulation_steps
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return EpochLengthSampler(batch_size, list(train_dataset["length"]), seed)

    def _run_epoch(self, **kwargs: Any) -> None:  # type: ignore[override]
        # The base class tells the epoch to what skips the batches that a resumed run has seen, which in several
        # processes does not pass it on: the order would be that of the first epoch.
        kwargs["train_dataloader"].set_epoch(kwargs["epoch"])
        super()._run_epoch(**kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The batches of a step."""
        try:
            return super().get_batch_samples(*args, **kwargs)
        except (ConnectionError, EOFError) as error:
            # One way in which the death of such a process shows; see `ProcessGroup.explained`.
            raise RuntimeError(f"DataLoader worker: {error!r}") from error

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW with groups for the encoder, its parameters without weight decay, projections and rows of heads."""
        if self.optimizer is None:
            model = self.model if model is None else model
            decaying = set(self.get_decay_parameter_names(model))
            encoder: list[nn.Parameter] = []
            plain: list[nn.Parameter] = []
            projections: list[nn.Parameter] = []
            heads: list[nn.Parameter] = []
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and name.startswith("heads."):
                    (projections if ".projection." in name else heads).append(parameter)
                elif parameter.requires_grad:
                    (encoder if name in decaying else plain).append(parameter)
            # The scheduler sets the learning rates: encoder first, heads last.
            self.optimizer = RowAdamW(
                [
                    {"params": encoder, "weight_decay": self.args.weight_decay},
                    {"params": plain, "weight_decay": 0.0},
                    {"params": projections, "weight_decay": self.args.weight_decay},
                    {"params": heads, "weight_decay": self.args.weight_decay},
                ],
                lr=1.0,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
                fused=True,
            )
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Learning rates that rise and fall in every level."""
        if self.lr_scheduler is None:
            assert self._run is not None
            schedule = self._run.schedule
            encoder, heads = schedule.learning_rate, schedule.head_learning_rate
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer if optimizer is None else optimizer,
                [encoder, encoder, schedule.projection_learning_rate, heads],
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """One batch; a new level begins before its first."""
        assert self._run is not None
        if self._run.enter_level(self.state.global_step):
            # Metrics of different levels do not compare.
            self.state.best_metric = self.state.best_model_checkpoint = self.state.best_global_step = None
            self._last_log = (self.state.global_step, time.perf_counter())
            if self._progress is not None:
                self._progress.show_level(self._level_name(), self.state)
        self.termination.is_patient = self.args.save_strategy != "no"
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._batches_before = 0 if self.accelerator.sync_gradients else self._batches_before + 1
        if self.accelerator.sync_gradients:
            processes = self.work.processes
            for parameter in self._dense_rows:
                parameter.grad = processes.average(parameter.grad, parameter)
            for parameter in self._sparse_rows:
                parameter.grad = processes.average_rows(parameter.grad, parameter)
        return loss

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        assert self._run is not None
        names = [f"{name}.weight" for name, head in self.model.named_modules() if _has_sparse_rows(head)]
        self._sparse_rows = [self.model.get_parameter(name) for name in names] if self.work.is_shared else []
        self._dense_rows = []
        # Rows of which a step touches few: the wrapper would send all.
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, names)
        if self.is_fsdp_enabled:
            self._run.sharded = ShardedEncoder(self.model)
            choose_modules(self.accelerator.state.fsdp_plugin, self.model)
            self._dense_rows = [own for own in self.model.heads.parameters() if not _is_in(own, self._sparse_rows)]
        return super()._prepare_for_training(*args, **kwargs)

    def _level_name(self) -> str:
        assert self._run is not None
        return f"level {'+'.join(map(str, self._run.groups[self._run.active]))}/{self._run.levels[-1]}"

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The loss of the level at work."""
        assert self._run is not None
        documents = inputs.pop("documents")
        keep = self._draw_dropout(len(documents))
        output = model(**inputs, **self._run.level_inputs(documents), keep=keep.to(documents.device))
        if not torch.isfinite(output.loss):
            raise FloatingPointError(
                f"The loss is {output.loss.item()} at step {self.state.global_step} ({self._level_name()}). Lower "
                "`level_learning_rate` or `level_head_learning_rate`, or train in float32; then resume from the last "
                "checkpoint, which is from before, or train anew."
            )
        self._run.encoder_changed()
        return (output.loss, output) if return_outputs else output.loss

    def _draw_dropout(self, count: int) -> torch.Tensor:
        """What heads see of each of the documents of a batch: the same however many processes share the step."""
        args, share = self.args, self.model.config.head_dropout
        number = self._batches_before * args.world_size + args.process_index
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + self.state.global_step)
        rows = (number + 1) * args.train_batch_size
        noise = torch.rand(rows, self.model.vector_size, generator=generator)[-args.train_batch_size :][:count]
        return (noise >= share) / (1 - share)

    def _clip_grad_norm(self, model: nn.Module, largest: float | None = None) -> Any:
        """
        Clips the gradients of encoder and heads, each by its own norm: a head's would drown the encoder's.

        Returns:
            The norm of the encoder's gradient before.
        """
        largest = self.args.max_grad_norm if largest is None else largest
        groups: dict[str, list[nn.Parameter]] = {"encoder": [], "heads": []}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and not parameter.grad.is_sparse:
                groups["heads" if "heads." in name else "encoder"].append(parameter)
            elif parameter.grad is not None:
                gradient = parameter.grad.coalesce()
                excess = gradient.values().norm() / largest
                parameter.grad = gradient / excess if excess > 1 else gradient
        norms = {name: self.accelerator.clip_grad_norm_(own, largest) for name, own in groups.items()}
        return gathered(norms["encoder"])

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        # The base class cannot measure sparse gradients.
        return self._clip_grad_norm(model, float("inf")) if grad_norm is None else grad_norm

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        assert self._run is not None
        self._run.after_step(self.state.global_step)
        self._end_level_if_asked()
        self._save_at_end_of_level()
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._end_if_asked()

    def _end_if_asked(self) -> None:
        """Writes a checkpoint and ends the process, where any of the processes got the signal to end."""
        if self.work.processes.agree(not self.termination.is_asked):
            return
        step = self.state.global_step
        if step != self._last_save:
            self._save_checkpoint(self.model, None)
        logger.warning(
            "Training was asked to end (SIGTERM). It goes on after step %d with `resume_from_checkpoint=True`.", step
        )
        sys.exit(EXIT_CODE)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        metrics = super()._evaluate(*args, **kwargs)
        # Before the checkpoint is written, which must know of it.
        self._end_level_if_asked()
        self._save_at_end_of_level()
        return metrics

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Writes a checkpoint under a temporary name, which it changes when it is whole."""
        assert self._run is not None
        step, processes = self.state.global_step, self.work.processes
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run_folder = self._get_output_dir(trial=trial)
        folder = os.path.join(run_folder, f"{PREFIX_CHECKPOINT_DIR}-{step}")
        with ExitStack() as stack:
            temporary = partial_name(folder)
            if processes.is_main:
                stack.enter_context(new_folder(folder))
            processes.wait()
            self.save_model(temporary, _internal_call=True)
            self._run.save(temporary, processes.is_main)
            if self.state.best_global_step == step:
                self.state.best_model_checkpoint = folder
            if not self.args.save_only_model:
                self._save_optimizer_and_scheduler(temporary)
                self._save_scaler(temporary)
                self._save_rng_state(temporary)
            if processes.is_main:
                self._note_callbacks()
                self.state.save_to_json(os.path.join(temporary, TRAINER_STATE_FILE))
            processes.wait()
            if processes.is_main:
                seal_checkpoint(temporary)
        processes.wait()
        self._last_save = step
        if self.args.push_to_hub:
            self._push_from_checkpoint(folder)
        if processes.is_main:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(run_folder, save_total_limit=self.args.save_total_limit, best_model_checkpoint=best)

    def _note_callbacks(self) -> None:
        """Takes the state of callbacks into the trainer's own, which is about to be written."""
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name, content = type(callback).__name__, callback.state()
                if isinstance(self.state.stateful_callbacks[name], list):
                    self.state.stateful_callbacks[name].append(content)
                else:
                    self.state.stateful_callbacks[name] = content

    def _save_at_end_of_level(self) -> None:
        """What comes next takes long and starts from here. The end of an epoch comes by once more at the same step."""
        assert self._run is not None
        step = self.state.global_step
        if step in self._run.schedule.ends and step != self._last_save and self.args.save_strategy != "no":
            self.control.should_save = True

    def _end_level_if_asked(self) -> None:
        """Early stopping ends a level; training goes on with the next one."""
        assert self._run is not None
        schedule, step = self._run.schedule, self.state.global_step
        if self._run.active < 0 or not self.control.should_training_stop or step >= schedule.total:
            return
        # A level that ends here anyway must not take the next one along.
        if step < schedule.ends[self._run.active]:
            schedule.end_level(step)
        self.state.max_steps = schedule.total
        self.control.should_training_stop = self.state.global_step >= schedule.total
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, EarlyStoppingCallback):
                callback.early_stopping_patience_counter = 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """
        Logs, and while an encoder is fine-tuned adds the level, the heads' learning rate and the speed.

        Args:
            logs (`dict[str, float]`):
                What to log.
            start_time (`float`, *optional*):
                Start of the training.
        """
        if self._run is not None and "loss" in logs and self._run.active >= 0:
            step, now = self.state.global_step, time.perf_counter()
            batch = self.args.train_batch_size * self.args.world_size * self.args.gradient_accumulation_steps
            logs["head_learning_rate"] = self._run.schedule.head_learning_rate(step - 1)
            logs["level"] = self._run.level
            logs["documents_per_second"] = round((step - self._last_log[0]) * batch / (now - self._last_log[1]), 2)
            self._last_log = (step, now)
        super().log(logs, start_time)

    # ---- Checkpoints ----

    def _load_best_model(self) -> None:
        assert self._run is not None and self.state.best_model_checkpoint is not None
        if self._run.adapters is None:
            best = XMCForTextClassification.from_pretrained(self.state.best_model_checkpoint)
            self.model.load_state_dict(best.state_dict())
        else:
            self._run.adapters.load(self.state.best_model_checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Nothing is left to do: the whole model was loaded before."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.optimizer is not None and self.lr_scheduler is not None
        optimizer = self.optimizer.state_dict()
        # All processes gather; one writes, and to keep whole moments of large encoders is up to its memory alone.
        state: dict[int, dict[str, torch.Tensor]] = {index: {} for index in optimizer["state"]}
        for index, entries in optimizer["state"].items():
            for name, value in entries.items():
                whole = gathered(value)
                if self.args.should_save:
                    state[index][name] = whole.cpu()
        if self.args.should_save:
            save_optimizer(output_dir, {**optimizer, "state": state}, self.lr_scheduler.state_dict())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self.optimizer is not None and self.lr_scheduler is not None
        optimizer, scheduler = load_optimizer(checkpoint)
        parameters = [own for group in self.optimizer.param_groups for own in group["params"]]
        for index, entries in optimizer["state"].items():
            entries.update({name: spread(value, parameters[index]) for name, value in entries.items()})
        self.optimizer.load_state_dict(optimizer)
        self.lr_scheduler.load_state_dict(scheduler)

    def _save_rng_state(self, output_dir: str) -> None:
        os.makedirs(output_dir, exist_ok=True)
        save_random_state(output_dir, self.args.process_index)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_random_state(checkpoint, self.args.process_index)


def _is_in(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    return any(tensor is other for other in others)


def _has_sparse_rows(module: nn.Module) -> bool:
    return isinstance(module, LevelHead) and module.sparse
