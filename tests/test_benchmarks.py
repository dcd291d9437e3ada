"""The benchmark suite: only what computes the same function is timed; figures survive the way to a table and a plot."""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import re
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import xfused
from benchmarks import run, sweep, table
from benchmarks.__main__ import main
from benchmarks.check import MismatchError, check
from benchmarks.registry import Case, NotOfferedError, ops, provider_names
from benchmarks.rows import COLUMNS, Row, Writer, read
from benchmarks.timing import calls_per_event, device_times, graph_times, wall_times

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")


def case_of(op, dtype="float32", activation=None, p=0.1, M=48, N=64):
    return Case(op.name, M, N, dtype, activation or op.activations[-1], p)


@pytest.fixture(autouse=True)
def nothing_is_checked_yet(monkeypatch):
    monkeypatch.setattr(run, "_checked", set())


@pytest.fixture(autouse=True)
def reproducible():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


# ------------------------------------------------------------------------------------------------------- the check


@pytest.mark.parametrize("activation", xfused.activations())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_activation_is_the_same_function(activation, dtype):
    op = ops()["bias_act_dropout"]
    case = case_of(op, dtype, activation)
    for provider in ("xfused", "eager"):
        check(op, case, op.providers[provider], next(iter(op.probes(case, CPU)))[1])


def detached(x, bias):
    return F.dropout(F.gelu(x + bias.detach()) + 0 * bias, 0.1)


def wrong_gradient(x, bias):
    y = F.gelu(x + bias)
    return F.dropout(y.detach() + 1.01 * (y - y.detach()), 0.1)


@pytest.mark.parametrize(
    "other, what",
    [
        (lambda x, bias: F.dropout(F.gelu(x + bias), 0.2), "drops 0.[12]"),
        (lambda x, bias: F.dropout(F.gelu(x + bias), 0.3) * (0.7 / 0.9), "drops 0.3"),
        (lambda x, bias: F.gelu(x + bias), "drops 0.0"),
        (lambda x, bias: F.dropout(F.gelu(x + bias), 0.1) * 0.9, "value"),
        (lambda x, bias: F.dropout(F.gelu(x + 0 * bias), 0.1), "value"),
        (lambda x, bias: F.dropout(F.gelu(x + bias, approximate="tanh"), 0.1), "value"),
        (lambda x, bias: F.dropout(F.gelu(x + bias), 0.1)[:-1], "shape"),
        (lambda x, bias: F.dropout(F.gelu(x + bias), 0.1).double(), "float64"),
        (lambda x, bias: F.dropout(F.gelu(x + bias), 0.1) * float("nan"), "drops"),
        (wrong_gradient, "gradient of the first"),
        (detached, "gradient of the second"),
    ],
)
def test_another_function_is_refused(other, what):
    op = ops()["bias_act_dropout"]
    case = case_of(op, activation="gelu", M=256, N=256)
    inputs = next(iter(op.probes(case, CPU)))[1]
    with pytest.raises(MismatchError, match=what):
        check(op, case, lambda case, inputs: other, inputs)


def test_refused_missing_and_inapplicable_providers_are_reported_and_not_timed():
    def refuses(case, inputs):
        raise NotOfferedError("no gelu")

    op = ops()["bias_act_dropout"]
    wrong = {"wrong": lambda case, inputs: lambda x, bias: F.gelu(x + bias), "refuses": refuses}
    op = dataclasses.replace(op, providers={**op.providers, **wrong})
    lines = []
    names = run.usable(op, ["eager", "wrong", "refuses", "liger", "attorch"], lines.append)
    rows = run.measure(op, case_of(op), names, ["fwd"], "wall", 2, CPU, lines.append)
    assert [row.provider for row in rows] == ["copy", "eager"]
    assert [line for line in lines if line.startswith("REFUSED wrong")] and "refuses: has no gelu; skipped" in lines
    assert "liger: does not compute bias_act_dropout; skipped" in lines


# --------------------------------------------------------------------------------------------------- measurements


