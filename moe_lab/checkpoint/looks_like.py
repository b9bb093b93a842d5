"""How things that are no model files begin, and what to call them."""

_STARTS = (
    (b"version https://git-lfs", "a large-file pointer in place of the weights: fetch the file itself"),
    (b"version 1\noid sha256:", "a large-file pointer in place of the weights: fetch the file itself"),
    (b"<", "a web page"), (b"PK\x03\x04", "a zip archive (PyTorch writes those)"), (b"\x1f\x8b", "gzip data"),
    (b"\x80\x02", "a Python pickle"), (b"GGUF", "a GGUF file"),
    (b"ggml", "an older container of the same makers"), (b"lmgg", "an older container of the same makers"),
    (b"tjgg", "an older container of the same makers"), (b"GGML", "an older container of the same makers"),
)  # fmt: skip


def looks_like(head: bytes) -> str:
    """A short guess at what a file with this beginning may be: ", which looks like a web page", or nothing."""
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return ", which looks like a safetensors file"
    return next((f", which looks like {what}" for start, what in _STARTS if head.lstrip().startswith(start)), "")
