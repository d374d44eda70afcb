"""README.md has every row, names tests that exist, and says which rows wait for what; each test here is in it."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent
LINES = re.findall(r"^\| (\d+) \| .* \| (.*) \|$", (FOLDER / "README.md").read_text(encoding="utf-8"), re.M)


def named():
    """(row, file, test) of all rows."""
    return [(int(row), *name) for row, cell in LINES for name in re.findall(r"`([\w./]+\.(?:py|c))::(\w+)`", cell)]


def defined(file):
    """Names of the tests of a file, and their docstrings' first lines; those in C have none."""
    text = (FOLDER / file).read_text(encoding="utf-8")
    if file.endswith(".c"):
        return dict.fromkeys(re.findall(r"^START_TEST\((\w+)\)", text, re.M))
    return dict(re.findall(r'^def (test_\w+)\(.*?\):\n(?:    """(.*?)$)?', text, re.M))


def test_every_row_is_answered():
    assert [int(row) for row, _ in LINES] == list(range(1, 52))
    for row, cell in LINES:
        assert "::" in cell or "with the CUDA kernels of attention, because" in cell or "later, because" in cell, row


def test_every_named_test_exists_and_names_its_row():
    for row, file, test in named():
        tests = defined(file)
        assert test in tests, f"row {row}: {file} has no {test}"
        if not file.startswith(".."):
            assert re.match(r"Rows? [\d, and-]+:", tests[test]), f"{file}::{test}"


def test_every_test_is_named():
    mentioned = {(file, test) for _, file, test in named()}
    for path in FOLDER.glob("test_*.py"):
        if path.name != "test_table.py":
            rows_of = {test for test, text in defined(path.name).items() if text.startswith("Row")}
            assert rows_of, path.name
            for test in rows_of:
                assert (path.name, test) in mentioned, f"{path.name}::{test}"
