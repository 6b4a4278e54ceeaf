"""Stand-ins for libraries of GPUs: their signatures, and what they do, over c10d on CPUs.

`nccl.ep` is that of nccl-extensions 0.1.0, `deep_ep` that of DeepEP 2.1.0: what is called of them
is here, with all arguments. Rows of `nccl.ep` arrive in an order that nobody promised.
"""

import contextlib
import enum
import importlib.metadata
import sys
import types
from dataclasses import dataclass, field
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch.distributed.distributed_c10d import _resolve_process_group

from moe_ext.dispatch import gpu_libraries, nccl_ep

VERSIONS = {"nccl-extensions": "0.1.0", "deep_ep": "2.1.0+dd758ca"}


class Way:
    """Which rows of which rank a rank gets, and the exchanges that follow from it."""

    def __init__(self, group, idx, num_experts, *, backwards):
        self.group, self.rank, self.num_rows = group, dist.get_rank(group), idx.shape[0]
        local = num_experts // dist.get_world_size(group)
        own = range(self.rank * local, (self.rank + 1) * local)
        self.idx = idx.clone()
        here = [
            (source, row, [own.index(e) if e in own else -1 for e in chosen])
            for source, rows in enumerate(self.gather(idx.tolist()))
            for row, chosen in enumerate(rows)
            if any(e in own for e in chosen)
        ]
        self.arrived = here[::-1] if backwards else here

    def gather(self, value):
        found = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, value, group=self.group)
        return found

    def out(self, rows):
        from_all = self.gather(rows)
        found = [from_all[source][row] for source, row, _ in self.arrived]
        return torch.stack(found) if found else rows.new_empty(0, rows.shape[1])

    def chosen(self):
        found = [chosen for *_, chosen in self.arrived]
        return torch.tensor(found, dtype=torch.int64).view(-1, self.idx.shape[1])

    def back(self, rows, weights=None):
        """Sums in float32 over the ranks; garbage for a row without an expert."""
        mine = [(source, row) for source, row, _ in self.arrived]
        wide = rows if weights is None else weights
        total = torch.zeros(self.num_rows, wide.shape[1])
        for places, values in self.gather((mine, wide.float())):
            for (source, row), value in zip(places, values, strict=True):
                if source == self.rank:
                    total[row] += value
        total[(self.idx < 0).all(1)] = torch.nan
        return total.to(wide.dtype)


# nccl.ep of nccl-extensions 0.1.0.


class Algorithm(enum.IntEnum):
    LOW_LATENCY = 0
    HIGH_THROUGHPUT = 1


class Layout(enum.IntEnum):
    UNSET = 0
    EXPERT_MAJOR = 1
    RANK_MAJOR = 2
    FLAT = 3


class PassDir(enum.IntEnum):
    FWD = 0
    BWD = 1


class ExpertIdKind(enum.IntEnum):
    AUTO = 0
    LOCAL = 1
    GLOBAL = 2


class Tensor:
    def __init__(self, buffer, *, dtype=None, shape=None, window=None, window_offset=None):
        assert buffer.is_contiguous()
        self.buffer = buffer


@dataclass(kw_only=True)
class GroupConfig:
    algorithm: Algorithm = Algorithm.LOW_LATENCY
    num_experts: int = 0
    max_dispatch_tokens_per_rank: int = 0
    max_recv_tokens_per_rank: int = 0
    max_token_bytes: int = 0
    rdma_buffer_size: int = 0
    num_qp_per_rank: int = 0
    num_channels: int = 0
    max_num_sms: int = 0
    alloc: object = field(default_factory=object)
    enable_mask: bool = False
    timeout_ns: int = 0
    zero_copy: int = 0
    overflow_policy: int = 0
    num_topk: int = 0


@dataclass(kw_only=True)
class HandleConfig:
    dispatch_output_per_expert_alignment: int = 0


@dataclass(kw_only=True)
class LayoutInfo:
    expert_counters: Tensor | None = None
    src_rank_counters: Tensor | None = None
    expert_offsets: Tensor | None = None
    recv_total_counter: Tensor | None = None
    recv_topk_idx_kind: ExpertIdKind = ExpertIdKind.AUTO


