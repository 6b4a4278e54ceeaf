"""Specifications of clusters: processors, their memory, and links by level."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from moe_ext._checks import check_fields
from moe_ext.comm.rates import CostTable


@dataclass(frozen=True)
class Level:
    """Links between the processors of one level, such as a node.

    Attributes:
        name: name in reports.
        size: largest number of processors that the level joins.
        latency: seconds per message.
        bandwidth: bytes per second that leave one processor.
    """

    name: str
    size: int
    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        """Raise ValueError for impossible numbers."""
        check_fields(self, may_be_zero=("latency",))


@dataclass(frozen=True)
class Host:
    """Host memory of each processor, in which the optimizer may keep its state.

    Attributes:
        memory: bytes per processor.
        bandwidth: bytes per second between a processor and its host, in one direction.
        rate: bytes per second that the host reads and writes for the optimizer of one processor.
        disk: bytes of disk per processor; 0 without a disk.
        disk_bandwidth: bytes per second of the disk, per processor.
    """

    memory: float
    bandwidth: float
    rate: float
    disk: float = 0.0
    disk_bandwidth: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for impossible numbers."""
        check_fields(self, may_be_zero=("disk", "disk_bandwidth"))
        if (self.disk > 0) != (self.disk_bandwidth > 0):
            raise ValueError(
                "Host: expected disk and disk_bandwidth to be above 0 or both 0, got "
                f"{self.disk} and {self.disk_bandwidth}"
            )


# Parts of a step whose time may be measured.
MEASURED = ("update", "all_reduce", "broadcast", "fsdp", "exchange", "sharing", "tensor")
_Spec = TypeVar("_Spec")


