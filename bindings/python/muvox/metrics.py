"""How well a map finds the blocks of a volume."""

import numpy as np
import torch


def rise(score: np.ndarray) -> np.ndarray:
    """(volumes, voxels) score minus the median of its volume: comparable between volumes of different backgrounds."""
    return score - np.median(score, axis=1, keepdims=True)


def expected_log_x0(logp: np.ndarray, x0) -> np.ndarray:
    """(volumes, classes, voxels) log-probabilities and X0 of the classes, m -> (volumes, voxels) float64 E[ln X0]."""
    return np.einsum("vcn,c->vn", np.exp(logp.astype(np.float64)), np.log(np.asarray(x0, np.float64)))


def roc_auc(score: np.ndarray, truth: np.ndarray) -> float:
    """Area under the ROC curve of all entries together, ties counted half; NaN unless both classes are there.

    NaN scores are refused with a ValueError.
    """
    from torchmetrics.functional.classification import binary_auroc

    rank, truth = _ranked(score, truth)
    if truth.all() or not truth.any():
        return float("nan")
    return float(binary_auroc(rank, truth.long()))


def roc_curve(score: np.ndarray, truth: np.ndarray, points: int = 500) -> tuple[np.ndarray, np.ndarray]:
    """Shares of false and of true findings as the threshold falls, each (n,), n at most about `points`, from 0 to 1."""
    from torchmetrics.functional.classification import binary_roc

    rank, truth = _ranked(score, truth)
    false, true = (part.numpy() for part in binary_roc(rank, truth.long())[:2])
    kept = np.unique(np.linspace(0, len(false) - 1, points).astype(int))
    return false[kept], true[kept]


def _ranked(score: np.ndarray, truth: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """torchmetrics takes scores outside 0..1 for logits and squashes them: ranks in 0..1 keep order and ties."""
    score, truth = np.asarray(score, np.float64).ravel(), np.asarray(truth, bool).ravel()
    if np.isnan(score).any():
        raise ValueError("a score is NaN")
    rank = np.unique(score, return_inverse=True)[1].reshape(-1) / max(len(score), 1)
    return torch.from_numpy(rank), torch.from_numpy(truth)


def block_auc(logp: np.ndarray, x0, block: np.ndarray) -> float:
    """ROC AUC of "this voxel is not background" by the fall of E[ln X0] below the volume's median."""
    return roc_auc(rise(-expected_log_x0(logp, x0)), block)


def evaluate(
    logp: np.ndarray, material: np.ndarray, block: np.ndarray, x0, weights: tuple[float, float]
) -> dict[str, float]:
    """Loss, accuracy and block AUC.

    `logp` (volumes, classes, voxels); `material` and `block` (volumes, voxels); `weights` of background and block
    voxels in the loss, as in `muvox.train.voxel_loss`.
    """
    nll = -np.take_along_axis(logp, material[:, None].astype(np.int64), axis=1)[:, 0]
    return dict(
        loss=float((np.where(block, weights[1], weights[0]) * nll).mean()),
        accuracy=float((logp.argmax(1) == material).mean()),
        auc=block_auc(logp, x0, block),
    )


def log_x0_scores(mean: np.ndarray, log_variance: np.ndarray, log_x0: np.ndarray) -> np.ndarray:
    """Negative log-likelihood of ln X0 under normal distributions, without the constant ½ ln 2π; all of one shape."""
    return 0.5 * (log_variance + (log_x0 - mean) ** 2 * np.exp(-log_variance))


def nearest_material(log_x0: np.ndarray, x0) -> np.ndarray:
    """Number of the material whose ln X0 is nearest, same shape as `log_x0`; `x0` of the materials, m."""
    return np.abs(log_x0[..., None] - np.log(np.asarray(x0, np.float64))).argmin(-1)


def evaluate_log_x0(
    said: np.ndarray, log_x0: np.ndarray, block: np.ndarray, x0, weights: tuple[float, float]
) -> dict[str, float]:
    """Loss, accuracy of the nearest material, block AUC, and root mean square error of ln X0.

    `said` (volumes, 2, voxels) mean and logarithm of the variance of ln X0; truth `log_x0` and `block`
    (volumes, voxels); `x0` of the materials, m.
    """
    mean, log_variance = said.astype(np.float64).swapaxes(0, 1)
    nll = log_x0_scores(mean, log_variance, log_x0)
    return dict(
        loss=float((np.where(block, weights[1], weights[0]) * nll).mean()),
        accuracy=float((nearest_material(mean, x0) == nearest_material(log_x0, x0)).mean()),
        auc=roc_auc(rise(-mean), block),
        rmse=float(np.sqrt(((mean - log_x0) ** 2).mean())),
    )
