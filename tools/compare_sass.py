"""Comparison of the machine code of two builds: `compare_sass.py BEFORE.so AFTER.so`.

After a change that should only move or rename kernels, every function of one library has a function with the same
bytes in the other, per architecture. Names do not count, but they may change code: the compiler orders a kernel's
subroutines by name, and what it selects in one depends on those before. Needs cuobjdump (pip install
nvidia-cuda-cuobjdump) on PATH, and pyelftools. Exit status 1: some code differs.
"""

from __future__ import annotations

import collections
import subprocess
import sys
import tempfile
from pathlib import Path

from elftools.elf.elffile import ELFFile


def functions(library: Path) -> dict[tuple[str, bytes], list[str]]:
    """Mangled names by architecture and code."""
    found = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["cuobjdump", "-xelf", "all", library.resolve()], cwd=folder, check=True, capture_output=True)
        for path in sorted(Path(folder).iterdir()):
            with path.open("rb") as file:
                for section in ELFFile(file).iter_sections():
                    if section.name.startswith(".text."):
                        found[path.suffixes[-2], section.data()].append(section.name.removeprefix(".text."))
    return found


def main(before: Path, after: Path) -> int:
    old, new = functions(before), functions(after)
    same = sum(min(len(names), len(new.get(code, []))) for code, names in old.items())
    print(f"{sum(map(len, old.values()))} functions before, {sum(map(len, new.values()))} after, {same} equal")
    differs = False
    for title, some, others in (("only before", old, new), ("only after", new, old)):
        for code, names in some.items():
            for name in names[len(others.get(code, [])) :]:
                demangled = subprocess.run(["c++filt", name], check=True, capture_output=True, text=True).stdout
                print(f"{title}: {code[0]} {demangled.strip()}")
                differs = True
    return int(differs)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
