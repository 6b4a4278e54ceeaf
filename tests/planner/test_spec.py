"""Models that are read and counted, and numbers that no plan is made of."""

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
from planner_models import SIZES, SMALL, STEP, small_mixtral

from moe_ext.planner import (
    CLUSTERS,
    PRESETS,
    ClusterSpec,
    CodecRate,
    CostTable,
    Host,
    Job,
    Level,
    Plan,
    StepCost,
    cli,
    exchange_bytes,
    model_spec,
    plan,
    search,
)

FULL = bool(os.environ.get("MOE_EXT_FULL"))
ROOT = Path(__file__).resolve().parent.parent.parent
CLUSTER = ClusterSpec(
    (Level("node", 4, 1e-6, 1e10),),
    {"float32": 1e11},
    *(4e8, 1e10, 0.5, 0.4),
    host=Host(1e9, 1e9, 1e9),
)
JOB = Job(4, 256, 16, "float32")
RATE = CodecRate(4, 16, 8, 1.0, 2.0)
TABLE = CostTable("CPU", "cpu", 1, "2.13", 1e9, {"float32": 1e9}, {"int8": (RATE,)})
# A mesh, so that a search takes milliseconds.
FIXED = {"pp": 1, "tp": 1, "cp": 1, "ep": 4, "etp": 1, "zero": 0, "micro_batch": 1}
FIXED |= {"balance": "none", "dispatcher": "alltoall"}
GARBAGE = (
    *(-1, -256.5, 0, 0.5, 2.7, 2**40, math.nan, math.inf, True, "3", "", None, [], {}, (1,)),
    *((-1.0,), {"float32": -1.0}, {"float32": "x"}, object()),
)
# Fields whose numbers may be 0, with what 0 says.
MAY_BE_ZERO = {
    **dict.fromkeys(("num_cross_layers", "num_window_layers"), "no layer has one"),
    **dict.fromkeys(("positions", "vectors", "published"), "not counted, or not known"),
    **dict.fromkeys(("window", "shared_ffn_dim", "disk", "disk_bandwidth"), "there is none"),
    **dict.fromkeys(("latency", "layer_seconds", "node_launches"), "too short to count"),
    **dict.fromkeys(("encode_seconds", "decode_seconds"), "too short to count"),
    "copy_bandwidth": "not measured",
    "multiprocessors": "rates do not depend on shapes",
    "node_limit": "any number of nodes",
    "load": "even routing",
}
# Values of fields that say more than a number: those of `GARBAGE` that they may have.
MAY_BE = {
    **dict.fromkeys(("name", "source", "processor", "device", "torch_version"), ("3", "")),
    # Bytes of many elements.
    **dict.fromkeys(("numel", "input_bytes", "payload_bytes"), (2**40,)),
    # Tokens of one expert are of other experts than the model's.
    "load": (0.5, 2.7, 2**40),
    **dict.fromkeys(("measured", "product_rates", "codecs", "links"), ({},)),
}


def parts_of(spec, path=()):
    """Dataclasses in a specification, with the fields that lead to them."""
    yield path, spec
    for each in dataclasses.fields(spec):
        value = getattr(spec, each.name)
        if dataclasses.is_dataclass(value):
            yield from parts_of(value, (*path, each.name))
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            yield from parts_of(value[0], (*path, each.name))


def with_value(spec, path, name, value):
    """The specification with another value in one of its parts."""
    if not path:
        return dataclasses.replace(spec, **{name: value})
    held = getattr(spec, path[0])
    if isinstance(held, tuple):
        held = (with_value(held[0], path[1:], name, value), *held[1:])
    else:
        held = with_value(held, path[1:], name, value)
    return dataclasses.replace(spec, **{path[0]: held})


def is_meant(field, value):
    """Whether a field may hold a value of `GARBAGE`, from its annotation and the tables above."""
    kind, _, optional = field.type.partition(" | ")
    if field.name in MAY_BE:
        legal = MAY_BE[field.name]
        return any(
            value is each or (type(value), value) == (type(each), each) for each in legal
        ) or (type(value) is int and value == 0 and field.name in MAY_BE_ZERO)
    if value is None:
        return optional == "None"
    if kind == "bool":
        return value is True
    if type(value) not in (int, float) or not math.isfinite(value):
        return False
    if value == 0:
        return field.name in MAY_BE_ZERO
    if kind == "float":
        return value > 0 and (value <= 1 or "efficiency" not in field.name)
    return False


