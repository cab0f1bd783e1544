"""Which strategy meets which fault, and where: a fixed design, so that a commit always runs the same tests.

- In the simulator, where a run takes a tenth of a second, every strategy meets every event that a scenario knows.
- On real processes each fault strikes once under each exchange of updates, and every strategy is struck once.

`make soak` runs all pairs on real processes.
"""

from clusters import event

from paceline import strategies

# -- in the simulator --------------------------------------------------------------------------------------------------

SIMULATED = {
    "slow": event("slow", 0.1, worker=0, for_=0.5, factor=6.0),
    "slow_link": event("slow_link", 0.1, worker=0, for_=0.5, factor=20.0),
    "pause": event("pause", 0.15, worker=1, for_=0.6),
    "crash": event("crash", 0.12, worker=1),
    "rejoin": event("crash", 0.12, worker=1) + event("rejoin", 0.4, worker=1),
    "join": event("join", 0.17, count=2, speed=0.7),
    "leave": event("leave", 0.16, worker=0),
    "partition": event("partition", 0.1, workers=[0, 2], for_=0.4),
    "duplicate": event("duplicate", 0.0, share=0.5),
    "reorder": event("reorder", 0.05, share=0.5, worker=0, for_=0.6),
    "server_crash": event("server_crash", 0.6, for_=0.2),
}
SIMULATED_PAIRS = [(n, k) for n in (*strategies.names(), *strategies.peer_names()) for k in SIMULATED]

# -- on real processes -------------------------------------------------------------------------------------------------

CENTRAL = {
    name: {"fastest_k": "fastest_k:k=2", "k_async": "k_async:k=2", "adaptive_k": "adaptive_k:start=2"}.get(name, name)
    for name in strategies.names()
}
PEERS = {
    "gossip": ["gossip", "gossip:form=pull", "gossip:form=weighted"],
    "adaptive_gossip": ["adaptive_gossip:warmup=2"],
    "elastic": ["elastic:period=2"],
    "adaptive_elastic": ["adaptive_elastic:warmup=2"],
    "local_sgd": ["local_sgd:period=2"],
}
FAULTS = {  # and the events of a scenario that each is made of
    "slowest killed": ("crash",),
    "fastest killed": ("crash",),
    "parked killed": (),  # by the test
    "stopped": ("pause",),
    "newcomer": ("join",),
    "left and back": ("leave", "rejoin"),
    "bad network": ("slow", "slow_link", "partition", "duplicate", "reorder"),
    "server killed": ("server_crash",),
}
# A node that waits for an average has a grant: it is never parked without one.
IMPOSSIBLE = {("local_sgd:period=2", "parked killed")}
ALL_PAIRS = [
    pair
    for spec in (*CENTRAL.values(), *(spec for specs in PEERS.values() for spec in specs))
    for pair in ((spec, fault) for fault in FAULTS)
    if pair not in IMPOSSIBLE
]
PAIRS = [
    # with a server
    ("bsp", "slowest killed"),
    ("adaptive_k:start=2", "slowest killed"),
    ("asp", "fastest killed"),
    ("balanced", "fastest killed"),
    ("ssp", "parked killed"),
    ("fastest_k:k=2", "parked killed"),
    ("dasp", "stopped"),
    ("adaptive_sync", "stopped"),
    ("dssp", "newcomer"),
    ("k_async:k=2", "newcomer"),
    ("dssp", "left and back"),
    ("bsp", "bad network"),
    ("adaptive_k_load", "server killed"),
    # without one
    ("local_sgd:period=2", "slowest killed"),
    ("elastic:period=2", "fastest killed"),
    ("gossip:form=weighted", "parked killed"),
    ("adaptive_elastic:warmup=2", "stopped"),
    ("gossip:form=pull", "newcomer"),
    ("gossip", "left and back"),
    ("adaptive_gossip:warmup=2", "bad network"),
    ("gossip", "server killed"),
    ("adaptive_gossip:warmup=2", "server killed"),
    ("elastic:period=2", "server killed"),
    ("adaptive_elastic:warmup=2", "server killed"),
    ("local_sgd:period=2", "server killed"),
]


def name_of(spec: str) -> str:
    return spec.partition(":")[0]
