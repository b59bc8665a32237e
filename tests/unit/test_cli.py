"""From argv and PET_* variables to options and launches, without starting anything."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys

import pytest

from phalanx.cli import formats
from phalanx.cli.main import main
from phalanx.cli.options import parse
from phalanx.cli.plan import plan
from phalanx.cli.run import exit_code_of_failure
from phalanx.cli.usage import UsageError
from phalanx.values.failures import Exited, Failure, Signaled
from phalanx.worker.numa import cpus_of_rank, node_of_ranks, parse_list


def options(*argv: str, **environment: str):
    parsed = parse(argv, environment)
    assert parsed is not None
    return parsed


def values(*argv: str, **environment: str) -> argparse.Namespace:
    return options(*argv, "script.py", **environment).values


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Plan a launch in a folder that has a script."""
    (tmp_path / "script.py").touch()
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("PET_", "TORCH_ELASTIC", "PYTHON_EXEC", "CUDA_VISIBLE")):
            monkeypatch.delenv(name)
    return lambda *argv: plan(options(*argv, "script.py"))[0]


# ── where the script begins ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("argv", "target", "arguments"),
    [
        (["a.py"], "a.py", []),
        (["a.py", "--nproc-per-node", "7", "-m", "--help"], "a.py", ["--nproc-per-node", "7", "-m", "--help"]),
        (["--nproc-per-node", "2", "a.py", "-x"], "a.py", ["-x"]),
        (["--nproc_per_node=2", "a.py"], "a.py", []),
        (["-r", "3", "-t3", "a.py", "b"], "a.py", ["b"]),
        (["-m", "pkg.mod", "-m", "x"], "pkg.mod", ["-m", "x"]),
        (["--standalone", "-m", "pkg"], "pkg", []),
        (["--", "-odd.py", "--", "y"], "-odd.py", ["--", "y"]),
        (["--nnode", "1", "a.py"], "a.py", []),
        (["a.py", "--", "--unknown"], "a.py", ["--", "--unknown"]),
        (["--no-python", "echo", "--help"], "echo", ["--help"]),
        (["--role", "--", "a.py"], "a.py", []),
    ],
)  # fmt: skip
def test_what_follows_the_script_is_its_own(argv, target, arguments):
    if argv[:2] == ["--role", "--"]:
        with pytest.raises(UsageError, match="role"):
            options(*argv)
        return
    parsed = options(*argv)
    assert (parsed.target, list(parsed.arguments)) == (target, arguments)


def every_option() -> list[tuple[str, str]]:
    """Torchrun's options that take a value, and a value for each."""
    return [
        ("nnodes", "1"), ("nproc-per-node", "3"), ("rdzv-backend", "c10d"),
        ("rdzv-endpoint", "localhost:0"), ("rdzv-id", "job"), ("rdzv-conf", "join_timeout=3,read_timeout=4"),
        ("max-restarts", "3"), ("monitor-interval", "0.5"), ("start-method", "spawn"),
        ("event-log-handler", "console"), ("role", "trainer"), ("log-dir", "logs"),
        ("redirects", "0:1,10:3"), ("tee", "3"), ("local-ranks-filter", "0,1"),
        ("duplicate-stdout-filters", "a,,b,c"), ("duplicate-stderr-filters", "d"), ("node-rank", "0"),
        ("master-addr", "localhost"), ("master-port", "29500"), ("local-addr", "127.0.0.1"),
        ("numa-binding", "core-complex"), ("signals-to-handle", "SIGTERM,SIGUSR1"),
        ("shutdown-timeout", "3"), ("log-line-prefix-template", "${rank}: "),
    ]  # fmt: skip


FLAGS = ["standalone", "module", "no-python", "run-path", "virtual-local-rank"]


@pytest.mark.parametrize(("name", "text"), every_option(), ids=lambda value: value)
def test_both_spellings_and_the_variable_mean_the_same(name, text):
    dest = name.replace("-", "_")
    expected = getattr(values(f"--{name}", text), dest)
    assert expected != getattr(values(), dest) or text in ("1", "0", "")
    assert getattr(values(f"--{dest}", text), dest) == expected
    assert getattr(values(f"--{name}={text}"), dest) == expected
    assert getattr(values(f"--{dest}={text}"), dest) == expected
    variable = {f"PET_{dest.upper()}": text}
    if name == "numa-binding":  # as in torchrun
        assert getattr(values(**variable), dest) is None
    else:
        assert getattr(values(**variable), dest) == expected


