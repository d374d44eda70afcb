"""`muvox bench`: the table on the CPU; which peer counts and what becomes of one that fails; the cases for a GPU,
tiny and with the CPU's clock."""

import json
import sys
import types

import pytest
import torch
from click.testing import CliRunner

import muvox
from muvox.bench import cases, command, measure, peers, tables
from muvox.bench.cases import Case, Setup, Target
from muvox.bench.measure import Calls, DeviceClock, HostClock, Measured
from muvox.bench.tables import Row
from muvox.cli import muvox as cli

CPU = torch.device("cpu")


def call(*arguments):
    return CliRunner().invoke(cli, ["bench", *map(str, arguments)])


def case(op="knn", target=Target(), dtype=torch.float32, calls=None):
    return Case(op, "2 × 9", "d 4, k 8", "forward", lambda setup: calls, target, dtype)


@pytest.fixture
def uncompiled(monkeypatch):
    """torch.compile takes minutes for all cases."""
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)


def row(target=Target(), dtype="float", ours=Measured(0.5, 12.4), **others):
    return Row(case(target=target), dtype, ours, others or {"slow": Measured(40.0, 3240), "quick": Measured(2.0, 1.25)})


@pytest.fixture
def tiny(monkeypatch):
    """Every table of sizes with a few rows in a set; the targets stay."""
    monkeypatch.setattr(cases, "CPU_SIZES", ((2, 9),))
    monkeypatch.setattr(cases, "CPU_LARGE", (1, 30))
    monkeypatch.setattr(cases, "KNN", tuple((2, 30, *rest) for _, _, *rest in cases.KNN))
    monkeypatch.setattr(cases, "GRAVNET", tuple((2, 30, *rest) for _, _, *rest in cases.GRAVNET))
    monkeypatch.setattr(cases, "ALONE_SIZE", (2, 30, *cases.ALONE_SIZE[2:]))
    monkeypatch.setattr(cases, "CLOUD_SIZES", ((2, 30),))
    monkeypatch.setattr(cases, "POOL", ((2, 9, 5),))
    monkeypatch.setattr(cases, "VOXELIZE", ((50, 4, (3, 2, 2), *cases.VOXELIZE[0][3:]),))
    monkeypatch.setattr(cases, "DEVOXELIZE", ((50, 4, (3, 2, 2), *cases.DEVOXELIZE[0][3:]),))
    monkeypatch.setattr(cases, "RAGGED", (20, 1.3))
    real = cases.ragged_sizes
    monkeypatch.setattr(cases, "ragged_sizes", lambda S, largest: real(S, 40))


def test_the_command_on_the_cpu(tiny, tmp_path):
    """All operators end to end: the table, and the file with every peer."""
    result = call("--repeats", 2, "--threads", 1, "--json", tmp_path / "bench.json")
    assert result.exit_code == 0, result.output
    assert "muvox ms" in result.stdout and "MiB" not in result.stdout and "SDPA" in result.stdout
    content = json.loads((tmp_path / "bench.json").read_text())
    assert content["repeats"] == 2 and "1 threads" in content["where"] and muvox.__version__ in content["where"]
    rows = content["rows"]
    assert [(r["op"], r["size"]) for r in rows if r["op"] != "attention"] == [
        ("knn", "2 × 9"), ("knn", "1 × 30"), ("gravnet", "2 × 9"), ("pool", "2 × 9")]
    assert [r["options"] for r in rows if r["op"] == "attention"] == ["8/64", "8/64", "12/48", "12/48"]
    for r in rows:
        assert r["muvox"]["ms"] > 0 and r["dtype"] == "float"
        assert r["ratio"] == r["muvox"]["ms"] / r["peers"][r["fastest"]]["ms"]
    assert len(result.stderr.splitlines()) == len(rows)


