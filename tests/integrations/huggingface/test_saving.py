"""Files of models whose experts lie over ranks hold all experts, or are refused."""

import contextlib
import copy
import io
import json
import unittest.mock

import pytest
import torch
import torch.distributed as dist
from hf_models import FAMILIES, assert_same_state, build, spread
from rank_checks import Checks, assert_passed, run_checks
from safetensors.torch import load_file
from transformers import modeling_utils

from moe_ext.comm import agreement
from moe_ext.distributed import full_state_dict
from moe_ext.distributed.dtensor import local_part
from moe_ext.integrations.huggingface import from_pretrained
from moe_ext.testing import spawn_ranks

CHECKS = Checks()


def spread_model(family="mixtral"):
    return spread(build(family))


def raised(error, match, function, *args, **kwargs):
    with pytest.raises(error, match=match):
        function(*args, **kwargs)


@CHECKS()
def save_pretrained_on_every_rank(folder):
    for family in FAMILIES:
        path, whole = folder / family, build(family)
        model = spread_model(family)
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
        assert_same_state(full_state_dict(spread(again)), whole.state_dict())
        # And by `load_state_dict`, into a model of other values.
        for parameter in again.parameters():
            parameter.data.zero_()
        again.load_state_dict(whole.state_dict())
        for mine, other in zip(again.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, other)


class Counted:
    """A tensor in a file, that counts what is read of it."""

    def __init__(self, tensor):
        self.tensor, self.read = tensor, 0
        self.get_shape, self.get_dtype = tensor.get_shape, tensor.get_dtype

    def __getitem__(self, key):
        found = self.tensor[key]
        self.read += found.numel()
        return found


@contextlib.contextmanager
def reads_of_files():
    """Name to number of elements that transformers reads of files inside."""
    counted, opened = {}, modeling_utils.safe_open

    class File:
        def __init__(self, *args, **options):
            self.file = opened(*args, **options).__enter__()
            self.keys = self.file.keys

        def get_slice(self, name):
            counted[name] = Counted(self.file.get_slice(name))
            return counted[name]

        def __enter__(self):
            return self.file

        def __exit__(self, *error):
            self.file.__exit__(*error)

    with unittest.mock.patch.object(modeling_utils, "safe_open", File):
        yield counted


@CHECKS()
def every_rank_writes_and_reads_its_own(folder):
    for family in FAMILIES:
        path, whole = folder / f"{family}_by_ranks", build(family)
        if dist.get_rank() == 0:
            path.mkdir()
            for stale in ("model.safetensors", "model-00007-of-00007.safetensors"):
                (path / stale).touch()
        dist.barrier()
        model = spread_model(family)
        model.save_pretrained(path, by_ranks=True)
        dist.barrier()
        files = sorted(file.name for file in path.glob("*.safetensors"))
        assert len(files) == 2 and files[0] == "model-00001-of-00002.safetensors"
        index = json.loads((path / "model.safetensors.index.json").read_text())
        names = {name: file for file in files for name in load_file(path / file)}
        assert index["weight_map"] == names
        wanted = load_file(folder / f"{family}_whole" / "model.safetensors")
        assert names.keys() == wanted.keys()
        assert not list(path.glob(".rank*"))
        again = type(whole).from_pretrained(path)
        assert_same_state(again.state_dict(), whole.state_dict())
        for files in (path, folder / family):
            with reads_of_files() as counted:
                mine = from_pretrained(type(whole), files, ep_group=dist.group.WORLD)
            assert_same_state(full_state_dict(mine), whole.state_dict())
            for (name, one), other in zip(mine.named_parameters(), model.parameters(), strict=True):
                assert torch.equal(one, other), name
            num_read = sum(tensor.read for tensor in counted.values())
            num_held = sum(local_part(tensor).numel() for tensor in model.state_dict().values())
            assert num_read == num_held, (family, files.name, num_read, num_held)
        options = {"ep_group": dist.group.WORLD, "output_loading_info": True}
        mine, told = from_pretrained(type(whole), path, **options)
        assert not told["missing_keys"] and not told["unexpected_keys"]
        tokens = torch.arange(8)[None]
        assert torch.equal(mine(tokens).logits, model.eval()(tokens).logits)
    text = "save_pretrained: expected no variant with by_ranks"
    raised(ValueError, text, model.save_pretrained, folder, by_ranks=True, variant="fp16")
    (folder / f"rank {dist.get_rank()}").mkdir()
    text = "expected .* to be a folder that all ranks share, got one without the files of rank 1"
    own = folder / f"rank {dist.get_rank()}"
    raised(ValueError, text, model.save_pretrained, own, by_ranks=True)


@CHECKS()
def a_rank_alone_is_refused(folder):
    model, patience = spread_model(), agreement.MEETING_SECONDS
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
    raised(
        ValueError,
        "save_pretrained: .* on rank 0",
        spread_model().save_pretrained,
        folder / "file/a",
    )


@CHECKS()
def pickled_experts_are_refused(folder):
    model = spread_model()
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
