"""The parts that every process of a run is made of: its bus with the settings' limits, and its source of weights."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from cosmos_actor.actors.context import WeightSource
from cosmos_actor.actors.messages import AskSettings, RunSettingsReply
from cosmos_actor.bus import Bus, Identity, KeyRing, Limits, new_incarnation
from cosmos_actor.bus.transport import Transport
from cosmos_actor.recipes.settings import RunSettings
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.subscriber import WeightSubscriber

ASK_DEADLINE_S = 20.0
"""How long an actor tries to reach its head before it gives up and says so."""


def bus_limits(settings: RunSettings) -> Limits:
    """The bus's limits as the run's settings say."""
    return settings.bus_limits()
