import math
import os
import re
from pathlib import Path

import pytest
import torch
from moe_lm.data import DataError, TextData, load_text, train_batch, unigram_entropy
from moe_lm.data import validation_batches as make_validation_batches


@pytest.fixture
def folder(tmp_path):
    for i in range(100):
        path = tmp_path / f"part{i % 7}" / f"{i:03d}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"<{i:03d}>" * 20)
    return tmp_path


def batch_of(data, step, rank=0, world_size=1, seed=0):
    return train_batch(
        data, step=step, seed=seed, batch=8, seq_len=16, rank=rank, world_size=world_size
    )


def test_whole_files_are_held_out(folder):
    data = load_text(str(folder), 16)
    train, held_out = bytes(data.train_N.tolist()), bytes(data.validation_N.tolist())
    assert data.num_files == 100
    assert len(train) + len(held_out) == 100 * 100
    assert 500 <= len(held_out) < 600
    for i in range(100):
        whole = f"<{i:03d}>".encode() * 20
        assert (whole in train) != (whole in held_out)


def test_the_split_does_not_depend_on_the_place_of_the_folder(folder):
    before = load_text(str(folder), 16)
    moved = folder.with_name("moved")
    folder.rename(moved)
    after = load_text(str(moved), 16)
    assert after.sha256 == before.sha256
    assert torch.equal(after.validation_N, before.validation_N)
    (moved / "part0" / "000.txt").write_text("other")
    assert load_text(str(moved), 16).sha256 != before.sha256


def test_a_single_file_gives_its_end(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(bytes(range(1, 201)) * 10)
    data = load_text(str(path), 16)
    assert bytes(data.train_N.tolist()) + bytes(data.validation_N.tolist()) == path.read_bytes()
    assert len(data.validation_N) == 100


def test_one_huge_file_does_not_become_the_held_out_text(folder):
    (folder / "huge.txt").write_text("x" * 50000)
    data = load_text(str(folder), 16)
    assert b"x" not in bytes(data.validation_N.tolist())


def test_hidden_binary_and_special_files_are_skipped(folder):
    expected = load_text(str(folder), 16)
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("secret")
    (folder / ".hidden").write_text("secret")
    (folder / "image.png").write_bytes(b"\x89PNG\0" * 10)
    os.mkfifo(folder / "pipe")  # reading it would wait for ever
    data = load_text(str(folder), 16)
    assert data.sha256 == expected.sha256
    assert data.num_skipped == 2
    assert "2 binary files skipped" in data.describe()


def test_a_broken_link_is_named(folder):
    (folder / "link").symlink_to(folder / "nowhere")
    with pytest.raises(DataError, match="expected --data to be readable, got .*link: No such file"):
        load_text(str(folder), 16)


def test_a_folder_that_cannot_be_listed_is_named(folder, monkeypatch):
    real = os.scandir

    def refuse(path):
        if str(path).endswith("part3"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match="part3: Permission denied"):
        load_text(str(folder), 16)


def test_a_device_is_refused():
    with pytest.raises(DataError, match="text file or a folder, got something else: /dev/null"):
        load_text("/dev/null", 16)


@pytest.mark.parametrize(
    ("content", "got"),
    [
        ({}, "0 bytes in 0 text files"),
        ({"empty.txt": b""}, "0 bytes in 0 text files"),
        ({"image": b"\0" * 1000}, "0 bytes in 0 text files"),
        ({"a.txt": b"x" * 33}, "33 bytes in 1 text files"),
    ],
)
def test_too_little_text_names_both_sizes(tmp_path, content, got):
    for name, text in content.items():
        (tmp_path / name).write_bytes(text)
    for path in (tmp_path, *tmp_path.glob("*.txt")):
        message = (
            rf"expected --data to .*at least 34 bytes of text .* got {got}: {re.escape(str(path))}"
        )
        with pytest.raises(DataError, match=message):
            load_text(str(path), 16)


def test_as_little_text_as_can_be(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 34)
    data = load_text(str(tmp_path), 16)
    assert (len(data.train_N), len(data.validation_N)) == (17, 17)
    assert batch_of(data, 0)[0].shape == (8, 16)


def test_the_standard_library_is_the_default():
    data = load_text(None, 256)
    assert 5e6 < len(data.train_N) < 5e7
    assert 0.03 < len(data.validation_N) / len(data.train_N) < 0.07
    assert 3 < unigram_entropy(data.validation_N) < 3.6


def test_ranks_share_one_batch(folder):
    data = load_text(str(folder), 16)
    whole = batch_of(data, 5)
    parts = [batch_of(data, 5, rank, 4) for rank in range(4)]
    for i in range(2):
        assert torch.equal(torch.cat([part[i] for part in parts]), whole[i])


def test_batches_depend_on_seed_and_step_alone(folder):
    data = load_text(str(folder), 16)
    assert torch.equal(batch_of(data, 5)[0], batch_of(data, 5)[0])
    assert not torch.equal(batch_of(data, 5)[0], batch_of(data, 6)[0])
    assert not torch.equal(batch_of(data, 5)[0], batch_of(data, 5, seed=1)[0])


def test_targets_are_the_next_bytes(folder):
    data = load_text(str(folder), 16)
    text = bytes(data.train_N.tolist())
    for inputs, targets in zip(*batch_of(data, 3), strict=True):
        assert torch.equal(inputs[1:], targets[:-1])
        assert bytes([*inputs.tolist(), int(targets[-1])]) in text


def test_validation_covers_the_held_out_text_and_is_shared(folder):
    data = load_text(str(folder), 16)

    def batches(rank, world_size):
        return make_validation_batches(
            data, num_batches=3, batch=4, seq_len=16, rank=rank, world_size=world_size
        )

    whole = batches(0, 1)
    assert [inputs.shape for inputs, _ in whole] == [(4, 16)] * 3
    assert torch.equal(whole[0][0][0], data.validation_N[:16].long())
    assert int(whole[-1][1][-1, -1]) == int(data.validation_N[-1])
    parts = [batches(rank, 2) for rank in range(2)]
    for i, (inputs, _) in enumerate(whole):
        assert torch.equal(torch.cat([part[i][0] for part in parts]), inputs)


def test_unigram_entropy():
    assert unigram_entropy(torch.zeros(10, dtype=torch.uint8)) == 0
    uniform = torch.arange(256).to(torch.uint8)
    assert unigram_entropy(uniform) == pytest.approx(math.log(256))
    skewed = torch.tensor([0, 0, 0, 1], dtype=torch.uint8)
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert unigram_entropy(skewed) == pytest.approx(expected)


def test_description_names_the_source(folder):
    data = load_text(str(folder), 16)
    assert isinstance(data, TextData)
    assert str(Path(folder)) in data.describe() and "100 files" in data.describe()
