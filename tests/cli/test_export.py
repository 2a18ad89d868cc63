"""`cortex export`: the folder that it writes, and what it refuses."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import yaml

from cortex.cli.main import main
from cortex.errors import InputError
from cortex.export.context import check_wheel, installed_versions, locked_versions
from harness.exported_projects import MODEL_HANDLER, realtime, write_files

WHEEL = "cortex_serving-0.1.0-py3-none-any.whl"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / WHEEL).write_bytes(b"a wheel")
    return write_files(tmp_path / "my shop", {"cortex.yaml": realtime()})


def export(project: Path, *arguments: str) -> int:
    return main(["export", str(project), "--no-lock", "--wheel", str(project.parent / WHEEL), *arguments])


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_the_folder_has_what_the_dockerfile_copies(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(
        project, {"handler.py": MODEL_HANDLER, "requirements.txt": "six\n", "models/m/1/w.bin": "1", ".env": "A=1\n"}
    )
    (project / "cortex.yaml").write_text(realtime(handler=", multi_model_reloading: {path: models/m}"))
    out = project.parent / "out"

    assert export(project, "--out", str(out)) == 0

    assert files_in(out) == [
        ".dockerignore",
        "Dockerfile",
        "README.md",
        "compose.yaml",
        "cortex/constraints.txt",
        f"cortex/wheels/{WHEEL}",
        "environments/1/environment.json",
        "environments/1/files/requirements.txt",
        "models/1/models/m/1/w.bin",
        "project/cortex.yaml",
        "project/handler.py",
        "project/requirements.txt",
    ]
    copied = [line.split()[1] for line in (out / "Dockerfile").read_text().splitlines() if line.startswith("COPY")]
    assert copied == ["cortex/", "environments/1/", "models/1/", "project/"]
    shown = capsys.readouterr()
    assert shown.err.startswith("note: .env is not part of the image; set these variables of containers: A\n")
    assert shown.out.endswith(f"next: docker build --tag my-shop:latest {out}\n")


def test_files_are_readable_for_the_user_of_the_image(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "run.sh").write_text("")
    (project / "run.sh").chmod(0o700)
    (project / "handler.py").chmod(0o600)
    out = project.parent / "out"

    assert export(project, "--out", str(out)) == 0

    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (out, *(out / "project").iterdir())}
    assert modes == {"out": 0o755, "run.sh": 0o755, "handler.py": 0o644, "cortex.yaml": 0o644}


def test_a_second_export_follows_the_project_and_touches_nothing_else(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(project, {"old.py": "", "kept.py": ""})
    out = project.parent / "out"
    assert export(project, "--out", str(out)) == 0
    before = (out / "project/kept.py").stat()
    (project / "old.py").unlink()
    (project / "handler.py").write_text("# changed\n" + (project / "handler.py").read_text())
    (out / "notes.txt").write_text("mine")

    assert export(project, "--out", str(out)) == 0

    assert sorted(path.name for path in (out / "project").iterdir()) == ["cortex.yaml", "handler.py", "kept.py"]
    assert (out / "project/handler.py").read_text().startswith("# changed")
    assert (out / "project/kept.py").stat().st_ctime_ns == before.st_ctime_ns
    assert (out / "notes.txt").read_text() == "mine"


def test_a_model_with_odd_names_elsewhere_is_copied(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = project.parent / 'it\'s "my" $model'
    (model / "1").mkdir(parents=True)
    (model / "1/a b.bin").write_text("1")
    handler = f", multi_model_reloading: {{path: {json.dumps(str(model))}}}"
    write_files(project, {"cortex.yaml": realtime(handler=handler), "handler.py": MODEL_HANDLER})
    out = project.parent / "out"

    assert export(project, "--out", str(out)) == 0

    assert files_in(out / "models") == [f"1{model}/1/a b.bin"]


def test_the_manifest_is_printed_without_a_folder(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(project), "--kubernetes", "--tag", "example.com/a:1"]) == 0

    kinds = [document["kind"] for document in yaml.safe_load_all(capsys.readouterr().out)]
    assert kinds == ["Deployment", "Service"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --out DIR to write a build context, or --kubernetes to print a manifest"),
        (["--build", "--kubernetes"], "--build requires --out DIR"),
        (["--out", "{project}/image"], "is in the project, so that later deploys would upload it"),
        (["--out", "{project}"], "has files that `cortex export` has not written"),
        (["--out", "{project}/handler.py"], "is not a folder"),
        (["--out", "out", "--tag", "a b"], "--tag 'a b': is not the name of an image"),
        (["--out", "out", "--wheel", "six-1.0-py3-none-any.whl"], "is another package"),
        (["--out", "out", "--wheel", WHEEL], "does not exist"),
    ],
)
def test_what_is_refused(project: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(project, *(argument.format(project=project) for argument in arguments)) == 2

    assert message in capsys.readouterr().err
    assert not Path("out").exists()


def test_a_hidden_folder_of_the_project_can_be_the_target(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(project, "--out", str(project / ".image")) == 0
    assert export(project, "--out", str(project / ".image")) == 0

    assert files_in(project / ".image/project") == ["cortex.yaml", "handler.py"]


def test_secrets_are_refused_with_their_position(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "cortex.yaml").write_text(realtime(handler=", env: {HF_TOKEN: abc}"))

    assert export(project, "--out", str(project.parent / "out")) == 2
    assert f"{project}/cortex.yaml:3:" in capsys.readouterr().err
    assert export(project, "--out", str(project.parent / "out"), "--allow-secret", "HF_TOKEN") == 0


def test_files_with_keys_are_refused_by_name(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(project, {"tls.pem": "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0B\n"})

    assert export(project, "--out", str(project.parent / "out")) == 2
    assert f"{project}/tls.pem:1:1: has a private key, which everyone who can pull the image" in capsys.readouterr().err
    assert not (project.parent / "out").exists()
    assert export(project, "--out", str(project.parent / "out"), "--allow-secret", "tls.pem") == 0


def test_variables_that_the_configuration_overrides_are_reported(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(project, {".env": "A=1\nB=2\n", "cortex.yaml": realtime(handler=", env: {B: '3'}")})

    assert export(project, "--out", str(project.parent / "out")) == 0
    assert "warning: the `env` of iris overrides these variables of containers: B\n" in capsys.readouterr().err


def test_versions_of_the_installation_are_pinned() -> None:
    pinned = installed_versions()

    assert {line.partition("==")[0] for line in pinned} >= {"uvloop", "starlette", "anyio"}
    assert all("==" in line for line in pinned)
    assert "pytest" not in {line.partition("==")[0] for line in pinned}


def test_only_pinned_versions_are_constraints() -> None:
    compiled = "--index-url https://a\nsix==1.16.0\n./package\nx @ https://a/x.whl\ny==1 ; python_version < '3.13'\nz\n"

    assert locked_versions(compiled) == "six==1.16.0\ny==1 ; python_version < '3.13'\n"


def test_the_version_is_that_of_the_wheel(tmp_path: Path) -> None:
    (tmp_path / "cortex_serving-0.2.dev1+abc-py3-none-any.whl").write_text("")

    assert check_wheel(tmp_path / "cortex_serving-0.2.dev1+abc-py3-none-any.whl") == "0.2.dev1+abc"
    with pytest.raises(InputError, match="is not a wheel"):
        check_wheel(tmp_path / "cortex.zip")
