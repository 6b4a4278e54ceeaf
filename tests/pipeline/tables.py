"""Random tables that are in order, since they were written in the order of a run."""

from moe_ext.pipeline import Action, ActionTable


def table_of(*rows):
    """The table of these texts, one for each rank."""
    return ActionTable([[Action.from_text(text) for text in row.split()] for row in rows])


def random_table(random, *, chains=1, slices=1):
    """Stages on any ranks, each chain with ranks and micro-batches of its own."""
    num_ranks = random.randint(1, 4)
    num_stages = random.randint(num_ranks, 2 * num_ranks)
    micro = random.randint(chains, 4)
    ranks = [
        [*range(num_ranks), *(random.randrange(num_ranks) for _ in range(num_stages - num_ranks))]
        for _ in range(chains)
    ]
    for of_chain in ranks:
        random.shuffle(of_chain)
    todo = {}
    for number in range(micro):
        chain, split = number % chains, random.random() < 0.5
        for part in range(slices):
            for stage in range(num_stages):
                todo.update(_of_unit(stage, number, chain, part, split, num_stages, slices))
    rows = [[] for _ in range(num_ranks)]
    while todo:
        ready = [action for action, needs in todo.items() if not needs & todo.keys()]
        action = random.choice(ready)
        del todo[action]
        rows[ranks[action.chain][action.stage]].append(action)
    return ActionTable(rows)


def _of_unit(stage, number, chain, part, split, num_stages, slices):
    """The actions of a micro-batch in a stage, each with those before it."""

    def action(kind, at=stage, slice_=part):
        return Action(at, kind, number, chain, slice_)

    forward = {action("F", stage - 1)} if stage else set()
    backward = {action("F")}
    for kind in "BI":
        backward |= {action(kind, stage + 1)} if stage + 1 < num_stages else set()
        backward |= {action(kind, slice_=part + 1)} if part + 1 < slices else set()
    forward |= {action("F", slice_=part - 1)} if part else set()
    yield action("F"), forward
    if split:
        yield action("I"), backward
        yield action("W"), {action("I")}
    else:
        yield action("B"), backward
