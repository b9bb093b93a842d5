"""Commands on a model file and their options; the work of each is in the module of its name."""

from pathlib import Path
from typing import Annotated

import typer

from moe_lab.cli.options import File, Json, answer
from moe_lab.errors import LabError


def inspect(
    file: File,
    gib: Annotated[str | None, typer.Option(help="Memory for expert slots, GiB; several with commas: 8,16,24.")] = None,
    layouts: Annotated[
        bool, typer.Option("--layouts", help="One expert in each layout instead: bytes, decoding time, same values.")
    ] = False,
    layer: Annotated[int | None, typer.Option(help="With --layouts: the layer; default: the first.")] = None,
    device: Annotated[str | None, typer.Option(help="With --layouts: cpu (default) or cuda.")] = None,
    json: Json = False,
) -> None:
    """What a model file holds: MoE layers, formats, bytes. Reads the header alone, but for --layouts."""
    from moe_lab.cli.inspect import inspect_file, inspect_layouts

    if layouts and gib is not None:
        raise LabError("--gib counts expert slots, which --layouts does not show: give one of them.")
    if not layouts and (layer is not None or device is not None):
        raise LabError("--layer and --device go with --layouts; the table without it has every layer.")
    if layouts:
        rows, notes = inspect_layouts(file, layer, device=device or "cpu")
    else:
        rows, notes = inspect_file(file, gib, as_json=json)
    answer("inspect", rows, as_json=json, title=str(file), notes=notes)


def run(
    file: File,
    layer: Annotated[str, typer.Option(help="A layer number, or all.")] = "all",
    tokens: Annotated[int, typer.Option(help="Rows to run.")] = 512,
    arm: Annotated[
        str, typer.Option(help="auto, reference, per_token, table, gemv, grouped, mmq, mmq_folded or gemv_mmq.")
    ] = "auto",
    cache_gib: Annotated[
        float | None, typer.Option(help="Stream the experts through a cache of this many GiB.")
    ] = None,
    cache_slots: Annotated[int | None, typer.Option(help="Stream the experts through this many slots.")] = None,
    packed: Annotated[
        Path | None, typer.Option(help="With a cache: read the experts from this file of moe-lab pack.")
    ] = None,
    step_tokens: Annotated[
        int | None, typer.Option(help="Step by step through all layers, so many rows at a time, as decoding goes.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="With --step-tokens: which experts the cache keeps, as lru or random_oldest:5%.")
    ] = "lru",
    prefetch: Annotated[int, typer.Option(help="With --step-tokens: experts read ahead of the next layer.")] = 0,
    layout: Annotated[str, typer.Option(help="How experts are kept: raw, planar, tiles or auto.")] = "raw",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    recorded: Annotated[
        Path | None, typer.Option("--input", help="Activations (npz); default: activations.npz beside the file.")
    ] = None,
    json: Json = False,
) -> None:
    """Run MoE layers and show where the time went: route, fetch, compute."""
    from moe_lab.cli.run import replay_layers, run_layers

    if step_tokens is not None:
        rows, notes = replay_layers(
            file, layer=layer, tokens=tokens, step_tokens=step_tokens, arm=arm, cache_gib=cache_gib,
            cache_slots=cache_slots, policy=policy, prefetch=prefetch, packed=packed, device=device, recorded=recorded,
            layout=layout, as_json=json,
        )  # fmt: skip
        answer("run", rows, as_json=json, title=f"{file}: {tokens} tokens, {step_tokens} a step", notes=notes)
        return
    if policy != "lru" or prefetch:
        raise LabError("--policy and --prefetch go with --step-tokens: all rows at once ask for each expert once.")
    rows, notes = run_layers(
        file,
        layer=layer,
        tokens=tokens,
        arm=arm,
        cache_gib=cache_gib,
        cache_slots=cache_slots,
        packed=packed,
        device=device,
        recorded=recorded,
        layout=layout,
    )
    answer("run", rows, as_json=json, title=f"{file}: {tokens} tokens", notes=notes)


def parity(
    file: File,
    layer: Annotated[str, typer.Option(help="A layer number, or all.")] = "all",
    arms: Annotated[str, typer.Option(help="Two arms or more, with commas.")] = "gemv,mmq",
    recorded: Annotated[
        Path | None, typer.Option("--input", help="Activations (npz); default: activations.npz beside the file.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Rows; default: 512, or as many as were recorded.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="Bound on nmse_ab, or NAME=NUMBER with commas; exit code 1 when one is broken.")
    ] = None,
    why: Annotated[bool, typer.Option("--why", help="Also name causes and hazards (of arms gemv and mmq).")] = False,
    other: Annotated[
        Path | None, typer.Option(help="The same model in another file: arms run on both, or as gemv:other says.")
    ] = None,
    truth: Annotated[
        Path | None, typer.Option(help="The model whose weights errors are against; default: each side's own.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json: Json = False,
) -> None:
    """Whether arms agree on the same rows and picks, and by how much; gemv:q4_k: with experts quantised to q4_k."""
    from moe_lab.cli.parity import parity_rows

    rows, notes, ok = parity_rows(
        file, layer=layer, arms=arms, tokens=tokens, budget=budget, recorded=recorded, device=device, why=why,
        as_json=json, other=other, truth=truth,
    )  # fmt: skip
    answer("parity", rows, as_json=json, ok=ok, title=f"{file}: {arms}", notes=notes)


def pack(
    file: Annotated[Path, typer.Argument(help="A model; with --verify and without -o, a packed file.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The packed file to write.")] = None,
    order: Annotated[str, typer.Option(help="Rows of a layer by number (layer) or by coactivation.")] = "layer",
    trace: Annotated[Path | None, typer.Option(help="For coactivation: a routing trace of the model.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every row back and compare checksums; exit code 1 if one differs.")
    ] = False,
    json: Json = False,
) -> None:
    """Copy a model's experts into one file of aligned rows, each read at once and straight into its slot."""
    from moe_lab.cli.pack import pack_file, verify_file

    if out is None and not verify:
        raise LabError("pack wants -o OUT, the file to write; with --verify alone it checks one that is there.")
    rows, notes, ok = [], [], True
    if out is not None:
        rows, notes = pack_file(file, out, order=order, trace=trace, quiet=json)
    if verify:
        checked, more, ok = verify_file(file if out is None else out)
        rows, notes = (checked if out is None else rows), [*notes, *more]
    answer("pack", rows, as_json=json, ok=ok, title=str(file if out is None else out), notes=notes)
