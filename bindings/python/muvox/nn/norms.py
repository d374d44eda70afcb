"""Batch norms: LUMIN's wrapper and running norms, and a running norm that is sound at any batch size."""

import math

import torch
from torch import Tensor, nn

from muvox.nn.sets import as_sets

CHUNK = 1 << 22  # elements squared at once, so that no copy of the input is made


class SumOfSquares(torch.autograd.Function):
    """Sum of (x - centre)² over all dimensions but the last, in float at least; keeps only x for the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, centre: Tensor) -> Tensor:
        ctx.save_for_backward(x, centre)
        dims = tuple(range(x.dim() - 1))
        longest = max(dims, key=lambda d: x.shape[d])
        step = max(1, CHUNK * x.shape[longest] // max(x.numel(), 1))
        return torch.stack([(part - centre).square().sum(dims) for part in x.split(step, longest)]).sum(0)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        x, centre = ctx.saved_tensors
        return ((x - centre) * (2 * grad)).to(x.dtype), None


def column_sums(x: Tensor) -> Tensor:
    """Sum over all dimensions but the last, in float at least."""
    return x.sum(tuple(range(x.dim() - 1)), dtype=state_dtype(x.dtype))


def column_squares(x: Tensor, centre: Tensor | None = None) -> Tensor:
    """Sum of (x - centre)² over all dimensions but the last, in float at least, without a copy of x.

    There is no gradient to the centre, 0 by default.
    """
    if centre is None:
        centre = torch.zeros(x.shape[-1], dtype=state_dtype(x.dtype), device=x.device)
    if torch.compiler.is_compiling():  # the compiler fuses it, and need not split for a size that it does not know
        return (x - centre).square().sum(tuple(range(x.dim() - 1)))
    return SumOfSquares.apply(x, centre)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of sums over `dtype` values: float for half, whose range they exceed, and for bfloat16."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def affine(x: Tensor, factor: Tensor, offset: Tensor) -> Tensor:
    """x * factor + offset over the last dimension, computed in the wider type of the two, returned in that of x."""
    dtype = torch.promote_types(x.dtype, factor.dtype)
    return torch.addcmul(offset.to(dtype), x.to(dtype), factor.to(dtype)).to(x.dtype)


def snapshot(*state: Tensor) -> Tensor:
    """Values of 1-D buffers side by side, as they are before an update.

    torch.compile's backward pass may recompute what follows from a buffer, and would do so from the updated one; it
    never recomputes a concatenation.
    """
    return torch.cat(state)


class _FloatState(nn.Module):
    """A module whose buffers stay float when it is cast to half or bfloat16."""

    def _apply(self, fn, recurse=True):
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            now = self._buffers[name]
            if now is not None and now.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = buffer.to(now.device)
        return self


class LCBatchNorm1d(nn.Module):
    """Runs a 1-D batch norm over the rows and sets of (..., rows, channels), or of ragged (rows, channels).

    Arguments:
        bn: batch norm called with (sets, channels, rows), e.g. `nn.BatchNorm1d(channels)`
    """

    def __init__(self, bn: nn.Module):
        super().__init__()
        self.bn = bn

    def forward(self, x: Tensor) -> Tensor:
        return lc_batch_norm(self, x)


def lc_batch_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """Forward pass of a module with LCBatchNorm1d's member."""
    if x.dim() == 2:
        return norm.bn(x)
    return norm.bn(as_sets(x).transpose(1, 2)).transpose(1, 2).reshape(x.shape)


