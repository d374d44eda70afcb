"""GravNet: features gathered from the nearest rows in a learnt space, with LUMIN's arguments and state_dict keys."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from muvox import ops
from muvox.nn import _plain
from muvox.nn.activations import lookup_act, lookup_normal_init
from muvox.nn.attention import SelfAttention, fused_arguments
from muvox.nn.blocks import GraphBlock, aggregations, as_list, autocast_enabled
from muvox.nn.sets import (
    Block,
    Columns,
    apply_layer,
    apply_layers,
    as_sets,
    check_rows,
    has_hooks,
    in_runs,
    join,
    with_means,
)

SCALE = 10.0


def gaussian_potential(distance: Tensor) -> Tensor:
    """LUMIN's weight of a neighbour, exp(-10 d²)."""
    return torch.exp(-SCALE * distance**2)


class GravNetLayer(GraphBlock):
    """One GravNet layer: learnt coordinates and features, k nearest rows, weighted aggregation, output layers.

    Arguments:
        n_fpv: features of a row
        n_s, n_lr: width of the learnt coordinates and of the learnt features
        k: neighbours, the row itself included; a smaller set has fewer
        agg_methods: names ("mean", "max", "absmax", "sum") or callables (B, V, k, n_lr) -> (B, V, n_lr); of ragged sets
            a callable is given each run of sets of equal length, without padding
        n_out: features of a row of the output
        cat_means: whether the means over the set are appended to the features
        f_slr_depth, f_out_depth: layers before and after the aggregation
        potential: weight as a function of the distance (..., V, k), exp(-10 d²) by default; a module is a submodule
        use_sa: whether the neighbours of each row pass through self-attention before the aggregation
        do, bn, act, lookup_init, lookup_act, bn_class: see `GraphBlock`
        sa_class: class of the self-attention

    With named aggregations no tensor over pairs, or over neighbours and features, is made, with use_sa if it is a
    SelfAttention or OffsetSelfAttention without dropout in force, its activation one of `ops.neighbour_attention`, and
    the potential the default. Other aggregations, attentions, potentials of an attention gather (rows, k, n_lr) values.
    """

    def __init__(
        self,
        n_fpv: int,
        n_s: int,
        n_lr: int,
        k: int,
        agg_methods,
        n_out: int,
        cat_means: bool = True,
        f_slr_depth: int = 1,
        f_out_depth: int = 1,
        potential: Callable[[Tensor], Tensor] | None = None,
        use_sa: bool = False,
        do: float = 0,
        bn: bool = False,
        act: str = "relu",
        lookup_init: Callable = lookup_normal_init,
        lookup_act: Callable = lookup_act,
        bn_class: Callable[[int], nn.Module] = nn.BatchNorm1d,
        sa_class: Callable[..., nn.Module] = SelfAttention,
    ):
        super().__init__(None, n_fpv, do, bn, act, lookup_init, lookup_act, bn_class)
        if k < 1:
            raise ValueError(f"GravNetLayer: k is {k}, accepted is 1 or more")
        self.n_s, self.n_lr, self.k, self.n_out = n_s, n_lr, k, n_out
        self.agg_methods = self.aggregates = aggregations(agg_methods)
        self.cat_means, self.f_slr_depth, self.f_out_depth = cat_means, f_slr_depth, f_out_depth
        self.use_sa, self.sa_class = use_sa, sa_class
        if potential is not None or not hasattr(type(self), "potential"):
            self.potential = gaussian_potential if potential is None else potential
        if cat_means:
            self.n_fpv *= 2
        self.f_slr = self._layers(self.n_fpv, [2 * (n_s + n_lr)] * (f_slr_depth - 1) + [n_s + n_lr])
        wide = self.n_fpv + len(self.agg_methods) * n_lr
        self.f_out = self._layers(wide, [2 * n_out] * (f_out_depth - 1) + [n_out])
        if use_sa:
            arguments = dict(do=do, bn=False, act=act, lookup_act=lookup_act, lookup_init=lookup_init)
            self.sa_agg = sa_class(n_lr, n_lr // 4, **arguments)

    def forward(self, x: Tensor, splits: Tensor | None = None) -> Tensor:
        """x (..., V, n_fpv), or (N, n_fpv) with splits (S + 1); returns the same with n_out features."""
        check_rows(x, splits, "GravNetLayer")
        return gravnet_layer(self, [Block(x)], splits)

    def get_out_size(self) -> int:
        """Features of a row of the output."""
        return self.n_out


class GravNet(GraphBlock):
    """GravNet layers, each fed by the one before; the output has the features of all of them side by side.

    Arguments as `GravNetLayer`, and
        n_out: width of the one layer, or of each of several
        agg_methods: one name or several
        gn_class: class of the layers
    Further keyword arguments are ignored, as in LUMIN; a potential is given by
    `gn_class=functools.partial(GravNetLayer, potential=...)`.
    """

    row_wise = True

    def __init__(
        self,
        n_v: int | None,
        n_fpv: int,
        cat_means: bool,
        f_slr_depth: int,
        n_s: int,
        n_lr: int,
        k: int,
        f_out_depth: int,
        n_out: list[int] | int,
        agg_methods=("mean", "max"),
        gn_class: Callable[..., nn.Module] = GravNetLayer,
        use_sa: bool = False,
        do: float = 0,
        bn: bool = False,
        act: str = "relu",
        lookup_init: Callable = lookup_normal_init,
        lookup_act: Callable = lookup_act,
        bn_class: Callable[[int], nn.Module] = nn.BatchNorm1d,
        sa_class: Callable[..., nn.Module] = SelfAttention,
        **kargs,
    ):
        super().__init__(n_v, n_fpv, do, bn, act, lookup_init, lookup_act, bn_class)
        self.cat_means, self.f_slr_depth, self.f_out_depth = cat_means, f_slr_depth, f_out_depth
        self.n_s, self.n_lr, self.k, self.n_out = n_s, n_lr, k, as_list(n_out)
        self.agg_methods = aggregations(agg_methods)
        self.gn_class, self.use_sa, self.sa_class = gn_class, use_sa, sa_class
        shared = dict(n_s=n_s, n_lr=n_lr, k=k, agg_methods=self.agg_methods, cat_means=cat_means)
        shared |= dict(f_slr_depth=f_slr_depth, f_out_depth=f_out_depth, use_sa=use_sa, do=do, bn=bn, act=act)
        shared |= dict(lookup_init=lookup_init, lookup_act=lookup_act, bn_class=bn_class, sa_class=sa_class)
        self.grav_layers = nn.ModuleList()
        for width in self.n_out:
            self.grav_layers.append(gn_class(n_fpv=n_fpv, n_out=width, **shared))
            n_fpv = self.grav_layers[-1].get_out_size()
        self.out_sz = (n_v, sum(layer.get_out_size() for layer in self.grav_layers))

    def forward(self, x: Tensor, splits: Tensor | None = None) -> Tensor:
        """x (..., V, n_fpv), or (N, n_fpv) with splits (S + 1); returns the same with sum(n_out) features."""
        check_rows(x, splits, "GravNet")
        return gravnet(self, [Block(x)], splits)

    def get_out_size(self) -> tuple[int | None, int]:
        """Rows of a set, features of a row of the output."""
        return self.out_sz


def gravnet(module: nn.Module, columns: Columns, splits: Tensor | None) -> Tensor:
    """Forward pass of a module with GravNet's members, its input given as columns (see `sets`)."""
    outs = []
    for layer in module.grav_layers:
        if len(columns) > 1 and isinstance(layer, GravNetLayer) and not has_hooks(layer):
            x = gravnet_layer(layer, columns, splits)
        else:
            x = join(columns, splits)
            x = layer(x) if splits is None else layer(x, splits=splits)
        outs.append(x)
        columns = [Block(x)]
    return torch.cat(outs, -1) if len(outs) > 1 else outs[0]


def gravnet_layer(layer: nn.Module, columns: Columns, splits: Tensor | None) -> Tensor:
    """Forward pass of a module with GravNetLayer's members, its input given as columns (see `sets`)."""
    if layer.cat_means:
        columns = with_means(columns, splits)
    latent = _latent(layer, columns, splits)
    coords, feats = latent[..., : layer.n_s], latent[..., layer.n_s :]
    return apply_layers(layer.f_out, [*columns, Block(_aggregate(layer, coords, feats, splits))], splits)


def _latent(layer: nn.Module, columns: Columns, splits: Tensor | None) -> Tensor:
    """Learnt coordinates and features side by side; under autocast the last layer runs in float, for the former."""
    x = columns[0].values
    if not autocast_enabled(x):
        return apply_layers(layer.f_slr, columns, splits)
    for number, each in enumerate(layer.f_slr, 1):
        if number < len(layer.f_slr):
            columns = [Block(apply_layer(each, columns, splits))]
    dtype = next(each.parameters()).dtype
    with torch.autocast(x.device.type, enabled=False):
        return apply_layer(each, [Block(b.values.to(dtype), b.per_set) for b in columns], splits)


def _aggregate(layer: nn.Module, coords: Tensor, feats: Tensor, splits: Tensor | None) -> Tensor:
    methods = layer.aggregates
    named, gaussian = all(isinstance(m, str) for m in methods), layer.potential is gaussian_potential
    if layer.use_sa and named and gaussian and (attention := fused_arguments(layer.sa_agg)):
        if _plain.needed("neighbour_attention", feats):
            n, width = layer.k, feats.shape[-1]
            few = partial(_gathered, layer, splits=None)
            return _plain.by_sets(few, [coords, feats], splits, lambda M: M * min(n, M) * (min(n, M) + width))
        shared = dict(splits=splits, scale=SCALE, aggregates=methods)
        return ops.neighbour_attention(coords, feats, layer.k, **attention, **shared)
    if layer.use_sa or not named:
        return _gathered(layer, coords, feats, splits)
    if gaussian:
        return ops.gravnet(coords, feats, layer.k, splits=splits, scale=SCALE, aggregates=methods)
    neighbours, distance2 = ops.knn(coords, layer.k, splits=splits)
    weights = layer.potential(_distance(distance2, neighbours))
    return ops.aggregate(feats, neighbours, weights, splits=splits, aggregates=methods)


def _distance(distance2: Tensor, neighbours: Tensor) -> Tensor:
    # The square root has no gradient at 0; places without a neighbour are at distance 0, where a potential is finite.
    known = (distance2 != 0) & (neighbours >= 0)
    return torch.where(known, torch.where(known, distance2, 1).sqrt(), 0)


def _gathered(layer: nn.Module, coords: Tensor, feats: Tensor, splits: Tensor | None) -> Tensor:
    """Aggregation by way of the gathered (sets, rows, k, n_lr) values; of ragged sets those of equal length at once."""
    if splits is not None:
        found = in_runs(lambda *part: _gathered(layer, *part, None).flatten(0, 1), [coords, feats], splits)
        none = torch.cat([feats[:0]] * len(layer.aggregates), -1)
        return torch.cat([none, *(one for one in found if not isinstance(one, int))])
    lead = feats.shape[:-1]
    coords, feats = as_sets(coords), as_sets(feats)
    sets, rows, width = feats.shape
    neighbours, distance2 = ops.knn(coords, max(1, min(layer.k, rows)))
    weights = layer.potential(_distance(distance2, neighbours))
    index = neighbours.long() + rows * torch.arange(sets, device=feats.device).view(-1, 1, 1)
    found = feats.reshape(-1, width).index_select(0, index.flatten()).view(*index.shape, width) * weights.unsqueeze(-1)
    if layer.use_sa:
        found = layer.sa_agg(found)
    outs = [ops.pool(found, aggregates=(m,)) if isinstance(m, str) else m(found) for m in layer.aggregates]
    out = torch.cat(outs, -1)
    return out.reshape(*lead, out.shape[-1])
