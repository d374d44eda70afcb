"""Classical maps and scores against values worked out by hand."""

from pathlib import Path

import numpy as np
import pytest

from muvox.classical import COLUMNS, log_score, poca_maps
from muvox.data import Grid, Scans
from muvox.metrics import block_auc, evaluate, expected_log_x0, rise, roc_auc

SAMPLE = Path(__file__).parents[1] / "data" / "x0net250-sample.h5"


def test_poca_maps_by_hand():
    grid = Grid((3, 3, 2), (0.0, 0.0, 1.0), (1.0, 1.0, 0.5))
    muons = np.array(
        [
            # angle, momentum, PoCA
            [0.1, 2.0, 0.5, 0.5, 1.1],  # (0, 0, 0): 0.04
            [0.3, 1.0, 0.9, 0.2, 1.49],  # (0, 0, 0): 0.09
            [0.2, 1.0, 1.0, 1.0, 1.5],  # (1, 1, 1): 0.04, on the corner of the voxel
            [0.5, 2.0, 2.5, 2.5, 1.2],  # (2, 2, 0): 1
            [9.0, 9.0, 3.0, 1.0, 1.2],  # on the far face: outside
            [9.0, 9.0, 1.0, 1.0, 0.99],  # below
        ],
        np.float32,
    )
    poca, smooth = poca_maps(muons, grid)
    expected = np.full((3, 3, 2), 0.04)
    expected[0, 0, 0], expected[2, 2, 0] = 0.065, 1.0
    np.testing.assert_allclose(poca, expected, rtol=1e-6)
    # Sums over neighbours: the corner of (0, 0) and the middle see three muons, all others four minus what is far away.
    assert smooth[1, 1, 0] == pytest.approx((0.04 + 0.09 + 0.04 + 1) / 4)
    assert smooth[0, 0, 1] == smooth[0, 1, 0] == pytest.approx((0.04 + 0.09 + 0.04) / 3)
    assert smooth[2, 2, 1] == smooth[2, 1, 0] == pytest.approx((0.04 + 1) / 2)
    assert smooth[2, 0, 0] == pytest.approx(0.04)  # the middle alone


def test_a_volume_without_muons_has_a_flat_map():
    maps = poca_maps(np.empty((0, len(COLUMNS)), np.float32), Grid((2, 2, 2), (0, 0, 0), (1, 1, 1)))
    for values in maps:
        assert values.shape == (2, 2, 2) and not values.any()
        assert np.isfinite(log_score(values)).all()


def test_voxels_without_poca_get_the_minimum_of_the_others():
    muons = np.array([[0.2, 1, 0.5, 0.5, 0.5], [0.1, 1, 1.5, 0.5, 0.5]], np.float32)
    poca, _ = poca_maps(muons, Grid((2, 2, 1), (0, 0, 0), (1, 1, 1)))
    np.testing.assert_allclose(poca[..., 0], [[0.04, 0.01], [0.01, 0.01]], rtol=1e-6)


def test_auc_by_hand():
    score, truth = np.array([[3.0, -2.0], [5.0, 3.0]]), np.array([[True, False], [True, False]])
    # Pairs (block, background): 3 > -2, 3 = 3, 5 > -2, 5 > 3: 3.5 of 4.
    assert roc_auc(score, truth) == pytest.approx(3.5 / 4)
    assert roc_auc(-score, truth) == pytest.approx(0.5 / 4)
    assert roc_auc(np.exp(score * 100) * 1e-3, truth) == pytest.approx(
        3.5 / 4
    )  # only the order counts, far outside 0..1 too
    assert roc_auc(np.ones(4), truth) == pytest.approx(0.5)
    assert np.isnan(roc_auc(score, np.zeros((2, 2), bool)))
    with pytest.raises(ValueError, match="NaN"):
        roc_auc(np.array([1, np.nan]), np.array([True, False]))


def test_scores_of_a_network_by_hand():
    x0 = (1.0, np.exp(-2.0))
    p = np.array([[[0.9, 0.8, 0.25], [0.1, 0.2, 0.75]]], np.float32)  # (1 volume, 2 classes, 3 voxels)
    np.testing.assert_allclose(expected_log_x0(np.log(p), x0), [[-0.2, -0.4, -1.5]], rtol=1e-6)
    np.testing.assert_allclose(rise(-expected_log_x0(np.log(p), x0)), [[-0.2, 0, 1.1]], rtol=1e-6)
    material, block = np.array([[0, 1, 1]], np.uint8), np.array([[False, True, True]])
    result = evaluate(np.log(p), material, block, x0, (2.0, 3.0))
    assert result["loss"] == pytest.approx(-(2 * np.log(0.9) + 3 * np.log(0.2) + 3 * np.log(0.75)) / 3, rel=1e-6)
    assert result["accuracy"] == pytest.approx(2 / 3)
    assert result["auc"] == block_auc(np.log(p), x0, block) == 1.0


def test_maps_of_the_sample_score_as_published():
    """The block AUC of 0.8616 and 0.8554 that raw and smoothed PoCA have on these 200 volumes, all muons."""
    with Scans(SAMPLE, COLUMNS) as scans:
        volumes = [int(v) for v in scans.of_split("validation")]
        block = np.stack([scans.material(v) != scans.background[v] for v in volumes]).reshape(200, -1)
        maps = zip(*(poca_maps(scans.muons(v), scans.grid) for v in volumes))
        raw, smooth = (roc_auc(rise(log_score(np.stack(m).reshape(200, -1))), block) for m in maps)
    assert raw == pytest.approx(0.8616, abs=2e-4)
    assert smooth == pytest.approx(0.8554, abs=2e-4)