@pytest.mark.parametrize("op", ops().values(), ids=lambda op: op.name)
def test_every_entry_runs(op):
    providers = [name for name in provider_names() if op.builder(name) and run.installed(name) and name != "compile"]
    assert {"xfused", "eager"} <= set(providers)
    lines = []
    case = case_of(op, op.dtypes[0])
    rows = run.measure(op, case, providers, op.modes, "wall", 3, CPU, lines.append)
    assert lines == []
    assert {(r.provider, r.mode) for r in rows} == {
        ("copy", "copy"), *((name, mode) for name in (*providers, *op.bare) for mode in op.modes)
    }  # fmt: skip
    copy = rows[0]
    for row in rows:
        assert 0 < row.ms_20 <= row.ms_50 <= row.ms_80 and row.timing == "wall" and row.gpu == "cpu"
        assert row.over_copy == pytest.approx(row.ms_50 / copy.ms_50)
        assert row.gb_per_s == pytest.approx(row.bytes / row.ms_50 / 1e6)
        assert row.copy_share == pytest.approx(row.gb_per_s / copy.gb_per_s)


def test_torch_compile_runs():
    op = ops()["bias_act_dropout"]
    lines = []
    rows = run.measure(op, case_of(op), ["compile"], ["fwd", "bwd"], "wall", 2, CPU, lines.append)
    assert [row.mode for row in rows] == ["copy", "fwd", "bwd"] and lines == []


def test_bytes_are_the_floor():
    moved = ops()["bias_act_dropout"].moved
    x = 100 * 200 * 2
    assert moved(Case("", 100, 200, "bfloat16", "gelu", 0.1)) == {"fwd": 2 * x, "bwd": 3 * x, "fwd+bwd": 5 * x}
    identity = Case("", 100, 200, "bfloat16", "identity", 0.1)
    assert moved(identity) == {"fwd": 2 * x, "bwd": 2 * x, "fwd+bwd": 4 * x}


def test_calls_take_turns_and_buffers_rotate():
    order = []
    calls = {name: lambda index, name=name: order.append((name, index)) for name in "ab"}
    times = wall_times(calls, 3, 5, CPU, seconds=0)
    assert order[12:] == [("a", 0), ("b", 0)] * 5 and all(len(values) == 5 for values in times.values())
    order.clear()
    wall_times(calls, 3, 1, CPU, seconds=1)
    assert [index for name, index in order if name == "a"][6:12] == [0, 1, 2, 0, 1, 2]


class FakeCuda:
    """A device on which time passes by sleeping and by calls; `clock` in milliseconds."""

    clock = 0.0

    def install(self, monkeypatch):
        fake = self

        class Event:
            def __init__(self, enable_timing):
                pass

            def record(self):
                self.at = fake.clock

            def elapsed_time(self, end):
                return end.at - self.at

        class Stream:
            def wait_stream(self, other):
                pass

        class Graph:
            def replay(self):
                fake.clock += 7 * 20

        values = {"Event": Event, "Stream": Stream, "CUDAGraph": Graph, "synchronize": lambda *_: None}
        values |= {"current_stream": Stream, "stream": lambda _: contextlib.nullcontext()}
        values |= {"graph": lambda _: contextlib.nullcontext(), "_sleep": self.sleep}
        for name, value in values.items():
            monkeypatch.setattr(torch.cuda, name, value)
        return self

    def sleep(self, cycles):
        assert isinstance(cycles, int) and cycles > 0
        self.clock += 1000


def test_device_time_leaves_sleep_out_and_rotates_buffers_over_all_calls(monkeypatch):
    device, order, alive = FakeCuda().install(monkeypatch), [], set()

    class Result:
        def __init__(self):
            alive.add(id(self))

        def __del__(self):
            alive.discard(id(self))

    def call(name, ms, index):
        order.append((name, index))
        device.clock += ms
        return Result()

    calls = {name: functools.partial(call, name, ms) for name, ms in (("a", 2.0), ("b", 3.0))}
    times = device_times(calls, 5, 4, 2 * 50_000_000)  # four calls between two events
    assert times == {"a": [2.0] * 4, "b": [3.0] * 4}
    timed = order[2 * (6 + 4) :]
    assert [name for name, _ in timed] == (["a"] * 4 + ["b"] * 4) * 4
    assert all((later - index) % 5 == 1 for (_, index), (_, later) in itertools.pairwise(timed))
    assert not alive


