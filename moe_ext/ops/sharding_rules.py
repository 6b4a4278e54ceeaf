"""Placements of the operators for DTensors: a table of rules, and reasons to refuse DTensors.

A rule is written `results <- arguments`, for one axis of a mesh. A number is the sharded dimension,
`+` is a sum that is still to be made, and `-` is whole on every rank. Arguments that a rule does
not name are whole. If no rule fits, everything is whole. Tensors in other placements are gathered
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

_TOKENS = "0 0 + + <- logits:0 token_mask:0"

_RULES: dict[str, Sequence[str]] = {
    "activation": [f"{dim} <- x:{dim}" for dim in range(4)],
    "_activation_backward": [f"{dim} <- grad:{dim} x:{dim}" for dim in range(4)],
    "gated_activation": [f"{dim} <- x:{dim} slot_of_row:{dim}" for dim in range(3)],
    "_gated_activation_backward": [f"{dim} <- grad:{dim} x:{dim}" for dim in range(3)],
    "_gated_activation_backward_weighted": ["0 + <- grad:0 x:0 slot_of_row:0"],
    # Gates that look at one token at a time; their counts are sums over tokens.
    "topk_gate": [_TOKENS],
    "gate_weights": ["0 + + <- logits:0 topk_idx:0"],
    "_topk_gate_backward": ["0 <- grad_weights:0 logits:0 topk_idx:0"],
    "gshard_gate": ["0 0 + + + <- logits:0 token_mask:0 token_idx:0"],
    "_gshard_gate_backward": ["0 <- grad_weights:0 logits:0 topk_idx:0"],
    "noisy_topk_gate": ["0 0 + + + <- clean_logits:0 noise_logits:0 token_mask:0 token_idx:0"],
    "_noisy_topk_gate_backward": [
        "0 0 <- grad_weights:0 clean_logits:0 noise_logits:0 topk_idx:0 token_idx:0"
    ],
    "routing_jitter": ["0 <- x:0 token_idx:0"],
    "router_logits": ["0 <- x:0", "1 <- weight:0", "+ <- x:1 weight:1"],
    "_router_logits_backward_x": ["0 <- grad:0", "1 <- weight:1", "+ <- grad:1 weight:0"],
    "_router_logits_backward_weight": ["0 <- grad:1", "1 <- x:1", "+ <- grad:0 x:0"],
    # The place of a row depends on all tokens, which must be whole. Columns may be sharded.
    "permute_tokens": ["1 - - - - - <- x:1", "+ - - - - - <- x:+"],
    "unpermute_tokens": ["1 <- rows:1", "+ <- rows:+"],
    "_unpermute_tokens_backward": ["1 + <- grad:1 rows:1", "- + <- rows:+"],
    "_gather_tokens": ["1 <- x:1", "+ <- x:+"],
    "_grouped_mm_backward_weight": ["1 <- grad:1", "2 <- x:1"],
    "_grouped_mm_backward_bias": ["1 <- grad:1"],
    "quantize_rows": ["0 <- x:0"],
    "dequantize_rows": ["0 <- rows:0"],
    # Operators that look at all tokens at once, or at numbers that depend on all of them.
    **dict.fromkeys(
        (
            *("router_z_loss", "_router_z_loss_backward", "sequence_load"),
            *("load_balance_loss", "_load_balance_loss_backward", "_sequence_load_backward"),
            *("expert_choice_gate", "_expert_choice_gate_backward", "_sinkhorn_scale"),
            *("balanced_assignment", "limit_capacity", "routing_uniform"),
        ),
        (),
    ),
}

# Operators whose x, and its gradient, are never sharded in the last dimension.
_WHOLE_ROWS = {"gated_activation", "_gated_activation_backward"}

_REASONS = {
    "attention": "ranks that hold parts of a sequence run moe_ext.attention.ring_attention",
    "": "it works on the memory of one rank",
}
_PLAIN = {"_cpu_isa", "_set_cpu_isa", "_cpu_isa_supported", "_set_reuses_memory"}


def register_sharding_rules() -> None:
    """Have the operators of `moe_ext.ops` take DTensors, forward and backward; call it once.

    Operators that work row by row take sharded tokens. `grouped_mm` takes whole rows, and weights
    sharded in any dimension, experts included. Columns of `permute_tokens` and `unpermute_tokens`
    may be sharded. Tensors in other placements are gathered. Operators that compress gradients,
    encode them, or compute a block of attention refuse DTensors.

    The call imports `torch.distributed.tensor`, which takes a second.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import register_sharding

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    for operator in _operators():
        name = operator._schema.name.removeprefix("moe_ext::")
        if name == "grouped_mm":
            handlers[operator] = _grouped_mm
        elif name in _RULES:
            register_sharding(operator)(_strategy(operator, _RULES[name]))
        else:
            handlers[operator] = _refuse


