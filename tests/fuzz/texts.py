"""What people and other programs write: key files, and the words of `--faults`."""

from __future__ import annotations

import json
import math
import os
import random
import tempfile
from pathlib import Path

from cosmos_actor.bus.errors import BusError, KeyFileError
from cosmos_actor.bus.faults import Faults
from cosmos_actor.bus.keys import KeyRing, make_run_keys
from tests.fuzz.case import Broken, Case, opened
from tests.fuzz.mutations import DEEP, changed_bytes, changed_value


class KeyFiles:
    """One file, written anew for every example; what was loaded can be used."""

    def __init__(self) -> None:
        folder = opened.enter_context(tempfile.TemporaryDirectory())
        path = make_run_keys(folder, "run", ["policy", "rollout"])["policy"]
        self.path, self.text = Path(path), Path(path).read_bytes()

    def make(self, choose: random.Random) -> bytes:
        if choose.random() < 0.5:
            return changed_bytes(self.text, [self.text], choose)
        text = repr(changed_value(json.loads(self.text), choose))  # a JSON of sorts; most of it is none
        if choose.random() < 0.8:
            text = json.dumps(changed_value(json.loads(self.text), choose), default=repr)
        return text.replace(json.dumps(DEEP), "[" * 100_000 if choose.random() < 0.5 else "9" * 5000).encode()

    def decode(self, data: bytes) -> None:
        with open(os.open(self.path, os.O_WRONLY | os.O_TRUNC), "wb") as file:
            file.write(data)
        ring = KeyRing.load(self.path)
        if {type(part) for part in (ring.run_id, ring.role, ring.public, ring.secret, *ring.peers)} != {str}:
            raise Broken(f"{ring} has something else than texts")


class FaultWords:
    CAPTURED = (
        "drop=0.01,dup=0.01,reorder=0.01,corrupt=0.001,delay=50ms,partition=rollout:5s@20s",
        "delay=0.5s,partition=policy:1s,partition=policy:2s@3s", "drop=1e-3", "", "delay=99999999999999999999s",
        "drop=nan,dup=inf", "partition=:1s", "drop=" + "9" * 400, "delay=" + "9" * 400 + "s", "drop=１,delay=٣s",
    )

    def make(self, choose: random.Random) -> str:
        others = [text.encode() for text in self.CAPTURED]
        return changed_bytes(choose.choice(others), others, choose).decode("utf-8", "replace")

    def decode(self, text: str) -> None:
        faults = Faults.parse(text)
        times = [faults.delay_s, *(time for cut in faults.partitions for time in (cut.for_s, cut.start_s))]
        if not all(map(math.isfinite, times)) or not all(0 <= rate < 1 for rate in (faults.drop, faults.corrupt)):
            raise Broken(f"{text!r} became {faults}")


def cases() -> list[Case]:
    keys, words = KeyFiles(), FaultWords()
    return [
        Case("key files", keys.make, keys.decode, (KeyFileError,), 64 * 1024),
        Case("words of --faults", words.make, words.decode, (BusError,)),
    ]
