"""Functions of torch that meet experts over ranks: equal to one process, or refused on every rank.

Each runs on a model that one process holds, and on one whose experts lie over four ranks.
clipping_matrix.py runs all of them and writes the page.
"""

import copy
import functools
import inspect
import io
import pickle
import tempfile
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from composition import TOLERANCE, batches
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint import state_dict as of_dcp
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from trainers import Model

from moe_ext import distributed as md
from moe_ext.distributed.dtensor import local_part

MESHES = {
    "EP x DP": {"dp": 2, "ep": 2},
    "etp": {"dp": 4, "ep": 2, "etp": 2},
}


@dataclass
class Job:
    """A model, of one process or with its experts over ranks.

    Attributes:
        mesh: the latter's; None for one process.
        bias: whether experts have biases.
    """

    mesh: md.MoEMesh | None
    bias: bool

    def model(self):
        """Another one, of the same values each time."""
        return Model(self.mesh and self.mesh.ep_group, bias=self.bias, num_layers=1)

    def backward(self, model, number=0):
        """The loss of a step, and gradients of the mean over the ranks."""
        rank, size = (0, 1) if self.mesh is None else (self.mesh.data_rank, self.mesh.data_size)
        loss = model(**batches(rank, size)[number])["loss"]
        loss.backward()
        if self.mesh is not None:
            md.sync_gradients(model)
        return loss

    def train(self, model, optimizer=None):
        """Two steps, by SGD where no optimizer is given; the model."""
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            optimizer.zero_grad()
            self.backward(model, number)
            optimizer.step()
        return model


# Name to what a function of torch does, and returns to be compared: a model, or tensors by name.
FUNCTIONS = {}


def function(name):
    """Register what a user does, under the name that docs/parallelism.md gives it."""
    return functools.partial(FUNCTIONS.setdefault, name)


def parts(model):
    """Dense parameters, and those of experts."""
    groups = {group["name"]: group["params"] for group in md.expert_param_groups(model)}
    return groups["dense"], groups["experts"]


@function("`replicate` without `ignored_modules`")
def replicate_all(job):
    model = job.model()
    if job.mesh is not None:
        from torch.distributed._composable.replicate import replicate

        replicate(model)
    return job.train(model)


@function("`PostLocalSGDOptimizer`")
def post_local_sgd(job):
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if job.mesh is not None:
        optimizer = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(2, 0))
    return job.train(model, optimizer)


@function("`PeriodicModelAverager`")
def average_models(job):
    model = job.model()
    if job.mesh is not None:
        for _ in range(2):
            PeriodicModelAverager(2, 0).average_parameters(model.parameters())
    return model


def of_all(model):
    """All parameters."""
    return model.parameters()


def of_experts(model):
    """Return the parameters of experts."""
    return parts(model)[1]


def _train_by(kind, arrange, job):
    model = job.model()
    return job.train(model, kind(arrange(model), lr=0.01))


@function("`ZeroRedundancyOptimizer` of all parameters")
def zero_of_all(job):
    kind = torch.optim.AdamW
    if job.mesh is not None:
        kind = functools.partial(ZeroRedundancyOptimizer, optimizer_class=kind)
    return _train_by(kind, of_all, job)


def _lbfgs(arrange, job):
    model = job.model()
    optimizer = torch.optim.LBFGS(arrange(model), lr=0.1, max_iter=3)

    def closure():
        model.zero_grad()
        loss = job.backward(model).detach()
        if job.mesh is not None:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        return loss

    optimizer.step(closure)
    return model


FUNCTIONS |= {
    "`Adafactor`": functools.partial(_train_by, torch.optim.Adafactor, of_all),
    "`Adafactor` of experts alone": functools.partial(_train_by, torch.optim.Adafactor, of_experts),
    "`LBFGS`": functools.partial(_lbfgs, of_all),
    "`LBFGS` of experts alone": functools.partial(_lbfgs, of_experts),
}


