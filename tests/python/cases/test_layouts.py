"""Rows 23, 24, 33, 50 and 51: strides, tiny sets, ragged layout."""

import pytest
import torch

import muvox
from cases.calls import CALLS, SETS, assert_as, assert_same, entering, gradients, ragged, rows, run

each_call = pytest.mark.parametrize("name", CALLS)
each_set = pytest.mark.parametrize("name", SETS)


# Strides and views


def test_slices_of_one_tensor_and_transposed_views():
    """Row 23: slr[:, :, :S] as LUMIN takes them, and .t() views."""
    slr = torch.randn(3, 20, 26).requires_grad_()
    x, f = slr[:, :, :4], slr[:, :, 4:]
    plain = [t.detach().contiguous().requires_grad_() for t in (x, f)]
    out, right = muvox.gravnet(x, f, 6), muvox.gravnet(*plain, 6)
    assert torch.equal(out, right)
    assert torch.equal(gradients(out, [slr])[0], torch.cat(gradients(right, plain), -1))
    columns = [t.detach()[0].t().contiguous().requires_grad_() for t in (x, f)]
    turned = muvox.gravnet(columns[0].t(), columns[1].t(), 6)
    one = muvox.gravnet(*(t[:1] for t in plain), 6)[0]
    assert torch.equal(turned, one)
    for g, h in zip(gradients(turned, columns), gradients(one, plain)):
        assert torch.equal(g.t(), h[0])


VIEWS = {
    "slice of the columns": lambda x: torch.cat([x, 0 * x, x], -1)[..., x.shape[-1] * 2 :],
    "every other row": lambda x: torch.stack([x, -x], -2).flatten(-3, -2)[..., ::2, :],
    "columns apart": lambda x: x.mT.contiguous().mT,
    "transposed sets": lambda x: x.transpose(0, -2).contiguous().transpose(0, -2),
    "reversed and back": lambda x: x.flip(0).flip(0),
    "expanded": lambda x: x[:1, :1].expand(x.shape),
}


@each_call
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.half, torch.float])
def test_views_are_as_contiguous(name, view, dtype):
    """Row 23: both arguments, each alone, results and gradients."""
    for places in ((0, 1), (0,), (1,)):
        inputs = rows(3, 8, dtype=dtype)
        views = [VIEWS[view](t.detach()) if place in places else t for place, t in enumerate(inputs)]
        plain = [t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for t in views]
        views = [t.detach().requires_grad_() for t in views]
        assert any(t.stride() != p.stride() for t, p in zip(views, plain)) or "reversed" in view
        assert_as(name, run(CALLS[name], *views), run(CALLS[name], *plain))


@each_set
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_ragged_sets(name, view):
    """Row 23: the same with splits, which may be strided too."""
    splits = ragged(5, 0, 1, 6)
    apart = splits.repeat_interleave(2)[::2]
    views = [VIEWS[view](t.detach()).requires_grad_() for t in rows(12)]
    plain = [t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for t in views]
    assert_as(name, run(SETS[name], *views, splits=apart), run(SETS[name], *plain, splits=splits))


@each_call
def test_gradients_of_any_stride(name):
    """Row 24: transposed and stride-0 gradients give what contiguous ones give."""
    x, f = rows(3, 12)
    results = CALLS[name](x, f)

    def back(of):
        return torch.autograd.grad(results, [x, f], [of(y) for y in results], retain_graph=True, materialize_grads=True)

    def turned(y):
        return entering(y).mT.contiguous().mT

    def apart(y):
        return torch.stack([entering(y), entering(y) + 1], -1)[..., 0]

    assert not turned(results[0]).is_contiguous() and not apart(results[0]).is_contiguous()
    assert_same(back(turned), back(entering))
    assert_same(back(apart), back(entering))
    same = back(lambda y: torch.full(y.shape, 0.5))
    assert_same(back(lambda y: torch.tensor(0.5).expand(y.shape)), same)
    summed = sum(0.5 * y.sum() for y in results)
    assert_same(torch.autograd.grad(summed, [x, f], retain_graph=True, materialize_grads=True), same)
    assert_same(back(lambda y: torch.full(y.shape[-1:], 0.5).expand(y.shape)), same)


# Tiny sets


def test_tiny_segments():
    """Row 33: k = 1 and segments of one row: every row is its own neighbour, and attention copies v."""
    lengths = 1, 1, 2, 1, 3, 1
    x, v = torch.randn(9, 3), torch.randn(9, 4)
    splits = ragged(*lengths)
    neighbours, distance2 = muvox.knn(x, 1, splits=splits)
    assert neighbours[:, 0].tolist() == [0, 0, 0, 1, 0, 0, 1, 2, 0] and not distance2.any()
    assert torch.equal(muvox.gravnet(x, v, 1, splits=splits), torch.cat([v, v], 1))
    out = muvox.attention(x, x, v, splits=splits)
    single = [0, 1, 4, 8]
    assert torch.equal(out[single], v[single])
    assert torch.equal(muvox.offset_attention(x, x, v, splits=splits)[single], v[single])
    assert torch.equal(muvox.pool(v, splits=splits, aggregates=("max",))[[0, 1, 3, 5]], v[single])
    layers = [torch.zeros(shape) for shape in [(4, 4), (4,)] * 4]
    options = dict(splits=splits, aggregates="sum", activation="linear")
    assert torch.equal(muvox.neighbour_attention(x, v, 1, layers, **options), v)


