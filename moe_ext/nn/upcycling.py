"""Turn the dense feed-forward networks of a trained model into mixtures of experts.

Shapes: D model, F ffn, E experts, K top-k, G granularity (number of pieces of F), H = F / G.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext._checks import check_choice, check_rule, check_sizes
from moe_ext.distributed.dtensor import local_part
from moe_ext.nn.balance.losses import Balance
from moe_ext.nn.expert_activation import GATED_KIND_OF, plain_kind, run_activation
from moe_ext.nn.experts import GroupedExperts
from moe_ext.nn.feed_forward import FeedForward
from moe_ext.nn.moe_layer import MoELayer
from moe_ext.nn.routers import TopKRouter
from moe_ext.nn.torch_state import without_autocast

METHODS = ("copy", "granular")
# Names of the projections (gate, up, down) in common feed-forward networks. Without a gate the
# activation is plain; without an up projection, that of the gate contains both.
_FORMS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "", "down_proj"),
    ("", "c_fc", "c_proj"),
    ("", "fc1", "fc2"),
    ("", "dense_h_to_4h", "dense_4h_to_h"),
    ("", "up_proj", "down_proj"),
)
_ACTIVATION_NAMES = ("act_fn", "activation_fn", "act", "activation", "hidden_act")


@dataclass(frozen=True)
class DenseFFN:
    """Weights of a feed-forward network, independent of their names in its module.

    Attributes:
        up: `[F, D]`, or `[2F, D]` with the gate first.
        up_bias: `[F]` or `[2F]`; None without a bias.
        down: `[D, F]`.
        down_bias: `[D]`; None without a bias.
        activation: a kind of `GroupedExperts`, or a function.
        gated: whether `up` contains a gate.
        dropout: dropout after the last projection, or None.
    """

    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    activation: Any
    gated: bool
    dropout: nn.Module | None


class UpcycledFFN(nn.Module):
    """A `MoELayer` and the dropout that followed the dense network.

    Args:
        moe: the layer.
        dropout: module that is applied to the output of the layer.
    """

    def __init__(self, moe: MoELayer, dropout: nn.Module) -> None:
        super().__init__()
        self.moe = moe
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer and the dropout, `[..., D] -> [..., D]`."""
        return self.dropout(self.moe(x))


