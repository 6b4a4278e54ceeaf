"""The example of local steps: every method trains, bytes are those of its formula."""

import pytest
import train_diloco

from moe_ext.testing import spawn_ranks

SIZE = 2


def run(rank, path):
    train_diloco.BATCH = 4
    data = train_diloco.load_text(path, train_diloco.SIZES.seq_len)
    start = train_diloco.pretrain(data, steps=2)
    options = {"first": 2, "steps": 4, "sync_every": 2, "every": 2}
    return {
        name: train_diloco.train(method, data, start, **options)
        for name, method in train_diloco.METHODS.items()
    }


def test_bytes_and_losses(text_file):
    found, other = spawn_ranks(run, SIZE, str(text_file), timeout=240)
    synchronous = found["synchronous"]["bytes"]
    assert found["DiLoCo"]["bytes"] == synchronous / 2
    assert found["SparseLoCo"]["bytes"] < synchronous / 2 / 50
    assert found["MuLoCo"]["bytes"] < synchronous / 2 / 14
    for method, result in found.items():
        assert result["loss"] == pytest.approx(other[method]["loss"]), method
        assert len(result["curve"]) == 2 and result["loss"] < 7


def test_unknown_methods_are_refused(capsys):
    with pytest.raises(SystemExit):
        train_diloco.main(["--methods", "none"])
    assert "expected some of" in capsys.readouterr().err