def test_graph_time_is_divided_and_failures_are_reported(monkeypatch):
    FakeCuda().install(monkeypatch)
    lines = []

    def fails(index):
        raise RuntimeError("not permitted\nwhen capturing")

    assert graph_times({"a": lambda index: None, "b": fails}, 3, 2, lines.append) == {"a": [7.0, 7.0]}
    assert lines == ["b: cannot be captured in a CUDA graph: not permitted"]


@pytest.mark.gpu
def test_all_clocks_run_on_a_gpu(tmp_path):
    path = tmp_path / "gpu.csv"
    options = "--op bias_act_dropout fused_mlp --provider xfused eager --activation gelu --shape 256x512 --repeats 3"
    assert main(["run", *options.split(), "--timing", "device", "wall", "graph", "--csv", str(path)]) == 0
    rows = read([path])
    assert {row.timing for row in rows} == {"device", "wall", "graph"}
    assert {row.provider for row in rows} == {"copy", "xfused", "eager", "products"}
    assert all(row.peak_bytes > 0 for row in rows if row.provider in ("xfused", "eager"))


@pytest.mark.gpu
def test_sweep_runs_on_a_gpu(tmp_path, capsys):
    path = tmp_path / "sweep.csv"
    options = "--shape 256x512 --block-g 2 --block-n 128 256 --warps 1 2 --repeats 3 --jobs 2 --csv"
    for direction in sweep.DIRECTIONS:
        assert main(["sweep", "--direction", direction, *options.split(), str(path)]) == 0
        assert sweep.OWN in capsys.readouterr().out and len(path.read_text().splitlines()) > 2


def test_more_calls_between_events_for_small_tensors():
    assert calls_per_event(2 * 8192 * 16384 * 2) == 1 and calls_per_event(2048) == 20


def test_buffers_exceed_the_cache(monkeypatch):
    op = ops()["bias_act_dropout"]
    properties = types.SimpleNamespace(L2_cache_size=10_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    inputs = op.inputs(case_of(op), CPU)
    fake = dataclasses.replace(op, inputs=lambda case, device: inputs)
    sets = run.buffers(fake, case_of(op), types.SimpleNamespace(type="cuda"))
    assert sum(x.nbytes for x, _ in sets) >= 40_000 and len({x.data_ptr() for x, _ in sets}) == len(sets) > 2
    assert all(x.requires_grad and bias is inputs[1] for x, bias in sets)


# --------------------------------------------------------------------------------------------- CSV, tables, plots

ROW = Row(
    "bias_act_dropout", "xfused", "fwd", "bfloat16", 8192, 16384, 0.1, "gelu", 0.131, 0.1339, 0.1345, 536870912,
    4009.5, 0.970874, 1.03, 268435456, "device", "2.11.0", "3.6.0", "0.1.0", "Some GPU",
)  # fmt: skip


def some_rows():
    """Two activations, providers and shapes, three clocks; xfused takes 1.03 and 1.55 copies, eager four times that."""
    rows = []
    for timing in ("device", "wall", "graph"):
        for M, N in ((8192, 16384), (128, 512)):
            for activation in ("relu", "gelu"):
                base = dataclasses.replace(ROW, M=M, N=N, activation=activation, timing=timing)
                copy = {"provider": "copy", "mode": "copy", "ms_50": 0.13, "over_copy": 1.0, "copy_share": 1.0}
                rows.append(dataclasses.replace(base, **copy))
                for provider, factor in (("xfused", 1), ("eager", 4)):
                    for mode, ratio in (("fwd", 1.03), ("bwd", 1.55)):
                        ms = 0.13 * ratio * factor
                        values = {"ms_20": ms * 0.99, "ms_50": ms, "ms_80": ms * 1.02, "over_copy": ratio * factor}
                        rows.append(dataclasses.replace(base, provider=provider, mode=mode, **values))
    return rows


@pytest.fixture
def csv_file(tmp_path):
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        Writer(file).write(some_rows())
    return path


def test_csv_round_trip(csv_file):
    rows = read([csv_file])
    assert csv_file.read_text().splitlines()[0].split(",") == COLUMNS
    assert len(rows) == len(some_rows())
    for got, wanted in zip(rows, some_rows(), strict=True):
        for name, value in dataclasses.asdict(wanted).items():
            assert getattr(got, name) == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value)


