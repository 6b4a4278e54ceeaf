import dataclasses
import json
import time

import pytest
import torch

from moe_ext.comm import rates
from moe_ext.compression import Link
from moe_ext.planner import CodecRate, CostTable

TABLE = CostTable(
    processor="one",
    device="cpu",
    threads=1,
    torch_version="2.13",
    copy_bandwidth=8e9,
    product_rates={"float32": 1e11},
    codecs={
        "int8": (CodecRate(1000, 4000, 1010, 2e-6, 1e-6), CodecRate(3000, 12000, 3030, 4e-6, 2e-6))
    },
    links={"network": Link.of_rate(1e9)},
)


def test_a_saved_table_is_loaded_as_it_was(tmp_path):
    TABLE.save(tmp_path / "rates.json")
    assert CostTable.load(tmp_path / "rates.json") == TABLE


@pytest.mark.parametrize(
    ("numel", "seconds"),
    [(10, (2e-6, 1e-6)), (1000, (2e-6, 1e-6)), (2000, (3e-6, 1.5e-6)), (6000, (8e-6, 4e-6))],
)
def test_seconds_lie_on_lines_between_sizes(numel, seconds):
    assert TABLE.codec_seconds("int8", numel) == pytest.approx(seconds)


def test_bytes_shares_and_products_follow():
    assert TABLE.payload_bytes("int8", 500) == pytest.approx(505)
    assert TABLE.share_of_copy("int8") == pytest.approx((1.5 / 4, 1.5 / 2))
    assert TABLE.product_seconds(1e11, torch.float32) == 1


def test_measures_what_it_is_given(monkeypatch):
    monkeypatch.setattr("moe_ext.comm.rates._COPY_BYTES", 2**20)
    monkeypatch.setattr("moe_ext.comm.rates._PRODUCT_DIM", 64)

    def rehearsal(numel):
        x = torch.randn(numel)
        return 4 * numel, 2 * numel, lambda: x.bfloat16(), lambda: x.clone()

    found = CostTable.measure(codecs={"bf16": rehearsal}, sizes=(64, 128))
    assert [(row.numel, row.input_bytes, row.payload_bytes) for row in found.codecs["bf16"]] == [
        (64, 256, 128),
        (128, 512, 256),
    ]
    assert found.copy_bandwidth > 0 and set(found.product_rates) == {"float32", "bfloat16"}


@pytest.mark.parametrize(("seconds", "calls"), [(0.0, 6), (0.21, 2)])
def test_calls_that_take_long_are_timed_once(seconds, calls):
    made = []

    def call():
        made.append(time.sleep(seconds))

    assert rates.least_seconds(call) >= seconds and len(made) == calls


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TABLE.codec_seconds("int3", 1), r"expected codec to be one of \['int8'\], got 'i"),
        (lambda: TABLE.product_seconds(1, "int8"), r"expected dtype to be one of \['float32'\], "),
    ],
)
def test_refuses_what_it_does_not_hold(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_refuses_other_files(tmp_path):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({**dataclasses.asdict(TABLE), "schema": 2}))
    with pytest.raises(ValueError, match="expected schema to be 1, got 2"):
        CostTable.load(path)
    path.write_text(json.dumps({"schema": 1, "processor": "one"}))
    with pytest.raises(ValueError, match="expected the fields of CostTable, got 'codecs'"):
        CostTable.load(path)
    path.write_text(json.dumps({"schema": 1, **dataclasses.asdict(TABLE), "codecs": {"int8": []}}))
    with pytest.raises(ValueError, match="expected codecs to hold CodecRate by name, got .*int8"):
        CostTable.load(path)
    path.write_text('{"schema": 1, "proc')
    with pytest.raises(ValueError, match=r"expected .*rates.json to hold JSON: Unterminated"):
        CostTable.load(path)