@pytest.mark.parametrize("name", FLAGS)
def test_flags_have_both_spellings_and_a_variable(name):
    dest = name.replace("-", "_")
    assert getattr(values(), dest) is False
    assert getattr(values(f"--{name}"), dest) is True
    assert getattr(values(f"--{dest}"), dest) is True
    for text, expected in (("1", True), ("0", False), ("true", True), ("", False)):
        assert getattr(values(**{f"PET_{dest.upper()}": text}), dest) is expected


def test_the_command_line_goes_before_the_variable():
    assert values("--max-restarts", "1", PET_MAX_RESTARTS="5").max_restarts == 1
    assert values(PET_MAX_RESTARTS="5").max_restarts == 5


def test_torchruns_options_are_all_there():
    from torch.distributed.run import get_args_parser

    for action in get_args_parser()._actions:
        for name in action.option_strings:
            argv = (
                [name]
                if action.nargs == 0
                else [name, dict(every_option()).get(name.strip("-").replace("_", "-"), "0")]
            )
            if name in ("-h", "--help"):
                assert parse(argv, {}) is None
            elif name in ("--print-completion", "--print_completion"):  # torch 2.14
                assert parse([name, "bash"], {}) is None
            else:
                options(*argv, "a.py")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--nproc-per-nod3", "2", "a.py"], "did you mean --nproc-per-node?"),
        (["--npernode", "2", "a.py"], "there is no option --npernode"),
        (["--max_restart5=2", "a.py"], "did you mean --max-restarts?"),
        (["-x", "a.py"], "there is no option -x"),
        (["--nproc-per-node"], "expected one argument"),
        (["--max-restarts", "-1", "a.py"], "--max-restarts"),
        (["--max-restarts", "many", "a.py"], "'many' is not a whole number"),
        (["--master-port", "70000", "a.py"], "1–65535"),
        (["--grace", "-3", "a.py"], "--grace"),
        (["--signals-to-handle", "SIGNOTHING", "a.py"], "'SIGNOTHING' is not the name of a signal"),
        (["--signals-to-handle", "SIGKILL", "a.py"], "can't be handled"),
        (["--rdzv-conf", "x", "a.py"], "key=value"),
        (["--restart", "all", "a.py"], "choose from"),
        (["-r", "0:7", "a.py"], "0:1,1:3"),
        ([], "which script?"),
        (["-m"], "which module?"),
        (["--no-python"], "which program?"),
    ],
    ids=" ".join,
)
def test_what_is_wrong_is_said(argv, text):
    with pytest.raises(UsageError) as caught:
        options(*argv)
    assert text in str(caught.value)


def test_a_wrong_variable_is_named():
    with pytest.raises(UsageError, match="the variable PET_MAX_RESTARTS='x'"):
        values(PET_MAX_RESTARTS="x")
    with pytest.raises(UsageError, match="the variable PET_START_METHOD='threads': must be one of"):
        values(PET_START_METHOD="threads")


# ── help ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("argv", [["--help"], ["run", "--help"], ["run", "-h"]])
@pytest.mark.parametrize("columns", ["20", "80", "400"])
def test_help_fits_into_80_columns(capsys, monkeypatch, argv, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "_per_" not in text, "one spelling is enough"
    assert "PLACEHOLDER" not in text


def test_help_is_grouped_and_complete(capsys):
    main(["run", "--help"])
    text = capsys.readouterr().out
    for name, _ in every_option():
        assert f"--{name}" in text
    for name in (*FLAGS, "preload", "restart", "grace", "json"):
        assert f"--{name}" in text
    titles = [line for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert len(titles) >= 6


def test_help_needs_no_torch_and_little_else():
    code = (
        "import sys; from phalanx.cli.main import main\n"
        "main(['run', '--help'])\n"
        "heavy = {'torch', 'numpy', 'msgspec', 'asyncio', 'cloudpickle', 'logging'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, env=env
    )


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        ([], 2, "usage: phalanx"),
        (["rum"], 2, "did you mean 'run'?"),
        (["train.py"], 2, "phalanx run train.py"),
        (["--nproc-per-node"], 2, "phalanx run --nproc-per-node"),
        (["fly"], 2, "there are: run"),
    ],
)
def test_commands(capsys, argv, code, text):
    assert main(argv) == code
    assert text in capsys.readouterr().err


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("phalanx 0.")


