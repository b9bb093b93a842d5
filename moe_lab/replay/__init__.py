"""`lab.replay`: all MoE layers of a model on recorded inputs, and where every millisecond and every byte went.

run, Recording     the driver and what it leaves                          lab.plot.steps, lab.plot.timeline
ledger, summary    what became of each expert that was read ahead         lab.plot.prefetch
timeline           spans by lane; to_perfetto writes them as a trace
waterfall          from all resident to the wall, and its bounds          lab.plot.waterfall
widths             how many experts are worth reading ahead
overhead           what the record itself costs, level by level
stalls             each wait for bytes with its one cause                 lab.plot.stalls, lab.plot.wait_ecdf
"""

from moe_lab.replay.driver import Recording, replay, run
from moe_lab.replay.ledger import ledger, summary
from moe_lab.replay.levels import overhead
from moe_lab.replay.rows import COLUMNS
from moe_lab.replay.stalls import stalls
from moe_lab.replay.story import Story, tell
from moe_lab.replay.timeline import timeline, to_perfetto
from moe_lab.replay.watch import LEVELS
from moe_lab.replay.waterfall import waterfall
from moe_lab.replay.widths import widths

__all__ = [
    "COLUMNS",
    "LEVELS",
    "Recording",
    "Story",
    "ledger",
    "overhead",
    "replay",
    "run",
    "stalls",
    "summary",
    "tell",
    "timeline",
    "to_perfetto",
    "waterfall",
    "widths",
]
