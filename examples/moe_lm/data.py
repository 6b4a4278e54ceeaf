"""Text files as bytes: which files, which part is held out, and which bytes make batch n.

Shape suffixes: B sequences in a batch, S bytes in a sequence, N bytes in a split, F files of it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import stat
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCAB_SIZE = 256
HELD_OUT_SHARE = 0.05
BINARY_CHECK_BYTES = 8192
# Tests of the standard library hold data in odd encodings; site-packages differs by machine.
SKIPPED_STDLIB_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


class DataError(Exception):
    """`--data` cannot be used; the message says what was expected."""


@dataclass(frozen=True)
class TextData:
    """Bytes to train on and bytes held out, with where they come from.

    `train_offsets` [F + 1] says where in `train_N` each file begins, and the last one ends.
    """

    train_N: Tensor
    train_offsets: Tensor
    validation_N: Tensor
    source: str
    num_files: int
    num_skipped: int
    sha256: str

    def describe(self) -> str:
        """Return one line for the log."""
        skipped = f", {self.num_skipped} binary files skipped" if self.num_skipped else ""
        return (
            f"{self.source}: {self.num_files} files{skipped}, {len(self.train_N) / 1e6:.2f} MB to "
            f"train on, {len(self.validation_N) / 1e6:.2f} MB held out"
        )


def _stdlib_files() -> tuple[Path, list[Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in root.rglob("*.py")
        if not SKIPPED_STDLIB_FOLDERS.intersection(path.relative_to(root).parts)
    ]
    return root, files


def _folder_files(root: Path) -> list[Path]:
    """Return every regular file below `root` that is not hidden."""

    def refuse(error: OSError) -> None:
        raise DataError(f"expected --data to be readable, got {error.filename}: {error.strerror}")

    files = []
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return files


def _read(path: Path) -> bytes | None:
    """Return the bytes of a text file, None for a binary file or one that is not regular."""
    try:
        # Opening a FIFO or a device could block for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            return None
        with path.open("rb") as file:
            head = file.read(BINARY_CHECK_BYTES)
            return None if b"\0" in head else head + file.read()
    except OSError as error:
        raise DataError(f"expected --data to be readable, got {path}: {error.strerror}") from error


def _name_digest(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()


def _offsets(texts: list[bytes], end: int) -> list[int]:
    """Offsets at which the texts begin, one after the other up to `end`, and the end."""
    return sorted({min(start, end) for start in itertools.accumulate(map(len, texts), initial=0)})


def _split(texts: dict[str, bytes], min_bytes: int) -> tuple[bytes, bytes, list[int]]:
    """Hold out whole files, in an order that depends only on their names.

    With too few files for that, the last bytes are held out. The third result is where files
    begin in the first.
    """
    total = sum(map(len, texts.values()))
    wanted = max(int(total * HELD_OUT_SHARE), min_bytes)
    held_out: set[str] = set()
    size = 0
    for name in sorted(texts, key=_name_digest):
        # One huge file (a table, say) would make the held-out text unlike the rest.
        if size < wanted and len(texts[name]) <= wanted // 4:
            held_out.add(name)
            size += len(texts[name])
    kept = [text for name, text in texts.items() if name not in held_out]
    train = b"".join(kept)
    validation = b"".join(text for name, text in texts.items() if name in held_out)
    if size >= wanted and len(train) >= min_bytes:
        return train, validation, _offsets(kept, len(train))
    everything, end = b"".join(texts.values()), total - wanted
    return everything[:end], everything[end:], _offsets(list(texts.values()), end)


def load_text(path: str | None, seq_len: int) -> TextData:
    """Read `path` (a file or a folder; None: the sources of the Python standard library)."""
    if path is None:
        root, files = _stdlib_files()
        source = "Python standard library"
    else:
        root = Path(path)
        source = str(root)
        if root.is_dir():
            files = _folder_files(root)
        elif root.is_file():
            root, files = root.parent, [root]
        else:
            state = "something else" if root.exists() else "a path that does not exist"
            raise DataError(f"expected --data to be a text file or a folder, got {state}: {path}")
    texts: dict[str, bytes] = {}
    num_skipped = 0
    for name, file in sorted((file.relative_to(root).as_posix(), file) for file in files):
        content = _read(file)
        if content is None:
            num_skipped += 1
        elif content:
            texts[name] = content
    # Each split must hold one sequence and the byte that follows it.
    min_bytes = seq_len + 1
    total = sum(map(len, texts.values()))
    if total < 2 * min_bytes:
        raise DataError(
            f"expected --data to hold at least {2 * min_bytes} bytes of text "
            f"(twice --seq-len and one), got {total} bytes in {len(texts)} text files: {source}"
        )
    train, validation, offsets = _split(texts, min_bytes)
    digest = hashlib.sha256(len(train).to_bytes(8, "little") + train + validation).hexdigest()
    return TextData(
        train_N=torch.frombuffer(bytearray(train), dtype=torch.uint8),
        train_offsets=torch.tensor(offsets),
        validation_N=torch.frombuffer(bytearray(validation), dtype=torch.uint8),
        source=source,
        num_files=len(texts),
        num_skipped=num_skipped,
        sha256=digest,
    )


def _windows(bytes_N: Tensor, starts_B: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    window_BS = bytes_N[starts_B[:, None] + torch.arange(seq_len + 1)].long()
    return window_BS[:, :-1], window_BS[:, 1:]


def train_batch(
    data: TextData, *, step: int, seed: int, batch: int, seq_len: int, rank: int, world_size: int
) -> tuple[Tensor, Tensor]:
    """Return this rank's inputs and targets [B / world_size, S] of batch number `step`.

    The whole batch depends on (seed, step) alone, so a resumed run, on any number of ranks,
    sees the same text.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    starts_B = torch.randint(len(data.train_N) - seq_len, (batch,), generator=generator)
    share = batch // world_size
    return _windows(data.train_N, starts_B[rank * share : (rank + 1) * share], seq_len)


def packed_documents(
    data: TextData, *, step: int, seed: int, seq_len: int, longest: int
) -> tuple[Tensor, list[int]]:
    """Return sequence number `step` [S] of whole documents, and the offsets where they begin.

    Documents are files drawn at random; of one longer than `longest`, a piece drawn at random. The
    last one is cut where the sequence is full.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    parts, offsets = [], [0]
    while offsets[-1] < seq_len:
        file = int(torch.randint(len(data.train_offsets) - 1, (), generator=generator))
        begin, end = data.train_offsets[file : file + 2].tolist()
        length = min(end - begin, longest)
        begin += int(torch.randint(end - begin - length + 1, (), generator=generator))
        length = min(length, seq_len - offsets[-1])
        parts.append(data.train_N[begin : begin + length])
        offsets.append(offsets[-1] + length)
    return torch.cat(parts).long(), offsets


def validation_batches(
    data: TextData, *, num_batches: int, batch: int, seq_len: int, rank: int, world_size: int
) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's part of `num_batches` batches, spread evenly over the held-out bytes."""
    last_start = len(data.validation_N) - seq_len - 1
    starts = torch.linspace(0, last_start, num_batches * batch, dtype=torch.float64).long()
    share = batch // world_size
    return [
        _windows(data.validation_N, rows[rank * share : (rank + 1) * share], seq_len)
        for rows in starts.split(batch)
    ]


def unigram_entropy(bytes_N: Tensor) -> float:
    """Return the entropy of single bytes in nats: the loss of a model that ignores context."""
    probability = torch.bincount(bytes_N.long(), minlength=VOCAB_SIZE).double() / len(bytes_N)
    return float(torch.special.entr(probability).sum())
