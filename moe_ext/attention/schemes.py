"""The schemes by name, and which of them a call gets.

Shapes: H heads, Hkv heads of keys and values, P ranks of the group.
"""

from __future__ import annotations

from dataclasses import replace

from torch.distributed import ProcessGroup

from moe_ext.attention.choice import SchemeChoice, choose, hosts_of
from moe_ext.attention.costs import Workload
from moe_ext.attention.double_ring import DoubleRing
from moe_ext.attention.exchange import KeysForm
from moe_ext.attention.gathered import AllGather
from moe_ext.attention.grid import Grid, grid_of_hosts
from moe_ext.attention.plan import Plan, Scheme
from moe_ext.attention.ring import Ring
from moe_ext.attention.ulysses import Hybrid, heads_refused
from moe_ext.distributed.failures import known_hosts
from moe_ext.distributed.groups import group_ranks, group_size

SCHEMES: dict[str, Scheme] = {
    "ring": Ring(),
    "double_ring": DoubleRing(),
    "all_gather": AllGather(),
    "ulysses": Hybrid(),
    "hybrid": Hybrid(),
}
SCHEME_NAMES = (*SCHEMES, "auto")


def check_scheme(
    scheme: str,
    heads: int,
    kv_heads: int,
    group: ProcessGroup | None,
    grid: Grid | None,
    operation: str,
) -> None:
    """ValueError, before any communication, for a scheme that goes with no such group or heads."""
    if scheme == "hybrid" and grid is None and group_size(group) > 1:
        raise ValueError(
            f"{operation}: expected group to be a 2-D DeviceMesh ('ring', 'ulysses') for scheme "
            f"'hybrid', got a group of {group_size(group)} ranks"
        )
    if scheme not in ("ulysses", "hybrid"):
        return
    ranks = grid.shape[1] if scheme == "hybrid" and grid is not None else group_size(group)
    refused = heads_refused(heads, kv_heads, ranks)
    if refused is not None:
        raise ValueError(f"{operation}: expected {refused}")


def _hosts_of_group(plan: Plan) -> tuple[int, ...]:
    """For each rank the number of its host, as far as an earlier exchange told; see `hosts_of`."""
    known = None if plan.group is None else known_hosts(group_ranks(plan.group))
    return hosts_of(plan.layout.num_ranks, known, plan.grid)


def _grid_of_scheme(scheme: str, plan: Plan, operation: str) -> Grid | None:
    """The rows that a scheme named by the user works with; the same on every rank.

    Raises:
        ValueError: on every rank, for a double ring over a group whose hosts are no rows.
    """
    if scheme == "hybrid":
        return plan.grid
    if scheme != "double_ring":
        return None
    if plan.grid is not None:
        return plan.grid
    hosts = _hosts_of_group(plan)
    found = grid_of_hosts(hosts)
    if found is None:
        counts = [hosts.count(host) for host in dict.fromkeys(hosts)]
        raise ValueError(
            f"{operation}: expected group to be a 2-D DeviceMesh, or of hosts with as many ranks "
            f"each, for scheme 'double_ring', got hosts of {counts} ranks"
        )
    return found


def explain(plan: Plan, heads: int, form: KeysForm) -> SchemeChoice:
    """What "auto" takes for a call, and why; `plan.grid` is that of the mesh."""
    options = plan.options
    hosts = _hosts_of_group(plan)
    return choose(
        Workload(form.batch, heads, form, plan.grad_dtype, plan.layout, options.mask, hosts),
        plan.grid,
    )


def settle(
    scheme: str, plan: Plan, heads: int, form: KeysForm, operation: str
) -> tuple[Scheme, Plan]:
    """The scheme of a call, and its plan with the rows that the scheme works with."""
    if scheme == "auto":
        choice = explain(plan, heads, form)
        return SCHEMES[choice.scheme], replace(plan, grid=choice.grid)
    return SCHEMES[scheme], replace(plan, grid=_grid_of_scheme(scheme, plan, operation))
