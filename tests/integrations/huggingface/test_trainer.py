"""The Trainer of transformers saves and resumes models whose experts lie over ranks."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from hf_models import NUM_BLOCKS, assert_same_state, build, spread
from safetensors.torch import load_file
from test_saving import raised

import moe_ext
from moe_ext.distributed import full_state_dict
from moe_ext.integrations.huggingface import SavesExperts
from moe_ext.testing import spawn_ranks

BATCH, STEPS = 8, 4


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return BATCH * STEPS

    def __getitem__(self, index):
        tokens = torch.randint(0, 32, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def adapted(model):
    """With LoRA on the experts and beside them."""
    import peft

    torch.manual_seed(3)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets)
    return peft.get_peft_model(model, config)


def trainer(model, folder, *, mixed=True, **options):
    """Saves after every second step."""
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    ranks = 1
    # Alone, Accelerate would take these for a launcher's, and leave a process group to other tests.
    if dist.is_initialized():
        ranks, rank = dist.get_world_size(), dist.get_rank()
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({name: str(value) for name, value in own.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    AcceleratorState._reset_state(reset_partial_state=True)

    class Mixed(SavesExperts, Trainer):
        pass

    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH // ranks,
        learning_rate=1e-2,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **options,
    )
    data = {"train_dataset": Tokens(), "eval_dataset": Tokens()}
    return (Mixed if mixed else Trainer)(model, arguments, **data)


def spread_model(make=lambda model: model):
    return spread(make(build("mixtral")))


def run(rank, folder):
    model = spread_model()
    trainer(model, folder / "all").train()
    wanted = full_state_dict(model)
    resumed = spread_model()
    trainer(resumed, folder / "resumed").train(f"{folder}/all/checkpoint-2")
    assert_same_state(full_state_dict(resumed), wanted)
    again = spread_model()
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    tool = trainer(again, folder / "best", **best)
    tool.train()
    assert tool.state.best_model_checkpoint.endswith("-4")
    assert_same_state(full_state_dict(again), wanted)
    evaluated = spread_model()
    tool = trainer(evaluated, folder / "evaluated")
    tool.evaluate()
    tool.train()
    assert_same_state(full_state_dict(evaluated), wanted)
    # A second optimizer, of other parameters, as model_init makes one in each trial.
    for name, parameter in evaluated.named_parameters():
        parameter.requires_grad_(".experts." not in name)
    tool.optimizer = tool.lr_scheduler = None
    tool.train()
    saved = torch.load(folder / "evaluated/checkpoint-4/optimizer.pt")
    assert len(saved["state"]) == sum(p.requires_grad for p in evaluated.parameters())
    # Of adapters the adapters alone.
    lora = spread_model(adapted)
    trainer(lora, folder / "lora").train()
    more = spread_model(adapted)
    trainer(more, folder / "more").train(f"{folder}/lora/checkpoint-2")
    for mine, other in zip(more.parameters(), lora.parameters(), strict=True):
        assert torch.equal(mine, other)
    with pytest.raises(ValueError, match="save_on_each_node to be False .* share the output_dir"):
        trainer(spread_model(), folder / "nodes", save_on_each_node=True)
    return wanted


def refuse(rank, folder):
    import peft
    from transformers import TrainerCallback

    class SavesItself(TrainerCallback):
        def on_step_end(self, args, state, *_, model, **__):
            model.save_pretrained(f"{args.output_dir}/{state.global_step}")

    # Every rank knows before the first pass, whatever holds the model.
    for name, make in (("plain", lambda model: model), ("lora", adapted)):
        model = spread_model(make)
        model.register_forward_pre_hook(lambda *_: pytest.fail("a forward pass"))
        for strategy in ("steps", "epoch"):
            tool = trainer(model, folder / name, mixed=False, save_strategy=strategy)
            words = f"train: .*SavesExperts, .* got Trainer with save_strategy='{strategy}'; write"
            raised(ValueError, words, tool.train)
        assert isinstance(model, peft.PeftModel) == (name == "lora")
    # All ranks may save in a callback; rank 0, alone at the end, waits for nobody.
    moe_ext.comm.agreement.MEETING_SECONDS = 600.0
    model = spread_model()
    tool = trainer(model, folder / "no", mixed=False, save_strategy="no")
    tool.add_callback(SavesItself())
    tool.train()
    if rank == 0:
        words = "got a Trainer that calls it on rank 0 alone; .* give a Trainer .*SavesExperts"
        raised(RuntimeError, words, tool.save_model)
    moe_ext.comm.agreement.MEETING_SECONDS = 60.0
    dist.barrier()
    files = load_file(folder / f"no/{STEPS}/model.safetensors")
    assert len(files) == len(load_file(folder / "no/1/model.safetensors")) > 0


def test_a_trainer_that_would_lose_steps_is_refused(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    pytest.importorskip("peft")
    spawn_ranks(refuse, 2, tmp_path, timeout=120)


def test_parameters_of_several_dtypes_are_loaded_as_they_were_saved(tmp_path):
    pytest.importorskip("accelerate")

    def mixed():
        model = build("mixtral").bfloat16()
        for layer in model.model.layers:
            layer.mlp.gate.float()
        assert moe_ext.replace(model) == NUM_BLOCKS
        return model

    model, resumed = mixed(), mixed()
    options = {"bf16": True, "eval_strategy": "steps", "eval_steps": 2}
    trainer(model, tmp_path / "all", load_best_model_at_end=True, **options).train()
    trainer(resumed, tmp_path / "resumed", **options).train(f"{tmp_path}/all/checkpoint-2")
    assert_same_state(resumed.state_dict(), model.state_dict())


def test_two_ranks_then_one(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    pytest.importorskip("peft")
    wanted = spawn_ranks(run, 2, tmp_path, timeout=120)[0]
    files = os.listdir(tmp_path / "lora/checkpoint-2")
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    # The file is that of one process, and one process goes on from it.
    model = build("mixtral")
    alone = trainer(model, tmp_path / "alone")
    alone.model.load_state_dict(wanted)
    alone.save_model()
    names = [tmp_path / name / "model.safetensors" for name in ("alone", "all/checkpoint-4")]
    assert_same_state(*map(load_file, names))
    seen = {}

    class Look(transformers.TrainerCallback):
        def on_train_begin(self, *_, model, optimizer, **__):
            seen["model"] = copy.deepcopy(model.state_dict())
            seen["states"] = optimizer.state_dict()["state"]

    tool = trainer(build("mixtral"), tmp_path / "one")
    tool.add_callback(Look())
    tool.train(f"{tmp_path}/all/checkpoint-4")
    assert_same_state(seen["model"], wanted)
    assert tool.state.global_step == STEPS
    shapes = [state["exp_avg"].shape for state in seen["states"].values()]
    assert sorted(shapes) == sorted(p.shape for p in model.parameters())
