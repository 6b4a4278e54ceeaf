"""Every operator takes tensors at any address that its dtype allows, and rows at any distance.

A gradient may be a view of a flat buffer, at an offset that no vector of a SIMD loop or of a CUDA
kernel divides. The emulation of CUDA refuses an access that is not aligned to its width.
"""

import functools
import itertools
import mmap
import re

import operator_table
import pytest
import torch
from pairwise import FULL

import moe_ext

# Elements that a tensor lies behind the beginning of its storage.
OFFSETS = (1, 2, 3, 5)
# Packed bytes are read in whole words; tensors written in place or read as bytes are dense.
DENSE = "contiguous|columns of out to be adjacent|memory for each element"
REFUSALS = {
    "shifted": re.compile("expected packed to begin at a multiple of 4 bytes"),
    "spread": re.compile(DENSE),
    "expanded": re.compile(DENSE),
    "far": re.compile(DENSE),
}
# Elements between the first and the last row of a tensor that is "far": those of 64 rows, too, are
# more than 32 bits count.
FAR = 2**36
DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)
# Four tensors in a row have four dtypes; the next turn gives each the next one.
TURNS = range(len(DTYPES)) if FULL else (0,)

# Sizes by a part of a name, where the emulation takes long: two tiles of attention still, three
# chunks of a delta rule, and a block a channel of a convolution.
FEW = {
    "attention": {"D": 32, "S": 66},
    "delta_rule": {"S": 34, "F": 16},
    "selective_scan": {"S": 66},
    "conv1d": {"F": 6},
}


@pytest.fixture(scope="module")
def table():
    return operator_table.load()


def shifted(x, offset):
    """A copy of x at an offset in its storage."""
    storage = torch.zeros(x.numel() + offset, dtype=x.dtype, device=x.device)
    return storage[offset:].view(x.shape).copy_(x)


def spread(x):
    """A copy of x whose elements lie two apart, and whose rows end three elements later."""
    if x.dim() == 0:
        return x.clone()
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1] + 3, dtype=x.dtype, device=x.device)
    return wide[..., : 2 * x.shape[-1] : 2].copy_(x)


def expanded(x):
    """One number, or one row of integers, as often as x has; x where the others count."""
    if x.is_floating_point() and x.numel() > 0:
        return x.flatten()[:1].view([1] * x.dim()).expand_as(x)
    return x[:1].expand_as(x) if x.dim() > 1 or x.dtype == torch.bool else x


def far(x, gap):
    """A copy of x whose rows take FAR elements; index arithmetic of 32 bits would miss them.

    Rows are aligned but for the gap. On a device, that has no addresses without memory, they are
    the gap further apart.
    """
    if x.dim() < 2 or x.shape[-2] < 2:
        return x
    if x.device.type != "cpu":
        return torch.nn.functional.pad(x, (0, gap))[..., : x.shape[-1]]
    strides = [x.shape[-1]] * x.dim()
    for at in reversed(range(x.dim() - 3)):
        strides[at] = strides[at + 1] * x.shape[at + 1]
    width = 64 * strides[0] * x.shape[0]
    strides[-2:] = FAR // (x.shape[-2] - 1) // width * width + gap, 1
    # Addresses, of which those that are not touched take no memory. As many are below: a product
    # that became negative finds zeros there.
    no_reserve = 0x4000  # MAP_NORESERVE, which Python does not name
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    memory = torch.frombuffer(
        mmap.mmap(-1, (2 * FAR + 2**22) * x.itemsize, flags=flags), dtype=x.dtype
    )
    return memory.as_strided(x.shape, strides, FAR).copy_(x)


def changes(layout, tensors):
    """Pairs: which of an operator's tensors change, and how."""
    alone = [(place,) for place in tensors]
    if layout == "shifted":
        together = [(tensors, offset) for offset in (OFFSETS if len(tensors) == 1 else OFFSETS[:2])]
        each = [(which, OFFSETS[which[0] % len(OFFSETS)]) for which in alone if len(tensors) > 1]
        return [(which, functools.partial(shifted, offset=at)) for which, at in together + each]
    if layout == "far":
        return [(which, functools.partial(far, gap=gap)) for which in alone for gap in (0, 3)]
    return [(which, spread if layout == "spread" else expanded) for which in alone]


def tensors_of(arguments):
    return [place for place, x in enumerate(arguments) if isinstance(x, torch.Tensor)]


def copied(x):
    return x.clone() if isinstance(x, torch.Tensor) else x


