"""The Debian packages (bookworm) that the corpus is made of: fetched with apt, unpacked with dpkg, never installed."""

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """One domain: its packages, and the licence of the text as Debian's copyright file states it."""

    domain: str
    packages: tuple[str, ...]
    licence: str


SOURCES = (
    Source("pydoc_rst", ("python3.11-doc",), "PSF-2.0"),
    Source("py_stdlib", ("libpython3.11-stdlib", "libpython3.11-minimal"), "PSF-2.0"),
    Source("perl_pod", ("perl-doc",), "GPL-1+ or Artistic"),
    Source("pg_doc", ("postgresql-doc-15",), "PostgreSQL"),
    Source("lo_de", ("libreoffice-help-de",), "mainly MPL-2.0"),
    Source("lo_fr", ("libreoffice-help-fr",), "mainly MPL-2.0"),
    Source("wordnet", ("wordnet-base",), "WordNet 3.0"),
    Source("austen", ("r-cran-janeaustenr",), "texts in the public domain, package MIT"),
)


def unpack(source: Source, work: Path) -> tuple[list[Path], list[str]]:
    """Folders of the unpacked packages and their versions ("name version"). Fetches what `work` lacks (40 MB in all).

    Raises RuntimeError with apt's or dpkg's own last line when one of them fails.
    """
    folders, versions = [], []
    (work / "debs").mkdir(parents=True, exist_ok=True)
    for package in source.packages:
        found = sorted((work / "debs").glob(f"{package}_*.deb"))
        if not found:
            _run(["apt-get", "download", "-qq", package], work / "debs")
            found = sorted((work / "debs").glob(f"{package}_*.deb"))
        folder = work / "unpacked" / package
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            _run(["dpkg", "-x", str(found[-1].resolve()), str(folder.resolve())], work)
        folders.append(folder)
        versions.append(f"{package} {found[-1].name.split('_')[1].replace('%3a', ':')}")
    return folders, versions


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(
            f"{' '.join(command[:3])} failed: {said}. The corpus needs a Debian bookworm with apt sources."
        )