CASES = [
    pytest.param(place, path, each, id=".".join((type(part).__name__, each.name)))
    for place, spec in enumerate((SMALL, CLUSTER, JOB, TABLE, RATE))
    for path, part in parts_of(spec)
    for each in dataclasses.fields(part)
]


@pytest.mark.parametrize(("place", "path", "field"), CASES)
def test_no_plan_is_made_of_garbage(place, path, field):
    for value in GARBAGE:
        if is_meant(field, value):
            continue
        specs = [SMALL, CLUSTER, JOB, TABLE, RATE]
        with pytest.raises(ValueError, match="expected") as refused:
            specs[place] = with_value(specs[place], path, field.name, value)
            search(StepCost(*specs[:3]), fixed=FIXED)
        assert field.name in str(refused.value) or "float32" in str(refused.value), value


def test_numbers_that_are_meant_make_plans():
    for place, spec in enumerate((SMALL, CLUSTER, JOB, TABLE, RATE)):
        for path, part in parts_of(spec):
            for each in dataclasses.fields(part):
                for value in filter(lambda value, each=each: is_meant(each, value), GARBAGE):
                    # A disk has bytes and a rate; layers of one part have experts or a mixer.
                    if not each.name.startswith(("disk", "one_part")):
                        made = with_value(spec, path, each.name, value)
                        assert type(made) is type(spec), place


def test_files_of_clusters_hold_no_garbage():
    whole = CLUSTER.to_dict()
    fields = {each.name: each for _, part in parts_of(CLUSTER) for each in dataclasses.fields(part)}
    for path in ((), ("levels", 0), ("host",)):
        names = whole
        for key in path:
            names = names[key]
        for name in names:
            for value in GARBAGE:
                found = json.loads(json.dumps(CLUSTER.to_dict()))
                part = found
                for key in path:
                    part = part[key]
                part[name] = value
                # YAML reads 3e-6 as text.
                text = value == "3" and fields[name].type.startswith("float")
                none = name == "measured" and value is None
                if text or is_meant(fields[name], value) or none:
                    continue
                try:
                    made = ClusterSpec.of(found)
                except ValueError as error:
                    assert "expected" in str(error), (path, name, value)
                else:
                    raise AssertionError((path, name, value, made))
            found = json.loads(json.dumps(CLUSTER.to_dict()))
            part = found
            for key in path:
                part = part[key]
            part[f"{name}s"] = part.pop(name)
            with pytest.raises(
                ValueError, match="expected the fields|expected levels to be a list"
            ):
                ClusterSpec.of(found)
    with pytest.raises(ValueError, match="^ClusterSpec: expected memory to be finite, got 1000"):
        ClusterSpec.of({**whole, "memory": 10**400})
    huge = plan(SMALL, ClusterSpec.of({**whole, "memory": 2**64}), **STEP)
    assert huge.choice == plan(SMALL, ClusterSpec.of({**whole, "memory": 2.0**64}), **STEP).choice
    for levels in ([8, 12], [8, 8], [8, 4]):
        made = [{**whole["levels"][0], "size": size} for size in levels]
        with pytest.raises(ValueError, match="each a multiple of the one before, got"):
            ClusterSpec.of({**whole, "levels": made})


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.yaml", b"levels:\n - size: [2\n   memory: 3\n"),
        ("a.yml", b"memory: 1\n\tflops: 2\n"),
        ("a.yaml", b"\xff\xfe"),
        ("a.json", b"\xff\xfe"),
        ("a.json", b'{"levels": ['),
    ],
)
def test_files_of_clusters_that_cannot_be_read_are_named(name, data, tmp_path):
    (tmp_path / name).write_bytes(data)
    kind = "JSON" if name == "a.json" else "YAML"
    with pytest.raises(ValueError, match=rf"^ClusterSpec: expected .*{name} to be {kind}, got "):
        ClusterSpec.of(tmp_path / name)


