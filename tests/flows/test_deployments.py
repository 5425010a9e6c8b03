"""`prefect.yaml`, the catalogue of models and the forms, without a server."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from llm_prefetch.capturing.launch import read_launch
from llm_prefetch.spec import load_spec

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deployments"
MODELS = sorted((FOLDER / "models").glob("*.yaml"))
DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load((FOLDER / "prefect.yaml").read_text())["deployments"]
FLOWS = sorted({deployment["entrypoint"] for deployment in DEPLOYMENTS})


def script(name: str) -> Any:
    """A script of `deployments/`, which is no package."""
    source = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert source
    assert source.loader
    module = importlib.util.module_from_spec(source)
    source.loader.exec_module(module)
    return module


def flow_name(deployment: dict[str, Any]) -> str:
    return str(deployment["entrypoint"].rpartition(".")[2]).replace("_", "-")


def title(deployment: dict[str, Any]) -> str:
    return f"{flow_name(deployment)}/{deployment['name']}"


@pytest.fixture(autouse=True)
def home(clean_environment: None) -> None:
    """Prefect makes its folder there when it is imported."""
    Path.home().mkdir(exist_ok=True)


# --- the file ---


def test_prefect_finds_the_file_from_the_root() -> None:
    assert (ROOT / "prefect.yaml").samefile(FOLDER / "prefect.yaml")


def test_no_two_deployments_have_one_name() -> None:
    titles = [title(deployment) for deployment in DEPLOYMENTS]
    assert sorted(titles) == sorted(set(titles))


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=title)
def test_a_deployment_says_what_it_is_and_runs_only_when_asked(deployment: dict[str, Any]) -> None:
    assert deployment["description"].endswith(".")
    assert "llm-prefetch" in deployment["tags"]
    assert deployment["enforce_parameter_schema"] is True
    assert deployment["work_pool"]["name"] == "llm-prefetch"
    assert deployment["work_pool"]["job_variables"]["env"]["PREFECT_LOGGING_EXTRA_LOGGERS"] == "llm_prefetch"
    schedules = deployment.get("schedules", [])
    assert all(schedule["active"] is False and schedule["slug"] for schedule in schedules)
    assert len({schedule["slug"] for schedule in schedules}) == len(schedules)


def test_no_run_depends_on_a_lease_that_ends_with_the_server() -> None:
    """A restart of Prefect's server forgets the lease of a `concurrency_limit`, and the run ends Crashed."""
    assert not any("concurrency_limit" in deployment for deployment in DEPLOYMENTS)


@pytest.mark.parametrize("flow", ["capture", "prove"])
def test_what_is_captured_and_proven_is_an_engine_that_compiles(flow: str) -> None:
    (deployment,) = [each for each in DEPLOYMENTS if flow_name(each) == flow]
    launch = read_launch(ROOT / deployment["parameters"]["serve_yaml"])
    assert launch.deployment in {path.stem for path in MODELS}
    assert launch.llm_config["engine_kwargs"]["enforce_eager"] is False


def test_every_kind_of_schedule_is_there_to_be_copied() -> None:
    schedules = [schedule for deployment in DEPLOYMENTS for schedule in deployment.get("schedules", [])]
    assert {"cron", "interval", "rrule"} <= {key for schedule in schedules for key in schedule}
    assert all("timezone" in schedule for schedule in schedules if "interval" not in schedule)


# --- the catalogue ---


@pytest.mark.parametrize("file", MODELS, ids=lambda file: file.stem)
def test_a_model_is_a_valid_spec_and_has_a_deployment_to_stage_it(file: Path) -> None:
    spec = load_spec(str(file))
    (staged,) = [each for each in DEPLOYMENTS if title(each) == f"stage/{spec.deployment}"]
    assert spec.deployment == file.stem
    assert staged["parameters"]["spec"] == yaml.safe_load(file.read_text())


