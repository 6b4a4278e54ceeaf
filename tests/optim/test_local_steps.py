"""Steps of 0/1 Adam between two synchronisations."""

import torch
from torch import nn

from moe_ext import optim


def test_zero_one_adam_counts_the_rates_of_a_parameters_own_steps():
    p, q = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    optimizer = optim.ZeroOneAdam(
        [p, q],
        0.1,
        bias_correction=False,
        betas=(0.0, 0.0),
        var_freeze_step=1,
        local_step_scaler=1,
        local_step_clipper=4,
    )
    for step in range(1, 9):  # synchronised after 1, 2, 4 and 8
        p.grad = torch.ones(4)
        q.grad = torch.ones(4) if step < 7 else None
        optimizer.step()
    for parameter, steps in ((p, 8), (q, 6)):
        state = optimizer.state[parameter]
        torch.testing.assert_close(state["exp_avg"], torch.ones(4))
        torch.testing.assert_close(parameter.detach(), torch.full((4,), -0.1 * steps))
