"""The cost model: its formula, its rules, what it learns, and that ranks agree."""

import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from moe_ext.comm import link, rates
from moe_ext.comm.link import Link
from moe_ext.comm.rates import SIZES, CodecRate, CostTable
from moe_ext.compression import Quantize, codec_of, cost_model
from moe_ext.compression.cost_model import (
    CLEAR_SHARE,
    CLEAR_SHARE_AGAIN,
    CLEAR_TURNS,
    HYSTERESIS,
    TIMED_EVERY,
    TRIAL_TURNS,
    CostModel,
)
from moe_ext.testing import spawn_ranks

NUMEL = 2**20
SLOW = Link.of_rate(200e6)
FAST = Link.of_rate(400e9)


@dataclass(frozen=True)
class FakeCodec:
    """Sends `share` of a float32 bucket; computes for `each` seconds an element."""

    name: str
    share: float
    each: float = 0.0
    lossy: bool = True
    rounds: int = 2

    @property
    def plain(self):
        return self.name in ("none", "bf16")

    def sent_bytes(self, numel, world_size):
        return int(8 * (world_size - 1) / world_size * numel * self.share)

    def num_rounds(self, world_size):
        return self.rounds

    def passes(self, world_size):
        return 1.0, 1.0

    def new_memory(self, grad_N):
        return torch.zeros_like(grad_N)


DENSE = FakeCodec("none", 1.0, 0.1e-9, lossy=False)
BF16 = FakeCodec("bf16", 0.5, 0.3e-9)
INT8 = FakeCodec("int8", 0.25, 1e-9)
TOPK = FakeCodec("topk", 0.02, 3e-9)
ALL = (DENSE, BF16, INT8, TOPK)


@pytest.fixture
def known_rates(monkeypatch):
    """Rates as the fakes state them, without a clock."""

    def rates(name, codec, device):
        return tuple(
            CodecRate(n, 4 * n, n, codec.each * n / 4, codec.each * n * 3 / 4) for n in SIZES
        )

    monkeypatch.setattr(cost_model, "rehearsal_of", lambda codec, device, memory_of: codec)
    monkeypatch.setattr(cost_model, "known_codec", rates)


def model_on(link, num_ranks=2):
    return CostModel(link=link, num_ranks=num_ranks)


def settled(model, codecs=ALL, numel=NUMEL, bucket=0):
    """The choice once trials are over."""
    for _ in range(2 * TRIAL_TURNS):
        model.choose(numel, codecs, bucket=bucket)
    return model.choose(numel, codecs, bucket=bucket)


def test_prediction_is_bytes_and_rounds_and_computing(known_rates):
    link = Link(latency=1e-3, exchange_bandwidth=2e9, reduce_bandwidth=1e9)
    model = CostModel(link=link, num_ranks=4)
    model.prepare(ALL)
    sent = int(1.5 * NUMEL * 4 * 0.25)
    assert model.predict(INT8, NUMEL) == pytest.approx(sent / 2e9 + 2e-3 + 1e-9 * NUMEL)
    # Dense all-reduces have a bandwidth of their own.
    assert model.wire_seconds(BF16, NUMEL) == pytest.approx(2 * sent / 1e9 + 2e-3)


@pytest.mark.parametrize(("link", "codec"), [(SLOW, TOPK), (FAST, DENSE)])
def test_the_least_wins(known_rates, link, codec):
    assert settled(model_on(link)) == codec


def test_break_even_is_where_predictions_cross(known_rates):
    model = model_on(SLOW)
    free = FakeCodec("free", 0.1, 0.0)
    model.prepare((*ALL, free))
    limit = model.break_even(INT8, BF16, NUMEL)
    for factor, faster in ((0.9, True), (1.1, False)):
        link = Link(0.0, factor * limit, factor * limit)
        other = model_on(link)
        other.prepare(ALL)
        assert (other.predict(INT8, NUMEL) < other.predict(BF16, NUMEL)) is faster
    assert model.break_even(DENSE, BF16, NUMEL) == 0.0
    assert model.break_even(free, BF16, NUMEL) == float("inf")