# ── what it means for a launch ───────────────────────────────────────────────────────────


def test_a_plain_launch(launch):
    spec = launch("--nproc-per-node", "3")
    assert (spec.world_size, spec.num_nodes, spec.master_port, spec.max_restarts) == (3, 1, 0, 0)
    assert (spec.start_method, spec.preload, spec.role) == ("forkserver", ("torch",), "default")
    assert (spec.grace_s, spec.log_dir, spec.elastic_run_id) == (30.0, None, None)
    assert spec.program.kind == "script"
    assert all(spec.outputs.of(rank, "out").console for rank in range(3))
    assert not any(spec.outputs.of(rank, "err").goes_to_file for rank in range(3))


def test_the_number_of_workers(launch, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    for text, number in (("5", 5), ("gpu", 3), ("auto", 3), ("cpu", len(os.sched_getaffinity(0)))):
        assert launch("--nproc-per-node", text).world_size == number
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert launch("--nproc-per-node", "auto").world_size == len(os.sched_getaffinity(0))
    for text in ("gpu", "0", "-1", "many", "xpu", "2.5"):
        with pytest.raises(UsageError, match="nproc-per-node"):
            launch(f"--nproc-per-node={text}")


@pytest.mark.parametrize(
    ("argv", "place", "run_id"),
    [
        ([], ("127.0.0.1", 0), None),
        (["--standalone", "--master-port", "1234", "--rdzv-id", "x"], ("127.0.0.1", 0), None),
        (["--master-port", "1234"], ("127.0.0.1", 1234), None),
        (["--master-addr", "localhost", "--master-port=7"], ("localhost", 7), None),
        (["--master-addr", "[::1]", "--master-port=7"], ("::1", 7), None),
        (["--local-addr", "127.0.0.2"], ("127.0.0.2", 0), None),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=j"], ("localhost", 0), "j"),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=localhost"], ("localhost", 29400), None),
        (["--rdzv-endpoint", "[::1]:99"], ("::1", 99), None),
    ],
)  # fmt: skip
def test_where_workers_meet(launch, argv, place, run_id):
    spec = launch(*argv)
    assert (spec.master_addr, spec.master_port) == place
    if "--rdzv-id=j" in argv:
        assert spec.elastic_run_id == run_id


def test_standalone_ignores_what_it_replaces(launch):
    launch("--standalone", "--rdzv-backend", "etcd", "--node-rank", "4")


