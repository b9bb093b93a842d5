"""Run libcachesim on sequences of keys: JSON on stdin, JSON on stdout. A process of its own, as some of its policies
abort or never return at the small sizes of these tests.

In: {"policies": [...], "capacities": [...], "sequences": [[key, ...], ...]}; out: {"policy/capacity/sequence": misses}.
"""

import json
import sys

import libcachesim

NEVER = 2**62


def misses(policy: str, capacity: int, keys: list[int]) -> int:
    """Requests that do not hit, every key of size 1."""
    cache = getattr(libcachesim, policy)(cache_size=capacity)
    coming: dict[int, int] = {}
    next_use = [0] * len(keys)
    for place in range(len(keys) - 1, -1, -1):
        next_use[place] = coming.get(keys[place], NEVER)
        coming[keys[place]] = place
    count = 0
    for place, key in enumerate(keys):
        request = libcachesim.Request()
        request.obj_id, request.obj_size, request.clock_time = key, 1, place
        request.next_access_vtime = next_use[place]
        count += not cache.get(request)
    return count


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    found = {
        f"{policy}/{capacity}/{number}": misses(policy, capacity, keys)
        for policy in asked["policies"]
        for capacity in asked["capacities"]
        for number, keys in enumerate(asked["sequences"])
    }
    json.dump(found, sys.stdout)