def test_markdown_and_choices(tiny):
    result = call("--repeats", 1, "--markdown", "--op", "knn", "--no-large", "--dtype", "double")
    assert result.exit_code == 0, result.output
    title, blank, head, rule, line, *_ = result.stdout.splitlines()
    assert title.startswith("Median of 1; ") and f"torch {torch.__version__}" in title and blank == ""
    assert head == "| op | sets × rows | options | dtype | direction | muvox ms | fastest peer | peer ms | ratio |"
    assert rule.startswith("| --- | --- | --- | --- | --- | ---: | --- | ---: | ---:")
    assert line.startswith("| knn | 2 × 9 | d 4, k 8 | double | forward | ") and "| cdist + topk |" in line
    assert result.stdout.count("\n| knn") == 1


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--device", "cuda"], "CUDA devices that torch finds here: none"),
        (["--device", "meta"], "the operators run on the CPU and on CUDA"),
        (["--device", "abacus"], "'abacus' is not a device"),
        (["--op", "voxelize"], "voxelize on cpu: there is nothing to measure"),
    ],
)
def test_what_cannot_be_measured_is_told_in_one_line(arguments, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = call(*arguments)
    assert result.exit_code == 2 and result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("muvox: ") and words in lines[0]


def test_a_library_without_cuda_is_told_in_one_line(monkeypatch):
    def knn(coords, k):
        raise NotImplementedError("Could not run 'muvox::knn'")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: device)
    monkeypatch.setattr(muvox, "knn", knn)
    result = call("--device", "cuda")
    assert result.exit_code == 2 and "muvox was built without CUDA operators" in result.stderr
    assert "CUDA devices that torch finds here: 1" in call("--device", "cuda:1").stderr


@pytest.mark.parametrize("text, version", [
    ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023", "535.54.03"),
    ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
    ("", "unknown"),
])
def test_machine_and_versions_of_a_gpu(text, version, monkeypatch):
    monkeypatch.setattr(command.Path, "read_text", lambda path: text)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H9000")
    assert command.where(torch.device("cuda")).startswith(
        f"H9000, driver {version}, CUDA {torch.version.cuda}, torch {torch.__version__}, muvox {muvox.__version__}, 20")


def test_the_fastest_peer_makes_the_ratio():
    got = row()
    assert got.fastest == "quick" and got.ratio == 0.25
    got = row(slow=Measured(40.0), quick=Measured(problem="out of memory"))
    assert got.fastest == "slow" and got.ratio == 0.0125
    got = row(slow=Measured(problem="out of memory"))
    assert got.fastest is None and got.ratio is None
    assert "slow: out of memory" in got.cells()


def test_targets_hold_for_their_dtype_and_carry_over_by_the_ratio_to_a_peer():
    target = Target(0.4, 40, published={"slow": 20.0, "quick": 1.6})
    assert row(target).targets == (0.4, 0.25, 40)
    assert row(target, slow=Measured(40.0)).targets == (0.4, 0.02, 40)
    assert row(target, new=Measured(40.0)).targets == (0.4, None, 40)
    assert row(target, dtype="half").targets == (None, None, None)
    assert row(Target(0.4, published={"": 4.0})).targets == (0.4, 0.1, None)
    assert row(Target(ratio=1.3), dtype="half").targets == (None, 1.3, None)


def test_table_and_record_of_a_row():
    got = row(Target(0.4, 40, published={"quick": 1.6}))
    assert dict(zip((*tables.WORDS, *tables.FIGURES), got.cells(), strict=True)) == {
        "op": "knn", "sets × rows": "2 × 9", "options": "d 4, k 8", "dtype": "float", "direction": "forward",
        "muvox ms": "0.500", "fastest peer": "quick", "peer ms": "2.00", "ratio": "0.250", "target ms": "0.4",
        "target ratio": "0.250", "muvox MiB": "12", "peer MiB": "1.2", "target MiB": "40"}
    record = json.loads(json.dumps(got.record()))
    assert record["peers"]["slow"] == {"ms": 40.0, "mib": 3240, "problem": None}
    assert record["target"] == {"ms": 0.4, "ratio": 0.25, "mib": 40}
    assert tables.markdown([got], "where").splitlines()[-1] == (
        "| knn | 2 × 9 | d 4, k 8 | float | forward | 0.500 | quick | 2.00 | 0.250 | 0.4 | 0.250 | 12 | 1.2 | 40 |")
    assert "target MiB" not in tables.markdown([row()], "where"), "a column that no row fills"
    assert len(tables.terminal([got, row()], "where").rows) == 2


