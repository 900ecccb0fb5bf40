"""Large encoders: weights, gradients and moments sharded over processes (FSDP2), and low-rank adapters (LoRA)."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from safetensors.torch import load_file, save_file
from torch import distributed, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, distribute_tensor, zeros

from ..modeling_xmc import XMCForTextClassification
from ..serialization import atomic_write
from .options import require_peft


def set_up_plugin(plugin: FullyShardedDataParallelPlugin) -> None:
    """Makes FSDP save whole models. Raises for settings that the stages that need a whole encoder do not support."""
    wrong = {
        "fsdp_version": plugin.fsdp_version != 2 and "2",
        "fsdp_cpu_ram_efficient_loading": plugin.cpu_ram_efficient_loading and "false",
        "fsdp_offload_params": isinstance(plugin.cpu_offload, CPUOffloadPolicy) and "false",
        "fsdp_activation_checkpointing": plugin.activation_checkpointing
        and "false, and `gradient_checkpointing: true` in the recipe",
    }
    advice = [f"`{name}: {value}`" for name, value in wrong.items() if value]
    if advice:
        raise ValueError(f"FSDP is not supported as it is set. In its configuration set {', '.join(advice)}.")
    plugin.set_state_dict_type("FULL_STATE_DICT")


def check_encoder(encoder: Any) -> None:
    """Raises if FSDP cannot shard an encoder."""
    weight = encoder.get_input_embeddings().weight
    owners = [name for name, module in encoder.named_modules() if getattr(module, "weight", None) is weight]
    if len(owners) > 1:
        raise ValueError(
            f"FSDP cannot spread a {type(encoder).__name__}: its embeddings of tokens are shared by "
            f"{' and '.join(f'`{name}`' for name in owners)}. Launch with DDP (`distributed_type: MULTI_GPU`)."
        )


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be sharded. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Shards a tensor that every process has in the same way as another one."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor) or tensor.shape != like.shape:
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def choose_modules(plugin: FullyShardedDataParallelPlugin, model: XMCForTextClassification) -> None:
    """Makes FSDP shard each layer of the encoder, but not the heads, whose gradients have few rows."""
    assert model.encoder is not None
    plugin.ignored_modules = [model.heads, nn.ParameterList([model.anchor])]
    if plugin.transformer_cls_names_to_wrap is None:
        # Accelerate spreads the embeddings of tokens by themselves, and fails where they are within such a module.
        embeddings = model.encoder.get_input_embeddings()
        names = {
            type(module).__name__
            for module in model.encoder.modules()
            if type(module).__name__ in (model._no_split_modules or ()) and embeddings not in module.modules()
        }
        plugin.transformer_cls_names_to_wrap = sorted(names)


class RowParts:
    """
    Shards the optimizer state of a large head by rows, as FSDP shards the weights of an encoder.

    Every process has the whole head, because a step may touch any row, but only the state of its own rows. `like` is a
    weight that is sharded over the same processes.
    """

    def __init__(self, like: DTensor, num_rows: int) -> None:
        self._mesh, self._placements = like.device_mesh, like.placements
        dimension = next(i for i, placement in enumerate(like.placements) if placement.is_shard())
        size = -(-num_rows // self._mesh.size(dimension))
        self.first = min(size * self._mesh.get_local_rank(dimension), num_rows)
        self.stop = min(self.first + size, num_rows)
        self._group = self._mesh.get_group(dimension)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> DTensor:
        """Zeros for all rows, sharded."""
        return zeros(*shape, dtype=dtype, device_mesh=self._mesh, placements=self._placements)

    def spread(self, tensor: torch.Tensor) -> DTensor:
        """A tensor that every process has, in parts."""
        if isinstance(tensor, DTensor):
            return tensor
        return distribute_tensor(tensor, self._mesh, self._placements, src_data_rank=None)

    def exchange(self, values: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        """The values of all of some rows, from those of each process; `mine` says which of the rows these are."""
        whole = values.new_zeros((len(mine), *values.shape[1:]))
        whole[mine] = values
        distributed.all_reduce(whole, group=self._group)
        return whole


class ShardedEncoder:
    """
    Makes whole encoders from the encoder of a model that FSDP is about to shard.

    Stages without steps give each process other documents, and heads are solved and searched at any time. FSDP
    supports neither, so it does not shard the heads, and these stages work with a whole encoder.
    """

    def __init__(self, model: XMCForTextClassification) -> None:
        assert model.encoder is not None
        # Without weights, which only what is gathered has.
        without = {
            id(own): nn.Parameter(torch.empty_like(own, device="meta"), own.requires_grad)
            for own in model.encoder.parameters()
        }
        self._skeleton = copy.deepcopy(model.encoder, without)  # type: ignore[arg-type]

    def _gather(self, model: XMCForTextClassification) -> Any:
        assert model.encoder is not None
        encoder = copy.deepcopy(self._skeleton)
        encoder.load_state_dict(
            {name: gathered(tensor).detach() for name, tensor in model.encoder.state_dict().items()}, assign=True
        )
        return encoder

    @contextmanager
    def whole(self, model: XMCForTextClassification) -> Iterator[None]:
        """Gives the model a whole encoder for a block of code."""
        own, training = model.encoder, model.training
        model.encoder = self._gather(model).train(training)
        try:
            yield
        finally:
            model.encoder = own

    def whole_model(self, model: XMCForTextClassification) -> XMCForTextClassification:
        """The model without any trace of FSDP."""
        with torch.device("meta"):
            whole = XMCForTextClassification(
                model.config, model.labels, model.label_tree, model.tfidf, model.ranker, model.tokenizer
            )
        whole.encoder, whole.heads, whole.anchor = self._gather(model), model.heads, model.anchor
        whole.autocast_dtype = model.autocast_dtype
        return whole.train(model.training)


# Beside the model in a checkpoint, which holds the encoder as it came.
ADAPTERS_FILE = "adapters.safetensors"


class Adapters:
    """
    LoRA adapters on every linear layer of a model's encoder, which is changed in place; its own weights do not change.

    Their scale, `lora_alpha`, is twice their rank.
    """

    def __init__(self, model: XMCForTextClassification, rank: int, seed: int = 0) -> None:
        require_peft()
        from peft import LoraConfig, LoraModel

        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        self._model = model
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self._tuner = LoraModel(model.encoder, config, "default")

    def plain_weights(self) -> dict[str, torch.Tensor]:
        """All weights of the model under their names without adapters, except those of the adapters."""
        return {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in self._model.state_dict().items()
            if ".lora_" not in name
        }

    def save(self, folder: str) -> None:
        """Writes what is trained, adapters and heads, into a checkpoint."""
        trained = {name: own.detach().cpu().contiguous() for name, own in self._trained().items()}
        with atomic_write(os.path.join(folder, ADAPTERS_FILE)) as temporary:
            save_file(trained, temporary)

    @torch.no_grad()
    def load(self, folder: str) -> None:
        """Reads what [`~Adapters.save`] wrote."""
        tensors = load_file(os.path.join(folder, ADAPTERS_FILE))
        for name, own in self._trained().items():
            own.copy_(tensors[name])

    def merge(self) -> None:
        """Adds the adapters to the weights of the encoder, which can then be trained as a whole."""
        encoder = self._tuner.merge_and_unload()
        # A note that peft leaves behind.
        vars(encoder).pop("peft_config", None)
        encoder.requires_grad_(True)
        self._model.encoder = encoder

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: own for name, own in self._model.named_parameters() if own.requires_grad}