def upcycle(
    ffn: nn.Module,
    num_experts: int = 8,
    top_k: int = 2,
    *,
    method: str = "copy",
    granularity: int | None = None,
    router: str = "softmax",
    balance_loss_coef: float = 0.01,
    z_loss_coef: float = 0.0,
    capacity_factor: float | None = None,
    ep_group: ProcessGroup | None = None,
) -> MoELayer | UpcycledFFN:
    r"""Make a mixture of experts that computes the same as a dense feed-forward network.

    ``"copy"``: every expert is a copy of the network, and the K weights of a token sum to one:
    :math:`\sum_k w_k \mathrm{FFN}(x) = \mathrm{FFN}(x)`.

    ``"granular"``: the F hidden units are cut into G pieces, and expert ``c * G + g`` is piece g of
    copy c. The router's rows of one copy start equal, so a token chooses all G pieces of K/G
    copies. Each has the weight :math:`w_c / G`, with :math:`\sum_c w_c = 1`. Therefore `down_proj`
    is multiplied by G, and its bias is not:

    .. math:: \sum_c \frac{w_c}{G} \sum_g (G\, W_g h_g + b) = \sum_g W_g h_g + b

    The output equals that of the network up to rounding, if no slot is dropped. Experts, and rows
    of the router, become different in training, since they get different tokens or gradients.

    Args:
        ffn: a network with projections named as in Llama and Qwen (gate_proj, up_proj, down_proj),
            Phi-3 (gate_up_proj, down_proj), GPT-2 (c_fc, c_proj), ViT (fc1, fc2) or GPT-NeoX
            (dense_h_to_4h, dense_4h_to_h), a `FeedForward`, or
            `nn.Sequential(Linear, activation, Linear)`. The weights are copied. The network runs
            once on two random tokens, to check that it computes what its names suggest.
        num_experts: E, number of experts over all ranks; a multiple of G.
        top_k: K; a multiple of G. With 1 the weight is constant, so that the layer computes the
            same as the network. The router then warns, and learns only from the balance loss.
        method: "copy" or "granular".
        granularity: G, for "granular" only; divides F.
        router: score function of the `TopKRouter`, whose weights are drawn.
        balance_loss_coef: as in `MoELayer`.
        z_loss_coef: as in `MoELayer`.
        capacity_factor: as in `MoELayer`. Dropped slots change the output.
        ep_group: as in `MoELayer`.

    Returns:
        A `MoELayer` with the dtype, the device and the training mode of the network, followed by
        the last dropout of the network if it has one.

    Raises:
        ValueError: the network has no known form, does not compute what its projections suggest, or
            an option does not fit.

    Reference: Komatsuzaki et al., Sparse Upcycling (2022); He et al., Upcycling Large Language
    Models into Mixture of Experts (2024), virtual group initialisation.
    """
    pieces = _check_options(num_experts, top_k, method, granularity)
    dense = read_ffn(ffn, "upcycle")
    if dense is None:
        raise ValueError(
            "upcycle: expected ffn to be a feed-forward network with projections named "
            f"{_known_forms()}, or nn.Sequential(Linear, activation, Linear), got "
            f"{type(ffn).__name__}"
        )
    model_dim, ffn_dim = dense.down.shape
    if ffn_dim % pieces != 0:
        raise ValueError(f"upcycle: expected granularity to divide F={ffn_dim}, got {pieces}")
    _check_formula(ffn, dense)
    device, dtype = dense.up.device, dense.up.dtype
    experts = GroupedExperts(
        num_experts,
        model_dim,
        ffn_dim // pieces,
        activation=dense.activation,
        gated=dense.gated,
        bias=dense.up_bias is not None or dense.down_bias is not None,
        ep_group=ep_group,
        device=device,
        dtype=dtype,
    )
    made: dict[str, Any] = {"device": device, "dtype": dtype}
    moe = MoELayer(
        model_dim,
        ffn_dim // pieces,
        num_experts,
        # The weights must sum to one. With K = 1 the weight is then constant, and the router warns.
        router=TopKRouter(model_dim, num_experts, top_k, score_fn=router, renormalize=True, **made),
        experts=experts,
        balance=Balance(coef=balance_loss_coef, z_coef=z_loss_coef),
        capacity=capacity_factor,
        ep_group=ep_group,
        **made,
    )
    copy_dense_(experts, dense, pieces)
    weight: Tensor = moe.router.weight  # type: ignore[assignment]
    with torch.no_grad():
        weight.copy_(weight[::pieces].repeat_interleave(pieces, dim=0))
    layer = moe if dense.dropout is None else UpcycledFFN(moe, dense.dropout)
    return layer.train(ffn.training)


def copy_dense_(experts: GroupedExperts, dense: DenseFFN, pieces: int = 1) -> None:
    """Fill experts in place with pieces of a dense network; expert e gets piece e mod G.

    Args:
        experts: experts with F / G hidden units each.
        dense: the network.
        pieces: G; `down_proj` is multiplied by G.
    """
    halves = 2 if dense.gated else 1
    up_name = "gate_up_proj" if dense.gated else "up_proj"
    # The shape is [halves, G, H, ...], so that a piece has the same hidden units of gate and up.
    up = dense.up.detach().unflatten(0, (halves, pieces, -1))
    up_bias = None if dense.up_bias is None else dense.up_bias.detach().view(halves, pieces, -1)
    down = dense.down.detach().unflatten(1, (pieces, -1))
    parts = {name: local_part(p.detach()) for name, p in experts.named_parameters(recurse=False)}
    with torch.no_grad():
        for local in range(experts.num_local_experts):
            piece = (experts.first_expert + local) % pieces
            parts[up_name][local].copy_(up[:, piece].flatten(0, 1))
            parts["down_proj"][local].copy_(down[:, piece] * pieces)
            if experts.down_proj_bias is None:
                continue
            bias = parts[f"{up_name}_bias"][local]
            bias.zero_() if up_bias is None else bias.copy_(up_bias[:, piece].flatten())
            down_bias = parts["down_proj_bias"][local]
            down_bias.zero_() if dense.down_bias is None else down_bias.copy_(dense.down_bias)