def _saved(thing):
    """What `torch.load` reads of a file of `torch.save`."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _trained(job):
    """An optimizer that has taken steps."""
    model = job.model()
    optimizer = torch.optim.AdamW(model.parameters())
    job.train(model, optimizer)
    return optimizer


def _moments(state_dict):
    return {str(n): state["exp_avg"] for n, state in state_dict["state"].items()}


FUNCTIONS |= {
    "`torch.save(dict(model.named_parameters()))`": lambda job: _saved(
        dict(job.model().named_parameters())
    ),
    "`torch.save` of each `p.data`": lambda job: _saved(
        {n: p.data for n, p in job.model().named_parameters()}
    ),
    "`torch.save(model.state_dict())`": lambda job: _saved(job.model().state_dict()),
    "`torch.save(model)`": lambda job: _saved(job.model()),
    "`torch.save` of an optimizer's state": lambda job: _moments(
        _saved(_trained(job).state_dict())
    ),
    "`torch.save` of an optimizer": lambda job: _moments(_saved(_trained(job)).state_dict()),
}


@function("`AveragedModel`")
def averaged_model(job, **options):
    model = job.model()
    average = AveragedModel(model, **options)
    for _ in range(2):
        job.train(model)
        average.update_parameters(model)
    return average.module


@function("`AveragedModel`, EMA by `get_ema_multi_avg_fn`")
def ema_model(job):
    return averaged_model(job, multi_avg_fn=get_ema_multi_avg_fn(0.5))


def _ema(job, move):
    """An average of the parameters' first values and those after two steps, by hand."""
    model = job.model()
    average = {n: p.detach().clone() for n, p in model.named_parameters()}
    job.train(model)
    move([*average.values()], [p.detach() for p in model.parameters()])
    return average


@function("EMA by hand, `lerp_` in a loop")
def ema_by_hand(job):
    def move(averages, values):
        for average, value in zip(averages, values, strict=True):
            average.lerp_(value, 0.5)

    return _ema(job, move)


@function("EMA by hand, `torch._foreach_lerp_`")
def ema_by_foreach(job):
    return _ema(job, lambda averages, values: torch._foreach_lerp_(averages, values, 0.5))


@function("`load_state_dict(strict=False)` of a file of one rank")
def load_a_part(job):
    model = job.model()
    state = {n: local_part(p.detach()).clone() for n, p in model.named_parameters()}
    model.load_state_dict(state, strict=False)
    return model


@function("`load_state_dict` of what one process saved")
def load_a_whole(job):
    model = job.model()
    whole = Model(bias=job.bias, num_layers=1)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(1.0)
    model.load_state_dict(whole.state_dict())
    return model


def _normalised(job, norm_of):
    """SGD whose step is divided by the norm of all gradients."""
    model = job.model()
    for number in range(2):
        model.zero_grad()
        job.backward(model, number)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = norm_of(gradients)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / norm, alpha=0.1)
    return model


# By what a step is divided, to the norm of the gradients.
NORMS = {
    "`torch.stack([p.grad.norm(), ...]).norm()`": lambda gs: torch.stack(
        [g.norm() for g in gs]
    ).norm(),
    "the root of `sum(float(p.grad.norm()) ** 2, ...)`": lambda gs: (
        sum(float(g.norm()) ** 2 for g in gs) ** 0.5
    ),
    "the root of `sum(p.grad.square().sum().item(), ...)`": lambda gs: (
        sum(g.square().sum().item() for g in gs) ** 0.5
    ),
    "the root of `sum(p.grad.square().sum(), ...)`": lambda gs: sum(
        g.square().sum() for g in gs
    ).sqrt(),
}
for _name, _norm_of in NORMS.items():
    FUNCTIONS[f"a step divided by {_name}"] = functools.partial(_normalised, norm_of=_norm_of)


