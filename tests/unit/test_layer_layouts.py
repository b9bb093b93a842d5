"""How a layer keeps its experts: raw, in planes or in tiles; which arms take which, and by which names."""

from pathlib import Path

import pytest
import torch

import moe_lab as lab
from moe_lab.arms import ARMS, best_layout, get_arm
from moe_lab.arms.names import split_layout, with_layout
from moe_lab.arms.table import own_path, write_table
from moe_lab.arms.table_file import Row
from moe_lab.bench import roof
from moe_lab.bench.cell import Settings
from moe_lab.bench.laid import laid
from moe_lab.bench.tune import tuned
from moe_lab.errors import LabError, LabTypeError
from moe_lab.formats import Planar, Tiled, quantize
from moe_lab.formats.layouts import LAYOUTS, REPACKED
from moe_lab.layer import MoELayer
from moe_lab.spec import MoESpec, RouterSpec
from moe_lab.system.environment import cpu_name
from tests.support.decode_layers import decode_layer, decode_rows


@pytest.fixture(scope="module")
def raw() -> MoELayer:
    return decode_layer(experts=4, top_k=2)


@pytest.mark.parametrize("layout", REPACKED)
def test_one_copy_is_kept_and_gives_every_bit_back(raw: MoELayer, layout: str) -> None:
    layer = raw.repacked(layout)
    assert layer.experts.layout == layer.shared_stack.layout == layout  # type: ignore[union-attr]
    assert layer.repacked(layout) is layer
    assert layer.experts.formats == raw.experts.formats
    back = layer.repacked("raw")
    for a, b, c in zip(*(m.experts.stack.parts.values() for m in (raw, layer, back)), strict=True):  # type: ignore[union-attr]
        assert torch.equal(a.data, c.data)
        assert list(b.tensors) == ["data"]
        assert b.nbytes == a.nbytes, "k-quants of these widths need no padding"
    x = decode_rows(3)
    for name, arm in ARMS.items():
        if arm.reads(layout, None) is None and name not in ("table", "mmq_folded"):  # type: ignore[attr-defined]
            assert torch.equal(layer(x, name).out, raw(x, name).out), name


@pytest.mark.parametrize("layout", REPACKED)
def test_a_model_is_opened_in_a_layout(layout: str, tmp_path: Path) -> None:
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(2))
    with lab.open(lab.sample(), layout=layout) as ckpt, lab.open(lab.sample()) as plain:
        mine, raw = ckpt.layer(1), plain.layer(1)
        assert torch.equal(mine(x, "gemv").out, raw(x, "gemv").out)
        assert mine(x).arm == "gemv"
        with lab.ExpertCache(slots=2) as cache:
            streamed = ckpt.layer(1, cache=cache)
            with pytest.raises(LabError, match=f"kept in layout '{layout}' as they come: open the model with"):
                streamed.repacked("raw")
    with pytest.raises(LabError, match="layout is 'tile'; wanted 'raw', 'planar', 'tiles', 'auto'"):
        lab.open(lab.sample(), layout="tile")


@pytest.mark.parametrize(
    ("layout", "formats", "message"),
    [
        ("planar", ("q8_0", "q8_0", "int8_g64"), "layer 2: down cannot be kept in layout 'planar': int8_g64 has no"),
        ("tiles", ("mxfp4", "mxfp4", "mxfp4"), r"layer 2: gate .* mxfp4 has no tiles; formats that have: q2_k, q3_k"),
        ("columns", ("q8_0",) * 3, "layout is 'columns'; wanted 'raw', 'planar', 'tiles'"),
    ],
)
def test_what_there_is_no_layout_for_is_refused(layout: str, formats: tuple[str, ...], message: str) -> None:
    with pytest.raises(LabError, match=message):
        decode_layer(formats, experts=2, top_k=1).repacked(layout)


def test_a_shared_expert_without_the_layout_stays_raw() -> None:
    layer = decode_layer(("q8_0",) * 3, experts=2, top_k=1, shared_formats=("bf16",) * 3).repacked("tiles")
    assert layer.shared_stack is not None
    assert (layer.experts.layout, layer.shared_stack.layout) == ("tiles", "raw")
    assert layer(decode_rows(2), "gemv").out.isfinite().all()


