"""Which replica a Serve YAML means, and what one more of it is started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from llm_prefetch.capturing.launch import read_launch
from llm_prefetch.errors import SpecError

SERVE = Path(__file__).parents[2] / "deployments" / "serve"


def llm(model: str = "m", deployment: str = "stage/m", **more: Any) -> dict[str, Any]:
    return {
        "model_loading_config": {"model_id": model},
        "callback_config": {"callback_kwargs": {"deployment": deployment}},
        **more,
    }


def write(folder: Path, *configs: Any, **app: Any) -> Path:
    path = folder / "serve.yaml"
    path.write_text(
        yaml.safe_dump({"applications": [{"name": "a", "args": {"llm_configs": [*configs]}, **app}]})
    )
    return path


@pytest.mark.parametrize(
    "name", [path.name for path in SERVE.glob("*.yaml") if "PrefetchCallback" in path.read_text()]
)
def test_each_of_our_examples_says_what_its_replicas_start_from(name):
    assert read_launch(SERVE / name).deployment


def test_the_deployment_is_the_one_that_the_callback_names(tmp_path):
    assert read_launch(write(tmp_path, llm())).deployment == "m"
    chain = {
        "callback_kwargs": {"callbacks": [{"callback_kwargs": {}}, {"callback_kwargs": {"deployment": "n"}}]}
    }
    assert read_launch(write(tmp_path, llm(callback_config=chain))).deployment == "n"


def test_serve_would_be_started_as_the_yaml_says():
    options = read_launch(SERVE / "tiny-llama-cpu.yaml").serve_options
    assert options == {"proxy_location": "HeadOnly", "http_options": {"host": "0.0.0.0", "port": 8000}}


def test_of_several_one_has_to_be_named(tmp_path):
    path = write(tmp_path, llm("m"), llm("n", "stage/n"))
    with pytest.raises(SpecError, match=r"which model\?.*name one of m, n"):
        read_launch(path)
    assert read_launch(path, "a", "n").deployment == "n"
    with pytest.raises(SpecError, match="no application 'b'"):
        read_launch(path, "b")


def test_an_llm_config_may_stand_in_a_file_of_its_own(tmp_path):
    (tmp_path / "m.yaml").write_text(yaml.safe_dump(llm()))
    assert read_launch(write(tmp_path, "m.yaml")).deployment == "m"
    with pytest.raises(SpecError, match=r"'gone\.yaml' cannot be read"):
        read_launch(write(tmp_path, "gone.yaml"))


@pytest.mark.parametrize("text", ["", "- x", "applications: 3", "a: [", "applications: [{name: a}]"])
def test_what_is_no_serve_yaml_is_refused(tmp_path, text):
    (tmp_path / "serve.yaml").write_text(text)
    with pytest.raises(SpecError):
        read_launch(tmp_path / "serve.yaml")


def test_a_replica_without_our_callback_has_nothing_staged_to_start_from(tmp_path):
    with pytest.raises(SpecError, match="does not start by our callback"):
        read_launch(write(tmp_path, llm(callback_config={})))


def test_one_replica_more_is_like_the_others_but_for_its_number_and_the_variables(tmp_path):
    options = {"autoscaling_config": {"min_replicas": 2}, "max_ongoing_requests": 7}
    config = llm(
        engine_kwargs={"max_num_seqs": 4}, deployment_config=options, runtime_env={"env_vars": {"B": "llm"}}
    )
    app_env = {"working_dir": "s3://x.zip", "env_vars": {"A": "app", "B": "app"}}
    launch = read_launch(write(tmp_path, config, runtime_env=app_env))
    found = launch.with_environment({"C": "ours"})
    assert found["engine_kwargs"] == {"max_num_seqs": 4}
    assert found["deployment_config"] == {
        "max_ongoing_requests": 7, "num_replicas": 1, "max_constructor_retry_count": 1,
    }  # fmt: skip
    assert found["runtime_env"] == {
        "working_dir": "s3://x.zip", "env_vars": {"A": "app", "B": "llm", "C": "ours"},
    }  # fmt: skip
    assert launch.llm_config["deployment_config"] == options