def test_figures():
    assert [tables.three_figures(x) for x in (None, 0.0123, 0.5, 1.234, 9.99, 9.996, 12.34, 123.4, -0.01)] == [
        "", "0.012", "0.500", "1.23", "9.99", "10.0", "12.3", "123", "-0.010"]
    assert tables.memory(1234.5) == "1,234" and tables.memory(0.25) == "0.2" and tables.plain(2.50) == "2.5"


def test_a_peer_out_of_memory_or_refusing_does_not_end_the_run():
    done = {"late": 0}

    def memory():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 37.25 GiB")

    def refuse():
        raise NotImplementedError("cdist: not for half\nlong explanation")

    def late():
        done["late"] += 1
        if done["late"] > 3:
            memory()

    calls = Calls(lambda: None, {"big": memory, "picky": refuse, "late": late, "fine": lambda: None})
    ours, others = measure.measure(calls, HostClock(), 4)
    assert ours.ms >= 0 and others["fine"].ms >= 0
    assert others["big"].problem == others["late"].problem == "out of memory" and done["late"] == 4
    assert others["picky"].problem == "NotImplementedError: cdist: not for half"
    got = Row(case(), "float", ours, others)
    assert got.fastest == "fine"
    assert tables.failures([got, got])[0] == (
        "big: out of memory (knn 2 × 9, d 4, k 8, forward; knn 2 × 9, d 4, k 8, forward)")


def test_an_error_of_muvox_ends_the_run():
    def broken():
        raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        measure.measure(Calls(broken, {"fine": lambda: None}), HostClock(), 1)


class Script:
    """A clock that reads its times from a list for each call."""

    def __init__(self, times):
        self.times, self.order = times, []

    def timer(self, call):
        left = list(self.times[call])

        def timed():
            self.order.append(call)
            return left.pop(0)

        return timed

    def peak(self, call):
        return 10 * self.times[call][0]

    def clear(self):
        pass


def test_turns_medians_peaks_and_what_is_taken_off():
    clock = Script({"ours": [9, 2, 3], "search": [1, 1, 7], "peer": [5, 4, 6]})
    ours, others = measure.measure(Calls("ours", {"name": "peer"}, minus="search"), clock, 3)
    assert clock.order == ["ours", "search", "peer"] * 3
    assert ours == Measured(3 - 1, 90) and others == {"name": Measured(5, 50)}


def test_the_clock_of_a_gpu(monkeypatch):
    """The stream is held, then first event, call, last event, and only then the host waits. Peak memory is above what
    was there."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, other):
            return 0.25

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("hold" if cycles > 0 else "no hold"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: log.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 5 * 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 12 * 2**20)
    clock = DeviceClock()
    timed = clock.timer(lambda: log.append("call"))
    assert log == ["call", "call", "wait", "call", "wait"]
    log.clear()
    assert timed() == 0.25 and log == ["hold", "event", "call", "event", "wait"]
    log.clear()
    assert clock.peak(lambda: log.append("call")) == 7 and log == ["wait", "reset", "call", "wait"]


def test_every_case_of_a_gpu_runs_and_has_its_target(tiny, uncompiled):
    """The same code as on the device, with the CPU's clock."""
    found, told = cases.cuda_cases(), []
    rows = command.run(found, CPU, HostClock(), 1, compile=True, tell=lambda rows: told.append(len(rows)))
    assert told == list(range(1, len(found) + 1))
    for r in rows:
        assert r.fastest and not any(p.problem for p in r.peers.values()), (r.case, r.peers)
    count = lambda **match: sum(all(getattr(c, k) == v for k, v in match.items()) for c in found)  # noqa: E731
    assert count(op="knn", direction="f+b") == 11 and count(op="knn", direction="forward") == 11 + 3 + 1
    assert count(op="gravnet", direction="f+b") == 6 + 1 and count(op="gravnet", direction="forward") == 6
    assert [r.muvox.ms is not None for r in rows if r.case.direction == cases.ALONE] == [True]
    assert sum(c.target.ms is not None for c in found) == 11 + 6 + 1 + 2
    assert sorted(c.target.ratio for c in found if c.target.ratio) == [1.0, 1.3, 1.3, 1.3, 1.5]
    assert {r.dtype for r in rows if "voxelize" in r.case.op} == {"half"}
    assert [r.targets for r in rows if r.case.op == "devoxelize"][1] == (1.0, pytest.approx(1.0 / 5.46), 160)
    by_cdist = next(r for r in rows if r.case.target.ms == 0.35 and r.case.op == "knn")
    assert by_cdist.targets[1] == pytest.approx(0.35 / 20.0)


