"""From the rows of a set to one vector, or to a prediction for each row, with LUMIN's arguments and state_dict keys."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from muvox import ops
from muvox.nn.activations import lookup_act, lookup_normal_init
from muvox.nn.attention import SelfAttention
from muvox.nn.blocks import GraphBlock, aggregations, as_list
from muvox.nn.sets import Block, apply_layers, as_sets, check_rows, in_runs, with_means


class GraphCollapser(GraphBlock):
    """Layers, self-attention and layers again on the rows of a set, then one vector for the set.

    Arguments:
        n_v, n_fpv: rows of a set (reported only), features of a row
        flatten: whether the rows are laid side by side instead of aggregated
        f_initial_outs: widths of the first layers, None for none
        n_sa_layers, sa_width: self-attention layers, the outputs of all of them side by side; their query width
        f_final_outs: widths of the last layers, None for none
        global_feat_vec: whether the means over the set are appended before the first layers there are
        agg_methods: names ("mean", "max", "absmax", "sum"), or callables (B, V, F) -> (B, F); of ragged sets a callable
            is given each run of sets of equal length, without padding, and an empty set has 0 for its result
        do, bn, act, lookup_init, lookup_act, bn_class: see `GraphBlock`
        sa_class: class of the self-attention

    ValueError if there are self-attention layers and no sa_width.
    """

    def __init__(
        self,
        n_v: int | None,
        n_fpv: int,
        flatten: bool,
        f_initial_outs: list[int] | int | None = None,
        n_sa_layers: int = 0,
        sa_width: int | None = None,
        f_final_outs: list[int] | int | None = None,
        global_feat_vec: bool = False,
        agg_methods=("mean", "max"),
        do: float = 0,
        bn: bool = False,
        act: str = "relu",
        lookup_init: Callable = lookup_normal_init,
        lookup_act: Callable = lookup_act,
        bn_class: Callable[[int], nn.Module] = nn.BatchNorm1d,
        sa_class: Callable[..., nn.Module] = SelfAttention,
    ):
        super().__init__(n_v, n_fpv, do, bn, act, lookup_init, lookup_act, bn_class)
        if n_sa_layers > 0 and sa_width is None:
            raise ValueError(f"{type(self).__name__}: n_sa_layers is {n_sa_layers} and sa_width is missing")
        self.flatten, self.n_sa_layers, self.sa_width, self.sa_class = flatten, n_sa_layers, sa_width, sa_class
        self.global_feat_vec = global_feat_vec
        self.agg_methods = self.aggregates = aggregations(agg_methods)
        self.gfv_pos = None
        if f_initial_outs is None:
            self.f_inital, self.f_initial_outs = nn.Identity(), [n_fpv]
        else:
            self.f_initial_outs = as_list(f_initial_outs)
            self.f_inital = self._layers(self._with_means(n_fpv, "pre-initial"), self.f_initial_outs)
        width = self.f_initial_outs[-1]
        if n_sa_layers > 0:
            arguments = dict(n_fpv=width, n_a=sa_width, act=act, bn=bn, do=do)
            arguments |= dict(lookup_act=lookup_act, lookup_init=lookup_init)
            self.sa_layers = nn.ModuleList([sa_class(**arguments) for _ in range(n_sa_layers)])
            width *= n_sa_layers
        if f_final_outs is None:
            self.f_final, self.f_final_outs = nn.Identity(), [width]
        else:
            self.f_final_outs = as_list(f_final_outs)
            self.f_final = self._layers(self._with_means(width, "pre-final"), self.f_final_outs)

    def _with_means(self, width: int, place: str) -> int:
        if not self.global_feat_vec or self.gfv_pos is not None:
            return width
        self.gfv_pos = place
        return 2 * width

    def forward(self, x: Tensor, splits: Tensor | None = None) -> Tensor:
        """x (..., V, n_fpv), or (N, n_fpv) with splits (S + 1) unless flatten; returns (..., width) or (S, width)."""
        return graph_collapser(self, x, splits)

    def get_out_size(self) -> int:
        """Features of the output."""
        return self.f_final_outs[-1] * (self.n_v if self.flatten else len(self.agg_methods))


class NodePredictor(GraphCollapser):
    """A GraphCollapser that gives a prediction for each row instead of one vector for the set.

    Arguments as `GraphCollapser` without flatten and agg_methods, and
        out_act: activation of the output; "softmax" and "logsoftmax" normalise over dimension 1 of a 3-D output, so
            over the predictions only if transpose_out
        transpose_out: whether the output is (..., predictions, V) instead of (..., V, predictions)
    """

    def __init__(
        self,
        n_v: int | None,
        n_fpv: int,
        out_act: str,
        transpose_out: bool,
        f_initial_outs: list[int] | int | None = None,
        n_sa_layers: int = 0,
        sa_width: int | None = None,
        f_final_outs: list[int] | int | None = None,
        global_feat_vec: bool = False,
        do: float = 0,
        bn: bool = False,
        act: str = "relu",
        lookup_init: Callable = lookup_normal_init,
        lookup_act: Callable = lookup_act,
        bn_class: Callable[[int], nn.Module] = nn.BatchNorm1d,
        sa_class: Callable[..., nn.Module] = SelfAttention,
    ):
        layers = dict(f_initial_outs=f_initial_outs, n_sa_layers=n_sa_layers, sa_width=sa_width)
        layers |= dict(f_final_outs=f_final_outs, global_feat_vec=global_feat_vec, do=do, bn=bn, act=act)
        layers |= dict(lookup_init=lookup_init, lookup_act=lookup_act, bn_class=bn_class, sa_class=sa_class)
        super().__init__(n_v, n_fpv, flatten=True, **layers)
        self.transpose_out = transpose_out
        if f_final_outs is not None:
            last = self.f_final[-1][0]
            self.lookup_init(out_act, last.in_features, last.out_features)(last.weight)
            self.f_final[-1] = last
        self.out_act = self.lookup_act(out_act)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., V, n_fpv); returns (..., V, predictions), or (..., predictions, V) if transpose_out."""
        return node_predictor(self, x)


