"""Folders as Hugging Face lays them out: experts in scaled formats, fused and single, complete and not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_lab as lab
from moe_lab.layer import MoELayer

save_file = pytest.importorskip("safetensors.torch").save_file

E, D, F, K = 4, 128, 256, 2
CONFIG = {"num_experts_per_tok": K, "hidden_size": D, "intermediate_size": F, "num_local_experts": E}
MIXTRAL = {**CONFIG, "model_type": "mixtral", "hidden_act": "silu"}
SINGLE = "model.layers.0.block_sparse_moe.experts.{e}.{w}.weight"
PARTS = {"gate": "w1", "up": "w3", "down": "w2"}


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -0.5


def weights(f: int = F) -> dict[str, torch.Tensor]:
    return {"gate": normal(1, E, f, D), "up": normal(2, E, f, D), "down": normal(3, E, D, f)}


def folder(path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def as_fp8(q: lab.QuantTensor) -> torch.Tensor:
    return q.data.view(torch.float8_e4m3fn)


# Format -> the tensors one quantised matrix is stored as, by suffix after the weight's name.
STORED = {
    "fp8_block": lambda q: {"": as_fp8(q), "_scale_inv": q.scales},
    "nvfp4_modelopt": lambda q: {"": q.data, "_scale": q.scales.view(torch.float8_e4m3fn), "_scale_2": q.global_scale},
    "nvfp4_ct": lambda q: {
        "_packed": q.data, "_scale": q.scales.view(torch.float8_e4m3fn), "_global_scale": q.global_scale.reshape(1)
    },
    "mxfp8": lambda q: {"": as_fp8(q), "_scale": q.scales},
}  # fmt: skip
ROUTER = {"model.layers.0.block_sparse_moe.gate.weight": normal(9, E, D)}


def single(formats: str, f: int = F) -> tuple[dict[str, torch.Tensor], dict[str, lab.QuantTensor]]:
    """Tensors of a Mixtral with a scaled matrix for each expert, and the stacks they are to become."""
    tensors, stacks = dict(ROUTER), {}
    for part, w in weights(f).items():
        each = [lab.quantize(w[e], formats) for e in range(E)]
        for e, q in enumerate(each):
            name = SINGLE.format(e=e, w=PARTS[part])
            tensors |= {name + suffix: t for suffix, t in STORED[formats](q).items()}
        stacks[part] = each
    return tensors, stacks


def reference(spec: Any, router: torch.Tensor, stacks: dict[str, Any]) -> MoELayer:
    """The layer of the decoded weights."""
    values = {part: torch.stack([q.dequantize() for q in each]) for part, each in stacks.items()}
    return MoELayer.from_tensors(spec, router=router, **values)


@pytest.mark.parametrize("name", STORED)
def test_experts_with_scales_of_their_own_become_a_stack(name: str, tmp_path: Path) -> None:
    tensors, stacks = single(name)
    with lab.open(folder(tmp_path, tensors, MIXTRAL)) as ckpt:
        layer = ckpt.layer(0)
        assert layer.experts.formats == (name,) * 3
        for part, each in stacks.items():
            stack = layer.experts.stack.part(part)  # type: ignore[union-attr]
            assert torch.equal(stack.dequantize(), torch.stack([q.dequantize() for q in each]))
            assert stack.nbytes == sum(info.nbytes for info in ckpt.layer_tensors(0)[part].infos)
        x = normal(7, 5, D)
        want = reference(layer.spec, layer.router, stacks)(x, "reference").out
        assert torch.equal(layer(x, "reference").out, want)
        with lab.ExpertCache(slots=2) as cache:
            streamed = ckpt.layer(0, cache=cache)
            assert torch.equal(streamed(x, "reference").out, want)
            each = sum(info.nbytes for part in stacks for info in ckpt.layer_tensors(0)[part].infos) // E
            assert cache.bytes_read == cache.misses * each > 0


def test_gate_and_up_with_a_global_scale_each_keep_their_own(tmp_path: Path) -> None:
    """One tool took the gate's for both; here the up half is worth half of what its codes say."""
    tensors, _ = single("nvfp4_modelopt")
    for e in range(E):
        for part, scale in (("w1", 1.0), ("w3", 0.5)):
            name = SINGLE.format(e=e, w=part)
            tensors[name] = torch.full((F, D // 2), 0x22, dtype=torch.uint8)  # every code is 1.0
            tensors[name + "_scale"] = torch.ones(F, D // 16).to(torch.float8_e4m3fn)
            tensors[name + "_scale_2"] = torch.tensor(scale)
    with lab.open(folder(tmp_path, tensors, MIXTRAL)) as ckpt:
        stack = ckpt.layer(0).experts.stack  # type: ignore[union-attr]
        assert stack.gate.dequantize().unique().tolist() == [1.0]
        assert stack.up.dequantize().unique().tolist() == [0.5]


GRANITE = {**CONFIG, "model_type": "granitemoe", "hidden_act": "silu"}
MOE = "model.layers.0.block_sparse_moe."


def fused_fp8(f: int) -> dict[str, torch.Tensor]:
    """Gate and up of `f` rows in one FP8 tensor. Codes are 1.0; scale blocks of 128 rows say 1, 2, 3 ..."""
    codes = {"input_linear.weight": (E, 2 * f, D), "output_linear.weight": (E, D, f)}
    tensors = {MOE + "router.layer.weight": normal(9, E, D)}
    for name, shape in codes.items():
        rows, columns = -(-shape[1] // 128), -(-shape[2] // 128)
        tensors[MOE + name] = torch.ones(shape).to(torch.float8_e4m3fn)
        tensors[MOE + name + "_scale_inv"] = (1.0 + torch.arange(rows)).reshape(1, rows, 1).expand(E, rows, columns)
    return tensors


def test_fused_halves_of_whole_scale_blocks_are_taken_apart(tmp_path: Path) -> None:
    with lab.open(folder(tmp_path, fused_fp8(F), {**GRANITE, "intermediate_size": F})) as ckpt:
        stack = ckpt.layer(0).experts.stack  # type: ignore[union-attr]
        assert stack.gate.dequantize()[0, :, 0].unique_consecutive().tolist() == [1.0, 2.0]
        assert stack.up.dequantize()[0, :, 0].unique_consecutive().tolist() == [3.0, 4.0]


def test_a_fused_table_whose_middle_block_is_of_both_halves_is_refused(tmp_path: Path) -> None:
    """2 x 192 rows in one table have 3 scale rows, not 2 x 2: rows 128..255 would share one across the border."""
    with lab.open(folder(tmp_path, fused_fp8(192), {**GRANITE, "intermediate_size": 192})) as ckpt:
        with pytest.raises(lab.CheckpointError, match=r"input_linear.*taken apart.*128 rows") as caught:
            ckpt.layer(0)
        assert caught.value.reason == "scale shape"


def test_a_fused_table_with_scales_beside_it_is_not_streamed(tmp_path: Path) -> None:
    with lab.open(folder(tmp_path, fused_fp8(F), {**GRANITE, "intermediate_size": F})) as ckpt:
        with lab.ExpertCache(slots=2) as cache, pytest.raises(lab.CheckpointError, match="gate and up share") as caught:
            ckpt.layer(0, cache=cache)
        assert caught.value.reason == "unsupported"


def test_separate_halves_of_192_rows_have_two_scale_rows_each(tmp_path: Path) -> None:
    tensors, _ = single("fp8_block", 192)
    scales = {"w1": [[1.0], [2.0]], "w3": [[4.0], [8.0]]}
    for e in range(E):
        for part, values in scales.items():
            name = SINGLE.format(e=e, w=part)
            tensors[name] = torch.ones(192, D).to(torch.float8_e4m3fn)
            tensors[name + "_scale_inv"] = torch.tensor(values)
    with lab.open(folder(tmp_path, tensors, {**MIXTRAL, "intermediate_size": 192})) as ckpt:
        up = ckpt.layer(0).experts.stack.up.dequantize()  # type: ignore[union-attr]
        assert torch.equal(up[:, :128], torch.full((E, 128, D), 4.0))
        assert torch.equal(up[:, 128:], torch.full((E, 64, D), 8.0))


class TestGptOss:
    """MXFP4 as GPT-OSS has it: rows of gate and up alternate, and unlike its plain tensors the axes are not swapped."""

    CONFIG: dict[str, Any] = {**CONFIG, "model_type": "gpt_oss", "swiglu_limit": 7.0}  # noqa: RUF012
    MLP = "model.layers.0.mlp."

    def tensors(self) -> dict[str, torch.Tensor]:
        w, mlp = weights(), self.MLP
        mixed = torch.stack([w["gate"], w["up"]], dim=2).reshape(E, 2 * F, D)
        out = {
            mlp + "router.weight": normal(9, E, D), mlp + "router.bias": normal(8, E),
            mlp + "experts.gate_up_proj_bias": normal(5, E, 2 * F), mlp + "experts.down_proj_bias": normal(6, E, D),
        }  # fmt: skip
        for name, value in (("gate_up_proj", mixed), ("down_proj", w["down"])):
            q = lab.quantize(value, "mxfp4_oss")
            assert q.scales is not None
            out[f"{mlp}experts.{name}_blocks"] = q.data.reshape(*value.shape[:2], -1, 16)
            out[f"{mlp}experts.{name}_scales"] = q.scales
        return out

    def test_rows_and_biases_are_taken_apart(self, tmp_path: Path) -> None:
        tensors = self.tensors()
        with lab.open(folder(tmp_path, tensors, self.CONFIG)) as ckpt:
            layer = ckpt.layer(0)
            stack = layer.experts.stack  # type: ignore[union-attr]
            assert layer.experts.formats == ("mxfp4_oss",) * 3
            for part, w in weights().items():
                assert torch.equal(stack.part(part).dequantize(), lab.quantize(w, "mxfp4_oss").dequantize())
            bias = tensors[self.MLP + "experts.gate_up_proj_bias"]
            assert torch.equal(stack.biases.gate, bias[:, 0::2])
            assert torch.equal(stack.biases.up, bias[:, 1::2])
            assert layer(normal(7, 3, D), "reference").out.isfinite().all()


def test_stacks_with_stacked_scales_stream_too(tmp_path: Path) -> None:
    """All experts in one tensor, as Step-3.5 has them."""
    moe = "model.layers.0.moe."
    config = {"model_type": "step3p5", "hidden_size": D, "moe_intermediate_size": F, "n_routed_experts": E}
    tensors = {moe + "gate.weight": normal(9, E, D), moe + "router_bias": normal(8, E)}
    tensors |= {f"model.layers.0.share_expert.{p}_proj.weight": torch.zeros(8, D) for p in ("gate", "up")}
    tensors["model.layers.0.share_expert.down_proj.weight"] = torch.zeros(D, 8)
    stacks = {part: lab.quantize(w, "fp8_block") for part, w in weights().items()}
    for part, q in stacks.items():
        tensors |= {f"{moe}{part}_proj.weight{suffix}": t for suffix, t in STORED["fp8_block"](q).items()}
    path = folder(tmp_path, tensors, {**config, "num_experts_per_tok": K})
    with lab.open(path) as ckpt, lab.ExpertCache(slots=2) as cache:
        resident, x = ckpt.layer(0), normal(7, 5, D)
        assert torch.equal(resident.experts.stack.down.dequantize(), stacks["down"].dequantize())  # type: ignore[union-attr]
        want = resident(x, "reference").out
        assert torch.equal(ckpt.layer(0, cache=cache)(x, "reference").out, want)
        assert want.abs().max() > 0


def test_one_scale_for_a_whole_weight_is_not_streamed(tmp_path: Path) -> None:
    tensors, _ = single("fp8_block")
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        tensors[name] = tensors[name].reshape(-1)[:1].clone()
    with lab.open(folder(tmp_path, tensors, MIXTRAL)) as ckpt, lab.ExpertCache(slots=2) as cache:
        assert ckpt.layer(0)(normal(7, 5, D), "reference").out.isfinite().all()
        with pytest.raises(lab.CheckpointError, match=r"scales .*\[1\].*no \[2, 1\] for each expert"):
            ckpt.layer(0, cache=cache)


class TestIncomplete:
    def test_a_missing_expert_is_named_and_the_rest_counted(self, tmp_path: Path) -> None:
        tensors, _ = single("fp8_block")
        for part in ("w1", "w3"):
            for suffix in ("", "_scale_inv"):
                del tensors[SINGLE.format(e=2, w=part) + suffix]
        with pytest.raises(lab.CheckpointError) as caught:
            lab.open(folder(tmp_path, tensors, MIXTRAL))
        assert (caught.value.reason, caught.value.tensor) == ("missing tensor", SINGLE.format(e=2, w="w1"))
        assert SINGLE.format(e=2, w="w3") in str(caught.value)

    def test_experts_of_two_shapes(self, tmp_path: Path) -> None:
        tensors = {**ROUTER, **{SINGLE.format(e=e, w=w): torch.ones(2, 2) for e in range(E) for w in PARTS.values()}}
        odd = SINGLE.format(e=3, w="w1")
        tensors |= {SINGLE.format(e=e, w=w): torch.zeros(F, D) for e in range(E) for w in ("w1", "w3")}
        tensors |= {SINGLE.format(e=e, w="w2"): torch.zeros(D, F) for e in range(E)}
        tensors[odd] = torch.zeros(F + 1, D)
        with pytest.raises(lab.CheckpointError) as caught:
            lab.open(folder(tmp_path, tensors, MIXTRAL))
        assert (caught.value.reason, caught.value.tensor) == ("model shape", odd)

    def test_experts_of_two_formats_open_and_show_both_but_make_no_layer(self, tmp_path: Path) -> None:
        from moe_lab.inspect import inspect_checkpoint

        names = {SINGLE.format(e=e, w=w): w for e in range(E) for w in PARTS.values()}
        tensors = {n: torch.zeros(*((D, F) if w == "w2" else (F, D))) for n, w in names.items()}
        odd = SINGLE.format(e=1, w="w3")
        tensors[odd] = tensors[odd].bfloat16()
        with lab.open(folder(tmp_path, {**ROUTER, **tensors}, MIXTRAL)) as ckpt:
            assert inspect_checkpoint(ckpt).iloc[0].format_up == "f32/bf16"
            with pytest.raises(lab.CheckpointError, match="f32, bf16"):
                ckpt.layer(0)

    def test_a_folder_without_a_config_opens_without_a_spec(self, tmp_path: Path) -> None:
        tensors, _ = single("mxfp8")
        folder(tmp_path, tensors, MIXTRAL)
        (tmp_path / "config.json").unlink()
        with lab.open(tmp_path) as ckpt:
            assert ckpt.spec is None
            assert ckpt.read(SINGLE.format(e=0, w="w1")).shape == (F, D)
        with pytest.raises(lab.CheckpointError, match=r"config\.json has no 'num_experts'"):
            lab.open(tmp_path, family="mixtral")
