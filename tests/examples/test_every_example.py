"""Every example says in its docstring how it is started and what one sees, and ends with a result.

A new example has to be among `STARTED`, which starts each at a small size.
"""

import ast
import json
import re
import sys

import pytest
from example_jobs import EXAMPLES, TINY, Ranks, snapshot

DIGITS = "--steps=2 --batch=16"
SMALL = "--batch=4 --seq-len=16 --model-dim=32 --num-layers=2 --num-heads=2 --ffn-dim=32"
WORDS = "--steps=2 --batch=2 --seq-len=32"
# Ranks, and options; {data} is a file of text, {out} a folder.
STARTED = {
    "all_reduce": (2, "--numel=1000 --servers=1"),
    "deepspeed_sample": (2, f"{DIGITS} --ep-size=2"),
    "finetune_hf_moe": (1, f"{WORDS} --data={{data}} --out={{out}}"),
    "lean_block": (1, "--tokens=64 --dim=32"),
    "offload_to_files": (1, "--folder={out} --layers=2 --dim=16 --steps=2"),
    "paddle_sample": (2, DIGITS),
    "parameter_server": (2, "--steps=2"),
    "rl_weight_sync": (2, "--steps=2"),
    "train_compressed_ddp": (2, f"--steps=2 {SMALL} --data={{data}} --out={{out}}"),
    "train_diloco": (
        2,
        "--pretrain=1 --steps=2 --sync-every=2 --methods=DeMo --data={data} --out={out}/p.png",
    ),
    "train_fsdp2": (1, DIGITS),
    "train_long_context": (1, "--steps=2 --seq-len=64 --measure --data={data} --out={out}"),
    "train_moe_lm": (1, f"{' '.join(TINY)} --steps=2 --data={{data}} --out={{out}}"),
    "train_pipeline": (1, DIGITS),
    "train_with_frameworks": (1, f"{WORDS} --tool=fabric --data={{data}}"),
    "upcycle": (1, f"{WORDS} --data={{data}}"),
}


def texts():
    found = {path.stem: path.read_text() for path in sorted(EXAMPLES.glob("*.py"))}
    # The others are parts of these.
    return {name: text for name, text in found.items() if '__name__ == "__main__"' in text}


# Command and last line by the name of the file, as examples/README.md has them.
LISTED = {
    name: (command, last)
    for name, command, last in re.findall(
        r"^\| \[(\w+)\.py\]\(\1\.py\) \| [^|]+ \| `(.+)` \| `(result: .+)` \|$",
        (EXAMPLES / "README.md").read_text(),
        re.MULTILINE,
    )
}


def test_every_example_is_started_here_and_listed():
    assert STARTED.keys() == texts().keys() == LISTED.keys()


@pytest.mark.parametrize("name", STARTED)
def test_the_docstring_says_how_it_is_started_and_what_one_sees(name):
    sections = ast.get_docstring(ast.parse(texts()[name])).split("\n\n")
    started = [part for part in sections if f"examples/{name}.py" in part]
    assert started and all(part.startswith("    ") for part in started)
    assert any(f"    {LISTED[name][0]}" in part.splitlines() for part in started)
    (output,) = [part for part in sections if part.startswith("Output: ")]
    assert "The last line " in output.replace("\n", " ")


@pytest.mark.parametrize("name", STARTED)
def test_the_last_line_is_the_result(name, tmp_path, text_file):
    num_ranks, options = STARTED[name]
    args = options.format(data=text_file, out=tmp_path / "out").split()
    ranks = Ranks(args, num_ranks, tmp_path, script=f"{name}.py")
    ranks.finish()
    lines = [ranks.output(rank).strip().splitlines() for rank in range(num_ranks)]
    results = [line for own in lines for line in own if line.startswith("result: ")]
    assert len(results) == 1 and any(own and own[-1] == results[0] for own in lines), lines
    listed = re.escape(LISTED[name][1]).replace(r"\.\.\.", ".+")
    assert re.fullmatch(listed, results[0]), results


