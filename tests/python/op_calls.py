"""One call of every registered operator, forward and backward, for the tests of what holds for all of them."""

import os
import subprocess
import sys
from pathlib import Path

import torch

import muvox

MEAN_MAX, INF = 0x21, float("inf")
NONE = torch.empty(0, dtype=torch.int64)
FORMS = {
    "uniform": dict(ragged=False, options=False),
    "ragged": dict(ragged=True, options=False),
    "uniform with options": dict(ragged=False, options=True),
    "ragged with options": dict(ragged=True, options=True),
}


def draw(*widths, ragged, rows=6, dtype=torch.float32, requires_grad=True):
    """Tensors of these widths for three sets, and splits."""
    shape = (3 * rows,) if ragged else (3, rows)
    tensors = [torch.randn(*shape, width, dtype=dtype, requires_grad=requires_grad) for width in widths]
    return *tensors, torch.tensor([0, rows, rows, 3 * rows]) if ragged else NONE


def columns(x, options, requires_grad=True):
    """Mask and two columns of numbers for the rows of x, or three that are not given."""
    if not options:
        return NONE, NONE, NONE
    rows = x.shape[:-1]
    return torch.rand(rows) < 0.8, *(torch.rand(rows, requires_grad=requires_grad) for _ in range(2))


def knn(options=False, **how):
    """With options: queries, which are in twice as many rows."""
    x, splits = draw(3, **how)
    queries, query_splits = NONE, NONE
    if options:
        queries, query_splits = draw(3, **how | {"rows": 2 * how.get("rows", 6)})
    return x, queries, splits, query_splits, columns(x, options)[0], 4, False, 2.0 if options else INF, options


def gravnet(options=False, **how):
    x, f, splits = draw(3, 5, **how)
    mask, w, _ = columns(x, options, how.get("requires_grad", True))
    return x, f, splits, mask, w, 4, 0.5, MEAN_MAX, options, options, 2.0 if options else INF, True


def aggregate(options=False, **how):
    f, w, splits = draw(5, 4, **how)
    return f, torch.randint(-1, 6, w.shape, dtype=torch.int32), w, splits, MEAN_MAX, True


def attention(options=False, **how):
    q, k, v, splits = draw(3, 3, 5, **how)
    mask, bias, w = columns(q, options, how.get("requires_grad", True))
    return q, k, v, splits, bias, mask, w, 0.7


def offset_attention(options=False, **how):
    q, k, v, splits = draw(3, 3, 5, **how)
    return q, k, v, splits, columns(q, options)[0], 0.7, 1e-17


def neighbour_attention(options=False, **how):
    """With options: offset."""
    *rows, splits = draw(3, 5, 2, 2, 5, 5, **how)
    wide = torch.float64 if rows[0].dtype == torch.float64 else torch.float32
    biases = [torch.randn(1, n, dtype=wide, requires_grad=rows[0].requires_grad) for n in (2, 2, 5, 5)]
    rows[5] = rows[5] if options else NONE
    return *rows, *biases, splits, columns(rows[0], options)[0], 4, 0.5, MEAN_MAX, 4, options, True


def pool(options=False, **how):
    x, splits = draw(5, **how)
    mask, w, _ = columns(x, options, how.get("requires_grad", True))
    return x, splits, mask, w, MEAN_MAX, True


def voxelize(ragged=False, options=False, rows=6, dtype=torch.float32, requires_grad=True):
    """These three have no sets; the forms differ in the integers."""
    feats = torch.randn(3 * rows, 5, dtype=dtype, requires_grad=requires_grad)
    integer = torch.int32 if options else torch.int64
    return feats, torch.randint(-1, 6, (3 * rows,), dtype=integer), torch.tensor([3, 0, 2, 5, 1], dtype=integer)


def devoxelize(ragged=False, options=False, rows=6, dtype=torch.float32, requires_grad=True):
    feats, weights = (torch.randn(n, w, dtype=dtype, requires_grad=requires_grad) for n, w in ((5, 4), (3 * rows, 8)))
    return feats, torch.randint(-1, 6, (3 * rows, 8), dtype=torch.int32 if options else torch.int64), weights


def trilinear_weights(ragged=False, options=False, rows=6, dtype=torch.float32, requires_grad=True):
    points = (3 * torch.rand(3 * rows, 3, dtype=dtype)).requires_grad_(requires_grad)
    return points, 0.0, 0.1, 0.2, 1.0, 0.9, 0.8, 3, 2, 2


def all_wanted(tensors):
    """One bit for each of the differentiable arguments that are given."""
    return sum(1 << place for place, x in enumerate(tensors) if x is not NONE)


# One line per operator: arguments of the registered one, and those of its backward from (inputs, results, gradient).
OPS = {
    "knn": (knn, lambda i, r: (torch.randn_like(r[0]), *i[:4], r[1], i[8], all_wanted(i[:2]))),
    "gravnet": (
        gravnet,
        lambda i, r: (torch.randn_like(r[0]), *i[:3], i[4], r[1], r[2], *i[6:9], all_wanted((i[0], i[1], i[4]))),
    ),
    "aggregate": (aggregate, lambda i, r: (torch.randn_like(r[0]), *i[:4], r[1], i[4], 3)),
    "attention": (
        attention,
        lambda i, r: (torch.randn_like(r[0]), torch.randn_like(r[1]), *i[:7], *r, i[7], all_wanted((*i[:3], i[4], i[6]))),
    ),
    "offset_attention": (offset_attention, lambda i, r: (torch.randn_like(r[0]), *i[:5], *r, *i[5:], 7)),
    "neighbour_attention": (
        neighbour_attention,
        lambda i, r: (torch.randn_like(r[0]), *i[:11], *r[1:], *i[13:17], all_wanted(i[:10])),
    ),
    "pool": (pool, lambda i, r: (torch.randn_like(r[0]), *i[:4], r[1], i[4], all_wanted((i[0], i[3])))),
    "voxelize": (voxelize, lambda i, r: (torch.randn_like(r), *i[1:])),
    "devoxelize": (devoxelize, lambda i, r: (torch.randn_like(r), *i, 3)),
    "trilinear_weights": (trilinear_weights, lambda i, r: (torch.randn_like(r[0]), *i)),
}


def operator(name):
    return getattr(torch.ops.muvox, name).default


def arguments(op, **how):
    return OPS[op][0](**how)


def backward_arguments(op, **how):
    inputs = arguments(op, requires_grad=False, **how)
    return OPS[op][1](inputs, operator(op)(*inputs))


def differentiable(results):
    return [r for r in results if r.requires_grad]


def run(function, inputs):
    """All differentiable results, and the gradients of all differentiable inputs where each of theirs is 1."""
    results = differentiable(as_tuple(function(*inputs)))
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    return *results, *torch.autograd.grad(results, leaves, [torch.ones_like(r) for r in results])


def as_tuple(results):
    return results if isinstance(results, (tuple, list)) else (results,)


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert torch.equal(a, b)


def in_fresh_process(program, timeout=120):
    path = os.pathsep.join([str(Path(muvox.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
