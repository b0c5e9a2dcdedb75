"""What a release publishes with its wheel and sources: ``python tools/release.py dist``.

- ``qao-VERSION.cdx.json``: the wheel's software bill of materials, as a file.
- ``qao-VERSION.provenance.json``: an in-toto statement with SLSA's provenance: the sources, the environment and the
  SHA-256 of each file. It is not signed. ``QAO_BUILDER`` is the URI of the builder.
- ``SHA256SUMS``: for ``sha256sum --check``.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import runpy
import sys
import zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = runpy.run_path(str(ROOT / "python" / "qao" / "_version.py"))
VERSION = SOURCE["__version__"]
TOOLS = ("auditwheel", "cyclonedx-python-lib", "pip", "setuptools", "torch")
OPTIONS = ("CMAKE_ARGS", "QAO_CUDA", "QAO_CUDA_ARCHS", "QAO_PYBIND", "QAO_REPOSITORY", "SOURCE_DATE_EPOCH")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def commit() -> str | None:
    """Of the checkout, or of the source distribution that holds it."""
    held = ROOT / "python" / "qao" / "_commit.txt"
    return held.read_text().strip() if held.exists() else SOURCE["of_checkout"](ROOT)


def provenance(subjects: list[Path], components: list[dict[str, object]]) -> dict[str, object]:
    compilers = {part["name"]: part["version"] for part in components if part.get("scope") == "excluded"}
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": path.name, "digest": {"sha256": sha256(path)}} for path in subjects],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:qao:make-release",
                "externalParameters": {name: os.environ[name] for name in OPTIONS if name in os.environ},
                "internalParameters": {"python": platform.python_version(), "machine": platform.machine(), **compilers},
                "resolvedDependencies": [
                    {"name": "qao", "annotations": {"commit": commit()}},
                    *({"name": name, "annotations": {"version": metadata.version(name)}} for name in TOOLS),
                ],
            },
            "runDetails": {"builder": {"id": os.environ.get("QAO_BUILDER", "urn:qao:unnamed")}},
        },
    }


def main(folder: Path) -> None:
    (wheel,), (sources,) = folder.glob("qao-*.whl"), folder.glob("qao-*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"qao-{VERSION}.dist-info/sboms/qao.cdx.json")
    bill = folder / f"qao-{VERSION}.cdx.json"
    bill.write_bytes(text)
    statement = provenance([wheel, sources, bill], json.loads(text)["components"])
    file = folder / f"qao-{VERSION}.provenance.json"
    file.write_text(json.dumps(statement, indent=2) + "\n", encoding="utf-8")
    files = sorted([wheel, sources, bill, file])
    (folder / "SHA256SUMS").write_text("".join(f"{sha256(path)}  {path.name}\n" for path in files))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
