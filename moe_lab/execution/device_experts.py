"""The routed experts of a call whose groups only the device knows: its launch table, and a header read back."""

from moe_lab.arms import ARMS, ExpertStack
from moe_lab.arms.guard import blaming
from moe_lab.execution.device_routing import DeviceCall
from moe_lab.execution.state import CallState
from moe_lab.stream.provider import StreamedExperts
from moe_lab.stream.slots import split_waves
from moe_lab.stream.table_experts import TableExperts


def run_on_device(run: CallState, call: DeviceCall) -> None:
    """Fetch what was picked, where it is not at hand, and hand the work over as the device made it."""
    experts = run.layer.experts
    if not run.tokens:
        return
    if isinstance(experts, StreamedExperts):
        _leased(run, call, experts)
        return
    if not experts.complete:
        _bring(run, call)
    stack = experts.by_slot
    stack = run.layer.fused_stack(stack, experts.slots) if run.fused else stack
    _submit(run, call, stack)
    if not run.capturing:
        more = call.made.chunks.shape[0] - run.y.shape[0] * (run.y.shape[1] - run.fused)
        run.work.weight_bytes += (call.chunks() + more) * stack.expert_bytes


def _submit(run: CallState, call: DeviceCall, stack: ExpertStack) -> None:
    with run.submission() as ctx, blaming(run.arm, "experts_on_device", ARMS):
        run.arm.experts_on_device(run.rows, stack, call.work, run.y, ctx)  # type: ignore[attr-defined]


def _leased(run: CallState, call: DeviceCall, experts: StreamedExperts) -> None:
    """Lease what the header says was picked, as host routing would; where the cache has it elsewhere than the
    device looked, or in several waves, look again."""
    with run.phase("route"):
        run.clock.drain()
        header = call.read()
    chunks = header.chunks_for(run.ctx.chunk_rows)
    if experts.biases is not None:
        call.whose = header.whose(run.ctx.chunk_rows, len(call.made.chunks), run.x.device)
    cut = split_waves(header.picked(), experts.slots)
    run.settle_picks(header.picked())
    for wave in cut:
        with run.leased(wave, last=wave is cut[-1]) as stack:
            if len(cut) > 1 or not header.agrees(stack.slot_of):
                with run.phase("fetch"):
                    call.look_up(experts.device_table(stack.slot_of if len(cut) > 1 else None))
                run.verify(call.routing, None, {})
            _submit(run, call, stack)
            run.work.weight_bytes += sum(chunks[e] for e in wave) * stack.expert_bytes


def _bring(run: CallState, call: DeviceCall) -> None:
    """Wait for the header and fetch what it misses. LabError naming a pick that is still not to be had."""
    experts = run.layer.experts
    assert isinstance(experts, TableExperts)
    with run.phase("fetch"):
        run.clock.drain()
        header = call.read()
        run.hits = len(header.found())
        if not header.whole and experts.fetch is not None:
            wanted = header.wanted()
            run.misses, run.bytes_read = len(wanted), experts.fetch(wanted)
            call.look_up()
            call.send()
            header = call.read()
        header.refuse(experts.table)
