"""Weights whose scales are tensors of their own: found by their names, checked by their shapes, read as one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moe_lab.checkpoint import SafetensorsFile
from moe_lab.errors import CheckpointError
from moe_lab.formats import QuantTensor, split_gate_up

F8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def refusal(call: Callable[[], object]) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        call()
    return caught.value


def opened(tmp_path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> SafetensorsFile:
    save_file(tensors, tmp_path / "model.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    return SafetensorsFile(tmp_path / "model.safetensors")


def codes(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random bytes."""
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def fp8(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random e4m3 codes without NaN."""
    bits = codes(*shape, seed=seed)
    return torch.where((bits & 0x7F) == 0x7F, 0, bits).to(torch.uint8).view(F8)


def positive_fp8(*shape: int) -> torch.Tensor:
    return (codes(*shape, seed=9) % 0x78 + 1).view(F8)


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1).view(torch.uint8)


def pairs(packed: torch.Tensor) -> torch.Tensor:
    """e2m1 values of packed bytes [.., n] -> [.., 2n], low nibble first."""
    packed = packed.view(torch.uint8).long()
    return E2M1[torch.stack([packed & 15, packed >> 4], -1)].flatten(-2)


def power(exponents: torch.Tensor) -> torch.Tensor:
    return torch.exp2(exponents.view(torch.uint8).float() - 127)


def spread(scales: torch.Tensor, block: int) -> torch.Tensor:
    return scales.float().repeat_interleave(block, -1)


def block_scaled(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    n, kd = data.shape[-2:]
    return data.float() * spread(scales, 128).repeat_interleave(128, -2)[..., :n, :kd]


def _layouts() -> dict[str, tuple[str, str, dict[str, torch.Tensor], torch.Tensor]]:
    """Id -> (format, the weight's name, tensors with the codes first, values)."""
    eight, table = fp8(192, 256), torch.tensor([[1.5, 2.0], [0.25, 3.0]])
    whole = torch.tensor(0.75)
    four, of16, of32 = codes(6, 64), positive_fp8(6, 8), codes(6, 4) % 20 + 117
    blocks, of_blocks = codes(2, 6, 4, 16), codes(2, 6, 4) % 20 + 117
    narrow = fp8(6, 128)
    v3, two, four_of16 = torch.full((2, 2), 2.0).to(E8M0), torch.tensor(0.5), pairs(four) * spread(of16, 16)
    return {
        "deepseek-v3": ("fp8_block", "w.weight", {"w.weight": eight, "w.weight_scale_inv": table},
                        block_scaled(eight, table)),
        "fp8-named-scale": ("fp8_block", "w.weight", {"w.weight": eight, "w.weight_scale": table.bfloat16()},
                            block_scaled(eight, table)),
        "fp8-one-scale": ("fp8_block", "w.weight", {"w.weight": eight, "w.weight_scale": whole},
                          eight.float() * whole),
        "fp8-power-of-two": ("fp8_block", "w.weight", {"w.weight": eight, "w.scale": v3}, eight.float() * 2),
        "deepseek-v4-fp4": ("mxfp4_oss", "w.weight", {"w.weight": four.view(torch.int8), "w.scale": of32.view(E8M0)},
                            pairs(four) * spread(power(of32), 32)),
        "mxfp8": ("mxfp8", "w.weight", {"w.weight": narrow, "w.weight_scale": of32},
                  narrow.float() * spread(power(of32), 32)),
        "nvfp4-modelopt": ("nvfp4_modelopt", "w.weight",
                           {"w.weight": four, "w.weight_scale": of16, "w.weight_scale_2": two,
                            "w.input_scale": torch.tensor(7.0)}, four_of16 * 0.5),
        "nvfp4-ct": ("nvfp4_ct", "w.weight",
                     {"w.weight_packed": four, "w.weight_scale": of16, "w.weight_global_scale": two.reshape(1),
                      "w.input_global_scale": torch.ones(1)}, four_of16 / 0.5),
        "mxfp4-ct": ("mxfp4_oss", "w.weight", {"w.weight_packed": four, "w.weight_scale": of32},
                     pairs(four) * spread(power(of32), 32)),
        "gpt-oss": ("mxfp4_oss", "experts.gate_up_proj",
                    {"experts.gate_up_proj_blocks": blocks, "experts.gate_up_proj_scales": of_blocks,
                     "experts.gate_up_proj_bias": torch.ones(2, 6)},
                    pairs(blocks).flatten(-2) * spread(power(of_blocks), 32)),
    }  # fmt: skip


@pytest.mark.parametrize("name", _layouts())
def test_layouts(tmp_path: Path, name: str) -> None:
    format, weight, tensors, values = _layouts()[name]
    file = opened(tmp_path, tensors)
    stored = next(iter(tensors))
    info = file.scaled[weight]
    assert list(file.scaled) == [weight]
    assert (info.format, info.shape, info.data.name) == (format, tuple(values.shape), stored)
    assert info.nbytes == sum(t.nbytes for n, t in tensors.items() if n in {part.name for part in info.parts})
    for called in (weight, stored):
        assert file.has(called)
        read = file.read(called)
        assert isinstance(read, QuantTensor)
        assert (read.format, read.shape) == (format, tuple(values.shape))
        assert torch.equal(read.dequantize(), values)
    for other in tensors.keys() - {stored}:
        assert torch.equal(bits(file.read(other)), bits(tensors[other]))
    assert torch.equal(bits(file.stored(stored)), bits(tensors[stored]))


class TestAffine:
    def tensors(self, bits: int, group: int) -> dict[str, torch.Tensor]:
        words = codes(6, 128 * bits // 8).view(torch.uint32)
        scales = torch.arange(6 * 128 // group).reshape(6, -1) / 8 + 1
        return {"w.weight": words, "w.scales": scales.bfloat16(), "w.biases": -scales.bfloat16()}

    def values(self, tensors: dict[str, torch.Tensor], bits: int, group: int) -> torch.Tensor:
        packed = tensors["w.weight"].view(torch.uint8).long()
        q = packed if bits == 8 else torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
        return spread(tensors["w.scales"], group) * q + spread(tensors["w.biases"], group)

    @pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128)])
    def test_bits_and_group_are_the_configs(self, tmp_path: Path, bits: int, group: int) -> None:
        tensors = self.tensors(bits, group)
        file = opened(tmp_path, tensors, {"quantization": {"bits": bits, "group_size": group}})
        assert file.scaled["w.weight"].format == f"int{bits}_g{group}"
        assert torch.equal(file.read("w.weight").dequantize(), self.values(tensors, bits, group))

    def test_a_weight_may_have_settings_of_its_own(self, tmp_path: Path) -> None:
        config = {"quantization": {"bits": 4, "group_size": 64, "w": {"bits": 8, "group_size": 32}}}
        assert opened(tmp_path, self.tensors(8, 32), config).scaled["w.weight"].format == "int8_g32"

    @pytest.mark.parametrize(
        "config", [None, {}, {"quantization": 4}, {"quantization": {"bits": 4}}, {"quantization": {"bits": 3.0}}]
    )
    def test_without_settings_the_codes_are_not_guessed(self, tmp_path: Path, config: dict | None) -> None:
        file = opened(tmp_path, self.tensors(4, 64), config)
        error = refusal(lambda: file.read("w.weight"))
        assert (error.reason, error.tensor, "group_size" in str(error)) == ("scale names", "w.weight", True)

    def test_settings_that_do_not_fit_the_shapes(self, tmp_path: Path) -> None:
        error = refusal(lambda: opened(tmp_path, self.tensors(4, 64), {"quantization": {"bits": 4, "group_size": 32}}))
        assert (error.reason, error.tensor) == ("scale shape", "w.scales")


class TestUnknownNames:
    @pytest.mark.parametrize(
        "tensors",
        [
            {"w.weight": codes(6, 64), "w.weight_scale": positive_fp8(6, 8), "w.weight_scale_3": torch.ones(1)},
            {"w.weight": codes(6, 64), "w.weight_scale": positive_fp8(6, 8)},
            {"w.weight_packed": codes(6, 64), "w.weight_scale": positive_fp8(6, 8), "w.weight_scale_2": torch.ones(1)},
            {"w.weight": codes(6, 64), "w.weight_scale": positive_fp8(6, 8), "w.weight_scale_2": torch.ones(1),
             "w.weight_global_scale": torch.ones(1)},
            {"w.weight": fp8(192, 256).view(torch.float8_e5m2), "w.weight_scale_inv": torch.ones(2, 2)},
            {"w.weight": fp8(192, 256), "w.weight_scale": torch.ones(192, 1)},
            {"w.weight_packed": codes(6, 64).view(torch.int32), "w.weight_scale": torch.ones(6, 1),
             "w.weight_zero_point": codes(6, 4).view(torch.int32)},
        ],
        ids=["third-scale", "no-global", "mixed-makers", "both-globals", "e5m2", "scale-a-row", "int-zero-point"],
    )  # fmt: skip
    def test_refused_when_read(self, tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
        file = opened(tmp_path, tensors)
        data = next(iter(tensors))
        assert not file.scaled
        error = refusal(lambda: file.read(data))
        assert (error.reason, error.tensor) == ("scale names", data)
        assert "w.weight_scale" in str(error)
        assert file.raw(data).numel() == tensors[data].nbytes
        assert (
            file.read("w.weight_scale").shape == tensors["w.weight_scale"].shape if "w.weight_scale" in tensors else 1
        )

    def test_other_number_format_of_the_same_bits(self, tmp_path: Path) -> None:
        """fnuz codes are half as large and have another NaN."""
        save_file({"w.weight": fp8(128, 128), "w.weight_scale_inv": torch.ones(1, 1)}, tmp_path / "model.safetensors")
        data = (tmp_path / "model.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        head = data[8 : 8 + length].rstrip().replace(b"F8_E4M3", b"F8_E4M3FNUZ")
        (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data[8 + length :])
        error = refusal(lambda: SafetensorsFile(tmp_path / "model.safetensors").read("w.weight"))
        assert (error.reason, "F8_E4M3FNUZ" in str(error)) == ("scale names", True)

    def test_plain_weights_with_a_scale_beside_them_stay_plain(self, tmp_path: Path) -> None:
        tensors = {
            "norm.weight": torch.ones(4),
            "norm.scale": torch.ones(4),
            "k_scale": torch.ones(1),
            "k": torch.ones(2),
        }
        file = opened(tmp_path, tensors)
        assert not file.scaled
        assert torch.equal(file.read("norm.weight"), tensors["norm.weight"])

    def test_plain_weight_keeps_its_name(self, tmp_path: Path) -> None:
        file = opened(
            tmp_path,
            {"w.weight": torch.ones(6, 128), "w.weight_packed": codes(6, 64), "w.weight_scale": codes(6, 4)},
        )
        assert list(file.scaled) == ["w.weight_packed"]
        assert torch.equal(file.read("w.weight"), torch.ones(6, 128))


class TestShapes:
    @pytest.mark.parametrize(
        ("tensors", "named"),
        [
            ({"w.weight": fp8(192, 256), "w.weight_scale_inv": torch.ones(1, 2)}, "w.weight_scale_inv"),
            ({"w.weight": fp8(192, 256), "w.weight_scale_inv": torch.ones(2, 3)}, "w.weight_scale_inv"),
            ({"w.weight": fp8(256), "w.weight_scale_inv": torch.ones(2)}, "w.weight_scale_inv"),
            ({"w.weight": fp8(6, 96), "w.weight_scale": codes(6, 4)}, "w.weight_scale"),
            ({"w.weight": fp8(6, 100), "w.weight_scale": codes(6, 4)}, "w.weight_scale"),
            ({"w_blocks": codes(2, 6, 4, 16), "w_scales": codes(2, 6, 3)}, "w_scales"),
            ({"w.weight": codes(6, 64), "w.weight_scale": positive_fp8(6, 4), "w.weight_scale_2": torch.ones(1)},
             "w.weight_scale"),
            ({"w.weight": codes(6, 64), "w.weight_scale": positive_fp8(6, 8), "w.weight_scale_2": torch.ones(2)},
             "w.weight_scale_2"),
            ({"w": codes(3, 6, 64), "w_scale": positive_fp8(3, 6, 8), "w_scale_2": torch.ones(2)}, "w_scale_2"),
        ],
        ids=["floor-rows", "too-wide", "vector", "mxfp8-width", "mxfp8-ragged", "blocks", "nvfp4", "two-globals",
             "globals-a-matrix"],
    )  # fmt: skip
    def test_scales_that_do_not_fit_are_refused_on_opening(
        self, tmp_path: Path, tensors: dict[str, torch.Tensor], named: str
    ) -> None:
        error = refusal(lambda: opened(tmp_path, tensors))
        assert (error.reason, error.tensor) == ("scale shape", named)
        assert "\n" not in str(error)

    def test_global_scale_a_matrix(self, tmp_path: Path) -> None:
        tensors = {"w": codes(3, 6, 64), "w_scale": positive_fp8(3, 6, 8), "w_scale_2": torch.tensor([1.0, 2.0, 4.0])}
        values = pairs(tensors["w"]) * spread(tensors["w_scale"], 16) * tensors["w_scale_2"][:, None, None]
        assert torch.equal(opened(tmp_path, tensors).read("w").dequantize(), values)

    def test_fused_halves_with_global_scales_of_their_own(self, tmp_path: Path) -> None:
        tensors = {"w": codes(3, 6, 64), "w_scale": positive_fp8(3, 6, 8), "w_scale_2": torch.ones(3, 2)}
        assert refusal(lambda: opened(tmp_path, tensors)).tensor == "w_scale_2"
        file = opened(tmp_path, {name.replace("w", "gate_up_proj", 1): t for name, t in tensors.items()})
        assert refusal(lambda: file.read("gate_up_proj")).reason == "unsupported"
        assert file.stored("gate_up_proj_scale_2").shape == (3, 2)

    def test_fused_halves_with_scales_of_their_own(self, tmp_path: Path) -> None:
        """Gate and up of 192 rows: a table of 2 + 2 rows is no table of one matrix, so it is left to who splits it."""
        scales = torch.tensor([1.0, 2.0, 4.0, 8.0])[:, None].expand(4, 2).contiguous()
        tensors = {"gate_up_proj": torch.ones(384, 256).to(F8), "gate_up_proj_scale_inv": scales}
        file = opened(tmp_path, tensors)
        assert refusal(lambda: file.read("gate_up_proj")).tensor == "gate_up_proj"
        stored = [file.stored(name) for name in tensors]
        gate, up = split_gate_up("fp8_block", (384, 256), *stored)
        assert (gate.dequantize()[191, 0], up.dequantize()[0, 0], up.dequantize()[191, 0]) == (2, 4, 8)
