"""Rows 8, 25-28 and 30: scores, widths, masks, underflow, and which of two softmaxes."""

import math

import pytest
import torch

import muvox
import op_cases
from cases.calls import LAYERS, MASKED, assert_as, gradients, leaves, ragged, rows, run



def renormalised(scores, v):
    shares = scores.softmax(-2)
    return shares @ v / (shares.sum(-1, keepdim=True) + 1e-17)


# The operator, and its formula from scores
ATTENTIONS = {
    "attention": (lambda q, k, v: muvox.attention(q, k, v, scale=1.0), lambda scores, v: scores.softmax(-1) @ v),
    "offset_attention": (muvox.offset_attention, renormalised),
}
each_attention = pytest.mark.parametrize("op", ATTENTIONS)


# Accuracy of scores


@each_attention
def test_large_logits(op):
    """Row 8: logits of standard deviation 10 in float."""
    q, k, v = (torch.randn(3, 200, width) for width in (12, 12, 48))
    q, k = q * 10**0.5 / 12**0.25, k * 10**0.5 / 12**0.25
    scores = q.double() @ k.double().mT
    assert 9 < scores.std() < 11
    function, formula = ATTENTIONS[op]
    right = formula(scores, v.double())
    # A row that no key prefers has shares of 1e-9 alone; the quotient keeps their relative error, some 1e-5 of 20.
    assert (function(q, k, v) - right).abs().max() < (1e-5 if op == "attention" else 4e-5)


# Widths that are no multiple of 8


@each_attention
@pytest.mark.parametrize("M", [1, 2, 65])
@pytest.mark.parametrize("C", [48, 22, 1])
@pytest.mark.parametrize("A", [12, 5, 1])
def test_odd_widths(op, A, C, M):
    """Row 25: any width, one row too; gradients as the formula's."""
    q, k, v = leaves((2, M, A), (2, M, A), (2, M, C), dtype=torch.double)
    function, formula = ATTENTIONS[op]
    out, right = function(q, k, v), formula(q @ k.mT, v)
    entering = [torch.randn_like(right)]
    torch.testing.assert_close(out, right, rtol=1e-12, atol=1e-13)
    found, expected = gradients(out, [q, k, v], entering), gradients(right, [q, k, v], entering)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("M", [1, 65])
@pytest.mark.parametrize("A", [12, 5, 1])
def test_lse_of_odd_widths(A, M):
    """Row 25: the statistic, with its own gradient."""
    q, k = leaves((2, M, A), (2, M, A), dtype=torch.double)
    _, lse = muvox.attention(q, k, k, return_lse=True)
    right = (q @ k.mT / A**0.5).logsumexp(-1)
    entering = [torch.randn_like(right)]
    torch.testing.assert_close(lse, right, rtol=1e-13, atol=1e-13)
    found, expected = gradients(lse, [q, k], entering), gradients(right, [q, k], entering)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def neighbours_formula(x, f, layers, k, offset, transposed=False):
    """muvox.neighbour_attention over one set, as LUMIN's layers stand; `transposed` is the fault."""
    order, distance2 = op_cases.nearest(x, k)
    ft = torch.exp(-0.5 * distance2)[..., None] * f[order]
    q, keys, v, out = (lambda y, w=w, b=b: y @ w.T + b for w, b in zip(layers[::2], layers[1::2]))
    scores = q(ft) @ keys(ft).mT
    if transposed:
        scores = scores.mT
    if offset:
        weights = scores.softmax(-2)
        z = out(ft - weights / (weights.sum(-1, keepdim=True) + 1e-17) @ v(ft))
    else:
        z = out((scores / math.sqrt(len(layers[0]))).softmax(-1) @ v(ft))
    return (ft + torch.nn.functional.silu(z)).mean(1)


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("A, C", [(12, 48), (5, 22), (1, 1)])
@pytest.mark.parametrize("M", [1, 3, 20])
def test_neighbours_of_odd_widths(A, C, M, offset):
    """Row 25: attention over neighbours."""
    x, f = leaves((M, 3), (M, C), dtype=torch.double)
    shapes = [(A, C), (A,)] * 2 + [(C, C), (C,)] * 2
    layers = [(0.3 * torch.randn(shape, dtype=torch.double)).requires_grad_() for shape in shapes]
    options = dict(scale=0.5, aggregates="mean", activation="swish", offset=offset)
    out, right = muvox.neighbour_attention(x, f, 5, layers, **options), neighbours_formula(x, f, layers, 5, offset)
    entering, inputs = [torch.randn_like(right)], [x, f, *layers]
    torch.testing.assert_close(out, right, rtol=1e-11, atol=1e-12)
    found, expected = gradients(out, inputs, entering), gradients(right, inputs, entering)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