def test_table(csv_file, capsys):
    assert main(["table", "--csv", str(csv_file), "--timing", "device", "--shape", "8192x16384"]) == 0
    text = capsys.readouterr().out
    assert "| | relu | gelu |\n|---|---|---|\n| **xfused** | 1.03 / 1.55 | 1.03 / 1.55 |\n| eager | 4.12 / 6.20" in text
    assert "8192x16384, bfloat16, p = 0.1, device time: fwd / bwd, copies of x. Some GPU" in text
    assert "within 2.0% of these medians" in text


def test_table_of_other_axes(csv_file, capsys):
    options = f"--csv {csv_file} --timing wall --activation gelu --mode fwd --rows shape --columns provider"
    assert main(["table", *options.split()]) == 0
    text = capsys.readouterr().out
    assert "| | xfused | eager |\n|---|---|---|\n| 8192x16384 | 133.9 | 535.6 |\n| 128x512 | 133.9 | 535.6 |" in text


def test_table_divides_by_bare_products(tmp_path, capsys):
    base = dataclasses.replace(ROW, op="fused_mlp", mode="fwd+bwd")
    path = tmp_path / "mlp.csv"
    with path.open("w", newline="") as file:
        Writer(file).write([base, dataclasses.replace(base, provider="products", ms_50=0.1)])
    assert main(["table", "--csv", str(path)]) == 0
    assert "| **xfused** | 1.339 |" in (text := capsys.readouterr().out) and "products |" not in text


def test_page_is_rewritten(csv_file, capsys):
    page = csv_file.parent / "PAGE.md"
    begin = "<!-- benchmarks: begin --csv rows.csv --timing device --shape 8192x16384 -->\n"
    page.write_text(f"before\n{begin}old\n<!-- benchmarks: end -->\nafter\n")
    assert main(["table", "--write", str(page)]) == 0
    text = page.read_text()
    assert text.startswith(f"before\n{begin}\n`bias_act_dropout`")
    assert text.endswith("\n<!-- benchmarks: end -->\nafter\n")
    assert "old" not in text and "1.03 / 1.55" in text
    assert table.rewritten(page) == text


def test_readme_agrees_with_the_committed_figures():
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    if not table.MARKERS.search(text):
        pytest.skip("the README has no part that is made from a CSV")
    assert text == table.rewritten(readme), "run: python -m benchmarks table --write README.md"


@pytest.mark.parametrize("options", ["", "--activation relu gelu", "--timing device", "--timing wall --mode fwd"])
def test_plot_writes_an_image(csv_file, options):
    png = csv_file.with_suffix(".png")
    assert main(["plot", "--csv", str(csv_file), "--png", str(png), *options.split()]) == 0
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and png.stat().st_size > 10_000


# ------------------------------------------------------------------------------------------------------- commands


def test_run_command(tmp_path, capsys):
    path = tmp_path / "run.csv"
    options = "--device cpu --provider xfused eager --activation swish --shape 16x32 --repeats 2 --p 0.25 --csv"
    assert main(["run", *options.split(), str(path)]) == 0
    assert "| **xfused** |" in capsys.readouterr().out
    rows = read([path])
    assert {(r.activation, r.p, r.shape) for r in rows} == {("silu", 0.25, "16x32")}
    assert {r.mode for r in rows} == {"copy", "fwd", "bwd", "fwd+bwd"}


