"""What a compile cache was built for, as this node and a node with GPUs tell it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from blake3 import blake3

from llm_prefetch.caches.identity import Identity, ordinals, parse_identity
from llm_prefetch.errors import ManifestError
from llm_prefetch.manifest import Manifest, parse_manifest
from tests.caches.made import GpuNode, make_identity
from tests.samples import make_manifest

REPOSITORY = Path(__file__).parents[2]


def test_a_launch_says_all_that_goes_into_the_key():
    found = make_identity()
    assert found.platform == "cuda"
    assert (found.vllm, found.torch, found.cuda, found.triton) == ("0.29.0", "2.13.0", "13.0", "3.9.0")
    assert (found.gpu_name, found.gpu_count, found.ordinals) == ("NVIDIA A10G", 2, (0, 1))
    assert (found.tp, found.pp, found.dp) == (2, 1, 1)
    assert found.arguments == {"max_num_seqs": 64}
    assert found.packages == {"transformers": "5.0"}


def test_a_staging_does_not_know_the_launch_and_says_so():
    found = make_identity(engine_path=None, engine_kwargs=None, environment=None)
    launch = ("engine_path", "config", "tp", "pp", "dp", "ordinals", "arguments", "environment")
    assert [getattr(found, name) for name in launch] == [None] * len(launch)


def test_a_python_without_vllm_says_nothing_about_the_engines():
    found = make_identity(GpuNode(versions={"triton": "1.0"}))
    assert (found.vllm, found.torch, found.python, found.triton, found.packages) == (None,) * 5
    assert found.gpu_name == "NVIDIA A10G"  # of the node it does


def test_a_node_whose_gpus_cannot_be_seen_does_not_say_that_it_has_none():
    assert make_identity(GpuNode(names=())).gpu_count is None


def test_a_nested_argument_is_named_by_its_path_and_what_leaves_the_graph_alone_is_left_out():
    kwargs = {
        "compilation_config": {"mode": 3, "pass_config": {"fuse": True}},
        "served_model_name": "any",
        "load_format": "runai_streamer",
        "quantization": None,
        "cudagraph_capture_sizes": [1, 2],
    }
    found = make_identity(engine_kwargs=kwargs).arguments
    assert found == {
        "compilation_config.mode": 3,
        "compilation_config.pass_config.fuse": True,
        "cudagraph_capture_sizes": [1, 2],
    }


def test_nothing_that_may_be_a_secret_stands_in_it():
    kwargs = {"hf_token": "hf_abc", "kv_transfer_config": {"url": "https://u:pw@host", "api_key": "sesame"}}
    environment = {"CUDA_HOME": "/home/bob/cuda", "VLLM_USE_DEEP_GEMM": "1", "AWS_SECRET_ACCESS_KEY": "x"}
    found = make_identity(engine_kwargs=kwargs, environment=environment)
    text = json.dumps(found.to_manifest())
    assert not [word for word in ("hf_abc", "pw@", "sesame", "bob", "AWS") if word in text]
    assert found.environment is not None
    assert found.environment["VLLM_USE_DEEP_GEMM"] == "1"
    assert found.environment["CUDA_HOME"].startswith("blake3:")


def test_equal_values_have_equal_hashes_and_others_have_others():
    def home(path):
        return make_identity(environment={"CUDA_HOME": path}).environment

    assert home("/a") == home("/a") != home("/b")


def test_variables_that_no_key_holds_are_left_out():
    environment = {"PATH": "/bin", "TORCHINDUCTOR_CACHE_DIR": "/x", "TORCHINDUCTOR_FREEZING": "1"}
    assert make_identity(environment=environment).environment == {"TORCHINDUCTOR_FREEZING": "1"}


def test_the_configuration_of_the_model_is_known_by_its_digest(tmp_path):
    assert make_identity(engine_path=tmp_path / "gone").config is None
    assert make_identity(engine_path=tmp_path).config == ""
    (tmp_path / "config.json").write_bytes(b"{}")
    assert make_identity(engine_path=tmp_path).config == blake3(b"{}").hexdigest()


@pytest.mark.parametrize(
    ("gpus", "sizes", "expected"),
    [
        (1, {"tp": 1, "pp": 1}, (0,)),
        (4, {"tp": 4, "pp": 1}, (0, 1, 2, 3)),
        (4, {"tp": 2, "pp": 2}, (0, 1, 2, 3)),
        (2, {"tp": 2, "pp": 2}, (0, 1, 0, 1)),
        (1, {"tp": 2, "pp": 1}, (0, 0)),
        (8, {"tp": 1, "pp": 1}, None),
        (8, {"tp": 4, "pp": 1}, None),
        (0, {"tp": 1, "pp": 1}, None),
        (1, {"tp": 1, "pp": 1, "dp": 2}, None),
    ],
)
def test_the_gpu_of_a_rank_is_known_only_where_a_replica_has_all_of_its_nodes(gpus, sizes, expected):
    assert ordinals(gpus, **sizes) == expected


def test_it_is_a_part_of_the_version_and_comes_back_from_the_manifest():
    found = make_identity()
    manifest = make_manifest(**found.to_manifest())
    again = parse_manifest(manifest.to_json(), "here")
    assert parse_identity(again.identity, "here") == found
    assert again.version == manifest.version != make_manifest().version


def test_a_manifest_without_it_is_what_it_was():
    assert make_manifest().to_json() == Manifest(make_manifest().files, 8).to_json()
    assert b"identity" not in make_manifest().to_json()


@pytest.mark.parametrize("found", [{}, {"format": 2}, {"color": "red"}, {"tp": "many"}])
def test_one_that_cannot_be_read_is_refused_with_what_to_do(found):
    with pytest.raises(ManifestError) as caught:
        parse_identity(found, "s3://caches/llama")
    assert "capture" in caught.value.hint


def test_it_is_told_without_importing_an_engine():
    code = (
        "import sys; from llm_prefetch.caches.identity import Identity;"
        "Identity.of_this_node('/models/llama', {}, {});"
        "print([name for name in ('torch', 'vllm', 'triton', 'ray') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.engine
def test_on_a_node_without_gpus_it_tells_the_processor_and_its_threads():
    found = Identity.of_this_node(None, {}, {})
    assert (found.platform, found.gpu_name, found.gpu_count, found.cuda) == ("cpu", "", 0, "")
    assert found.ordinals == ()
    assert found.processor == tuple(sorted(set(found.processor or ())))
    assert found.threads == len(os.sched_getaffinity(0))


@pytest.mark.engine
def test_versions_and_key_variables_are_those_that_the_engine_itself_tells():
    code = (
        "import json, torch, vllm, vllm.envs as envs;"
        "print(json.dumps([vllm.__version__, torch.__version__, sorted(envs.compile_factors())]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    vllm, torch, factors = json.loads(done.stdout.splitlines()[-1])
    from llm_prefetch.caches.this_node import ThisNode

    found = Identity.of_this_node()
    assert (found.vllm, found.torch) == (vllm, torch)
    ours = {name for name in factors if not name.startswith("RAY_EXPERIMENTAL_NOSET_")}
    assert ThisNode().key_variables() == ours
