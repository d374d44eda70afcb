"""The simulation against the formulae: scattering, detector, tracks, flux, threads and seeds."""

import numpy as np
import pytest

from muvox.data import COLUMNS, Grid
from muvox.simulate import Detector, SimulationError, Source, flux, simulate_muons
from muvox.simulate.source import MUON_MASS

NAMES = list(COLUMNS)
ROWS = 30_000
SPREAD = 4.5 / np.sqrt(2 * ROWS)  # of a standard deviation, relative: 4.5 of its own


def slab(x0, momentum=3.0, zenith=0.0, rows=ROWS, voxels=(1, 1, 5), height=1.0, resolution=0.0, **options):
    """Muons behind a wide slab with layers of these radiation lengths (top last), seen by a perfect detector: a dict of
    columns, float64."""
    grid = Grid(voxels, (-40.0, -40.0, 0.0), (80.0 / voxels[0], 80.0 / voxels[1], height / voxels[2]))
    detector = Detector((height + 0.3, height + 0.2, -0.2, -0.3), (-20.0, 20.0), (-20.0, 20.0), resolution)
    x0 = np.broadcast_to(np.asarray(x0, np.float32), voxels)
    muons, _ = simulate_muons(
        grid,
        x0,
        [rows],
        source=Source.beam(momentum, zenith),
        detector=detector,
        dtype=np.float64,
        threads=1,
        **options,
    )
    return dict(zip(NAMES, muons.T))


def highland(thickness, momentum, log_of=None):
    """θ0 by the PDG's formula, β included; thickness in X0."""
    beta = momentum / np.hypot(momentum, MUON_MASS)
    return 0.0136 / (beta * momentum) * np.sqrt(thickness) * (1 + 0.038 * np.log(log_of or thickness))


@pytest.mark.parametrize("x0, momentum", [(0.1932, 3.0), (0.3528, 0.7), (0.005612, 20.0), (300.0, 1.0)])
@pytest.mark.parametrize("step", [None, 0.013])
def test_a_slab_scatters_as_the_formula_says(x0, momentum, step):
    """Angle θ0, displacement x θ0/√3, correlation √3/2, in both planes and none between them, however it is cut."""
    muons, theta0 = slab(x0, momentum, step=step), highland(1 / x0, momentum)
    planes = []
    for axis in "xy":
        angle = muons[f"theta_{axis}_out"]
        shift = muons[f"{axis}_out"] - muons[f"{axis}_in"]
        assert np.abs(muons[f"theta_{axis}_in"]).max() < 1e-12
        assert angle.std() == pytest.approx(theta0, rel=SPREAD)
        assert shift.std() == pytest.approx(theta0 / np.sqrt(3), rel=SPREAD)
        assert np.abs([angle.mean() / theta0, shift.mean() / theta0 * np.sqrt(3)]).max() < 4.5 / np.sqrt(ROWS)
        assert np.corrcoef(angle, shift)[0, 1] == pytest.approx(np.sqrt(3) / 2, abs=4.5 * 0.25 / np.sqrt(ROWS))
        assert np.mean((angle / theta0) ** 4) == pytest.approx(3, abs=4.5 * np.sqrt(96 / ROWS))  # Gaussian
        planes += [angle, shift]
    assert np.abs(np.corrcoef(planes)[:2, 2:]).max() < 4.5 / np.sqrt(ROWS)


@pytest.mark.parametrize("zenith", [0.4, 1.1])
def test_a_slanted_way_is_longer(zenith):
    muons, theta0 = slab(0.1, 10.0, zenith), highland(10 / np.cos(zenith), 10.0)
    assert np.sqrt(np.mean(muons["total_scatter"] ** 2)) == pytest.approx(np.sqrt(2) * theta0, rel=SPREAD)
    tangent = np.hypot(np.tan(muons["theta_x_in"]), np.tan(muons["theta_y_in"]))
    assert np.allclose(np.arctan(tangent), zenith, atol=1e-9)
    azimuth = np.arctan2(np.tan(muons["theta_y_in"]), np.tan(muons["theta_x_in"]))
    assert abs(np.mean(np.exp(1j * azimuth))) < 4.5 / np.sqrt(ROWS)


def test_the_logarithm_of_each_step():
    muons = slab(0.1932, 3.0, log_per_step=True, step=0.01)
    theta0 = highland(1 / 0.1932, 3.0, log_of=0.01 / 0.1932)
    assert muons["theta_x_out"].std() == pytest.approx(theta0, rel=SPREAD)
    assert theta0 < 0.9 * highland(1 / 0.1932, 3.0)


