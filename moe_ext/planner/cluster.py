"""Specifications of clusters: processors, their memory, and links by level."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moe_ext.distributed.cost_table import CostTable


@dataclass(frozen=True)
class Level:
    """Links between the processors of one level, such as a node.

    Attributes:
        name: in reports.
        size: processors that it joins, at most.
        latency: seconds of a message.
        bandwidth: bytes a second that leave one processor.
    """

    name: str
    size: int
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Host:
    """Memory beside each processor, in which the optimizer may keep its state.

    Attributes:
        memory: bytes for each processor.
        bandwidth: bytes a second between a processor and its host, in one direction.
        rate: bytes a second that the host reads and writes for the optimizer of one processor.
        disk: bytes of files for each processor; 0 without a disk.
        disk_bandwidth: bytes a second of these files for each processor.
    """

    memory: float
    bandwidth: float
    rate: float
    disk: float = 0.0
    disk_bandwidth: float = 0.0

    def __post_init__(self) -> None:
        """ValueError for numbers that no host has."""
        for name in ("memory", "bandwidth", "rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Host: expected {name} to be above 0, got {getattr(self, name)}")
        if not self.disk >= 0 or (self.disk > 0) != (self.disk_bandwidth > 0):
            raise ValueError(
                "Host: expected disk and disk_bandwidth to be above 0 or both 0, got "
                f"{self.disk} and {self.disk_bandwidth}"
            )


# Parts of a step whose time may be measured.
MEASURED = ("update", "all_reduce", "broadcast", "fsdp", "exchange", "sharing")
_NUMBERS = (
    *("memory", "memory_bandwidth", "efficiency", "score_efficiency", "layer_seconds"),
    "node_launches",
)


@dataclass(frozen=True)
class ClusterSpec:
    """Processors and their links.

    Attributes:
        levels: from the innermost, sizes ascending.
        flops: peak operations a second of dense products, by dtype.
        memory: bytes of a processor.
        memory_bandwidth: bytes a second of its memory.
        efficiency: share of the peak that products reach.
        score_efficiency: share of it that the scores of attention reach; None for the same.
        layer_seconds: seconds of a layer's forward pass that launches of kernels take.
        node_launches: share by which launches take longer where tensor parallelism has all ranks of
            a node, which wait for the slowest of them at each message.
        multiprocessors: of a processor, each of which works on a tile of a product at a time; 0
            where the rate of products does not depend on their shapes.
        source: of the numbers.
        costs: measured rates of codecs, by the names of `python benchmarks/run.py codecs`: formats
            of rows ("rows int8"), "lossless bf16" for what keeps every bit of bfloat16, and codecs
            of gradients ("int8"). One that it lacks takes what its bytes take through the memory.
        measured: times over those of the formulas, by part of a step; 1 for a part that is left
            out. "update": AdamW. "all_reduce": means of gradients. "fsdp": gathers and scatters of
            FSDP2. "exchange": rows on their way to experts and back. "broadcast": the weights that
            `ZeroRedundancyOptimizer` sends behind an all-reduce, over an all-gather of them; 0 for
            left out, where they are the second half of the all-reduce. "sharing": a layer's pass
            while all ranks compute, over one while the others wait: ranks that share cores make
            room for a busy one.
        host: of each processor; None where nothing may be kept there.
    """

    levels: tuple[Level, ...]
    flops: Mapping[str, float]
    memory: float
    memory_bandwidth: float
    efficiency: float = 0.5
    score_efficiency: float | None = None
    layer_seconds: float = 0.0
    source: str = ""
    costs: CostTable | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    node_launches: float = 0.0
    multiprocessors: int = 0
    host: Host | None = None

    def __post_init__(self) -> None:
        """ValueError for numbers that no cluster has."""
        sizes = [level.size for level in self.levels]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError(f"ClusterSpec: expected sizes of levels to ascend, got {sizes}")
        rates = [self.memory, self.memory_bandwidth, *self.flops.values()]
        if not self.flops or not all(rate > 0 for rate in rates):
            raise ValueError("ClusterSpec: expected flops and memory to be above 0")
        if not all(level.bandwidth > 0 and level.latency >= 0 for level in self.levels):
            raise ValueError("ClusterSpec: expected bandwidths above 0 and latencies of at least 0")
        for name in ("efficiency", "score_efficiency"):
            share = getattr(self, name)
            if share is not None and not 0 < share <= 1:
                raise ValueError(f"ClusterSpec: expected {name} to be in (0, 1], got {share}")
        if not set(self.measured) <= set(MEASURED) or not all(
            factor >= 0 and math.isfinite(factor) for factor in self.measured.values()
        ):
            raise ValueError(
                f"ClusterSpec: expected measured to hold numbers of at least 0 of {MEASURED}, got "
                f"{dict(self.measured)}"
            )
        for name in ("layer_seconds", "node_launches", "multiprocessors"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"ClusterSpec: expected {name} to be at least 0, got {getattr(self, name)}"
                )

    @classmethod
    def of(cls, cluster: ClusterSpec | Mapping[str, Any] | str | Path) -> ClusterSpec:
        """A cluster by a spec, the name of a preset, a mapping, or a JSON or YAML file.

        Raises:
            ImportError: the file is YAML and PyYAML is not installed.
            ValueError: it is none of these, or lacks a field.
        """
        if isinstance(cluster, ClusterSpec):
            return cluster
        if not isinstance(cluster, Mapping):
            if str(cluster) in CLUSTERS:
                return CLUSTERS[str(cluster)]
            cluster = _read(Path(cluster))
        try:
            # YAML reads 3e-6 as text.
            levels = tuple(
                Level(
                    level["name"],
                    int(level["size"]),
                    float(level["latency"]),
                    float(level["bandwidth"]),
                )
                for level in cluster["levels"]
            )
            numbers = {
                name: float(value)
                for name, value in cluster.items()
                if name in _NUMBERS and value is not None
            }
            flops = {name: float(rate) for name, rate in cluster["flops"].items()}
            costs = cluster.get("costs")
            if isinstance(costs, str):
                costs = CostTable.load(costs)
            elif isinstance(costs, Mapping):
                costs = CostTable.of(costs)
            found: dict[str, Any] = {"flops": flops, "levels": levels, "costs": costs}
            factors = cluster.get("measured") or {}
            found["measured"] = {name: float(factor) for name, factor in factors.items()}
            host = cluster.get("host")
            if isinstance(host, Mapping):
                host = Host(**{name: float(value) for name, value in host.items()})
            found["host"] = host
            return cls(**{**cluster, **numbers, **found})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"ClusterSpec: expected the fields levels, flops, memory and memory_bandwidth: "
                f"{error}"
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """The mapping that `of` takes."""
        return asdict(self)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text()
    except OSError as error:
        raise ValueError(
            f"ClusterSpec: expected cluster to be one of {sorted(CLUSTERS)} or a file, got "
            f"{str(path)!r}: {error}"
        ) from error
    try:
        if path.suffix in (".yaml", ".yml"):
            import yaml  # type: ignore[import-untyped]

            found = yaml.safe_load(text)
        else:
            found = json.loads(text)
    except ImportError as error:
        raise ImportError("ClusterSpec: expected PyYAML for YAML files; JSON needs none") from error
    except ValueError as error:
        raise ValueError(f"ClusterSpec: expected {path} to be JSON, got {error}") from error
    if not isinstance(found, Mapping):
        raise ValueError(f"ClusterSpec: expected {path} to hold a mapping, got {type(found)}")
    return found


def _pod(
    node: int, link: float, flops: float, memory: float, rate: float, source: str, host: Host
) -> ClusterSpec:
    """Processors whose nodes have 400 Gbit/s Ethernet or InfiniBand for each of them."""
    levels = (Level("node", node, 3e-6, link), Level("network", 2**20, 10e-6, 50e9))
    return ClusterSpec(levels, {"bfloat16": flops}, memory, rate, source=source, host=host)


# Nominal, an eighth of a DGX each: 2 TB, PCIe x16 in one direction, and half of the memory
# channels' rate for a step that reads and writes: of EPYC 7742 2 x 8 DDR4-3200, of Xeon 8480C
# 2 x 8 DDR5-4800 (DGX A100 and DGX H100 user guides).
_DGX_A100 = Host(2e12 / 8, 32e9, 2 * 204.8e9 / 2 / 8)
_DGX_H100 = Host(2e12 / 8, 64e9, 2 * 307.2e9 / 2 / 8)
# Nominal, half of a Grace each: 480 GB of LPDDR5X at 512 GB/s, and NVLink-C2C of 900 GB/s in both
# directions, which two GPUs share (NVIDIA GB200 NVL72 and Grace data sheets).
_GRACE = Host(480e9 / 2, 450e9 / 2, 512e9 / 2 / 2)

CLUSTERS = {
    "a100": ClusterSpec(
        (Level("node", 8, 3e-6, 300e9), Level("network", 2**20, 10e-6, 25e9)),
        {"bfloat16": 312e12},
        80e9,
        2.039e12,
        source="NVIDIA A100 80GB data sheet; DGX A100: eight 200 Gbit/s adapters; nominal host",
        host=_DGX_A100,
    ),
    "h100": _pod(
        *(8, 450e9, 989e12, 80e9, 3.35e12),
        *("NVIDIA H100 SXM data sheet; DGX H100, nominal host", _DGX_H100),
    ),
    "h200": _pod(
        *(8, 450e9, 989e12, 141e9, 4.8e12),
        *("NVIDIA H200 SXM data sheet; DGX H200, nominal host", _DGX_H100),
    ),
    "gb200": _pod(
        *(72, 900e9, 2.5e15, 186e9, 8e12), *("NVIDIA GB200 NVL72 data sheet, nominal host", _GRACE)
    ),
    "ethernet": ClusterSpec(
        (Level("node", 8, 5e-6, 12e9), Level("ethernet", 2**20, 50e-6, 1.25e9 / 8)),
        {"bfloat16": 312e12},
        80e9,
        2.039e12,
        source="eight A100 80GB PCIe behind one adapter of 10 Gbit/s (IEEE 802.3ae)",
    ),
}
"""Clusters by name. Bandwidths are nominal, in one direction, for each processor; latencies are
round numbers of their class, to be replaced by measured ones."""