# Masks


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("dtype", [torch.half, torch.float])
@pytest.mark.parametrize("filled", [1.0, math.nan])
def test_a_voxel_of_masked_muons_is_zero(name, dtype, filled):
    """Row 26: a mask all False in the middle set, and NaN behind it: zeros out, zero gradients, the others as alone."""
    x, f = rows(3, 7, dtype=dtype)
    with torch.no_grad():
        x[1] *= filled
        f[1] *= filled
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1] = False
    found = run(MASKED[name], x, f, mask=mask)
    assert all(not y[1].any() for y in found)
    results = MASKED[name](x[::2], f[::2])
    assert_as(name, [y[::2] for y in found[:-2]], results)
    packed = [t.detach().flatten(0, 1).requires_grad_() for t in (x, f)]
    ragged_found = MASKED[name](*packed, mask=mask.flatten(), splits=ragged(7, 7, 7))
    for y, z in zip(ragged_found, found):
        assert_as(name, (y,), (z.reshape(y.shape),))
    assert all(g.isfinite().all() and not g[7:14].any() for g in gradients(ragged_found, packed))


@pytest.mark.parametrize("name", MASKED)
def test_all_voxels_masked(name):
    """Row 26: nothing at all takes part."""
    x, f = rows(2, 5)
    found = run(MASKED[name], x, f, mask=torch.zeros(2, 5, dtype=torch.bool))
    assert all(not y.any() for y in found)


def test_masked_lse_is_minus_infinity():
    """Row 26: what the statistic of no key is, and that its gradient is 0."""
    q, k, v = leaves((1, 4, 3), (1, 4, 3), (1, 4, 2))
    out, lse = muvox.attention(q, k, v, mask=torch.zeros(1, 4, dtype=torch.bool), return_lse=True)
    assert not out.any() and (lse == -math.inf).all()
    assert not any(g.any() for g in gradients((out, lse), [q, k, v]))
    assert "−inf" in muvox.attention.__doc__ and "A row without keys gives 0" in muvox.attention.__doc__


@pytest.mark.parametrize("dtype", [torch.half, torch.float])
@pytest.mark.parametrize("weights", [False, True])
def test_keys_masked_by_minus_infinity(dtype, weights):
    """Row 26: a bias of −inf is as a mask of the key; a set where all keys have it gives 0 and zero gradients."""
    q, k, v = leaves((2, 6, 3), (2, 6, 3), (2, 6, 4), dtype=dtype)
    bias = torch.zeros(2, 6)
    bias[0, 2:4], bias[1] = -math.inf, -math.inf
    bias.requires_grad_()
    w = torch.rand(2, 6).add(0.5) if weights else None
    out, lse = muvox.attention(q, k, v, bias=bias, row_weights=w, return_lse=True)
    assert not out[1].any() and (lse[1] == -math.inf).all()
    found = gradients((out[0], lse[0]), [q, k, v, bias], retain_graph=True)
    assert all(g.isfinite().all() for g in found)
    assert not found[1][0, 2:4].any() and not found[2][0, 2:4].any() and not found[3][0, 2:4].any()
    whole = gradients((out, lse), [q, k, v, bias])
    assert all(not g[1].any() for g in whole)
    kept = [0, 1, 4, 5]
    finite = bias.detach().clamp(min=-3e4)
    some = torch.where(finite[..., None] == 0, k, 0)
    alone = muvox.attention(q, some, v, bias=finite, row_weights=w, return_lse=True)
    torch.testing.assert_close((out[0], lse[0]), (alone[0][0], alone[1][0]), rtol=1e-6, atol=0)
    few = muvox.attention(
        q[:1, kept], k[:1, kept], v[:1, kept], row_weights=None if w is None else w[:1, kept], return_lse=True
    )
    unit = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close((out[0, kept], lse[0, kept]), (few[0][0], few[1][0]), rtol=unit, atol=unit)


