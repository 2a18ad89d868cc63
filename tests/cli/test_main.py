"""The command line without an operator: exit codes, usage errors, closed pipes, internal errors, imports."""

from __future__ import annotations

import json
import os
import shlex
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cortex import __version__
from cortex.cli.main import COMMANDS, command_parser, main
from cortex.home import Home
from cortex.installation import OperatorIdentity
from cortex.processes.identity import Identity
from harness.installations.command_line import CORTEX, cortex, environ, interrupted
from harness.installations.installation import ECHO_CONFIG, ECHO_SOURCE, write_project
from harness.installations.terminal import on_terminal
from harness.wait import wait_until

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("words", [["version"], ["--version"], ["-v"]])
def test_version(tmp_path: Path, words: list[str]) -> None:
    done = cortex(tmp_path, *words)

    assert (done.returncode, done.stdout, done.stderr) == (0, f"{__version__}\n", "")


def test_version_as_json(tmp_path: Path) -> None:
    assert json.loads(cortex(tmp_path, "version", "-o", "json").stdout) == {"version": __version__}


@pytest.mark.parametrize(("version", "key"), [("0.10", "metadata"), ("0.25", "predictor"), ("0.35.0", "handler")])
def test_schema_prints_the_json_schema_of_a_generation(tmp_path: Path, version: str, key: str) -> None:
    done = cortex(tmp_path, "schema", "--generation", version)

    assert done.returncode == 0
    assert f'"{key}"' in json.dumps(json.loads(done.stdout)["definitions"])


def test_init_writes_into_the_current_folder_and_overwrites_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "2 Big Models"
    folder.mkdir()

    first = cortex(tmp_path / "home", "init", "--framework", "onnx", cwd=folder)
    second = cortex(tmp_path / "home", "init", cwd=folder)

    assert (first.returncode, first.stderr) == (0, "")
    assert (folder / "cortex.yaml").read_text().startswith("- name: big-models\n")
    assert (folder / "model.onnx").is_file()
    assert first.stdout.endswith("  cortex deploy\n  cortex predict big-models sample.json\n")
    assert second.returncode == 2
    assert second.stderr.startswith("error: cortex.yaml: exists already; ")
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("words", [[], ["--help"], ["help"]])
def test_help_lists_every_command(tmp_path: Path, words: list[str]) -> None:
    done = cortex(tmp_path, *words)

    assert done.returncode == 0
    assert all(name in done.stdout for name in COMMANDS)


def test_help_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["help", "deploy"])

    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: cortex deploy")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command_parser(name).parse_args(["--help"])

    assert ended.value.code == 0
    assert f"usage: cortex {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["depoly"], "did you mean `cortex deploy`?"),
        (["ls"], "ls: no such command; did you mean `cortex get`?"),
        (["start"], "start: no such command; did you mean `cortex up`?"),
        (["dwon"], "did you mean `cortex down`?"),
        (
            ["stop"],
            "`cortex down` stops the installation; `cortex delete API` deletes an API, and `cortex delete API JOB`",
        ),
        (["stop", "iris"], "stop: no such command; `cortex delete API` deletes an API"),
        (["download", "iris"], "download: no such command; `cortex --help`"),
        (["select", "iris"], "select: no such command; `cortex --help`"),
        (["up", "--port", "80"], "--port: no such option; did you mean --gateway-port?"),
        (["rollback", "a", "--to", "1"], "--to: no such option\nusage:"),
        (["logs", "a", "-n", "5"], "-n: no such option; did you mean --tail?"),
        (
            ["predict", "a", '{"b": 1}'],
            "no such file or directory; to send this JSON, pipe it to the command and write `-`",
        ),
        (["submit", "a", '{"workers": 1}'], "; to send this JSON, pipe it to the command and write `-`"),
        (["init", "a", "--kind", "job"], "(choose from 'RealtimeAPI', 'AsyncAPI', 'BatchAPI', 'TaskAPI')"),
        (["xyzzy"], "`cortex --help` lists the commands"),
        (["--what"], "no such option"),
        (["deploy", "--forse"], "did you mean --force?"),
        (["get", "--jsn"], "--jsn: no such option; did you mean --output json?"),
        (["get", "--watsh=1"], "--watsh=1: no such option; did you mean --watch?"),
        (["get", "--xyzzy"], "--xyzzy: no such option\nusage:"),
        (["get", "a", "b", "c"], "c: no such argument"),
        (["get", "-o", "yaml"], "invalid choice: 'yaml'"),
        (["logs"], "the following arguments are required: API"),
        (["logs", "a", "--tail", "-5"], "argument --tail: must be a number from 0 to 1,000,000 (got -5)"),
        (["logs", "a", "--tail", "all"], "argument --tail: must be a number from 0 to 1,000,000 (got all)"),
        (["env"], "the following arguments are required: ACTION (list, configure, default, delete, rename)"),
        (["up", "--gateway-port", "70000"], "70000 is not a valid port"),
        (["up", "--connections-per-address", "0"], "must be 1 to 65535, or default (got 0)"),
        (["deploy", "nope.yaml"], "nope.yaml: does not exist"),
        (
            ["deploy"],
            "cortex.yaml: does not exist; give the path of a configuration file or of its folder; `cortex init",
        ),
        (["deploy", "inferense.yml"], "inferense.yml: does not exist; did you mean inference.yml?"),
        (["check", "handler.py"], "handler.py: is a Python file, not a configuration file; give the path of"),
        (["check", "."], "cortex.yaml: does not exist"),
        (["predict", "a", "nope.json"], "nope.json: can't be read"),
        (["init", "My API"], '; write "my-api"'),
        (["init", "b-x"], "must not begin with"),
        (["init", "a", "--framework", "torch"], "invalid choice: 'torch' (choose from 'python', 'sklearn', 'pytorch'"),
        (["schema", "--generation", "0.36"], "argument --generation: must be a version from 0.8 to 0.35 (got 0.36)"),
        (["completion", "tcsh"], "invalid choice: 'tcsh'"),
        (["env", "configure", "x", "--operator-endpoint", "nope", "--token", "t"], "is not a valid operator address"),
        (["env", "configure", "x"], "--operator-endpoint is required"),
    ],
)
def test_wrong_usage_and_bad_input_exit_with_2_and_a_reason(tmp_path: Path, words: list[str], message: str) -> None:
    for name in ("handler.py", "inference.yml"):
        (tmp_path / name).touch()

    done = cortex(tmp_path / "home", *words, cwd=tmp_path)

    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["get"], ["logs", "a"], ["refresh", "a"], ["delete", "a"], ["get", "-o", "json"]])
