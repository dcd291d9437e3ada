"""The command: statuses, messages, reports, streams, the deep count."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from stats import cli, contract, deep, report, stream
from stats.assess import Work
from stats.judge import judge, rows_of
from stats.matrix import Line

ROOT = Path(__file__).parents[2]
FEW = ["--source", "reference", "--seeds", "2", "--tests", "T1,T5,T13", "--p", "0.1", "0.5", "--no-progress"]


def run(*arguments, **options):
    return subprocess.run([sys.executable, "-m", "stats", *arguments], cwd=ROOT, capture_output=True, **options)


def test_a_run_and_its_reports(tmp_path, capsys):
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "html", "png")}
    status = cli.main(["quick", *FEW, *(word for kind, path in files.items() for word in (f"--{kind}", str(path)))])
    printed = capsys.readouterr().out
    assert status == 0
    assert printed.splitlines()[-1].startswith("PASS: ")
    value = json.loads(files["json"].read_text())
    assert value["verdict"] == "pass"
    assert {row["p"] for row in value["table"] if row["test"] == "T5"} == {0.1, 0.5}
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    page = files["html"].read_text()
    assert page.count("data:image/png;base64,") >= 2
    assert "http" not in page


def test_a_failing_source_gives_status_1(tmp_path, monkeypatch):
    (tmp_path / "biased.py").write_text(
        "import numpy as np\n"
        "def mask(seed, offset, rows, columns, p):\n"
        "    return np.random.default_rng([seed, offset]).random((rows, columns)) >= p / 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["quick", "--source", "biased:mask", "--seeds", "1", "--tests", "T1", "--p", "0.5"]) == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["quick", "--p", "0"], "p must be"),
        (["quick", "--p", "1.5"], "p must be"),
        (["quick", "--seeds", "0"], "seeds must be"),
        (["quick", "--tests", "T77"], "tests must be"),
        (["quick", "--source", "nothing"], "source must be"),
        (["quick", "--source", "no.such.module:thing"], "cannot be imported"),
        (["quick", "--json", "/no/such/folder/x.json"], "cannot write"),
        (["quick", "--html", "."], "cannot write"),
        (["quick", "--device", "abacus"], "device must be"),
        (["quick", "--source", "torch", "--p", "0.1", "0.5"], "p must be 0.1"),
        (["controls", "--controls", "no such control"], "no control"),
        (["power", "--runs", "0"], "runs"),
        (["stream", "--order", "diagonal"], "order must be"),
        (["stream", "--format", "raw8"], "format"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(arguments, message, capsys):
    assert cli.main([*arguments, "--no-progress"]) == 2
    written = capsys.readouterr().err
    assert message in written
    assert len(written.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("arguments", [["deep"], ["quick", "--device", "cuda"], ["stream", "--device", "cuda"]])
def test_a_missing_gpu_is_one_line_and_status_2(arguments, capsys):
    assert cli.main(arguments) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["fast"], ["deep", "--draws", "2**x"], ["deep", "--draws", "0"]])
def test_arguments_that_do_not_parse(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "must be" in capsys.readouterr().err


def test_interruption_prints_what_is_done(monkeypatch, capsys):
    measure = Work.measure

    def stopped(self, repetitions=1):
        measure(self, repetitions)
        raise KeyboardInterrupt

    monkeypatch.setattr(Work, "measure", stopped)
    assert cli.main(["quick", *FEW]) == 130
    assert "interrupted" in capsys.readouterr().out


def test_controls_command(tmp_path, capsys):
    out = tmp_path / "matrix.png"
    status = cli.main(["controls", "--controls", "p rounded", "--seeds", "1", "--png", str(out), "--no-progress"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert printed.splitlines()[-1] == "PASS: 1 of 1 controls behave as they must"
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_missed_control_shows_in_the_picture():
    line = Line("x", 0.1, ("T1",), {"T1": 0.5}, (), ("T1",), False)
    assert not line.right
    assert report.png(report.matrix_picture([line])).startswith(b"\x89PNG")


def test_json_has_no_infinities(tmp_path):
    path = tmp_path / "x.json"
    report.write_json(str(path), {"a": [float("inf"), np.float64(2.5), np.int64(3)], "b": float("nan")})
    assert json.loads(path.read_text()) == {"a": [None, 2.5, 3], "b": None}


# ------------------------------------------------------------------------------------------------------ streams


def words_of(order, form, count, seed=5):
    pieces = stream.copied(order, form, seed, "cpu", 1 << 12)
    data = io.BytesIO()
    while data.tell() < count:
        data.write(next(pieces).tobytes())
    return data.getvalue()[:count]


def test_column_order_walks_down_columns():
    found = np.frombuffer(words_of("column", "raw32", 4 * 4 * (stream.WIDTH + 3)), np.uint32).reshape(-1, 4)
    assert np.array_equal(found[: stream.WIDTH], contract.block(5, 0, np.arange(stream.WIDTH), 0))
    assert np.array_equal(found[stream.WIDTH :], contract.block(5, 0, np.arange(3), 1))


def test_row_order_walks_along_rows():
    width = stream.WIDTH
    found = np.frombuffer(words_of("row", "raw32", 4 * 5 * width), np.uint32).reshape(5, width)
    draws = contract.draws(5, 0, np.arange(16), np.arange(width))
    assert np.array_equal(found, draws[1:11:2])
    half = np.frombuffer(words_of("row", "raw16", 2 * 9 * width), np.uint16).reshape(9, width)
    assert np.array_equal(half, (draws[:9] >> np.uint32(16)).astype(np.uint16))


def test_call_order_walks_through_offsets():
    calls = stream.CALL // 4
    found = np.frombuffer(words_of("call", "raw32", 16 * calls * 3), np.uint32).reshape(3, calls, 4)
    for offset in range(3):
        assert np.array_equal(found[offset], contract.block(5, offset, 0, np.arange(calls)))


def test_halves_down_a_column_are_the_leading_halves_of_its_draws():
    found = np.frombuffer(words_of("column", "raw16", 2 * 80), np.uint16)
    assert np.array_equal(found, (contract.draws(5, 0, np.arange(80), np.arange(1))[:, 0] >> np.uint32(16)))


def test_a_stream_of_a_given_length():
    done = run("stream", "--bytes", "100001", "--seed", "7")
    assert done.returncode == 0 and len(done.stdout) == 100001 and not done.stderr
    assert np.array_equal(np.frombuffer(done.stdout[:16], np.uint32), contract.block(7, 0, 0, 0))


def test_a_broken_pipe_is_quiet():
    with subprocess.Popen(
        [sys.executable, "-m", "stats", "stream"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert len(process.stdout.read(1000)) == 1000
        process.stdout.close()
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == b""


@pytest.mark.skipif(shutil.which("dieharder") is None, reason="needs dieharder")
@pytest.mark.parametrize("order", stream.ORDERS)
def test_dieharder_finds_nothing(order, tmp_path):
    """Two of its tests on a file of the stream: birthdays (0) and runs (15), which read less than the file holds."""
    path = tmp_path / "words"
    path.write_bytes(words_of(order, "raw32", 1 << 25))
    for test in ("0", "15"):
        done = subprocess.run(
            ["dieharder", "-g", "201", "-f", str(path), "-d", test, "-p", "20"], capture_output=True, text=True
        )
        assert done.returncode == 0
        assert "FAILED" not in done.stdout
        assert "PASSED" in done.stdout or "WEAK" in done.stdout


# --------------------------------------------------------------------------------------------------------- deep


def counts_of(seed, offset, groups, columns, p):
    dropped = ~contract.mask(seed, offset, 8 * groups, columns, p).reshape(groups, 8, columns)
    return np.concatenate([dropped.sum(0), (dropped[:, :-1] & dropped[:, 1:]).sum(0)])


def test_torch_counts_are_the_oracles():
    found = deep.count_torch(2**63 + 1, 2**40, 24, 128, 0.1, "cpu")
    assert np.array_equal(found, counts_of(2**63 + 1, 2**40, 24, 128, 0.1))


def test_kernels_under_the_interpreter_agree():
    code = (
        "import numpy as np; from stats import deep, stream\n"
        "args = (2**63 + 1, 2**40, 6, 128, 0.9, 'cpu')\n"
        "assert np.array_equal(deep.count_triton(*args), deep.count_torch(*args))\n"
        "for order in stream.ORDERS:\n"
        "    args = (2**63 + 5, 8192, 4096, order, 'cpu')\n"
        "    assert (stream.words_triton(*args) == stream.words_torch(*args)).all(), order\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_count_is_judged():
    found = deep.count(0.1, 1 << 20, "cpu")
    assert found.draws >= 1 << 20
    assert found.counts.shape[0] == deep.KINDS
    assert judge(rows_of(deep.records(found)), None).verdict == "pass"
    measured, error, exact = deep.correlation(found)
    assert abs(measured - exact) < 6 * error
    found.counts[3] += found.counts[3] // 5
    wrong = judge(rows_of(deep.records(found)), None)
    assert {"deep rate", "deep row mod 8"} <= set(wrong.failures)


def test_deep_command_on_a_cpu(capsys):
    status = cli.main(["deep", "--device", "cpu", "--draws", "2**18", "--only-count", "--no-progress"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "deep shared word" in printed
    assert "draws in" in printed
