import io
import json
import os
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from example_jobs import snapshot
from moe_lm import checkpoint as ckpt
from moe_lm.runtime import UserError, from_main
from rank_checks import ask_briefly

import moe_ext
from moe_ext.testing import spawn_ranks

SETTINGS = {"model_dim": 16, "seed": 0}
pytestmark = pytest.mark.usefixtures("process_group")


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def make_state():
    generator = torch.Generator().manual_seed(0)
    return {
        "step": torch.tensor(7),
        "model.weight": torch.randn(5, 3, generator=generator),
        "model.double": torch.randn(4, generator=generator, dtype=torch.float64),
    }


def empty(state):
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def save(folder, step=7, state=None, keep=2):
    return ckpt.save(folder, state or make_state(), step=step, settings=SETTINGS, keep=keep)


def load(folder, state=None):
    state = empty(state or make_state())
    ckpt.load(ckpt.latest(folder), state)
    return state


def accept_changes(path):
    """Update the manifest as an attacker would, who can compute a checksum too."""
    manifest = json.loads((path / ckpt.MANIFEST).read_text())
    manifest["files"] = {
        file.name: {"size": file.stat().st_size, "sha256": ckpt._digest(file)}
        for file in path.iterdir()
        if file.name != ckpt.MANIFEST
    }
    (path / ckpt.MANIFEST).write_text(json.dumps(manifest))


def tensor_file(path):
    (file,) = path.glob("*.distcp")
    return file


def test_round_trip(tmp_path):
    state = make_state()
    path = save(tmp_path, state=state)
    assert path.name == "step-00000007"
    loaded = load(tmp_path)
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor)
    found = ckpt.latest(tmp_path)
    assert (found.step, found.settings) == (7, SETTINGS)


def test_no_machine_path_in_the_checkpoint(tmp_path):
    path = save(tmp_path)
    for file in path.iterdir():
        assert str(tmp_path).encode() not in file.read_bytes()


def test_latest_is_the_highest_step_and_old_ones_go(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step=step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000100"]
    assert ckpt.latest(tmp_path).step == 100


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path)
    state = make_state() | {"model.weight": torch.ones(5, 3)}
    save(tmp_path, state=state)
    assert torch.equal(load(tmp_path)["model.weight"], torch.ones(5, 3))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


def test_leftovers_are_not_taken_for_checkpoints_and_go_with_the_next_save(tmp_path):
    half = tmp_path / f"{ckpt.TEMPORARY}step-00000099"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    assert ckpt.latest(tmp_path) is None
    save(tmp_path)
    assert not half.exists()


def test_no_checkpoint(tmp_path):
    assert ckpt.latest(tmp_path / "missing") is None
    assert not (tmp_path / "missing").exists()


def test_other_settings_are_named(tmp_path):
    save(tmp_path)
    ckpt.check_settings(ckpt.latest(tmp_path), SETTINGS)
    with pytest.raises(UserError, match="expected model_dim to be 32 as in this command, got 16"):
        ckpt.check_settings(ckpt.latest(tmp_path), SETTINGS | {"model_dim": 32})
    with pytest.raises(UserError, match="expected new_key to be 1 as in this command, got None"):
        ckpt.check_settings(ckpt.latest(tmp_path), SETTINGS | {"new_key": 1})


def truncate(path):
    file = tensor_file(path)
    os.truncate(file, file.stat().st_size - 1)


def flip_bit(path):
    file = tensor_file(path)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def rewrite_manifest(**changes):
    def damage(path):
        manifest = json.loads((path / ckpt.MANIFEST).read_text()) | changes
        (path / ckpt.MANIFEST).write_text(json.dumps(manifest))

    return damage


def reach_outside(path):
    manifest = json.loads((path / ckpt.MANIFEST).read_text())
    manifest["files"]["../secret"] = {"size": 0, "sha256": ""}
    (path / ckpt.MANIFEST).write_text(json.dumps(manifest))