def test_layers_scatter_where_they_are():
    """Only the upper fifth of a metre scatters: the rest is a lever. A void scatters nothing at all."""
    lengths = np.full((1, 1, 5), np.inf)
    lengths[..., 4] = 0.05
    muons, theta0 = slab(lengths, 5.0), highland(0.2 / 0.05, 5.0)
    shift = muons["x_out"] - muons["x_in"]
    assert muons["theta_x_out"].std() == pytest.approx(theta0, rel=SPREAD)
    assert shift.std() == pytest.approx(theta0 * np.sqrt(0.2**2 / 3 + 0.2 * 0.8 + 0.8**2), rel=SPREAD)
    assert np.abs(np.median(muons["poca_z"]) - 0.9) < 0.005
    with pytest.raises(SimulationError, match="none is recorded"):
        slab(np.inf, rows=2)  # all tracks are parallel


def test_voxels_stand_where_the_map_says():
    """Of 4 × 2 × 2 voxels one is of lead: muons that cross it alone are scattered. x and y are not exchanged."""
    grid = Grid((4, 2, 2), (0.0, 0.0, 0.0), (0.5, 0.5, 0.5))
    x0 = np.full(grid.shape, np.inf, np.float32)
    x0[2, 1, 0] = 0.005612
    detector = Detector((1.3, 1.2, -0.2, -0.3), (0.0, 2.0), (0.0, 1.0), 1e-5)
    muons, _ = simulate_muons(grid, x0, [4000], source=Source.beam(3.0), detector=detector, dtype=np.float64, threads=1)
    c = dict(zip(NAMES, muons.T))
    inside = (c["x_in"] > 1.0) & (c["x_in"] < 1.5) & (c["y_in"] > 0.5)
    assert 300 < inside.sum() < 700
    assert np.median(c["total_scatter"][inside]) > 0.03 and c["total_scatter"][~inside].max() < 1e-3
    assert np.abs(np.median(c["poca_z"][inside]) - 0.25) < 0.02


def test_hits_have_errors():
    """Without material only the detector is left: widths of slope and position of a line through two points."""
    resolution = 0.002
    muons = slab(np.inf, resolution=resolution)
    assert muons["theta_x_in"].std() == pytest.approx(resolution * np.sqrt(2) / 0.1, rel=SPREAD)
    difference = muons["theta_y_out"] - muons["theta_y_in"]
    assert difference.std() == pytest.approx(resolution * 2 / 0.1, rel=SPREAD)
    # line through z = 1.3, 1.2 read at z = 1.0: weights −2 and 3; below the same
    difference = muons["x_out"] - muons["x_in"]
    assert difference.std() == pytest.approx(resolution * np.sqrt(2 * (4 + 9)), rel=SPREAD)


def test_four_panels_and_those_that_see_nothing():
    """Two hits of four at least on each side, each there with probability ½: (11/16)² of the muons, and wider lines."""
    grid = Grid((1, 1, 1), (-5.0, -5.0, 0.0), (10.0, 10.0, 1.0))
    source = Source.beam(3.0)
    widths = []
    for efficiency, share in ((1.0, 1.0), (0.5, (11 / 16) ** 2)):
        detector = Detector.around(grid, margin=-1.0, resolution=1e-3, efficiency=efficiency)
        muons, aimed = simulate_muons(
            grid, np.full((1, 1, 1), np.inf), [20_000], source=source, detector=detector, dtype=np.float64, threads=1
        )
        assert 20_000 / aimed[0] == pytest.approx(share, abs=0.015)
        widths.append(muons[:, NAMES.index("theta_x_in")].std())
    assert widths[0] == pytest.approx(1e-3 / np.sqrt(0.05), rel=4.5 / np.sqrt(40_000))
    assert widths[1] > 1.3 * widths[0]


