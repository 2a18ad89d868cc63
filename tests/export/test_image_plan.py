"""The layers of an image: what is in which of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortex.export.plan import LARGE_FILE_BYTES, ModelLayer, PodResources, image_name
from harness.exported_projects import MODEL_HANDLER, planned, realtime


def test_the_code_is_the_last_layer_with_the_configuration(tmp_path: Path) -> None:
    plan = planned(tmp_path, {"cortex.yaml": realtime(), "lib/a.py": "", "notes.txt": ""})

    assert plan.code == ("cortex.yaml", "handler.py", "lib/a.py", "notes.txt")
    assert (plan.environments, plan.models, plan.large_files) == ((), (), ())


def test_a_model_of_the_project_is_a_layer_of_its_own(tmp_path: Path) -> None:
    config = realtime("a", ", multi_model_reloading: {path: ./models/a}") + realtime(
        "b", ", multi_model_reloading: {paths: [{name: x, path: models/b}, {name: y, path: models/a}]}"
    )
    files = {"models/a/1/w.bin": "1", "models/b/1/w.bin": "2", "models/README.md": "3"}

    plan = planned(tmp_path, {"cortex.yaml": config, "handler.py": MODEL_HANDLER, **files})

    assert plan.models == (
        ModelLayer("models/a", False, ("models/a/1/w.bin",)),
        ModelLayer("models/b", False, ("models/b/1/w.bin",)),
    )
    assert plan.code == ("cortex.yaml", "handler.py", "models/README.md")


def test_a_model_elsewhere_on_this_machine_is_copied_to_the_same_path(tmp_path: Path) -> None:
    (tmp_path / "elsewhere/1").mkdir(parents=True)
    (tmp_path / "elsewhere/1/w.bin").write_text("1")
    config = realtime("a", f", multi_model_reloading: {{path: {tmp_path}/elsewhere}}")

    plan = planned(tmp_path / "project", {"cortex.yaml": config, "handler.py": MODEL_HANDLER})

    assert plan.models == (ModelLayer(f"{tmp_path}/elsewhere", True),)


def test_models_in_buckets_are_not_part_of_the_image(tmp_path: Path) -> None:
    config = realtime("a", ", multi_model_reloading: {path: s3://bucket/m}")
    plan = planned(tmp_path, {"cortex.yaml": config, "handler.py": MODEL_HANDLER})

    assert plan.models == ()


def test_large_files_are_not_in_the_layer_of_the_code(tmp_path: Path) -> None:
    large = "x" * LARGE_FILE_BYTES
    plan = planned(tmp_path, {"cortex.yaml": realtime(), "weights.bin": large, "small.bin": large[1:]})

    assert plan.large_files == ("weights.bin",)
    assert "weights.bin" not in plan.code and "small.bin" in plan.code


def test_dotenv_is_in_no_layer(tmp_path: Path) -> None:
    plan = planned(tmp_path, {"cortex.yaml": realtime(), ".env": "API_TOKEN=abc\n"})

    assert plan.has_dotenv
    assert plan.code == ("cortex.yaml", "handler.py")


def test_apis_with_equal_dependencies_share_an_environment(tmp_path: Path) -> None:
    other = ", dependencies: {pip: other.txt}"
    config = realtime("a") + realtime("b") + realtime("c", other)
    files = {"requirements.txt": "-r base.txt\nsix\n", "base.txt": "idna\n", "other.txt": "six\n"}

    plan = planned(tmp_path, {"cortex.yaml": config, **files})

    assert [each.files for each in plan.environments] == [("base.txt", "requirements.txt"), ("other.txt",)]


def test_only_a_script_depends_on_the_variables_of_an_api(tmp_path: Path) -> None:
    config = realtime("a", ", env: {A: '1'}") + realtime("b", ", env: {A: '2'}")
    without = planned(tmp_path / "1", {"cortex.yaml": config, "requirements.txt": "six\n"})
    with_script = planned(tmp_path / "2", {"cortex.yaml": config, "dependencies.sh": "echo $A\n"})

    assert [each.variables for each in without.environments] == [{}]
    assert [each.variables for each in with_script.environments] == [{"A": "1"}, {"A": "2"}]


def test_the_pod_has_room_for_the_smallest_number_of_replicas(tmp_path: Path) -> None:
    compute = "  compute: {cpu: 500m, mem: 1Gi, gpu: 1}\n  autoscaling: {min_replicas: 2, max_replicas: 4}\n"
    plan = planned(tmp_path, {"cortex.yaml": realtime("a", rest=compute) + realtime("b")})

    assert plan.resources == PodResources(cpu=0.5 + 2 * 0.5 + 0.2, memory_mib=512 + 2 * 1024 + 256, gpus=2)
    assert plan.resources.memory_limit_mib is None


@pytest.mark.parametrize(
    ("first", "kind", "limit_mib"),
    [
        ("mem: 1Gi", "RealtimeAPI", 512 + 4 * 1024 + 300),
        ("mem: 1Gi, mem_limit: 2Gi", "AsyncAPI", 512 + 4 * 2048 + 300),
        ("cpu: 1", "RealtimeAPI", None),
        ("mem: 1Gi", "BatchAPI", None),
        ("mem: 1Gi", "RealtimeAPI without max_replicas", None),
    ],
)
def test_the_limit_of_memory_is_that_of_the_most_replicas(
    tmp_path: Path, first: str, kind: str, limit_mib: int | None
) -> None:
    scaling = "  autoscaling: {max_replicas: 4}\n" if kind in ("RealtimeAPI", "AsyncAPI") else ""
    a = realtime("a", rest=f"  compute: {{{first}}}\n{scaling}").replace("RealtimeAPI", kind.split()[0])
    plan = planned(
        tmp_path, {"cortex.yaml": a + realtime("b", rest="  compute: {mem: 300Mi}\n  autoscaling: {max_replicas: 1}\n")}
    )

    assert plan.resources.memory_limit_mib == limit_mib


@pytest.mark.parametrize(
    ("config", "keeps"),
    [
        (realtime(), False),
        (realtime(rest="  networking: {auth: api_key}\n"), True),
        (realtime().replace("RealtimeAPI", "AsyncAPI"), True),
    ],
)
def test_jobs_and_keys_need_a_volume(tmp_path: Path, config: str, keeps: bool) -> None:
    assert planned(tmp_path, {"cortex.yaml": config}).keeps_state is keeps


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("shop", "shop"),
        ("My Shop_2", "my-shop-2"),
        ("2 models", "apis-2-models"),
        ("\N{SNOWMAN}", "apis"),
        ('a"; rm -rf $HOME\n', "a-rm-rf-home"),
        ("x" * 49 + " y", "x" * 49),
    ],
)
def test_the_name_of_an_image_follows_from_the_folder(folder: str, name: str) -> None:
    assert image_name(folder) == name