DAMAGE = {
    "truncated tensors": (truncate, "file __0_0.distcp is truncated or changed: expected"),
    "flipped bit": (flip_bit, "file __0_0.distcp is damaged"),
    "missing tensors": (lambda p: tensor_file(p).unlink(), "file __0_0.distcp is missing"),
    "truncated metadata": (
        lambda p: os.truncate(p / ".metadata", 20),
        "file .metadata is truncated",
    ),
    "missing metadata": (lambda p: (p / ".metadata").unlink(), "file .metadata is missing"),
    "truncated manifest": (lambda p: os.truncate(p / ckpt.MANIFEST, 20), "cannot be used"),
    "binary manifest": (lambda p: (p / ckpt.MANIFEST).write_bytes(b"\xff\0"), "cannot be used"),
    "missing manifest": (lambda p: (p / ckpt.MANIFEST).unlink(), "No such file"),
    "another format": (rewrite_manifest(format="x"), "not of format"),
    "another step": (rewrite_manifest(step=8), "says step 8"),
    "no files": (rewrite_manifest(files={}), "lacks the settings or the list of files"),
    "files without sizes": (rewrite_manifest(files={".metadata": 3}), "cannot be used"),
    "foreign file": (reach_outside, "names a file outside the checkpoint"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_and_nothing_is_changed(tmp_path, name):
    damage, message = DAMAGE[name]
    save(tmp_path, step=3)
    path = save(tmp_path)
    damage(path)
    before = snapshot(tmp_path)
    with pytest.raises(UserError) as raised:
        load(tmp_path)
    assert message in str(raised.value) and str(path) in str(raised.value)
    assert "Move it away to resume from step 3; nothing was changed" in str(raised.value)
    assert snapshot(tmp_path) == before


def test_without_an_older_checkpoint_the_advice_is_to_start_again(tmp_path):
    truncate(save(tmp_path))
    with pytest.raises(UserError, match="Move it away to start again from step 0"):
        load(tmp_path)


def test_other_tensors_are_another_model(tmp_path):
    save(tmp_path)
    with pytest.raises(UserError, match="another model: model.bias, model.weight differ"):
        state = make_state()
        state["model.bias"] = state.pop("model.weight")
        load(tmp_path, state)


def test_other_shapes_are_another_model(tmp_path):
    save(tmp_path)
    with pytest.raises(UserError, match="(?i)size mismatch"):
        load(tmp_path, make_state() | {"model.weight": torch.zeros(6, 3)})


def test_pickled_code_in_the_metadata_is_not_run(tmp_path):
    path, victim = save(tmp_path), tmp_path / "victim"
    (path / ".metadata").write_bytes(pickle.dumps(Evil(victim)))
    accept_changes(path)
    with pytest.raises(UserError, match=r"its metadata asks for \w+.mkdir, which is not allowed"):
        load(tmp_path)
    assert not victim.exists()
    # The attack is real: the reader of torch runs it.
    with pytest.raises(BaseException):  # noqa: B017
        dcp.load(empty(make_state()), checkpoint_id=path)
    assert victim.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch.serialization", "os.system"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__"),
    ],
)
def test_only_the_classes_of_tensor_metadata_can_be_unpickled(tmp_path, module, name):
    path = save(tmp_path)
    module_line = b"\x8c" + bytes([len(module)]) + module.encode()
    name_line = b"\x8c" + bytes([len(name)]) + name.encode()
    (path / ".metadata").write_bytes(b"\x80\x04" + module_line + name_line + b"\x93.")
    accept_changes(path)
    with pytest.raises(UserError, match="which is not allowed"):
        load(tmp_path)


class ByAttribute:
    """Pickled as `getattr(owner, name)`."""

    def __init__(self, owner, name):
        self.reduced = getattr, (owner, name)

    def __reduce__(self):
        return self.reduced


def test_an_attribute_is_unpickled_only_as_a_member_of_an_enum():
    encoding = dcp.metadata._MEM_FORMAT_ENCODING
    for member in encoding:
        pickled = pickle.dumps(ByAttribute(encoding, member.name))
        assert ckpt._MetadataUnpickler(io.BytesIO(pickled)).load() is member
    for owner, name in ((encoding, "__members__"), (dcp.metadata.Metadata, "__init__")):
        pickled = pickle.dumps(ByAttribute(owner, name))
        with pytest.raises(UserError, match="which is not allowed"):
            ckpt._MetadataUnpickler(io.BytesIO(pickled)).load()


def test_pickled_code_in_place_of_a_tensor_is_not_run(tmp_path):
    path, victim = save(tmp_path), tmp_path / "victim"
    file = tensor_file(path)
    with open(file, "r+b") as stream:
        stream.write(pickle.dumps(Evil(victim), protocol=2))
    accept_changes(path)
    with pytest.raises(UserError, match="cannot be used"):
        load(tmp_path)
    assert not victim.exists()


def test_a_pickled_object_among_the_tensors_is_not_run(tmp_path):
    victim = tmp_path / "victim"
    save(tmp_path, state=make_state() | {"evil": Evil(victim)})
    with pytest.raises(UserError, match="evil is not a tensor but pickled data"):
        load(tmp_path, make_state() | {"evil": torch.zeros(1)})
    assert not victim.exists()


def test_metadata_that_points_outside_the_checkpoint(tmp_path):
    path = save(tmp_path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    accept_changes(path)
    with pytest.raises(UserError, match=r"names the foreign file \.\./secret"):
        load(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file"):
        save(tmp_path / "file" / "checkpoints")


def test_the_state_of_a_job_comes_back_from_files_alone(tmp_path):
    def job(seed):
        torch.manual_seed(seed)
        model = moe_ext.MoELayer(4, 6, 4)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = job(0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = moe_ext.distributed.checkpoint.TrainingState(model, optimizer)
    save(tmp_path, state=state.state_dict())
    other, fresh = job(1)
    target = moe_ext.distributed.checkpoint.TrainingState(other, fresh)
    found = ckpt.latest(tmp_path)
    tensors = ckpt.empty_tensors(found, target.empty)
    ckpt.load(found, tensors)
    target.load_state_dict(tensors)
    assert target.state_dict().keys() == state.state_dict().keys()
    for name, tensor in state.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor), name
    with pytest.raises(UserError, match="no larger than its parameter, got shape"):
        big = {name: tensor for name, tensor in state.state_dict().items() if "step" not in name}
        big["optimizer.exp_avg.experts.down_proj"] = torch.zeros(1000)
        save(tmp_path, step=8, state=big)
        ckpt.empty_tensors(ckpt.latest(tmp_path), target.empty)


def rank_0_dies_before_it_sends(rank):
    """What the other rank sees of a result that does not come."""
    ask_briefly()
    if rank == 0:
        dist.broadcast_object_list = lambda *_, **__: os._exit(1)
    try:
        from_main(lambda: 3, OSError)
    except moe_ext.distributed.RankFailureError as error:
        return str(error), error.ranks


def test_a_result_of_a_rank_that_died():
    _, (text, ranks) = spawn_ranks(rank_0_dies_before_it_sends, 2, may_die=[0])
    assert text.startswith("from_main: expected every rank of the group [0, 1] to take part")
    assert ranks == (0,)
