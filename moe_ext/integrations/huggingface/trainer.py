"""Checkpoints of the Trainer of transformers with experts over ranks."""

from __future__ import annotations

from typing import Any

from moe_ext.distributed import whole_state_dicts
from moe_ext.integrations.huggingface.expert_parallel import WritesWhole


class SavesExperts:
    """Mixed into a Trainer of transformers: its checkpoints hold the experts of all ranks.

    ::

        class Trainer(moe_ext.integrations.huggingface.SavesExperts, transformers.Trainer):
            pass

    The files are those of one process, so that `resume_from_checkpoint=` goes on with any number of
    ranks. They are read as `from_pretrained` does: the Trainer by itself leaves experts as they
    were, with a warning, where a family's files name them otherwise than the model (Mixtral's do).
    It is for models that transformers does not shard itself (`fsdp`, DeepSpeed).

    Raises:
        ValueError: `save_on_each_node`, which rank 0 alone would obey.
    """

    args: Any
    model: Any
    optimizer: Any
    state: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._check_nodes()

    def _check_nodes(self) -> None:
        if self.args.save_on_each_node and isinstance(self.model, WritesWhole):
            raise ValueError(
                "SavesExperts: expected save_on_each_node to be False with experts over ranks, "
                "since save_pretrained writes on rank 0 of the job alone, got True; have the nodes "
                "share the output_dir"
            )

    # The Trainer calls both on every rank, and takes state dicts on those that write alone.
    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        self._check_nodes()
        if isinstance(self.model, WritesWhole) and not self.args.should_save:
            # It collects by itself, adapters alone where there are some.
            self.model.save_pretrained(output_dir or self.args.output_dir, is_main_process=False)
        elif state_dict is None and not isinstance(self.model, WritesWhole):
            with whole_state_dicts(keep=self.args.should_save):
                state_dict = self.model.state_dict()
        super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with whole_state_dicts(keep=self.args.should_save):
            if not self.args.should_save:
                self.optimizer.state_dict()
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        model = self.model if model is None else model
        if _is_adapted(model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
            return
        cls: Any = type(model).__bases__[1] if isinstance(model, WritesWhole) else type(model)
        model.load_state_dict(cls.from_pretrained(resume_from_checkpoint).state_dict())

    def _load_best_model(self) -> None:
        if _is_adapted(self.model):
            super()._load_best_model()  # type: ignore[misc]
        else:
            self._load_from_checkpoint(self.state.best_model_checkpoint)


def _is_adapted(model: Any) -> bool:
    """Whether the files are not those of `from_pretrained`: of adapters, or of another library."""
    return not hasattr(model, "from_pretrained") or bool(getattr(model, "peft_config", None))