def test_rules_before_the_formula(known_rates):
    alone = CostModel()
    assert alone.num_ranks == 1
    assert alone.choose(NUMEL, ALL, bucket="a") == DENSE
    assert "one rank" in alone.explain()
    model = model_on(SLOW)
    assert model.choose(2**14 - 1, ALL, bucket="small") == DENSE
    assert model.choose(2**14, ALL, bucket="large") == TOPK
    # Whatever it takes: all-gathered indices of many ranks are more than the dense bucket.
    grows = FakeCodec("grows", 1.1, 0.0)
    model.choose(NUMEL, (DENSE, grows), bucket="many")
    for _ in range(3):
        model.record("many", grows, 1e-9)
    assert settled(model, (DENSE, grows), bucket="many") == DENSE
    assert model.choose(NUMEL, (BF16, DENSE), bucket="tiny ranks") in (BF16, DENSE)


def test_without_a_dense_codec_there_is_nothing_to_fall_back_to(known_rates):
    with pytest.raises(ValueError, match=r"expected codecs to hold a dense one .*got \['int8'"):
        model_on(SLOW).choose(NUMEL, (INT8, TOPK), bucket=0)


def test_a_little_better_is_not_enough_to_change(known_rates):
    a, b = FakeCodec("a", 0.1), FakeCodec("b", 0.1 * (1 - HYSTERESIS / 2))
    model = model_on(SLOW)
    assert model.choose(NUMEL, (DENSE, a), bucket=0) == a
    assert model.choose(NUMEL, (DENSE, a, b), bucket=0) == a
    assert "less than 10 % better" in model.explain()
    # Without a codec in use the least is taken, and one that is much better replaces another.
    assert model.choose(NUMEL, (DENSE, a, b), bucket=1) == b
    much = FakeCodec("much", 0.1 * (1 - 2 * HYSTERESIS))
    assert model.choose(NUMEL, (DENSE, a, b, much), bucket=0) == much
    assert model.choose(NUMEL, (DENSE, a, b), bucket=1, current=a) == a


def run(model, truth, turns, codecs=ALL, bucket=0):
    """Steps that take what `truth` says; the codecs used."""
    used = []
    for _ in range(turns):
        codec = model.choose(NUMEL, codecs, bucket=bucket)
        used.append(codec)
        model.record(bucket, codec, truth[codec])
    return used


def test_a_codec_that_is_slower_than_predicted_is_given_up(known_rates):
    model = model_on(Link.of_rate(10e9))
    truth = dict(zip(ALL, (4e-3, 3e-3, 9e-3, 8e-3), strict=True))
    used = run(model, truth, 4 * TRIAL_TURNS)
    assert used[0] in (DENSE, BF16)  # close by the formula: what plain all-reduce takes is measured
    assert used[-1] == BF16
    assert set(used[-4:]) == {BF16}
    # Other buckets of the same codecs are corrected too.
    assert settled(model, bucket="another") == BF16


def test_no_turn_is_lost_where_the_choice_is_clear(known_rates):
    assert set(run(model_on(SLOW), {TOPK: 5e-3}, 512)) == {TOPK}