def test_run_command_fails_when_a_provider_is_refused(monkeypatch, capsys):
    op = ops()["bias_act_dropout"]
    wrong = dataclasses.replace(op, providers={**op.providers, "xfused": lambda *_: lambda x, bias: x + bias})
    monkeypatch.setitem(ops(), op.name, wrong)
    options = ["--device=cpu", "--activation=gelu", "--shape=16x32", "--repeats=2", "--provider", "xfused", "eager"]
    assert main(["run", *options]) == 1
    printed = capsys.readouterr()
    assert "REFUSED xfused" in printed.err and "**xfused**" not in printed.out


def test_list_command(capsys):
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    assert all(op.name in text and op.unit in text for op in ops().values()) and "xformers" in text


@pytest.mark.parametrize(
    "options",
    [
        "run --op nonsense",
        "run --provider nonsense",
        "run --dtype float8",
        "run --activation nonsense",
        "run --shape 12",
        "run --shape 0x5",
        "run --p 1",
        "run --repeats 0",
        "run --device nowhere",
        "run --device cpu --timing device",
        "run --device cpu --graph",
        "run --device cpu --csv no/such/folder/file.csv",
        "table",
        "table --csv no/such/file.csv",
        "table --csv {bad}",
        "table --csv {text}",
        "table --csv {good} --activation mish",
        "table --write {bad}",
        "plot --csv {good}",
        "plot --csv {bad} --png {folder}/a.png",
        "plot --csv {good} --png no/such/folder/a.png",
        "sweep --device cpu",
        "sweep --direction sideways",
        "nonsense",
    ],
)
def test_wrong_use_exits_with_one_line(options, csv_file, capsys):
    bad, text = csv_file.with_name("bad.csv"), csv_file.with_name("text.csv")
    bad.write_text("provider,mode\nxfused,fwd\n")
    text.write_text(csv_file.read_text().replace("8192", "many"))
    words = options.format(good=csv_file, bad=bad, text=text, folder=csv_file.parent).split()
    try:
        status = main(words)
    except SystemExit as exit:
        status = exit.code
    printed = capsys.readouterr()
    assert status == 2 and printed.out == ""
    assert printed.err.count("\n") == 1 and re.match(r"python -m benchmarks.*: error: ", printed.err)


# ---------------------------------------------------------------------------------------------------------- sweep


def test_sweep_replaces_what_the_launcher_reads():
    """And puts it back, also after an error. A launcher that keeps its tile elsewhere makes this fail."""
    module = sweep.importlib.import_module(sweep.LAUNCHER)
    before = dict(vars(module))
    variant = sweep.Variant(4, 128, 2, 99, 98, 97)
    for direction in sweep.DIRECTIONS:
        with pytest.raises(KeyError), sweep.override(variant, direction, []):
            changed = {name for name in before if vars(module)[name] is not before[name]}
            assert changed == {"_known_forwards", "_known_backwards", sweep.CHOICES[direction], "STAGES"}
            tiles = vars(module)[sweep.CHOICES[direction]](512, 64, 2, 8, torch.device("cpu"))
            assert tiles == (4, 128, 2, 99, 97)
            raise KeyError
        assert vars(module) == before


def test_sweep_variants_hold_whole_vectors():
    sizes = {"block_g": [1, 2, 4, 8], "block_n": [64, 128, 256], "warps": [1, 2, 4]}
    options = argparse.Namespace(**sizes, steps=[0], stages=[0], registers=[0])
    found = sweep.variants(options, 2)
    assert sweep.Variant(2, 256, 2, 0, 0, 0) in found and sweep.Variant(4, 128, 2, 0, 0, 0) in found
    assert all(4 <= v.block_g * v.block_n / v.num_warps / 32 <= 16 for v in found)