@dataclass(kw_only=True)
class DispatchConfig:
    send_only: int = 0
    round_scales: int = 0
    pass_direction: PassDir = PassDir.FWD
    quantization_recipe: int = 0


@dataclass(kw_only=True)
class CombineConfig:
    send_only: int = 0
    pass_direction: PassDir = PassDir.FWD
    quantization_recipe: int = 0


@dataclass(kw_only=True)
class DispatchInputs:
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None


@dataclass(kw_only=True)
class DispatchOutputs:
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None
    topk_idx: Tensor | None = None


@dataclass(kw_only=True)
class CombineInputs:
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None


@dataclass(kw_only=True)
class CombineOutputs:
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None


class Handle:
    open = 0

    def __init__(self, ptr):
        self.way, self.config = ptr
        Handle.open += 1

    def dispatch(self, inputs, outputs, *, layout_info=None, config=None, stream):
        assert layout_info is None
        tokens = inputs.tokens.buffer
        assert tokens.shape[1] * tokens.element_size() <= self.config.max_token_bytes
        self.shape = outputs.tokens.buffer.shape
        outputs.tokens.buffer.copy_(self.way.out(tokens))
        if config.pass_direction == PassDir.BWD:
            assert inputs.topk_weights is outputs.topk_weights is outputs.topk_idx is None
            return
        outputs.topk_weights.buffer.copy_(self.way.out(inputs.topk_weights.buffer))
        idx = self.way.chosen()
        assert outputs.topk_idx.buffer.shape == idx.shape
        outputs.topk_idx.buffer.copy_(idx)

    def combine(self, inputs, outputs, *, config=None, stream):
        assert inputs.tokens.buffer.shape == self.shape
        assert outputs.tokens.buffer.shape == (self.way.num_rows, self.shape[1])
        outputs.tokens.buffer.copy_(self.way.back(inputs.tokens.buffer))
        if config.pass_direction == PassDir.FWD:
            assert inputs.topk_weights is outputs.topk_weights is None
            return
        weights = self.way.back(inputs.tokens.buffer, inputs.topk_weights.buffer)
        outputs.topk_weights.buffer.copy_(weights)

    def destroy(self):
        Handle.open -= 1


class Group:
    made = 0

    def __init__(self, ptr):
        self.communicator, self.config = ptr

    @classmethod
    def create(cls, comm, config):
        assert config.algorithm == Algorithm.HIGH_THROUGHPUT
        assert config.max_token_bytes % 16 == 0
        Group.made += 1
        return cls((comm, config))

    def create_handle(self, layout, topk_idx, *, layout_info=None, config=None, stream):
        assert layout == Layout.FLAT and layout_info.recv_topk_idx_kind == ExpertIdKind.LOCAL
        assert topk_idx.buffer.shape[0] <= self.config.max_dispatch_tokens_per_rank
        group, num_experts = self.communicator, self.config.num_experts
        way = Way(group, topk_idx.buffer, num_experts, backwards=True)
        layout_info.recv_total_counter.buffer.fill_(len(way.arrived))
        return Handle((way, self.config))

    def destroy(self):
        pass


def get_nccl_comm_from_group(group=None):
    return group


# deep_ep of DeepEP 2.1.0.


class EPHandle:
    def __init__(self, way, num_sms):
        self.way, self.num_sms, self.topk_idx = way, num_sms, way.idx


