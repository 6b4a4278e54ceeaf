"""Models with state spaces, delta rules and convolutions: sizes, operations, bytes, refusals."""

import dataclasses

import pytest
import torch
from planner_models import SIZES
from torch.utils.flop_counter import FlopCounterMode

from moe_ext.attention.layouts import make_layout
from moe_ext.attention.recurrent.functional import conv_sent_bytes, sent_bytes
from moe_ext.attention.recurrent.local import CHUNK
from moe_ext.distributed import count_traffic
from moe_ext.planner import (
    CLUSTERS,
    ClusterSpec,
    Job,
    Level,
    ModelSpec,
    Plan,
    RecurrentSpec,
    StepCost,
    model_spec,
    plan,
)
from moe_ext.planner.axes import DEFAULTS, columns_of
from moe_ext.planner.plan import _REMEDIES
from moe_ext.planner.stage_layers import divide
from moe_ext.testing import spawn_ranks

SIZES = {**SIZES, "intermediate_size": 96, "num_hidden_layers": 4, "pad_token_id": None}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "head_dim": 8,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXPERTS |= {"shared_expert_intermediate_size": 40}
SPACE = {"mamba_d_state": 6, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2}
KIMI = {"linear_num_heads": 4, "linear_head_dim": 6, "kv_lora_rank": 12, "q_lora_rank": None}
KIMI |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "num_experts": 8}
KIMI |= {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
KIMI |= {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
LAYERS = {"layer_types": ["conv", "full_attention", "conv", "conv"]}
# Small models of each family, and letters of their layers: R, a recurrence, A, attention, B, both,
# N, neither; d, a network, m, experts.
FAMILIES = {
    "qwen3_next": ({**DELTA, **EXPERTS}, "Rm Rm Rm Am"),
    "qwen3_5": (DELTA, "Rd Rd Rd Ad"),
    "qwen3_5_moe": ({**DELTA, **EXPERTS}, "Rm Rm Rm Am"),
    "olmo_hybrid": ({**DELTA, "num_key_value_heads": 4, "linear_num_key_heads": 4}, "Rd Rd Rd Ad"),
    "mamba": ({"state_size": 6, "conv_kernel": 3}, "R R R R"),
    "mamba2": ({"state_size": 6, "num_heads": 8, "head_dim": 8, "n_groups": 2}, "R R R R"),
    "falcon_mamba": ({"state_size": 6}, "R R R R"),
    "bamba": ({**SPACE, "attn_layer_indices": [1]}, "Rd Ad Rd Rd"),
    "falcon_h1": ({**SPACE, "mamba_d_ssm": 64, "head_dim": 8}, "Bd Bd Bd Bd"),
    "nemotron_h": (
        {
            "layers_block_type": ["mamba", "attention", "mamba", "moe", "mlp"],
            "num_hidden_layers": 5,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 6,
            "n_groups": 2,
            "head_dim": 8,
            "n_routed_experts": 8,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
        },
        "R A R Nm Nd",
    ),
    "granitemoehybrid": (
        {
            **SPACE,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
        },
        "Rm Am Rm Rm",
    ),
    "jamba": (
        {
            "mamba_d_state": 6,
            "mamba_dt_rank": 5,
            "num_experts": 8,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
        },
        "Rd Rm Ad Rm",
    ),
    "kimi_linear": (KIMI, "Rd Rm Rm Am"),
    "bailing_hybrid": (KIMI, "Rd Rm Rm Am"),
    "minimax": (
        {"num_local_experts": 8, "num_experts_per_tok": 2, "block_size": CHUNK},
        "Am Rm Am Rm",
    ),
    "recurrent_gemma": ({"lru_width": 48, "num_key_value_heads": 4}, "Rd Rd Ad Rd"),
    "lfm2": (LAYERS, "Rd Ad Rd Rd"),
    "lfm2_moe": (
        {**LAYERS, "num_experts": 8, "num_dense_layers": 1, "moe_intermediate_size": 24},
        "Rd Am Rm Rm",
    ),
}
MIXERS = {"R": "recurrent", "A": "attention", "B": "both", "N": "none"}
HYBRID = ModelSpec(
    *(4, 64, 4, 96, 128),
    mixers=("recurrent",) * 3 + ("attention",),
    recurrent=RecurrentSpec(64 * 640, 512, 4, 8, 4, 32, 64, has_beta=True),
)


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


def made(transformers, family, device="meta"):
    """A small model of a family."""
    given = {**SIZES, **FAMILIES[family][0]}
    if family.startswith("qwen3_5"):
        given = {"text_config": {**given, "model_type": f"{family}_text"}}
    config = transformers.CONFIG_MAPPING[family].from_dict({**given, "model_type": family})
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_counted(transformers, family):
    model = made(transformers, family)
    spec = model_spec(model)
    assert spec.parameters() == sum(p.numel() for p in model.parameters())
    layers = FAMILIES[family][1].split()
    assert spec.mixers == tuple(MIXERS[layer[0]] for layer in layers)
    networks = ["m" * part.moe + "d" * part.dense for part in spec.parts]
    assert networks == [layer[1:] for layer in layers]
    assert spec.one_part == any(len(layer) == 1 for layer in layers)
    # Stages hold them all.
    cost = StepCost(spec, CLUSTERS["h100"], Job(1, 256, 1))
    held = sum(float(x) for x in cost.sizes.parameters(columns_of([{}])))
    assert held == pytest.approx(spec.parameters(), rel=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_are_those_that_torch_counts(transformers, family):
    """The products of a mixer's forward pass, by transformers' own functions of torch."""
    model, length = made(transformers, family, "cpu"), 2 * CHUNK
    spec = model_spec(model).recurrent
    mixer = next(
        module
        for module in model.modules()
        if any(isinstance(child, torch.nn.Conv1d) for child in module.children())
        or hasattr(module, "slope_rate")
    )
    mixer.chunk_size = CHUNK
    further = {
        "minimax": {"position_embeddings": None, "attention_mask": None},
        "recurrent_gemma": {
            "position_ids": torch.arange(length)[None],
            "attention_mask": None,
            "use_cache": False,
        },
    }
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        mixer(torch.randn(1, length, SIZES["hidden_size"]), **further.get(family, {}))
    counted = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    projected = sum(counted.pop(f"aten.{op}", 0) for op in ("mm", "addmm", "baddbmm"))
    assert projected == 2 * length * spec.projections
    # It convolves some positions behind the last one.
    padded = length + spec.taps - 1
    assert counted.pop("aten.convolution", 0) == 2 * padded * spec.channels * spec.taps
    due = length * (spec.flops() - 2 * spec.channels * spec.taps)
    state = spec.num_heads * spec.head_dim * spec.v_dim
    if family == "recurrent_gemma":
        # A loop over positions, element by element, where ours goes by chunks.
        due = 0
    elif spec.has_beta and spec.by_element:
        # All of a triangle's inverse is multiplied. Scores are sums of products of elements, which
        # it does not count.
        due += length * spec.num_heads * CHUNK * (spec.head_dim + spec.v_dim)
        due -= length * spec.num_heads * 4 * CHUNK * spec.head_dim
    elif spec.has_beta:
        # A triangle is solved, which it does not count.
        due -= length * spec.num_heads * CHUNK * (spec.head_dim + spec.v_dim)
    elif spec.by_element:
        # Nor what is done element by element.
        due -= length * 3 * state
    elif family != "minimax":
        # States of chunks and the first one, all from all.
        due += 2 * 3 * 3 * state
    assert sum(counted.values()) == due


def cost_of(model=HYBRID, ranks=4, seq_len=256):
    cluster = dataclasses.replace(
        CLUSTERS["h100"],
        flops={"float32": 1e12},
        # One rate for all products, whatever their shapes.
        score_efficiency=None,
        multiprocessors=0,
    )
    return StepCost(model, cluster, Job(ranks, seq_len, 16, "float32"))


@pytest.mark.parametrize(
    ("scheme", "seq_len", "taken"),
    [("ring", 1024, None), ("ulysses", 1024, "state"), ("ulysses", 8, "heads")],
)
@pytest.mark.parametrize(
    "kind",
    [{"has_beta": True}, {}, {"by_element": True}, {"has_beta": True, "by_element": True}],
)
def test_the_scheme_is_that_of_the_operator(kind, scheme, seq_len, taken):
    """With the bytes that its formulas have for the ranks that send most."""
    by_element = kind == {"by_element": True}
    sizes = {"heads": 8, "dim": 64, "v_dim": 1 if by_element else 16}
    recurrent = RecurrentSpec(64, 32, 4, 8, 1, 64, sizes["v_dim"], **kind)
    cost = cost_of(dataclasses.replace(HYBRID, recurrent=recurrent), seq_len=seq_len)
    layout = make_layout("zigzag" if scheme == "ring" else "contiguous", seq_len, 4)
    sizes |= {"batch": 1, "kv_heads": 1, **kind}
    # Decays by element of a key travel as many.
    sizes["g_dim"] = 64 if len(kind) == 2 else 1
    most = {
        name: max(sent_bytes(name, layout, rank, **sizes) for rank in range(4))
        for name in ("state", "heads")
    }
    conv = max(conv_sent_bytes(layout, r, batch=1, channels=32, taps=4) for r in range(4))
    found = cost.sizes.states(4, scheme)
    assert found.scheme == min(most, key=most.get)
    assert taken in (None, found.scheme)
    assert found.num_bytes == conv + min(most.values())
    assert cost.sizes.states(1, scheme).num_bytes == 0
    columns = columns_of([{"cp": 4, "scheme": scheme, "micro_batch": 2}])
    latency, bandwidth = cost.sizes.link(torch.tensor([4]))
    seconds = found.messages * latency + 2 * found.num_bytes / bandwidth
    assert float(cost.exchange.states(columns)) == pytest.approx(float(seconds), rel=1e-12)
    # Three recurrent layers, forward and backward.
    assert float(cost.passes.terms(columns)["states"]) == pytest.approx(6 * float(seconds))


def test_a_convolution_alone_sends_its_last_positions():
    model = dataclasses.replace(HYBRID, recurrent=RecurrentSpec(4 * 64 * 64, 64, 3))
    found = cost_of(model).sizes.states(4, "ulysses")
    assert found == ("", 2 * 64 * 4, 1)


def test_lightning_attention_has_no_convolution_whose_positions_travel():
    model = dataclasses.replace(HYBRID, recurrent=RecurrentSpec(4 * 64 * 64, 192, 0, 8, 8, 8, 8))
    layout, sizes = make_layout("contiguous", 256, 4), {"heads": 8, "dim": 8, "v_dim": 8}
    most = max(sent_bytes("state", layout, rank, batch=1, **sizes) for rank in range(4))
    assert cost_of(model).sizes.states(4, "ulysses") == ("state", most, 3)


def test_a_recurrent_plan_is_written_and_read(tmp_path, transformers):
    model = made(transformers, "qwen3_next")
    options = {"num_ranks": 4, "seq_len": 256, "global_batch": 16}
    found = plan(model, "h100", **options, fixed={"cp": 2, "scheme": "ulysses", "turns": 0})
    assert f"recurrent layers share sequences by {found.states.scheme!r}" in str(found)
    assert found.states.scheme == "state" and found.time_terms()["states"] > 0
    # Whichever of them binds, there is something to do about it.
    assert {*found.time_terms(), *found.memory_terms()} <= _REMEDIES.keys()
    found.to_json(tmp_path / "plan.json")
    assert Plan.from_json(tmp_path / "plan.json") == found
    # A ring alone pays for changes of places, where launches do not hide them.
    quick = dataclasses.replace(CLUSTERS["h100"], layer_seconds=0.0)
    by_scheme = [
        plan(model, quick, **options, fixed={"cp": 2, "scheme": scheme, "turns": 0}).seconds
        for scheme in ("ulysses", "ring")
    ]
    assert by_scheme[0] < by_scheme[1]


def test_what_recurrent_models_lack_is_named():
    options = {"num_ranks": 4, "seq_len": 256, "global_batch": 16}
    with pytest.raises(ValueError, match="^plan: expected tp to be 1 for a model with recurrent"):
        plan(HYBRID, "h100", **options, fixed={"tp": 2})
    assert plan(HYBRID, "h100", **options, fixed={"tp": 1}).choice["tp"] == 1
    for change, text in (
        ({"mixers": ("recurrent",)}, "mixers to be one of each of the 4 layers"),
        ({"mixers": ("lstm",) * 4}, "mixers to be one of"),
        ({"mixers": ()}, "recurrent to be a RecurrentSpec where mixers have one"),
        ({"recurrent": None}, "recurrent to be a RecurrentSpec where mixers have one"),
        ({"one_part": True, "num_experts": 2, "top_k": 1, "num_moe_layers": 1}, "moe_layers to"),
    ):
        with pytest.raises(ValueError, match=f"^ModelSpec: expected {text}"):
            dataclasses.replace(HYBRID, **change)
    for change, text in (
        ({"num_groups": 3}, "num_groups to divide num_heads=8, got 3"),
        ({"v_dim": 0}, "v_dim to be above 0 with heads and 0 without, got 0"),
        ({"num_heads": 0}, "num_groups to be above 0 with heads and 0 without, got 4"),
    ):
        with pytest.raises(ValueError, match=f"^RecurrentSpec: expected {text}"):
            dataclasses.replace(HYBRID.recurrent, **change)


def test_recurrences_take_time_and_memory_of_their_own():
    attends = dataclasses.replace(HYBRID, num_layers=8, vocab_size=1, mixers=(), recurrent=None)
    small = RecurrentSpec(64 * 64, 32, 4, 4, 1, 8, 8)
    mixers = ("recurrent",) * 4 + ("attention",) * 4
    cheap = dataclasses.replace(attends, mixers=mixers, recurrent=small)
    costs = [cost_of(model, seq_len=4096) for model in (attends, cheap)]
    c, tokens = columns_of([{}]), 4096
    seconds = [float(cost.compute.products(c)) for cost in costs]
    scores = 4 * 2048 * 64 + 2 * attends.attention_parameters()
    less = 4 * tokens * (scores - small.flops() - 2 * small.projections)
    assert seconds[0] - seconds[1] == pytest.approx(less / (1e12 * costs[0].cluster.efficiency))
    held = [float(cost.memory.terms(c)["activations"]) for cost in costs]
    # Inputs of the recurrence and its values; convolution, gate and norm; queries, keys, values
    # and what attention gives, with a number of each head.
    kept = 4 * (2 * 8 + 4 * (8 + 8 + 1)) + 4 * (3 * 32 + 4 * 32) - 4 * (4 * 64 + 4)
    assert held[1] - held[0] == pytest.approx(4 * tokens * kept)
    # A stage of recurrences has more layers.
    ends = [[s.end for s in divide(cost, columns_of([{"pp": 2}]))] for cost in costs]
    assert ends == [[4, 8], [6, 8]]


PLACED = {
    "heads": {"cp": 2, "scheme": "ulysses"},
    "ring": {"cp": 2, "scheme": "ring"},
    "stages": {"pp": 2, "schedule": "1f1b"},
}


def applied_here(fixed):
    """Loss of one process and of a plan over ranks, and the largest difference of gradients."""
    import transformers

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(made(transformers, "qwen3_5", "cpu").float())
    whole, model = models
    cluster = ClusterSpec((Level("node", 4, 1e-6, 1e10),), {"float32": 1e11}, 4e9, 1e10, 0.5, 0.4)
    fixed = {**DEFAULTS, "micro_batch": 2, **fixed}
    options = {"num_ranks": 2, "seq_len": 16, "global_batch": 4, "dtype": "float32"}
    applied = plan(model, cluster, **options, fixed=fixed).apply(model)
    ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))
    loss = whole(input_ids=ids, labels=ids).loss
    loss.backward()
    if applied.pipeline is not None:
        batches, stages = list(ids.split(2)), applied.pipeline.stages
        losses = applied.pipeline.step(
            batches if 0 in stages else (), batches if 1 in stages else ()
        )
        found = sum(map(float, losses)) / 2
    else:
        with count_traffic() as traffic:
            part = model(input_ids=ids, labels=ids).loss
            part.backward()
        # A count of labels.
        sent = traffic.total_bytes - traffic.sent_bytes.get("all_reduce", 0)
        assert sent == applied.sent_bytes([])["attention"] > 0
        applied.sync_gradients()
        found = float(part) / 2
    wanted = {name: p.grad for name, p in whole.named_parameters()}
    off = [(p.grad - wanted[name]).abs().max() for name, p in model.named_parameters()]
    return float(loss), found, float(torch.stack(off).max())


def all_applied_here(rank):
    return {name: applied_here(fixed) for name, fixed in PLACED.items()}


@pytest.fixture(scope="module")
def applied(transformers):
    return spawn_ranks(all_applied_here, 2)


@pytest.mark.parametrize("name", PLACED)
def test_plans_are_applied_over_ranks(applied, name):
    found = [rank[name] for rank in applied]
    assert sum(loss for _, loss, _ in found) == pytest.approx(found[0][0], rel=1e-6)
    assert max(off for *_, off in found) < 1e-6
