"""Lightning and Fabric with experts over ranks: what composition.py does not go through."""

import functools
import importlib.util
import inspect
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from composition import TOLERANCE, batches
from rank_checks import Checks, full, shared_folder
from torch.optim.swa_utils import AveragedModel
from trainers import LEARNING_RATE, MAX_NORM, Model, as_torchrun

import moe_ext
from moe_ext import distributed as md
from moe_ext.distributed.dtensor import local_part
from moe_ext.integrations.lightning import ExpertParallel, FabricExpertParallel

# Ranks import it, where this process need not.
if importlib.util.find_spec("lightning") is None:
    pytest.skip("lightning is not installed", allow_module_level=True)

STEPS, VALUE = 4, 1e-3
REFUSED = r"save_checkpoint: torch.save: expected whole tensors, .* on rank 0"
# Step in which the loss of one row is infinite.
OVERFLOWS = 1


def one_process(steps, clip, average=None):
    """The weights after steps over all rows of some batches each, and over no others."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    averaged = AveragedModel(model)
    for step in steps:
        rows = {name: torch.cat([batch[name] for batch in step]) for name in step[0]}
        optimizer.zero_grad()
        model(**rows)["loss"].backward()
        clip(model.parameters())
        optimizer.step()
        averaged.update_parameters(model)
    return (averaged.module if average else model).state_dict()


def by_norm(parameters):
    assert torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM) > 2 * MAX_NORM


def by_value(parameters):
    held = list(parameters)
    assert max(p.grad.abs().max() for p in held) > 2 * VALUE
    torch.nn.utils.clip_grad_value_(held, VALUE)


def own(overflows=False):
    """Batches of this rank."""
    found = batches(dist.get_rank(), dist.get_world_size())
    if overflows and dist.get_rank() == 1:
        found[OVERFLOWS]["labels"][0] = 1e306
    return found


def whole(size=1):
    """All rows, in steps of some batches."""
    found = batches(0, 1)
    return [found[first : first + size] for first in range(0, STEPS, size)]


@functools.cache
def mesh():
    return md.MoEMesh(dp=2, ep=2)


def spread():
    as_torchrun()
    return Model(mesh().ep_group)


def assert_equal(model, want):
    for name, parameter in model.named_parameters():
        difference = float((full(parameter.detach()) - want[name]).abs().max())
        assert difference < TOLERANCE, f"{name} differs by {difference}"


def module_of(model, **attributes):
    """A LightningModule around a model, with some more attributes and methods."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, **batch):
            return self.model(**batch)["loss"]

        def training_step(self, batch, index):
            return self(**batch)

        def validation_step(self, batch, index):
            self.log("loss", self(**batch), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)

    return type("Module", (Module,), attributes)()


def trainer_of(*mixins, plugins=(), **options):
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import LightningEnvironment

    strategy = type("Strategy", (*mixins, pl.strategies.DDPStrategy), {})
    quiet = ("enable_progress_bar", "enable_model_summary", "logger", "use_distributed_sampler")
    return pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy(process_group_backend="gloo"),
        plugins=[LightningEnvironment(), *plugins],
        max_epochs=1,
        num_sanity_val_steps=0,
        **{"enable_checkpointing": False, **dict.fromkeys(quiet, False), **options},
    )


def loader(rows):
    return torch.utils.data.DataLoader(rows, batch_size=None)


def fit(model, *, rows=None, plugins=(), attributes=None, **options):
    """Train a model; returns the Trainer."""
    trainer = trainer_of(ExpertParallel, plugins=plugins, **options)
    trainer.fit(module_of(model, **(attributes or {})), loader(rows or own()))
    return trainer


def check_trainer_refuses_another_scaler():
    from lightning.pytorch.plugins import MixedPrecision

    class Scaler(torch.amp.GradScaler):
        pass

    plugin = MixedPrecision("16-mixed", "cpu", Scaler("cpu"))
    with pytest.raises(ValueError, match=r"moe_ext.distributed.GradScaler, .* got .*Scaler"):
        fit(spread(), plugins=[plugin])


def check_trainer_with_manual_optimization():
    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for half in (0, 1):
            rows = {name: tensor.chunk(2)[half] for name, tensor in batch.items()}
            self.manual_backward(self.model(**rows)["loss"] / 2)
        self.clip_gradients(optimizer, MAX_NORM, "norm")
        optimizer.step()

    model = spread()
    moe_ext.nn.set_loss_scale(model, 1 / 2)
    fit(model, attributes={"training_step": training_step, "automatic_optimization": False})
    assert_equal(model, one_process(whole(), by_norm))


