"""Arguments and tolerances that the tests of the noisy gates share."""

import torch

NUM_EXPERTS = 24


def make_state(*, step=3, first_token=0):
    return torch.tensor([2**40 + 12345, 7, step, first_token])


def random_logits(num_tokens, num_experts, dtype, scale=2.0):
    return (scale * torch.randn(num_tokens, num_experts)).to(dtype)