def running_coefficients(norm: nn.Module, blocks: list[tuple[Tensor, int]], rows: int, batch: int):
    """Factor and offset (channels) of a RunningBatchNorm, after an update of its state in training.

    Arguments:
        norm: module with RunningBatchNorm's buffers
        blocks: (values (..., channels), times each row counts), side by side the channels of the norm
        rows: rows that a channel has, repetitions counted
        batch: size of the batch, on which the momentum depends

    The statistics are differentiated through this batch's share of the running sums, as in LUMIN.
    """
    shape, channels = norm.sums.shape, norm.sums.numel()
    sums, squares, count = norm.sums.flatten(), norm.sqrs.flatten(), norm.count
    if norm.training and rows > 0:
        sums, squares, count = snapshot(sums, squares, count.view(1)).split([channels, channels, 1])
        count = count.squeeze(0)
        share = 1 - (1 - norm.mom) / math.sqrt(batch - 1 + norm.eps)
        new_sums = torch.cat([times * column_sums(x) for x, times in blocks])
        new_squares = torch.cat([times * column_squares(x) for x, times in blocks])
        sums = torch.lerp(sums, new_sums.to(sums.dtype), share)
        squares = torch.lerp(squares, new_squares.to(squares.dtype), share)
        count = torch.lerp(count, torch.full_like(count, rows), share)
        with torch.no_grad():
            norm.sums.copy_(sums.detach().view(shape))
            norm.sqrs.copy_(squares.detach().view(shape))
            # By a view: torch.compile loses what is written to a double scalar itself.
            norm.count.view(1).copy_(count.view(1))
            norm.batch.view(1).add_(batch)
    seen = count != 0  # before the first batch: mean 0, variance 1
    mean = torch.where(seen, sums / torch.where(seen, count, 1), 0)
    variance = torch.where(seen, squares / torch.where(seen, count, 1) - mean * mean, 1)
    variance = torch.where(norm.batch < norm.n_warmup, variance.clamp_min(0.01), variance)
    scale = (variance + norm.eps).rsqrt()
    if not isinstance(norm.weight, Tensor):
        return scale, -mean * scale
    factor = norm.weight.flatten().to(scale.dtype) * scale
    return factor, norm.bias.flatten().to(scale.dtype) - mean * factor


class RunningBatchNorm1d(_FloatState):
    """LUMIN's (fastai's) running batch norm of (B, channels, L) or (B, channels): normalises by running sums.

    Arguments:
        nf: channels
        mom: momentum; a batch of B counts 1 - (1 - mom) / sqrt(B - 1 + eps) in the running sums, which is sound only
            for batches well above 1 (`RunningNorm` is sound for all)
        n_warmup: samples during which the variance is kept above 0.01
        eps: added to the variance
        affine: whether a factor and an offset are learnt

    Buffers `sums`, `sqrs`, `count`, `batch` stay float under `.half()`. Before the first batch mean 0 and variance 1
    are taken.
    """

    spatial = 1

    def __init__(self, nf: int, mom: float = 0.1, n_warmup: int = 20, eps: float = 1e-5, affine: bool = True):
        super().__init__()
        self.nf, self.mom, self.n_warmup, self.eps, self.affine = nf, mom, n_warmup, eps, affine
        ones = (1,) * self.spatial
        self.weight = nn.Parameter(torch.ones(nf, *ones)) if affine else 1
        self.bias = nn.Parameter(torch.zeros(nf, *ones)) if affine else 0
        self.register_buffer("sums", torch.zeros(1, nf, *ones))
        self.register_buffer("sqrs", torch.zeros(1, nf, *ones))
        self.register_buffer("batch", torch.tensor(0.0))
        self.register_buffer("count", torch.tensor(0.0))

    def coefficients(self, blocks: list[tuple[Tensor, int]], rows: int, batch: int) -> tuple[Tensor, Tensor]:
        """See `running_coefficients`."""
        return running_coefficients(self, blocks, rows, batch)

    def forward(self, x: Tensor) -> Tensor:
        return running_norm(self, x)

    def extra_repr(self) -> str:
        return f"{self.nf}, mom={self.mom}, n_warmup={self.n_warmup}, eps={self.eps}, affine={self.affine}"


class RunningBatchNorm2d(RunningBatchNorm1d):
    """`RunningBatchNorm1d` of (B, channels, H, W)."""

    spatial = 2


class RunningBatchNorm3d(RunningBatchNorm1d):
    """`RunningBatchNorm1d` of (B, channels, D, H, W)."""

    spatial = 3


