"""How Prefect's API is reached."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from llm_prefetch.errors import SpecError
from llm_prefetch.prefect_access import prefect_access, prefect_settings

URL = {"PREFECT_API_URL": "http://prefect:4200/api/"}


def header(**settings: str) -> str:
    access = prefect_access({**URL, **settings})
    assert access is not None
    return access.headers.get("Authorization", "")


def test_without_an_address_there_is_no_access() -> None:
    assert prefect_access({}) is None
    assert prefect_access({"PREFECT_API_URL": " "}) is None


def test_a_password_in_the_address_becomes_a_header_and_leaves_the_address() -> None:
    access = prefect_access({"PREFECT_API_URL": "https://me:p%40ss@prefect/api"})
    assert access is not None
    assert access.url == "https://prefect/api"
    assert access.headers["Authorization"] == "Basic " + base64.b64encode(b"me:p@ss").decode()


def test_basic_authentication_comes_before_a_key_as_in_prefects_own_client() -> None:
    assert header() == ""
    assert header(PREFECT_API_KEY="pnu_1") == "Bearer pnu_1"
    both = header(PREFECT_API_KEY="pnu_1", PREFECT_API_AUTH_STRING="me:secret")
    assert both == "Basic " + base64.b64encode(b"me:secret").decode()


@pytest.mark.parametrize(
    "url", ["prefect:4200/api", "ftp://prefect/api", "http://", "http://u:secret@prefect:x/api"]
)
def test_what_is_no_address_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(SpecError, match="that is no address") as caught:
        prefect_access({"PREFECT_API_URL": url})
    assert "secret" not in str(caught.value)


def test_the_environment_comes_before_the_active_profile(tmp_path: Path) -> None:
    (tmp_path / "profiles.toml").write_text(
        'active = "gpu"\n[profiles.gpu]\nPREFECT_API_URL = "http://gpu/api"\nPREFECT_API_KEY = "k"\n'
        '[profiles.other]\nPREFECT_API_URL = "http://other/api"\n'
    )
    home = {"PREFECT_HOME": str(tmp_path)}
    assert prefect_settings(home) == {"PREFECT_API_URL": "http://gpu/api", "PREFECT_API_KEY": "k"}
    assert prefect_settings({**home, "PREFECT_PROFILE": "other"}) == {"PREFECT_API_URL": "http://other/api"}
    assert prefect_settings({**home, **URL})["PREFECT_API_URL"] == URL["PREFECT_API_URL"]


@pytest.mark.parametrize("text", ["", "[", 'active = "gone"', "active = 3\nprofiles = 4"])
def test_a_profile_file_that_says_nothing_is_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "profiles.toml").write_text(text)
    assert prefect_settings({"PREFECT_HOME": str(tmp_path)}) == {}