class ElasticBuffer:
    made = 0

    def __init__(
        self,
        group,
        num_bytes=None,
        num_cpu_bytes=0,
        num_max_tokens_per_rank=0,
        hidden=0,
        num_topk=0,
        use_fp8_dispatch=False,
        deterministic=False,
        allow_hybrid_mode=True,
        allow_multiple_reduction=True,
        prefer_overlap_with_compute=True,
        sl_idx=3,
        num_allocated_qps=0,
        num_cpu_timeout_secs=300,
        num_gpu_timeout_secs=100,
        explicitly_destroy=False,
    ):
        assert deterministic
        self.group, self.num_max_tokens_per_rank = group, num_max_tokens_per_rank
        self.hidden, self.num_topk = hidden, num_topk
        ElasticBuffer.made += 1

    def dispatch(
        self,
        x,
        topk_idx=None,
        topk_weights=None,
        cumulative_local_expert_recv_stats=None,
        num_experts=None,
        num_max_tokens_per_rank=None,
        expert_alignment=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
        handle=None,
        do_handle_copy=True,
        do_cpu_sync=None,
        do_expand=False,
        do_zero_padding=False,
        use_tma_aligned_col_major_sf=False,
    ):
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] <= self.hidden
        assert x.shape[0] <= self.num_max_tokens_per_rank
        # The number of processors is found by it before the handle is read.
        assert num_experts is not None
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            return handle.way.out(x), None, None, handle, object()
        assert topk_idx.shape[1] == self.num_topk
        way = Way(self.group, topk_idx, num_experts, backwards=False)
        made = EPHandle(way, num_sms or 8)
        return way.out(x), way.chosen(), way.out(topk_weights), made, object()

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
    ):
        assert x.dtype == torch.bfloat16 and x.is_contiguous()
        assert x.shape[0] == len(handle.way.arrived)
        weights = None if topk_weights is None else handle.way.back(x, topk_weights)
        return handle.way.back(x), weights, object()


# torch's symmetric memory; the operator's schema is torch's own.


def all_to_all_vdev(x, out, in_splits, out_splits_offsets, group_name):
    group = _resolve_process_group(group_name)
    splits = torch.empty_like(in_splits)
    dist.all_to_all_single(splits, in_splits, group=group)
    out_splits_offsets[0] = splits
    out_splits_offsets[1] = splits.cumsum(0) - splits
    # The kernel cuts what comes from a rank into parts of one size.
    assert x.numel() >= 8 * 2**20 and x.stride(0) % 64 == 0
    send, receive = in_splits.tolist(), splits.tolist()
    found = out.new_empty(sum(receive), out.shape[1])
    dist.all_to_all_single(found, x[: sum(send)].contiguous(), receive, send, group=group)
    out[: sum(receive)] = found


def empty(*size, dtype=None, device=None):
    return torch.full(size, 77, dtype=dtype, device=device)


def rendezvous(tensor, group):
    return None


_registered = []


def module(name, **members):
    found = types.ModuleType(name)
    vars(found).update(members)
    return found


def modules():
    here = dict(globals())
    names = {name.split(".")[0] for name in nccl_ep.LIBRARY.signatures}
    names |= {"Algorithm", "Layout", "PassDir", "ExpertIdKind"}
    ep = module("nccl.ep", **{name: here[name] for name in names})
    return {
        "nccl": module("nccl", ep=ep),
        "nccl.ep": ep,
        "nccl.ep.interop": module("nccl.ep.interop"),
        "nccl.ep.interop.torch": module(
            "nccl.ep.interop.torch", get_nccl_comm_from_group=get_nccl_comm_from_group
        ),
        "deep_ep": module("deep_ep", ElasticBuffer=ElasticBuffer, topk_idx_t=torch.int64),
    }


@contextlib.contextmanager
def installed(**versions):
    """The libraries as if they were installed, with the CPU for a GPU."""
    if not _registered:
        made = torch.library.Library("symm_mem", "IMPL", "CPU")
        made.impl("all_to_all_vdev", all_to_all_vdev)
        _registered.append(made)
    found = {**VERSIONS, **{name.replace("_ext", "-ext"): v for name, v in versions.items()}}
    real = importlib.metadata.version

    def version(name):
        if name in found and found[name] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name] if name in found else real(name)

    with contextlib.ExitStack() as stack:
        put = stack.enter_context
        put(mock.patch.dict(sys.modules, modules()))
        put(mock.patch.object(gpu_libraries, "DEVICE", "cpu"))
        put(mock.patch.object(importlib.metadata, "version", version))
        put(mock.patch.object(symmetric_memory, "is_nvshmem_available", lambda: True))
        put(mock.patch.object(symmetric_memory, "set_backend", lambda name: None))
        put(mock.patch.object(symmetric_memory, "empty", empty))
        put(mock.patch.object(symmetric_memory, "rendezvous", rendezvous))
        yield
