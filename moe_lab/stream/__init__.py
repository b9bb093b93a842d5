"""Experts streamed from a file through a fixed number of slots.

From the ground up: `policy` (who leaves), `slots` (who is where; shared with the simulator), `source` (which bytes),
`reader` (threads), `arena` (memory), `fills` (an expert's states), `lease` and `cache` (the public face), `provider`
(what a layer computes with).
"""
