"""The schemes of sequence parallelism by name. Among equal costs "auto" takes the first scheme."""

from moe_ext.attention.schemes.base import Scheme
from moe_ext.attention.schemes.double_ring import DoubleRing
from moe_ext.attention.schemes.gathered import AllGather
from moe_ext.attention.schemes.ring import Ring
from moe_ext.attention.schemes.ulysses import Hybrid, Ulysses

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme for scheme in (Ring(), AllGather(), Ulysses(), DoubleRing(), Hybrid())
}
SCHEME_NAMES = (*SCHEMES, "auto")