def test_columns_belong_together():
    """Everything that the tracks give, computed another way in double: PoCA as a least-squares problem."""
    grid = Grid((6, 5, 4), (-0.2, 0.1, 0.4), (0.1, 0.15, 0.2))
    x0 = np.random.default_rng(3).choice([0.35, 0.02, 0.0056], grid.shape)
    muons, _ = simulate_muons(grid, x0, [3000], seed=3, dtype=np.float64, threads=1)
    c = dict(zip(NAMES, muons.T))
    top, bottom = 0.4 + 4 * 0.2, 0.4
    lines = []
    for side, z in (("in", top), ("out", bottom)):
        at = np.stack([c[f"x_{side}"], c[f"y_{side}"], np.full(3000, z)], 1)
        along = np.stack([np.tan(c[f"theta_x_{side}"]), np.tan(c[f"theta_y_{side}"]), np.full(3000, -1.0)], 1)
        lines.append((at, along / np.linalg.norm(along, axis=1, keepdims=True)))
    (a, u), (b, v) = lines
    scatter = 2 * np.arcsin(np.linalg.norm(u - v, axis=1) / 2)
    np.testing.assert_allclose(c["total_scatter"], scatter, rtol=1e-9)
    pairs = np.stack([u, -v], 2)
    ways = np.array([np.linalg.lstsq(m, w, rcond=None)[0] for m, w in zip(pairs, b - a)])
    near = a + ways[:, :1] * u, b + ways[:, 1:] * v
    middle = (near[0] + near[1]) / 2
    np.testing.assert_allclose(muons[:, 12:15], middle, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(muons[:, 15:17], (near[1] - near[0])[:, :2], rtol=1e-5, atol=1e-8)
    polar = [np.arccos(-line[:, 2]) for _, line in lines]
    turn = np.abs(np.angle(np.exp(1j * (np.arctan2(v[:, 1], v[:, 0]) - np.arctan2(u[:, 1], u[:, 0])))))
    far = turn > np.pi / 2
    np.testing.assert_allclose(c["dphi"], np.where(far, np.pi - turn, turn), atol=1e-9)
    np.testing.assert_allclose(c["dtheta"], np.where(far, polar[0] + polar[1], np.abs(polar[0] - polar[1])), atol=1e-9)
    cosine = (np.cos(polar[0]) + np.cos(polar[1])) / 2
    np.testing.assert_allclose(c["pred_x0"], (0.0136 / c["p"]) ** 2 * 0.2 / (0.5 * scatter**2 * cosine), rtol=1e-8)
    single, _ = simulate_muons(grid, x0, [3000], seed=3, threads=1)
    np.testing.assert_array_equal(single, muons.astype(np.float32))


def test_muons_cross_volume_and_panels():
    grid = Grid((4, 4, 4), (0.0, 0.0, 0.4), (0.1, 0.1, 0.1))
    detector = Detector.around(grid, margin=0.1, resolution=0.0)
    x0 = np.full(grid.shape, 0.35)
    muons, aimed = simulate_muons(grid, x0, [5000], detector=detector, dtype=np.float64, threads=1)
    c = dict(zip(NAMES, muons.T))
    for side, z, panels in (("in", 0.8, (0.85, 1.15)), ("out", 0.4, (0.35, 0.05))):
        for panel in panels:
            for axis in "xy":
                place = c[f"{axis}_{side}"] + (z - panel) * np.tan(c[f"theta_{axis}_{side}"])
                assert place.min() > -0.1 - 1e-9 and place.max() < 0.5 + 1e-9
                if panel in (1.15, 0.05):  # the outermost are used up to their borders
                    assert place.min() < -0.08 and place.max() > 0.48
    assert ((c["x_in"] < 0) | (c["x_in"] > 0.4)).any()  # some come in through a side
    assert 5000 < aimed[0] < 20_000


def test_threads_change_nothing_and_seeds_do():
    grid = Grid((3, 3, 3), (0.0, 0.0, 0.4), (0.2, 0.2, 0.2))
    x0 = np.random.default_rng(0).uniform(0.01, 0.4, (4, 3, 3, 3))
    counts = [300, 0, 1, 500]
    runs = [simulate_muons(grid, x0, counts, threads=threads, seed=9) for threads in (1, 2, 5)]
    for muons, aimed in runs[1:]:
        np.testing.assert_array_equal(muons, runs[0][0])
        np.testing.assert_array_equal(aimed, runs[0][1])
    muons = runs[0][0]
    assert len(np.unique(muons[:, NAMES.index("poca_x")])) == 801  # no muon twice
    other = simulate_muons(grid, x0, counts, threads=1, seed=10)[0]
    assert not (other[:, 12:15] == muons[:, 12:15]).all(axis=1).any()
    alone = simulate_muons(grid, x0[3], [200], ids=[3], threads=1, seed=9)[0]
    np.testing.assert_array_equal(alone, muons[301:501])  # the first of the same volume
    assert len(simulate_muons(grid, x0, [0, 0, 0, 0])[0]) == 0 and len(simulate_muons(grid, x0[0], [])[0]) == 0


def test_the_flux_is_that_of_the_literature():
    """Vertical intensity above 1 GeV 60 to 70 /(m² s sr), mean energy about 4 GeV, cos² at 3 GeV and flatter, in the
    end rising with the angle, above (PDG, Cosmic rays)."""
    energy = np.geomspace(1, 5000, 4000)
    assert 60 <= np.trapezoid(flux(energy, 0.0), energy) * 1e4 <= 70
    energy = np.geomspace(0.5, 5000, 4000)
    assert 3 < np.trapezoid(energy * flux(energy, 0.0), energy) / np.trapezoid(flux(energy, 0.0), energy) < 5.5
    assert flux(3.0, np.radians(60)) / flux(3.0, 0.0) == pytest.approx(0.25, abs=0.07)
    assert flux(300.0, np.radians(60)) > flux(300.0, 0.0)


def test_muons_follow_the_flux():
    """Momenta and angles of the quantiles against the flux integrated on another grid."""
    source = Source.spectrum()
    energy, angle = np.geomspace(0.5, 500, 801), np.radians(np.linspace(0, 70, 201))
    weight = flux(energy[:, None], angle) * np.sin(angle) * np.cos(angle)
    for p, share in zip(source.momentum[[103, 512, 921]], np.array([103, 512, 921]) / 1024):
        below = np.hypot(energy, 0) <= np.hypot(p, MUON_MASS)
        per_energy = weight.sum(1)
        part = np.trapezoid(per_energy[below], energy[below]) / np.trapezoid(per_energy, energy)
        assert part == pytest.approx(share, abs=0.01)
    assert np.hypot(source.momentum[[0, -1]], MUON_MASS) == pytest.approx([0.5, 500])
    for row in (0, 512, 1000):
        at = np.hypot(source.momentum[row], MUON_MASS)
        density = flux(at, angle) * np.sin(angle) * np.cos(angle)
        below = angle <= source.zenith[row, 128]
        assert density[below].sum() / density.sum() == pytest.approx(0.5, abs=0.01)
    # and those drawn are the quantiles: behind a wide detector close to a thin void all are recorded
    grid = Grid((1, 1, 1), (-50.0, -50.0, 0.0), (100.0, 100.0, 0.1))
    detector = Detector((0.12, 0.11, -0.01, -0.02), (-49.0, 49.0), (-49.0, 49.0), 1e-4)
    muons, _ = simulate_muons(
        grid, np.full((1, 1, 1), np.inf), [20_000], source=source, detector=detector, dtype=np.float64, threads=1
    )
    ranks = np.searchsorted(source.momentum, muons[:, 17]) / 1024
    assert abs(np.sort(ranks) - np.linspace(0, 1, 20_000)).max() < 1.95 / np.sqrt(20_000) + 2e-3


def test_given_momenta():
    drawn = Source.of_momentum([1.0, 1.0, 1.0, 4.0, 4.0])
    assert drawn.momentum[[0, 1024]].tolist() == [1.0, 4.0] and abs((drawn.momentum < 2).mean() - 0.6) < 0.1
    assert Source.of_momentum(5.0).momentum.tolist() == [5.0] and Source.of_momentum(5.0).zenith.shape == (1, 257)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(x0=np.ones((3, 3, 2))), r"x0 has shape \(3, 3, 2\) for 1 volumes, expected \(3, 3, 3\)"),
        (dict(x0=np.zeros((3, 3, 3))), "x0 is 0 in voxel 0 of volume 0"),
        (dict(muons=[-1]), r"muons is \[-1\]"),
        (dict(ids=[1, 2]), r"ids has shape \(2,\)"),
        (dict(step=-1.0), "step is -1"),
        (dict(source=Source(np.array([-1.0]), np.array([[0.0]]))), "momentum has -1"),
        (dict(source=Source(np.array([1.0]), np.array([[2.0]]))), "zenith has 2"),
        (dict(detector=Detector((2.0, -1.0), (0, 1), (0, 1))), "1 panels above and 1 below"),
        (dict(detector=Detector((2.0, 2.1, 0.5, -1.0), (0, 1), (0, 1))), "panel 2 is at z = 0.5"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(change, words):
    arguments = dict(x0=np.ones((3, 3, 3)), muons=[5]) | change
    grid = Grid((3, 3, 3), (0.0, 0.0, 0.4), (0.2, 0.2, 0.2))
    with pytest.raises(SimulationError, match=words) as error:
        simulate_muons(grid, arguments.pop("x0"), arguments.pop("muons"), threads=1, **arguments)
    assert "\n" not in str(error.value)