def test_the_grace(launch, monkeypatch):
    assert launch("--grace", "1.5").grace_s == launch("--shutdown-timeout", "1.5").grace_s == 1.5
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    assert launch().grace_s == 7
    assert launch("--grace", "0").grace_s == 0
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon")
    with pytest.raises(UsageError, match="TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        launch()


def routes(spec) -> dict[str, list[tuple[bool, bool]]]:
    """By stream: for each rank, whether it goes to the console and to a file."""
    return {
        stream: [
            (spec.outputs.of(rank, stream).console, spec.outputs.of(rank, stream).goes_to_file)
            for rank in range(spec.world_size)
        ]
        for stream in ("out", "err")
    }


CONSOLE, FILE, BOTH = (True, False), (False, True), (True, True)


@pytest.mark.parametrize(
    ("argv", "out", "err"),
    [
        ([], [CONSOLE] * 2, [CONSOLE] * 2),
        (["--log-dir", "logs"], [BOTH] * 2, [BOTH] * 2),
        (["-r", "3"], [FILE] * 2, [FILE] * 2),
        (["-r", "1"], [FILE] * 2, [CONSOLE] * 2),
        (["-t", "2"], [CONSOLE] * 2, [BOTH] * 2),
        (["-r", "0:1,1:2"], [FILE, CONSOLE], [CONSOLE, FILE]),
        (["-t", "1:3"], [CONSOLE, BOTH], [CONSOLE, BOTH]),
        (["-r", "3", "-t", "0:1"], [BOTH, FILE], [FILE, FILE]),
        (["--local-ranks-filter", "1"], [FILE, CONSOLE], [FILE, CONSOLE]),
        (["--local-ranks-filter", "1", "-t", "3"], [FILE, BOTH], [FILE, BOTH]),
    ],
)
def test_where_output_goes(launch, argv, out, err):
    assert routes(launch("--nproc-per-node=2", *argv)) == {"out": out, "err": err}


def test_how_values_are_written():
    assert formats.streams("10:1,11:3") == {10: 1, 11: 3}
    assert formats.texts("a,,b,c,") == ("a,b", "c")
    assert formats.ranks(" 2, 0,2 ") == (0, 2)
    assert formats.ranks("") is None
    assert formats.signals("SIGTERM, sigusr1") == (signal.SIGTERM, signal.SIGUSR1)
    assert formats.pairs("a=b=c, d=") == {"a": "b=c", "d": ""}
    assert formats.names(" torch , numpy,") == ("torch", "numpy")


@pytest.mark.parametrize(
    ("exit_", "cause", "code"),
    [
        (Exited(7), "exit", 7),
        (Exited(1), "exception", 1),
        (Exited(0), "exception", 1),
        (None, "startup", 1),
        (Signaled(11, "SIGSEGV"), "signal", 139),
        (Signaled(9, "SIGKILL"), "signal", 137),
        (Signaled(9, "SIGKILL"), "exception", 1),
        (Signaled(2, "SIGINT"), "exception", 130),
    ],
)
def test_the_exit_code_of_a_failure(exit_, cause, code):
    failure = Failure(rank=0, cause=cause, message="", exit=exit_)
    assert exit_code_of_failure(failure) == code


# ── CPUs ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two sockets with two nodes each; four cores of two threads on a node, two to a cache."""
    monkeypatch.setattr("phalanx.worker.numa._SYSTEM", tmp_path)
    monkeypatch.setattr("phalanx.worker.numa._GPUS", tmp_path / "gpus")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(32)))
    for cpu in range(32):
        core = cpu % 16
        texts = {
            "topology/thread_siblings_list": f"{core},{core + 16}",
            "topology/physical_package_id": str(core // 8),
            "cache/index0/level": "1", "cache/index0/type": "Data",
            "cache/index0/shared_cpu_list": f"{core},{core + 16}",
            "cache/index1/level": "9", "cache/index1/type": "Instruction",
            "cache/index1/shared_cpu_list": "0-31",
            "cache/index3/level": "3", "cache/index3/type": "Unified",
            "cache/index3/shared_cpu_list": f"{core // 2 * 2}-{core // 2 * 2 + 1},{core // 2 * 2 + 16}-{core // 2 * 2 + 17}",
        }  # fmt: skip
        for name, text in texts.items():
            path = tmp_path / f"cpu/cpu{cpu}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
    for node in range(4):
        path = tmp_path / f"node/node{node}"
        path.mkdir(parents=True)
        (path / "cpulist").write_text(
            f"{node * 4}-{node * 4 + 3},{node * 4 + 16}-{node * 4 + 19}\n"
        )


def test_ranks_are_spread_over_the_nodes(machine):
    assert node_of_ranks(8, ()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert node_of_ranks(2, ()) == [0, 2]
    assert node_of_ranks(2, ("0", "1")) == [0, 2], "the kernel does not tell where GPUs are"


def test_each_binding(machine):
    nodes = node_of_ranks(8, ())
    assert cpus_of_rank("node", 2, nodes) == {*range(4, 8), *range(20, 24)}
    assert cpus_of_rank("socket", 2, nodes) == {*range(8), *range(16, 24)}
    assert cpus_of_rank("exclusive", 2, nodes) == {4, 5, 20, 21}
    assert cpus_of_rank("exclusive", 3, nodes) == {6, 7, 22, 23}
    assert cpus_of_rank("core-complex", 3, nodes) == {6, 7, 22, 23}
    many = node_of_ranks(12, ())
    shares = [cpus_of_rank("exclusive", rank, many) for rank in range(3)]
    assert shares == [{0, 1, 16, 17}, {2, 18}, {3, 19}]
    assert cpus_of_rank("exclusive", 20, node_of_ranks(64, ())) == {4, 20}, "more ranks than cores"


def test_the_kernels_lists():
    assert parse_list("0-2,7,9-10\n") == {0, 1, 2, 7, 9, 10}
    assert parse_list("\n") == set()


def test_a_hang_timeout_is_a_number_above_zero_and_has_no_variable(launch):
    assert launch().hang_timeout_s is None
    assert launch("--hang-timeout", "2.5").hang_timeout_s == 2.5
    assert values(PET_HANG_TIMEOUT="7").hang_timeout is None
    for wrong in ("0", "-1", "nan", "inf", "soon"):
        with pytest.raises(UsageError, match="hang-timeout: .* is not seconds, more than 0"):
            values(f"--hang-timeout={wrong}")
