"""`lab.open`: what opens, what is refused, and that a layer is the file's layer."""

from pathlib import Path
from typing import Any

import pytest
import torch

import moe_lab as lab
from moe_lab.families import FAMILIES, Family, gguf_file
from moe_lab.layer import MoELayer, SharedWeights
from tests.support.tiny_gguf import (
    D_EXPERT,
    D_MODEL,
    EXPERTS,
    TOP_K,
    entry,
    raw_gguf,
    stored_weights,
    tensor_row,
    text,
    tiny_weights,
)
from tests.support.tiny_gguf import write_tiny_qwen2moe as write_tiny

STRING = 8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(9, D_MODEL, generator=torch.Generator().manual_seed(5))


def refusal(path: Path, **more: Any) -> lab.CheckpointError:
    with pytest.raises(lab.CheckpointError) as caught:
        lab.open(path, **more)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return caught.value


class TestOpens:
    def test_checkpoint_describes_the_model(self, tiny: Path) -> None:
        ckpt = lab.open(tiny)
        spec = ckpt.spec
        assert spec is not None
        assert (spec.num_experts, spec.top_k, spec.d_model, spec.d_expert) == (EXPERTS, TOP_K, D_MODEL, D_EXPERT)
        assert (spec.family, spec.router.normalize, ckpt.moe_layers) == ("qwen2_moe", False, [0, 1])
        assert ckpt.tensors["blk.0.ffn_gate_exps.weight"].shape == (EXPERTS, D_EXPERT, D_MODEL)
        assert "qwen2_moe" in repr(ckpt)

    def test_path_may_be_text(self, tiny: Path) -> None:
        assert lab.open(str(tiny)).moe_layers == [0, 1]

    def test_widths_may_be_left_to_the_shapes(self, tmp_path: Path) -> None:
        keys = {"expert_feed_forward_length": None, "expert_shared_feed_forward_length": None}
        spec = lab.open(write_tiny(tmp_path / "old.gguf", keys=keys)).spec
        assert spec is not None
        assert spec.d_expert == D_EXPERT
        assert spec.shared is not None
        assert spec.shared.d_expert == D_EXPERT

    @pytest.mark.parametrize(
        ("keys", "field", "value"),
        [
            ({"expert_weights_norm": True}, "normalize", True),
            ({"expert_weights_norm": False}, "normalize", False),
            ({"expert_weights_scale": 2.5}, "scale", 2.5),
            ({"expert_weights_scale": 0.0}, "scale", 1.0),
            ({"expert_gating_func": 1}, "score", "softmax"),
        ],
        ids=["norm-on", "norm-off", "scale-2.5", "scale-0-is-unset", "gating-softmax"],
    )
    def test_settings_in_the_file_reach_the_router(self, tmp_path: Path, keys: dict, field: str, value: object) -> None:
        spec = lab.open(write_tiny(tmp_path / "set.gguf", keys=keys, layers=1)).spec
        assert spec is not None
        assert getattr(spec.router, field) == value

    @pytest.mark.parametrize("arch", ["llama", "qwen2moe"])
    def test_file_without_moe_layers_has_no_spec(self, tmp_path: Path, arch: str) -> None:
        path = tmp_path / "dense.gguf"
        rows = (tensor_row("blk.0.ffn_up.weight", (4, 2), 0, 0),)
        path.write_bytes(raw_gguf((entry("general.architecture", STRING, text(arch)),), rows, bytes(32)))
        ckpt = lab.open(path)
        assert ckpt.spec is None
        assert ckpt.moe_layers == []
        assert torch.equal(ckpt.read("blk.0.ffn_up.weight"), torch.zeros(2, 4))
        with pytest.raises(lab.LabError, match="is dense: it has no MoE layer"):
            ckpt.layer(0)

    def test_a_family_of_ones_own_opens_another_architecture(self, tmp_path: Path) -> None:
        path = write_tiny(tmp_path / "mine.gguf")
        path.write_bytes(path.read_bytes().replace(b"qwen2moe", b"ownarchi"))
        assert lab.open(path).spec is None
        mine = Family(name="mine", gguf=gguf_file("ownarchi"), shared="gated", router={"normalize": True})
        spec = lab.open(path, family=mine).spec
        assert spec is not None
        assert (spec.family, spec.router.normalize) == ("mine", True)