@pytest.mark.parametrize("dtype", [torch.half, torch.float, torch.double])
def test_keys_masked_by_the_least_number(dtype):
    """Row 26: finfo.min instead: some keys of a set as if masked; all keys of a set, and none is preferred."""
    wide = torch.double if dtype == torch.double else torch.float
    q, k, v = leaves((2, 6, 3), (2, 6, 3), (2, 6, 4), dtype=dtype)
    bias = torch.zeros(2, 6, dtype=wide)
    bias[0, 2:4] = bias[1] = torch.finfo(wide).min
    bias.requires_grad_()
    out, lse = muvox.attention(q, k, v, bias=bias, return_lse=True)
    minus = torch.where(bias.detach() == 0, 0, -math.inf).to(wide)
    assert torch.equal(out[0], muvox.attention(q, k, v, bias=minus)[0])
    # Beside the least number the scores are lost in rounding: every key has the same share, as in torch.
    right = v[1].double().mean(0).expand(6, 4)
    torch.testing.assert_close(out[1].double(), right, rtol=0, atol=2 * torch.finfo(dtype).eps)
    assert all(g.isfinite().all() for g in gradients((out, lse), [q, k, v, bias]))


def test_weights_of_zero_mask_keys():
    """Row 26: a set whose muons all have weight 0: zeros out, zero gradients, no NaN."""
    x, f = rows(2, 6)
    w = torch.ones(2, 6)
    w[1] = 0
    for y in (
        muvox.attention(x, x, f, row_weights=w),
        muvox.gravnet(x, f, 3, row_weights=w),
        muvox.pool(f, row_weights=w, aggregates=("mean", "sum")),
    ):
        assert y[0].any() and not y[1].any()
        found = gradients(y, [x, f])
        assert all(g.isfinite().all() and not g[1].any() for g in found)


# Underflow


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float])
@pytest.mark.parametrize("M", [63, 64, 65, 192, 320])
@pytest.mark.parametrize("sign", [-1, 1])
def test_attention_of_logits_near_200(M, dtype, sign):
    """Row 27: exp(200) overflows and exp(−200) vanishes; keys past the set's end take no part in either."""
    q, k, v = torch.full((2, M, 4), 10.0), torch.full((2, M, 4), sign * 10.0), torch.randn(2, M, 6)
    k = k + 0.1 * torch.randn_like(k)
    q, k, v = (t.to(dtype).requires_grad_() for t in (q, k, v))
    out, lse = muvox.attention(q, k, v, return_lse=True)
    assert 150 < sign * lse.mean() < 250
    doubles = [t.detach().double().requires_grad_() for t in (q, k, v)]
    right = (doubles[0] @ doubles[1].mT / 2).softmax(-1) @ doubles[2]
    unit = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 1e-4  # exponents of 200 cost float 200 ulps
    assert (out.double() - right).abs().max() <= unit * right.abs().max()
    entering = torch.randn(2, M, 6).to(dtype)
    # D = g·out is read from the rounded out: in dq its error meets keys that are all alike, where dS sums to zero.
    shifted = 0.5 * (entering.double() * right).abs().sum(-1).max() * k.double().abs().max()
    found, expected = gradients(out, [q, k, v], [entering]), gradients(right, doubles, [entering.double()])
    for g, h, spread in zip(found, expected, (shifted, 0, 0)):
        assert (g.double() - h).abs().max() <= unit * (2 * h.abs().max() + spread)


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.float])
@pytest.mark.parametrize("M", [63, 64, 65, 192])
@pytest.mark.parametrize("sign", [-1, 1])
def test_offset_attention_of_logits_near_200(M, dtype, sign):
    """Row 27: the same where the softmax runs over the queries."""
    q, v = sign * 10 + 0.1 * torch.randn(2, M, 4), torch.randn(2, M, 6)
    q, k, v = (t.to(dtype).requires_grad_() for t in (q, torch.full((2, M, 4), 5.0), v))
    out = muvox.offset_attention(q, k, v)
    doubles = [t.detach().double().requires_grad_() for t in (q, k, v)]
    right = op_cases_rows(doubles)
    unit = 4 * torch.finfo(dtype).eps if dtype != torch.float else 1e-4
    assert (out.double() - right).abs().max() <= unit * right.abs().max()
    entering = torch.randn(2, M, 6).to(dtype)
    found, expected = gradients(out, [q, k, v], [entering]), gradients(right, doubles, [entering.double()])
    assert all(g.isfinite().all() for g in found)
    assert (found[2].double() - expected[2]).abs().max() <= unit * expected[2].abs().max()