def _rows(module: nn.Module, x: Tensor, splits: Tensor | None) -> Tensor:
    """The rows after all layers, before they are collapsed."""
    check_rows(x, splits, type(module).__name__)
    columns = [Block(x)]
    if module.gfv_pos == "pre-initial":
        columns = with_means(columns, splits)
    x = apply_layers(module.f_inital, columns, splits)
    if module.n_sa_layers > 0:
        outs = []
        for layer in module.sa_layers:
            x = layer(x) if splits is None else layer(x, splits=splits)
            outs.append(x)
        x = torch.cat(outs, -1) if len(outs) > 1 else x
    columns = [Block(x)]
    if module.gfv_pos == "pre-final":
        columns = with_means(columns, splits)
    return apply_layers(module.f_final, columns, splits)


def graph_collapser(module: nn.Module, x: Tensor, splits: Tensor | None) -> Tensor:
    """Forward pass of a module with GraphCollapser's members."""
    if module.flatten and splits is not None:
        raise ValueError("GraphCollapser: splits and flatten exclude each other, ragged sets have no common width")
    x = _rows(module, x, splits)
    if module.flatten:
        return x.flatten(-2)
    methods = module.aggregates
    if all(isinstance(m, str) for m in methods):
        return ops.pool(x, splits=splits, aggregates=methods)
    rows = as_sets(x) if splits is None else x
    outs = [
        ops.pool(rows, splits=splits, aggregates=(m,)) if isinstance(m, str) else _called(m, rows, splits)
        for m in methods
    ]
    out = torch.cat(outs, -1)
    return out if splits is not None else out.reshape(*x.shape[:-2], out.shape[-1])


def _called(method: Callable[[Tensor], Tensor], rows: Tensor, splits: Tensor | None) -> Tensor:
    """The user's own aggregation of each set, (S, F); 0 for sets without rows."""
    if splits is None:
        return method(rows) if rows.shape[1] > 0 else rows.sum(1)
    found = in_runs(method, [rows], splits)
    blank = [rows.new_zeros(one, rows.shape[1]) if isinstance(one, int) else one for one in found]
    return torch.cat([rows[:0], *blank])


def node_predictor(module: nn.Module, x: Tensor) -> Tensor:
    """Forward pass of a module with NodePredictor's members."""
    x = _rows(module, x, None)
    return module.out_act(x.transpose(-1, -2) if module.transpose_out else x)