@pytest.mark.parametrize("layout", REPACKED)
def test_tensors_in_a_layout_make_a_layer_in_it(layout: str) -> None:
    q = quantize(torch.randn(3, 256, 256, generator=torch.Generator().manual_seed(1)), "q2_k")
    kept, spec = REPACKED[layout].from_raw(q), MoESpec(RouterSpec(3, 1), 256, 256)
    router = torch.randn(3, 256, generator=torch.Generator().manual_seed(2))
    layer = MoELayer.from_tensors(spec, router=router, gate=kept, up=kept, down=kept)
    assert layer.experts.layout == layout
    with pytest.raises(LabError, match=f"gate lies in layout 'raw', up in '{layout}'"):
        MoELayer.from_tensors(spec, router=router, gate=q, up=kept, down=q)
    assert torch.equal(kept[1].to_raw().data, q[1].data)
    assert torch.equal(kept.to("cpu")[2].stacked()[0].data, kept[2].data)
    with pytest.raises(LabError, match="single matrix"):
        kept[0][0]


@pytest.mark.wrong_types
def test_a_single_product_takes_raw_tensors() -> None:
    kept = Planar.from_raw(quantize(torch.randn(16, 256, generator=torch.Generator().manual_seed(1)), "q2_k"))
    with pytest.raises(LabTypeError, match=r"q is a moe_lab\.Planar"):
        lab.matmul(torch.zeros(1, 256), kept, "gemv", "bf16")  # type: ignore[arg-type]
    assert lab.matmul(torch.ones(1, 256), kept.to_raw(), "gemv", "bf16").isfinite().all()


@pytest.mark.parametrize("kind", [Planar, Tiled])
def test_a_layout_is_of_matrices_that_have_it(kind: type) -> None:
    with pytest.raises(LabError, match="only matrices"):
        kind.from_raw(quantize(torch.randn(256), "q2_k"))
    with pytest.raises(LabError, match=f"layout '{kind.layout}': bf16 has no"):  # type: ignore[attr-defined]
        kind.from_raw(quantize(torch.randn(16, 256), "bf16"))


class Own:
    """An arm of the user's, which says nothing of layouts."""

    name = "own"

    def supports(self, formats, backend: str) -> str | None:
        return None

    def experts(self, x, stack, schedule, groups, y, ctx) -> None:
        ARMS["reference"].experts(x, stack, schedule, groups, y, ctx)


class Reading(Own):
    name = "reading"

    def reads(self, layout: str, activation: str | None) -> str | None:
        return None if layout == "planar" else "planes alone"


def test_an_arm_of_the_users_says_which_layouts_it_reads(raw: MoELayer) -> None:
    x, planar = decode_rows(2), raw.repacked("planar")
    with pytest.raises(
        LabError, match=r"arm 'own' cannot run .* layout 'planar': layer.repacked\('raw'\) has raw ones"
    ):
        planar(x, Own())
    assert torch.equal(planar(x, Reading()).out, raw(x, Own()).out)
    with pytest.raises(LabError, match="arm 'reading' cannot run this layer on torch: planes alone"):
        raw.repacked("tiles")(x, Reading())


