"""The example by plans: the same losses in every placement, and refusals before the work."""

import pytest
import train_moe_lm
from example_jobs import Ranks
from moe_lm.options import parse_args
from moe_lm.planned import read_plan
from moe_lm.runtime import UserError

from moe_ext.planner import CLUSTERS, plan

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 256}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MIXTRAL = {"model_type": "mixtral", **SIZES, **HEADS, **EXPERTS}
LLAMA = {"model_type": "llama", **SIZES, **HEADS}
# Each on two ranks, but for the last ones.
PLACEMENTS = {
    "mixtral": [{"ep": 2, "pp": 1}, {"pp": 2, "schedule": "zb-h1"}, {"cp": 2, "zero": 3}, {}],
    "llama": [{"pp": 2}, {}],
}


def made(path, fixed, num_ranks=2, config=MIXTRAL):
    job = {"global_batch": 4, "seq_len": 16, "num_ranks": num_ranks}
    plan(config, CLUSTERS["h100"], **job, fixed=fixed).to_json(path)
    return path


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("every token goes to two experts. " * 400)
    return tmp_path / "text"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("config", [MIXTRAL, LLAMA], ids=lambda config: config["model_type"])
def test_every_placement_trains_to_the_same_loss(config, tmp_path, text):
    losses = []
    for i, fixed in enumerate(PLACEMENTS[config["model_type"]]):
        num_ranks = 2 if fixed else 1
        path = made(tmp_path / f"{i}.json", fixed, num_ranks, config)
        args = ["--plan", str(path), "--data", str(text), "--steps=3", "--device=cpu", "--lr=0.1"]
        ranks = Ranks(args, num_ranks, tmp_path)
        assert ranks.wait() == [0] * num_ranks, ranks.output()
        *_, line = ranks.output().splitlines()
        assert line.startswith("result: 3 steps, loss ") and "for which the plan says" in line
        losses.append(float(line.split()[4].rstrip(",")))
        assert not [*tmp_path.glob("runs*")]
    # Sums of float32 in another order, printed with four digits.
    assert losses == pytest.approx([losses[0]] * len(losses), abs=2e-4)


def test_refuses_other_plans_and_options(tmp_path, capsys):
    path = str(made(tmp_path / "plan.json", {}))
    args = parse_args(["--plan", path], "")
    assert read_plan(args, 2).job.num_ranks == 2
    with pytest.raises(UserError, match="of 3 ranks, which torchrun started, got 2"):
        read_plan(args, 3)
    for option in ("--steps=0", "--lr=nan"):
        with pytest.raises(UserError, match=f"expected {option.split('=')[0]} to be positive"):
            read_plan(parse_args(["--plan", path, option], ""), 2)
    words = made(tmp_path / "words.json", {}, config={**MIXTRAL, "vocab_size": 100})
    with pytest.raises(UserError, match="vocabulary of 256 bytes or more, got 100"):
        read_plan(parse_args(["--plan", str(words)], ""), 2)
    (tmp_path / "none.json").write_text("[]")
    with pytest.raises(UserError, match="--plan: Plan.from_json: expected schema to be 1"):
        read_plan(parse_args(["--plan", str(tmp_path / "none.json")], ""), 2)
    for options, message in (
        (["--plan", path, "--pp", "2"], "expected --plan without --pp"),
        (["--plan", path, "--out", "runs"], "expected one of --out and --plan"),
        ([], "expected one of --out and --plan"),
    ):
        with pytest.raises(SystemExit):
            train_moe_lm.main(options)
        assert message in capsys.readouterr().err