def replace_ffn(
    model: nn.Module,
    *,
    every: int = 2,
    num_experts: int = 8,
    top_k: int = 2,
    method: str = "copy",
    granularity: int | None = None,
    select: Callable[[str, nn.Module], bool] | None = None,
    **options: Any,
) -> int:
    """Replace dense feed-forward networks of a model by mixtures of experts.

    The networks that `upcycle` knows are counted in the order of `model.named_modules()`, and every
    `every`-th of them is replaced: with 2 the second, the fourth, and so on. Networks inside
    existing mixtures of experts are left alone. At first the model computes the same as before.

    To load a model that was saved later, build the dense model, call `replace_ffn` with the same
    arguments, and then `load_state_dict`.

    Args:
        model: any module. It is changed in place, or not at all after an error.
        every: distance between two replaced networks, 1 for all.
        num_experts: E, number of experts of each layer.
        top_k: K, number of experts per token.
        method: "copy" or "granular", see `upcycle`.
        granularity: G of "granular".
        select: function of name and module; networks for which it returns False are not counted.
        options: further arguments of `upcycle`.

    Returns:
        Number of replaced networks.

    Raises:
        ValueError: the model has fewer networks than `every`, a network has known names but is not
            plain, or options do not fit. The model is unchanged.
    """
    check_sizes("replace_ffn", every=every)
    _check_options(num_experts, top_k, method, granularity)
    found = [(n, m) for n, m in _find_ffns(model) if select is None or select(n, m)]
    chosen = found[every - 1 :: every]
    if not chosen:
        raise ValueError(
            f"replace_ffn: expected model to have at least every={every} feed-forward networks "
            f"(projections named {_known_forms()}, or nn.Sequential(Linear, activation, Linear)), "
            f"got {len(found)} in {type(model).__name__}"
        )
    # All layers are made before the model is changed, so that an error leaves it unchanged.
    layers = {
        id(ffn): upcycle(ffn, num_experts, top_k, method=method, granularity=granularity, **options)
        for _, ffn in chosen
    }
    for module in list(model.modules()):
        # `named_children` would leave out the second name of a shared module.
        for name, child in list(module._modules.items()):
            if id(child) in layers:
                setattr(module, name, layers[id(child)])
    return len(layers)


def read_ffn(ffn: nn.Module, operation: str, name: str = "ffn") -> DenseFFN | None:
    """Return the weights of a network of a known form, or None for any other module.

    Raises:
        ValueError: the projections have known names, but are not plain or do not fit together.
    """
    if isinstance(ffn, FeedForward):
        up = ffn.get_submodule("gate_up_proj" if ffn.gated else "up_proj")
        return _dense([up], ffn.down_proj, ffn.activation, ffn.gated, None, operation, name)
    if isinstance(ffn, nn.Sequential):
        return _read_sequential(ffn, operation, name)
    for gate, up_name, down in _FORMS:
        names = [n for n in (gate, up_name, down) if n]
        projections = [getattr(ffn, n, None) for n in names]
        if not all(isinstance(p, nn.Module) for p in projections):
            continue
        activation = _activation_of(ffn)
        if activation is None:
            return None
        known = {id(p) for p in projections} | {id(activation)}
        others = [m for m in ffn.children() if id(m) not in known]
        if not all(isinstance(module, nn.Dropout) for module in others):
            return None
        dropout = others[0] if others else None
        *ups, last = projections
        return _dense(ups, last, activation, bool(gate), dropout, operation, name)
    return None


def _activation_of(ffn: nn.Module) -> Any:
    """Return the activation of a network by its usual names, or None."""
    for key in _ACTIVATION_NAMES:
        function = getattr(ffn, key, None)
        if callable(function):
            return function
    return None


def _read_sequential(ffn: nn.Sequential, operation: str, name: str) -> DenseFFN | None:
    modules = list(ffn)
    dropout = modules.pop() if modules and isinstance(modules[-1], nn.Dropout) else None
    if len(modules) < 3 or not isinstance(modules[0], nn.Linear):
        return None
    first, activation, *between, last = modules
    if not isinstance(last, nn.Linear) or isinstance(activation, nn.Linear):
        return None
    if not all(isinstance(module, nn.Dropout) for module in between):
        return None
    if last.out_features != first.in_features:
        return None
    if any(module.p > 0 for module in between if isinstance(module, nn.Dropout)):
        raise ValueError(
            f"{operation}: expected {name} to have no dropout between its projections, got "
            f"{between[0]}"
        )
    if any(True for _ in activation.parameters()):
        return None
    return _dense([first], last, activation, False, dropout, operation, name)


