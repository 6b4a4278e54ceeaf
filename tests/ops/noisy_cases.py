"""Arguments and tolerances that the tests of the noisy gates share."""

import torch

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
# One rounding to the dtype of the logits on each side.
GRAD_ULP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
NUM_EXPERTS = 24


def acc_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def make_state(*, step=3, first_token=0):
    return torch.tensor([2**40 + 12345, 7, step, first_token])


def random_logits(num_tokens, num_experts, dtype, scale=2.0):
    return (scale * torch.randn(num_tokens, num_experts)).to(dtype)
