"""Rings of rings: keys travel round the ranks of a row, and hop to the next row only rarely."""

from __future__ import annotations

from collections.abc import Sequence

from moe_ext.attention.layouts import Grid, grid_of_hosts
from moe_ext.attention.schemes.ring import Ring


class DoubleRing(Ring):
    """Ring over a grid of R rows with I ranks each.

    Of P - 1 hops, R - 1 are between rows, posted I stages ahead, and R (I - 1) inside rows.
    """

    name = "double_ring"

    def rows(self, hosts: Sequence[int], mesh: Grid | None) -> Grid:
        """The user's rows, or one row for each host."""
        found = grid_of_hosts(hosts) if mesh is None else mesh
        if found is None:
            counts = [hosts.count(host) for host in dict.fromkeys(hosts)]
            raise ValueError(
                "ring_attention: expected group to be a 2-D DeviceMesh, or of hosts with as many "
                f"ranks each, for scheme 'double_ring', got hosts of {counts} ranks"
            )
        return found

    def candidates(self, hosts: Sequence[int], mesh: Grid | None) -> list[Grid]:
        """The user's rows, or one row for each of several hosts with several ranks."""
        found = grid_of_hosts(hosts) if mesh is None else mesh
        return [] if found is None or (mesh is None and min(found.shape) == 1) else [found]
