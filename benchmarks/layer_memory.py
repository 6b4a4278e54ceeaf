"""Bytes that a layer keeps for its backward pass, and how far its resident memory rises."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass

import torch
from _harness import rise_of_memory
from layer_peers import make, train
from shapes import Case, LayerShape, Routing, tokens
from torch import Tensor, nn

TIMES = 3


@dataclass(frozen=True)
class Memory:
    """Memory that one contender needed."""

    saved_bytes: int
    peak_bytes: int


def saved_bytes(layer: nn.Module, x: Tensor) -> int:
    """Bytes of the distinct storages that autograd keeps, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    # The tensors are held, so that no address is used twice.
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(x.detach().requires_grad_())
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    del output
    return sum(size for pointer, size in storages.items() if pointer not in parameters)


def peak_bytes(layer: nn.Module, x: Tensor) -> int:
    """Rise of the resident memory over one forward and backward pass."""
    grad = torch.ones_like(x)
    train(layer, x, grad)
    layer.zero_grad(set_to_none=True)
    return rise_of_memory(lambda: train(layer, x, grad))


def measure(case: Case, names: list[str]) -> dict[str, Memory]:
    """Runs each contender in a process of its own."""
    arguments = {
        "shape": asdict(case.shape),
        "num_tokens": case.num_tokens,
        "dtype": str(case.dtype).removeprefix("torch."),
        "routing": asdict(case.routing),
        "names": names,
    }
    # Large tensors go back to the system at once, so that the high-water mark is their own.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    environment |= {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, __file__, json.dumps(arguments)]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    lines = [line for line in result.stdout.splitlines() if line.startswith(b"{")]
    found = [Memory(**json.loads(line)) for line in lines]
    times = len(found) // len(names)
    # The median of the peaks: where huge pages begin differs from run to run, by up to 2 MB.
    peaks = [sorted(found[i * times : (i + 1) * times], key=_peak) for i in range(len(names))]
    return {name: runs[times // 2] for name, runs in zip(names, peaks, strict=True)}


def _peak(memory: Memory) -> int:
    return memory.peak_bytes


def measure_here(case: Case, name: str) -> Memory:
    """Measures one contender in this process."""
    layer, x = make(case, [name])[name], tokens(case)
    return Memory(saved_bytes(layer, x), peak_bytes(layer, x))


def main() -> None:
    """The child: forks `TIMES` for each contender, which prints what it found.

    A fork of a process that has imported torch and started no thread yet is as good as a fresh
    process, and starts at once.
    """
    arguments = json.loads(sys.argv[1])
    case = Case(
        LayerShape(**arguments["shape"]),
        arguments["num_tokens"],
        getattr(torch, arguments["dtype"]),
        Routing(**arguments["routing"]),
    )
    for name in (name for name in arguments["names"] for _ in range(TIMES)):
        pid = os.fork()
        if pid == 0:
            print(json.dumps(asdict(measure_here(case, name))), flush=True)
            os._exit(0)
        if os.waitpid(pid, 0)[1] != 0:
            sys.exit(f"layer_memory: {name} failed")


if __name__ == "__main__":
    main()