def test_commands_without_an_operator_exit_with_1_and_a_fix(tmp_path: Path, words: list[str]) -> None:
    done = cortex(tmp_path, *words)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: no operator runs on this machine; start it with `cortex up`\n"


def test_an_unknown_environment_exits_with_1(tmp_path: Path) -> None:
    done = cortex(tmp_path, "get", "-e", "nope")

    assert done.returncode == 1
    assert "no environment 'nope'" in done.stderr


def test_status_and_down_work_in_a_home_that_does_not_exist(tmp_path: Path) -> None:
    status = cortex(tmp_path / "home", "status", "-o", "json")
    down = cortex(tmp_path / "home", "down")

    assert json.loads(status.stdout) == {"operator": None, "gateway": None, "models": None, "replicas": []}
    assert (down.returncode, down.stdout) == (0, "nothing was running\n")
    assert "not running" in cortex(tmp_path / "home", "status").stdout
    assert not (tmp_path / "home").exists()


def test_status_shows_an_operator_that_is_too_busy_to_answer(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.prepare()
    home.token_file.write_text("t")
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        threading.Thread(target=lambda: [listener.accept()[0].close() for _ in range(2)], daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        OperatorIdentity(Identity.of(os.getpid()), url, url).write(home)

        shown, data = cortex(tmp_path, "status"), cortex(tmp_path, "status", "-o", "json")

    assert "operator   not answering" in shown.stdout
    assert f"its process (pid {os.getpid()}) runs, and may be busy" in shown.stderr
    assert json.loads(data.stdout)["operator"] == {"pid": os.getpid(), "url": url, "is_answering": False}


def test_an_unexpected_error_is_one_line_and_a_log_entry(tmp_path: Path) -> None:
    code = "from cortex.cli import commands, main; import cortex.cli.commands.version as version\n"
    code += "version.run = lambda *_: 1 / 0\nraise SystemExit(main.main())"

    done = subprocess.run(
        [sys.executable, "-c", code, "version"], env=environ(tmp_path), capture_output=True, text=True, timeout=60
    )

    log = tmp_path / "logs" / "cli.log"
    assert done.returncode == 1
    assert done.stderr == f"error: internal error: ZeroDivisionError: division by zero; {log} has the details\n"
    assert "Traceback" in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*CORTEX, "completion", "fish"], env=environ(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout and process.stderr
    process.stdout.close()

    with process:
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_closed_output_is_no_error(tmp_path: Path) -> None:
    command = f"exec {shlex.join(CORTEX)} version >&- 2>&-"

    assert subprocess.run(["sh", "-c", command], env=environ(tmp_path), timeout=60).returncode == 0


def test_output_to_a_full_disk_is_one_line_of_error(tmp_path: Path) -> None:
    command = f"exec {shlex.join(CORTEX)} version >/dev/full"
    buffered = {**environ(tmp_path), "PYTHONUNBUFFERED": ""}

    done = subprocess.run(["sh", "-c", command], env=buffered, capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stderr) == (1, "error: the output can't be written: No space left on device\n")


def test_an_interrupt_is_silent_and_exits_with_130(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        cortex(tmp_path, "env", "configure", "slow", "--operator-endpoint", url, "--token", "t")
        process = subprocess.Popen(
            [*CORTEX, "get", "-e", "slow"], env=environ(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        listener.settimeout(30)
        with listener.accept()[0]:
            out, err = interrupted(process)

    assert (process.returncode, out, err) == (130, b"", b"")


def test_colours_are_printed_only_on_terminals_without_no_color(tmp_path: Path) -> None:
    assert "\x1b[" in on_terminal(tmp_path, "status", TERM="xterm", NO_COLOR="")
    assert "\x1b[" not in on_terminal(tmp_path, "status", TERM="xterm", NO_COLOR="1")
    assert "\x1b[" not in on_terminal(tmp_path, "status", TERM="dumb", NO_COLOR="")
    assert "\x1b[" not in cortex(tmp_path, "status").stdout


def test_environments_are_added_listed_selected_renamed_and_deleted(tmp_path: Path) -> None:
    add = ["env", "configure", "a", "--operator-endpoint", "https://one:8889", "--token", "-"]
    assert cortex(tmp_path, *add, stdin="secret\n").returncode == 0
    assert cortex(tmp_path, "env", "rename", "a", "b").returncode == 0
    assert cortex(tmp_path, "env", "default", "b").stdout == "the default environment is b\n"
    assert json.loads(cortex(tmp_path, "env", "list", "-o", "json").stdout) == [
        {"name": "local", "operator_endpoint": "", "default": False},
        {"name": "b", "operator_endpoint": "https://one:8889", "default": True},
    ]
    assert "secret" not in cortex(tmp_path, "env", "list").stdout
    assert cortex(tmp_path, "env", "delete", "b").returncode == 0
    assert cortex(tmp_path, "env", "default").stdout == "the default environment is local\n"


#: Modules that commands must not import: the import takes longer than the rest of the command.
_HEAVY = {"asyncio", "fastapi", "httpx", "psutil", "pydantic", "rich", "sqlalchemy", "typer", "uvicorn", "yaml"}


@pytest.mark.parametrize(
    ("words", "unwanted"),
    [
        (["version"], {*_HEAVY, "cortex.client", "http.client"}),
        (["get"], _HEAVY),
        (["deploy"], _HEAVY),
        (["logs", "a"], _HEAVY),
        (["get", "a", "b"], _HEAVY),
        (["submit", "a", "--retry-failed", "b"], {*_HEAVY, "orjson"}),
        (["check"], {"asyncio", "fastapi", "httpx", "psutil", "sqlalchemy", "uvicorn"}),
    ],
)
def test_commands_import_no_unnecessary_modules(tmp_path: Path, words: list[str], unwanted: set[str]) -> None:
    code = f"import sys, cortex.cli.main as m\nm.main({words!r})\nprint(*sys.modules)"

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ(tmp_path), capture_output=True, text=True, timeout=60
    )

    assert unwanted & set(done.stdout.split()) == set()


def test_main_returns_its_exit_code_to_other_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CORTEX_HOME", str(tmp_path))

    assert main(["version"]) == 0
    assert main(["nope"]) == 2
    assert wait_until(lambda: capsys.readouterr().out) == f"{__version__}\n"


NEEDS_HOME = [
    ["up"],
    ["up", "--foreground"],
    ["up", "--engine", "ray", "--ray-address", "127.0.0.1:1"],
    ["deploy", "cortex.yaml"],
    ["check", "cortex.yaml", "--sample", "sample.json"],
    ["env", "configure", "x", "--operator", "http://127.0.0.1:1", "--token", "t"],
]


@pytest.mark.parametrize("words", [*NEEDS_HOME, ["get"], ["status"], ["down"], ["env", "list"]])
def test_a_home_that_is_a_file_is_one_clear_error(tmp_path: Path, words: list[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    refused = cortex(file, *words, cwd=project(tmp_path))

    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: CORTEX_HOME={file} can't be used: {file} is not a folder;")
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize("words", NEEDS_HOME)
def test_a_home_that_can_not_be_created_is_one_clear_error(tmp_path: Path, words: list[str]) -> None:
    refused = cortex(Path("/proc/cortex"), *words, cwd=project(tmp_path))

    assert refused.returncode == 2
    assert refused.stderr.startswith("error: CORTEX_HOME=/proc/cortex can't be used: /proc/cortex: no such file")
    assert refused.stderr.count("\n") == 1


def project(folder: Path) -> Path:
    write_project(folder, ECHO_SOURCE, ECHO_CONFIG)
    (folder / "sample.json").write_text("{}")
    return folder