TWO_NODES = dataclasses.replace(
    CLUSTER, levels=(Level("node", 8, 1e-6, 1e10), Level("network", 64, 1e-5, 1e9))
)
DENSE = dataclasses.replace(SMALL, num_experts=0, top_k=0, num_moe_layers=0)
ALONE = dataclasses.replace(CLUSTER, host=None)
# Arguments of a plan, and values of its axes.
REFUSED = [
    ({"dtype": "bfloat16"}, {}, "cluster.flops to have bfloat16"),
    ({"load": "W9"}, {}, "expected load to be a file, a number, tokens of experts or one of"),
    ({"load": "[1,"}, {}, "to hold JSON"),
    ({"load": "{}"}, {}, "to hold a list of numbers"),
    ({"load": ["a"]}, {}, "to hold numbers of tokens"),
    ({"load": ["12345678"]}, {}, "to hold numbers of tokens"),
    ({"load": dict.fromkeys(range(8), 1.0)}, {}, "to hold numbers of tokens"),
    ({"load": dict.fromkeys("abcdefgh", 1.0)}, {}, "to hold numbers of tokens"),
    ({"load": "W1", "model": DENSE}, {}, "plan: expected num_experts to be above 0 with load='W1_"),
    ({"load": [[1.0, 2.0], [1.0]]}, {}, "got steps of unlike lengths"),
    ({"load": [1.0, -1.0]}, {}, "negative or not finite"),
    ({"load": [1.0, math.nan]}, {}, "negative or not finite"),
    ({"load": [[1.0, 1.0], [0.0, 0.0]]}, {}, "a step without tokens"),
    ({"load": []}, {}, "a step without tokens"),
    ({"load": [1.0, 2.0]}, {}, "expected load to hold tokens of 8 experts, got 2"),
    ({"load": [1.0, 2.0], "model": DENSE}, {}, "expected load to hold tokens of 0 experts, got 2"),
    ({"load": math.inf}, {}, "expected load to be a finite number of at least 0, .*, got inf"),
    ({"capacity_factor": 0.0}, {}, "Job: expected capacity_factor to be above 0, got 0.0"),
    ({"local_steps": 0}, {}, "Job: expected local_steps to be at least 1, got 0"),
    ({"local_steps": 2, "local_codec": "auto"}, {}, "Job: expected local_codec to be one of"),
    ({"local_codec": "int8"}, {}, "expected local_codec to be 'none' without local steps"),
    ({"local_steps": 9}, {"zero": 3}, "plan: expected zero to be 0 with local_steps=9, got 3"),
    ({"local_steps": 9}, {"tp": 2}, "plan: expected tp to be 1 with local_steps=9, got 2"),
    ({"local_steps": 9}, {"cp": 2}, "plan: expected cp to be 1 with local_steps=9, got 2"),
    ({"local_steps": 9}, {"offload": "host"}, "offload to be none with local_steps=9, got host"),
    ({"cluster": ALONE}, {"offload": "host"}, "'none' without cluster.host, got 'host'"),
    ({}, {"xp": 1}, "fixed to name axes"),
    # There is no FSDP2 in stages.
    ({}, {"pp": 2, "zero": 3}, "to have a mesh of 4 ranks with .*'zero': 3}, got none"),
    ({}, {"kv_wire": "int8", "cp": 1}, "a mesh of 4 ranks with .*'kv_wire': 'int8'.*, got none"),
    ({}, {"offload": "host", "tp": 2}, r"tp to be in \(1,\) with offload='host', got 2"),
    ({}, {"offload": "host", "zero": 3}, r"expected zero to be in \(0, 1\) with offload"),
    ({}, {"wire": "int4"}, "^plan: expected wire to be one of .*, got 'int4'"),
    ({}, {"gradients": "topk"}, "^plan: expected gradients to be one of .*, got 'topk'"),
    ({}, {"kv_wire": "lossless"}, "^plan: expected kv_wire to be one of .*, got 'lossless'"),
    *(
        ({}, {"gradients": "int8", axis: 2}, f"^plan: expected gradients to be 'none' with {text}")
        for axis, text in (
            ("zero", "zero=2, got 'int8': FSDP2 averages"),
            ("tp", "tp=2, got 'int8': codecs take no shards"),
        )
    ),
    (
        *({}, {"wire": "lossless", "dispatcher": "allgather"}),
        "^plan: expected dispatcher to be 'alltoall', 'dedup' or 'hierarchical' with "
        "wire='lossless', got 'allgather'",
    ),
]


