"""State spaces, delta rules and convolutions of prepared models, over ranks against one process.

Every rank count starts its ranks once for all families. Three ranks, by which no length here is
divided, run all families in float64, and one of each recurrence in float32. Two and four run one
of each recurrence in float64. Each family takes another case on each of these; with
MOE_EXT_FULL=1 all families take all cases.
"""

import contextlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hf_models import transformers
from pairwise import FULL
from rank_checks import Checks
from test_prepared_models import (
    RECURRENCES,
    REFUSED,
    SERVED,
    make,
    make_batch,
    prepared,
    trains_as_one_process,
)

from moe_ext.attention.huggingface.mixers import _mixers

PAGE = Path(__file__).resolve().parents[3] / "docs" / "hugging_face.md"
HYBRIDS = (
    *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba"),
    *("kimi_linear", "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax", "nemotron_h"),
    *("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma"),
    *("zamba", "zamba2"),
)
ENDS = tuple(f"-{family}" for family in RECURRENCES)
# Kinds of batches and layouts; the documents of a packed one end inside ranks.
CASES = (
    *(("padded", layout) for layout in ("contiguous", "zigzag", "striped")),
    *(("packed", layout) for layout in ("contiguous", "zigzag", "striped", "per_document")),
)
EXPERTS = (
    *("bailing_hybrid", "granitemoehybrid", "jamba", "kimi_linear", "lfm2_moe", "minimax"),
    *("nemotron_h", "qwen3_5_moe_text", "qwen3_next"),
)
# Divided by two to four ranks; a config takes its own name of it.
TWELVE = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 12)
few, everything = Checks(), Checks()


def of_this_run(family, cases):
    """All of the cases, or one that is another for the next family and the next rank count."""
    if FULL:
        return cases
    return [cases[(HYBRIDS.index(family) + dist.get_world_size()) % len(cases)]]


@few(*((family,) for family in RECURRENCES))
def some_equal_one_process(family):
    for case in (("padded", "striped"), ("packed", "per_document")):
        trains_as_one_process(make(family, **SERVED[family]), *case)


@contextlib.contextmanager
def doubles():
    """Models that ask for float32 are given float64."""
    scan = transformers.models.recurrent_gemma.modeling_recurrent_gemma.RecurrentGemmaRglru
    with pytest.MonkeyPatch.context() as patch:
        for name in ("float32", "float"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(scan._rnn_scan, "__defaults__", (torch.float64,))
        torch.set_default_dtype(torch.float64)
        yield
    torch.set_default_dtype(torch.float32)


def double(family):
    """A model in float64."""
    model = make(family, **SERVED[family]).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    for layer in model.modules():
        if type(layer).__name__ == "MiniMaxLightningAttention":
            # Transformers keeps powers of this, which were rounded to float32.
            decays = layer.decay_factors(layer.slope_rate)
            layer.query_decay, layer.key_decay, layer.diagonal_decay = decays
    return model


def equals_one_process_in_float64(family):
    with doubles():
        for case in of_this_run(family, CASES):
            trains_as_one_process(double(family), *case, 1e-9, 1e-9, 1e-12)


def experts_are_spread_beside_it(family):
    model = make(family, **SERVED[family], **TWELVE)
    trains_as_one_process(model, "packed", "contiguous", ep_group=dist.group.WORLD)


few(("qwen3_next",))(experts_are_spread_beside_it)
everything(*((family,) for family in HYBRIDS))(equals_one_process_in_float64)
# By two and four ranks one of each recurrence.
of_each = Checks({name: f for name, f in everything.items() if FULL or name.endswith(ENDS)})
# Rows reach experts by two and four ranks as beside any attention.
everything(*((family,) for family in EXPERTS))(experts_are_spread_beside_it)


test_ranks = few.test(3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "name"),
    [(n, name) for n in (2, 3, 4) for name in (everything if n == 3 else of_each)],
)
def test_ranks_of_all_families(num_ranks, name):
    checks = everything if num_ranks == 3 else of_each
    checks.assert_passed(num_ranks, name, timeout=280)


def test_no_hybrid_is_left_out():
    """Neither here nor on the page, whose other names are those that are refused."""
    found = {family for family in SERVED if [*_mixers(make(family, **SERVED[family]))]}
    assert found == {*HYBRIDS}
    _, refused = REFUSED["recurrences and mixtures of other kinds"]
    names = (", ".join(HYBRIDS), ", ".join(refused).replace("/mlm", ""))
    text = " ".join(PAGE.read_text().split())
    assert "Served: {}. Refused: {}.".format(*names) in text


@pytest.mark.parametrize("family", RECURRENCES)
def test_mixers_refuse_a_cache_of_states(family):
    """A decoder may be called without the model around it, whose hook refuses caches first."""
    model = prepared(family, None)
    batch = {"input_ids": make_batch("plain")["input_ids"], "use_cache": True}
    with pytest.raises(ValueError, match="prepare_model: expected .* a recurrence to be none"):
        model.base_model(**batch)