def test_sizes_of_the_targets():
    sizes = {(c.op, c.size, c.options) for c in cases.cuda_cases()}
    for expected in [("knn", "600 × 250", "d 4, k 8"), ("knn", "1 × 100,000", "d 8, k 16"),
                     ("gravnet", "600 × 2000", "k 25, F 22"),
                     ("gravnet", "600 × 1000", "k 25, F 22, aggregation alone"),
                     ("voxelize", "400,000 → 50,000", "C 64"), ("devoxelize", "400,000 ← 50,000", "C 64, 8 corners"),
                     ("knn", "1 × 100,000", "d 4, k 8, all equal"), ("knn", "600 of 0–4000", "d 4, k 8, ragged")]:
        assert expected in sizes


def test_the_same_numbers_are_drawn_whatever_else_is_run():
    def coords(case):
        return case.build(Setup(CPU, torch.float32, False)).ours.args[0]

    first = coords(cases.knn(2, 5, 3, 2))
    torch.rand(1)
    assert torch.equal(coords(cases.knn(2, 5, 3, 2)), first) and first.unique().numel() == 30


def test_ragged_sets_and_the_uniform_ones_have_as_many_pairs():
    sizes = cases.ragged_sizes(600)
    assert torch.equal(sizes, cases.ragged_sizes(600))
    assert (sizes == 0).sum() == 30 and sizes.max() == 4000 and 1 <= sizes[sizes > 0].min()
    calls = cases.ragged("knn", 600, 1.3).build(Setup(CPU, torch.float32))
    (uniform,) = (peer.args[0] for peer in calls.peers.values())
    S, M, _ = uniform.shape
    splits = calls.ours.keywords["splits"]
    assert torch.equal(splits.diff(), sizes) and S * M**2 == pytest.approx(int((sizes**2).sum()), rel=0.01)


def test_clouds():
    coords = {name: cases.cloud(3, 1000, name, ratio).build(Setup(CPU, torch.float32)).ours.args[0]
              for name, ratio in cases.CLOUDS}
    far = (coords["1 % at 1e3 σ"].norm(dim=-1) > 30).float().mean()
    assert 0.005 < far < 0.02
    assert 0.45 < (coords["half at 0"] == 0).all(-1).float().mean() < 0.55
    assert (coords["all equal"] == 1).all()


