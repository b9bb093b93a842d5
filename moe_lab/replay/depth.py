"""How many reads were under way at any time."""

import numpy as np

from moe_lab.replay.story import Story


class Depth:
    """Reads queued and not yet done, of both lanes, as a step function of time."""

    def __init__(self, story: Story) -> None:
        changes = []
        for read in story.reads.values():
            end = read.done_ns or read.ready_ns
            if read.queued_ns and end:
                changes += [(read.queued_ns, 1), (end, -1)]
        changes.sort()
        self._at = np.array([at for at, _ in changes], np.int64)
        self._depth = np.cumsum([step for _, step in changes], dtype=np.int64)

    def over(self, begin_ns: int, end_ns: int) -> dict[str, float]:
        """queue_depth_p50 (by time, where any read was under way; NaN where none was) and queue_depth_max."""
        first, last = np.searchsorted(self._at, [begin_ns, end_ns], side="right")
        edges = np.array([begin_ns, *self._at[first:last], end_ns])
        before = self._depth[first - 1] if first else 0
        depth = np.array([before, *self._depth[first:last]])
        weight = np.diff(edges)
        busy = (depth > 0) & (weight > 0)
        if not busy.any():
            return {"queue_depth_p50": float("nan"), "queue_depth_max": 0}
        depth, weight = depth[busy], weight[busy]
        order = np.argsort(depth, kind="stable")
        reached = np.cumsum(weight[order])
        middle = depth[order][np.searchsorted(reached, reached[-1] / 2)]
        return {"queue_depth_p50": float(middle), "queue_depth_max": int(depth.max())}