def check_trainer_validates_without_fitting():
    model = spread()
    rows = batches(0, 1)
    with torch.no_grad():
        # Others than on the ranks that hold the same parts.
        for parameter in model.parameters():
            local_part(parameter).add_(float(dist.get_rank() > 1))
    [found] = trainer_of(ExpertParallel).validate(module_of(model), loader(own()), verbose=False)
    with torch.no_grad():
        want = sum(Model()(**batch)["loss"] for batch in rows) / len(rows)
    assert abs(found["loss"] - want) < TOLERANCE
    assert_equal(model, Model().state_dict())


def check_trainer_writes_averaged_weights():
    import lightning.pytorch as pl

    if not hasattr(pl.callbacks, "WeightAveraging"):
        return  # Lightning before 2.6

    class Averaging(pl.callbacks.WeightAveraging):
        def on_save_checkpoint(self, *args):
            with md.whole_state_dicts():
                super().on_save_checkpoint(*args)

    def run(averaging, path):
        trainer = fit(spread(), callbacks=[averaging()], gradient_clip_val=MAX_NORM)
        trainer.save_checkpoint(path)

    with shared_folder() as folder:
        run(Averaging, f"{folder}/averaged")
        dist.barrier()
        found = torch.load(f"{folder}/averaged", weights_only=True)["state_dict"]
        model = Model()
        model.load_state_dict({n.removeprefix("model."): t for n, t in found.items()})
        assert_equal(model, one_process(whole(), by_norm, average=True))
        # Its own `on_save_checkpoint` takes DTensors.
        with pytest.raises(TypeError, match=REFUSED):
            run(pl.callbacks.WeightAveraging, f"{folder}/refused")


def check_stock_strategy_raises():
    mixed = functools.partial(pytest.raises, RuntimeError, match="mixed torch.Tensor and DTensor")
    for run in ("fit", "validate"):
        with mixed():
            getattr(trainer_of(), run)(module_of(spread()), loader(own()))
    module = moe_ext.parallelize(module_of(spread()))
    for algorithm in ("norm", "value"):
        trainer = trainer_of(gradient_clip_val=MAX_NORM, gradient_clip_algorithm=algorithm)
        with mixed():
            trainer.fit(module, loader(own()))
    with mixed():
        fabric_of().setup(spread())
    fabric, model = fabric_of(), moe_ext.parallelize(spread())
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    fabric.backward(wrapped(**own()[0])["loss"])
    for limit in ({"max_norm": MAX_NORM}, {"clip_val": VALUE}):
        with mixed():
            fabric.clip_gradients(wrapped, optimizer, **limit)


def fabric_of(*mixins, **options):
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy

    as_torchrun()
    strategy = type("Strategy", (*mixins, DDPStrategy), {})
    world = TorchElasticEnvironment()
    fabric = Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy(cluster_environment=world, process_group_backend="gloo"),
        **options,
    )
    fabric.launch()
    return fabric


def train(fabric, model, *, rows=None, size=1, **limits):
    """Train a model by Fabric, in steps of some batches."""
    given = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    model, optimizer = fabric.setup(model, given)
    for index, batch in enumerate(rows or own()):
        ends = (index + 1) % size == 0
        with fabric.no_backward_sync(model, enabled=not ends):
            fabric.backward(model(**batch)["loss"] / size)
        if ends:
            fabric.clip_gradients(model, optimizer, **limits)
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


def check_clipping_by_value():
    want = one_process(whole(), by_value)
    model = spread()
    fit(model, gradient_clip_val=VALUE, gradient_clip_algorithm="value")
    assert_equal(model, want)
    model = spread()
    train(fabric_of(FabricExpertParallel), model, clip_val=VALUE)
    assert_equal(model, want)


def check_accumulation():
    want, models = one_process(whole(2), by_norm), [spread(), spread()]
    for model in models:
        moe_ext.nn.set_loss_scale(model, 1 / 2)
    fit(models[0], gradient_clip_val=MAX_NORM, accumulate_grad_batches=2)
    train(fabric_of(FabricExpertParallel), models[1], size=2, max_norm=MAX_NORM)
    for model in models:
        assert_equal(model, want)