def _prodigy(job, number):
    """The estimate d of Prodigy: over all parameters, <g, x0 - x> and the sum of |s|."""
    model = job.model()
    first = [p.detach().clone() for p in model.parameters()]
    sums = [torch.zeros_like(p) for p in first]
    d = 1e-2
    for step in range(4):
        model.zero_grad()
        job.backward(model, step)
        above, below = 0.0, 0.0
        with torch.no_grad():
            for p, x0, s in zip(model.parameters(), first, sums, strict=True):
                if p.grad is not None:
                    s.add_(p.grad * d)
                    above = above + number((p.grad * (x0 - p)).sum()) * d
                    below = below + number(s.abs().sum())
            d = d + above / below
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad * d)
    return model


FUNCTIONS |= {
    "Prodigy's estimate, products over all parameters by `.item()`": lambda job: _prodigy(
        job, lambda x: x.item()
    ),
    "Prodigy's estimate, products over all parameters as tensors": lambda job: _prodigy(
        job, lambda x: x
    ),
}


@function("`set_swap_module_params_on_conversion(True)`, `model.to(...)`")
def swap(job):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = job.model().to(torch.float32).to(torch.float64)
        return job.train(model)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@function("`copy.deepcopy(model)`")
def copied(job):
    model = copy.deepcopy(job.model())
    return job.train(model)


@function("`parameters_to_vector`")
def to_vector(job):
    return {"vector": nn.utils.parameters_to_vector(job.model().parameters())}


@function("`vector_to_parameters`")
def from_vector(job):
    model = job.model()
    size = sum(p.numel() for p in model.parameters())
    nn.utils.vector_to_parameters(torch.arange(size).double() / size, model.parameters())
    return job.train(model)


def _clip_value(job, **options):
    model = job.model()
    job.backward(model)
    nn.utils.clip_grad_value_(model.parameters(), 1e-3, **options)
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


FUNCTIONS |= {
    "`clip_grad_value_`": _clip_value,
    "`clip_grad_value_(foreach=False)`": functools.partial(_clip_value, foreach=False),
}


@function("`p.data = other`, as many EMAs do")
def assign_data(job):
    model, other = job.model(), job.model()
    job.backward(model)
    model.zero_grad()
    with torch.no_grad():
        for parameter, source in zip(model.parameters(), other.parameters(), strict=True):
            parameter.data = source * 0.5
    return job.train(model)


@function("`p.data.copy_(other)`")
def copy_data(job):
    model, other = job.model(), job.model()
    for parameter, source in zip(model.parameters(), other.parameters(), strict=True):
        parameter.data.copy_(source.detach() * 0.5)
    return job.train(model)


def _functional_call(job, change, source=None):
    model = job.model()
    given = {n: change(p) for n, p in (source or model).named_parameters()}
    rank, size = (0, 1) if job.mesh is None else (job.mesh.data_rank, job.mesh.data_size)
    found = functional_call(model, given, (), batches(rank, size)[0])["logits"]
    if size > 1:
        gathered = [torch.empty_like(found) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, found.detach().contiguous())
        found = torch.cat(gathered)
    return {"logits": found}


FUNCTIONS |= {
    "`functional_call` with the model's parameters": lambda job: _functional_call(
        job, lambda p: p.detach() * 2
    ),
    "`functional_call` with this rank's parts": lambda job: _functional_call(
        job, lambda p: local_part(p.detach()) * 2
    ),
    "`functional_call` with whole tensors": lambda job: _functional_call(
        job, lambda p: p.detach() * 2, Model(bias=job.bias, num_layers=1)
    ),
}


@function("`get_model_state_dict(full_state_dict=True)`")
def dcp_full_model(job):
    if job.mesh is None:
        return job.model().state_dict()
    options = of_dcp.StateDictOptions(full_state_dict=True)
    return of_dcp.get_model_state_dict(job.model(), options=options)


@function("`get_optimizer_state_dict(full_state_dict=True)`")
def dcp_full_optimizer(job):
    model = job.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job.train(model, optimizer)
    options = of_dcp.StateDictOptions(full_state_dict=True)
    found = of_dcp.get_optimizer_state_dict(model, optimizer, options=options)
    return {name: state["exp_avg"] for name, state in found["state"].items()}


