"""Rendezvous of the ranks of a job, and the control plane that connects them while it runs."""

from miraccl.bootstrap.contract import Session
from miraccl.bootstrap.events import HUB, Event, Notice, PeerLeft, PeerLost, StatusRequest
from miraccl.bootstrap.hub import HubServer, create_hub, get_unique_id
from miraccl.bootstrap.join import connect
from miraccl.bootstrap.launch import (
    FileRendezvous,
    Launch,
    PortRendezvous,
    detect_launch,
    join_launch,
)
from miraccl.bootstrap.memory import InMemoryJob
from miraccl.bootstrap.session import single_rank_session
from miraccl.bootstrap.unique_id import UniqueId

__all__ = [
    "HUB",
    "Event",
    "FileRendezvous",
    "HubServer",
    "InMemoryJob",
    "Launch",
    "Notice",
    "PeerLeft",
    "PeerLost",
    "PortRendezvous",
    "Session",
    "StatusRequest",
    "UniqueId",
    "connect",
    "create_hub",
    "detect_launch",
    "get_unique_id",
    "join_launch",
    "single_rank_session",
]
