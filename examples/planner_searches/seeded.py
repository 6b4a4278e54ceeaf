"""Seeded problems to compare searches on: graphs of a few operators, sharded, placed or staged."""

from __future__ import annotations

import random

from planner_searches.problem import Edge, Matrix, Pipeline, Problem, Way

KINDS = ("chain", "series-parallel", "dag")
# Options of operators of a pipeline: two ways are along either of two axes.
WAYS = (Way(1, False), Way(1, True), Way(2, False), Way(2, False), Way(2, True))
# (devices, ways) of stages.
SHAPES = ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2))


def random_edges(kind: str, num_nodes: int, draw: random.Random) -> list[Edge]:
    """Edges of a connected graph, from smaller to larger numbers.

    Raises:
        ValueError: `kind` is not one of `KINDS`.
    """
    if kind not in KINDS:
        raise ValueError(f"random_edges: expected kind to be one of {KINDS}, got {kind!r}")
    chain = [(i, i + 1) for i in range(num_nodes - 1)]
    if kind == "chain":
        return chain
    if kind == "dag":
        more = [(i, j) for j in range(num_nodes) for i in range(j - 1) if draw.random() < 0.3]
        return sorted({(draw.randrange(j), j) for j in range(1, num_nodes)} | {*more})
    # Between the ends of an edge goes an operator, beside the edge or in its place.
    edges, places = {(0.0, 1.0)}, [0.0, 1.0]
    while len(places) < num_nodes:
        a, b = draw.choice(sorted(edges))
        middle = draw.uniform(a, b)
        if draw.random() < 0.5:
            edges.remove((a, b))
        edges |= {(a, middle), (middle, b)}
        places.append(middle)
    places.sort()
    return sorted((places.index(a), places.index(b)) for a, b in edges)


def sharding(kind: str, num_nodes: int, seed: int, *, tight: bool = False) -> Problem:
    """Operators over 2 x 2 devices, each halving along one of two axes: four options.

    The outer halving goes over links that are four times slower. An operator pays for the axes
    along which it sums, an edge for axes that change. `tight`: memory binds.
    """
    draw = random.Random(f"{kind} {num_nodes} {seed}")
    links = (4.0, 1.0)
    options = [(a, b) for a in (0, 1) for b in (0, 1)]
    seconds, memory = [], []
    for _ in range(num_nodes):
        sums = [[draw.uniform(0, link) for _ in range(2)] for link in links]
        both, work = draw.uniform(0, 2), draw.uniform(2, 8)
        seconds.append(
            tuple(work + sums[0][a] + sums[1][b] + (both if a == b else 0.0) for a, b in options)
        )
        # Quick options take more memory, as a rule.
        memory.append(tuple(draw.uniform(4, 8) * 12 / s for s in seconds[-1]))
    edges: dict[Edge, Matrix] = {}
    for edge in random_edges(kind, num_nodes, draw):
        size = draw.uniform(0.2, 1.0)
        edges[edge] = tuple(
            tuple(
                size * sum(w for w, x, y in zip(links, p, q, strict=True) if x != y)
                for q in options
            )
            for p in options
        )
    least, most = sum(map(min, memory)), sum(map(max, memory))
    capacity = least + 0.3 * (most - least) if tight else float("inf")
    return Problem(tuple(seconds), edges, tuple(memory), capacity)


def placement(kind: str, num_nodes: int, seed: int, *, devices: int = 3) -> Problem:
    """Operators on one device each; edges between two devices take time."""
    draw = random.Random(f"{kind} {num_nodes} {seed}")
    seconds = tuple(
        tuple(work * draw.uniform(0.8, 1.2) for _ in range(devices))
        for work in [draw.uniform(1, 6) for _ in range(num_nodes)]
    )
    edges: dict[Edge, Matrix] = {}
    for edge in random_edges(kind, num_nodes, draw):
        hop = draw.uniform(0.2, 2.0)
        edges[edge] = tuple(
            tuple(0.0 if p == q else hop for q in range(devices)) for p in range(devices)
        )
    memory = tuple((draw.uniform(1, 3),) * devices for _ in range(num_nodes))
    capacity = 1.5 * sum(row[0] for row in memory) / devices + 1.5
    return Problem(seconds, edges, memory, capacity, placed=True)


def staged(
    kind: str, num_nodes: int, seed: int, *, tight: bool = False, unlike: bool = False
) -> Pipeline:
    """Operators over four devices; `tight`: memory binds; `unlike`: devices of several speeds."""
    draw = random.Random(f"{kind} {num_nodes} {seed}")
    seconds, memory, weights = [], [], []
    for _ in range(num_nodes):
        work, kept = draw.uniform(2, 8), draw.uniform(1, 2)
        sharded = [0.55 * work + draw.uniform(0.0, 1.0) for _ in range(2)]
        seconds.append((work, work * 4 / 3, *sharded, sharded[0] * 4 / 3))
        memory.append((kept, 0.2 * kept, 0.5 * kept, 0.6 * kept, 0.1 * kept))
        weights.append(draw.uniform(2, 6))
    edges: dict[Edge, Matrix] = {}
    cut: dict[Edge, float] = {}
    for edge in random_edges(kind, num_nodes, draw):
        cut[edge] = draw.uniform(0.1, 1.0)
        # Axes of two ways differ: the edge changes the layout.
        axes = [0, 0, 0, 1, 0]
        edges[edge] = tuple(tuple(0.5 * cut[edge] if p != q else 0.0 for q in axes) for p in axes)
    capacity = float("inf")
    if tight:
        capacity = 0.35 * (sum(weights) + 4 * sum(row[0] for row in memory))
    speeds = (1.0, 0.6, 1.0, 0.4) if unlike else (1.0,) * 4
    return Pipeline(
        Problem(tuple(seconds), edges, tuple(memory), capacity),
        WAYS,
        tuple(weights),
        cut,
        speeds,
        SHAPES,
        batch=16,
        micro_batches=(1, 2, 4),
        sync=0.1,
        launch=0.3,
    )