def _operators() -> list[Any]:
    """Return every operator of ours that takes tensors."""
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("moe_ext::")]
    names = sorted({s.name.removeprefix("moe_ext::") for s in schemas} - _PLAIN)
    return [getattr(torch.ops.moe_ext, name).default for name in names]


def _refuse(operator: Any, args: Any, kwargs: Any) -> Any:
    name = operator._schema.name.removeprefix("moe_ext::")
    reason = next(text for word, text in _REASONS.items() if word in name)
    raise NotImplementedError(
        f"{name}: expected plain tensors, got a DTensor: {reason}; give it `x.to_local()`"
    )


def _placement(code: str) -> Placement:
    from torch.distributed.tensor import Partial, Replicate, Shard

    return Partial() if code == "+" else Replicate() if code == "-" else Shard(int(code))


def _strategy(operator: Any, rules: Sequence[str]) -> Any:
    """Return a function for `register_sharding`, which lists placements that fit a call."""
    arguments = [a.name for a in operator._schema.arguments]
    whole_rows = operator._schema.name.removeprefix("moe_ext::") in _WHOLE_ROWS

    def fits(name: str, code: str, spec: Any) -> bool:
        last = len(spec.shape) - (whole_rows and name in ("x", "grad"))
        return not code.isdigit() or int(code) < last

    def strategy(*args: Any, **kwargs: Any) -> list[Any]:
        given = {**dict(zip(arguments, args, strict=False)), **kwargs}
        specs = {name: s for name, s in given.items() if hasattr(s, "placements")}
        whole = " ".join("-" for _ in operator._schema.returns)
        found = []
        for rule in (whole + " <- ", *rules):
            results, named = rule.split(" <- ")
            codes = dict(word.split(":") for word in named.split())
            if given.get("rng_state") is not None and codes and given.get("token_idx") is None:
                continue
            inputs = [_placement(codes.get(name, "-")) if name in specs else None for name in given]
            if all(fits(name, codes[name], s) for name, s in specs.items() if name in codes):
                found.append(([_placement(code) for code in results.split()], inputs))
        return found

    return strategy


def _grouped_mm(operator: Any, args: Any, kwargs: Any) -> Tensor:
    """Compute `grouped_mm` of weights that stay where they are, and rows that come to them.

    If a rank has some of the experts or columns, its product is a summand of the result.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    names = ("x", "weight", "expert_offsets", "bias")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    tensors = {name: t for name, t in given.items() if t is not None}
    plain = [name for name, t in tensors.items() if not isinstance(t, DTensor)]
    if plain:
        raise TypeError(f"grouped_mm: expected {plain[0]} to be a DTensor as the others, got none")
    x, weight = tensors["x"], tensors["weight"]
    mesh = weight.device_mesh
    of: dict[str, list[Placement]] = {name: [] for name in (*names, "result")}
    for place in weight.placements:
        held = place.dim if type(place) is Shard else -1
        of["weight"].append(Replicate() if held < 0 else place)
        of["x"].append(Shard(1) if held == 2 else Replicate())
        of["expert_offsets"].append(Replicate())
        of["bias"].append({0: Shard(0), 1: Shard(1)}.get(held, Replicate()))
        of["result"].append({0: Partial(), 1: Shard(1), 2: Partial()}.get(held, Replicate()))
    local = {name: t.redistribute(mesh, of[name]).to_local() for name, t in tensors.items()}
    sums = [
        place == Shard(2) and mesh.get_local_rank(i) > 0 for i, place in enumerate(of["weight"])
    ]
    if "bias" in local and any(sums):
        # The results of the ranks are summed, and the first rank alone adds the bias.
        local["bias"] = torch.zeros_like(local["bias"])
    _, (first, *_) = compute_local_shape_and_global_offset(weight.shape, mesh, of["weight"])
    # Rows of experts on other ranks lie outside of these offsets, and become zeros.
    end = first + local["weight"].shape[0]
    local["expert_offsets"] = local["expert_offsets"][first : end + 1]
    shape = torch.Size((x.shape[0], weight.shape[1]))
    return DTensor.from_local(
        operator(**local), mesh, of["result"], run_check=False, shape=shape, stride=(shape[1], 1)
    )
