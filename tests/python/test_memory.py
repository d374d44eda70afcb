"""Peak memory of the operators, each in a fresh process: inputs, outputs, saved tensors and gradients, and 64 MB more.

The pair tensor of these sizes would take 1.6 GB.
"""

import json

import pytest
from op_calls import in_fresh_process

SETS, ROWS = 100, 2000
SPARE = 64e6

# A tiny run first, so that the baseline holds everything loaded and started; VmHWM is the largest VmRSS ever was.
FRAME = """
import json, time, torch, muvox
torch.set_num_threads(2)

def status(field):
    for line in open("/proc/self/status"):
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024

def run(sets, rows):
    {make}
    begin = time.perf_counter()
    {forward}
    forward = time.perf_counter()
    {backward}
    return forward - begin, time.perf_counter() - forward

run(2, 8)
baseline = status("VmRSS")
forward, backward = run({sets}, {rows})
print(json.dumps(dict(growth=status("VmHWM") - baseline, forward=forward, backward=backward)))
"""

ATTENTION = dict(
    make="q, k, v = (torch.randn(sets, rows, width, requires_grad=True) for width in (12, 12, 48))",
    forward="out = muvox.attention(q, k, v)",
    backward="torch.autograd.grad(out, (q, k, v), torch.ones_like(out))",
)

GRAVNET = dict(
    make="coords, feats = (torch.randn(sets, rows, width, requires_grad=True) for width in (4, 22))",
    forward="out = muvox.gravnet(coords, feats, {k})",
    backward="torch.autograd.grad(out, (coords, feats), torch.ones_like(out))",
)


def fresh_process(parts: dict[str, str], sets: int, rows: int) -> dict[str, float]:
    return json.loads(in_fresh_process(FRAME.format(**parts, sets=sets, rows=rows), timeout=300))


def attention_bytes(N: int, A: int, C: int) -> dict[str, int]:
    """Saved beside inputs and output: lse, which is an output too. Gradients: the one that enters, and three."""
    inputs, out = 4 * N * (2 * A + C), 4 * N * C
    return {"inputs": inputs, "output": out + 4 * N, "saved": 0, "gradients": out + inputs}


def gravnet_bytes(N: int, d: int, F: int, k: int) -> dict[str, int]:
    """mean and max. Saved beside the inputs: neighbours, and a winner of one byte for each feature."""
    inputs, out = 4 * N * (d + F), 4 * N * 2 * F
    return {"inputs": inputs, "output": out, "saved": 4 * N * k + N * F, "gradients": out + inputs}


CASES = {
    "attention 12/48": (ATTENTION, attention_bytes(SETS * ROWS, 12, 48)),
    "gravnet k 8": (GRAVNET | {"forward": GRAVNET["forward"].format(k=8)}, gravnet_bytes(SETS * ROWS, 4, 22, 8)),
    "gravnet k 25": (GRAVNET | {"forward": GRAVNET["forward"].format(k=25)}, gravnet_bytes(SETS * ROWS, 4, 22, 25)),
}


@pytest.mark.parametrize("name", CASES)
def test_peak_memory(name, capsys):
    parts, needed = CASES[name]
    found = fresh_process(parts, SETS, ROWS)
    allowed = sum(needed.values()) + SPARE
    with capsys.disabled():
        figures = ", ".join(f"{part} {size / 1e6:.0f}" for part, size in needed.items())
        print(
            f"\n{name}, {SETS} × {ROWS}: {found['growth'] / 1e6:.0f} MB of {allowed / 1e6:.0f} ({figures}, spare 64); "
            f"forward {found['forward']:.2f} s, backward {found['backward']:.2f} s"
        )
    assert found["growth"] > needed["inputs"] + needed["output"], "the measure does not see the tensors"
    assert found["growth"] <= allowed


def test_the_measure_sees_a_pair_tensor():
    """The same frame on the plain composition: one set's pair tensor alone is above the limit of the operator."""
    parts = ATTENTION | {"forward": "out = (q @ k.mT / 12**0.5).softmax(-1) @ v"}
    found = fresh_process(parts, 20, 2000)
    assert found["growth"] > sum(attention_bytes(20 * 2000, 12, 48).values()) + SPARE


def test_knn_of_one_large_set_has_no_pair_tensor():
    """Row 46 of the reported cases: one set of 30,000 rows (3.6 GB of distances) takes the results and 64 MB."""
    parts = dict(make="coords = torch.randn(rows, 4)", forward="muvox.knn(coords, 8)", backward="")
    found = fresh_process(parts, 1, 30_000)
    assert found["growth"] <= 30_000 * 4 * (4 + 2 * 8) + SPARE
