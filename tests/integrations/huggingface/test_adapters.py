"""Low-rank adapters on the stacked weights of experts."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hf_models import (
    NUM_BLOCKS,
    assert_near,
    assert_near_each,
    assert_same_state,
    build,
    gradients_of,
    make_batch,
    run,
    spread,
)
from rank_checks import Checks, shared_folder
from torch import nn
from torch.nn.utils import parametrize

import moe_ext
from moe_ext import distributed as md
from moe_ext.distributed.dtensor import is_dtensor

TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CHECKS = Checks()


class LowRank(nn.Module):
    """Adds a product of two small stacked matrices, as adapters on parameters do."""

    def __init__(self, weight):
        super().__init__()
        experts, outer, inner = weight.shape
        generator = torch.Generator().manual_seed(1)
        self.a = nn.Parameter(0.1 * torch.randn(experts, 2, inner, generator=generator))
        self.b = nn.Parameter(0.1 * torch.randn(experts, outer, 2, generator=generator))

    def forward(self, weight):
        return weight + self.b @ self.a


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_parametrized_weights(family):
    model = build(family)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            experts = layer.mlp.experts
            parametrize.register_parametrization(experts, name, LowRank(getattr(experts, name)))
    model.set_experts_implementation("eager")
    want, want_grads = run(model, make_batch())
    assert moe_ext.replace(model) == NUM_BLOCKS
    got, grads = run(model, make_batch())
    assert_near(got.logits, want.logits)
    assert len(grads) == 4 * NUM_BLOCKS
    assert_near_each(grads, want_grads)
    assert all(gradient.any() for gradient in grads.values())


@pytest.mark.parametrize("replace_first", [False, True])
def test_peft_targets(replace_first):
    peft = pytest.importorskip("peft")
    found = []
    for replaced in (False, True):
        model = build("mixtral", router_jitter_noise=0.1)
        model.set_experts_implementation("eager")
        if replaced and replace_first:
            moe_ext.replace(model)
        torch.manual_seed(2)
        config = peft.LoraConfig(
            r=4,
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            init_lora_weights=False,
        )
        model = peft.get_peft_model(model, config)
        if replaced and not replace_first:
            assert moe_ext.replace(model) == NUM_BLOCKS
        found.append(run(model, make_batch()))
    (want, want_grads), (got, grads) = found
    assert_near(got.logits, want.logits)
    assert_near_each(grads, want_grads)


def adapted(family, targets=TARGETS, **kwargs):
    """The same adapters on every rank, and no zeros."""
    peft = pytest.importorskip("peft")
    model = build(family, **kwargs).eval()
    torch.manual_seed(2)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj"], target_parameters=targets, init_lora_weights=False
    )
    return peft.get_peft_model(model, config)


def own_batch(rank):
    return {name: tensor[rank : rank + 1] for name, tensor in make_batch().items()}


@CHECKS(("mixtral",), ("gpt_oss",), ("mixtral", 2))
def adapters_train_as_in_one_process(family, *num_experts):
    options = dict(zip(["num_local_experts"], num_experts, strict=False))
    model, whole = spread(adapted(family, **options)), adapted(family, **options)
    whole.set_experts_implementation("eager")
    for rank in range(2):
        output = whole(**own_batch(rank))
        (output.loss / 2).backward()
        if rank == dist.get_rank():
            logits = output.logits
    output = model(**own_batch(dist.get_rank()))
    assert_near(output.logits, logits)
    output.loss.backward()
    md.sync_gradients(model)
    wanted = gradients_of(whole)
    assert_near_each(gradients_of(model), wanted)
    assert sum(map(is_dtensor, gradients_of(model).values())) == 4 * NUM_BLOCKS
    norm = md.clip_grad_norm_(model, 1e9)
    assert_near(norm, torch.nn.utils.get_total_norm(wanted.values()))


@CHECKS(("mixtral",), ("gpt_oss",))
def trained_adapters_are_those_of_one_process(family):
    """On experts and on what all ranks hold, by themselves and folded into the weights."""
    model, whole = spread(adapted(family)), adapted(family)
    whole.set_experts_implementation("eager")
    before = {name: p.detach().clone() for name, p in whole.named_parameters()}
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.5, momentum=0.9)
        for m in (model, whole)
    ]
    for _ in range(3):
        model(**own_batch(dist.get_rank())).loss.backward()
        md.sync_gradients(model)
        for rank in range(2):
            (whole(**own_batch(rank)).loss / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    moved = {name for name, p in whole.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    places = md.placements(model)
    shared = torch.cat([p.flatten() for n, p in model.named_parameters() if n not in places])
    other = shared.detach().clone()
    dist.broadcast(other, 0)
    assert torch.equal(shared, other)
    wanted = whole.merge_and_unload().state_dict()
    found = md.full_state_dict(model.merge_and_unload())
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        # Gradients differ by roundings of float32, 1e-7 of weights below one.
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)


@CHECKS(("mixtral",), ("gpt_oss",))
def adapters_are_saved_and_merged_as_in_one_process(family):
    import peft
    from safetensors.torch import load_file

    model, whole = spread(adapted(family)), adapted(family)
    with shared_folder() as name:
        folder, path = Path(name), Path(name, family)
        model.save_pretrained(path)
        if dist.get_rank() == 0:
            whole.save_pretrained(folder / f"{family}_whole")
            names = (family, f"{family}_whole")
            files = [load_file(folder / name / "adapter_model.safetensors") for name in names]
            assert_same_state(*files)
        dist.barrier()
        again = peft.PeftModel.from_pretrained(build(family), path)
        assert_same_state(md.full_state_dict(spread(again)), whole.state_dict())
        # The saved adapters in a model that is spread already.
        loaded = spread(adapted(family))
        for name, parameter in loaded.named_parameters():
            if "lora_" in name:
                parameter.data.zero_()
        saved = load_file(path / "adapter_model.safetensors")
        assert not peft.set_peft_model_state_dict(loaded, saved).unexpected_keys
        assert_same_state(md.full_state_dict(loaded), whole.state_dict())
        merged, wanted = model.merge_and_unload(), whole.merge_and_unload()
        assert_same_state(md.full_state_dict(merged), wanted.state_dict())
        batch = own_batch(dist.get_rank())
        assert_near(merged(**batch).logits, wanted(**batch).logits)
        merged.save_pretrained(folder / f"{family}_merged")
        again = type(build(family)).from_pretrained(folder / f"{family}_merged")
        assert_same_state(again.state_dict(), wanted.state_dict())


@CHECKS()
def adapters_of_transformers_itself():
    import peft
    from transformers.integrations.peft import MIN_PEFT_VERSION
    from transformers.utils.peft_utils import check_peft_version

    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError:
        return  # transformers may want a PEFT that is not released yet
    model = build("mixtral")
    config = peft.LoraConfig(r=2, target_parameters=TARGETS, init_lora_weights=False)
    model.add_adapter(config)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    spread(model)
    again = build("mixtral")
    with shared_folder() as folder:
        model.save_pretrained(folder)
        again.load_adapter(folder)
    assert_same_state(again.state_dict(), whole)


@CHECKS()
def other_adapters_are_refused():
    import peft

    batch = own_batch(dist.get_rank())
    # torch's words: adapters that come later hold all of every expert, and weights their part.
    text = "mixed torch.Tensor and DTensor"
    late = spread(build("mixtral"))
    config = peft.LoraConfig(r=2, target_parameters=TARGETS)
    with pytest.raises(RuntimeError, match=text):
        peft.get_peft_model(late, config)(**batch)
    second = spread(adapted("mixtral"))
    second.add_adapter("second", config)
    second.set_adapter("second")
    with pytest.raises(RuntimeError, match=text):
        second(**batch)
    unknown = build("mixtral")
    mlp = unknown.model.layers[0].mlp
    mlp.experts = nn.Sequential(mlp.experts, nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"of LoraConfig\(target_parameters=.*got 1.weight"):
        moe_ext.replace(unknown, ep_group=dist.group.WORLD)
    assert not any("Sharded" in type(module).__name__ for module in unknown.modules())


@pytest.mark.parametrize("name", CHECKS)
def test_over_two_ranks(name):
    pytest.importorskip("peft")
    CHECKS.assert_passed(2, name)
