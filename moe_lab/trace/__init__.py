"""Routing traces: which experts each token took in each layer, as arrays, as Parquet, and from other people's files.

`record` is the trace itself, `writer` writes one piece by piece in bounded memory, `parquet` reads and scans, `tables`
imports CSV and npz, `rows` turns rows of any order into the [T, L, K] grid, `summary` counts. A trace knows nothing
about models or caches.
"""

from moe_lab.trace.parquet import read_last, read_parquet, scan
from moe_lab.trace.record import RoutingTrace
from moe_lab.trace.summary import summarize
from moe_lab.trace.values import NO_PICK
from moe_lab.trace.writer import TraceWriter, write_parquet

__all__ = ["NO_PICK", "RoutingTrace", "TraceWriter", "read_last", "read_parquet", "scan", "summarize", "write_parquet"]
