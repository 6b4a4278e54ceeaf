"""Two replica groups under torchft itself: one is killed, the other goes on, and it comes back.

Needs the wheel torchft-nightly: python tests/integrations/torchft_groups.py
"""

import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import moe_ext
from moe_ext import distributed as md
from moe_ext.integrations.torchft import ReplicaState, average_over_groups
from moe_ext.testing import _free_port

STEPS = 20  # of both groups, after the one that was killed is back


def train(group, rank, port, folder):
    """A rank of a group of two."""
    import torchft

    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = md.MoEMesh(dp=1, ep=2)
    torch.manual_seed(0)  # groups begin with equal weights
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), moe_ext.MoELayer(8, 6, 4, ep_group=mesh.ep_group)
    )
    for parameter in model[0].parameters():
        dist.broadcast(parameter.data, 0)
    dist.broadcast(model[1].router.weight.data, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = ReplicaState(model, [optimizer])
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=state.load_state_dict,
        state_dict=state.state_dict,
        min_replica_size=1,
        replica_id=f"group_{group}",
        rank=rank,
        world_size=2,
        store_addr="127.0.0.1",
        store_port=port,
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=30),
    )
    with open(f"{folder}/group{group}-{rank}.log", "a") as log:
        while (step := manager.current_step()) < last_step(folder):
            manager.start_quorum()
            optimizer.zero_grad()
            torch.manual_seed(100 * step + 10 * group + rank)
            loss = model(torch.randn(6, 8)).square().mean()
            loss.backward()
            average_over_groups(manager, model)
            md.sync_gradients(model)
            md.clip_grad_norm_(model, 1.0)
            taken = manager.should_commit()
            if taken:
                optimizer.step()
            print(step, manager.num_participants(), taken, loss.item(), file=log, flush=True)
            time.sleep(0.1)
    torch.save(md.full_state_dict(model), f"{folder}/group{group}-{rank}.pt")
    manager.shutdown(wait=False)
    sys.stdout.flush()
    os._exit(0)


def start(group, folder, lighthouse):
    port = str(_free_port())
    environment = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(group)]
    return [
        subprocess.Popen([*command, str(rank), port, folder], env=environment) for rank in range(2)
    ]


def last_step(folder):
    """Where training ends, once it is known; long before it is reached."""
    path = Path(folder, "last step")
    return int(path.read_text()) if path.exists() else 10**9


def steps_of(folder, group):
    """(step, groups that took part, whether the step was taken) of each round of a group."""
    path = Path(folder, f"group{group}-0.log")
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(s), int(n), t == "True") for s, n, t, _ in (line.split() for line in lines)]


def wait_until(done, seconds=60):
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def main():
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=2000, heartbeat_timeout_ms=1000
    )
    with tempfile.TemporaryDirectory() as folder:
        first = start(0, folder, lighthouse.address())
        second = start(1, folder, lighthouse.address())
        try:
            wait_until(lambda: sum(n == 2 for _, n, _ in steps_of(folder, 0)) >= 5)
            for process in second:
                process.kill()
                process.wait()
            killed = time.monotonic()
            wait_until(lambda: sum(t for _, n, t in steps_of(folder, 0)[-4:] if n == 1) == 4)
            print(f"group 0 has taken 4 steps alone {time.monotonic() - killed:.1f} s after that")
            second = start(1, folder, lighthouse.address())
            joined = len(steps_of(folder, 0))
            wait_until(lambda: any(n == 2 for _, n, _ in steps_of(folder, 0)[joined:]))
            last = steps_of(folder, 0)[-1][0] + STEPS
            Path(folder, "last").write_text(str(last))
            Path(folder, "last").rename(Path(folder, "last step"))
            codes = [process.wait(timeout=90) for process in (*first, *second)]
        finally:
            for process in (*first, *second):
                process.kill()
        assert codes == [0] * 4, codes
        rounds = steps_of(folder, 0)
        print("rounds of group 0:", len(rounds), "steps not taken:", sum(not t for *_, t in rounds))
        print("steps alone:", sum(n == 1 and t for _, n, t in rounds))
        assert rounds[-1] == (last - 1, 2, True)
        assert all(n == 2 and taken for _, n, taken in rounds[-STEPS // 2 :])
        states = [torch.load(f"{folder}/group{g}-{r}.pt") for g in range(2) for r in range(2)]
        for state in states[1:]:
            for name, tensor in states[0].items():
                assert torch.equal(tensor, state[name]), name
        print("weights of both groups are equal, bit for bit")
    lighthouse.shutdown()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main()