def test_two_turns_end_a_trial_that_is_clear(known_rates):
    """The formula has to say so too, and the quicker of the two turns."""
    link, codecs = Link.of_rate(3e9), (DENSE, INT8)
    model = model_on(link)
    model.prepare(ALL)
    truth = {codec: model.predict(codec, NUMEL) for codec in ALL}
    assert CLEAR_SHARE < truth[INT8] / truth[DENSE] < CLEAR_SHARE_AGAIN
    used = run(model_on(link), truth, 64, codecs)
    assert used[:CLEAR_TURNS] == [DENSE] * CLEAR_TURNS and set(used[CLEAR_TURNS:]) == {INT8}
    # As quick as the codec that was chosen, but for a turn that was disturbed: it is used.
    model, used = model_on(link), []
    for turn in range(64):
        used.append(model.choose(NUMEL, codecs, bucket=0))
        quick = used[-1] == INT8 or turn != 1
        model.record(0, used[-1], truth[INT8] if quick else 8 * truth[INT8])
    assert used[:TRIAL_TURNS] == [DENSE] * TRIAL_TURNS and used[-1] == DENSE
    # A codec that takes longer than predicted: plain all-reduce is tried again, and used.
    used = run(model_on(link), {**truth, INT8: 1.5 * truth[DENSE]}, 64, codecs)
    assert used.count(INT8) <= TRIAL_TURNS and used[-1] == DENSE


def test_hysteresis_does_not_keep_a_codec_that_is_behind(known_rates):
    """Between 3 and 10 % behind: the bound is stronger than the wish to stay."""
    model = model_on(Link.of_rate(1e9))
    codecs = (BF16, INT8)
    model.choose(NUMEL, codecs, bucket=0)
    for _ in range(TRIAL_TURNS):
        model.record(0, INT8, 1.04e-3)
        model.record(0, BF16, 1e-3)
    assert model.choose(NUMEL, codecs, bucket=0, current=INT8) == BF16
    assert "int8 was behind bf16" in model.explain()