@each_set
@pytest.mark.parametrize("dtype", [torch.half, torch.float])
@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1), (1, 2, 1, 40, 3, 1, 1), (2, 1, 130, 1)])
def test_tiny_sets_beside_large_ones(name, dtype, lengths):
    """Row 33: each set as it is alone, forward and backward."""
    x, f = rows(sum(lengths), dtype=dtype)
    found = run_sets(name, x, f, lengths)
    parts = [run_sets(name, *alone, (M,)) for M, alone in zip(lengths, split(x, f, lengths))]
    assert_as(name, found, [torch.cat(p) for p in zip(*parts)])


def split(x, f, lengths):
    parts = zip(x.detach().split(lengths), f.detach().split(lengths))
    return [[t.clone().requires_grad_() for t in alone] for alone in parts]


def run_sets(name, x, f, lengths):
    """With gradients that are the same for every set."""
    results = SETS[name](x, f, splits=ragged(*lengths))
    same = [torch.linspace(-1, 1, y.shape[-1] if y.dim() > 1 else 1).to(y.dtype).expand(y.shape) for y in results]
    return *results, *gradients(results, [x, f], same)


# Ragged layout


@pytest.mark.parametrize("lengths", [(5, 9), (64, 64), (1, 130), (67, 3)])
def test_no_leak_between_voxels(lengths):
    """Row 50: two voxels with distinct constants: every result of a voxel is its own constant."""
    v = torch.cat([torch.full((n, 4), float(value)) for n, value in zip(lengths, (1, 1000))])
    x = torch.randn(sum(lengths), 3)
    splits = ragged(*lengths)
    layers = [torch.zeros(shape) for shape in [(4, 4), (4,)] * 4]
    options = dict(splits=splits, scale=0.0, activation="linear")
    torch.testing.assert_close(muvox.attention(x, x, v, splits=splits), v, rtol=1e-6, atol=0)
    torch.testing.assert_close(muvox.offset_attention(x, x, v, splits=splits), v, rtol=1e-5, atol=0)
    assert torch.equal(muvox.gravnet(x, v, 3, splits=splits, scale=0.0), torch.cat([v, v], 1))
    assert torch.equal(muvox.neighbour_attention(x, v, 3, layers, **options), torch.cat([v, v], 1))
    assert muvox.pool(v, splits=splits, aggregates=("max",)).tolist() == [[1.0] * 4, [1000.0] * 4]
    voxel = torch.arange(2).repeat_interleave(torch.tensor(lengths))
    assert muvox.voxelize(v, voxel, size=2).tolist() == [[1.0] * 4, [1000.0] * 4]


@each_set
@pytest.mark.parametrize("lengths", [(5, 9), (3, 70), (67, 3)])
def test_no_gradient_leaks_between_voxels(name, lengths):
    """Row 50: of the first voxel's results only the first voxel's rows have a gradient."""
    x, f = rows(sum(lengths))
    results = SETS[name](x, f, splits=ragged(*lengths))
    first = 1 if name == "pool" else lengths[0]
    found = gradients(tuple(y[:first] for y in results), [x, f])
    assert all(not g[lengths[0] :].any() for g in found) and any(g[: lengths[0]].any() for g in found)


@pytest.mark.parametrize(
    "splits", [[0, 5, 3, 8], [1, 5, 8], [0, 5, 7], [0, 5, 9], [0, -2, 8], [0, 2**40, 8], [3, 3], [8, 0], [-(2**63), 8]]
)
@each_set
def test_bad_offsets_are_refused(name, splits):
    """Row 51: decreasing, not from 0, not to N, far outside: an error that says so, and the next call is right."""
    x, f = (t.detach() for t in rows(8))
    op = name.split(",")[0].split(" ")[0]

    def call(s):
        return SETS[name](x, f, splits=s)

    before = call(ragged(3, 5))
    with pytest.raises((ValueError, RuntimeError), match=f"(?s)({op}|knn).*(splits|a set of)"):
        call(torch.tensor(splits))
    assert_same(call(ragged(3, 5)), before)


@each_set
@pytest.mark.parametrize("splits", [ragged()[:0], ragged(8)[None], ragged(8).int()])
def test_offsets_of_another_form_are_refused(name, splits):
    """Row 51: none at all, a matrix, int32; and a list."""
    x, f = rows(8)
    for wrong in (splits, splits.tolist()):
        with pytest.raises((ValueError, RuntimeError), match="muvox.*splits"):
            SETS[name](x, f, splits=wrong)


@pytest.mark.parametrize("queries", [[0, 5, 7], [1, 5, 8], [0, 6, 2, 8], [0, 8], [0, 4, 6, 8]])
def test_bad_offsets_of_queries_are_refused(queries):
    """Row 51: on the other side, another number of sets too."""
    x = torch.randn(8, 3)
    with pytest.raises((ValueError, RuntimeError), match="knn: (query_splits|queries has) "):
        muvox.knn(x, 2, splits=ragged(4, 4), queries=x, query_splits=torch.tensor(queries))
