"""Event logs written by hand: what a cache would have noted, at times that the test chooses."""

import pandas as pd

from moe_lab.replay import Story, stalls, tell
from moe_lab.stream.events import DEMAND, HIT, LATE, MISS, NONE, PREFETCH, EventLog, Kind

MS = 1_000_000


class Script:
    """One layer's cache with a clock of its own; times in ms."""

    def __init__(self, layer: int = 0) -> None:
        self.log = EventLog(most=4096, clock=lambda: 0)
        self.layer = layer

    def put(self, kind: Kind, at: float, expert: int = NONE, **more: int) -> None:
        self.log.put(int(kind), self.layer, expert, at_ns=int(at * MS), **more)

    def read(
        self, expert: int, queued: float, started: float, done: float, *, ahead: bool = False, request: int = NONE,
        took: tuple[int, int] | None = None, ready: float | None = None, reader: int = 0, nbytes: int = 1000,
    ) -> int:  # fmt: skip
        """A read from its begin to its end; `took`: (expert, read) that lost its slot to it. Its name."""
        name, lane = self.log.name(), PREFETCH if ahead else DEMAND
        if took is not None:
            self.put(Kind.EVICTED, queued, took[0], read=took[1], request=name, value=lane)
        self.put(Kind.QUEUED, queued, expert, read=name, request=request, value=lane)
        self.put(Kind.STARTED, started, expert, read=name, value=reader)
        self.put(Kind.DONE, done, expert, read=name, value=reader)
        self.put(Kind.READY, done if ready is None else ready, expert, read=name, value=nbytes)
        return name

    def ask(self, at: float, count: int = 1) -> int:
        """A request comes. Its name."""
        name = self.log.name()
        self.put(Kind.ASKED, at, request=name, value=count)
        return name

    def use(self, request: int, at: float, expert: int, read: int, how: int = HIT) -> None:
        self.put(Kind.USED, at, expert, request=request, read=read, value=how)

    def grant(self, request: int, at: float, *waits: tuple[float, float], slot: bool = False) -> None:
        """It has everything at `at`, blocked in `waits`."""
        kind = Kind.SLOT_WAIT if slot else Kind.BYTES_WAIT
        for begin, end in waits:
            self.put(kind, end, request=request, value=int(begin * MS))
        self.put(Kind.GRANTED, at, request=request)
        self.put(Kind.ENDED, at, request=request)

    def miss(self, at: float, expert: int, started: float, done: float, **more: object) -> int:
        """A request for one absent expert that waits until it is read. The read's name."""
        request = self.ask(at)
        read = self.read(expert, at, started, done, request=request, **more)  # type: ignore[arg-type]
        self.use(request, at, expert, read, MISS)
        self.grant(request, done, (at, done))
        return read

    def predict(self, expert: int, fate: int, at: float = 0.0) -> None:
        self.put(Kind.PREDICTED, at, expert, value=fate)

    def step(self, number: int) -> None:
        self.log.step = number

    @property
    def story(self) -> Story:
        return tell(self.log.table(), self.log.lost)


def five_fates() -> Story:
    """One read ahead of each fate: 1 timely, 2 late, 3 useless, 4 harmful (it pushed out 9, which was wanted), and 5
    given up.
    """
    s = Script()
    old = s.miss(0, 9, 0, 1)
    timely, late = s.read(1, 2, 2, 3, ahead=True), s.read(2, 2, 3, 8, ahead=True)
    s.read(3, 2, 2, 4, ahead=True)
    s.read(4, 2, 2, 4, ahead=True, took=(9, old))
    dropped = s.log.name()
    s.put(Kind.QUEUED, 2, 5, read=dropped, value=PREFETCH)
    s.put(Kind.DROPPED, 3, 5, read=dropped)
    for expert in (1, 2, 3, 4):
        s.predict(expert, 1, at=2)
    one = s.ask(5, 3)
    s.use(one, 5, 1, timely, HIT)
    s.use(one, 5, 2, late, LATE)
    again = s.read(9, 5, 5, 6, request=one)
    s.use(one, 5, 9, again, MISS)
    s.grant(one, 8, (5, 8))
    return s.story


def waited() -> pd.DataFrame:
    """The stalls of that story."""
    return stalls(five_fates(), {0: range(4)})


def replayed(layers: int = 3, steps: int = 5) -> pd.DataFrame:
    """Rows as lab.replay has them: each 10 ms, of which 1 + the layer's number waited for bytes."""
    rows = []
    for step in range(steps):
        for layer in range(layers):
            wait = 1.0 + layer
            part = {"t_host_block_ms": 0.0, "route_gpu_ms": 1.0, "select_host_ms": 0.1, "plan_ms": 0.4, "h2d_ms": 0.0}
            done = {"shared_gpu_ms": 1.0, "shared_hidden_ms": 0.0, "launch_ms": 0.0, "other_ms": 0.5}
            left = 10 - wait - sum(part.values()) - 1.5
            about = {"step": step, "layer": layer, "arm": "gemv", "backend": "torch", "wall_ms": 10.0}
            counts = {"hits": 2, "misses": 2, "bytes_read": 2000}
            rows.append({**about, **part, "demand_wait_ms": wait, "routed_gpu_ms": left, **done, **counts})
    return pd.DataFrame(rows)


def falling() -> pd.DataFrame:
    """Rows of a waterfall: 10 ms a step, 3 of them waits."""
    parts = {
        "all resident": 5.0,
        "routing": 1.0,
        "hidden I/O": 0.5,
        "late prefetch": 1.0,
        "demand stall": 2.0,
        "other": 0.5,
    }
    lines = {
        "all at hand": 7.0,
        "optimal policy, bypass": 7.5,
        "optimal policy": 8.0,
        "perfect prefetch": 7.0,
        "measured": 10.0,
    }
    rows = [("part", name, ms, 4) for name, ms in parts.items()] + [("line", name, ms, 4) for name, ms in lines.items()]
    return pd.DataFrame(rows, columns=["kind", "what", "ms_per_step", "steps"])


def spans() -> pd.DataFrame:
    """A timeline of one call: route, a fetch, two reads (one ahead), a copy, and the computation that waited."""
    columns = ["span", "lane", "what", "begin_ms", "end_ms", "step", "layer", "expert", "lane_kind", "after"]
    rows = [
        (0, "host", "route", 0.0, 1.0, 0, 0, -1, "", -1), (1, "host", "fetch", 1.0, 4.0, 0, 0, -1, "", -1),
        (2, "reader 0", "read", 1.2, 3.0, 0, 0, 5, "demand", 1),
        (3, "reader 1", "read", 2.0, 5.0, 0, 1, 7, "prefetch", -1),
        (4, "copy", "copy", 3.0, 3.5, 0, 0, 5, "demand", 2), (5, "compute", "compute", 4.0, 9.0, 0, 0, -1, "", 4),
        (6, "side", "shared", 1.0, 2.0, 0, 0, -1, "", -1),
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=columns)
