"""Other libraries' recurrences: what they are given, what they are not, and their faults."""

import contextlib
import functools
import re
import warnings
from unittest import mock

import pytest
import recurrent_libraries
import torch
import torch.distributed as dist
from rank_checks import Checks
from recurrent_libraries import FUNCTIONS, installed
from test_recurrent import made, run
from test_recurrent_over_ranks import parts_of

from moe_ext.attention import causal_conv1d, shard_sequence
from moe_ext.attention.recurrent import providers

PACKED = {False: None, "one for all": (0, 1, 40, 70), "a row each": [[0, 70], [0, 30, 31, 70]]}
KINDS = {
    "delta": "gated_delta_rule",
    "scan": "selective_scan",
    "scan by element": "selective_scan by element",
    "conv": "causal_conv1d",
}
# A sum of products of numbers that were rounded to bfloat16, once more rounded.
ROUNDED = {"rtol": 2.0**-7, "atol": 2.0**-8}
ALL = Checks()


def given_for(kind, length=70, dtype=torch.bfloat16, state=True, **sizes):
    """Arguments by name, in 16 bits but for decays, steps and states, as layers give them."""
    if kind == "conv":
        generator = torch.Generator().manual_seed(length)
        shapes = {"x": (2, 8, length), "weight": (8, 4), "bias": (8,)}
        found = {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}
        return {**found, "activation": "silu"}
    found = made(kind, length, **sizes)
    wide = ("g", "beta", "dt", "A", "D", "initial_state")
    found = {n: x.float() if n in wide else x.to(dtype) for n, x in found.items() if x is not None}
    if not state:
        found["initial_state"] = None
    return found


def results(kind, given, **options):
    """Results, and gradients of all tensors."""
    given = {n: x.detach().requires_grad_() if torch.is_tensor(x) else x for n, x in given.items()}
    outs = causal_conv1d(**given, **options) if kind == "conv" else run(kind, given, **options)
    outs = [outs] if torch.is_tensor(outs) else list(outs)
    loss = sum((x.float() * torch.arange(x.numel()).cos().view(x.shape)).sum() for x in outs)
    names = [n for n, x in given.items() if torch.is_tensor(x)]
    grads = torch.autograd.grad(loss, [given[n] for n in names], allow_unused=True)
    named = {f"gradient of {n}": x for n, x in zip(names, grads, strict=True)}
    return {**{str(i): x.detach() for i, x in enumerate(outs)}, **named}


def own(kind, given, **options):
    with mock.patch.object(providers, "CHOSEN", "own"):
        return results(kind, given, **options)


def assert_near(found, wanted):
    for name, x in wanted.items():
        assert found[name].dtype == x.dtype, name
        scale = float(x.float().abs().max())
        how = {"rtol": ROUNDED["rtol"], "atol": ROUNDED["atol"] * scale}
        torch.testing.assert_close(found[name], x, **how, msg=lambda m, n=name: f"{n}: {m}")


