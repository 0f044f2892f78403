from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from cosmos_actor.bus import KeyFileError, KeyRing, make_run_keys
from cosmos_actor.bus.socket import ZAP_DOMAIN
from cosmos_actor.bus.zap import answer


def test_every_role_gets_a_private_file_with_the_same_list(tmp_path: Path) -> None:
    paths = make_run_keys(tmp_path / "keys", "run-1", ["rollout", "policy", "rollout"])
    assert sorted(paths) == ["policy", "rollout"]
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths.values()} == {0o600}
    rings = {role: KeyRing.load(path) for role, path in paths.items()}
    assert rings["policy"].peers == rings["rollout"].peers
    assert rings["policy"].secret != rings["rollout"].secret
    for role, ring in rings.items():
        assert (ring.run_id, ring.role) == ("run-1", role)
        assert ring.public == ring.key_of(role) == zmq.curve_public(ring.secret.encode()).decode()
        assert ring.role_of(ring.public) == role
    assert rings["policy"].role_of("nobody's") is None
    assert sorted(os.listdir(tmp_path / "keys")) == ["policy.key", "rollout.key"]


def test_making_keys_again_replaces_them(tmp_path: Path) -> None:
    first = KeyRing.load(make_run_keys(tmp_path, "run-1", ["policy"])["policy"])
    assert KeyRing.load(make_run_keys(tmp_path, "run-1", ["policy"])["policy"]).secret != first.secret


def test_the_secret_is_not_printed(tmp_path: Path) -> None:
    ring = KeyRing.load(make_run_keys(tmp_path, "run-1", ["policy"])["policy"])
    assert ring.secret not in repr(ring) and ring.secret not in str(ring)


def test_key_files_that_can_not_be_used_are_one_line_each(tmp_path: Path) -> None:
    path = make_run_keys(tmp_path, "run-1", ["policy"])["policy"]
    with pytest.raises(KeyFileError, match="No such file"):
        KeyRing.load(tmp_path / "absent.key")
    with pytest.raises(KeyFileError, match="no key for role 'rollout'; the list has policy"):
        KeyRing.load(path).key_of("rollout")
    path.chmod(0o640)
    with pytest.raises(KeyFileError, match="mode 0640: others can read it; chmod 600"):
        KeyRing.load(path)
    path.chmod(0o600)
    good = json.loads(path.read_text())
    damaged = [{**good, "public": "x"}, {**good, "secret": "\x7f" * 40}, {**good, "peers": {"policy": None}},
               {**good, "peers": []}]
    for content in ("not json", json.dumps({"run_id": "r"}), "[]", *map(json.dumps, damaged)):
        path.write_text(content)
        with pytest.raises(KeyFileError, match="is not a key file"):
            KeyRing.load(path)


def request(ring: KeyRing, **changed: bytes) -> list[bytes]:
    parts = {
        "version": b"1.0", "id": b"7", "domain": ZAP_DOMAIN, "address": b"127.0.0.1", "identity": b"",
        "mechanism": b"CURVE", "key": z85.decode(ring.public.encode()), **changed,
    }
    return list(parts.values())


def test_the_door_opens_for_listed_keys_and_says_whose_they_are(tmp_path: Path) -> None:
    ring = KeyRing.load(make_run_keys(tmp_path, "run-1", ["policy"])["policy"])
    assert answer(request(ring), ring) == [b"1.0", b"7", b"200", b"OK", b"policy", b""]
    strange = (
        {"key": bytes(32)}, {"key": b"short"}, {"mechanism": b"NULL"}, {"mechanism": b"PLAIN"}, {"domain": b"other"},
    )
    for changed in strange:
        assert answer(request(ring, **changed), ring)[2:5] == [b"400", b"key not on the list", b""]
    assert answer(request(ring)[:6], ring)[2] == b"400"