@pytest.mark.parametrize(("options", "fixed", "text"), REFUSED)
def test_refuses_jobs_and_values_of_axes(tmp_path, options, fixed, text):
    if options.get("load") in ("[1,", "{}"):
        (tmp_path / "load.json").write_text(options["load"])
        options = {"load": tmp_path / "load.json"}
    given = {"model": SMALL, "cluster": CLUSTER, **STEP, **options}
    with pytest.raises(ValueError, match=text):
        plan(**given, fixed=fixed)


def test_ranks_are_those_of_the_cluster():
    for ranks, text in (
        (1000, "to be at most the 64 that cluster.levels join, got 1000"),
        (12, "to fill nodes of 8, the size of cluster.levels.0., got 12"),
    ):
        with pytest.raises(ValueError, match=f"^plan: expected num_ranks {text}"):
            plan(SMALL, TWO_NODES, num_ranks=ranks, dtype="float32")


def test_refuses_models_hosts_and_rows_of_unlike_lengths():
    for change, text in (
        (
            {"num_heads": 3, "num_kv_heads": None},
            "num_heads to divide model_dim=64 without head_dim",
        ),
        ({"num_kv_heads": 3}, "num_kv_heads to divide num_heads=4, got 3"),
        ({"latent": (1, 2, 3)}, "latent to be five sizes"),
        ({"num_window_layers": 2}, "window to be above 0 with 2 layers"),
        ({"num_cross_layers": 5}, r"num_cross_layers to be at most num_layers \(4\), got 5"),
    ):
        with pytest.raises(ValueError, match=f"^ModelSpec: expected {text}"):
            dataclasses.replace(SMALL, **change)
    with pytest.raises(ValueError, match="Host: expected rate to be above 0, got 0"):
        Host(1.0, 1.0, 0)
    with pytest.raises(ValueError, match="expected disk and disk_bandwidth to be above 0 or both"):
        Host(1.0, 1.0, 1.0, disk=1.0)
    text = "^exchange_bytes: expected wire to have formats of rows of one length, got 'lossless'"
    with pytest.raises(ValueError, match=text):
        exchange_bytes([torch.tensor([[0, 5]])], 0, num_experts=8, model_dim=64, wire="lossless")


def test_a_plan_can_say_all_that_a_job_can(tmp_path, monkeypatch):
    """Also by the command, and nothing is lost on the way."""
    job = Job(*(4, 256, 16, "float32", 0.5, 2.0, True, True, True, True, 2, "float8", 2, "int8"))
    options = dataclasses.asdict(job)
    assert all(options[each.name] != each.default for each in dataclasses.fields(job))
    cluster = dataclasses.replace(CLUSTER, flops={"float32": 1e11, "float8": 2e11})
    made = plan(SMALL, cluster, **options, fixed={"pp": 1, "micro_batch": 1})
    assert made.job == job
    parser, given = argparse.ArgumentParser(), {}
    cli.add_arguments(parser)
    words = ["--model", "llama-3-8b", "--cluster", "h100", "--out", str(tmp_path / "plan.json")]
    for name, value in options.items():
        words.append("--gpus" if name == "num_ranks" else f"--{name.replace('_', '-')}")
        words += [] if value is True else [str(value)]

    def taken(*_, **more):
        given.update(more)
        return made

    monkeypatch.setattr(cli, "plan", taken)
    assert cli.run(parser.parse_args(words)) == 0
    assert options.items() <= given.items()