@dataclass(frozen=True)
class ClusterSpec:
    """Processors and their links.

    Attributes:
        levels: levels from the innermost, with ascending sizes.
        flops: peak operations per second of dense products, by dtype.
        memory: bytes of a processor.
        memory_bandwidth: bytes per second of the processor's memory.
        efficiency: share of the peak that products reach.
        score_efficiency: share of the peak that attention scores reach; None for `efficiency`.
        layer_seconds: seconds of kernel launches in a layer's forward pass.
        node_launches: relative slowdown of launches if tensor parallelism spans all ranks of a
            node, because each message waits for the slowest rank.
        multiprocessors: multiprocessors of a processor, each of which computes one tile of a
            product at a time; 0 if the rate of products does not depend on their shapes.
        source: source of the numbers.
        costs: measured rates of codecs, by the names of `python benchmarks/run.py codecs`: formats
            of rows ("rows int8"), "lossless bf16" for bfloat16 without loss, and codecs of
            gradients ("int8"). The time of a missing codec follows from its bytes and the memory's
            bandwidth.
        measured: measured times over those of the formulas, by part of a step; 1 for a missing
            part. "update": AdamW. "all_reduce": averaged gradients. "fsdp": gathers and scatters of
            FSDP2. "exchange": rows on their way to experts and back. "tensor": messages of tensor
            parallelism, and the overhead of DTensors. "broadcast": the weights that
            `ZeroRedundancyOptimizer` sends after an all-reduce, over an all-gather of them; a
            missing one counts as 0, because they are then the second half of the all-reduce.
            "sharing": a layer's pass while all ranks compute, over one while the others wait, since
            ranks may share cores.
        host: host of each processor; None if nothing may be kept there.
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
        """Raise ValueError for impossible numbers."""
        zero = ("layer_seconds", "node_launches", "multiprocessors", "measured")
        check_fields(self, may_be_zero=zero)
        if not isinstance(self.levels, tuple) or not all(
            isinstance(level, Level) for level in self.levels
        ):
            raise ValueError(
                f"ClusterSpec: expected levels to be a tuple of Level, got {self.levels!r}"
            )
        sizes = [level.size for level in self.levels]
        steps = itertools.pairwise(sizes)
        if not sizes or any(inner >= outer or outer % inner for inner, outer in steps):
            raise ValueError(
                "ClusterSpec: expected sizes of levels to ascend, each a multiple of the one "
                f"before, got {sizes}"
            )
        if not self.flops:
            raise ValueError("ClusterSpec: expected flops to have a rate, got none")
        for name in ("efficiency", "score_efficiency"):
            share = getattr(self, name)
            if share is not None and share > 1:
                raise ValueError(f"ClusterSpec: expected {name} to be in (0, 1], got {share}")
        if not set(self.measured) <= set(MEASURED):
            raise ValueError(
                f"ClusterSpec: expected measured to hold numbers of at least 0 of {MEASURED}, got "
                f"{dict(self.measured)}"
            )
        for name, kind in (("host", Host), ("costs", CostTable)):
            held = getattr(self, name)
            if held is not None and not isinstance(held, kind):
                raise ValueError(
                    f"ClusterSpec: expected {name} to be a {kind.__name__} or None, got "
                    f"{held!r:.80}"
                )

    @classmethod
    def of(cls, cluster: ClusterSpec | Mapping[str, Any] | str | Path) -> ClusterSpec:
        """Make a cluster of a spec, the name of a preset, a mapping, or a JSON or YAML file.

        Raises:
            ImportError: the file is YAML and PyYAML is not installed.
            ValueError: `cluster` is none of these, or lacks a field.
        """
        if isinstance(cluster, ClusterSpec):
            return cluster
        if not isinstance(cluster, Mapping):
            if str(cluster) in CLUSTERS:
                return CLUSTERS[str(cluster)]
            cluster = _read(Path(cluster))
        found = dict(cluster)
        levels = found.get("levels")
        if not isinstance(levels, (list, tuple)):
            raise ValueError(f"ClusterSpec: expected levels to be a list, got {levels!r:.80}")
        found["levels"] = tuple(_made(Level, level) for level in levels)
        if found.get("host") is not None:
            found["host"] = _made(Host, found["host"])
        costs = found.get("costs")
        if isinstance(costs, str):
            try:
                found["costs"] = CostTable.load(costs)
            except OSError as error:
                raise ValueError(
                    f"ClusterSpec: expected costs to be a table or a file, got {costs!r}: {error}"
                ) from error
        elif isinstance(costs, Mapping):
            found["costs"] = CostTable.of(costs)
        if found.get("measured") is None:
            found["measured"] = {}
        return _made(cls, found)

    def to_dict(self) -> dict[str, Any]:
        """Return a mapping that `of` takes."""
        return asdict(self)


def _made(cls: type[_Spec], found: Any) -> _Spec:
    """Make an object of a mapping's values."""
    if isinstance(found, cls):
        return found
    if not isinstance(found, Mapping):
        raise ValueError(f"{cls.__name__}: expected a mapping of its fields, got {found!r:.80}")
    known = {each.name: each for each in fields(cls)}  # type: ignore[arg-type]
    needed = {name for name, each in known.items() if each.default is each.default_factory}
    if not needed <= set(found) <= set(known):
        raise ValueError(
            f"{cls.__name__}: expected the fields {sorted(needed)}, and of others only "
            f"{sorted(set(known) - needed)}, got {sorted(map(str, found))}"
        )
    return cls(**{name: _numeric(value, str(known[name].type)) for name, value in found.items()})


def _numeric(value: Any, annotation: str) -> Any:
    """Convert text to a number if it is one and the field is a float: YAML reads 3e-6 as text."""
    if isinstance(value, Mapping) and "float" in annotation:
        return {name: _numeric(each, "float") for name, each in value.items()}
    if not isinstance(value, str) or not annotation.startswith("float"):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def _read(path: Path) -> Mapping[str, Any]:
    kind = "YAML" if path.suffix in (".yaml", ".yml") else "JSON"
    try:
        text = path.read_text()
        found = _from_yaml(text) if kind == "YAML" else json.loads(text)
    except OSError as error:
        raise ValueError(
            f"ClusterSpec: expected cluster to be one of {sorted(CLUSTERS)} or a file, got "
            f"{str(path)!r}: {error}"
        ) from error
    except ImportError as error:
        raise ImportError("ClusterSpec: expected PyYAML for YAML files; JSON needs none") from error
    except ValueError as error:
        raise ValueError(f"ClusterSpec: expected {path} to be {kind}, got {error}") from error
    if not isinstance(found, Mapping):
        raise ValueError(f"ClusterSpec: expected {path} to hold a mapping, got {type(found)}")
    return found


