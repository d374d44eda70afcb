"""vmap: the batch becomes more sets. Tensors that are not batched, such as what forward saved when only the gradient is
batched, are never copied."""

import torch

from muvox.ops._common import is_none
from muvox.ops._register import operator


def register_vmap(op, splits=(), sets=True):
    """splits: places of the arguments that say where sets begin; the other tensors have the sets, or their rows, as their
    first dimension. sets=False: they have not, so that the batch can only be gone through one by one."""
    function = operator(op)

    def rule(info, in_dims, *arguments):
        if info.batch_size == 0:
            return of_none(rule, info, in_dims, arguments)
        call = Call(function, info.batch_size, in_dims, arguments, splits)
        if any(call.batched[place] for place in splits) or not sets:
            return call.one_by_one()
        if all(call.batched[place] for place in call.tensors):
            return call.as_sets()
        if any(not is_none(arguments[place]) for place in splits):
            return call.one_by_one()
        if call.size(0) == 1:
            return call.as_sets()
        return call.set_by_set() if call.size(0) < info.batch_size else call.one_by_one()

    torch.library.register_vmap(f"muvox::{op}", rule)


def of_none(rule, info, in_dims, arguments):
    """Results of an empty batch: their shapes are those of a batch of one."""
    one = [
        x if dim is None else x.new_zeros([1 if d == dim else n for d, n in enumerate(x.shape)])
        for x, dim in zip(arguments, in_dims)
    ]
    results, dims = rule(info._replace(batch_size=1), in_dims, *one)
    if isinstance(results, tuple):
        return tuple(x if dim is None else x[:0] for x, dim in zip(results, dims)), dims
    return results[:0], dims


class Call:
    """One batched call of an operator."""

    def __init__(self, function, batch, in_dims, arguments, splits):
        self.function, self.batch, self.splits = function, batch, splits
        self.batched = [dim is not None for dim in in_dims]
        self.arguments = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(arguments, in_dims)]
        self.tensors = [
            place
            for place, x in enumerate(self.arguments)
            if isinstance(x, torch.Tensor) and place not in splits and (self.batched[place] or not is_none(x))
        ]

    def size(self, dim):
        """Size of the tensors, the batch left out."""
        place = self.tensors[0]
        return self.arguments[place].shape[dim + self.batched[place]]

    def run(self, replaced):
        results = self.function(*(replaced.get(place, x) for place, x in enumerate(self.arguments)))
        return results if isinstance(results, tuple) else (results,)

    def as_sets(self):
        """One call: the batch and the sets become one dimension. What is not batched is one set, seen by all."""

        def fold(place):
            x = self.arguments[place]
            return x.flatten(0, 1) if self.batched[place] else x.expand(self.batch, *x.shape[1:])

        replaced = {place: fold(place) for place in self.tensors}
        replaced |= {place: self.repeated(self.arguments[place]) for place in self.splits}
        return self.give([x if is_none(x) else x.unflatten(0, (self.batch, -1)) for x in self.run(replaced)], 0)

    def repeated(self, splits):
        if is_none(splits):
            return splits
        shifts = torch.arange(self.batch, device=splits.device) * splits[-1]
        return torch.cat([(splits[:-1] + shifts[:, None]).flatten(), splits[-1:] * self.batch])

    def set_by_set(self):
        """One call for each set, whose tensors that are not batched are seen by all."""

        def at(s, place):
            x = self.arguments[place]
            return x[:, s] if self.batched[place] else x[s : s + 1].expand(self.batch, *x.shape[1:])

        found = [self.run({place: at(s, place) for place in self.tensors}) for s in range(self.size(0))]
        return self.stacked(found, 1)

    def one_by_one(self):
        """One call for each of the batch."""
        batched = [place for place, is_batched in enumerate(self.batched) if is_batched]
        found = [self.run({place: self.arguments[place][b] for place in batched}) for b in range(self.batch)]
        return self.stacked(found, 0)

    def stacked(self, found, dim):
        return self.give([x[0] if is_none(x[0]) else torch.stack(x, dim) for x in zip(*found)], 0)

    def give(self, results, dim):
        """Results with the place of the batch; what was not asked for is not batched."""
        dims = [None if is_none(x) else dim for x in results]
        return (tuple(results), tuple(dims)) if len(results) > 1 else (results[0], dims[0])
