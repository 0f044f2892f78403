"""Messages between processes. Importing this costs nothing: names are loaded when they are first used.

The decorator lives in its module: ``from cosmos_actor.bus.schema import schema``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, List

if TYPE_CHECKING:
    from .bus import Bus, CloseReport  # noqa: F401
    from .clock import Clock  # noqa: F401
    from .codec import ArrayReference  # noqa: F401
    from .errors import *  # noqa: F403
    from .identity import Identity, host_id, new_incarnation  # noqa: F401
    from .keys import KeyRing, make_run_keys  # noqa: F401
    from .limits import Limits  # noqa: F401
    from .link import Link  # noqa: F401
    from .memory import MemoryNetwork, MemoryTransport  # noqa: F401
    from .receipt import Receipt  # noqa: F401
    from .schema import Array, Json, array, decode, encode, known_schemas, schema_key  # noqa: F401
    from .zmq_transport import ZmqTransport  # noqa: F401

_HOMES = {
    "errors": "AddressInUse BulkCorrupt BulkError BulkFull BulkGone BusError CorruptFrame DeadlineExceeded "
    "DescriptorLimit GapError KeyFileError LinkClosed MessageTooLarge PeerLost PeerRefused RemoteError SchemaError "
    "SchemaMismatch UnknownSchema WouldBlock",
    "bus": "Bus CloseReport",
    "clock": "Clock",
    "keys": "KeyRing make_run_keys",
    "limits": "Limits",
    "link": "Link",
    "memory": "MemoryNetwork MemoryTransport",
    "receipt": "Receipt",
    "zmq_transport": "ZmqTransport",
    "identity": "Identity host_id new_incarnation",
    "codec": "ArrayReference",
    "schema": "Array Json array decode encode known_schemas schema_key",
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module("." + _MODULE_OF[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> List[str]:
    return sorted(set(globals()) | set(__all__))