def _from_yaml(text: str) -> Any:
    import yaml  # type: ignore[import-untyped]

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


# Shares of the nominal rates of memory and links, and fields of the spec. They are round numbers,
# the same for all presets, with which predictions of published step times are best.
MEMORY_SHARE, LINK_SHARE = 0.8, 0.7
REACHED: Mapping[str, Any] = {
    "efficiency": 0.75,
    "score_efficiency": 0.2,
    "layer_seconds": 8e-4,
    "node_launches": 0.3,
}


def _preset(
    levels: tuple[Level, ...],
    *,
    flops: float,
    memory: float,
    rate: float,
    multiprocessors: int,
    source: str,
    host: Host | None = None,
) -> ClusterSpec:
    """Make a cluster of nominal rates."""
    return ClusterSpec(
        tuple(replace(level, bandwidth=LINK_SHARE * level.bandwidth) for level in levels),
        {"bfloat16": flops},
        memory,
        MEMORY_SHARE * rate,
        **REACHED,
        source=source,
        multiprocessors=multiprocessors,
        host=host,
    )


def _pod(node: int, link: float) -> tuple[Level, ...]:
    """Make levels of nodes with 400 Gbit/s Ethernet or InfiniBand per processor."""
    return Level("node", node, 3e-6, link), Level("network", node * 2**17, 10e-6, 50e9)


# Nominal hosts, an eighth of a DGX per processor: 2 TB of memory, PCIe x16 in one direction, and
# half of the memory channels' rate, because a step reads and writes. The channels are 2 x 8
# DDR4-3200 (EPYC 7742) and 2 x 8 DDR5-4800 (Xeon 8480C; DGX A100 and DGX H100 user guides).
_DGX_A100 = Host(2e12 / 8, 32e9, 2 * 204.8e9 / 2 / 8)
_DGX_H100 = Host(2e12 / 8, 64e9, 2 * 307.2e9 / 2 / 8)
# Nominal host, half of a Grace per processor: 480 GB of LPDDR5X at 512 GB/s, and NVLink-C2C of
# 900 GB/s in both directions together, which two GPUs share (NVIDIA GB200 NVL72 and Grace data
# sheets).
_GRACE = Host(480e9 / 2, 450e9 / 2, 512e9 / 2 / 2)

_A100: dict[str, Any] = {"flops": 312e12, "memory": 80e9, "rate": 2.039e12, "multiprocessors": 108}
_HOPPER: dict[str, Any] = {"flops": 989e12, "multiprocessors": 132, "host": _DGX_H100}

CLUSTERS = {
    "a100": _preset(
        (Level("node", 8, 3e-6, 300e9), Level("network", 2**20, 10e-6, 25e9)),
        **_A100,
        source="NVIDIA A100 80GB data sheet; DGX A100: eight 200 Gbit/s adapters; nominal host",
        host=_DGX_A100,
    ),
    "h100": _preset(
        _pod(8, 450e9),
        **_HOPPER,
        memory=80e9,
        rate=3.35e12,
        source="NVIDIA H100 SXM data sheet; DGX H100, nominal host",
    ),
    "h200": _preset(
        _pod(8, 450e9),
        **_HOPPER,
        memory=141e9,
        rate=4.8e12,
        source="NVIDIA H200 SXM data sheet; DGX H200, nominal host",
    ),
    "gb200": _preset(
        _pod(72, 900e9),
        flops=2.5e15,
        memory=186e9,
        rate=8e12,
        multiprocessors=148,
        source="NVIDIA GB200 NVL72 data sheet, nominal host",
        host=_GRACE,
    ),
    "ethernet": _preset(
        (Level("node", 8, 5e-6, 32e9), Level("ethernet", 2**20, 50e-6, 1.25e9 / 8)),
        **{**_A100, "rate": 1.935e12},
        source="NVIDIA A100 80GB PCIe data sheet, eight of which share one adapter of 10 Gbit/s "
        "(IEEE 802.3ae)",
    ),
}
"""Clusters by name. Bandwidths are per processor, in one direction, and shares of nominal ones.
Latencies are round numbers for the kind of link. Measured numbers should replace both."""
