"""VoxelNet: from the muons that each voxel sees to the material, or the radiation length, of every voxel."""

import numpy as np
import torch
from torch import Tensor, nn

from muvox.nn.collapse import GraphCollapser, NodePredictor
from muvox.nn.gravnet import GravNet, gravnet
from muvox.nn.norms import RunningBatchNorm2d, RunningNorm, affine
from muvox.nn.sets import Block, has_hooks


class VoxelNet(nn.Module):
    """Muon features (volumes, voxels, muons, n_feats) -> log-probabilities (volumes, n_classes, voxels).

    Stages: norm, GravNet over the muons of a voxel, collapse to one vector a voxel; then for every voxel the vectors of
    all voxels beside their relative position, norm, GravNet over the voxels, collapse, prediction for each voxel.
    Neither a tensor of muon pairs nor one of voxel pairs and input features is made. 63,763 parameters by default.

    Arguments:
        centres: (voxels, 3) centres of the voxels
        n_classes: materials
        n_feats: features of a muon
        n_s, n_lr: width of the learnt coordinates and features of both GravNets
        k_mu, k_vox: neighbours among the muons and among the voxels
        n_out, n_final: output width of the GravNets, of the rows that are collapsed
        sa_width, sa_width_out: query width of the self-attention before the collapses, before the prediction
        act: activation
        norm: "lumin" for LUMIN's RunningBatchNorm2d, "batch" for `RunningNorm`, which is sound at one volume a batch
            and synchronised over processes
        head: "classes" for log-probabilities, "log_x0" for mean and log-variance of log X0, (volumes, 2, voxels)
    """

    def __init__(
        self,
        centres,
        n_classes: int = 5,
        n_feats: int = 9,
        n_s: int = 4,
        n_lr: int = 22,
        k_mu: int = 25,
        k_vox: int = 12,
        n_out: int = 48,
        n_final: int = 40,
        sa_width: int = 12,
        sa_width_out: int = 20,
        act: str = "swish",
        norm: str = "lumin",
        head: str = "classes",
    ):
        super().__init__()
        norms = {"lumin": RunningBatchNorm2d, "batch": RunningNorm}
        heads = {"classes": (n_classes, "logsoftmax"), "log_x0": (2, "linear")}
        if norm not in norms:
            raise ValueError(f"VoxelNet: norm is {norm!r}, accepted are 'lumin' and 'batch'")
        if head not in heads:
            raise ValueError(f"VoxelNet: head is {head!r}, accepted are 'classes' and 'log_x0'")
        centres = _checked_centres(torch.as_tensor(np.asarray(centres), dtype=torch.float32))
        voxels, outputs = len(centres), heads[head]
        extract = dict(cat_means=True, f_slr_depth=3, n_s=n_s, n_lr=n_lr, f_out_depth=1, n_out=[n_out], act=act)
        collapse = dict(flatten=False, n_sa_layers=1, sa_width=sa_width, f_final_outs=[n_final], act=act)
        self.n_feats = n_feats
        self.mu_norm = norms[norm](n_feats)
        self.mu_gnn = GravNet(None, n_feats, k=k_mu, **extract)
        self.mu_col = GraphCollapser(None, n_out, **collapse)
        self.vox_norm = norms[norm](2 * n_final + 4)
        self.vox_gnn = GravNet(voxels, 2 * n_final + 4, k=k_vox, **extract)
        self.vox_col = GraphCollapser(voxels, n_out, **collapse)
        last = dict(n_sa_layers=1, sa_width=sa_width_out, f_final_outs=[outputs[0]], act=act)
        self.out = NodePredictor(voxels, 2 * n_final, out_act=outputs[1], transpose_out=True, **last)
        self.register_buffer("vox_dists", voxel_pairs(centres))

    def forward(self, x: Tensor, splits: Tensor | None = None, centres: Tensor | None = None) -> Tensor:
        """x (volumes, voxels, muons, n_feats), or ragged (rows, n_feats) with splits (volumes * voxels + 1).

        centres (voxels, 3) stand for those of the network, in any number: one compiled graph serves all grids, while
        torch.compile takes the sizes of a module's buffers as fixed.
        """
        pairs = self._pairs(centres)
        return self._voxel_stage(self._muon_stage(x, splits, len(pairs)), pairs)

    def muon_stage(self, x: Tensor, splits: Tensor | None = None) -> Tensor:
        """One vector a voxel, (volumes, voxels, 2 n_final), from what `forward` takes without centres."""
        return self._muon_stage(x, splits, len(self.vox_dists))

    def voxel_stage(self, x: Tensor, centres: Tensor | None = None) -> Tensor:
        """Predictions (volumes, n_classes, voxels) from one vector a voxel, (volumes, voxels, 2 n_final).

        centres as in `forward`.
        """
        return self._voxel_stage(x, self._pairs(centres))

    def _pairs(self, centres: Tensor | None) -> Tensor:
        return self.vox_dists if centres is None else voxel_pairs(_checked_centres(centres)).to(self.vox_dists)

    def _muon_stage(self, x: Tensor, splits: Tensor | None, voxels: int) -> Tensor:
        volumes = self._volumes(x, splits, voxels)
        if splits is None:
            x = _normalise(self.mu_norm, x)
        else:
            x = affine(x, *self.mu_norm.coefficients([(x, 1)], x.shape[0], volumes))
        x = self.mu_col(self.mu_gnn(x, splits), splits)
        return x.view(volumes, voxels, x.shape[-1])

    def _voxel_stage(self, x: Tensor, pairs: Tensor) -> Tensor:
        return self.out(self.vox_col(self._voxel_rows(x, pairs)))

    def _volumes(self, x: Tensor, splits: Tensor | None, voxels: int) -> int:
        if splits is None:
            if x.dim() != 4 or x.shape[1] != voxels or x.shape[3] != self.n_feats:
                accepted = f"(volumes, {voxels}, muons, {self.n_feats})"
                raise ValueError(f"VoxelNet: x has shape {tuple(x.shape)}, accepted is {accepted}")
            return x.shape[0]
        if x.dim() != 2 or x.shape[1] != self.n_feats:
            raise ValueError(f"VoxelNet: x has shape {tuple(x.shape)}, accepted with splits is (rows, {self.n_feats})")
        if splits.dim() != 1 or (len(splits) - 1) % voxels != 0:
            raise ValueError(f"VoxelNet: splits has shape {tuple(splits.shape)}, accepted is (volumes * {voxels} + 1)")
        return (len(splits) - 1) // voxels

    def _voxel_rows(self, x: Tensor, places: Tensor) -> Tensor:
        """GravNet over the voxels as seen from each voxel: (volumes, voxels, F) -> (volumes, voxels, voxels, n_out)."""
        volumes, voxels, width = x.shape
        if has_hooks(self.vox_norm) or has_hooks(self.vox_gnn):  # they must see the whole input
            shape = (volumes, voxels, voxels)
            pairs = torch.cat([x[:, None].expand(*shape, width), places.to(x.dtype).expand(*shape, 4)], -1)
            return self.vox_gnn(_normalise(self.vox_norm, pairs))
        rows = volumes * voxels * voxels
        factor, offset = self.vox_norm.coefficients([(x, voxels), (places, volumes)], rows, volumes)
        factors, offsets = factor.split([width, 4]), offset.split([width, 4])
        seen = affine(x, factors[0], offsets[0]).unsqueeze(1)
        place = affine(places, factors[1], offsets[1]).to(x.dtype)
        return gravnet(self.vox_gnn, [Block(seen), Block(place)], None)


def _normalise(norm: nn.Module, x: Tensor) -> Tensor:
    """A norm on (volumes, voxels, rows, channels)."""
    if isinstance(norm, RunningNorm):
        return norm(x)
    return norm(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def _checked_centres(centres: Tensor) -> Tensor:
    if centres.dim() != 2 or centres.shape[1] != 3:
        raise ValueError(f"VoxelNet: centres have shape {tuple(centres.shape)}, accepted is (voxels, 3)")
    return centres


def voxel_pairs(centres: Tensor) -> Tensor:
    """Centre j seen from centre i, and its distance: (voxels, 3) -> (voxels, voxels, 4)."""
    relative = centres[None] - centres[:, None]
    return torch.cat([relative, relative.norm(dim=-1, keepdim=True)], -1)