class TestRefusals:
    @pytest.mark.parametrize(
        ("keys", "reason", "said"),
        [
            ({"expert_used_count": 9}, "model shape", ("9", "8")),
            ({"expert_count": 16}, "model shape", ("ffn_gate_inp", "[8, 256]", "[16, 256]")),
            ({"embedding_length": 512}, "model shape", ("[8, 256]", "[8, 512]")),
            ({"expert_feed_forward_length": 512}, "model shape", ("ffn_gate_exps", "[8, 512, 256]")),
            ({"expert_shared_feed_forward_length": 512}, "model shape", ("ffn_gate_shexp", "[512, 256]")),
            ({"expert_count": None}, "missing key", ("qwen2moe.expert_count",)),
            ({"expert_used_count": 0}, "value", ("expert_used_count", "0")),
            ({"embedding_length": 256.0}, "value", ("embedding_length", "256.0")),
            ({"expert_weights_norm": 1}, "value", ("expert_weights_norm", "bool")),
            ({"expert_gating_func": 2}, "value", ("expert_gating_func", "softmax")),
        ],
        ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else None,
    )
    def test_metadata_that_does_not_fit_the_tensors(self, tmp_path: Path, keys: dict, reason: str, said: tuple) -> None:
        error = refusal(write_tiny(tmp_path / "bad.gguf", keys=keys, layers=1))
        assert error.reason == reason
        assert all(word in str(error) for word in said)

    @pytest.mark.parametrize("name", ["ffn_gate_inp", "ffn_up_exps", "ffn_down_shexp", "ffn_gate_inp_shexp"])
    def test_a_missing_tensor_is_named(self, tmp_path: Path, name: str) -> None:
        error = refusal(write_tiny(tmp_path / "bad.gguf", drop=(f"blk.1.{name}.weight",)))
        assert (error.reason, error.tensor) == ("missing tensor", f"blk.1.{name}.weight")

    def test_all_missing_tensors_of_a_layer_are_listed(self, tmp_path: Path) -> None:
        drop = tuple(f"blk.0.{name}.weight" for name in ("ffn_up_exps", "ffn_up_shexp"))
        message = str(refusal(write_tiny(tmp_path / "bad.gguf", drop=drop)))
        assert all(name in message for name in drop)

    @pytest.mark.parametrize("kind", ["folder", "safetensors", "missing", "empty", "text"])
    def test_what_is_no_model(self, tmp_path: Path, kind: str) -> None:
        path = tmp_path / ("model.safetensors" if kind == "safetensors" else "thing")
        if kind == "folder":
            path.mkdir()
        elif kind != "missing":
            path.write_bytes({"safetensors": b"x", "empty": b"", "text": b"hello there"}[kind])
        reasons = {
            "folder": "missing part",
            "safetensors": "header length",
            "missing": "not found",
            "empty": "truncated",
        }
        assert refusal(path).reason == reasons.get(kind, "magic")

    def test_unknown_family_is_refused(self, tiny: Path) -> None:
        with pytest.raises(lab.LabError, match="qwen2_moe"):
            lab.open(tiny, family="nope")

    @pytest.mark.parametrize("layer", [-1, 2, "0", None])
    @pytest.mark.wrong_types
    def test_layer_that_is_not_there(self, tiny: Path, layer: Any) -> None:
        with pytest.raises(lab.LabError, match="0, 1"):
            lab.open(tiny).layer(layer)

    def test_experts_of_a_type_without_a_kernel(self, tmp_path: Path) -> None:
        """Opens and describes itself; only building the layer is refused, naming the tensor and its type."""
        path = write_tiny(tmp_path / "iq.gguf", layers=1)
        data = path.read_bytes()
        row = b"blk.0.ffn_up_exps.weight" + data[data.index(b"blk.0.ffn_up_exps.weight") + 24 :][:28]
        path.write_bytes(data.replace(row + b"\x0a\0\0\0", row + b"\x10\0\0\0"))
        ckpt = lab.open(path)
        assert ckpt.tensors["blk.0.ffn_up_exps.weight"].format == "iq2_xxs"
        for use in (lambda: ckpt.layer(0), lambda: ckpt.expert_slices(0)):
            with pytest.raises(lab.CheckpointError, match=r"ffn_up_exps.*16 \(iq2_xxs\)") as caught:
                use()
            assert caught.value.reason == "tensor type"