@pytest.fixture(scope="module")
def families():
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("families", ROOT / "tools/planner_families.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_families_of_transformers_are_counted_or_refused(families):
    """Those whose parts have a formula have their own number of parameters, within 1 %."""
    every = sorted(families.families(), key=lambda each: each[0])
    assert len(every) > 150
    counted, refused = [], []
    for name, config in every if FULL else every[::6]:
        found = families.read(config)
        if found is None:
            continue
        if isinstance(found[1], str):
            assert re.match("model_spec: expected .* got |ModelSpec: expected ", found[1]), name
            refused.append(name)
        else:
            assert abs(found[1]) <= 0.01, (name, found)
            counted.append(name)
    assert len(counted) > len(refused) > 3


# Sizes of small models, with what was taken for something else.
READ = {
    "starcoder2": ({}, {"gated": False}),
    "gpt_neox": ({}, {"gated": False}),
    "deepseek_v3": (
        {"q_lora_rank": None, "first_k_dense_replace": 1, "num_experts_per_tok": 2, "n_group": 1,
         "topk_group": 1},
        {"latent": (0, 512, 128, 64, 128), "moe_layers": (), "num_moe_layers": 2},
    ),
    "ernie4_5_moe": (
        {"moe_k": 2, "moe_num_experts": 8, "moe_layer_start_index": 1, "moe_num_shared_experts": 1,
         "moe_intermediate_size": 48},
        {"top_k": 2, "num_experts": 8, "num_moe_layers": 2, "shared_ffn_dim": 48},
    ),
    "qwen3_moe": (
        {"mlp_only_layers": [1], "num_experts": 8, "moe_intermediate_size": 48, "head_dim": 8},
        {"moe_layers": (0, 2), "dense_ffn_dim": 96},
    ),
    "mistral": ({"sliding_window": 64}, {"window": 64, "num_window_layers": 3}),
    "llama": ({"sliding_window": 64}, {"window": 0, "num_window_layers": 0}),
    "phi3": ({}, {"gated": True}),
    "gpt2": ({"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 50}, {"positions": 50}),
    "falcon": ({"num_kv_heads": None}, {"kv_dim": 8, "gated": False}),
}  # fmt: skip
SIZES = {**SIZES, "intermediate_size": 96, "num_hidden_layers": 3, "num_key_value_heads": 4}


@pytest.mark.parametrize("family", READ)
def test_sizes_are_read(family):
    transformers = pytest.importorskip("transformers")
    given, wanted = READ[family]
    sizes = {"num_hidden_layers": 3, "vocab_size": 64} if family == "gpt2" else SIZES
    config = {**sizes, **given, "model_type": family, "pad_token_id": None}
    spec = model_spec(config)
    assert {name: getattr(spec, name) for name in wanted} == wanted
    made = transformers.CONFIG_MAPPING[family].from_dict(config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    count = sum(p.numel() for p in model.parameters())
    assert spec.parameters() == pytest.approx(count, rel=0.01) and model_spec(model) == spec


def test_layers_without_a_cost_are_named():
    transformers = pytest.importorskip("transformers")
    small = {**SIZES, "num_key_value_heads": 2}
    for config, text in (
        ({**small, "model_type": "zamba", "num_hidden_layers": 12, "attention_head_dim": 16},
         "'shared_transf', ZambaAttentionDecoderLayer: weights that are those of layer 2 have no"),
        ({"model_type": "zaya"}, "ZayaAttention: its convolutions have no cost"),
        ({"model_type": "big_bird"}, "BigBirdBlockSparseAttention: its scores have no cost"),
        ({"model_type": "bart", "d_model": 32, "decoder_attention_heads": 4},
         "in layer 0 'encoder_attn', BartAttention: a second attention has no cost"),
        ({**small, "model_type": "t5gemma"}, "to make a causal language model"),
        ({**small, "model_type": "mixtral", "num_attention_heads": 0}, "transformers to make"),
        ({**small, "model_type": "none"}, "model_type that transformers knows, got 'none'"),
        ({"hidden_size": 3}, "model_type that transformers knows, got None"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^model_spec: expected .*{re.escape(text)}"):
            model_spec(config)
    # One layer that something was put into.
    model = small_mixtral()
    spec = model_spec(model)
    model.model.layers[1].self_attn.q_proj = torch.nn.Conv1d(32, 32, 3)
    with pytest.raises(ValueError, match="in layer 1 'self_attn', .*: its convolutions have no"):
        model_spec(model)
    model.model.layers[1].self_attn = torch.nn.Sequential(
        torch.nn.Conv1d(32, 32, 3, groups=32), torch.nn.Linear(32, 32)
    )
    model.model.layers[1].self_attn.A_log = torch.nn.Parameter(torch.ones(2, 4, 8))
    with pytest.raises(ValueError, match="in layer 1 'self_attn', .*: its states have no cost"):
        model_spec(model)
    model = small_mixtral()
    model.model.layers[1].self_attn.gate = torch.nn.Linear(32, 32)
    with pytest.raises(ValueError, match="expected gates of attention of all layers .* alike"):
        model_spec(model)
    model.model.layers[1].self_attn.gate = torch.nn.Linear(32, 64)
    with pytest.raises(ValueError, match="in layer 1 'self_attn', .*: 5120 parameters in matrices"):
        model_spec(model)
    model = small_mixtral()
    model.tower = torch.nn.Linear(32, 32)
    with pytest.raises(ValueError, match="; 'tower.weight' has no cost"):
        model_spec(model)
    assert spec.parameters() == sum(p.numel() for p in small_mixtral().parameters())
    assert transformers


def test_a_configuration_of_garbage_makes_no_model():
    pytest.importorskip("transformers")
    config = small_mixtral(num_hidden_layers=1).config.to_dict()
    sizes = [name for name in (*SIZES, "num_local_experts", "num_experts_per_tok")]
    for name in sizes:
        for value in (-1, 0, 0.5, 2.7, math.nan, "3", [], {}, object()):
            with pytest.raises(ValueError, match="expected"):
                model_spec({**config, name: value})
    for found in ([], "abc", 3, None):
        with pytest.raises(ValueError, match="expected"):
            model_spec(found) if isinstance(found, str) else model_spec(json.dumps(found))


def run(tmp_path, capsys, **options):
    """Exit status and error text of the command; an option's list is given one by one."""
    whole = {"model": "llama-3-8b", "cluster": "h100", "gpus": "8", "out": str(tmp_path / "p.json")}
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    pairs = [
        (f"--{name.replace('_', '-')}", str(value))
        for name, held in {**whole, **options}.items()
        for value in (held if isinstance(held, list) else [held])
    ]
    status = cli.run(parser.parse_args([word for pair in pairs for word in pair]))
    return status, capsys.readouterr().err


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    files = {"list.json": [], "text.json": "abc"}
    cluster = CLUSTERS["h100"].to_dict()
    files |= {"flops.json": {**cluster, "flops": [1.0]}, "host.json": {**cluster, "host": "big"}}
    for name, held in files.items():
        (tmp_path / name).write_text(json.dumps(held))
    (tmp_path / "nan.json").write_text(json.dumps({**cluster, "layer_seconds": math.nan}))
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "p.json")
    for options, text in (
        ({"model": tmp_path / "list.json"}, "expected a configuration to be a mapping, got"),
        ({"model": tmp_path / "text.json"}, "expected a configuration to be a mapping, got 'abc'"),
        ({"cluster": tmp_path / "flops.json"}, "expected flops to be Mapping"),
        ({"cluster": tmp_path / "host.json"}, "Host: expected a mapping of its fields, got 'big'"),
        ({"cluster": tmp_path / "nan.json"}, "expected layer_seconds to be finite, got nan"),
        ({"cluster": tmp_path / "list.json"}, "to hold a mapping"),
        ({"cluster": "none"}, "expected cluster to be one of"),
        ({"report": tmp_path / "none" / "page.html"}, "expected --report to be a file in a"),
        ({"out": tmp_path / "none" / "plan.json"}, "expected --out to be a file in a folder"),
        ({"report": tmp_path}, "expected --report to be a file in a folder that exists, got"),
        ({"out": tmp_path}, "expected --out to be a file in a folder that exists, got"),
        ({"gpus": 0}, "Job: expected num_ranks to be at least 1, got 0"),
        ({"gpus": 12}, "expected num_ranks to fill nodes of 8"),
        ({"seq_len": -1}, "Job: expected seq_len to be at least 1"),
        ({"layer_dtype": "float8"}, "expected cluster.flops to have float8"),
        ({"load": "-1"}, "Job: expected load to be"),
        ({"fix": "pp=0"}, "expected pp to be a whole number of at least 1"),
        ({"fix": ["pp=1", "pp=2"]}, "expected --fix to name each axis once, got ['pp=1', 'pp=2']"),
        ({"report": tmp_path / "p.json"}, "expected --report to be another file than --out, got"),
        ({"report": link}, "expected --report to be another file than --out, got"),
        *(
            ({name: tmp_path / "list.json", of: tmp_path / "list.json"}, f"--{of} to be another")
            for name in ("model", "cluster", "load", "costs")
            for of in ("out", "report")
        ),
    ):
        status, said = run(tmp_path, capsys, **options)
        assert status == 2 and text in said, (options, said)
    assert not (tmp_path / "p.json").exists() and (tmp_path / "list.json").read_text() == "[]"


def test_files_of_plans_are_whole(tmp_path):
    made = plan(SMALL, CLUSTER, **STEP, fixed=FIXED)
    path = tmp_path / "plan.json"
    made.to_json(path)
    whole = path.read_text()
    assert Plan.from_json(path) == made
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="^Plan.from_json: expected .*plan.json to hold JSON"):
        Plan.from_json(path)
    for axis in ("pp", "tp", "ep", "micro_batch", "zero", "schedule"):
        held = json.loads(whole)
        del held["choice"][axis]
        path.write_text(json.dumps(held))
        with pytest.raises(ValueError, match=f"expected choice to have .'{axis}'.*, got"):
            Plan.from_json(path)
    for change in (
        *({"model": None}, {"job": {}}, {"cluster": {}}, {"choice": {}}, {"stages": [{}]}),
        *(
            {"pareto": 3},
            {"num_points": 0.5},
            {"num_too_large": -1},
            {"proven": "no"},
            {"more": 1},
            {"choice": {**made.choice, "pp": 0}},
        ),
    ):
        path.write_text(json.dumps({**json.loads(whole), **change}))
        with pytest.raises(ValueError, match="expected"):
            Plan.from_json(path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"more": 1}, "more"),
        ({"seconds": -1.0}, "expected seconds to be above 0, got -1.0"),
        ({"memory": math.inf}, "expected memory to be finite, got inf"),
        ({"choice": {"more": 1}}, "to name axes of .*, got 'more'"),
        ({"choice": {"zero": 7}}, r"expected zero to be one of \(0, 1, 2, 3\), got 7"),
        ({"choice": {"recompute": 2}}, r"expected recompute to be one of \(0, 1\), got 2"),
        ({"choice": {"turns": 3}}, r"expected turns to be one of \(0, 1\), got 3"),
        ({"choice": {"pp": 10**30}}, "expected pp to be below 2147483648"),
        ({"choice": {"cp": 4}}, "expected choice to be a placement of the model on 4 ranks"),
        ({"choice": {"ep": 3}}, "expected choice to be a placement of the model on 4 ranks"),
        ({"choice": {"zero": 3}}, "expected choice to be a placement of the model on 4 ranks"),
        ({"choice": {"gradients": "int8", "tp": 2}}, "expected gradients to be 'none' with tp=2"),
        ({"stages": [{"start": 0, "end": -4, "again": []}]}, "StageLayers: expected end to be at"),
        ({"stages": [{"start": 0, "end": 4, "again": []}]}, "expected 2 stages of 4 layers, got 1"),
        (
            {"stages": [{"start": 0, "end": 2, "again": []}] * 2},
            "expected stages to have layers in",
        ),
        ({"stages": [{"start": 0, "end": 4, "again": [5]}]}, "expected stages to have layers in"),
    ],
)
def test_files_of_plans_have_placements_of_their_job(tmp_path, change, text):
    made = plan(SMALL, CLUSTER, **STEP, fixed=FIXED | {"pp": 2, "ep": 2, "schedule": "1f1b"})
    path = tmp_path / "plan.json"
    made.to_json(path)
    whole = path.read_text()
    for of in (None, "runners_up", "pareto"):
        held = json.loads(whole)
        each = held[of][0] if of else held
        for name, value in change.items():
            each[name] = {**each[name], **value} if name == "choice" else value
        path.write_text(json.dumps(held))
        with pytest.raises(ValueError, match=f"^Plan.from_json: expected .*plan.json .*{text}"):
            Plan.from_json(path)


def test_a_plan_is_told_with_its_model_and_batch():
    made = plan(
        PRESETS["llama-3-8b"], "h100", num_ranks=8, global_batch=16, fixed=FIXED | {"ep": 1}
    )
    first = str(made).splitlines()[0]
    for text in ("llama-3-8b", "8.03B parameters", "16 sequences of 4096 tokens", "bfloat16"):
        assert text in first
    assert "--plan other/p.json" in made.commands(plan_file="other/p.json")["torchrun"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_hidden_layers": 3}, "num_layers=2, for which the plan was made, got 3"),
        ({"vocab_size": 65}, "vocab_size=64, .*, got 65"),
        ({"num_local_experts": 4}, "num_experts=8, .*, got 4"),
        ({"intermediate_size": 40}, "ffn_dim=48, .*, got 40"),
        ({"num_key_value_heads": 4}, "kv_dim=16, .*, got 32"),
        ({"tie_word_embeddings": True}, "tied=False, .*, got True"),
        ({"head_dim": 16}, "heads_dim=32, .*, got 64"),
    ],
)
def test_apply_compares_all_sizes(options, text):
    pytest.importorskip("transformers")
    options_of = {"num_ranks": 1, "seq_len": 16, "global_batch": 8, "dtype": "float32"}
    made = plan(small_mixtral(), CLUSTER, **options_of)
    model = small_mixtral(**options)
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=f"Plan.apply: expected model to have {text}"):
        made.apply(model)
    assert before == [type(module) for module in model.modules()]
    hidden = dataclasses.replace(made, job=dataclasses.replace(made.job, hidden_gradients=True))
    with pytest.raises(ValueError, match="expected a plan without hidden_gradients"):
        hidden.apply(small_mixtral())


