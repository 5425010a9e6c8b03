"""Signatures: exactly these bytes, by exactly this key; and who holds a key keeps it for himself."""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from llm_prefetch import manifest as manifests
from llm_prefetch import signatures
from llm_prefetch.errors import (
    DigestError,
    MissingExtraError,
    OriginChangedError,
    OriginNotFoundError,
    OriginUnavailableError,
    TrustError,
    UsageError,
)
from llm_prefetch.manifest import Manifest, parse_manifest
from llm_prefetch.publish import publish
from llm_prefetch.resolve import Source, resolve
from llm_prefetch.signatures import (
    SignedSource,
    is_outdated,
    load_signing_key,
    require_signature,
    sign_published,
    verify,
)
from llm_prefetch.spec import Policy
from tests.samples import FakeOrigin, make_artifact, make_folder, make_manifest, make_published, raises
from tests.signing import make_key, make_key_file, signature_at

KEY, OTHER = make_key(1), make_key(2)
MANIFEST = make_manifest()
BODY, SIGNATURE = MANIFEST.to_json(), KEY.sign(MANIFEST)
OF_RFC_8410 = """\
-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC
-----END PRIVATE KEY-----
"""


def _changed(data: bytes, at: int, by: int) -> bytes:
    """`data` with another byte at one place."""
    at %= len(data)
    return data[:at] + bytes([data[at] ^ by]) + data[at + 1 :]


def _require(manifest: bytes, signature: bytes | None, *trusted: str) -> Source:
    """What a node does with what it finds at an origin."""
    beside = {} if signature is None else {manifests.FOLDER + "/manifest.sig": signature}
    origin = FakeOrigin({manifests.PATH: manifest, **beside})
    source = Source(make_artifact(kind="plugin"), origin, parse_manifest(manifest, "here"))
    return require_signature(source, trusted or [KEY.public])


def test_what_a_trusted_key_has_signed_is_pinned():
    source = _require(BODY, SIGNATURE.to_json(), OTHER.public, KEY.public)
    assert isinstance(source, SignedSource)
    assert source.signed_by == KEY.public
    assert source.artifact.pinned
    assert source.artifact.version == MANIFEST.version


@given(at=st.integers(0, 2**20), by=st.integers(1, 255))
def test_any_changed_byte_of_the_manifest_is_refused(at, by):
    body = _changed(BODY, at, by)
    with pytest.raises((TrustError, manifests.ManifestError)):
        _require(body, SIGNATURE.to_json())
    with pytest.raises((TrustError, manifests.ManifestError)):  # by who thinks of the version beside it, too
        _require(body, replace(SIGNATURE, version=parse_manifest(body, "here").version).to_json())


@given(at=st.integers(0, 2**20), by=st.integers(1, 255))
def test_any_changed_byte_of_the_signature_is_refused(at, by):
    with pytest.raises(TrustError):
        _require(BODY, _changed(SIGNATURE.to_json(), at, by))


@given(number=st.integers(0, 255).filter(lambda number: number != 1))
def test_any_other_key_is_refused(number):
    other = make_key(number)
    with pytest.raises(TrustError, match=r"which policy\.trusted_keys does not name"):
        _require(BODY, other.sign(MANIFEST).to_json())
    with pytest.raises(TrustError, match=r"is not by ed25519:.*, as it claims"):
        _require(BODY, replace(other.sign(MANIFEST), key=KEY.public).to_json())


@given(st.binary(max_size=300))
def test_what_is_no_signature_is_refused_and_nothing_else_happens(data):
    with pytest.raises(TrustError, match="its signature cannot be read"):
        _require(BODY, data)


def test_a_signature_of_the_same_bytes_as_something_else_is_none_of_a_manifest():
    private = Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32)
    plain = replace(SIGNATURE, signature=base64.b64encode(private.sign(BODY)).decode())
    assert plain.signature != SIGNATURE.signature
    with pytest.raises(TrustError, match="as it claims"):
        verify(MANIFEST, plain, [KEY.public])


