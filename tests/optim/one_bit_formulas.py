"""The published algorithms in float64, over any number of ranks in one process.

Each takes the parameter that all ranks begin with and ``grads``, in each step one of each rank, and
returns the parameter after the last step, with whatever else a test looks at.
"""

import torch


def exact_mean(values):
    return torch.stack(values).mean(0)


class SignMean:
    """1-bit Adam, figure 3: each rank sends signs, whose sum goes back as signs.

    A sign stands for the mean magnitude of its block; the blocks of a tensor are its own.
    """

    def __init__(self, block):
        self.block, self.owed, self.owed_of_sum = block, {}, 0.0

    def signs(self, x):
        found = [
            torch.where(part >= 0, 1.0, -1.0) * part.abs().mean()
            for part in x.flatten().split(self.block)
        ]
        return torch.cat(found).view(x.shape)

    def __call__(self, values):
        total = self.owed_of_sum
        for rank, value in enumerate(values):
            value = value + self.owed.get(rank, 0.0)
            sent = self.signs(value)
            self.owed[rank] = value - sent
            total = total + sent
        sent = self.signs(total)
        self.owed_of_sum = total - sent
        return sent / len(values)


def adam_by_formula(w, grads, *, lr, freeze, corrected, betas, eps, inside, decay, mean=exact_mean):
    """1-bit Adam (arXiv 2102.02888), algorithm 1; `mean` is that of the compressed steps."""
    b1, b2 = betas
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, ranks in enumerate(grads, 1):
        g = exact_mean(ranks)
        if t <= freeze:
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * g * g
        else:
            m = mean([b1 * m + (1 - b1) * g for g in ranks])
        m_hat = m / (1 - b1**t) if corrected else m
        v_hat = v / (1 - b2 ** min(t, freeze)) if corrected else v
        root = (v_hat + eps).sqrt() if inside else v_hat.sqrt() + eps
        w = w * (1 - lr * decay) - lr * m_hat / root
    return w


def lamb_by_formula(
    w,
    grads,
    *,
    lr,
    betas,
    eps,
    decay,
    freeze,
    beta3,
    factors,
    threshold,
    bounds=(0.01, 10.0),
    corrected=False,
    mean=exact_mean,
):
    """1-bit LAMB (arXiv 2104.06069), algorithm 1; up to the freeze the steps of LAMB.

    The ratio of a step before the freeze is within `bounds`. With `corrected`, moments are divided
    by one less the power of their beta, as Adam's. The power of the frozen variance stays that of
    the last step before the freeze.
    """
    (b1, b2), (low, high) = betas, factors
    m, v, average, last, fresh = torch.zeros_like(w), torch.zeros_like(w), 0.0, 1.0, None
    coefficients = []
    for t, ranks in enumerate(grads, 1):
        of_m, of_v, of_fresh = (
            (1 - b1**t, 1 - b2 ** min(t, freeze), 1 - b2**t) if corrected else (1, 1, 1)
        )
        root = (v / of_v).sqrt() + eps
        if t <= freeze:
            g = exact_mean(ranks)
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * g * g
            root = (v / of_v).sqrt() + eps
            r = m / of_m / root + decay * w
            c = 1.0
            if bool(w.any()):  # weights of zero have no ratio, which the mean leaves out
                c = min(max(w.norm().item() / r.norm().item(), bounds[0]), bounds[1])
                average = beta3 * average + (1 - beta3) * c
            fresh = v
        else:
            before, m = m, mean([b1 * m + (1 - b1) * g for g in ranks])
            g = (m - b1 * before) / (1 - b1)
            fresh = b2 * fresh + (1 - b2) * g * g
            direction = m / of_m / root
            r = direction + decay * w
            f = (root / ((fresh / of_fresh).sqrt() + eps)).max().item()
            share = min(1.0, direction.norm().item() / r.norm().item()) if decay else 1.0
            f = min(max(f * share + 1 - share, low), high)
            f = last = min(max(f, last * (1 - threshold)), last * (1 + threshold))
            c = average * f
        coefficients.append(c)
        w = w - lr * c * r
    return w, coefficients


def zero_one_by_formula(
    w, grads, *, lr, betas, eps, decay, freeze, kappa, scaler, clipper, mean=exact_mean
):
    """0/1 Adam (arXiv 2202.06009), algorithm 1; the weights of rank 0."""
    b1, b2 = betas
    num_ranks, zero = len(grads[0]), torch.zeros_like(w)
    m, u, v = [zero] * num_ranks, [zero] * num_ranks, zero
    lrs, updates, shrink, anchor = 0.0, 0, 1.0, w
    interval, counter, local, local_counter = 1, 0, 1, 0
    for t, ranks in enumerate(grads, 1):
        rate = lr / (1 - b1**t)
        if t <= freeze and t % interval == 0:
            g = exact_mean(ranks)
            m = [b1 * m[0] + (1 - b1) * g] * num_ranks
            v, updates, counter = b2 * v + (1 - b2) * g * g, updates + 1, counter + 1
            w = w * (1 - lr * decay) - rate * m[0] / ((v / (1 - b2**updates)).sqrt() + eps)
            anchor = w
            if counter == kappa:
                interval, counter = 2 * interval, 0
            continue
        m = [b1 * m_r + (1 - b1) * g_r for m_r, g_r in zip(m, ranks, strict=True)]
        u = [u_r + rate * m_r for u_r, m_r in zip(u, m, strict=True)]
        lrs, shrink = lrs + rate, shrink * (1 - lr * decay)
        root = (v / (1 - b2**updates)).sqrt() + eps
        if t <= freeze or t % local == 0:
            common = mean(u)
            w = anchor = anchor * shrink - common / root
            m, u, lrs, shrink = [common / lrs] * num_ranks, [zero] * num_ranks, 0.0, 1.0
        else:
            w = w * (1 - lr * decay) - rate * m[0] / root
        if t > freeze:
            local_counter += 1
            if local_counter == scaler:
                local, local_counter = min(clipper, 2 * local), 0
    return w
