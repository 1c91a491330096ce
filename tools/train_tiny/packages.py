"""The Debian packages with the English text: versions, checksums and licences."""

from __future__ import annotations

import hashlib
import io
import lzma
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One package of Debian 12; `weight` is its relative share of the English training text.

    `test_percent` of its documents are held out. Only public-domain text may be shipped.
    """

    name: str
    version: str
    sha256: str
    licence: str
    member: str
    kind: str
    weight: int
    test_percent: int = 1
    public_domain: bool = False


PACKAGES = (
    Package(
        name="dict-gcide",
        version="0.48.5+nmu2",
        sha256="7b0af5cfde3cbdef5e9d6e78f92ec335ced7c2790f37a40f49bebc6f7347ac0f",
        licence="GPL-3.0-or-later (GCIDE, after Webster's of 1913)",
        member="./usr/share/dictd/gcide",
        kind="dictd",
        weight=30,
    ),
    Package(
        name="dict-wn",
        version="1:3.0-37",
        sha256="ed99e0bf162815dc1cc69de3727eedd7112ddf170badf83dbde26209e0724a8c",
        licence="WordNet 3.0 licence",
        member="./usr/share/dictd/wn",
        kind="dictd",
        weight=14,
    ),
    Package(
        name="dict-foldoc",
        version="20230119-1",
        sha256="745cbedb55c2da609cc88ee0284e9d11a67a11ae3709daf7bad0e895ac3294c3",
        licence="GFDL-1.1-or-later",
        member="./usr/share/dictd/foldoc",
        kind="dictd",
        weight=14,
    ),
    Package(
        name="dict-jargon",
        version="4.4.7-3.1",
        sha256="405f8168d7994ed2cb71407bb95493daec2e9aa66fc0461dafa74a9d6728a8c1",
        licence="public domain",
        member="./usr/share/dictd/jargon",
        kind="dictd",
        weight=12,
        test_percent=6,
        public_domain=True,
    ),
    Package(
        name="dict-devil",
        version="1.0-13.1",
        sha256="6a535684def2a1f70cd42da16d12d43f0e9dc3e54e4a329178eebab3170e3154",
        licence="public domain (Ambrose Bierce, 1911)",
        member="./usr/share/dictd/devil",
        kind="dictd",
        weight=6,
        test_percent=10,
        public_domain=True,
    ),
    Package(
        name="manpages",
        version="6.03-2",
        sha256="efa1ba4cd19ad7baeae959c9209a7eb74be2ebb858bcabb412597bfc9f588c91",
        licence="GPL-2.0-or-later, BSD and verbatim, page by page",
        member="./usr/share/man/man",
        kind="roff",
        weight=6,
    ),
    Package(
        name="manpages-dev",
        version="6.03-2",
        sha256="96f55cb5e26231d5567c89b692bced63825a14a2d5bd18fdf16ea2ed44eb9838",
        licence="GPL-2.0-or-later, BSD and verbatim, page by page",
        member="./usr/share/man/man",
        kind="roff",
        weight=6,
    ),
    Package(
        name="python3.11-doc",
        version="3.11.2-6+deb12u9",
        sha256="5b3594189d6ef9a6963ce0347fd307a1cc67620ad697e144db366070e2e146be",
        licence="PSF-2.0",
        member="./usr/share/doc/python3.11/html/_sources",
        kind="rst",
        weight=12,
    ),
)


def fetch(package: Package, folder: Path) -> Path:
    """Return the package's file, downloaded if missing; ValueError if its checksum differs."""
    folder.mkdir(parents=True, exist_ok=True)
    pattern = f"{package.name}_{package.version.replace(':', '%3a')}_*.deb"
    if not list(folder.glob(pattern)):
        requirement = f"{package.name}={package.version}"
        subprocess.run(["apt-get", "download", "-q", requirement], cwd=folder, check=True)
    file = next(iter(sorted(folder.glob(pattern))))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != package.sha256:
        raise ValueError(f"{file.name} has sha256 {digest}, not {package.sha256}")
    return file


def read_members(file: Path, prefix: str) -> dict[str, bytes]:
    """Return the contents of the files under a path of a .deb, an `ar` archive of tar archives."""
    raw = file.read_bytes()
    place = 8
    while place < len(raw):
        name, size = raw[place : place + 16].decode().strip(), int(raw[place + 48 : place + 58])
        if name.startswith("data.tar"):
            data = raw[place + 60 : place + 60 + size]
            data = lzma.decompress(data) if name.rstrip("/").endswith("xz") else data
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                return {
                    member.name: extracted.read()
                    for member in tar
                    if member.isfile() and member.name.startswith(prefix)
                    if (extracted := tar.extractfile(member))
                }
        place += 60 + size + size % 2
    raise ValueError(f"{file.name} holds no data archive")
