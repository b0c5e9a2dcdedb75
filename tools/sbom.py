"""The software bill of materials of a wheel (CycloneDX): what others wrote in its libraries, and their compilers.

CMake writes the list, components.txt: a kind, a name, a version and a license (or "-") per line. Dependencies that pip
installs are not in the wheel; its METADATA has them.
"""

from __future__ import annotations

import os
import uuid
from datetime import datetime, timezone
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

PYPI = ("pybind11", "qao", "torch")


def component(kind: str, name: str, version: str, license: str) -> Component:
    """Compilers leave nothing but code: CycloneDX calls their scope excluded."""
    library = kind == "library"
    purl = PackageURL("pypi", None, name, version) if name in PYPI else None
    return Component(
        type=ComponentType.LIBRARY if library else ComponentType.APPLICATION,
        scope=ComponentScope.REQUIRED if library else ComponentScope.EXCLUDED,
        name=name,
        version=version,
        licenses=[] if license == "-" else [LicenseFactory().make_from_string(license)],
        purl=purl,
        bom_ref=f"{name}@{version}",
    )


def bill(version: str, components: Path) -> str:
    """JSON of the bill of qao's `version`. Equal arguments and SOURCE_DATE_EPOCH give equal text."""
    lines = components.read_text().splitlines()
    qao = component("library", "qao", version, "BSD-3-Clause")
    contents = [component(*line.split()) for line in lines]
    bom = Bom(components=contents, serial_number=uuid.uuid5(uuid.NAMESPACE_URL, "\n".join([f"qao {version}", *lines])))
    bom.metadata.component = qao
    bom.metadata.timestamp = datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), timezone.utc)
    bom.register_dependency(qao, [part for part in contents if part.scope is ComponentScope.REQUIRED])
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"