def test_every_tensor_of_every_operator_is_in_the_table(table):
    assert set(table.registered()) == set(table.CALLS)
    for name in table.CALLS:
        declared = table.op(name).default._schema.arguments
        made = table.calls(name, table.Inputs(torch.float32))
        given = {declared[place].name for arguments in made for place in tensors_of(arguments)}
        assert given == {a.name for a in declared if "Tensor" in str(a.type)}, name


@pytest.fixture(scope="module")
def made(table):
    """By operator, dtype and device: its arguments, the same for every layout."""
    inputs = functools.cache(lambda dtype, *sizes: table.Inputs(dtype))

    def call(name, dtype, where):
        """Emulated kernels take one stage of head dims, and few channels of a recurrence."""
        table.D, table.S, table.F = 64, 72, 32
        for kernel, sizes in FEW.items() if where == "simt" else ():
            vars(table).update(sizes if kernel in name else {})
        return table.calls(name, inputs(dtype, table.D, table.S, table.F))

    return functools.cache(call)


@pytest.fixture(scope="module")
def results():
    """By an operator and its dense arguments: what its kernel for the CPU returns."""
    return {}


def tried(table, made, layout, half, turn, where):
    """(operator, dtype, number of the arguments, tensors that change, how) of half of them."""
    dtypes = itertools.cycle(DTYPES[turn:] + DTYPES[:turn])
    for name in list(table.CALLS)[half::2]:
        known = []
        for number, sample in enumerate(made(name, torch.float32, where)):
            tensors = [place for place in tensors_of(sample) if place not in known]
            known += tensors
            for which, change in changes(layout, tensors):
                dtype = next(dtypes)
                if any(change(sample[at]) is not sample[at] for at in which):
                    yield name, dtype, number, which, change
        next(dtypes)


def changed(arguments, which, change):
    """Copies of arguments, some of them changed."""
    return tuple(change(x) if at in which else copied(x) for at, x in enumerate(arguments))


def result_of_dense(table, name, arguments, which):
    """Results of an operator where the changed tensors lie densely."""
    dense = functools.partial(torch.clone, memory_format=torch.contiguous_format)
    return [x.cpu() for x in table.result(name, changed(arguments, which, dense))]


@pytest.fixture
def cases(table, made, results, layout, half, turn, request):
    """Operators with odd arguments, and their results: known before any kernel is emulated."""
    where, found = request.node.callspec.params["device"], []
    for name, dtype, number, which, change in tried(table, made, layout, half, turn, where):
        arguments, key = made(name, dtype, where)[number], (where, name, dtype, number)
        # An expanded tensor has other numbers, which cancel but for the order of a device's sums.
        if layout != "expanded" and key not in results:
            results[key] = result_of_dense(table, name, arguments, which)
        found.append((name, dtype, arguments, which, change, results.get(key)))
    return found


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("layout", list(REFUSALS))
def test_gives_the_same_result_or_refuses_the_layout(table, cases, device, layout, half, turn):
    """Each tensor by itself, and at an offset all at once."""
    wrong = []
    for name, dtype, arguments, which, change, expected in cases:
        odd = changed(table.moved(arguments, device), which, change)
        if layout == "expanded":
            expected = result_of_dense(table, name, odd, which)
        try:
            why = table.difference(table.result(name, odd), expected, table.TOLERANCE[dtype])
        except RuntimeError as error:
            why = str(error)
            if why.startswith(f"{name}: expected ") and REFUSALS[layout].search(why):
                continue
        if why:
            wrong.append(f"{name}, {dtype}, tensors {list(which)}: {why}")
    assert not wrong, "\n".join(wrong)


def test_gradients_that_are_views_of_a_flat_buffer(device):
    """A layer adds to them where they are, at an odd element of the buffer."""
    grads = []
    for offset in (0, 1):
        torch.manual_seed(0)
        layer = moe_ext.MoELayer(32, 16, 4, 2, bias=True, device=device, dtype=torch.bfloat16)
        x_TD = torch.randn(40, 32, device=device, dtype=torch.bfloat16)
        flat = torch.zeros(sum(p.numel() for p in layer.parameters()) + offset, device=device)
        flat, at = flat.bfloat16(), offset
        for p in layer.parameters():
            p.grad = flat[at : at + p.numel()].view_as(p)
            at += p.numel()
        for _ in range(2):
            layer(x_TD).square().sum().backward()
        grads.append(flat[offset:])
    assert grads[0].count_nonzero() > 0 and torch.equal(*grads)
