"""Adam's step against a formula in float64, the same bits everywhere, and what is refused."""

import pytest
import torch

from moe_ext import ops, reference

NUMELS = [0, 1, 15, 16, 17, 511, 513, 5000]
OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "grad_scale": 0.7}
KINDS = [torch.float32, torch.bfloat16, torch.float16]


def made(numel, kind=torch.float32):
    generator = torch.Generator().manual_seed(numel)
    w, m, g = (torch.randn(numel, generator=generator) for _ in range(3))
    return w, g.to(kind), 0.1 * m, torch.rand(numel, generator=generator)


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copied", [None, torch.bfloat16, torch.float16])
def test_against_float64(isa, numel, kind, copied):
    w, g, m, v = made(numel, kind)
    want = [x.double() for x in (w, g, m, v)]
    reference.adam_step_(*want, step=3, **OPTIONS)
    copy = torch.empty(numel, dtype=copied) if copied else None
    ops.adam_step_(w, g, m, v, step=3, **OPTIONS, copy=copy)
    u = 2**-24
    w64, _, m64, v64 = want
    # Of m: the factors, two roundings and a sum. Of v: two factors and three roundings. Of w: its
    # own product and sum; of the quotient what m has, half of v's, and six roundings.
    wrong_m = 4 * u * (m64.abs() + g.double().abs())
    divisor = (v64 / (1 - 0.999**3)).sqrt()
    wrong_w = 4 * u * w64.abs() + 0.02 / (1 - 0.9**3) * (wrong_m + 9 * u * m64.abs()) / divisor
    for found, exact, wrong in ((m, m64, wrong_m), (v, v64, 5 * u * v64), (w, w64, wrong_w)):
        assert bool(((found - exact).abs() <= wrong).all())
    if copied:
        assert torch.equal(copy, w.to(copied))


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("copied", [torch.bfloat16, torch.float16])
def test_goes_on_from_what_was_written(isa, numel, copied):
    """Elements of the copy that are not the rounded parameter stand for it, and no others."""
    w, g, m, v = made(numel)
    copy = w.to(copied)
    written = torch.arange(numel) % 3 == 1
    copy[written] += 2
    want = [torch.where(written, copy.float(), w), g, m.clone(), v.clone()]
    ops.adam_step_(*want, step=3, **OPTIONS)
    ops.adam_step_(w, g, m, v, step=3, **OPTIONS, copy=copy, follow_copy=True)
    assert all(torch.equal(a, b) for a, b in zip(want, (w, g, m, v), strict=True))
    assert torch.equal(copy, w.to(copied))
    # Not asked to, it does not look.
    copy += 1
    plain = [x.clone() for x in want]
    ops.adam_step_(w, g, m, v, step=4, **OPTIONS, copy=copy)
    ops.adam_step_(*plain, step=4, **OPTIONS)
    assert torch.equal(plain[0], w)


W, G, M, V = made(10)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((W.double(), G, M, V), {}, r"^adam_step_: expected param to be Float, got Double$"),
        ((W, G.double(), M, V), {}, r"expected grad to be float32, bfloat16 or float16, got Dou"),
        ((W, G[:9], M, V), {}, r"expected grad to have 10 elements as param, got shape \[9\]$"),
        ((W, G, M.bfloat16(), V), {}, r"expected exp_avg to be Float, got BFloat16$"),
        ((W, torch.randn(20)[::2], M, V), {}, r"expected grad to be contiguous, got a strided"),
        (
            (W, G, M, M),
            {},
            r"expected exp_avg_sq to be in memory of its own, got a part of exp_avg's",
        ),
        ((W, W, M, V), {}, r"expected grad to be in memory of its own"),
        ((W, G, M, V), {"copy": W}, r"expected copy to be bfloat16 or float16, got Float$"),
        ((W, G, M, V), {"step": 0}, r"expected step to be at least 1, got 0$"),
    ],
)
def test_refuses(arguments, options, message):
    before = [x.clone() for x in (W, G, M, V)]
    with pytest.raises(RuntimeError, match=message):
        ops.adam_step_(*arguments, **{"step": 1, **OPTIONS, **options})
    assert all(torch.equal(a, b) for a, b in zip(before, (W, G, M, V), strict=True))


def test_opcheck():
    w, g, m, v = made(50)
    arguments = (w, g, m, v, w.bfloat16(), 1, 0.1, 0.9, 0.99, 1e-8, 0.1, 1.0, True)
    torch.library.opcheck(torch.ops.moe_ext.adam_step_.default, arguments)


def test_refuses_parameters_of_a_gpu():
    with torch._subclasses.FakeTensorMode():
        tensors = torch.empty(4, 8, device="cuda").unbind()
    with pytest.raises(ValueError, match="param to be on cpu, got cuda:0, for which there is"):
        ops.adam_step_(*tensors, step=1, lr=0.1)
