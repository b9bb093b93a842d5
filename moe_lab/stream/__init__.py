"""Experts streamed from a file through a fixed number of slots.

From the ground up: `policy` (who leaves), `slots` (who is where; shared with the simulator); `source` (which bytes),
`packed` and `memory_source` (the same from elsewhere), `access` and `direct` (how files are read), `jobs` and `reader`
(threads), `memory` and `arena` (where bytes go), `fills` (an expert's states), `lease` and `cache` (the public face),
`provider` (what a layer computes with). Beside them `pack`, `calibrate`, `verify`, `faults`.
"""
