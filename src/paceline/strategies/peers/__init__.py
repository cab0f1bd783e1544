"""Training without a server: one pure machine per node, one rule and one citation per file.

Public: what an author of such a machine derives from, the events that `handle` gets and the actions that it returns.
"""

from paceline.core.actions import Track
from paceline.core.events import TimerFired
from paceline.core.peer_actions import Ask, Average, Exchange, Mix, PeerAction, Send
from paceline.core.peer_events import (
    Asked,
    Averaged,
    PeerEvent,
    PeerJoined,
    PeerLeft,
    Received,
    Sent,
    Started,
    Stepped,
)
from paceline.strategies.peers.base import Peer

__all__ = [
    "Ask",
    "Asked",
    "Average",
    "Averaged",
    "Exchange",
    "Mix",
    "Peer",
    "PeerAction",
    "PeerEvent",
    "PeerJoined",
    "PeerLeft",
    "Received",
    "Send",
    "Sent",
    "Started",
    "Stepped",
    "TimerFired",
    "Track",
]