def served(found, kind):
    """The calls of a kind behind that of the trial."""
    return [x for name, x in found if name == KINDS[kind]][1:]


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_library_gives_what_our_operators_give(kind, state, packed):
    is_refused = kind == "scan by element" and (state or packed)
    given, options = given_for(kind, state=state), {"cu_seqlens": PACKED[packed]}
    wanted = own(kind, given, **options)
    with installed() as calls, warnings.catch_warnings():
        warnings.simplefilter("error")
        found = results(kind, given, **options)
        assert len(served(calls, kind)) == (0 if is_refused else 1), providers.faults
    assert_near(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_dtypes(kind, dtype):
    """Products of 16 bits alone; float32 where a library adds in float32."""
    given = given_for(kind, dtype=dtype, state=False)
    wanted = own(kind, given)
    with installed() as calls:
        found = results(kind, given)
        is_narrow = kind in ("delta", "scan")
        assert len(served(calls, kind)) == (not is_narrow or dtype == torch.float16)
    assert_near(found, wanted)


def one_call(**changes):
    """A call of the delta rule that a library serves, but for the changes."""
    given = {n: x for n, x in given_for("delta", 70).items() if n != "initial_state"}
    given = {**given, "state": None, **changes}
    return "gated_delta_rule", given, providers.Stretch()


def scan_call(kind="selective_scan by element", **changes):
    x, a = torch.ones(1, 2, 8, 1), -torch.ones(2, 4)
    b = torch.ones(1, 1, 8, 4)
    given = {"x": x, "dt": x[..., 0], "A": a, "B": b, "C": b, "state": None}
    return kind, {**given, **changes}, providers.Stretch()


def conv_call(**changes):
    given = {"x": torch.ones(1, 8, 9), "weight": torch.ones(8, 4), "bias": None, "halo": None}
    return "causal_conv1d", {**given, **changes}, providers.Stretch()


def packed_call(call):
    return *call[:2], providers.Stretch(torch.zeros(1, 8), ((0, 8),))


WIDE = torch.ones(1, 1, 70, 257, dtype=torch.bfloat16)
# A rule that sends work back to our kernels, to a call that it alone holds for.
SENT_BACK = {
    "not on CUDA": one_call(),
    "no elements": one_call(v=torch.ones(1, 4, 0, 3, dtype=torch.bfloat16)),
    "a transform of torch.func, torch.compile or a subclass of Tensor": one_call(
        v=torch.nn.Parameter(torch.ones(1, 4, 7, 3, dtype=torch.bfloat16))
    ),
    "deterministic algorithms": one_call(),
    "no beta": one_call(beta=None),
    "a decay by element of a key": one_call(g=torch.ones(1, 4, 70, 5)),
    "not of 16 bits: it multiplies float32 in TF32": one_call(v=torch.ones(1, 4, 70, 3)),
    "a state of more than 256 rows": one_call(k=WIDE),
    "float64": scan_call(x=torch.ones(1, 2, 8, 1, dtype=torch.float64)),
    "a state to begin with": scan_call(state=torch.ones(1, 2, 4, 1)),
    "packed documents": packed_call(scan_call()),
    "a state that ranks take on: it has no gradient": (
        *scan_call()[:2],
        providers.Stretch(is_shared=True),
    ),
    "a state of more than 128 rows": scan_call(B=torch.ones(1, 1, 8, 129)),
    "other than 2 to 4 taps": conv_call(weight=torch.ones(8, 5)),
    "packed documents of channels that are no multiple of 8": packed_call(
        conv_call(x=torch.ones(1, 7, 9))
    ),
}


def test_every_rule_has_a_case():
    rules = {
        *providers._ALWAYS,
        *(reason for rules in providers.RULES.values() for reason in rules),
    }
    assert rules == {*SENT_BACK}


@pytest.mark.parametrize("reason", SENT_BACK)
def test_a_rule_sends_work_back(reason):
    operator, given, stretch = SENT_BACK[reason]
    with installed() as calls, contextlib.ExitStack() as stack:
        if reason == "not on CUDA":
            stack.enter_context(mock.patch.object(providers, "on_cuda", lambda x: x.is_cuda))
        if reason == "deterministic algorithms":
            on = mock.Mock(return_value=True)
            name = "torch.are_deterministic_algorithms_enabled"
            stack.enter_context(mock.patch(name, on))
        values = given.get("v", given.get("x"))
        call = providers.Asked(values, values.dtype, given, stretch)
        assert providers.own_reason(operator, call) == reason
        found = providers.serve(operator, lambda **_: "ours", given, stretch)
        assert found == "ours" and not calls


def test_a_call_that_no_rule_holds_for_is_served():
    for operator, given, stretch in (one_call(), scan_call(), conv_call()):
        values = given.get("v", given.get("x"))
        with installed():
            call = providers.Asked(values, values.dtype, given, stretch)
            assert providers.own_reason(operator, call) == ""


def raises(*args, **kwargs):
    raise RuntimeError("no kernel image\nis available")


def changed(kind, change):
    """A library's function with another result, and its signature."""
    real = FUNCTIONS[KINDS[kind]]

    @functools.wraps(real)
    def function(*args, **kwargs):
        return change(real(*args, **kwargs))

    return function


def off(result):
    return result * 1.1 if torch.is_tensor(result) else (result[0] * 1.1, result[1])


FAULTS = {"RuntimeError: no kernel image$": raises, "off by 10 %": off}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_library_with_a_fault_is_passed_over_with_one_warning(kind, fault):
    given = given_for(kind, state=False)
    wanted = own(kind, given)
    name = KINDS[kind].replace(" ", "_")
    with installed(**{name: changed(kind, FAULTS[fault])}):
        with pytest.warns(RuntimeWarning, match=f"is passed over.*{fault}"):
            found = results(kind, given)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = results(kind, given)
        assert re.search(f"{KINDS[kind]} passed over: .*{fault.rstrip('$')}", providers.state())
    for name, x in wanted.items():
        assert torch.equal(found[name], x) and torch.equal(again[name], x), name


@pytest.mark.parametrize("how", ["inference", "checkpoint"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_is_apart_from_the_modes_of_its_call(kind, how):
    """A checkpoint counts what is saved, and its second run has no trial."""
    given = given_for(kind, state=False)
    given = {n: x.requires_grad_() if torch.is_tensor(x) else x for n, x in given.items()}

    def call():
        found = causal_conv1d(**given) if kind == "conv" else run(kind, given)[0]
        return found.float().sum()

    with installed() as calls, warnings.catch_warnings():
        warnings.simplefilter("error")
        if how == "checkpoint":
            torch.utils.checkpoint.checkpoint(call, use_reentrant=False).backward()
        else:
            with torch.inference_mode():
                call()
        assert served(calls, kind), providers.faults


def test_another_signature_is_left_out():
    def older(x, weight, bias=None, activation=None):
        raises()

    given = given_for("conv")
    with installed(causal_conv1d=older) as calls, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(results("conv", given)["0"], own("conv", given)["0"]) and not calls
        with mock.patch("torch.cuda.is_available", return_value=True):
            said = providers.state()
    assert "causal_conv1d by causal-conv1d (causal_conv1d_fn takes no seq_idx)" in said
    assert "gated_delta_rule by flash-linear-attention;" in said


def test_a_broken_installation_is_left_out():
    with installed(causal_conv1d=None):
        results("conv", given_for("conv"))
        assert "AttributeError" in providers.load("causal_conv1d")


def test_nothing_is_installed(monkeypatch):
    absent = providers.Provider("x", "no_such_module.at_all", "f", ())
    monkeypatch.setitem(providers.PROVIDERS, "absent", absent)
    assert providers.load("absent") == "not installed"


def test_the_choice(monkeypatch):
    given = given_for("conv")
    with installed() as calls:
        monkeypatch.setattr(providers, "CHOSEN", "own")
        results("conv", given)
        assert not calls and providers.state() == "own: ours; MOE_EXT_RECURRENCE chooses"
        monkeypatch.setattr(providers, "CHOSEN", "fla")
        with pytest.raises(ValueError, match=r"expected MOE_EXT_RECURRENCE to be one of auto, own"):
            results("conv", given)
        assert providers.state() == "'fla', which is none of auto, own"


def test_gradients_of_a_last_state_that_a_library_does_not_give():
    """`results` asks for them; here without the output, and for some arguments alone."""
    given = given_for("scan by element", state=False)
    given = {n: x.requires_grad_() if n in ("x", "B") else x for n, x in given.items()}
    leaves = [given["x"], given["B"]]
    with mock.patch.object(providers, "CHOSEN", "own"):
        wanted = torch.autograd.grad(run("scan by element", given)[1].square().sum(), leaves)
    with installed() as calls:
        found = torch.autograd.grad(run("scan by element", given)[1].square().sum(), leaves)
        assert len(served(calls, "scan by element")) == 1
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, **ROUNDED)


@ALL(*[(kind, scheme) for kind in KINDS for scheme in ("state", "heads")])
def a_library_serves_over_ranks(kind, scheme):
    group = dist.group.WORLD
    how = {} if kind == "conv" else {"scheme": scheme}
    for layout, offsets in (("contiguous", None), ("zigzag", (0, 1, 40, 70))):
        given = given_for(kind, state=kind != "scan by element")
        wanted = own(kind, given, cu_seqlens=offsets)["0"]
        where = {"group": group, "layout": layout, "cu_seqlens": offsets}
        tensors = {n: x for n, x in given.items() if torch.is_tensor(x)}
        parts = {**given, **parts_of(tensors, where)}
        with installed() as calls, warnings.catch_warnings():
            warnings.simplefilter("error")
            found = results(kind, parts, **where, **how)["0"]
            # A scan by element begins with the state of the ranks before, or has documents.
            is_refused = kind == "scan by element" and (scheme == "state" or offsets)
            assert bool(served(calls, kind)) != bool(is_refused), (layout, offsets)
        part = shard_sequence(wanted, dim=2, **where)
        atol = ROUNDED["atol"] * float(wanted.float().abs().max())
        torch.testing.assert_close(found, part, rtol=ROUNDED["rtol"], atol=atol)


test_ranks = ALL.test(2)


def test_stand_ins_have_what_is_passed():
    for operator, provider in providers.PROVIDERS.items():
        with installed():
            assert providers.load(operator) is recurrent_libraries.FUNCTIONS[operator]
        assert provider.function == FUNCTIONS[operator].__name__