@pytest.mark.parametrize(
    ("signature", "reason"),
    [
        (None, "it is not signed"),
        (b"{}", "its signature cannot be read"),
        (b" " * 5000, "its signature cannot be read"),
        (
            OTHER.sign(MANIFEST).to_json(),
            f"it is signed by {OTHER.public}, which policy.trusted_keys does not",
        ),
        (KEY.sign(make_manifest({"x": b"y"})).to_json(), "its signature is of b3-"),
    ],
    ids=["none", "other JSON", "too long", "another key", "of what was there before"],
)
def test_the_error_says_what_is_wrong_and_what_to_do(signature, reason):
    with raises(TrustError, 5, reason) as caught:
        _require(BODY, signature)
    assert caught.value.message.startswith("weights is code, the spec does not pin its version, and ")
    assert "pin its version" in caught.value.hint
    assert caught.value.where == "fake://origin"


def test_only_all_of_what_was_signed_is_trusted(tmp_path):
    uri = make_published(tmp_path / "origin")
    sign_published(uri, MANIFEST.version, KEY)
    part = make_artifact(uri, kind="plugin", exclude=["empty"])
    with pytest.raises(TrustError, match="its include or exclude leaves a part"):
        require_signature(resolve(part), [KEY.public])


def test_without_a_manifest_there_is_nothing_to_sign(tmp_path):
    uri = f"file://{make_folder(tmp_path / 'origin')}"
    with pytest.raises(TrustError, match="there is no manifest that could be signed"):
        require_signature(resolve(make_artifact(uri, kind="plugin")), [KEY.public])
    with pytest.raises(OriginNotFoundError):
        sign_published(uri, MANIFEST.version, KEY)


def test_a_manifest_that_the_run_knows_needs_its_own_signature_at_the_origin(tmp_path):
    uri, other = make_published(tmp_path / "origin"), make_manifest({"x": b"y"})
    sign_published(uri, MANIFEST.version, KEY)
    artifact = make_artifact(uri, kind="plugin")
    assert isinstance(require_signature(resolve(artifact, pinned=MANIFEST), [KEY.public]), SignedSource)
    with pytest.raises(TrustError, match="what is there now was not signed"):
        require_signature(resolve(artifact, pinned=other), [KEY.public])


def test_what_was_published_is_signed_if_it_is_still_there(tmp_path):
    uri = make_published(tmp_path / "origin")
    other = make_manifest({"x": b"y"}).version
    with raises(OriginChangedError, 3, f"not signed: {MANIFEST.version} is there, not {other}"):
        sign_published(uri, other, KEY)
    assert not signature_at(tmp_path / "origin").exists()
    sign_published(uri, MANIFEST.version, KEY)
    body = json.loads(signature_at(tmp_path / "origin").read_text())
    assert (body["key"], body["version"]) == (KEY.public, MANIFEST.version)


def test_publishing_the_same_again_keeps_the_signature_and_another_version_has_none(tmp_path):
    source, uri = make_folder(tmp_path / "source"), f"file://{tmp_path}/origin"
    sign_published(uri, publish(source, uri).version, KEY)
    again = publish(source, uri)
    assert not is_outdated(uri, again.version)
    require_signature(resolve(make_artifact(uri, kind="plugin")), [KEY.public])
    (source / "config.json").write_text("{}")
    changed = publish(source, uri)
    assert is_outdated(uri, changed.version)
    with pytest.raises(TrustError, match=f"its signature is of {again.version}"):
        require_signature(resolve(make_artifact(uri, kind="plugin")), [KEY.public])
    sign_published(uri, changed.version, OTHER)
    require_signature(resolve(make_artifact(uri, kind="plugin")), [OTHER.public])
    signature_at(tmp_path / "origin").write_text("what is this")
    assert is_outdated(uri, changed.version)


def test_an_origin_that_falters_after_a_publish_has_not_undone_it(tmp_path, monkeypatch):
    uri, one = make_published(tmp_path / "origin"), "b3-" + "1" * 64
    sign_published(uri, MANIFEST.version, KEY)
    assert is_outdated(uri, one)

    def falter(*_) -> None:
        raise OriginUnavailableError("503", where=uri, hint="later")

    monkeypatch.setattr(signatures, "ask", falter)
    assert not is_outdated(uri, one)


