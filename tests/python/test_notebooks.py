"""The notebooks run on a small setting, draw, and come without outputs."""

import base64
import io
from pathlib import Path

import matplotlib.image
import nbclient
import nbformat
import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
# What replaces the values of the cell tagged "parameters", and the pictures there are then.
SMALL = {
    "gradients": ('most, dtypes = 6, ["double", "float"]', 2),
    "operators": ("sets, rows, repeats, threads = 8, [16, 32, 64], 1, 1", 1),
    "voxelnet": ('scans, steps, volumes, threads = "../tests/data/tiny.h5", 3, 4, 1', 4),
}


def read(name: str):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def test_all_notebooks_are_run():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(SMALL)


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Runs a notebook with the small setting; the code's outputs, by kind."""
    folder = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
            patch.setenv(variable, str(folder / variable))
        patch.setenv("OMP_NUM_THREADS", "1")

        def run(name: str) -> tuple[list[np.ndarray], str]:
            notebook = read(name)
            place = next(i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", []))
            notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(SMALL[name][0]))
            where = {"metadata": {"path": str(FOLDER)}}
            nbclient.NotebookClient(notebook, timeout=120, resources=where).execute()
            outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
            pictures = [o["data"]["image/png"] for o in outputs if "image/png" in o.get("data", {})]
            text = "".join(o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in outputs)
            return [matplotlib.image.imread(io.BytesIO(base64.b64decode(p))) for p in pictures], text

        yield run


@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_notebook_is_stripped_runs_and_draws(executed, name):
    for cell in read(name).cells:
        assert cell.cell_type != "code" or (not cell.outputs and cell.execution_count is None)
    pictures, text = executed(name)
    assert len(pictures) == SMALL[name][1]
    for picture in pictures:
        colours = np.unique(picture[::3, ::3].reshape(-1, picture.shape[-1]), axis=0)
        assert min(picture.shape[:2]) > 200 and len(colours) > 20
    if name == "gradients":  # the right operator passes, the wrong one is found
        assert "ulps, the limit is 64" in text and float(text.split(" ulps")[0].split()[-1]) > 1000
        assert "largest error" not in text and "finite difference" not in text
    if name == "operators":
        differences = [float(line.split()[-1]) for line in text.splitlines() if "largest difference" in line]
        assert len(differences) == 3 and max(differences) < 1e-3
    if name == "voxelnet":
        assert "'PoCA': " in text and "'VoxelNet': " in text
