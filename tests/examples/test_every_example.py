"""Every example says in its docstring how it is started and what one sees, and ends with a result.

A new example has to be among `STARTED`, which starts each at a small size.
"""

import ast
import re

import pytest
from example_jobs import EXAMPLES, TINY, Ranks

DIGITS = "--steps=2 --batch=16"
WORDS = "--steps=2 --batch=2 --seq-len=32"
# Ranks, and options; {data} is a file of text, {out} a folder.
STARTED = {
    "all_reduce": (2, "--numel=1000 --servers=1"),
    "deepspeed_sample": (1, DIGITS),
    "finetune_hf_moe": (1, f"{WORDS} --data={{data}} --out={{out}}"),
    "lean_block": (1, "--tokens=64 --dim=32"),
    "offload_to_files": (1, "--folder={out} --layers=2 --dim=16 --steps=2"),
    "paddle_sample": (1, DIGITS),
    "parameter_server": (2, "--steps=2"),
    "rl_weight_sync": (2, "--steps=2"),
    "train_compressed_ddp": (2, "--steps=6 --batch=4 --seq-len=16 --data={data} --out={out}"),
    "train_diloco": (
        2,
        "--pretrain=1 --steps=2 --sync-every=2 --methods=DeMo --out={out}/p.png",
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
    assert ranks.wait() == [0] * num_ranks, "\n".join(map(ranks.output, range(num_ranks)))
    lines = [ranks.output(rank).strip().splitlines() for rank in range(num_ranks)]
    results = [line for own in lines for line in own if line.startswith("result: ")]
    assert len(results) == 1 and any(own and own[-1] == results[0] for own in lines), lines
    listed = re.escape(LISTED[name][1]).replace(r"\.\.\.", ".+")
    assert re.fullmatch(listed, results[0]), results