def op_cases_rows(inputs):
    return torch.stack([op_cases.offset_attention(*rows_of_set) for rows_of_set in zip(*inputs)])


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
@pytest.mark.parametrize("spread", [35.0, 60.0, 120.0])
def test_offset_attention_in_half_behaves_as_in_float(dtype, spread):
    """Row 28: LUMIN's eps is below the least half. Rows whose shares are below it are as in the float formula."""
    M = 24
    q = torch.linspace(-spread, 0, M)[None, :, None].to(dtype)
    k, v = torch.ones(1, M, 1).to(dtype), torch.randn(1, M, 5).to(dtype)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    floats = [t.detach().float().requires_grad_() for t in (q, k, v)]
    shares = (floats[0] @ floats[1].mT).softmax(-2)
    right = shares @ floats[2] / (shares.sum(-1, keepdim=True) + 1e-17)
    out = muvox.offset_attention(q, k, v)
    assert shares.sum(-1).min() < 1e-13 and (spread < 45 or right[0, 0].abs().max() < 0.01)
    coarse = 4 * torch.finfo(dtype).eps
    assert (out.float() - right).abs().max() <= coarse * right.abs().max()
    found, expected = gradients(out, [q, k, v]), gradients(right, floats)
    assert all(g.isfinite().all() and g.dtype == dtype for g in found)
    assert (found[2].float() - expected[2]).abs().max() <= 2 * coarse * expected[2].abs().max()


# Which of two softmaxes


def test_the_softmax_of_offset_attention_runs_over_the_queries():
    """Row 30: the formula with different queries and keys; the transposed one differs."""
    q, k, v = leaves((1, 9, 3), (1, 9, 3), (1, 9, 5), dtype=torch.double)
    right, transposed = (op_cases_rows((a, b, v)) for a, b in ((q, k), (k, q)))
    out = muvox.offset_attention(q, k, v)
    torch.testing.assert_close(out, right, rtol=1e-12, atol=1e-13)
    assert (out - transposed).abs().max() > 0.1
    for g, h in zip(gradients(out, [q, k, v]), gradients(transposed, [q, k, v])):
        assert (g - h).abs().max() > 0.01


@pytest.mark.parametrize("offset", [False, True])
def test_neighbour_attention_is_not_transposed(offset):
    """Row 30: over neighbours, W_q ≠ W_k."""
    x, f = rows(12, dtype=torch.double)
    assert not torch.allclose(LAYERS[0], LAYERS[2])
    options = dict(scale=0.5, aggregates="mean", activation="swish", offset=offset)
    out = muvox.neighbour_attention(x, f, 4, LAYERS, **options)
    torch.testing.assert_close(out, neighbours_formula(x, f, LAYERS, 4, offset), rtol=1e-11, atol=1e-12)
    assert (out - neighbours_formula(x, f, LAYERS, 4, offset, transposed=True)).abs().max() > 0.02
