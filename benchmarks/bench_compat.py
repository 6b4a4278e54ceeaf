"""Our stand-ins for other libraries' layers beside the originals: same weights, same draws."""

import contextlib
import importlib.util
import io
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from _harness import Table, interleaved, milliseconds, ratio
from layer_peers import join_group
from shapes import MIXTRAL_SMALL, QWEN3_SMALL, LayerShape
from torch import Tensor, nn

from moe_ext.integrations import deepspeed as our_deepspeed
from moe_ext.integrations import fairscale as our_fairscale

# Sums of F and K float32 terms in another order, relative to the largest output.
TOLERANCE = 1e-5
HEADER = (
    "library",
    "shape",
    "T",
    "options",
    "ms",
    "original ms",
    "original / ours",
    "difference",
)


@dataclass(frozen=True)
class Case:
    """A library's layer with its options, and the number of its tokens."""

    library: str
    shape: LayerShape
    num_tokens: int
    top_k: int
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> tuple[str, ...]:
        """The first columns of the table."""
        words = [f"k={self.top_k}", *(f"{n}={v}" for n, v in self.options.items())]
        return self.library, self.shape.name, str(self.num_tokens), ", ".join(words)


def cases() -> list[Case]:
    """The contests whose library is installed."""
    found = []
    if importlib.util.find_spec("deepspeed"):
        for num_tokens in (64, 1024, 4096):
            found.append(Case("DeepSpeed", MIXTRAL_SMALL, num_tokens, 1))
            found.append(Case("DeepSpeed", MIXTRAL_SMALL, num_tokens, 2))
            found.append(Case("DeepSpeed", QWEN3_SMALL, num_tokens, 8))
        found.append(Case("DeepSpeed", MIXTRAL_SMALL, 1024, 2, {"drop_tokens": False}))
        found.append(Case("DeepSpeed", QWEN3_SMALL, 1024, 8, {"drop_tokens": False}))
    if importlib.util.find_spec("fairscale"):
        # fairscale's dense [T, E, C] tensor would take gigabytes above.
        found += [Case("fairscale", MIXTRAL_SMALL, num_tokens, 2) for num_tokens in (64, 1024)]
    return found


def expert(shape: LayerShape) -> nn.Module:
    """Two linear layers, as the libraries' own examples have."""
    return nn.Sequential(
        nn.Linear(shape.model_dim, shape.ffn_dim),
        nn.GELU(),
        nn.Linear(shape.ffn_dim, shape.model_dim),
    )


class Summed(nn.Module):
    """Output plus the balance loss, so that the gradient of one is that of both."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x_TD: Tensor) -> Tensor:
        """`[T, D] -> [T, D]`."""
        if hasattr(self.layer, "deepspeed_moe"):
            output, l_aux, _ = self.layer(x_TD)
        else:
            output = self.layer(x_TD[:, None])[:, 0]
            l_aux = self.layer.l_aux
        return output + l_aux


def deepspeed_pair(case: Case) -> dict[str, nn.Module]:
    """DeepSpeed's layer and ours, with one state dict."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    shape = case.shape
    with contextlib.redirect_stdout(io.StringIO()):
        import deepspeed
        from deepspeed.moe.layer import MoE

        join_group()
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        theirs, ours = (
            cls(shape.model_dim, expert(shape), shape.num_experts, k=case.top_k, **case.options)
            for cls in (MoE, our_deepspeed.MoE)
        )
        theirs.set_deepspeed_parallelism()
    ours.load_state_dict(theirs.state_dict())
    return {"theirs": theirs, "ours": ours}


def fairscale_pair(case: Case) -> dict[str, nn.Module]:
    """Fairscale's layer and ours, with one state dict."""
    from fairscale.nn.moe import MOELayer, Top2Gate

    join_group()
    shape = case.shape
    pair = {}
    for name, gate, layer in (
        ("theirs", Top2Gate, MOELayer),
        ("ours", our_fairscale.Top2Gate, our_fairscale.MOELayer),
    ):
        experts = nn.ModuleList(expert(shape) for _ in range(shape.num_experts))
        pair[name] = layer(gate(shape.model_dim, shape.num_experts), experts)
    pair["ours"].load_state_dict(pair["theirs"].state_dict())
    return pair


def difference(pair: dict[str, nn.Module], x_TD: Tensor) -> float:
    """Largest difference of outputs, relative to the largest output; RuntimeError if too large."""
    outputs = {}
    for name, layer in pair.items():
        torch.manual_seed(2)
        with torch.no_grad():
            outputs[name] = layer(x_TD)
    scale = outputs["theirs"].abs().max()
    worst = float((outputs["ours"] - outputs["theirs"]).abs().max() / scale)
    if worst > TOLERANCE:
        raise RuntimeError(
            f"bench_compat: expected outputs to be within {TOLERANCE} of each other, got {worst}"
        )
    return worst


def train(layer: nn.Module, x_TD: Tensor, grad: Tensor) -> None:
    """Gradients of the weights and of the input."""
    layer.zero_grad(set_to_none=True)
    layer(x_TD.detach().requires_grad_()).backward(grad)


def row(case: Case, seconds: float = 2.0) -> tuple[str, ...]:
    """Compare the outputs of a case, then time it."""
    torch.manual_seed(0)
    made = deepspeed_pair(case) if case.library == "DeepSpeed" else fairscale_pair(case)
    pair = {name: Summed(layer) for name, layer in made.items()}
    x_TD = torch.randn(case.num_tokens, case.shape.model_dim)
    grad = torch.randn_like(x_TD)
    worst = difference(pair, x_TD)
    runs = {
        name: (lambda layer=layer: train(layer, x_TD, grad))  # type: ignore[misc]
        for name, layer in pair.items()
    }
    times = interleaved(runs, seconds=seconds, warmup=1)
    cells = [milliseconds(times["ours"]), milliseconds(times["theirs"])]
    return *case.labels, *cells, ratio(times["theirs"], times["ours"]), f"{worst:.0e}"


def tables() -> list[Table]:
    """The table of docs/benchmarks.md."""
    note = (
        "Forward and backward in float32 of `moe_ext.integrations.<library>` and of the library's "
        "own layer, with one state dict, one seed and the same modules as experts (two linear "
        "layers with a GELU). Options that are not named have the library's defaults, so tokens "
        "are dropped and second experts drawn at random. *difference* is the largest between the "
        "two outputs for one seed, relative to the largest output."
    )
    rows = [row(case) for case in cases()]
    return [Table("Layers of other libraries", note, HEADER, rows)]