def _matrix(projection: Any, operation: str, name: str) -> tuple[Tensor, Tensor | None]:
    """Return the weight `[out, in]` and the bias of a plain linear layer."""
    cls = type(projection)
    if cls is nn.Linear:
        return projection.weight, projection.bias
    if cls.__name__ == "Conv1D" and cls.__module__.startswith("transformers."):
        return projection.weight.t(), projection.bias
    raise ValueError(
        f"{operation}: expected the projections of {name} to be plain Linear layers, got "
        f"{cls.__name__}"
    )


def _dense(
    ups: list[Any],
    down: Any,
    activation: Any,
    gated: bool,
    dropout: nn.Module | None,
    operation: str,
    name: str,
) -> DenseFFN:
    weights, biases = zip(*(_matrix(up, operation, name) for up in ups), strict=True)
    up, up_bias = torch.cat(weights), None
    if any(bias is not None for bias in biases):
        pairs = zip(weights, biases, strict=True)
        up_bias = torch.cat([w.new_zeros(w.shape[0]) if b is None else b for w, b in pairs])
    down_weight, down_bias = _matrix(down, operation, name)
    model_dim, ffn_dim = down_weight.shape
    if up.shape != ((2 if gated else 1) * ffn_dim, model_dim):
        raise ValueError(
            f"{operation}: expected the projections of {name} to map D to F and back, got weights "
            f"{tuple(up.shape)} and {tuple(down_weight.shape)}"
        )
    kind = activation if isinstance(activation, str) else plain_kind(activation)
    if kind in GATED_KIND_OF and gated:
        kind = GATED_KIND_OF[kind]
    if kind is None:
        kind = copy.deepcopy(activation)
    return DenseFFN(up, up_bias, down_weight, down_bias, kind, gated, copy.deepcopy(dropout))


def _check_formula(ffn: nn.Module, dense: DenseFFN) -> None:
    """Raise ValueError if the module computes something other than its projections suggest."""
    if dense.up.device.type == "meta":
        return
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, dense.up.shape[1], generator=generator, device="cpu").to(dense.up)
    modes = [(module, module.training) for module in ffn.modules()]
    try:
        with torch.no_grad(), without_autocast(x.device):
            got = ffn.eval()(x)
            up = F.linear(x, dense.up, dense.up_bias)
            hidden = run_activation(up, dense.activation, gated=dense.gated, layout="concatenated")
            want = F.linear(hidden, dense.down, dense.down_bias)
    finally:
        for module, mode in modes:
            module.training = mode
    # The tolerance covers differences in rounding. Another formula differs by much more.
    tolerance = 1e-3 if x.dtype in (torch.float32, torch.float64) else 0.05
    if (
        not isinstance(got, Tensor)
        or got.shape != want.shape
        or not torch.allclose(
            got, want, rtol=0, atol=tolerance * max(1e-12, float(want.abs().max()))
        )
    ):
        raise ValueError(
            "upcycle: expected the forward pass of ffn to be its projections and activation alone, "
            f"got another result from {type(ffn).__name__}"
        )


def _find_ffns(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return all networks of a known form that are not inside mixtures or other networks."""
    found: list[tuple[str, nn.Module]] = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        mixture = isinstance(module, MoELayer) or isinstance(
            getattr(module, "experts", None), nn.Module
        )
        if not mixture and module is not model and read_ffn(module, "replace_ffn", name):
            found.append((name, module))
            mixture = True
        if mixture:
            inside.update(id(inner) for inner in module.modules())
    return found


def _check_options(num_experts: int, top_k: int, method: str, granularity: int | None) -> int:
    """Check the options, and return G."""
    check_choice("upcycle", "method", method, METHODS)
    if method == "copy":
        rule, fits = "left out for method='copy'", granularity in (None, 1)
        check_rule("upcycle", "granularity", granularity, rule, fits)
        return 1
    if granularity is None or granularity < 1:
        raise ValueError(
            "upcycle: expected granularity to be at least 1 for method='granular', got "
            f"{granularity}"
        )
    for name, value in (("num_experts", num_experts), ("top_k", top_k)):
        rule = f"a multiple of granularity={granularity}"
        check_rule("upcycle", name, value, rule, value % granularity == 0)
    return granularity


def _known_forms() -> str:
    return "; ".join(", ".join(name for name in form if name) for form in _FORMS)