def test_compositions_compute_what_muvox_computes():
    """A peer that does less would make the ratio worthless."""
    x, f = torch.randn(3, 20, 4), torch.randn(3, 20, 5)
    right = muvox.gravnet(x, f, 6)
    torch.testing.assert_close(peers.gravnet_by_cdist(x, f, 6), right, rtol=1e-4, atol=1e-5)
    rows = (muvox.knn(x, 6)[0] + 20 * torch.arange(3)[:, None, None]).view(-1, 6)
    torch.testing.assert_close(peers.gravnet_by_rows(x, f, rows), right.flatten(0, 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(peers.pool_by_reductions(f), muvox.pool(f))
    index = torch.randint(7, (40,))
    feats, counts = torch.randn(40, 3), torch.bincount(index, minlength=7).clamp(min=1)
    for peer in (peers.voxelize_by_index_add, peers.voxelize_by_scatter):
        torch.testing.assert_close(peer(feats, index, counts), muvox.voxelize(feats, index, counts))
    corners, weights = torch.randint(40, (11, 8)), torch.rand(11, 8)
    for peer in (peers.devoxelize_by_gather, peers.devoxelize_by_embedding_bag):
        torch.testing.assert_close(peer(feats, corners, weights), muvox.devoxelize(feats, corners, weights))


@pytest.fixture
def libraries(monkeypatch):
    """Stand-ins with the interfaces of the libraries, which compute by cdist and say what they were called with."""
    called = []

    def nearest(rows, k):
        distance, index = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").topk(k, largest=False)
        return distance**2, index

    def knn_points(p1, p2, K):
        called.append("PyTorch3D")
        assert p1 is p2
        return types.SimpleNamespace(**dict(zip(("dists", "idx"), nearest(p1, K))))

    def over(rows, k, splits):
        found = [nearest(rows[a:b], k) for a, b in zip(splits[:-1], splits[1:])]
        return torch.cat([d for d, _ in found]), torch.cat([i + a for (_, i), a in zip(found, splits)])

    def pyg_knn(x, y, k, ptr_x, ptr_y):
        called.append("pyg-lib")
        assert x is y and torch.equal(ptr_x, ptr_y)
        index = over(x, k, ptr_x.tolist())[1]
        return torch.stack([torch.arange(len(x)).repeat_interleave(k), index.flatten()])

    def cluster_knn(x, y, k, batch_x, batch_y, batch_size):
        called.append("torch_cluster")
        splits = [0, *torch.bincount(batch_x, minlength=batch_size).cumsum(0).tolist()]
        return torch.stack([torch.arange(len(x)).repeat_interleave(k), over(x, k, splits)[1].flatten()])

    def binned_select_knn(K, coords, row_splits):
        called.append("FastGraphCompute")
        return over(coords, K, row_splits.tolist())[::-1]

    class LazyTensor:
        def __init__(self, x):
            self.x = x

        def __sub__(self, other):
            return LazyTensor(self.x - other.x)

        def __pow__(self, power):
            return LazyTensor(self.x**power)

        def sum(self, dim):
            return LazyTensor(self.x.sum(dim))

        def argKmin(self, k, dim):
            called.append("KeOps")
            return self.x.topk(k, dim, largest=False).indices

    def module(name, **content):
        made = types.ModuleType(name)
        made.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    module("pytorch3d", ops=module("pytorch3d.ops", knn_points=knn_points))
    module("pyg_lib", ops=types.SimpleNamespace(knn=pyg_knn))
    module("torch_cluster", knn=cluster_knn)
    module("fastgraphcompute", binned_select_knn=binned_select_knn)
    module("pykeops", torch=module("pykeops.torch", LazyTensor=LazyTensor))
    peers.importable.cache_clear()
    yield called
    peers.importable.cache_clear()


def test_other_libraries_are_asked_for_the_same_neighbours(libraries):
    assert peers.missing() == []
    x, sets = torch.randn(3, 20, 4), peers.Sets(3, 20, CPU)
    neighbours, distance2 = muvox.knn(x, 6)
    right = (neighbours + 20 * torch.arange(3)[:, None, None]).view(-1, 6)
    for name, search in peers.searches().items():
        got = search.call(x, 6, sets)
        assert torch.equal(search.rows(got, 6, sets), right.long()), name
        if search.distance2:
            torch.testing.assert_close(search.distance2(got).view_as(distance2), distance2, rtol=1e-4, atol=1e-6)
    assert libraries == list(peers.SEARCHES)


def test_other_libraries_stand_in_the_rows(libraries, uncompiled):
    found = [cases.knn(2, 9, 3, 4), cases.knn(2, 9, 3, 4, cases.BOTH), cases.gravnet(2, 9, 4, 5)]
    forward, both, gravnet = command.run(found, CPU, HostClock(), 1)
    assert set(peers.SEARCHES) < set(forward.peers)
    assert set(both.peers) == {peers.CDIST, "PyTorch3D", "FastGraphCompute"}, "only these give gradients"
    assert "PyTorch3D, gather, compiled" in gravnet.peers and len(gravnet.peers) == 2 * 6
    for r in (forward, both, gravnet):
        assert all(p.ms for p in r.peers.values()), r.peers


def test_a_library_that_does_not_load_is_missing(libraries, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyg_lib", None)
    peers.importable.cache_clear()
    assert peers.missing() == ["pyg-lib"] and "pyg-lib" not in peers.searches()