def check_a_step_is_skipped_on_all_ranks():
    import lightning.fabric.plugins
    import lightning.pytorch.plugins

    steps = [step for index, step in enumerate(whole()) if index != OVERFLOWS]
    want, rows = one_process(steps, by_norm), own(overflows=True)
    for tool in (lightning.pytorch, lightning.fabric):
        model, plugin = spread(), tool.plugins.MixedPrecision("16-mixed", "cpu")
        model.register_forward_pre_hook(
            lambda *_, model=model, plugin=plugin: moe_ext.nn.set_loss_scale(
                model, plugin.scaler.get_scale()
            )
        )
        if tool is lightning.pytorch:
            fit(model, rows=rows, plugins=[plugin], gradient_clip_val=MAX_NORM)
        else:
            # It casts inputs, which are of float64 here.
            plugin.convert_input = plugin.convert_output = lambda data: data
            fabric = fabric_of(FabricExpertParallel, plugins=[plugin])
            train(fabric, model, rows=rows, max_norm=MAX_NORM, error_if_nonfinite=False)
        assert type(plugin.scaler) is md.GradScaler
        assert plugin.scaler.get_scale() == 2**15
        assert_equal(model, want)


def check_optimizers_are_warned_of():
    """Once, with experts beside other parameters on a device with foreach kernels."""
    on_gpu = spread().to("meta")  # nothing is computed

    class Strategies:
        optimizers = [torch.optim.AdamW(on_gpu.parameters())]

        def setup_optimizers(self, trainer):
            assert trainer == "trainer"

        def setup_optimizer(self, optimizer):
            return optimizer

    apart = torch.optim.AdamW(md.expert_param_groups(on_gpu))
    (mixed,) = Strategies.optimizers
    fabric = type("Fabric", (FabricExpertParallel, Strategies), {})()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for quiet in (apart, torch.optim.AdamW(spread().parameters())):
            assert fabric.setup_optimizer(quiet) is quiet
    words = "expected groups of AdamW to hold experts over ranks or other parameters, got both"
    with pytest.warns(UserWarning, match=f"^FabricExpertParallel: {words}") as seen:
        assert fabric.setup_optimizer(mixed) is mixed
    assert len(seen) == 1
    with pytest.warns(UserWarning, match=f"^ExpertParallel: {words}") as seen:
        type("Trainer", (ExpertParallel, Strategies), {})().setup_optimizers("trainer")
    assert len(seen) == 1


def check_fabric_saves_for_all_ranks_or_none():
    fabric, held = fabric_of(FabricExpertParallel), spread()
    model, optimizer = train(fabric, held, max_norm=MAX_NORM)
    other = spread()
    given = torch.optim.AdamW(other.parameters(), lr=LEARNING_RATE)
    other, loaded = fabric.setup(other, given)
    with shared_folder() as folder:
        fabric.save(f"{folder}/state", {"model": model, "optimizer": optimizer})
        state = torch.load(f"{folder}/state", weights_only=True)
        for name, value in state.items():
            torch.save(value, f"{folder}/{name}{dist.get_rank()}")
        fabric.load_raw(f"{folder}/model{dist.get_rank()}", other)
        fabric.load_raw(f"{folder}/optimizer{dist.get_rank()}", loaded)
        with pytest.raises(TypeError, match=REFUSED):
            fabric.save(f"{folder}/refused", {"weights": held.layers[0].experts.down_proj.detach()})
    for was, now in zip(model.parameters(), other.parameters(), strict=True):
        pairs = [(was.detach(), now.detach())]
        pairs += [
            (optimizer.state[was][n], loaded.state[now][n]) for n in ("exp_avg", "exp_avg_sq")
        ]
        for pair in pairs:
            assert torch.equal(*map(local_part, pair))


test_four_ranks = Checks.of(globals()).test(4)


PACKAGES = {
    ExpertParallel: ("lightning.pytorch", "pytorch_lightning"),
    FabricExpertParallel: ("lightning.fabric", "lightning_fabric"),
}
METHODS = [
    (mixin, package, name)
    for mixin, packages in PACKAGES.items()
    for package, name in itertools.product(packages, vars(mixin))
    if inspect.isfunction(vars(mixin)[name])
]


@pytest.mark.parametrize(("mixin", "package", "name"), METHODS)
def test_methods_are_those_of_strategies(mixin, package, name):
    """A strategy of another version would not call them, and not say so."""
    stock = importlib.import_module(f"{package}.strategies").DDPStrategy
    theirs = inspect.signature(getattr(stock, name)).parameters
    for own_name, parameter in inspect.signature(getattr(mixin, name)).parameters.items():
        assert own_name in theirs or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
