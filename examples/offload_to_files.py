"""Training with weights and optimizer state in files: memory holds one layer at a time.

    python examples/offload_to_files.py --folder runs/files

As in ZeRO-Infinity, the weights and moments of a layer are mapped from files only while the layer
computes. A step writes a second set of files and ends by renaming one: after a kill at any moment
the next run goes on from the last whole step.

Output: the loss of each step, on two batches in turn. The last line has the number of steps that
the folder holds.
"""

import argparse
import mmap
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from moe_ext.ops import adam_step_


def mapped(path: Path, numel: int) -> Tensor:
    """A file of float32 as a tensor; the memory is given back with the last view of it."""
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 4 * numel), dtype=torch.float32)


class FileAdamW:
    """Weights, first and second moments of layers in a folder, and AdamW's steps on them.

    Each tensor has two files. A step reads those of one parity and writes the others, so that the
    weights which gradients came from stay whole until `commit`.
    """

    def __init__(self, folder: Path, shapes: list[tuple[int, ...]], **options: float) -> None:
        self.folder, self.shapes, self.options = folder, shapes, options
        folder.mkdir(parents=True, exist_ok=True)
        self.step = int((folder / "step").read_text()) if (folder / "step").exists() else -1
        if self.step < 0:
            for layer, shape in enumerate(shapes):
                for name in ("weight", "exp_avg", "exp_avg_sq"):
                    for parity in (0, 1):
                        with self._path(layer, name, parity).open("wb") as file:
                            file.truncate(4 * torch.Size(shape).numel())
                self._tensor(layer, "weight", 0).copy_(initial(layer, shape))
            self.commit()
        held = sorted(path.stat().st_size for path in folder.glob("*.weight.0"))
        if held != sorted(4 * torch.Size(shape).numel() for shape in shapes):
            raise ValueError(
                f"expected the layers of {folder}, files of {held} bytes, got {shapes}"
            )

    def _path(self, layer: int, name: str, parity: int) -> Path:
        return self.folder / f"{layer}.{name}.{parity}"

    def _tensor(self, layer: int, name: str, parity: int) -> Tensor:
        shape = self.shapes[layer]
        return mapped(self._path(layer, name, parity % 2), torch.Size(shape).numel()).view(shape)

    def weight(self, layer: int) -> Tensor:
        """The weight after the last whole step, to be read."""
        return self._tensor(layer, "weight", self.step)

    def update(self, layer: int, grad: Tensor) -> None:
        """Write a layer's next weight and moments."""
        names = ("weight", "exp_avg", "exp_avg_sq")
        for name in names:
            old = self._tensor(layer, name, self.step)
            self._tensor(layer, name, self.step + 1).copy_(old)
        weight, *moments = (self._tensor(layer, name, self.step + 1) for name in names)
        adam_step_(weight, grad, *moments, step=self.step + 1, **self.options)

    def commit(self) -> None:
        """Make the updates of all layers the state, by one rename, which is atomic."""
        (self.folder / "next_step").write_text(str(self.step + 1))
        os.replace(self.folder / "next_step", self.folder / "step")
        self.step += 1


def initial(layer: int, shape: tuple[int, ...]) -> Tensor:
    """First weights of a layer."""
    generator = torch.Generator().manual_seed(layer)
    return torch.randn(shape, generator=generator) / shape[-1] ** 0.5


def batch(step: int, dim: int) -> tuple[Tensor, Tensor]:
    """Rows and targets of a step: two batches in turn, which a few steps can learn."""
    generator = torch.Generator().manual_seed(step % 2)
    x = torch.randn(4, dim, generator=generator)
    return x, x.roll(1, dims=-1).tanh()


def train_step(state: FileAdamW, after_update=lambda layer: None) -> float:
    """Take a step; each layer is updated as soon as the backward pass has its gradient.

    Memory holds the inputs of all layers, and the weight, gradient and six files of one layer.
    """
    x, target = batch(state.step, state.shapes[0][1])
    inputs = [x]
    for layer in range(len(state.shapes)):
        inputs.append((inputs[-1] @ state.weight(layer).T).tanh())
    error = inputs[-1] - target
    grad = 2 * error / error.numel()
    for layer in reversed(range(len(state.shapes))):
        grad = grad * (1 - inputs.pop().square())
        before = grad @ state.weight(layer)
        state.update(layer, grad.T @ inputs[-1])
        grad = before
        after_update(layer)
    state.commit()
    return float(error.square().mean())


def main(argv: list[str] | None = None) -> int:
    """Train up to a number of steps, from wherever the folder is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the files")
    parser.add_argument("--layers", type=int, default=8, help="of the chain (%(default)s)")
    parser.add_argument("--dim", type=int, default=1024, help="of a layer (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="in all (%(default)s)")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate (%(default)s)")
    args = parser.parse_args(argv)
    for name in ("layers", "dim", "lr"):
        if not getattr(args, name) > 0:
            parser.error(f"expected --{name} to be positive, got {getattr(args, name)}")
    try:
        state = FileAdamW(args.folder, [(args.dim, args.dim)] * args.layers, lr=args.lr)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    while state.step < args.steps:
        print(f"step {state.step}: loss {train_step(state):.5f}", flush=True)
    print(f"result: {args.folder} holds {state.step} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