def test_apply_takes_the_model_of_the_plan_alone():
    transformers = pytest.importorskip("transformers")
    options = {"num_ranks": 1, "seq_len": 16, "global_batch": 8, "dtype": "float32"}

    def windowed(window):
        config = transformers.MistralConfig(**SIZES, sliding_window=window)
        return transformers.MistralForCausalLM(config)

    def positioned(count):
        sizes = {"vocab_size": 64, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": count}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))

    for wanted, other, text in (
        (windowed(8), windowed(4), "model to have window=8, .*, got 4"),
        (windowed(8), windowed(None), "model to have num_window_layers=3, .*, got 0"),
        (windowed(None), windowed(8), "model to have num_window_layers=0, .*, got 3"),
        (positioned(32), positioned(16), "model to have positions=32, .*, got 16"),
        (windowed(8), torch.nn.Linear(32, 32), "model to be a transformers model, got Linear"),
        (windowed(8), None, "model to be a transformers model, got NoneType"),
    ):
        made = plan(wanted, CLUSTER, **options)
        with pytest.raises(ValueError, match=f"^Plan.apply: expected {text}"):
            made.apply(other)
        assert made.apply(wanted).model is wanted


def test_progress_is_told_without_a_terminal(capsys, monkeypatch):
    shown, waits = cli._Progress(), []

    def wait(seconds):
        """Over the fourth time; as much of the search is done in between."""
        if waits:
            shown(*[(3, 10), (10, 10), (10, 10)][len(waits) - 1])
        waits.append(seconds)
        return len(waits) == 4

    monkeypatch.setattr(shown._over, "wait", wait)
    with shown:
        pass
    lines = capsys.readouterr().err.splitlines()
    assert "reading the model" in lines[0] and "3/10 meshes, costing" in lines[1]
    assert "10/10 meshes, simulating pipelines" in lines[2]
    # The first one after a second, and ever fewer.
    assert waits == [1.0, 2.0, 4.0, 8.0]
    found = []
    cost = StepCost(SMALL, CLUSTER, JOB)
    result = search(
        cost, fixed={**FIXED, "pp": 2, "ep": 2}, progress=lambda *each: found.append(each)
    )
    # Each of the pipelines that are simulated is told, too.
    assert len(found) > 3 and found[-1][0] == found[-1][1] and result.best is not None