def test_auto_stays_within_3_percent_of_the_best_plain_all_reduce(known_rates):
    """Over many truths that contradict the formula, all turns of measuring included."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        factors = (2.0 ** (2 * torch.rand(4, generator=generator) - 1)).tolist()
        model = model_on(Link.of_rate(10e9))
        model.prepare(ALL)
        truth = {c: f * model.predict(c, NUMEL) for c, f in zip(ALL, factors, strict=True)}
        used = run(model, truth, 256)
        best = min(truth[DENSE], truth[BF16])
        late = [truth[codec] for codec in used[4 * TRIAL_TURNS :]]
        assert max(set(late), key=late.count) <= 1.03 * best
        assert sum(late) <= 1.05 * best * len(late)


def test_trials_are_repeated_as_often_as_they_are_cheap(known_rates):
    model = model_on(Link.of_rate(10e9))
    truth = {DENSE: 4e-3, BF16: 2e-3, INT8: 1.5e-3, TOPK: 1.6e-3}
    used = run(model, truth, 1000)[4 * TRIAL_TURNS :]
    assert set(used) == {BF16, INT8}  # what takes more than twice the time is left alone
    trials = [turn for turn, codec in enumerate(used) if codec == BF16]
    assert len(trials) >= 10
    lost = sum(truth[codec] for codec in used) / (len(used) * truth[INT8]) - 1
    assert 0.0 < lost < 0.006
    # A trial interrupts, and no more.
    assert all(used[turn + 1] == INT8 for turn in trials if turn + 1 < len(used))


@pytest.mark.parametrize("disturbed", [(0,), (0, 1), (0, 1, 2), (0, 2, 5), (4, 5)])
def test_disturbed_turns_do_not_decide_against_a_codec(known_rates, disturbed):
    """Its first turn warms up, and two more may take longer: nobody would measure it again."""
    model = model_on(Link.of_rate(1e9))
    model.prepare(ALL)
    truth = {codec: model.predict(codec, NUMEL) for codec in ALL}
    used = []
    for _ in range(64):
        used.append(model.choose(NUMEL, ALL, bucket=0))
        longer = 4 if used[-1] == TOPK and used.count(TOPK) - 1 in disturbed else 1
        model.record(0, used[-1], longer * truth[used[-1]])
    assert used[-1] == TOPK and used.count(INT8) == 0
    # One that is always slower than predicted is given up.
    model = model_on(Link.of_rate(1e9))
    used = run(model, {**truth, TOPK: 10 * truth[TOPK]}, 64)
    assert used[-1] == INT8 and used.count(TOPK) == TRIAL_TURNS


def test_what_became_faster_is_found(known_rates):
    """Two of three turns of a trial may have been disturbed: the next ones put that right."""
    model = model_on(Link.of_rate(10e9))
    before = {DENSE: 3.6e-3, BF16: 3e-3, INT8: 9e-3, TOPK: 9e-3}
    assert set(run(model, before, 64)[4 * TRIAL_TURNS :]) <= {BF16, DENSE}
    used = run(model, {**before, DENSE: 2.8e-3}, 256)
    assert set(used[-16:-1]) <= {DENSE, BF16} and used[-1] == DENSE
    assert used[-16:].count(BF16) <= 2


def test_rounding_must_save_time(known_rates):
    """Between an exact all-reduce and one that rounds, noise decides for the exact one."""
    link, codecs = Link.of_rate(10e9), (BF16, DENSE)
    for share, wanted in ((0.98, DENSE), (1.0, DENSE), (1.03, DENSE), (0.9, BF16)):
        truth = {DENSE: 3e-3, BF16: share * 3e-3}
        used = run(model_on(link), truth, 64, codecs)
        assert max(set(used), key=used.count) == wanted
    model = model_on(link)
    model.choose(NUMEL, codecs, bucket=0)
    for _ in range(TRIAL_TURNS):
        model.record(0, DENSE, 1e-3)
        model.record(0, BF16, 0.96e-3)
    assert model.choose(NUMEL, codecs, bucket=0, current=BF16) == BF16
    for _ in range(TRIAL_TURNS):
        model.record(0, BF16, 0.98e-3)
    assert model.choose(NUMEL, codecs, bucket=0) == DENSE
    assert "exact, and bf16 is hardly faster" in model.explain()


def test_plain_codecs_that_are_known_are_timed_now_and_then(known_rates):
    model = model_on(FAST)
    assert not model.is_timed("unknown")
    model.choose(100, ALL, bucket="small")
    assert not model.is_timed("small")
    timed = []
    for _ in range(10 * TIMED_EVERY):
        codec = model.choose(NUMEL, (DENSE,), bucket=0)
        timed.append(model.is_timed(0))
        if timed[-1]:
            model.record(0, codec, 1e-3)
    assert all(timed[:TRIAL_TURNS])
    assert sum(timed[TRIAL_TURNS:]) == (len(timed) - TRIAL_TURNS) // TIMED_EVERY
    # What is compressed tells its time with what it has to tell anyway.
    slow = model_on(SLOW)
    for _ in range(20):
        codec = slow.choose(NUMEL, ALL, bucket=0)
        assert slow.is_timed(0)
        slow.record(0, codec, 1e-3)


def test_where_nobody_measures_trials_end(known_rates):
    model = model_on(Link.of_rate(10e9))
    used = [model.choose(NUMEL, ALL, bucket=0) for _ in range(20)]
    assert TRIAL_TURNS <= sum(codec in (DENSE, BF16) for codec in used) <= 2 * TRIAL_TURNS


def test_the_first_measurement_only_counts_until_there_is_another(known_rates):
    model = model_on(SLOW)
    model.choose(NUMEL, ALL, bucket=0)
    model.record(0, BF16, 10.0)
    assert model.estimate(BF16, 0) == 10.0
    model.record(0, BF16, 2.0)
    assert model.estimate(BF16, 0) == 2.0
    for seconds in (2.0, 50.0, 2.0):
        model.record(0, BF16, seconds)
    assert model.estimate(BF16, 0) == 2.0  # a median: one turn that was disturbed is nothing
    model.record("unknown", BF16, 1.0)
    model.record(0, BF16, 1e-9)  # no clock was read
    assert model.estimate(BF16, 0) == 2.0


def test_a_bucket_of_another_size_keeps_the_ratio_to_the_formula(known_rates):
    model = model_on(SLOW)
    model.choose(NUMEL, ALL, bucket=0)
    model.record(0, TOPK, 2 * model.predict(TOPK, NUMEL))
    model.choose(2 * NUMEL, ALL, bucket=0)
    assert model.estimate(TOPK, 0) == pytest.approx(2 * model.predict(TOPK, 2 * NUMEL))


def test_observations_wait_until_they_are_settled(known_rates):
    model = model_on(SLOW)
    model.choose(NUMEL, ALL, bucket=0)
    model.observe(0, DENSE, 1.0)
    model.observe(0, BF16, 2.0)
    assert model.pending() == [1.0, 2.0]
    with pytest.raises(ValueError, match="expected agreed to be 2 long, got 1"):
        model.settle([1.0])
    model.settle([3.0, 4.0])
    assert (model.estimate(DENSE, 0), model.estimate(BF16, 0)) == (3.0, 4.0)
    assert model.pending() == []
    model.settle()


def test_explain_is_a_table(known_rates):
    model = CostModel(link=Link(1e-4, 25e6, 20e6), num_ranks=2)
    settled(model)
    for _ in range(TRIAL_TURNS):
        model.record(0, TOPK, 0.0123)
    model.choose(100, ALL, bucket="norm")
    lines = model.explain().splitlines()
    assert lines[0] == (
        "2 ranks on cpu, latency 100 us, all-to-all 0.2 Gbit/s, all-reduce 0.16 Gbit/s"
    )
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:5]]
    assert cells[0] == [
        *("bucket", "elements", "none ms", "bf16 ms", "int8 ms", "topk ms", "choice", "why")
    ]
    dense = 1e3 * model.predict(DENSE, NUMEL)
    assert cells[2][:3] == ["0", str(NUMEL), f"{dense:.3f}"]
    assert cells[2][5:7] == ["12.300*", "topk"]
    assert "x faster than bf16" in cells[2][7]
    assert cells[3][0] == "norm"
    assert cells[3][6:] == ["none", "below 64 KiB"]
    assert lines[5].startswith("int8 pays below ")
    assert lines[5].endswith(f"Gbit/s ({NUMEL} elements, beside bf16)")
    twins = (DENSE, TOPK, FakeCodec("topk", 0.1))
    model.choose(NUMEL, twins, bucket="twins")
    assert "share=0.1" in model.explain()


def test_explain_has_the_times_that_the_choice_is_made_by(known_rates):
    """A codec that takes ten times what is predicted, up to the turn in which it is given up."""
    model = model_on(Link.of_rate(1e9))
    model.prepare(ALL)
    longer = 10 * model.predict(TOPK, NUMEL)

    def cells():
        row = model.explain().splitlines()[3].strip("|").split("|")
        return [cell.strip() for cell in row]

    for _ in range(TRIAL_TURNS):
        assert model.choose(NUMEL, ALL, bucket=0) == TOPK
        times = cells()[2:6]
        assert min(times, key=float) == times[3] and cells()[6] == "topk"
        model.record(0, TOPK, longer)
    assert cells()[5] == f"{1e3 * longer:.3f}*"
    assert model.choose(NUMEL, ALL, bucket=0) != TOPK


def test_names_are_codecs():
    model = CostModel(link=Link(1e-4, 25e6, 20e6), num_ranks=2)
    assert model.choose(100, ["none", "int8"], bucket=0).name == "none"
    with pytest.raises(ValueError, match="CostModel.choose: expected codec to be one of .*'int9'"):
        model.choose(100, ["none", "int9"], bucket=0)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="expected link to be given with num_ranks"):
        CostModel(num_ranks=4)
    with pytest.raises(ValueError, match="expected reduce_bandwidth to be above 0"):
        Link(1e-3, 1.0, 0.0)
    with pytest.raises(ValueError, match="expected latency to be at least 0"):
        Link(-1.0, 1.0, 1.0)


def test_rates_are_measured_once_and_lie_on_lines(monkeypatch):
    monkeypatch.setattr(rates, "_known", {})
    calls, clock = [], [0.0]
    monkeypatch.setattr(link, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def lasts(seconds):
        clock[0] += seconds

    @dataclass(frozen=True)
    class Counting(FakeCodec):
        def passes(self, world_size):
            return 1.0, float(world_size)

        def rehearsal(self, grad_N, memory):
            assert memory.shape == grad_N.shape

            def encode():
                calls.append(grad_N.numel())
                lasts(2e-3 + 20e-9 * grad_N.numel())

            return encode, lambda: lasts(1e-3)

    codec = Counting("counting", 0.1)
    first = CostModel(link=SLOW, num_ranks=3)
    first.prepare([codec, codec])
    few, many = SIZES[:2]
    assert calls == [few] * 3 + [many] * 3
    # A gradient is encoded, and those of three ranks decoded.
    for numel in (few, 2 * few, many):
        expected = 2e-3 + 20e-9 * numel + 3 * 1e-3
        assert first.compute_seconds(codec, numel) == pytest.approx(expected, rel=1e-9)
    CostModel(link=SLOW, num_ranks=3).prepare([codec])
    assert len(calls) == 6


def test_rates_of_a_table_are_taken_and_not_measured(monkeypatch):
    monkeypatch.setattr(cost_model, "known_codec", None)
    rates = tuple(CodecRate(n, 4 * n, n, 2e-9 * n, 1e-9 * n) for n in SIZES)
    costs = replace(CostTable.of_process(), codecs={"int8": rates, repr(Quantize(block=64)): rates})
    model = CostModel(link=SLOW, num_ranks=4, costs=costs)
    model.prepare([codec_of("int8"), Quantize(block=64)])
    # Each of four ranks encodes its gradient and a shard of the sum, and decodes two of its size.
    assert model.compute_seconds(codec_of("int8"), 2**15) == pytest.approx(2**15 * 4.5e-9)
    with pytest.raises(TypeError):
        model.prepare([codec_of("int4")])  # which would be measured


def ranks_agree(rank):
    """Ranks whose clocks and codecs say different things."""
    model = CostModel()
    link = model.probe()
    assert CostModel().probe() is link  # the group is measured once

    @dataclass(frozen=True)
    class Uneven(FakeCodec):
        def rehearsal(self, grad_N, memory):
            seconds = (0.02 if rank == 1 else 0.0) * (self.name == "uneven")
            return lambda: time.sleep(seconds), lambda: None

    codecs = (Uneven("none", 1.0), Uneven("bf16", 0.5), Uneven("uneven", 0.01))
    chosen = []
    for turn in range(8):
        codec = model.choose(NUMEL, codecs, bucket="b")
        chosen.append(codec.name)
        # Rank 0 thinks well of what rank 1 thinks badly of.
        model.observe("b", codec, 1e-3 * (1 + rank * (codec.name == "uneven")) + 1e-4 * turn)
        model.settle()
    again = model.probe(again=True)
    groups = [dist.new_group([0, 1, 2]), dist.new_group([1, 2])]
    sizes = [CostModel(g).num_ranks for g in groups[: 1 + (rank > 0)]]
    # A rank that ends while others still connect closes what they connect to.
    dist.barrier()
    figures = [link.latency, link.exchange_bandwidth, link.reduce_bandwidth, again.latency]
    return figures, chosen, model.explain(), model.compute_seconds(codecs[2], 0), sizes


def test_ranks_agree():
    found = spawn_ranks(ranks_agree, 3)
    assert found[0][:4] == found[1][:4] == found[2][:4]
    figures, chosen, text, seconds, _ = found[0]
    assert all(figure > 0 for figure in figures)
    assert 1e6 < figures[1] < 1e12
    assert len(chosen) == 8
    assert "3 ranks on cpu" in text
    assert seconds >= 0.015  # the slowest rank's
    assert [rank[4] for rank in found] == [[3], [3, 2], [3, 2]]