# Options beside those of `STARTED`, for each example one or more to a line, and the message.
MISTAKES = {
    "deepspeed_sample": """
        --batch=0 | expected --batch to be at least 1, got 0
        --ep-size=1 --num-experts=3 --top-k=4 | expected top_k to be in 1..num_experts=3, got 4
        --ep-size=3 | expected num_experts to be a multiple of ep_size=3""",
    "finetune_hf_moe": """
        --ep=3 | expected --ep to divide the 1 ranks and the 8 experts, got 3
        --steps=0 | expected --steps to be at least 1, got 0
        --model=/nowhere | expected --model to be a folder of save_pretrained
        --data=/nowhere | expected --data to be a text file or a folder""",
    "paddle_sample": "--batch=0 | expected --batch to be at least 1, got 0",
    "train_compressed_ddp": """
        --compression=int3 | expected a compression to be one of none, bf16, int8
        --compression=int8:0.1 | expected a density after topk alone, got 'int8:0.1'
        --compare topk:few | expected topk:DENSITY to hold a number, got 'topk:few'
        --compare none none | expected --compare to name each setting once
        --density=0 | expected the density to be above 0 and at most 1, got 0.0
        --density=nan | expected the density to be above 0 and at most 1, got nan
        --steps=0 | expected --steps to be positive, got 0
        --dense-steps=-1 | expected --dense-steps to be at least 0, got -1
        --compression=onebit --dense-steps=0 | --dense-steps to be at least 1 for onebit, got 0
        --model-dim=15 | expected --model-dim to be a multiple of twice --num-heads 2
        --data=/nowhere | expected --data to be a text file or a folder""",
    "train_fsdp2": """
        --load=/usr | expected --load to be the folder of a checkpoint
        --ep=2 | expected --ep to divide the number of ranks, 1""",
    "train_long_context": """
        --seq-len=0 | expected --seq-len to be positive, got 0
        --measure 0 | expected --measure to be numbers of ranks, got [0]
        --check-every=-1 | expected --check-every to be at least 0, got -1
        --model-dim=15 | expected --model-dim to be a multiple of twice --num-heads
        --scheme=star | expected scheme to be one of
        --precision=double | expected precision to be one of""",
    "train_moe_lm": """
        --steps=0 | expected --steps to be positive, got 0
        --lr=nan | expected --lr to be positive, got nan
        --warmup=-1 | expected --warmup to be at least 0, got -1
        --model-dim=18 | expected --model-dim to be a multiple of twice --num-heads 2
        --num-layers=0 | expected --num-layers to be positive, got 0
        --top-k=5 | expected --top-k to be at most --num-experts 4, got 5
        --ep=2 | expected --ep to divide the number of ranks 1, got 2
        --prompt= | expected --prompt to be at least one byte
        --data=/nowhere | expected --data to be a text file or a folder, got a path that does not
        --capacity-factor=-1 | Capacity: expected factor to be positive, got -1""",
    "train_pipeline": """
        --micro-batches=0 | expected --micro-batches to be at least 1, got 0
        --save-every=0 | expected --save-every to be at least 1, got 0
        --schedule=chimera | num_ranks and num_micro_batches of chimera to be even
        --micro-batches=3 | expected --batch to be a multiple of 3, got 16""",
    "upcycle": """
        --method=granular --granularity=5 --data=/nowhere | to be a multiple of granularity=5, got 8
        --every=9 --data=/nowhere | expected model to have at least every=9 feed-forward networks
        --batch=0 | expected --batch to be at least 1, got 0""",
}


# Options that the examples of torchrun share, and what each has to be.
SHARED = {
    "--lr=-1": "positive",
    "--timeout=inf": "positive and below 1e+09, got inf",
    "--seed=-1": "at least 0",
    "--seed=4294967296": "at least 0 and below 4294967296, got 4294967296",
}
# Folders that the examples write to after training, and which must be there before.
WRITTEN = {
    "--out": ["finetune_hf_moe", "train_compressed_ddp", "train_long_context", "train_moe_lm"]
    + ["train_with_frameworks", "upcycle"],
    "--save": ["train_fsdp2", "train_pipeline"],
}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (name, *map(str.strip, line.split(" | ")))
        for name, text in MISTAKES.items()
        for line in text.strip().splitlines()
    ]
    + [
        (name, option, f"expected {option.split('=')[0]} to be {rule}")
        for name in (*MISTAKES, "train_with_frameworks")
        for option, rule in SHARED.items()
    ]
    + [
        (name, "--out=/proc/version", "expected --out to be a folder, got a file: /proc/version")
        for name in ("finetune_hf_moe", "train_moe_lm", "train_with_frameworks", "upcycle")
    ]
    + [
        (name, f"{option}=/proc/version/it", "Not a directory: '/proc/version/it'")
        for option, names in WRITTEN.items()
        for name in names
    ],
)
def test_a_mistake_is_told_in_a_line(name, options, message, run_here, tmp_path, text_file):
    before = snapshot(tmp_path)
    started = STARTED[name][1].format(data=text_file, out=tmp_path / "out")
    code, _, stderr = run_here(name, *started.split(), *options.split())
    assert code == 2 and message in stderr
    # The model that is upcycled was trained before.
    assert re.sub(r"\rdense: .*\n", "", stderr).count("\n") == 1
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lean_block", "--tokens=0", "expected --tokens to be positive, got 0"),
        ("lean_block", "--dim=30", "expected --dim to be a multiple of --heads 8, got 30"),
        ("offload_to_files", "--layers=0", "expected --layers to be positive, got 0"),
        ("offload_to_files", "--lr=nan", "expected --lr to be positive, got nan"),
        ("offload_to_files", "--folder=/proc/version", "File exists: '/proc/version'"),
        ("train_diloco", "--sync-every=0", "expected --sync-every to be positive, got 0"),
        ("train_diloco", "--steps=0", "expected --steps to be positive, got 0"),
        ("train_diloco", "--out=/proc", "expected --out to be a picture, got a folder: /proc"),
    ],
)
def test_a_mistake_is_told_below_the_usage(name, options, message, run_here, tmp_path, capsys):
    started = STARTED[name][1].format(data=tmp_path, out=tmp_path / "out")
    with pytest.raises(SystemExit) as ended:
        run_here(name, *started.split(), *options.split())
    assert ended.value.code == 2 and message in capsys.readouterr().err
    assert not snapshot(tmp_path)


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("train_compressed_ddp", "--compression=bf16", "runs"),
        ("train_long_context", "--measure=1", "costs"),
    ],
)
def test_without_matplotlib_there_is_no_picture(
    name, options, key, run_here, tmp_path, text_file, monkeypatch
):
    for module in [module for module in sys.modules if module.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    started = STARTED[name][1].format(data=text_file, out=tmp_path / "out")
    code, stdout, stderr = run_here(name, *started.split(), *options.split())
    assert code == 0, stderr
    assert "no picture" in stdout
    assert len(json.loads((tmp_path / "out" / "result.json").read_text())[key]) == 1
