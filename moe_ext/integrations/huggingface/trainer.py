"""Checkpoints of the Trainer of transformers with experts over ranks."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import nn

from moe_ext.distributed import parallelize, whole_state_dicts
from moe_ext.integrations.huggingface.expert_parallel import WritesWhole


class SavesExperts:
    """Mixin for a Trainer of transformers, whose checkpoints then hold the experts of all ranks.

    ::

        class Trainer(moe_ext.integrations.huggingface.SavesExperts, transformers.Trainer):
            pass

    The files are those of one process, so that `resume_from_checkpoint=` works with any number of
    ranks. They are read as by `from_pretrained`. The Trainer itself would warn and skip the experts
    of families, such as Mixtral, whose files name experts differently from the model. The mixin is
    for models that transformers does not shard itself (`fsdp`, DeepSpeed).

    Raises:
        ValueError: `save_on_each_node` is set, but only rank 0 of the job writes.
    """

    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any
    # Parameters by the two groups (with and without weight decay) of a model without DTensors. None
    # if the optimizer has the same groups.
    _split: list[list[nn.Parameter]] | None = None
    # Index in `_split` of each parameter group of the optimizer.
    _numbers: list[int]
    # True after `save_model` of the Trainer has called `_save`.
    _is_saved = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._check_nodes()
        # The Trainer will wrap `self.model` in DDP. If `self.model` is a PeftModel around the model
        # that `replace` prepared, it needs a call of its own.
        parallelize(self.model)

    def _check_nodes(self) -> None:
        if self.args.save_on_each_node and isinstance(self.model, WritesWhole):
            raise ValueError(
                "SavesExperts: expected save_on_each_node to be False with experts over ranks, "
                "since save_pretrained writes on rank 0 of the job alone, got True; have the nodes "
                "share the output_dir"
            )

    def train(self, *args: Any, **options: Any) -> Any:
        """Call `Trainer.train`, with DDP even after `evaluate` or `predict`."""
        # `evaluate` prepares the model without DDP. Accelerate marks it as prepared all the same,
        # and `train` would not wrap a marked model.
        vars(self.model).pop("_is_accelerate_prepared", None)
        return super().train(*args, **options)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Call `Trainer.save_model`, and have every rank save.

        Before transformers 5.23 the Trainer calls `_save` only on ranks that write files.
        """
        self._is_saved = False
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        tools: Any = self
        if not (self._is_saved or tools.is_fsdp_enabled or tools.is_deepspeed_enabled):
            self._save(output_dir)

    # Every rank calls this method, because a state dict gathers the experts of all ranks. Only
    # ranks with `should_save` keep the gathered tensors and write.
    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        self._check_nodes()
        self._is_saved = True
        if isinstance(self.model, WritesWhole) and not self.args.should_save:
            # `save_pretrained` gathers the experts of all ranks, or only adapters if there are any.
            self.model.save_pretrained(output_dir or self.args.output_dir, is_main_process=False)
        elif state_dict is None and not isinstance(self.model, WritesWhole):
            with whole_state_dicts(keep=self.args.should_save):
                state_dict = self.model.state_dict()
        if self.args.should_save or getattr(self, "is_distributed_loading_by_transformers", False):
            super()._save(output_dir, state_dict)  # type: ignore[misc]

    def create_optimizer(self, *args: Any, **options: Any) -> Any:
        """Create the optimizer as the Trainer does, and remember the groups of its checkpoints.

        The Trainer puts DTensors into parameter groups of their own, but a checkpoint has the
        groups of a model without DTensors.
        """
        is_own = self.optimizer is None
        found = super().create_optimizer(*args, **options)  # type: ignore[misc]
        decaying = set(self.get_decay_parameter_names(self.model))  # type: ignore[attr-defined]
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        split = [[p for n, p in named if (n in decaying) == kind] for kind in (True, False)]
        number = {p: index for index, group in enumerate(split) for p in group}
        groups = [group["params"] for group in found.param_groups]
        of_model = set(number) == {p for group in groups for p in group}
        if is_own:
            self._split = None  # forget the groups of an earlier optimizer
        if is_own and of_model and [len(group) for group in groups] != [len(ps) for ps in split]:
            self._split, self._numbers = split, [number[group[0]] for group in groups]
        return found

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        # The hook of `whole_state_dicts` must run first, on the optimizer's own groups, because
        # `_joined` replaces them.
        with (
            whole_state_dicts(optimizer, keep=self.args.should_save),
            optimizer.register_state_dict_post_hook(self._joined),
        ):
            if not self.args.should_save:
                self.optimizer.state_dict()
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        path = os.path.join(output_dir, "scheduler.pt")
        if self._split is not None and self.args.should_save and os.path.isfile(path):
            state, firsts = torch.load(path), [self._group_of(number) or 0 for number in (0, 1)]
            torch.save(_for_groups(state, len(self._numbers), firsts), path)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        undo_joined = optimizer.register_load_state_dict_pre_hook(self._parted, prepend=True)
        with undo_joined, whole_state_dicts(optimizer):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if self._split is not None and checkpoint is not None:
            scheduler = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
            vars(scheduler).update(_for_groups(vars(scheduler), 2, self._numbers))

    def _group_of(self, number: int) -> int | None:
        return self._numbers.index(number) if number in self._numbers else None

    def _joined(self, optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert a state to the groups and parameter numbers of a model without DTensors."""
        if self._split is None:
            return state_dict
        here = [p for group in optimizer.param_groups for p in group["params"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        key_of = dict(zip(here, keys, strict=True))
        order = {key_of[p]: index for index, p in enumerate(p for ps in self._split for p in ps)}
        groups = []
        for number, decay in enumerate((self.args.weight_decay, 0.0)):
            own, at = [order[key_of[p]] for p in self._split[number]], self._group_of(number)
            options = state_dict["param_groups"][at or 0]
            options = options if at is not None else {**options, "weight_decay": decay}
            groups.append({**options, "params": own})
        state = {order[key]: value for key, value in state_dict["state"].items()}
        return {**state_dict, "state": state, "param_groups": groups}

    def _parted(self, optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert a result of `_joined` back to the groups of this optimizer."""
        saved = state_dict["param_groups"]
        keys = [key for group in saved for key in group["params"]]
        if self._split is None or len(keys) != sum(map(len, self._split)):
            return state_dict
        key_of = dict(zip((p for ps in self._split for p in ps), keys, strict=True))
        group_of = {key: group for group in saved for key in group["params"]}
        groups = []
        for group in optimizer.param_groups:
            own = [key_of[p] for p in group["params"]]
            groups.append({**group_of[own[0]], "params": own})
        return {**state_dict, "param_groups": groups}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        model = self.model if model is None else model
        if _is_adapted(model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
            return
        cls: Any = type(model).__bases__[1] if isinstance(model, WritesWhole) else type(model)
        # The files' config has the dtype of one parameter. By default all parameters would be
        # rounded to that dtype.
        dtypes = [t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
        dtype = functools.reduce(torch.promote_types, dtypes)
        model.load_state_dict(cls.from_pretrained(resume_from_checkpoint, dtype=dtype).state_dict())

    def _load_best_model(self) -> None:
        if _is_adapted(self.model):
            super()._load_best_model()  # type: ignore[misc]
        else:
            self._load_from_checkpoint(self.state.best_model_checkpoint)


def _for_groups(state: dict[str, Any], length: int, picked: list[int]) -> dict[str, Any]:
    """Convert a scheduler's state to other groups, by picking items of lists of that length."""
    return {
        name: [value[index] for index in picked]
        if isinstance(value, list) and len(value) == length
        else value
        for name, value in state.items()
    }


def _is_adapted(model: Any) -> bool:
    """Return True if `from_pretrained` cannot read the model's files, such as those of adapters."""
    return not hasattr(model, "from_pretrained") or bool(getattr(model, "peft_config", None))
