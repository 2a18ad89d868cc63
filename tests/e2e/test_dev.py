"""`cortex dev` in a terminal: reload, hold, debug, end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cortex.dev.link import Link
from harness.dev_terminal import DevTerminal
from harness.installations.example_cases import EXAMPLES_DIR
from harness.ports import free_port
from harness.wait import has_ended, wait_until

HANDLER = """
import os

class Handler:
    def __init__(self, config):
        self.factor = config["factor"]
        self.calls = 0

    def handle_post(self, payload):
        self.calls += 1
        return {"y": payload["x"] * self.factor, "calls": self.calls, "pid": os.getpid()}

    def handle_get(self):
        return "text"
"""
CONFIG = """
- name: double
  kind: RealtimeAPI
  handler: {type: python, path: handler.py, config: {factor: 2}}
"""


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "a project"
    folder.mkdir()
    write(folder, "cortex.yaml", CONFIG)
    write(folder, "handler.py", HANDLER)
    return folder


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(textwrap.dedent(text))


def edit(folder: Path, old: str, new: str, name: str = "handler.py") -> None:
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))


def call(url: str, payload: Any = None, timeout_s: float = 60.0, **headers: str) -> tuple[int, Any]:
    data = None if payload is None else json.dumps(payload).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            status, body = response.status, response.read()
    except urllib.error.HTTPError as error:
        status, body = error.code, error.read()
    try:
        return status, json.loads(body)
    except ValueError:
        return status, body.decode()


def test_a_changed_method_is_swapped_and_a_changed_constructor_starts_a_new_process(project: Path) -> None:
    with DevTerminal(project) as terminal:
        url = f"{terminal.url}/double"
        assert f"curl {url} -H 'content-type: application/json' -d '{{\"x\": 1}}'" in terminal.text
        _, first = call(url, {"x": 3})
        assert (first["y"], first["calls"]) == (6, 1)
        terminal.expect("double  POST /double 200")

        edit(project, 'payload["x"] *', '100 + payload["x"] *')
        terminal.expect("handler.py: swapped Handler.handle_post() in ")
        assert call(url, {"x": 3}) == (200, {"y": 106, "calls": 2, "pid": first["pid"]})

        edit(project, "self.calls = 0", "self.calls = 10")
        terminal.expect("new process (handler.py:5: Handler.__init__() runs while the process loads), ready in ")
        _, third = call(url, {"x": 3})
        assert (third["y"], third["calls"]) == (106, 11)
        assert third["pid"] != first["pid"]


def test_a_port_in_use_is_a_mistake_that_names_the_address_once(project: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "cortex.cli.main", "dev", "--port", str(port)],
            cwd=project,
            env={**os.environ, "CORTEX_HOME": str(project.parent / "home")},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    first, error = done.stderr.splitlines()
    assert first == "reading cortex.yaml"
    assert error == f"error: port {port} of 127.0.0.1 can't be used: address already in use; choose another with --port"


def test_apis_are_added_renamed_and_removed_with_the_configuration(project: Path) -> None:
    with DevTerminal(project) as terminal:
        status, body = call(f"{terminal.url}/other", {"x": 3})
        assert status == 404
        terminal.expect("  no API has the path /other; the endpoints are /double\n")
        assert call(f"{terminal.url}/double", [])[0] == 500

        edit(project, "name: double", "name: other", "cortex.yaml")
        assert call(f"{terminal.url}/other", {"x": 3})[1]["y"] == 6  # right after the change
        terminal.expect("double  removed")
        terminal.expect(f"other  {terminal.url}/other\n  curl ")
        assert call(f"{terminal.url}/double", {"x": 3})[0] == 404

        write(project, "cortex.yaml", CONFIG + CONFIG.replace("double", "third"))
        assert call(f"{terminal.url}/other", {"x": 3})[0] == 404
        terminal.expect(f"third  {terminal.url}/third\n  curl ")
        assert call(f"{terminal.url}/third", {"x": 3})[1]["y"] == 6


def test_a_change_ends_the_start_of_a_process_with_older_files(project: Path) -> None:
    endless = "print('endless', flush=True)\n        while True: pass"
    edit(project, "self.calls = 0", endless)
    with DevTerminal(project) as terminal:
        terminal.expect("endless\n")
        edit(project, endless, "self.calls = 5")
        url = f"{terminal.url}/double"
        terminal.expect("new process (handler.py changed while it was loading), ready in ")
        _, first = call(url, {"x": 1})
        assert first["calls"] == 6

        edit(project, "self.calls = 5", endless)
        terminal.expect("endless\n", count=2)
        write(project, "handler.py", HANDLER.replace("self.calls = 0", "self.calls = 7"))
        terminal.expect("new process (handler.py changed while it was loading), ready in ", count=2)
        _, second = call(url, {"x": 1})
        assert second["calls"] == 8
        assert second["pid"] != first["pid"]


@pytest.mark.long
def test_the_old_code_serves_while_the_new_one_has_a_mistake(project: Path) -> None:
    with DevTerminal(project) as terminal:
        url = f"{terminal.url}/double"
        edit(project, "self.calls += 1", "self.calls +=")
        terminal.expect("handler.py:10:22: SyntaxError")
        terminal.expect("not reloaded: 1 mistake found; the old code goes on serving")
        assert call(url, {"x": 1})[1]["y"] == 2

        edit(project, "self.calls +=", "self.calls += 1")
        edit(project, "self.calls = 0", "self.calls = 1 / 0")
        terminal.expect("failed to start: ZeroDivisionError: division by zero")
        terminal.expect('File "handler.py", line 7, in __init__')
        assert call(url, {"x": 1})[1]["y"] == 2

        write(project, "handler.py", HANDLER.replace("self.factor", "self.number"))
        terminal.expect("new process (")
        assert call(url, {"x": 1})[1]["y"] == 2


@pytest.mark.long
def test_a_failed_request_shows_the_frames_of_the_user(project: Path) -> None:
    with DevTerminal(project) as terminal:
        status, body = call(f"{terminal.url}/double", {})
        assert status == 500
        assert body["error"] == "internal server error: KeyError in handle_post(); the terminal shows the traceback"
        shown = terminal.expect("KeyError: 'x'")
        assert 'File "handler.py", line 11, in handle_post' in shown
        assert "site-packages" not in shown
        assert "src/cortex" not in shown


def test_requests_are_held_while_a_new_process_starts(project: Path) -> None:
    edit(project, "self.calls = 0", "self.calls = 0\n        import time; time.sleep(0.5)")
    with DevTerminal(project) as terminal:
        url = f"{terminal.url}/double"
        _, before = call(url, {"x": 1})
        answers: list[tuple[int, Any]] = []
        is_over = threading.Event()

        def load() -> None:
            while not is_over.is_set():
                answers.append(call(url, {"x": 1}))

        clients = [threading.Thread(target=load) for _ in range(4)]
        for client in clients:
            client.start()
        wait_until(lambda: answers)  # before the change is noticed
        edit(project, '"factor"]', '"factor"] * 5')
        terminal.expect("new process (")
        wait_until(lambda: answers and answers[-1][1]["y"] == 10)
        is_over.set()
        for client in clients:
            client.join()
        assert {status for status, _ in answers} == {200}
        assert {(body["y"], body["pid"] == before["pid"]) for _, body in answers} == {(2, True), (10, False)}


@pytest.mark.parametrize("method", ["def handle_post", pytest.param("async def handle_post", marks=pytest.mark.long)])
def test_breakpoint_stops_in_the_terminal(project: Path, method: str) -> None:
    edit(project, "def handle_post", method)
    edit(project, "self.calls += 1", "self.calls += 1; breakpoint()")
    with DevTerminal(project) as terminal:
        url = f"{terminal.url}/double"
        answers: list[Any] = []
        client = threading.Thread(target=lambda: answers.append(call(url, {"x": 4})))
        client.start()
        terminal.expect("(Pdb) ")
        terminal.type("p payload\n")
        terminal.expect("{'x': 4}")
        terminal.type("payload['x'] = 5\nc\n")
        client.join()
        assert answers[0][1]["y"] == 10


def test_an_interrupt_leaves_no_process_no_port_and_no_file(project: Path) -> None:
    edit(project, "self.calls = 0", "self.calls = 0; import subprocess; subprocess.Popen(['sleep', '1000'])")
    before = sorted(project.rglob("*"))
    with DevTerminal(project) as terminal:
        port = int(terminal.url.rpartition(":")[2])
        call(f"{terminal.url}/double", {"x": 1})
        wait_until(lambda: len(terminal.processes()) >= 3)  # the process, its child, and the next process
        processes = terminal.processes()
        assert terminal.interrupt() == 0
        _, alive = psutil.wait_procs(processes, 10)
        assert alive == []
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
    assert sorted(project.rglob("*")) == before
    assert not (project.parent / "home").exists()


def test_a_process_that_was_prepared_ends_when_it_is_stopped() -> None:
    ours, theirs = Link.pair()
    descriptors = (theirs.sock.fileno(), *os.pipe())
    command = [sys.executable, "-m", "cortex.dev.process", *map(str, descriptors)]
    with subprocess.Popen(command, pass_fds=descriptors) as process:
        ours.send("stop")
        assert process.wait(60) == 0
    theirs.close()
    ours.close()
    for each in descriptors[1:]:
        os.close(each)


def test_a_slow_start_is_reported_and_ctrl_c_does_not_reach_an_interpreter_that_starts(project: Path) -> None:
    edit(project, "self.calls = 0", "self.calls = 0; import time; time.sleep(1000)")
    with DevTerminal(project) as terminal:
        wait_until(terminal.processes)
        terminal.processes()[0].send_signal(signal.SIGINT)
        terminal.expect("double  a process loads; requests wait for it")
        assert terminal.interrupt() == 0
        assert "Traceback" not in terminal.text


@pytest.mark.long
def test_it_ends_with_an_error_if_the_project_has_a_mistake(project: Path) -> None:
    edit(project, "type: python", "type: pythn", "cortex.yaml")
    with DevTerminal(project) as terminal:
        terminal.expect("1 mistake found")
        wait_until(lambda: has_ended(terminal.pid))


@pytest.mark.long
def test_a_stream_is_cut_a_second_after_a_reload(project: Path) -> None:
    edit(
        project,
        'return "text"',
        "for number in range(100000):\n            yield f'{number} '\n            __import__('time').sleep(0.01)",
    )
    with DevTerminal(project) as terminal:
        response = urllib.request.urlopen(f"{terminal.url}/double", timeout=60)
        assert response.read(2) == b"0 "
        swapped = time.monotonic()
        edit(project, "{number} ", "{number}, ")
        with pytest.raises((OSError, ValueError, urllib.error.URLError, __import__("http").client.HTTPException)):
            while response.read(1000):
                pass
        assert time.monotonic() - swapped > 0.9
        terminal.expect("cut 1 stream of the old code")
        with urllib.request.urlopen(f"{terminal.url}/double", timeout=60) as response:
            assert response.read(3) == b"0, "


def test_a_request_whose_process_dies_gets_the_exit_reason_and_the_process_is_started_again(project: Path) -> None:
    edit(project, 'return "text"', "os._exit(3)")
    edit(project, "self.calls += 1", "self.calls += 1; os.kill(os.getpid(), payload.get('signal', 0))")
    with DevTerminal(project) as terminal:
        url = f"{terminal.url}/double"
        for payload, reason in (
            (None, "exited with code 3"),
            ({"signal": signal.SIGSEGV}, "segmentation fault (SIGSEGV)"),
            ({"signal": signal.SIGKILL}, "killed (SIGKILL)"),
        ):
            status, body = call(url, payload)
            assert (status, body["error"]) == (500, f"the process that handled this request died: {reason}")
            terminal.expect(f"the process ended: {reason}; starting another")
            assert call(url, {"x": 1})[1]["y"] == 2


@pytest.mark.long
def test_a_changed_configuration_and_environment_take_effect(project: Path) -> None:
    with DevTerminal(project) as terminal:
        url = terminal.url
        edit(project, "factor: 2", "factor: 7", "cortex.yaml")
        terminal.expect("new process (the configuration of double changed)")
        assert call(f"{url}/double", {"x": 1})[1]["y"] == 7
        write(project, ".env", "COLOR=red\n")
        terminal.expect("new process (environment variables changed)")
        edit(project, 'return "text"', 'return os.environ["COLOR"]')
        terminal.expect("swapped Handler.handle_get()")
        assert call(f"{url}/double") == (200, "red")
        (project / "cortex.yaml").write_text(CONFIG + CONFIG.replace("double", "other"))
        terminal.expect("other  new process (added)")
        assert call(f"{url}/other", {"x": 1})[1]["y"] == 2
        write(project, "cortex.yaml", CONFIG)
        terminal.expect("other  removed")
        assert call(f"{url}/other", {"x": 1})[0] == 404


@pytest.mark.long
def test_the_response_to_a_sample_is_compared_after_each_change(project: Path) -> None:
    write(project, "sample.json", '{"x": 3}')
    with DevTerminal(project, ["--sample", str(project / "sample.json")]) as terminal:
        terminal.expect('"y": 6')
        edit(project, 'payload["x"] *', '1 + payload["x"] *')
        terminal.expect('-  "y": 6')
        terminal.expect('+  "y": 7')


def test_a_change_is_applied_while_the_sample_waits_for_a_response(project: Path) -> None:
    write(project, "sample.json", '{"x": 3}')
    endless = "print('endless', flush=True)\n        while True: pass"
    edit(project, "self.calls += 1", "import threading; print('blocked', flush=True); threading.Event().wait()")
    with DevTerminal(project, ["--sample", str(project / "sample.json")]) as terminal:
        terminal.expect("blocked\n")
        edit(project, "self.calls = 0", endless)
        terminal.expect("endless\n")
        write(project, "handler.py", HANDLER.replace("self.calls = 0", "self.calls = 7"))
        terminal.expect("new process (handler.py changed while it was loading), ready in ")
        terminal.expect('"calls": 8')


def test_the_sample_is_not_sent_again_while_the_old_code_goes_on_serving(project: Path) -> None:
    write(project, "sample.json", '{"x": 3}')
    with DevTerminal(project, ["--sample", str(project / "sample.json")]) as terminal:
        terminal.expect('"calls": 1')
        edit(project, "return {", "return {{")
        terminal.expect("the old code goes on serving")
        write(project, "handler.py", HANDLER.replace('"y"', '"z"'))
        terminal.expect('+  "z": 6,\n  +  "calls": 2')


@pytest.mark.long
def test_applications_jobs_and_splitters_are_served(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    write(
        folder,
        "cortex.yaml",
        """
        - name: shop
          kind: RealtimeAPI
          handler: {type: asgi, path: app.py, app: app}
        - name: sums
          kind: BatchAPI
          handler: {type: python, path: sums.py}
        - name: words
          kind: AsyncAPI
          handler: {type: python, path: words.py}
        - name: report
          kind: TaskAPI
          definition: {path: report.py}
        - name: split
          kind: TrafficSplitter
          apis: [{name: shop, weight: 100}]
    """,
    )
    write(
        folder,
        "app.py",
        """
        from fastapi import FastAPI, WebSocket
        app = FastAPI()
        @app.get("/items/{number}")
        def item(number: int):
            return number
        @app.websocket("/echo")
        async def echo(socket: WebSocket):
            await socket.accept()
            await socket.send_text(await socket.receive_text())
    """,
    )
    write(
        folder,
        "sums.py",
        """
        class Handler:
            def __init__(self, config): pass
            def handle_batch(self, payload): return sum(payload)
    """,
    )
    write(
        folder,
        "words.py",
        """
        class Handler:
            def __init__(self, config): pass
            def handle_async(self, payload): return {"words": len(payload)}
    """,
    )
    write(folder, "report.py", "class Task:\n    def __call__(self, config): return 'a report'\n")
    with DevTerminal(folder) as terminal:
        url = terminal.url
        assert call(f"{url}/shop/items/7") == (200, 7)
        assert call(f"{url}/split/items/8") == (200, 8)
        edit(folder, "return number", "return number + 1", "app.py")
        terminal.expect("shop  app.py: swapped item()")
        assert call(f"{url}/shop/items/7") == (200, 8)

        _, job = call(f"{url}/sums", {"workers": 1, "item_list": {"items": [1, 2, 3], "batch_size": 2}})
        wait_until(lambda: call(f"{url}/sums/{job['job_id']}")[1]["job_status"]["status"] == "succeeded")
        assert call(f"{url}/sums?jobID={job['job_id']}")[1]["results"] == [3, 3]
        terminal.expect("sums | job ")
        assert call(f"{url}/sums", {"workers": 0})[0] == 400
        files = {"workers": 1, "delimited_files": {"paths": [f"{folder}/job.ndjson"]}}
        write(folder, "job.ndjson", "1 2")
        assert call(f"{url}/sums", files)[0] == 200
        status, refused = call(f"{url}/sums", files, origin="http://evil.example")  # any page that the user visits
        assert (status, "is not open to this endpoint" in refused["error"]) == (400, True)
        _, workload = call(f"{url}/words", ["a", "b"])
        assert call(f"{url}/words/{workload['id']}?wait=30")[1]["result"] == {"words": 2}
        _, task = call(f"{url}/report", {})
        wait_until(lambda: call(f"{url}/report/{task['job_id']}")[1].get("results") == ["a report"])
        assert call(f"{url}/sums/openapi.json")[0] == 200
        assert terminal.interrupt() == 0


@pytest.mark.long
def test_debuggers_of_several_apis_use_the_terminal_one_after_the_other(project: Path) -> None:
    edit(project, 'return "text"', "breakpoint(); return os.environ['CORTEX_API_NAME']")
    write(project, "cortex.yaml", CONFIG + CONFIG.replace("double", "other"))
    with DevTerminal(project) as terminal:
        url = terminal.url
        answers: list[Any] = []
        clients = [
            threading.Thread(target=lambda n=n: answers.append(call(f"{url}/{n}")[1])) for n in ("double", "other")
        ]
        for client in clients:
            client.start()
        for number in range(2):
            terminal.expect("(Pdb) ", count=number + 1)
            terminal.type("c\n")
        for client in clients:
            client.join()
        assert sorted(answers) == ["double", "other"]


def test_a_failed_environment_is_not_reported_if_its_files_have_changed_meanwhile(project: Path) -> None:
    environ = {"UV_HTTP_RETRIES": "0"}
    with socket.create_server(("127.0.0.1", 0)) as index, DevTerminal(project, environ=environ) as terminal:
        index.settimeout(20)
        assert call(f"{terminal.url}/double", {"x": 1})[0] == 200
        edit(project, "self.calls = 0", "self.calls = 10")
        write(project, "requirements.txt", f"--index-url http://127.0.0.1:{index.getsockname()[1]}/\ncolors\n")
        connection, _ = index.accept()
        (project / "requirements.txt").unlink()
        index.close()
        connection.close()
        terminal.expect("double  building the environment without requirements.txt")
        terminal.expect("Handler.__init__() runs while the process loads), ready in ")
        assert call(f"{terminal.url}/double", {"x": 1})[1]["calls"] == 11
        assert "not reloaded" not in terminal.text


@pytest.mark.parametrize("corrects", [True, False])
def test_code_that_changed_with_a_failed_environment_is_applied_with_the_next_change(
    project: Path, corrects: bool
) -> None:
    environ = {"UV_HTTP_RETRIES": "0"}
    with DevTerminal(project, environ=environ) as terminal:
        assert call(f"{terminal.url}/double", {"x": 1})[1]["calls"] == 1
        edit(project, "self.calls += 1", "self.calls += 10")
        write(project, "requirements.txt", f"--index-url http://127.0.0.1:{free_port()}/\ncolors\n")
        terminal.expect("not reloaded: requirements.txt: can't be installed")
        if corrects:
            (project / "requirements.txt").unlink()
        else:
            edit(project, '"text"', '"words"')
        terminal.expect("swapped Handler.handle_")
        assert call(f"{terminal.url}/double", {"x": 1})[1]["calls"] == 11


@pytest.mark.long
def test_changed_requirements_rebuild_the_environment(project: Path) -> None:
    package = project / "colors"
    package.mkdir()
    write(package, "pyproject.toml", '[project]\nname = "colors-of-test"\nversion = "1"\n')
    write(package, "colors_of_test.py", "BEST = 'red'\n")
    edit(project, 'return "text"', "import colors_of_test; return colors_of_test.BEST")
    with DevTerminal(project) as terminal:
        url = f"{terminal.url}/double"
        assert call(url)[0] == 500
        write(project, "requirements.txt", "./colors\n")
        terminal.expect("double  building the environment of requirements.txt")
        terminal.expect("colors-of-test")
        terminal.expect("new process (the environment was rebuilt), ready", timeout_s=60)
        assert call(url) == (200, "red")


def test_a_deleted_file_of_bad_requirements_is_reported_and_changes_nothing(project: Path) -> None:
    with DevTerminal(project) as terminal:
        assert call(f"{terminal.url}/double", {"x": 1})[0] == 200
        write(project, "requirements.txt", "./no_such_folder\n")
        terminal.expect("double  building the environment of requirements.txt")
        terminal.expect("the old code goes on serving")
        (project / "requirements.txt").unlink()
        terminal.expect("double  building the environment without requirements.txt")
        terminal.expect("double  the environment is the same as before; its process goes on")
        assert call(f"{terminal.url}/double", {"x": 1})[1]["calls"] == 2


@pytest.mark.long
def test_an_interrupt_ends_a_debugger_and_a_call_that_blocks(project: Path) -> None:
    edit(project, 'return "text"', "import time; time.sleep(1000)")
    edit(project, "self.calls += 1", "self.calls += 1; breakpoint()")
    for payload in ({"x": 4}, None):
        with DevTerminal(project) as terminal:
            url = f"{terminal.url}/double"
            client = threading.Thread(target=lambda p=payload: _ignore(lambda: call(url, p)))  # noqa: B023
            client.start()
            if payload:
                terminal.expect("(Pdb) ")
            processes = terminal.processes()
            assert terminal.interrupt() == 0
            _, alive = psutil.wait_procs(processes, 10)
            assert alive == []
            client.join()


def _ignore(work: Any) -> None:
    with contextlib.suppress(Exception):
        work()


@pytest.mark.long
def test_the_outcome_of_a_sample_job_and_a_sample_workload_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    kinds = (("sums", "BatchAPI", "batch", "sum(payload)"), ("words", "AsyncAPI", "async", "{'words': len(payload)}"))
    entry = "- name: {0}\n  kind: {1}\n  handler: {{type: python, path: {0}.py}}\n"
    write(folder, "cortex.yaml", "".join(entry.format(*kind) for kind in kinds))
    for name, _, method, result in kinds:
        code = f"    def __init__(self, config): pass\n    def handle_{method}(self, payload): return {result}\n"
        (folder / f"{name}.py").write_text(f"class Handler:\n{code}")
    write(folder, "sample.json", "[1, 2]")
    with DevTerminal(folder, ["--sample", str(folder / "sample.json")]) as terminal:
        terminal.expect('"status": "succeeded"')
        terminal.expect('"words": 2')


def test_the_server_of_a_command_is_started_and_restarted_at_a_change(tmp_path: Path) -> None:
    project = tmp_path / "own"
    shutil.copytree(EXAMPLES_DIR / "own-server", project)
    with DevTerminal(project) as terminal:
        url = f"{terminal.url}/own-server"
        assert f"curl {url}/\n" in terminal.text
        assert call(f"{url}/none") == (404, {"error": "no page has the path /none"})
        terminal.expect("  no page has the path /none")
        pid = psutil.Process(terminal.pid).children(recursive=True)

        edit(project, "no page has the path", "nothing is at", "server.py")
        terminal.expect("own-server  new process (server.py changed), ready in ")
        assert call(f"{url}/none") == (404, {"error": "nothing is at /none"})

        terminal.process_of("server.py").kill()
        terminal.expect("own-server  the process ended: killed (SIGKILL); starting another")
        assert call(f"{url}/none") == (404, {"error": "nothing is at /none"})

        edit(project, "import ", "import nothing_of_this_name, ", "server.py")
        terminal.expect("failed to start: the command exited with code 1 before it was ready")
        terminal.expect("ModuleNotFoundError: No module named 'nothing_of_this_name'")
        assert call(f"{url}/none") == (404, {"error": "nothing is at /none"})
        assert terminal.interrupt() == 0
    assert not psutil.wait_procs(pid, timeout=5)[1]


@pytest.mark.long
def test_a_server_that_writes_a_file_of_the_project_while_it_starts_becomes_ready(tmp_path: Path) -> None:
    project = tmp_path / "own"
    shutil.copytree(EXAMPLES_DIR / "own-server", project)
    write(project, "starts", "")
    edit(project, "import json", "import json\nopen('starts', 'a').write('started')", "server.py")
    with DevTerminal(project) as terminal:
        assert call(f"{terminal.url}/own-server/none")[0] == 404
        terminal.expect("own-server  new process (starts changed")
        terminal.expect("own-server  starts has changed after each of the last starts; the next one follows in 1 s")
        edit(project, "no page has the path", "nothing is at", "server.py")
        terminal.expect("(server.py changed")  # when it loads, or when it is ready: `starts` may change in between
        wait_until(lambda: call(f"{terminal.url}/own-server/none") == (404, {"error": "nothing is at /none"}))


def test_a_failed_start_is_not_repeated_because_of_a_file_that_it_writes(project: Path) -> None:
    edit(project, "self.calls = 0", "open('log.txt', 'a').write('started')\n        open('model').close()")
    write(project, "log.txt", "")
    with DevTerminal(project) as terminal:
        terminal.expect("failed to start: FileNotFoundError")
        edit(project, "self.calls += 1", "self.calls += 2")
        terminal.expect("failed to start: FileNotFoundError", count=2)
        write(project, "model", "")
        terminal.expect("new process (model changed), ready in ")
        assert (project / "log.txt").read_text() == "started" * 3


def test_a_request_that_waits_longer_than_its_timeout_for_a_process_gets_the_reason(project: Path) -> None:
    edit(project, "self.calls = 0", "self.calls = 0; open('../pipe').read()")
    os.mkfifo(project.parent / "pipe")
    write(project, "cortex.yaml", CONFIG + "  networking: {timeout: 200ms}\n")
    port = free_port()
    with DevTerminal(project, ["--port", str(port)]) as terminal:
        terminal.expect("a process loads; requests wait for it")
        error = "double is still loading: it was not ready within 0.2 s, its networking.timeout"
        status, body = call(f"http://127.0.0.1:{port}/double", {"x": 1})
        assert (status, body["error"]) == (503, error)
        terminal.expect("POST /double 503")
        (project.parent / "pipe").write_text("")
        assert call(f"{terminal.url}/double", {"x": 1})[0] == 200


def test_a_request_after_a_save_that_follows_another_runs_the_newest_code(project: Path) -> None:
    edit(project, '"y": ', '"y": 0 + ')
    with DevTerminal(project) as terminal:
        url = f"{terminal.url}/double"
        for number in range(0, 20, 2):
            assert call(url, {"x": 1})[1]["y"] == 2 + number
            edit(project, f'"y": {number} +', f'"y": {number + 1} +')
            meanwhile = threading.Thread(target=_ignore, args=(lambda: call(url, {"x": 1}),))
            meanwhile.start()
            edit(project, f'"y": {number + 1} +', f'"y": {number + 2} +')
            assert call(url, {"x": 1})[1]["y"] == 4 + number
            meanwhile.join()


def test_a_request_runs_the_code_that_was_saved_while_another_api_was_loading(project: Path) -> None:
    slow = HANDLER.replace("self.calls = 0", "print('loading', flush=True); open('../pipe').read(); self.calls = 0")
    write(project, "slow.py", slow)
    (project / "cortex.yaml").write_text(CONFIG + CONFIG.replace("double", "slow").replace("handler.py", "slow.py"))
    os.mkfifo(project.parent / "pipe")
    port = free_port()
    with DevTerminal(project, ["--port", str(port)]) as terminal:
        terminal.expect("double  ready in ")
        terminal.expect("slow | loading")
        edit(project, 'payload["x"] *', '100 + payload["x"] *')
        answers: list[tuple[int, Any]] = []
        held = threading.Thread(target=lambda: answers.append(call(f"http://127.0.0.1:{port}/double", {"x": 1})))
        held.start()
        with pytest.raises(AssertionError):
            wait_until(lambda: answers, 0.1)
        (project.parent / "pipe").write_text("")
        held.join()
        assert answers[0][1]["y"] == 102
        assert call(f"{terminal.url}/slow", {"x": 1})[1]["y"] == 2
        assert terminal.text.count("slow | loading") == 1  # its start went on while a file of the other API changed


def test_a_server_that_writes_a_file_of_the_project_and_fails_is_started_more_and_more_rarely(tmp_path: Path) -> None:
    project = tmp_path / "own"
    shutil.copytree(EXAMPLES_DIR / "own-server", project)
    write(project, "starts", "")
    edit(project, "import json", "open('starts', 'a').write('started')\nexit(3)", "server.py")
    with DevTerminal(project) as terminal:
        terminal.expect("failed to start: the command exited with code 3 before it was ready")
        terminal.expect("own-server  starts has changed after each of the last starts; the next one follows in 1 s")
        assert call(f"{terminal.url}/own-server/none")[0] == 503
