"""Rows 46, 48 and 49: peak memory, and time that grows with the work alone. How fast they are `muvox bench` says."""

import json
import time

import pytest
import torch

import muvox
from cases.calls import ragged
from op_calls import in_fresh_process

ROWS = 14_000  # one set; its pairs would take 800 MB
SPARE = 64e6

# One fresh process for all. Writing 5 to clear_refs sets the high-water mark VmHWM back to what is resident.
PROGRAM = """
import json, torch, muvox
torch.set_num_threads(1)

def status(field):
    for line in open("/proc/self/status"):
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024

layers = [torch.randn(shape) * 0.1 for shape in [(2, 8), (2,), (2, 8), (2,), (8, 8), (8,), (8, 8), (8,)]]
calls = {
    "knn": lambda x, f: muvox.knn(x, 8)[1],
    "knn of queries": lambda x, f: muvox.knn(x, 8, queries=f[:, :4])[1],
    "gravnet": lambda x, f: muvox.gravnet(x, f, 8),
    "aggregate": lambda x, f: muvox.aggregate(f, near[: len(x)], x.repeat(1, 2)),
    "neighbour_attention": lambda x, f: muvox.neighbour_attention(x, f, 8, layers),
    "neighbour_attention, offset": lambda x, f: muvox.neighbour_attention(x, f, 8, layers, offset=True),
    "attention": lambda x, f: muvox.attention(x, x, f),
    "offset_attention": lambda x, f: muvox.offset_attention(x, x, f),
    "plain attention": lambda x, f: (x @ x.T).softmax(-1) @ f,
}
near = torch.randint(0, 64, (ROWS, 8), dtype=torch.int32)
x, f = torch.randn(ROWS, 4, requires_grad=True), torch.randn(ROWS, 8, requires_grad=True)
found = {}
for name, call in calls.items():
    for n in (64, ROWS if name != "plain attention" else ROWS // 2):
        before = status("VmRSS")
        open("/proc/self/clear_refs", "w").write("5")
        out = call(x[:n], f[:n])
        torch.autograd.grad(out, [x, f], torch.ones_like(out), allow_unused=True)
        del out
    found[name] = status("VmHWM") - before
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def peaks():
    return json.loads(in_fresh_process(PROGRAM.replace("ROWS", str(ROWS)), timeout=300))


NAMES = "knn", "knn of queries", "gravnet", "aggregate", "neighbour_attention", "attention", "offset_attention"


@pytest.mark.parametrize("name", [*NAMES, "neighbour_attention, offset"])
def test_no_pair_tensor(name, peaks):
    """Row 46: forward and backward of one large set need what is proportional to N · (k + F): 100 numbers a row."""
    assert peaks[name] < ROWS * 100 * 4 + SPARE


def test_the_measure_sees_a_pair_tensor(peaks):
    """Row 46: plain attention over half as many rows is above that."""
    assert peaks["plain attention"] > 2 * (ROWS * 100 * 4 + SPARE)


def seconds(function, repeats=5):
    """Processor time of this process, the least of some runs: what else the machine does hardly matters."""
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        function()
        times.append(time.process_time() - begin)
    return min(times)


def training(function, *shapes):
    inputs = [torch.randn(shape).requires_grad_() for shape in shapes]

    def step():
        out = function(*inputs)
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    return step


OPERATORS = {
    "attention": lambda x, f, **how: muvox.attention(x, x, f, **how),
    "offset_attention": lambda x, f, **how: muvox.offset_attention(x, x, f, **how),
    "gravnet": lambda x, f, **how: muvox.gravnet(x, f, 8, **how),
}
each_operator = pytest.mark.parametrize("name", OPERATORS)


@each_operator
def test_time_is_linear_in_the_voxels(name):
    """Row 48: 512 and 8192 voxels of 34 muons; forward and backward. What is quadratic would take 16 times as long."""
    M = 34
    few, many = (seconds(training(OPERATORS[name], (V, M, 8), (V, M, 16)), 3) for V in (512, 8192))
    assert many / few < 16 * 2.5


@each_operator
def test_a_long_set_does_not_slow_the_short_ones(name):
    """Row 49: one set of 3000 muons and 1000 of 50; padded to the longest this would be 10⁹ pairs in place of 10⁷. The
    time is that of the parts, with some room for a busy machine."""
    long, short = 3000, [50] * 1000
    N = sum(short)

    def step(*lengths):
        rows, splits = sum(lengths), ragged(*lengths)
        return training(lambda x, f: OPERATORS[name](x, f, splits=splits), (rows, 8), (rows, 16))

    half = len(short) // 2
    together = seconds(step(*short[:half], long, *short[half:]))
    assert N == 50_000 and together < 1.5 * (seconds(step(long)) + seconds(step(*short)))
