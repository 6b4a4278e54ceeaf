"""Files of models whose experts lie over ranks hold all experts, or are refused."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from hf_models import FAMILIES, build
from rank_checks import Checks, assert_passed, run_checks
from safetensors.torch import load_file

import moe_ext
from moe_ext.distributed import agreement, full_state_dict
from moe_ext.testing import spawn_ranks

CHECKS = Checks()


def spread(family="mixtral"):
    model = build(family)
    moe_ext.replace(model, ep_group=dist.group.WORLD)
    return model


def raised(error, match, function, *args, **kwargs):
    with pytest.raises(error, match=match):
        function(*args, **kwargs)


def assert_same_state(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@CHECKS()
def save_pretrained_on_every_rank(folder):
    for family in FAMILIES:
        path, whole = folder / family, build(family)
        model = spread(family)
        model.save_pretrained(path)
        # The names and the layout of the family's own files.
        if dist.get_rank() == 0:
            whole.save_pretrained(folder / f"{family}_whole")
            files = [folder / name / "model.safetensors" for name in (family, f"{family}_whole")]
            assert_same_state(*map(load_file, files))
            config = (path / "config.json").read_text()
            assert f'"{type(whole).__name__}"' in config
        again = type(whole).from_pretrained(path)
        assert_same_state(again.state_dict(), whole.state_dict())
        moe_ext.replace(again, ep_group=dist.group.WORLD)
        assert_same_state(full_state_dict(again), whole.state_dict())
        # And by `load_state_dict`, into a model of other values.
        for parameter in again.parameters():
            parameter.data.zero_()
        again.load_state_dict(whole.state_dict())
        for mine, other in zip(again.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, other)


@CHECKS()
def a_rank_alone_is_refused(folder):
    model, patience = spread(), agreement.MEETING_SECONDS
    text = r"save_pretrained: expected .* of \[0, 1\] .* of rank 1 within 0.2 s; .*SavesExperts"
    agreement.MEETING_SECONDS = 0.2
    if dist.get_rank() == 0:
        raised(RuntimeError, text, model.save_pretrained, folder / "alone")
        raised(RuntimeError, "full_state_dict: expected every rank", full_state_dict, model)
        assert not (folder / "alone").exists()
    agreement.MEETING_SECONDS = patience
    dist.barrier()
    # The group stays usable, and a rank may be alone with what it needs.
    state = full_state_dict(model)
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "alone", state_dict=state)
        again = type(build("mixtral")).from_pretrained(folder / "alone")
        assert_same_state(again.state_dict(), build("mixtral").state_dict())


@CHECKS()
def a_file_that_cannot_be_written_is_told_to_all(folder):
    (folder / "file").write_text("")
    raised(ValueError, "save_pretrained: .* on rank 0", spread().save_pretrained, folder / "file/a")


@CHECKS()
def pickled_experts_are_refused(folder):
    model = spread()
    state = model.state_dict()
    whole_tensors = r"torch.save: expected whole tensors, .* ranks \[0, 1\]"
    raised(TypeError, whole_tensors, torch.save, state, io.BytesIO())
    on_cpu = {name: tensor.cpu().clone() for name, tensor in state.items()}
    raised(TypeError, whole_tensors, torch.save, on_cpu, io.BytesIO())
    raised(TypeError, "expected a module without a process group", torch.save, model, io.BytesIO())
    assert_same_state(full_state_dict(copy.deepcopy(model)), build("mixtral").state_dict())
    file = io.BytesIO()
    torch.save(full_state_dict(model), file)
    assert_same_state(torch.load(io.BytesIO(file.getvalue())), build("mixtral").state_dict())


def run(rank, folder):
    return run_checks(CHECKS, folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return spawn_ranks(run, 2, tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks(found, name):
    assert_passed(found, name)
