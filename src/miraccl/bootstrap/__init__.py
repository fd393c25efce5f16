"""The out-of-band meeting of ranks and the control plane that stays up during the job."""

from miraccl.bootstrap.events import HUB, Event, Notice, PeerLeft, PeerLost, StatusRequest
from miraccl.bootstrap.hub import Root, create_root, get_unique_id
from miraccl.bootstrap.join import connect
from miraccl.bootstrap.launch import FilePoint, Launch, PortPoint, detect_launch, meet
from miraccl.bootstrap.session import Session, solo
from miraccl.bootstrap.unique_id import UniqueId

__all__ = [
    "HUB",
    "Event",
    "FilePoint",
    "Launch",
    "Notice",
    "PeerLeft",
    "PeerLost",
    "PortPoint",
    "Root",
    "Session",
    "StatusRequest",
    "UniqueId",
    "connect",
    "create_root",
    "detect_launch",
    "get_unique_id",
    "meet",
    "solo",
]