class TestLayers:
    def by_hand(self, layer: int) -> MoELayer:
        """The layer from the tensors that were written, without a file between."""
        spec = FAMILIES["qwen2_moe"].spec(
            num_experts=EXPERTS, top_k=TOP_K, d_model=D_MODEL, d_expert=D_EXPERT, d_shared=D_EXPERT
        )
        w: dict[str, Any] = {
            n.removeprefix(f"blk.{layer}.ffn_").removesuffix(".weight"): t for n, t in stored_weights(layer).items()
        }
        shared = SharedWeights(w["gate_shexp"], w["up_shexp"], w["down_shexp"], w["gate_inp_shexp"])
        return MoELayer.from_tensors(
            spec, router=w["gate_inp"], gate=w["gate_exps"], up=w["up_exps"], down=w["down_exps"], shared=shared
        )

    @pytest.mark.parametrize("number", [0, 1])
    def test_resident_layer_has_the_bits_of_the_written_weights(self, tiny: Path, x: torch.Tensor, number: int) -> None:
        ours, wanted = lab.open(tiny).layer(number)(x, arm="reference"), self.by_hand(number)(x, arm="reference")
        assert torch.equal(ours.routing.ids, wanted.routing.ids)
        assert torch.equal(ours.out, wanted.out)
        assert ours.out.abs().max() > 0

    @pytest.mark.parametrize("slots", [1, EXPERTS])
    def test_streamed_layers_share_a_cache_and_keep_the_bits(self, tiny: Path, x: torch.Tensor, slots: int) -> None:
        ckpt = lab.open(tiny)
        with lab.ExpertCache(slots=slots) as cache:
            for number in ckpt.moe_layers:
                streamed = ckpt.layer(number, cache=cache)(x, arm="reference")
                assert torch.equal(streamed.out, ckpt.layer(number)(x, arm="reference").out)
            assert cache.misses > 0
            assert cache.bytes_read == cache.misses * sum(s.expert_nbytes for s in ckpt.expert_slices(0))

    def test_slices_are_where_the_experts_stand(self, tiny: Path) -> None:
        data = tiny.read_bytes()
        for role, part in zip(("gate", "up", "down"), lab.open(tiny).expert_slices(1), strict=True):
            stored = stored_weights(1)[f"blk.1.ffn_{role}_exps.weight"]
            assert isinstance(stored, lab.QuantTensor)
            assert (part.name, part.format, part.shape) == (
                f"blk.1.ffn_{role}_exps.weight",
                stored.format,
                stored.shape,
            )
            assert (
                data[part.offset + 3 * part.expert_nbytes :][: part.expert_nbytes] == stored[3].data.numpy().tobytes()
            )

    def test_streaming_a_replaced_file_is_refused(self, tmp_path: Path, tiny: Path) -> None:
        path = tmp_path / "model.gguf"
        path.write_bytes(tiny.read_bytes())
        ckpt = lab.open(path)
        path.unlink()
        path.write_bytes(tiny.read_bytes())
        with lab.ExpertCache(slots=2) as cache, pytest.raises(lab.CheckpointError) as caught:
            ckpt.layer(0, cache=cache)
        assert caught.value.reason == "changed"

    def test_router_of_the_file_is_the_layers_router(self, tiny: Path) -> None:
        assert torch.equal(lab.open(tiny).layer(1).router, tiny_weights(1)["blk.1.ffn_gate_inp.weight"])


class TestSample:
    def test_folder_named_by_the_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "lab-42m.gguf").write_bytes(b"GGUF")
        monkeypatch.setenv("MOE_LAB_DATA", str(tmp_path))
        assert lab.sample() == tmp_path / "lab-42m.gguf"

    def test_absence_says_where_to_get_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MOE_LAB_DATA", str(tmp_path))
        with pytest.raises(lab.LabError, match="MOE_LAB_DATA"):
            lab.sample()
