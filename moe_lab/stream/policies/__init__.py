"""Eviction policies, one a file; `moe_lab.stream.policy` makes them by name.

lru, random_oldest, lfu (with lfu_decay and lfuda), s3fifo, static, predicted and fitted (both `scored`), over two
structures: `ranking` (lowest value first) and `recency` (longest unused first). `base` says what a cache asks of a
policy.
"""

from moe_lab.stream.policies.base import Key, Policy, PolicyExtras

__all__ = ["Key", "Policy", "PolicyExtras"]
