"""The out-of-band meeting of ranks and the control plane that stays up during the job."""

from miraccl.bootstrap.connect import connect
from miraccl.bootstrap.events import HUB, Event, Notice, PeerLeft, PeerLost, StatusRequest
from miraccl.bootstrap.hub import Root, create_root
from miraccl.bootstrap.session import Session, solo
from miraccl.bootstrap.unique_id import UniqueId

__all__ = [
    "HUB",
    "Event",
    "Notice",
    "PeerLeft",
    "PeerLost",
    "Root",
    "Session",
    "StatusRequest",
    "UniqueId",
    "connect",
    "create_root",
    "solo",
]