def test_a_key_as_openssl_writes_it(tmp_path):
    path = tmp_path / "key.pem"
    path.write_text(OF_RFC_8410)
    path.chmod(0o600)
    assert load_signing_key(path).public == "ed25519:Gb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE="
    assert load_signing_key(make_key_file(tmp_path)).sign(MANIFEST) == SIGNATURE


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o644])
def test_a_key_that_others_may_use_is_refused_as_by_ssh(tmp_path, mode):
    path = make_key_file(tmp_path, mode=mode)
    with raises(TrustError, 5, f"its mode is {mode:04o}") as caught:
        load_signing_key(path)
    assert caught.value.hint.startswith(f"chmod 600 {path}")


def test_a_key_of_another_user_is_for_that_one_to_guard(tmp_path, monkeypatch):
    path = make_key_file(tmp_path, mode=0o640)  # a mounted secret: root's, and read by our group
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    assert load_signing_key(path).public == KEY.public


def _pem(key, encryption=None):
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"-----BEGIN PRIVATE KEY-----\nnonsense\n-----END PRIVATE KEY-----\n",
        Ed25519PrivateKey.generate()
        .public_key()
        .public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        _pem(Ed25519PrivateKey.generate(), BestAvailableEncryption(b"secret")),
        _pem(rsa.generate_private_key(65537, 2048)),
    ],
    ids=["nothing", "nonsense", "a public key", "a passphrase", "RSA"],
)
def test_another_file_than_a_key_is_refused(tmp_path, data):
    path = tmp_path / "key.pem"
    path.write_bytes(data)
    path.chmod(0o600)
    with raises(UsageError, 2, "not an Ed25519 private key in PEM without a passphrase"):
        load_signing_key(path)


def test_a_key_that_is_not_there_is_one_line(tmp_path):
    with raises(UsageError, 2, "cannot read the key: No such file"):
        load_signing_key(tmp_path / "none.pem")


def test_a_private_key_cannot_leave_its_process_and_is_not_shown():
    with pytest.raises(TypeError):
        pickle.dumps(KEY)
    assert repr(KEY) == "SigningKey()"


def test_without_the_package_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    with raises(MissingExtraError, 2, "signatures need the package cryptography") as caught:
        _require(BODY, SIGNATURE.to_json())
    assert caught.value.hint == "pip install 'llm-prefetch[sign]'"
    with pytest.raises(MissingExtraError):
        load_signing_key(tmp_path / "key.pem")


def test_nothing_imports_the_package_before_it_is_needed():
    code = "import sys, llm_prefetch.cli, llm_prefetch.stage; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_keys_in_a_spec_have_one_form():
    assert Policy(trusted_keys=[KEY.public, OTHER.public]).trusted_keys == [KEY.public, OTHER.public]


@pytest.mark.parametrize(
    "text",
    [
        KEY.public.removeprefix("ed25519:"),
        KEY.public + "\n",
        KEY.public[:-1],
        "ed25519:" + "A" * 44,
        KEY.public[:-2] + "B=",
        "rsa:" + KEY.public.removeprefix("ed25519:"),
    ],
)
def test_what_is_no_key_is_refused_with_the_field(text):
    with pytest.raises(ValidationError, match=r"trusted_keys\.0"):
        Policy.model_validate({"trusted_keys": [text]})


@pytest.mark.parametrize("length", [0, 1, 2])
def test_every_public_key_is_of_that_form(length):
    for number in range(length * 80, (length + 1) * 80):
        Policy(trusted_keys=[make_key(number).public])


def test_the_manifest_that_is_signed_is_the_one_that_is_used():
    """Not the bytes as they came, which another reader may understand otherwise."""
    spaced = json.dumps(json.loads(BODY), indent=1).encode()
    source = _require(spaced, SIGNATURE.to_json())
    assert isinstance(source.content, Manifest)
    assert source.content.to_json() == BODY


def test_a_pin_that_does_not_hold_is_no_matter_of_signatures(tmp_path):
    uri = make_published(tmp_path / "origin")
    sign_published(uri, MANIFEST.version, KEY)
    with pytest.raises(DigestError):
        resolve(make_artifact(uri, kind="plugin", version="b3-" + "0" * 64))