def test_comparisons_and_benchmarks_name_layouts(
    raw: MoELayer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_LAB_CACHE", str(tmp_path))
    known = roof.Roof(cpu_name(), "none", 100.0, 90.0, 1.0, 3.0, {"fp32": 0.5, "bf16": 1.0, "int8": 2.0})
    monkeypatch.setattr(roof, "_cpu_roof", lambda name: known)
    x = decode_rows(2)
    report = lab.compare(raw, x, ["gemv", "gemv@tiles", "reference@planar"])
    assert list(report.outputs) == ["gemv", "gemv@tiles", "reference@planar"]
    assert report.table["bit_equal"].tolist() == [True, False, False]
    quick = Settings(cell_ms=1.0, least=1, states=("cold",))
    table = lab.bench(raw, x, arms=["gemv@tiles", "auto@planar", "mmq@tiles"], settings=quick)
    assert table["arm"].tolist() == ["gemv@tiles", "auto@planar (gemv)", "mmq@tiles"]
    assert table["status"].tolist() == ["PASSED", "PASSED", "UNSUPPORTED"]
    for bad, message in (("gemv@tile", "layout is 'tile'"), ("gem@tiles", "no arm is called 'gem@tiles'")):
        with pytest.raises(LabError, match=message):
            lab.bench(raw, x, arms=[bad])
    layer, arm = laid(raw, "gemv@tiles")
    assert (layer.experts.layout, arm) == ("tiles", "gemv")
    assert laid(raw, "gemv@tiles")[0] is layer, "repacked once"


def test_raw_is_named_where_it_is_not_the_layers_own(raw: MoELayer) -> None:
    report = lab.compare(raw.repacked("planar"), decode_rows(2), ["gemv", "gemv@raw", "gemv@tiles"])
    assert list(report.outputs) == ["gemv", "gemv@raw", "gemv@tiles"]
    assert report.attribution is not None


def test_names_of_arms_in_layouts() -> None:
    assert [with_layout("gemv", layout) for layout in LAYOUTS] == ["gemv", "gemv@planar", "gemv@tiles"]
    assert split_layout("gemv@tiles") == ("gemv", "tiles")
    assert split_layout("gemv") == ("gemv", "raw")
    assert {"gemv", "gemv@planar", "gemv@tiles"} <= set(tuned("cuda"))
    assert "mmq@tiles" not in tuned("cuda")
    assert not any("@" in name for name in tuned("cpu")), "torch decodes raw blocks whatever the layout"


def test_a_table_ranks_layouts_and_auto_stays_in_its_own(
    raw: MoELayer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_LAB_CACHE", str(tmp_path))
    formats, spec, mine = raw.experts.formats, raw.spec, own_path(cpu_name())
    shape = (spec.d_routed, spec.d_expert, spec.num_experts, spec.top_k)
    arms = ("gemv@tiles", "mmq", "reference@planar", "gemv")
    write_table(mine, cpu_name(), [Row(formats, *shape, 1, arms, (1.0, 2.0, 3.0, 4.0))], {})
    try:
        assert best_layout("torch", formats, spec) == "tiles"
        assert best_layout("torch", ("q6_k",) * 3, spec) == "raw"
        chosen = {layout: get_arm("auto", formats, "torch", spec, 1, layout).name for layout in LAYOUTS}
        assert chosen == {"raw": "mmq", "planar": "reference", "tiles": "gemv"}
        with lab.open(lab.sample(), layout="auto") as ckpt:
            assert ckpt.layer(1).experts.layout == "tiles", "the nearest row of the same formats"
            assert ckpt.expert_source.layout == "raw"
    finally:
        mine.unlink()
        write_table(tmp_path / "other.json", "other", [], {})  # tables are read anew


@pytest.mark.parametrize(
    ("arms", "layout"),
    [
        (("sold_elsewhere@tiles", "gemv@planar"), "planar"),
        (("mmq@tiles", "gemv"), "raw"),
        (("gemv@tiles", "gemv"), "raw"),
        (("grouped@tiles",), "raw"),
    ],
    ids=["an arm that there is not", "an arm that reads no tiles", "a format without tiles", "none can run"],
)
def test_what_cannot_run_decides_no_layout(raw: MoELayer, arms: tuple[str, ...], layout: str, monkeypatch) -> None:
    monkeypatch.setattr("moe_lab.arms.ranked", lambda *asked: arms)
    formats = ("mxfp4",) * 3 if arms[0] == "gemv@tiles" else raw.experts.formats
    assert best_layout("torch", formats, raw.spec) == layout


def test_a_repacked_layer_is_written_as_the_raw_one(tmp_path: Path) -> None:
    with lab.open(lab.sample()) as ckpt:
        layers = {number: ckpt.layer(number) for number in ckpt.moe_layers[:1]}
    wanted = lab.write_gguf(tmp_path / "raw.gguf", layers)
    got = lab.write_gguf(tmp_path / "tiles.gguf", {n: layer.repacked("tiles") for n, layer in layers.items()})
    assert got.read_bytes() == wanted.read_bytes()