def running_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """Forward pass of a RunningBatchNorm of any dimension; channels are dimension 1."""
    if x.dim() < 2 or x.shape[1] != norm.nf:
        raise ValueError(f"{type(norm).__name__}: x has shape {tuple(x.shape)}, accepted is (batch, {norm.nf}, ...)")
    last = x.movedim(1, -1)
    factor, offset = running_coefficients(norm, [(last, 1)], x.numel() // norm.nf, x.shape[0])
    return affine(last, factor, offset).movedim(-1, 1)


def _sum_over_processes(x: Tensor) -> Tensor:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return x
    if torch.distributed.get_world_size() == 1:
        return x
    import torch.distributed.nn.functional as distributed

    return distributed.all_reduce(x)


class RunningNorm(_FloatState):
    """Running norm of (..., rows, channels) that is sound at any batch size, a single row included.

    Training and evaluation both normalise by the running mean and variance; a batch moves them by `momentum` (by 1/t in
    the t-th batch while that is larger), the variance counting the spread between batches too. In training the
    statistics are those of all processes of `torch.distributed`, and the gradient flows through this batch's share.

    Arguments:
        nf: channels
        momentum: share of a batch in the running values
        eps: added to the variance
        affine: whether a factor and an offset are learnt

    Buffers `running_mean`, `running_var` stay float under `.half()`. Empty input changes nothing.
    """

    def __init__(self, nf: int, momentum: float = 0.1, eps: float = 1e-5, affine: bool = True):
        super().__init__()
        self.nf, self.momentum, self.eps, self.affine = nf, momentum, eps, affine
        self.weight = nn.Parameter(torch.ones(nf)) if affine else None
        self.bias = nn.Parameter(torch.zeros(nf)) if affine else None
        self.register_buffer("running_mean", torch.zeros(nf))
        self.register_buffer("running_var", torch.ones(nf))
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.int64))

    def _update(self, blocks: list[tuple[Tensor, int]], rows: int) -> tuple[Tensor, Tensor]:
        dtype, nf = self.running_mean.dtype, self.nf
        batches = self.num_batches_tracked.view(1).to(dtype)
        old_mean, old_var, batches = snapshot(self.running_mean, self.running_var, batches).split([nf, nf, 1])
        local = torch.cat([times * column_sums(x) for x, times in blocks]).to(dtype)
        total = _sum_over_processes(torch.cat([local, local.new_full((1,), rows)]))
        count = total[-1]
        mean = total[:-1] / count.clamp_min(1)
        # About the mean itself, where the derivative with respect to the centre is zero.
        centres = mean.detach().split([x.shape[-1] for x, _ in blocks])
        local = torch.cat([times * column_squares(x, centre) for (x, times), centre in zip(blocks, centres)]).to(dtype)
        variance = _sum_over_processes(local) / count.clamp_min(1)
        share = torch.clamp(1 / (batches + 1), min=self.momentum) * (count > 0)
        step = mean - old_mean
        running_mean = old_mean + share * step
        running_var = (1 - share) * (old_var + share * step * step) + share * variance
        with torch.no_grad():
            self.running_mean.copy_(running_mean)
            self.running_var.copy_(running_var)
            self.num_batches_tracked.add_((count > 0).to(torch.int64))
        return running_mean, running_var

    def coefficients(self, blocks: list[tuple[Tensor, int]], rows: int, batch: int) -> tuple[Tensor, Tensor]:
        """Factor and offset (channels), after an update of the state in training; see `running_coefficients`."""
        mean, variance = self._update(blocks, rows) if self.training else (self.running_mean, self.running_var)
        factor = (variance + self.eps).rsqrt()
        if self.weight is None:
            return factor, -mean * factor
        factor = self.weight.to(factor.dtype) * factor
        return factor, self.bias.to(factor.dtype) - mean * factor

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 2 or x.shape[-1] != self.nf:
            raise ValueError(f"RunningNorm: x has shape {tuple(x.shape)}, accepted is (..., rows, {self.nf})")
        return affine(x, *self.coefficients([(x, 1)], x.numel() // self.nf, 1))

    def extra_repr(self) -> str:
        return f"{self.nf}, momentum={self.momentum}, eps={self.eps}, affine={self.affine}"
