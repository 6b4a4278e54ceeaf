"""Recurrences and convolutions over sequences that are sharded over the ranks of a group.

Shapes: B batch, H heads, L positions of this rank, K dim of queries and keys, V dim of values, D
channels, W taps, P ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moe_ext._checks import check_choice
from moe_ext._compile import outside_graphs
from moe_ext.attention.checks import message_device, requires, wants_grad
from moe_ext.attention.context import shared_sequences
from moe_ext.attention.layouts import Layout, make_layout, ranks_of
from moe_ext.attention.masks import Offsets, check_cu_seqlens, check_end, rows_of_offsets
from moe_ext.attention.recurrent import local
from moe_ext.attention.recurrent.moves import Halo, Move, Spread
from moe_ext.attention.recurrent.providers import Stretch, by_head, serve
from moe_ext.attention.recurrent.scan import StateScan
from moe_ext.attention.sharding import check_lengths
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.groups import group_rank
from moe_ext.nn.torch_state import without_autocast

SCHEMES = ("state", "heads")
_Where = tuple[ProcessGroup | DeviceMesh | None, str | Layout | None, Offsets | None]


@dataclass(frozen=True)
class _Sequences:
    """The sequences of a call, after the ranks have agreed on them.

    Attributes:
        group: the ranks.
        layout: which rank holds which positions.
        offsets: offsets of documents, once for all rows of the batch or for each row; None for one
            document.
        operation: name for error messages.
    """

    group: ProcessGroup | None
    layout: Layout
    offsets: tuple[tuple[int, ...], ...] | None
    operation: str

    @property
    def line(self) -> Layout:
        """The contiguous layout of the same positions, with one stretch on each rank."""
        return make_layout("contiguous", self.layout.seq_len, self.layout.num_ranks)

    @property
    def is_line(self) -> bool:
        """True if the layout of the call is already contiguous."""
        return self.layout.shards == self.line.shards

    def move(self, scheme: str, heads: int, count: int, *, back: bool = False) -> Move:
        """The move of rows to where a scheme needs them, or back.

        A position has `count` rows, which its heads share evenly.
        """
        way = _way(scheme, self.layout, heads, count)
        return Move(self.group, *_turned(way, back), self.operation)

    def documents(self, positions: Tensor) -> Tensor | None:
        """`[1 or B, L]`, the document of each position, -1 for positions before the sequence."""
        if self.offsets is None:
            return None
        rows = [torch.tensor(row, device=positions.device) for row in self.offsets]
        return torch.stack([torch.bucketize(positions, row, right=True) - 1 for row in rows])

    @property
    def own(self) -> range:
        """Positions of this rank in the contiguous layout."""
        sizes, rank = self.line.sizes, group_rank(self.group)
        start = sum(sizes[:rank])
        return range(start, start + sizes[rank])

    def stretch(self, positions: range, like: Tensor, dtype: torch.dtype, **more: Any) -> Stretch:
        """The `Stretch` of some positions, on the device of `like`."""
        at = torch.arange(positions.start, positions.stop, device=like.device)
        edges = None
        if self.offsets is not None:
            first, last = positions.start, positions.stop
            inner = ({max(first, min(e, last)) - first for e in row} for row in self.offsets)
            edges = tuple(tuple(sorted({0, *row, len(positions)})) for row in inner)
        return Stretch(self.documents(at), edges, dtype, **more)


def _sequences(
    operation: str,
    check: Callable[[], tuple[int, dict[str, object]]],
    tensors: Sequence[Any],
    given: _Where,
) -> _Sequences:
    """Check a call on this rank, and compare it with the calls of the other ranks.

    Args:
        operation: name for error messages.
        check: function that checks the call, and returns L and the facts that must be equal on all
            ranks.
        tensors: tensors of the call.
        given: group, layout and documents. Those that are None come from `sequence_parallel`.
    """
    group, layout, cu_seqlens = given
    shared = shared_sequences()
    if shared is not None and group is None:
        group, layout = shared.group, shared.layout if layout is None else layout
        cu_seqlens = shared.cu_seqlens if cu_seqlens is None else cu_seqlens
    layout = "zigzag" if layout is None else layout
    ranks = ranks_of(group, operation)
    with Agreement(operation, ranks, message_device(*tensors), repeats=True) as agreement:
        rows = rows_of_offsets(cu_seqlens, operation)
        if cu_seqlens is not None and rows is None:
            offsets = check_cu_seqlens(cu_seqlens, operation)
            assert offsets is not None
            rows = (offsets,)
        length, facts = check()
        facts = {**facts, "layout": layout, "cu_seqlens": rows}
        told = agreement.compare(facts, values=[length])
    lengths = [row[0] for row in told]
    for row in rows or ():
        check_end(row, sum(lengths), operation)
    one = rows[0] if rows is not None and len(rows) == 1 else None
    made = make_layout(layout, sum(lengths), len(lengths), cu_seqlens=one)
    check_lengths(made, lengths, operation, ranks)
    return _Sequences(ranks, made, rows, operation)


def _agree(
    op: str,
    names: Mapping[str, Tensor | None],
    facts: Mapping[str, object],
    scheme: str,
    given: _Where,
    decays: tuple[int, ...] = (3,),
    more: Mapping[str, tuple[Tensor, tuple[str, ...]]] | None = None,
) -> _Sequences:
    """Check and compare a call of a recurrence, and return its sequences.

    Args:
        op: name for error messages.
        names: q, k, v, g, beta and the state, by their names in the call.
        facts: further facts to compare.
        scheme: scheme that the caller passed.
        given: see `_sequences`.
        decays: numbers of dimensions that g may have.
        more: further arguments by name, each with its dimensions, "H" or "K".
    """
    tensors, require = [*names.values()], requires(op)

    def check() -> tuple[int, dict[str, object]]:
        check_choice(op, "scheme", scheme, (*SCHEMES, "auto"))
        labels, dims = [*names], ((4,), (4,), (4,), decays, (3,), (4,))
        for name, x, wanted in zip(labels, tensors, dims, strict=True):
            if x is None and name in labels[4:]:
                continue
            is_tensor = isinstance(x, Tensor) and x.dim() in wanted
            rule = f"a tensor of {' or '.join(map(str, wanted))} dimensions"
            require(is_tensor, name, rule, tuple(getattr(x, "shape", ())) or x)
        q, k, v, g, beta, state = tensors
        assert q is not None and k is not None and v is not None and g is not None
        batch, heads, length, v_dim = v.shape
        fits = q.shape[0] == batch and q.shape[2] == length and heads % max(1, q.shape[1]) == 0
        rule = f"of shape [{batch}, a divisor of {heads}, {length}, K], as {labels[2]} has it"
        require(fits, labels[0], rule, tuple(q.shape))
        by_element = q.shape[3:] if g.dim() == 4 else ()
        shapes = {labels[1]: (k, q.shape), labels[3]: (g, torch.Size((*v.shape[:3], *by_element)))}
        if beta is not None:
            shapes[labels[4]] = beta, v.shape[:3]
        if state is not None:
            shapes[labels[5]] = state, torch.Size((batch, heads, q.shape[3], v_dim))
        sizes = {"H": heads, "K": q.shape[3]}
        for name, (x, letters) in (more or {}).items():
            is_tensor = isinstance(x, Tensor)
            require(is_tensor, name, "a tensor", type(x).__name__)
            shapes[name] = x, torch.Size(sizes[letter] for letter in letters)
        for name, (x, shape) in shapes.items():
            require(x.shape == shape, name, f"of shape {tuple(shape)}", tuple(x.shape))
        return length, {
            "sizes": (batch, heads, q.shape[1], q.shape[3], v_dim),
            "a decay by element": bool(by_element),
            "dtype": v.dtype,
            "giving initial_state": state is not None,
            "scheme": scheme,
            "requiring a gradient": wants_grad(*tensors, *(x for x, _ in (more or {}).values())),
            **facts,
        }

    return _sequences(op, check, tensors, given)


@outside_graphs
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    layout: str | Layout | None = None,
    cu_seqlens: Offsets | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    scheme: str = "auto",
) -> tuple[Tensor, Tensor]:
    r"""Run a recurrence of states over the whole sequence, as in one process.

    .. math::
        S_t = e^{g_t} (I - \beta_t k_t k_t^T) S_{t-1} + \beta_t k_t v_t^T,\quad
        y_t = \mathrm{scale}\; S_t^T q_t

    Without ``beta`` the state only decays, :math:`S_t = e^{g_t} S_{t-1} + k_t v_t^T`, as in
    lightning attention and in the state space of Mamba-2 (see `selective_scan`). With a decay by
    element of a key, as in Kimi's delta attention, the recurrence is
    :math:`S_t = (I - \beta_t k_t k_t^T)\, \mathrm{diag}(e^{g_t})\, S_{t-1} + \beta_t k_t v_t^T`.
    Inside `sequence_parallel` the function takes group, layout and documents from the context.

    Args:
        q: `[B, Hk, L, K]`, this rank's positions.
        k: `[B, Hk, L, K]`.
        v: `[B, H, L, V]`; H is a multiple of Hk. A head of q and k is for H / Hk consecutive heads.
        g: `[B, H, L]`, logarithms of decays, not above 0, -inf to forget all; or `[B, H, L, K]`,
            one for each element of a key.
        beta: `[B, H, L]`, or None.
        group: the ranks that share the sequence, see `ring_attention`. None takes the group of
            `sequence_parallel`, and outside of it this process alone.
        layout: see `make_layout`; "zigzag" by default.
        cu_seqlens: offsets of packed documents in the whole sequence, see `ring_attention`. Every
            document except the first begins with a state of zeros.
        scale: factor on q; None for 1 / sqrt(K).
        initial_state: `[B, H, K, V]` before position 0, equal on every rank; None for zeros.
        scheme: "state", each rank runs its own stretch, and maps of states travel, whose bytes do
            not grow with the sequence; "heads", an all-to-all to shards of the heads and back;
            "auto", the scheme that sends fewer bytes.

    Returns:
        `[B, H, L, V]` in the dtype of v; and the state `[B, H, K, V]` after the last position of
        this rank's heads and stretch, float32 (float64). In one process, and on the last rank with
        "state" and a contiguous layout, it is the state after the whole sequence.

    Raises:
        ValueError: on every rank, if an argument is invalid on any rank or differs between ranks,
            or if lengths do not match the layout.
        RankFailureError: a rank died or did not answer; the message names it.

    Reference: Yang, Kautz, Hatamizadeh: Gated Delta Networks, 2024 (arXiv 2412.06464); Kimi Linear,
        2025 (arXiv 2510.26692), equation 1.
    """
    names = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}
    facts: dict[str, object] = {"scale": scale, "giving beta": beta is not None}
    given = (group, layout, cu_seqlens)
    sequences = _agree("gated_delta_rule", names, facts, scheme, given, (3, 4))
    q = q * (q.shape[3] ** -0.5 if scale is None else scale)
    g = g if g.dim() == 4 else g.unsqueeze(-1)
    if g.shape[-1] == 1:
        # Sums of these logarithms are subtracted from each other, which would give NaN for -inf.
        # exp(-104) is 0 in float32.
        g = g.masked_fill(g == -torch.inf, -104.0)
    rows = [q, k, v, g, *([] if beta is None else [beta.unsqueeze(-1)])]
    out, state = _recur(rows, None, initial_state, scheme, sequences)
    return out.to(v.dtype), state


@outside_graphs
def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    layout: str | Layout | None = None,
    cu_seqlens: Offsets | None = None,
    initial_state: Tensor | None = None,
    scheme: str = "auto",
) -> tuple[Tensor, Tensor]:
    r"""Run the selective state space of Mamba over the whole sequence, as in one process.

    .. math::
        S_t = e^{dt_t A} S_{t-1} + dt_t B_t x_t^T,\quad y_t = S_t^T C_t + D x_t

    Args:
        x: `[B, H, L, V]`, this rank's positions. For Mamba-1 each channel is a head of V = 1.
        dt: `[B, H, L]`, after softplus.
        A: `[H]`, not above 0, as in Mamba-2; or `[H, K]`, a rate for each element of a state, as in
            Mamba-1.
        B: `[B, G, L, K]`; H is a multiple of G.
        C: `[B, G, L, K]`.
        D: `[H]` or None.
        group: see `gated_delta_rule`.
        layout: see `gated_delta_rule`.
        cu_seqlens: see `gated_delta_rule`.
        initial_state: see `gated_delta_rule`.
        scheme: see `gated_delta_rule`.

    Returns:
        `[B, H, L, V]` in the dtype of x, and the state as `gated_delta_rule` returns it.

    Raises:
        ValueError: see `gated_delta_rule`.
        RankFailureError: a rank died or did not answer; the message names it.

    Reference: Gu, Dao: Mamba, 2023 (arXiv 2312.00752), equation 2; Dao, Gu: Transformers are SSMs,
        2024 (arXiv 2405.21060).
    """
    op = "selective_scan"
    by_element = isinstance(A, Tensor) and A.dim() == 2
    names = {"C": C, "B": B, "x": x, "dt": dt, "beta": None, "initial_state": initial_state}
    facts: dict[str, object] = {"giving D": D is not None, "a decay by element": by_element}
    more = {"A": (A, ("H", "K")[: 1 + by_element])} | ({} if D is None else {"D": (D, ("H",))})
    given = (group, layout, cu_seqlens)
    sequences = _agree(op, names, facts, scheme, given, more=more)
    rows, rates = [C, B, x, dt.unsqueeze(-1)], A if by_element else A.unsqueeze(-1)
    out, state = _recur(rows, rates, initial_state, scheme, sequences)
    return (out if D is None else out + x * D[:, None, None]).to(x.dtype), state


def _recur(
    rows: list[Tensor],
    rates: Tensor | None,
    state: Tensor | None,
    scheme: str,
    sequences: _Sequences,
) -> tuple[Tensor, Tensor]:
    """Run a recurrence over the sequences.

    Args:
        rows: q, k, v, logarithms of decays `[B, H, L, 1 or K]`, and with the delta rule beta
            `[B, H, L, 1]`. With rates: C, B, x and dt `[B, H, L, 1]`.
        rates: `[H, 1 or K]`, A of `selective_scan`, or None.
        state: state before position 0; None for zeros.
        scheme: scheme that the caller passed.
        sequences: sequences of the call.
    """
    v = rows[2]
    whole = sequences.stretch(range(sequences.layout.seq_len), v, v.dtype)
    dtype = torch.promote_types(v.dtype, torch.float32)
    state = None if state is None else state.to(dtype)
    # Autocast is off, because products with states are computed in float32.
    with without_autocast(v.device):
        if sequences.layout.num_ranks == 1:
            return _run(rows, rates, state, whole)
        rows = [x.to(dtype) for x in rows]
        rates = None if rates is None else rates.to(dtype)
        if _scheme(scheme, sequences, rows, rates) == "heads":
            return _by_heads(rows, rates, state, whole, sequences)
        return _by_state(rows, rates, state, v.dtype, sequences)


def _is_diagonal(rows: list[Tensor], rates: Tensor | None) -> bool:
    """True if states decay by element, without a delta rule."""
    return len(rows) == 4 and (rows[3] if rates is None else rates).shape[-1] > 1


def _run(
    rows: list[Tensor], rates: Tensor | None, state: Tensor | None, stretch: Stretch
) -> local.Scanned:
    q, k, v, g, *beta = rows
    # A last dimension of 1 means one decay a head.
    g = g.squeeze(-1) if g.shape[-1] == 1 else g
    if rates is not None:
        operator = "selective_scan" if rates.shape[1] == 1 else "selective_scan by element"
        given = {"x": v, "dt": g, "A": rates, "B": k, "C": q, "state": state}
        return local.Scanned(*serve(operator, local.selective_scan, given, stretch))
    if _is_diagonal(rows, None):
        return local.diagonal_scan(q, k, v, g, state, stretch.documents)
    steps = beta[0].squeeze(-1) if beta else None
    given = {"q": q, "k": k, "v": v, "g": g, "beta": steps, "state": state}
    return local.Scanned(*serve("gated_delta_rule", local.delta_rule, given, stretch))


def sent_bytes(
    scheme: str,
    layout: Layout,
    rank: int,
    *,
    batch: int,
    heads: int,
    dim: int,
    v_dim: int,
    has_beta: bool = False,
    g_dim: int = 1,
    kv_heads: int | None = None,
    by_element: bool = False,
    itemsize: int = 4,
    backward: bool = False,
) -> int:
    """Bytes that a rank sends in a pass of `gated_delta_rule` or `selective_scan`.

    Args:
        scheme: "state" or "heads".
        layout: layout of the positions.
        rank: rank in the group.
        batch: B, number of sequences.
        heads: H, number of heads.
        dim: K, elements of a key.
        v_dim: V, elements of a value.
        has_beta: True with the delta rule.
        g_dim: number of elements of a decay, 1 or K.
        kv_heads: number of heads of q and k (C and B); H if None.
        by_element: True if states decay by element without the delta rule.
        itemsize: bytes of an element.
        backward: if True, bytes of the backward pass, in which all rows have gradients.
    """

    def rows(count: int, *, back: bool = False) -> int:
        way = _turned(_way(scheme, layout, heads, count), back != backward)
        return Move(None, *way, "sent_bytes").elements(rank)

    found = rows(heads) * (v_dim + g_dim + has_beta) + rows(kv_heads or heads) * 2 * dim
    found += rows(heads, back=True) * v_dim
    if scheme == "state":
        of_map = dim * dim if has_beta else dim if by_element else 1
        place = layout.num_ranks - 1 - rank if backward else rank
        found += heads * (of_map + dim * v_dim) * StateScan.messages(place, layout.num_ranks)
    return batch * found * itemsize


@functools.lru_cache(maxsize=128)
def _way(scheme: str, layout: Layout, heads: int, count: int) -> tuple[Spread, Spread]:
    """Distribution of `count` rows of a position before a recurrence, and during it.

    The heads share the rows evenly.
    """
    if scheme == "heads":
        target = Spread.of_heads(heads, layout, None if count == heads else count)
    else:
        line = make_layout("contiguous", layout.seq_len, layout.num_ranks)
        target = Spread.of_positions(count, line)
    return Spread.of_positions(count, layout), target


def _turned(way: tuple[Spread, Spread], back: bool) -> tuple[Spread, Spread]:
    return (way[1], way[0]) if back else way


def conv_sent_bytes(
    layout: Layout,
    rank: int,
    *,
    batch: int,
    channels: int,
    taps: int,
    itemsize: int = 4,
    backward: bool = False,
) -> int:
    """Bytes that a rank sends in a pass of `causal_conv1d`.

    Args:
        layout: layout of the positions.
        rank: rank in the group.
        batch: B, number of sequences.
        channels: D, number of channels.
        taps: W, number of taps of the filter.
        itemsize: bytes of an element.
        backward: if True, bytes of the backward pass.
    """
    way = _way("state", layout, 1, 1)
    moves = (Move(None, *_turned(way, back), "sent_bytes") for back in (False, True))
    halo = Halo(None, way[1].layout.sizes, taps - 1, "sent_bytes").elements(rank, backward)
    moved = sum(move.elements(rank) for move in moves)
    return batch * channels * itemsize * (moved + halo)


@functools.lru_cache(maxsize=128)
def most_sent_bytes(layout: Layout, **sizes: Any) -> dict[str, int]:
    """For each scheme the bytes of the rank that sends most, see `sent_bytes`."""
    ranks = range(layout.num_ranks)
    return {
        name: max(sent_bytes(name, layout, rank, **sizes) for rank in ranks) for name in SCHEMES
    }


def _scheme(scheme: str, sequences: _Sequences, rows: list[Tensor], rates: Tensor | None) -> str:
    """Resolve "auto" to a scheme, the same on every rank."""
    if scheme != "auto":
        return scheme
    (batch, kv_heads, _, dim), heads = rows[0].shape, rows[2].shape[1]
    sizes: dict[str, Any] = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "dim": dim}
    sizes |= {"v_dim": rows[2].shape[3], "g_dim": rows[3].shape[3], "has_beta": len(rows) > 4}
    sizes["by_element"] = _is_diagonal(rows, rates)
    most = most_sent_bytes(sequences.layout, **sizes)
    return min(most, key=most.__getitem__)


def _by_heads(
    rows: list[Tensor],
    rates: Tensor | None,
    state: Tensor | None,
    whole: Stretch,
    sequences: _Sequences,
) -> tuple[Tensor, Tensor]:
    """Run a recurrence with scheme "heads": a rank has all positions of some heads."""
    heads = rows[2].shape[1]
    each = [heads // max(1, x.shape[1]) for x in rows]
    back = sequences.move("heads", heads, heads, back=True)
    own = back.source.heads[group_rank(sequences.group)]
    mine = slice(own.start, own.stop)
    moved = _moved(rows, sequences, "heads")
    moved = [_of_heads(x, own, count) for x, count in zip(moved, each, strict=True)]
    rates = None if rates is None else rates[mine]
    state = None if state is None else state[:, mine]
    out, last = _run(moved, rates, state, whole)
    return back(out.to(rows[2].dtype)), last


def _of_heads(x: Tensor, own: range, each: int) -> Tensor:
    """Adapt rows `[B, G, ...]` that this rank received to its heads `own`.

    In the whole sequence `each` consecutive heads read one row. If this rank's heads do not divide
    evenly over its rows, the rows are repeated for each head.
    """
    count = len(own) // max(1, x.shape[1])
    places = [head // each - own.start // each for head in own]
    if places == [i // max(1, count) for i in range(len(own))]:
        return x
    return x.index_select(1, torch.tensor(places, device=x.device))


def _by_state(
    rows: list[Tensor],
    rates: Tensor | None,
    state: Tensor | None,
    dtype: torch.dtype,
    sequences: _Sequences,
) -> tuple[Tensor, Tensor]:
    """Run a recurrence with scheme "state": a rank has a stretch of positions of all heads."""
    heads, rank = rows[2].shape[1], group_rank(sequences.group)
    rows = rows if sequences.is_line else _moved(rows, sequences, "state")
    q, k, v, g, *beta = rows
    stretch = sequences.stretch(sequences.own, v, dtype, is_shared=True)
    documents, dim, v_dim = stretch.documents, q.shape[3], v.shape[3]
    is_first = None
    if documents is not None and documents.shape[1]:
        is_first = (documents == documents[:, :1])[:, None, :, None]
    if rank > 0:
        # Other ranks begin with zeros, which stay in the graph of `initial_state`, so that it gets
        # a gradient on every rank.
        state = None if state is None else state.clone().zero_()
    reads: Tensor | None = None
    if beta:
        # The recurrence also runs on the identity as a state, without values. The last state is
        # then M, the map of the stretch. Outputs are factors of the state before in `out`.
        eye = torch.eye(dim, dtype=v.dtype, device=v.device).expand(*v.shape[:2], -1, -1)
        wide = torch.cat([v, v.new_zeros(*v.shape[:3], dim)], -1)
        wider = [*rows[:2], wide, *rows[3:]]
        both = torch.cat([local.begin(state, v, dim), eye], -1)
        out, added = _run(wider, None, both, stretch)
        out = out.to(v.dtype)
        (out, reads), (added, maps) = (x.split([v_dim, dim], -1) for x in (out, added))
    else:
        out, added = _run(rows, rates, state, stretch)
        out, decay = out.to(v.dtype), g.sum(2)
        maps = (decay if rates is None else decay * rates).unsqueeze(-1).exp()
        maps = maps if is_first is None else maps * is_first[:, :, -1:]
        if not _is_diagonal(rows, rates):
            sums = g.cumsum(2) if rates is None else g.cumsum(2) * rates[:, None]
            reads = sums.exp() * by_head(q, heads)
            reads = reads if is_first is None else reads * is_first
    found, last = _state_before(added, maps, sequences, by_element=not beta)
    if reads is None:
        # A run of the recurrence without values gives what the positions read of `found`.
        out = out + _run([q, k, torch.zeros_like(v), g], rates, found, stretch).out
    else:
        out = out + reads @ found
    if not sequences.is_line:
        out = sequences.move("state", heads, heads, back=True)(out)
    return out, last


def _moved(rows: list[Tensor], sequences: _Sequences, scheme: str) -> list[Tensor]:
    """Exchange rows `[B, H or G, L, F]` to where a scheme needs them.

    Rows with the same number of entries travel together in one exchange.
    """
    found: dict[int, Tensor] = {}
    for count in dict.fromkeys(x.shape[1] for x in rows):
        places = [i for i, x in enumerate(rows) if x.shape[1] == count]
        move = sequences.move(scheme, rows[2].shape[1], count)
        parts = move(torch.cat([rows[i] for i in places], -1))
        widths = [rows[i].shape[-1] for i in places]
        found.update(zip(places, parts.split(widths, -1), strict=True))
    return [found[i] for i in range(len(rows))]


def _state_before(
    added: Tensor, maps: Tensor, sequences: _Sequences, *, by_element: bool
) -> tuple[Tensor, Tensor]:
    """(state before this rank's stretch, state after the stretch).

    The state before is zero if the first document of the stretch begins there.

    Args:
        added: `[B, H, K, V]`, the state after the stretch without a state of other ranks.
        maps: M of the stretch, see `StateScan`.
        sequences: sequences of the call.
        by_element: see `StateScan`.
    """
    first = sequences.line.positions(group_rank(sequences.group), added.device)[:1]
    documents, before = sequences.documents(first), sequences.documents(first - 1)
    goes_on = None
    if documents is not None and before is not None and len(first) and int(first) > 0:
        goes_on = (before == documents)[:, None, :, None]
        maps = maps * goes_on
    scan = StateScan(sequences.group, sequences.operation, by_element)
    found = scan(maps, added)
    last = added + scan.times(maps, found)
    return found if goes_on is None else found * goes_on, last


@outside_graphs
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    layout: str | Layout | None = None,
    cu_seqlens: Offsets | None = None,
) -> Tensor:
    """Depthwise causal convolution over the whole sequence.

    `y[d, t] = activation(bias[d] + sum_w weight[d, w] x[d, t - W + 1 + w])`, within the document of
    t. Ranks send the last W - 1 positions of their stretch. With a layout that is not contiguous,
    all positions are exchanged once before the convolution and once after it.

    Args:
        x: `[B, D, L]`, this rank's positions.
        weight: `[D, W]`.
        bias: `[D]` or None.
        activation: "silu" ("swish") or None.
        group: see `gated_delta_rule`.
        layout: see `gated_delta_rule`.
        cu_seqlens: see `gated_delta_rule`.

    Returns:
        `[B, D, L]` in the dtype of x.

    Raises:
        ValueError: see `gated_delta_rule`.
        RankFailureError: a rank died or did not answer; the message names it.
    """
    op = "causal_conv1d"
    require = requires(op)

    def check() -> tuple[int, dict[str, object]]:
        is_tensor = isinstance(x, Tensor) and x.dim() == 3
        require(is_tensor, "x", "of shape [B, D, L]", getattr(x, "shape", x))
        fits = weight.dim() == 2 and len(weight) == x.shape[1]
        require(fits, "weight", f"of shape [{x.shape[1]}, W]", tuple(weight.shape))
        if bias is not None:
            fits = bias.shape == (x.shape[1],)
            require(fits, "bias", f"of shape [{x.shape[1]}]", tuple(bias.shape))
        check_choice(op, "activation", activation, (None, "silu", "swish"))
        return x.shape[2], {
            "sizes": (*x.shape[:2], weight.shape[1]),
            "dtype": x.dtype,
            "activation": activation,
            "giving bias": bias is not None,
            "requiring a gradient": wants_grad(x, weight, bias),
        }

    sequences = _sequences(op, check, (x, weight, bias), (group, layout, cu_seqlens))
    line, width = sequences.line, weight.shape[1]
    moved = x
    if not sequences.is_line:
        moved = sequences.move("state", 1, 1)(x.mT.unsqueeze(1)).squeeze(1).mT
    halo = None
    if line.num_ranks > 1 and width > 1:
        halo = Halo(sequences.group, line.sizes, width - 1, op)(moved)
    own = sequences.own
    stretch = sequences.stretch(range(own.start - width + 1, own.stop), x, x.dtype)
    given = {"x": moved, "weight": weight, "bias": bias, "halo": halo}
    with without_autocast(x.device):
        out: Tensor = serve(op, local.causal_conv, given, stretch, silu=activation is not None)
    out = out.to(x.dtype)
    if not sequences.is_line:
        out = sequences.move("state", 1, 1, back=True)(out.mT.unsqueeze(1)).squeeze(1).mT
    return out
