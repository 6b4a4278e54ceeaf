"""Groups of options of a layer, and arguments of other libraries that they replace."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any, ParamSpec, TypeVar

from moe_ext._checks import check_choice, check_kind, check_numbers, check_sizes
from moe_ext.dispatch import COMBINES, DISPATCHERS, TokenDispatcher, Wire
from moe_ext.nn.balance.moved import Rebalance

_P = ParamSpec("_P")
_T = TypeVar("_T")


def of_number(name: str, value: _T | float | None, kind: Callable[[Any], _T]) -> _T | None:
    """Return the object for an argument of a layer. A number is the first field of the object."""
    if isinstance(value, Real) and not isinstance(value, bool):
        value = kind(value)
    check_kind("MoELayer", name, value, Real, kind)  # type: ignore[arg-type]
    return value  # type: ignore[return-value]


@dataclass(frozen=True)
class SharedExpert:
    """Expert that processes every token, including masked ones.

    Attributes:
        ffn_dim: F, hidden size of the shared expert. The layer gives activation and biases.
        gate: multiply the output of the shared expert by `sigmoid(x @ w)`, as Qwen2-MoE does.

    Raises:
        ValueError: F is not positive.
    """

    ffn_dim: int
    _: KW_ONLY
    gate: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        check_sizes("SharedExpert", ffn_dim=self.ffn_dim)
        check_numbers("SharedExpert", SharedExpert.__annotations__, vars(self))


@dataclass(frozen=True)
class Dispatch:
    """Options for how rows travel between the ranks of a layer's `ep_group`.

    Attributes:
        dispatcher: "auto", "local", "alltoall", "dedup", "hierarchical", "allgather", or a
            `TokenDispatcher`. On one rank each name means "local". On several ranks "auto" takes
            the fastest dispatcher of a rehearsal at the first forward pass, see `explain_dispatch`.
            "nccl_ep", "deep_ep" and "symm_mem" (with a `row_budget`) use libraries for NVIDIA GPUs;
            they have not been tried on a GPU yet.
        combine: rows that the ranks of the experts return. "exact" returns the result of every
            slot, for the same bits on any number of ranks. "reduced" returns one sum for each token
            and rank, which sends less (see `DedupDispatcher`).
        wire: "int8", "fp8" or "mx" rounds rows that go to the experts, tokens in the forward pass
            and gradients in the backward pass, to one byte per element and scales. This is 0.26 of
            the bytes of float32, 0.52 of bfloat16. NaN and infinity arrive as NaN. "lossless" keeps
            every bit of all rows, including results and their gradients, in about 0.67 of the bytes
            of bfloat16 and 0.84 of float32 (on CPU). A `Wire` sets each of the four directions. On
            one rank nothing travels, and nothing is rounded.
        overlap: number of parts into which the tokens of a pass are cut; 1 sends all at once. One
            part travels while the experts work on the part before, forward and backward, with
            "alltoall", "dedup", "hierarchical" and "auto". More parts are for slow links and
            experts with much work: each part has its own messages, and about 1/overlap of the
            shorter of the two times is not hidden.
        rebalance: "exact" runs the same number of rows on each rank of `ep_group` in every pass.
            Weights of experts with many rows travel to ranks with few rows, at most E / P to a
            rank, if that saves more time than it takes. Their gradients travel back. "periodic"
            keeps a plan for many steps, see `update_placement`. A `Rebalance` sets further options.
        debug: compare operation, shape, dtype and splits of the layer's collectives over the ranks
            before they are sent. The option must be equal on all ranks. If a value differs, every
            rank raises a ValueError that names it. This costs one more message per collective. None
            follows the environment variable MOE_EXT_DEBUG.

    Raises:
        ValueError: a value is out of its range, or not a known name.
        TypeError: a value is of another type.
    """

    dispatcher: str | TokenDispatcher = "auto"
    _: KW_ONLY
    combine: str = "exact"
    wire: Wire | str | None = None
    overlap: int = 1
    rebalance: Rebalance | str | None = None
    debug: bool | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        check_numbers("Dispatch", Dispatch.__annotations__, vars(self))
        if not self.is_object and self.dispatcher not in DISPATCHERS:
            raise ValueError(
                f"Dispatch: expected dispatcher to be one of {DISPATCHERS} or a TokenDispatcher, "
                f"got {self.dispatcher!r}"
            )
        check_choice("Dispatch", "combine", self.combine, COMBINES)
        check_sizes("Dispatch", overlap=self.overlap)
        check_kind("Dispatch", "rebalance", self.moves, Rebalance)
        object.__setattr__(self, "wire", Wire.of("Dispatch", self.wire))

    @property
    def moves(self) -> Rebalance | None:
        """Options for moving experts, or None if no expert moves."""
        return Rebalance(self.rebalance) if isinstance(self.rebalance, str) else self.rebalance

    @property
    def is_object(self) -> bool:
        """True if the dispatcher is an object, not a name."""
        return not isinstance(self.dispatcher, str) and hasattr(self.dispatcher, "dispatch")

    @classmethod
    def of(cls, value: Dispatch | TokenDispatcher | str) -> Dispatch:
        """Return the `Dispatch` for an argument of a layer."""
        return value if isinstance(value, Dispatch) else cls(value)


# Arguments of other libraries' layers and of earlier versions, with the argument of `MoELayer` that
# means the same.
ELSEWHERE = {
    "capacity_factor": "capacity",
    **dict.fromkeys(("balance_loss_coef", "z_loss_coef", "loss_mode"), "balance"),
    **dict.fromkeys(("shared_ffn_dim", "shared_expert_gate"), "shared_expert"),
    **dict.fromkeys(("combine", "wire", "overlap", "rebalance", "debug"), "dispatcher"),
    **dict.fromkeys(("hidden_size", "d_model", "dim", "embed_dim", "input_size"), "model_dim"),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_hidden_size"), "ffn_dim"),
    **dict.fromkeys(("d_ff", "d_hidden", "hidden_dim", "inter_dim", "ff_dim"), "ffn_dim"),
    **dict.fromkeys(("num_expert", "n_experts", "num_local_experts"), "num_experts"),
    **dict.fromkeys(("n_routed_experts", "moe_num_experts"), "num_experts"),
    **dict.fromkeys(("k", "topk", "num_experts_per_tok", "experts_per_token"), "top_k"),
    **dict.fromkeys(("moe_top_k", "n_activated_experts"), "top_k"),
    **dict.fromkeys(("gate", "gate_type", "score_func", "scoring_func", "score_fn"), "router"),
    **dict.fromkeys(("expert", "expert_fn"), "experts"),
    **dict.fromkeys(("hidden_act", "act_fn", "activation_fn", "act"), "activation"),
    **dict.fromkeys(("use_bias", "add_bias", "mlp_bias"), "bias"),
    **dict.fromkeys(("aux_loss_coef", "aux_loss_coeff", "router_aux_loss_coef"), "balance"),
    **dict.fromkeys(("moe_aux_loss_coeff", "aux_loss_alpha", "aux_loss_weight"), "balance"),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts"), "shared_expert"),
    **dict.fromkeys(("moe_group", "process_group", "group", "expert_group"), "ep_group"),
    **dict.fromkeys(("ep_size", "expert_parallel_size", "world_size"), "ep_group"),
    **dict.fromkeys(("params_dtype", "torch_dtype"), "dtype"),
}


def names_other_arguments(init: Callable[_P, None]) -> Callable[_P, None]:
    """Let the constructor of a layer raise a TypeError that names the argument for `ELSEWHERE`."""
    names = [*inspect.signature(init).parameters][1:]

    @functools.wraps(init)
    def taking(*args: _P.args, **options: _P.kwargs) -> None:
        unknown = [name for name in options if name not in names]
        if unknown:
            told = (f"{n} (here {ELSEWHERE[n]})" if n in ELSEWHERE else n for n in unknown)
            raise TypeError(
                f"{type(args[0]).__name__}: expected arguments to be among {', '.join(names)}, got "
                f"{', '.join(told)}"
            )
        init(*args, **options)

    return taking
