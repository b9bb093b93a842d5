"""A packed file of experts as a source: one aligned read an expert, straight into its slot, with checksums."""

import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from moe_lab.checkpoint.rawfile import RawFile
from moe_lab.errors import CheckpointError, LabError
from moe_lab.stream.geometry import LayerGeometry, Segment, lay_out
from moe_lab.stream.joined import Readable
from moe_lab.stream.manifest import Manifest, at_rows, read_manifest
from moe_lab.stream.memory import host_block, whole_pages
from moe_lab.stream.source import ExpertSource


class PackedSource(ExpertSource):
    """The experts of a file that `moe-lab pack` wrote. CheckpointError for one that is broken or none."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self._read_call = Path(path), None
        file = RawFile(path)
        try:
            self.manifest: Manifest = read_manifest(file)
        finally:
            file.close()
        self.model_hash = self.manifest.model_hash
        self._identities = {self.path: file.identity}
        self._layers = {n: self._geometry(n) for n in sorted(self.manifest.layers)}
        self.slot_bytes = whole_pages(max(geometry.span_bytes for geometry in self._layers.values()))

    def _geometry(self, layer: int) -> LayerGeometry:
        rows = self.manifest.layers[layer]
        try:
            plain = lay_out(layer, rows.slices, {self.path: 0})
        except LabError as error:
            raise CheckpointError(self.path, "manifest", f"its manifest does not describe experts: {error}") from error
        if plain.span_bytes != rows.row_bytes:
            what = f"its manifest gives layer {layer} rows of {rows.row_bytes} bytes, its parts {plain.span_bytes}."
            raise CheckpointError(self.path, "manifest", what, seen=rows.row_bytes, wanted=plain.span_bytes)
        return LayerGeometry(plain.num_experts, plain.parts, at_rows(plain, rows.offsets))

    def check_parts(self, model: ExpertSource) -> None:
        """CheckpointError "part mismatch" unless layers, experts and their parts are the model's own."""
        for layer in model.layers:
            own = self._layers.get(layer)
            if own is None or (own.num_experts, own.parts) != (model.num_experts(layer), model.parts(layer)):
                what = f"layer {layer} is not laid out as in {model.path}. Pack the model again."
                raise CheckpointError(self.path, "part mismatch", what, seen=own, wanted=model.geometry(layer))

    def check_model(self, model_hash: str) -> None:
        """CheckpointError "part mismatch" unless this was packed from the model of that hash."""
        if self.model_hash != model_hash:
            raise CheckpointError(
                self.path, "part mismatch",
                f"was packed from another model ({self.manifest.model_name}). Pack this one: moe-lab pack FILE -o OUT.",
                seen=self.model_hash, wanted=model_hash,
            )  # fmt: skip

    def segments(self, layer: int, expert: int) -> list[Segment]:
        """One read, of the whole row."""
        self.check_experts(layer, (expert,))
        start = self.manifest.layers[layer].offsets[expert]
        return [Segment(start, self.span_bytes(layer), 0, f"layer {layer} expert {expert}")]

    def checksum(self, layer: int, expert: int) -> int:
        """The row's CRC-32, as it was written."""
        self.check_experts(layer, (expert,))
        return self.manifest.layers[layer].crc32[expert]

    def __repr__(self) -> str:
        return f"PackedSource({str(self.path)!r}, {len(self._layers)} layers, slot {self.slot_bytes} bytes)"


def wrong_rows(source: PackedSource) -> Iterator[tuple[int, int]]:
    """(layer, expert) of every row whose bytes do not have their CRC-32 and SHA-256. Reads the whole file once."""
    row = host_block(source.slot_bytes).numpy().data
    file: Readable = source.open()
    try:
        for layer, expert in _in_file_order(source):
            (segment,) = source.segments(layer, expert)
            view = row[: segment.nbytes]
            file.read_into(segment.file_offset, view, tensor=segment.tensor)
            rows = source.manifest.layers[layer]
            if zlib.crc32(view) != rows.crc32[expert] or sha256_of(source.geometry(layer), view) != rows.sha256[expert]:
                yield layer, expert
    finally:
        file.close()


def sha256_of(geometry: LayerGeometry, row: memoryview) -> str:
    """SHA-256 of an expert's parts in a row, without what stands between them."""
    digest = hashlib.sha256()
    for run in geometry.runs:
        digest.update(row[run.part.slot_offset : run.part.slot_offset + run.part.nbytes])
    return digest.hexdigest()


def _in_file_order(source: PackedSource) -> list[tuple[int, int]]:
    places = [(at, n, e) for n, rows in source.manifest.layers.items() for e, at in enumerate(rows.offsets)]
    return [(layer, expert) for _, layer, expert in sorted(places)]