def test_the_file_is_what_the_models_say() -> None:
    catalogue = script("catalogue")
    assert (FOLDER / "prefect.yaml").read_text() == catalogue.render(), f"run: {catalogue.COMMAND}"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The folder, to be changed."""
    for name in ("prefect.yaml", "per-model.yaml"):
        shutil.copy(FOLDER / name, tmp_path / name)
    shutil.copytree(FOLDER / "models", tmp_path / "models")
    return tmp_path


QWEN = 'deployment: qwen2.5-7b  # a comment\nartifacts:\n  - {name: weights, uri: "s3://b/qwen"}\n'


def test_a_new_model_is_missed_by_the_check_and_written_by_the_script(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    catalogue = script("catalogue")
    before = (copy / "prefect.yaml").read_text()
    assert catalogue.main(["--check"], copy) == 0
    (copy / "models" / "qwen2.5-7b.yaml").write_text(QWEN)

    assert catalogue.main(["--check"], copy) == 1
    assert "run: python deployments/catalogue.py" in capsys.readouterr().err
    assert (copy / "prefect.yaml").read_text() == before

    assert catalogue.main([], copy) == 0
    assert catalogue.main(["--check"], copy) == 0
    deployments = yaml.safe_load((copy / "prefect.yaml").read_text())["deployments"]
    assert [each for each in deployments if "qwen" not in each["name"]] == DEPLOYMENTS
    new = [each for each in deployments if "qwen" in each["name"]]
    assert "stage/qwen2.5-7b" in [title(each) for each in new]
    assert len(new) == len([each for each in DEPLOYMENTS if each["name"] == "tiny-llama"])
    specs = [each["parameters"]["spec"] for each in new if "spec" in each["parameters"]]
    assert specs == [yaml.safe_load(QWEN)] * len(specs)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("qwen2.5-7b.yaml", QWEN.replace("uri", "url"), "artifacts[0].uri: is missing"),
        ("qwen.yaml", QWEN, "the file is named qwen, its deployment qwen2.5-7b"),
    ],
    ids=["no spec", "two names"],
)
def test_a_model_that_is_wrong_is_named_and_nothing_is_written(
    copy: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, reason: str
) -> None:
    before = (copy / "prefect.yaml").read_text()
    (copy / "models" / name).write_text(text)
    assert script("catalogue").main([], copy) == 2
    said = capsys.readouterr().err
    assert reason in said
    assert name in said
    assert (copy / "prefect.yaml").read_text() == before


def test_a_file_without_a_place_for_the_models_is_left_alone(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / "prefect.yaml").write_text("deployments: []\n")
    assert script("catalogue").main([], copy) == 2
    assert "the line above the models is gone" in capsys.readouterr().err
    assert (copy / "prefect.yaml").read_text() == "deployments: []\n"


# --- the flows ---


def load(entrypoint: str) -> Any:
    module, _, name = entrypoint.rpartition(".")
    return getattr(importlib.import_module(module), name)


def form(entrypoint: str) -> Any:
    """The JSON schema that Prefect makes a form of."""
    from prefect.utilities.callables import parameter_schema

    return parameter_schema(load(entrypoint)).model_dump_for_openapi()


def found_in(schema: Any, key: str) -> Iterator[Any]:
    """What is at that key, however deep."""
    inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    if isinstance(schema, dict) and key in schema:
        yield schema[key]
    for each in inner:
        yield from found_in(each, key)


@pytest.mark.prefect
@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=title)
def test_the_parameters_of_a_deployment_and_of_its_triggers_fit_its_flow(deployment: dict[str, Any]) -> None:
    from prefect.utilities.schema_tools import is_valid_schema, validate

    flow, schema = load(deployment["entrypoint"]), form(deployment["entrypoint"])
    assert flow.name == flow_name(deployment)
    is_valid_schema(schema)
    validate(deployment.get("parameters", {}), schema, raise_on_error=True, ignore_required=False)
    serve_yaml = schema["properties"].get("serve_yaml", {"examples": []})
    assert all((ROOT / example).is_file() for example in serve_yaml["examples"])
    for trigger in deployment.get("triggers", []):
        assert trigger["expect"]
        assert set(trigger.get("parameters", {})) <= set(schema["properties"])


@pytest.mark.prefect
@pytest.mark.parametrize("entrypoint", FLOWS)
def test_every_field_of_a_form_is_described(entrypoint: str) -> None:
    schema = form(entrypoint)
    models = {"": schema, **schema.get("definitions", {})}
    fields = {
        f"{name}.{key}": field for name, model in models.items() for key, field in model["properties"].items()
    }
    assert fields
    assert [name for name, field in fields.items() if not field.get("description")] == []
    text = {name: field["description"] for name, field in fields.items()}
    assert [name for name, said in text.items() if said.startswith("str ")] == []
    assert [name for name, said in text.items() if "<" in said] == [], "the form takes it for HTML"


@pytest.mark.prefect
def test_the_only_unions_of_the_forms_are_a_value_or_nothing_and_the_entries_of_plugin_files() -> None:
    forms = [form(entrypoint) for entrypoint in FLOWS]
    models = {
        name: model for each in forms for name, model in {"": each, **each.get("definitions", {})}.items()
    }
    entries = list(found_in(models.pop("PluginFiles"), "anyOf"))
    named = {"type": "object", "additionalProperties": {"type": "string"}}
    assert entries == [[{"type": "string"}, named]] * 3
    models[""] = [each["properties"] for each in forms]
    unions = list(found_in(models, "anyOf"))
    assert len(unions) == 6
    nothing = {"type": "null"}
    assert [union for union in unions if len(union) != 2 or union[1] != nothing or union[0] == nothing] == []
    assert [*found_in(forms, "oneOf"), *found_in(forms, "allOf")] == []


@pytest.mark.prefect
def test_every_flow_has_a_deployment() -> None:
    from prefect import Flow

    names = [path.stem for path in (ROOT / "flows").glob("[!_]*.py")]
    modules = {name: importlib.import_module(f"flows.{name}") for name in names}
    entrypoints = {
        f"flows.{n}.{n}" for n, module in modules.items() if isinstance(getattr(module, n, None), Flow)
    }
    assert "flows.stage.stage" in entrypoints
    assert entrypoints == set(FLOWS)
