"""`muvox report`: what is on the page is right, and a browser shows it, all of it, offline and without an error."""

import base64
import io
import json
import math
import os
import re
from pathlib import Path

import h5py
import matplotlib.image
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from muvox import checkpoint as checkpoints
from muvox.cli import muvox as command
from muvox.data import Scans, write_scans
from muvox.evaluation import evaluate_scans
from muvox.report import LIMIT, browser, collect, render
from muvox.report.command import _ranges

TINY = Path(__file__).parents[1] / "data" / "tiny.h5"
HOSTILE = "a <img src=x onerror=fail()> & 'scan'.h5"
NAMES = ["Truth", "PoCA", "PoCA, 3×3×3", "ASR, quantile", "ASR, mean", "VoxelNet"]


def call(*arguments):
    return CliRunner().invoke(command, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folder of a page, its network and its scan: the tiny volumes, with a name that HTML would take amiss."""
    folder = tmp_path_factory.mktemp("report")
    with Scans(TINY) as scans:
        names = ("</script><script>fail()</script>", *scans.materials.names[1:])
        materials = type(scans.materials)(names, scans.materials.x0)
        write_scans(folder / HOSTILE, scans.volumes(), scans.grid, materials)
    with Scans(folder / HOSTILE) as scans:
        torch.manual_seed(3)
        net = checkpoints.build(scans.grid, len(materials.names), "batch").eval()
        validation = [dict(step=1500, loss=1.6, auc=0.7), dict(step=3000, loss=1.1)]
        history = dict(loss=np.linspace(2, 1, 3000).tolist(), validation=validation)
        prior = [-math.log(len(materials.names))] * len(materials.names)
        state = checkpoints.Checkpoint(net, scans.grid, materials, prior, "batch", 64, 3000, history)
        checkpoints.save(folder / "net.pt", state)
    result = call("report", folder / HOSTILE, folder / "net.pt", "-o", folder / "page.html", "--threads", 1)
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def unknown(made, tmp_path_factory):
    """The page of a scan without truth and the columns for ASR, by a network without history, and what was printed."""
    folder = tmp_path_factory.mktemp("unknown")
    with h5py.File(TINY) as old, h5py.File(folder / "scan.h5", "w") as new:
        for name in ("row_splits", "volume_id", "split"):
            old.copy(name, new)
        new.attrs.update(old.attrs)
        names = old["muons"].attrs["columns"].tolist()
        kept = [place for place, name in enumerate(names) if name != "x_out"]
        new["muons"] = old["muons"][:][:, kept]
        for name in ("columns", "units"):
            new["muons"].attrs[name] = [old["muons"].attrs[name][place] for place in kept]
    state = checkpoints.load(made / "net.pt")
    state.history = {}
    checkpoints.save(folder / "net.pt", state)
    target = folder / "page.html"
    result = call("report", folder / "scan.h5", folder / "net.pt", "-o", target, "--volumes", "0-1", "--muons", 20)
    assert result.exit_code == 0, result.output
    return target, result.output


def data_of(path: Path) -> dict:
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)[1])


def values_of(entry: dict) -> np.ndarray:
    return entry["low"] + entry["step"] * np.frombuffer(base64.b64decode(entry["data"]), "<u2")


def test_the_page_holds_truth_and_all_maps(made):
    data = data_of(made / "page.html")
    assert [entry["name"] for entry in data["maps"]] == NAMES
    with Scans(made / HOSTILE) as scans:
        volumes = [int(v) for v in scans.of_split("validation")]
        truth = np.stack([scans.log_x0(v).ravel() for v in volumes])
        block = np.stack([scans.material(v) != scans.background[v] for v in volumes])
        np.testing.assert_allclose(values_of(data["maps"][0]), truth.ravel(), atol=1e-3)
        assert base64.b64decode(data["block"]) == block.astype(np.uint8).tobytes()
        assert [v["number"] for v in data["volumes"]] == volumes
        assert [v["muons"] for v in data["volumes"]] == [scans.count(v) for v in volumes]
        state = checkpoints.load(made / "net.pt")
        expected = {r.name: r.scores["auc_block"] for r in evaluate_scans(state, scans, volumes).results}
    assert {m["name"]: m["auc"] for m in data["maps"][1:]} == pytest.approx(expected, abs=1e-5)
    medians = [np.median(values_of(entry)) for entry in data["maps"][:5]]
    assert medians == pytest.approx([medians[0]] * 5, abs=1e-3)


def test_the_page_holds_loss_time_memory_and_what_made_it(made):
    data = data_of(made / "page.html")
    assert data["loss"]["loss"][0] == pytest.approx(2, abs=1e-2) and data["loss"]["step"][-1] == 3000
    assert data["loss"]["validation"] == [dict(step=1500, loss=1.6, auc=0.7), dict(step=3000, loss=1.1)]
    assert [row[0] for row in data["times"]] == NAMES[1:]
    name, took, memory = data["times"][-1]
    assert 0.1 < float(took.removesuffix(" ms").replace(",", "")) < 1e5
    assert 50 < float(memory.removesuffix(" MiB").replace(",", "")) < 1e5
    facts = dict(data["facts"])
    assert facts["command"].startswith("muvox report ") and facts["command"].endswith("--threads 1")
    assert "muvox 0." in facts["versions"] and "step 3,000" in facts["network"]


def test_the_page_is_whole_and_small(made):
    text = (made / "page.html").read_text(encoding="utf-8")
    assert len(text.encode()) < LIMIT
    assert text.count("plotly.js v") >= 1 and "default-src 'none'" in text
    # After plotly.js nothing names another file, and names in the data start no element.
    own = text[: text.index("<script>")] + text[text.rindex('<script id="data"') :]
    assert not re.search(r'(src|href)="(?!data:)|@import|url\(', own)
    assert "<img" not in own and text.count("fail()</script>") == 0


def test_a_browser_shows_it_and_every_control_works(made, unknown):
    need_browser()
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.select import Select

    with browser.opened(made / "page.html") as window:

        def shown(plot: str) -> list:
            browser.wait(window)
            what = "d.meta ?? [d.z, d.x, d.y]"
            script = f"return document.getElementById('{plot}').data.map(d => [d.name, d.type, {what}])"
            return window.execute_script(script)

        def choose(control: str, text: str) -> None:
            Select(window.find_element("id", control)).select_by_visible_text(text)

        four = ["Truth", "PoCA", "ASR", "VoxelNet"]
        for plot, kind in (("slices", "heatmap"), ("space", "mesh3d")):
            assert [name.split(",")[0] for name, trace, _ in shown(plot) if trace == kind] == four
        assert [name.split(", AUC")[0] for name, *_ in shown("roc")[:-1]] == NAMES[1:]
        assert len(shown("loss")) == 4

        before, level = shown("slices"), window.find_element("id", "level-value").text
        slider = window.find_element("id", "level")
        slider.send_keys(Keys.ARROW_RIGHT if slider.get_attribute("value") == "0" else Keys.ARROW_LEFT)
        assert shown("slices") != before and window.find_element("id", "level-value").text != level

        space, share = shown("space"), window.find_element("id", "share")
        share.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
        assert [row[2] for row in shown("space")][-1] > [row[2] for row in space][-1]
        assert shown("space")[0] == space[0]  # the truth stays

        for name in NAMES:
            choose("slice-method", name)
            assert [row[0] for row in shown("slices")] == [name, "outline"]
        for name in ("Truth", "PoCA", "ASR, mean", "VoxelNet"):
            choose("space-method", name)
            assert [row[0] for row in shown("space")] == [name]
        choose("space-method", "Truth")
        browser.wait(window)
        picture = matplotlib.image.imread(io.BytesIO(window.find_element("id", "space").screenshot_as_png))
        view = picture[:, : int(0.75 * picture.shape[1]), :3]  # without the colour bar: axes are grey, blocks are not
        assert (np.ptp(view, axis=2) > 0.2).mean() > 0.01

        about = window.find_element("id", "about")
        seen = set()
        for number in (volume["number"] for volume in data_of(made / "page.html")["volumes"]):
            choose("volume", str(number))
            seen.add((about.text, json.dumps(shown("slices"))))
        assert len(seen) == 4
        text = about.text
        window.find_element("id", "next").click()
        browser.wait(window)
        assert about.text != text
        window.find_element("id", "previous").click()
        browser.wait(window)
        assert about.text == text

        assert window.execute_script("return performance.getEntriesByType('resource').map(e => e.name)") == []
        errors = [entry["message"] for entry in window.get_log("browser") if entry["level"] == "SEVERE"]
        assert errors == []
        assert_picture(browser.photograph(window))
        window.get(unknown[0].as_uri())
        assert [name for name, *_ in shown("space")] == ["PoCA, 3×3×3", "VoxelNet"]
        choose("volume", "1")  # without muons: nothing stands out
        assert [count for *_, count in shown("space")] == [0, 0]
        for plot, words in (("roc", "no truth"), ("loss", "history")):
            assert words in window.find_element("id", plot).text
        assert [entry["message"] for entry in window.get_log("browser") if entry["level"] == "SEVERE"] == []
        window.execute_script("fetch('https://muvox.invalid').catch(() => 0)")  # the page forbids itself the network
        assert any("Content Security Policy" in entry["message"] for entry in window.get_log("browser"))


@pytest.mark.slow
def test_the_command_takes_a_picture_of_the_page(made):
    need_browser()
    target = made / "page.png"
    arguments = made / HOSTILE, made / "net.pt", "-o", made / "b.html", "--volumes", 8
    result = call("report", *arguments, "--screenshot", target)
    assert result.exit_code == 0, result.output
    assert_picture(target.read_bytes())


def assert_picture(content: bytes):
    """Something is drawn everywhere, in a file fit for a README."""
    image = matplotlib.image.imread(io.BytesIO(content))
    assert image.shape[0] > 1500 and image.shape[1] == browser.WIDTH and len(content) < 800_000
    for part in np.array_split(image[:, :, :3], 4):
        assert len(np.unique((part * 16).astype(int).reshape(-1, 3), axis=0)) > 20


def need_browser():
    """`make test` installs the browser where the system has a package of it; there, no skip."""
    try:
        browser.check()
    except browser.BrowserError as error:
        if os.path.exists("/etc/debian_version") and "ID=ubuntu" not in Path("/etc/os-release").read_text().split():
            raise
        pytest.skip(str(error))


def test_a_scan_of_the_unknown(unknown):
    target, output = unknown
    assert "ASR, mean left out: the scan has no x_out" in output
    data = data_of(target)
    assert [entry["name"] for entry in data["maps"]] == ["PoCA", "PoCA, 3×3×3", "VoxelNet"]
    assert data["block"] is None and data["loss"] is None and "auc" not in data["maps"][0]
    assert [v["muons"] for v in data["volumes"]] == [20, 0]
    assert "20 drawn of each volume" in dict(data["facts"])["muons"]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_folder_of_scans_gives_the_page_of_one_file(made, tmp_path, swapped):
    folder = tmp_path / "scans"
    folder.mkdir()
    with Scans(made / HOSTILE) as scans:
        every = list(scans.volumes())
        for name, part in (("b.h5", every[7:]), ("a.h5", every[:7])):
            write_scans(folder / name, part, scans.grid, scans.materials)
    inputs = (made / "net.pt", folder) if swapped else (folder, made / "net.pt")
    result = call("report", *inputs, "-o", tmp_path / "page.html", "--threads", 1)
    assert result.exit_code == 0, result.output
    one, several = data_of(made / "page.html"), data_of(tmp_path / "page.html")
    for name in ("volumes", "block", "maps", "materials", "loss"):
        assert one[name] == several[name], name
    assert dict(several["facts"])["scan"] == str(folder)
    before = (folder / "b.h5").read_bytes()
    refused = call("report", *inputs, "-o", folder / "b.h5")
    assert refused.exit_code == 2 and "is read from and cannot be written to" in refused.stderr
    assert (folder / "b.h5").read_bytes() == before


def test_the_loss_of_a_log_where_the_checkpoint_has_none(made, tmp_path):
    state = checkpoints.load(made / "net.pt")
    state.history = {}
    checkpoints.save(tmp_path / "net.pt", state)
    (tmp_path / "log.csv").write_text("step,lr,loss,validation_loss,validation_auc\n1,0.1,2.5,,\n2,0.1,1.5,1.75,0.5\n")
    target = tmp_path / "page.html"
    assert call("report", tmp_path / "net.pt", made / HOSTILE, "-o", target, "--volumes", 8).exit_code == 0
    loss = data_of(target)["loss"]
    assert loss["loss"] == [2.5, 1.5] and loss["validation"] == [dict(step=2, loss=1.75, auc=0.5)]


def test_a_page_of_many_voxels_shows_the_first_volumes(made):
    with Scans(made / HOSTILE) as scans:
        contents = collect(checkpoints.load(made / "net.pt"), scans, [8, 9])
    for each in contents.maps:
        each.log_x0 = np.repeat(np.tile(each.log_x0, (300, 1)), 2, axis=0)
        each.auc_volumes = np.full(1200, np.nan)
    contents.block = np.repeat(np.tile(contents.block, (300, 1)), 2, axis=0)
    for name in ("numbers", "volume_id", "muons", "background"):
        setattr(contents, name, getattr(contents, name) * 600)
    text = render(contents, [], "many")
    assert 7_500_000 < len(text) < LIMIT and b'"total": 1200' in text


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(scans="none.h5"), "none.h5: no such file"),
        (dict(net="none.pt"), "none.pt: no such file"),
        (dict(net=HOSTILE), "not a checkpoint"),
        (dict(volumes="99"), "no volume 99, there are 12"),
        (dict(volumes="x"), "'x' is not a list of numbers and ranges"),
        (dict(out="net.pt"), "is read from and cannot be written to"),
        (dict(out="nowhere/page.html"), "page.html: No such file or directory"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(made, change, words):
    call_with = dict(scans=HOSTILE, net="net.pt", volumes="8", out="new.html") | change
    before = {name: (made / name).read_bytes() for name in os.listdir(made)}
    scans, net, out = (made / call_with[name] for name in ("scans", "net", "out"))
    result = call("report", scans, net, "-o", out, "--volumes", call_with["volumes"])
    assert result.exit_code == 2 and words in result.stderr and result.stderr.count("\n") == 1, result.output
    assert before == {name: (made / name).read_bytes() for name in os.listdir(made)}


def test_ranges():
    assert _ranges([0, 1, 2, 7, 9, 10]) == "0-2,7,9-10"
