"""The tensors that make a training state, in a form that fits any number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import moe_ext

MOMENTS = ("exp_avg", "exp_avg_sq")


class TrainState:
    """Weights, buffers and AdamW moments under global names.

    Expert tensors are DTensors over the (dp, ep) mesh, sharded by expert: torch's checkpoint then
    knows which experts a rank holds and can hand them to other ranks on loading.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: moe_ext.distributed.MoEMesh,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._mesh = mesh.device_mesh
        self._experts = {entry[0] for entry in moe_ext.distributed.expert_parameters(model)}

    def _global(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._experts:
            return tensor
        return DTensor.from_local(tensor, self._mesh, [Replicate(), Shard(0)], run_check=False)

    def _collect(
        self, step: int, moment: Callable[[nn.Parameter, str], Tensor]
    ) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {"step": torch.tensor(step, dtype=torch.int64)}
        for name, value in self._model.state_dict().items():
            if isinstance(value, Tensor):
                tensors[f"model.{name}"] = self._global(name, value.detach())
        for name, parameter in self._model.named_parameters():
            for key in MOMENTS:
                tensors[f"optimizer.{key}.{name}"] = self._global(name, moment(parameter, key))
        return tensors

    def tensors(self, step: int) -> dict[str, Tensor]:
        """Return the live tensors after `step` steps."""
        return self._collect(step, lambda parameter, key: self._optimizer.state[parameter][key])

    def empty_tensors(self) -> dict[str, Tensor]:
        """Return tensors of the same names and shapes to load into; nothing live is touched."""
        state = self._collect(0, lambda parameter, _: parameter.detach())
        return {name: torch.zeros_like(tensor) for name, tensor in state.items()}

    def restore(self, tensors: dict[str, Tensor], step: int) -> None:
        """Put loaded tensors into the model and the optimizer."""
        local = {
            name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for name, tensor in tensors.items()
        }
        self._model.load_state_dict(
            {name[len("model.") :]: t for name, t in local.items() if name.startswith("model.")}
        )
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        saved = self._optimizer.state_dict()
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        saved["state"] = {
            index: {
                "step": torch.tensor(float(step)),
                **{key: local[f"optimizer.{key}.{names[id(parameter)]}"] for key in MOMENTS},
            }
            for index, parameter in enumerate(parameters)
        }
        self._optimizer.load_state_dict(saved)