@function("`dcp.save` and `dcp.load` of `get_state_dict`, AdamW")
def dcp_files(job):
    if job.mesh is None:
        model = job.model()
        return job.train(model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    model, other = job.model(), job.model()
    kept = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    job.backward(model, 0)
    kept.step()
    state = dict(zip(("model", "optimizer"), of_dcp.get_state_dict(model, kept), strict=True))
    dcp.save(state, checkpoint_id=folder[0])
    with torch.no_grad():
        for parameter in other.parameters():
            local_part(parameter).add_(1.0)
    loaded = torch.optim.AdamW(other.parameters(), lr=0.01, foreach=False)
    state = dict(zip(("model", "optimizer"), of_dcp.get_state_dict(other, loaded), strict=True))
    dcp.load(state, checkpoint_id=folder[0])
    of_dcp.set_state_dict(
        other, loaded, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    other.zero_grad()
    job.backward(other, 1)
    loaded.step()
    return other


def _optimizers():
    """Those of torch.optim, but for the ones that have rows of their own."""
    for name, found in vars(torch.optim).items():
        is_one = inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)
        if is_one and name not in ("Optimizer", "LBFGS", "Adafactor", "SparseAdam", "Muon"):
            yield name, found


GROUPS = {
    "one group": of_all,
    "`expert_param_groups`": lambda model: [{"params": held} for held in parts(model)],
}
for _name, _kind in _optimizers():
    for _groups, _arrange in GROUPS.items():
        FUNCTIONS[f"`{_name}`, {_groups}"] = functools.partial(_train_by, _kind, _arrange)


def compare(found, wanted):
    """What differs, or None; all ranks call it alike."""
    if isinstance(found, nn.Module):
        found = md.full_state_dict(found)
    if set(found) != set(wanted):
        return f"other names: {sorted(set(found) ^ set(wanted))[:3]}"
    for name, tensor in found.items():
        whole = tensor.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        if whole.shape != wanted[name].shape:
            return (
                f"{name} has the shape {tuple(whole.shape)}, right is {tuple(wanted[name].shape)}"
            )
        difference = float((whole - wanted[name]).abs().max())
        if not difference < TOLERANCE:
            return f"{name} differs by {difference:.3g}"
    return None


def one_process(key):
    """Tensors by name that a function gives in one process, for a (name, mesh)."""
    name, label = key
    found = FUNCTIONS[name](Job(None, has_biases(label)))
    return found.state_dict() if isinstance(found, nn.Module) else found


def has_biases(label):
    """True if experts of a mesh have biases; the shards of an expert have none."""
    return label != "etp"


def agreed(text):
    """The outcome on this rank, or that ranks end differently."""
    kinds = [None] * dist.get_world_size()
    dist.all_gather_object(kinds, text.partition(":")[0])
    return text if len(set(kinds)) == 1 else f"wrong: ranks end differently, {kinds}: {text}"


def run(wanted):
    """Outcome of each (name, mesh) on this rank; `wanted`: what `of_one_process` gives."""
    meshes = {label: md.MoEMesh(**sizes) for label, sizes in MESHES.items()}
    found = {}
    for (name, label), right in pickle.loads(wanted).items():
        try:
            job = Job(meshes[label], has_biases(label))
            wrong = compare(FUNCTIONS[name](job), right)
            text = "equal" if wrong is None else f"wrong: {wrong}"
        except BaseException as error:  # torch's CheckpointException is no Exception
            text = f"refused: {type(error).__name__}: {error}"
        found[name, label] = agreed(text)
    return found


# Name to the pattern of what refuses it, for both meshes or for each.
MIXTURE, PLACEMENT = "mixed torch.Tensor and DTensor", "requires? placement changes"
IN_FORWARD, NO_FILE = "ValueError: forward: expected", "TypeError: torch.save"
NO_VIEW = "Sharding propagation failed"
REFUSED = {
    "`replicate` without `ignored_modules`": IN_FORWARD,
    "`PostLocalSGDOptimizer`": (MIXTURE, NO_VIEW),
    "`PeriodicModelAverager`": "expected a non-empty list of Tensors",
    "`ZeroRedundancyOptimizer` of all parameters": "does not have a sharding strategy",
    "`Adafactor`": PLACEMENT,
    "`Adafactor` of experts alone": PLACEMENT,
    "`Rprop`, one group": PLACEMENT,
    "`Rprop`, `expert_param_groups`": PLACEMENT,
    "`LBFGS`": (MIXTURE, NO_VIEW),
    "`LBFGS` of experts alone": (None, NO_VIEW),
    "`torch.save(dict(model.named_parameters()))`": NO_FILE,
    "`torch.save` of each `p.data`": NO_FILE,
    "`torch.save(model.state_dict())`": NO_FILE,
    "`torch.save(model)`": NO_FILE,
    "`torch.save` of an optimizer's state": NO_FILE,
    "`torch.save` of an optimizer": "pickle: expected a module without a process group",
    "`AveragedModel`, EMA by `get_ema_multi_avg_fn`": MIXTURE,
    "EMA by hand, `torch._foreach_lerp_`": MIXTURE,
    "`load_state_dict(strict=False)` of a file of one rank": "size mismatch",
    "a step divided by `torch.stack([p.grad.norm(), ...]).norm()`": MIXTURE,
    "a step divided by the root of `sum(p.grad.square().sum(), ...)`": MIXTURE,
    "Prodigy's estimate, products over all parameters as tensors": MIXTURE,
    "`parameters_to_vector`": (MIXTURE, NO_VIEW),
    "`vector_to_parameters`": IN_FORWARD,
    "`p.data = other`, as many EMAs do": IN_FORWARD,
    "`clip_grad_value_`": MIXTURE,
    "`functional_call` with whole tensors": "grouped_mm: expected",
    "`dcp.save` and `dcp.load` of `get_state_dict`, AdamW": (None, "overlapping chunks"),
    # Gates and ups, which the shards of an expert divide each by itself, are a dimension there.
    "`get_model_state_dict(full_state_dict=True)`": (None, "take moe_ext.distributed.full_state"),
}
# `item()` and `float()` of a sum or a norm of any DTensor are of this rank's part, until an
# operator has made the sum. Routers that such numbers move apart are found by a later pass.
OF_THIS_RANK = (
    "a step divided by the root of `sum(float(p.grad.norm()) ** 2, ...)`",
    "a step divided by the root of `sum(p.grad.square().sum().item(), ...)`",
    "Prodigy's estimate, products over all parameters by `.item()`",
)
REFUSED |= dict.fromkeys(OF_THIS_RANK, "the checksum of the router's parameters")


def pattern_of(key):
    """Pattern of an outcome."""
    name, mesh = key
    pattern = REFUSED.get(name)
    if isinstance(pattern, tuple):
        pattern = pattern[list(MESHES).index(mesh)]
    return "^equal$" if pattern is None else f"(?s)^refused: .*{pattern}"


def table():
    """What the page shows: a row for each function, and for optimizers that end alike."""
    lines = [f"| | {' | '.join(MESHES)} |", "|---" * (1 + len(MESHES)) + "|"]
    words = {"^equal$": "equal"}
    alike = {}
    for name in FUNCTIONS:
        cells = []
        for mesh in MESHES:
            cells.append(words.get(pattern_of((name, mesh)), "refused"))
        optimizer, _, groups = name.partition(", ")
        is_one = groups in GROUPS
        shown = alike.setdefault((tuple(cells), is_one or name), [])
        shown += [] if is_one and optimizer in shown else [optimizer if is_one else name]
    for (cells, _), names in alike.items():
        lines.append(f"| {', '.join(names)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def keys(*, few):
    """(Name, mesh) of all functions; few: meshes take turns, but where they are unlike."""
    labels = list(MESHES)
    return [
        (name, label)
        for index, name in enumerate(FUNCTIONS)
        for number, label in enumerate(labels)
        if not few or isinstance(REFUSED.get(name), tuple) or index % len(labels) == number
    ]


def of_one_process(*, few):
    """Pickled, what one process gives: a process takes few tensors as arguments."""
    return pickle.dumps({key: one_process(key) for key in keys(few=few)})
