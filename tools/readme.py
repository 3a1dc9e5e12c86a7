"""Runs README's shell commands, one after the other, in a fresh virtual environment: python tools/readme.py SDIST FOLDER.

The sdist is unpacked into FOLDER, so that nothing but what it contains can be used. README's bash blocks are one script, which
stops at the first command that fails; its first Python block is script.py, as README says. `make test` is left out: CI runs it.
`make train` makes a few steps instead of all. What the package declares to require, also for the extras that README installs,
is linked from the environment that runs this, if it is there: pip finds it, and need not unpack PyTorch a second time.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import cache_from_source
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from sybil import Document
from sybil.parsers.markdown import CodeBlockParser

LEFT_OUT = "make test"


def code_blocks(readme: Path, language: str) -> list[str]:
    """Return the contents of README's fenced blocks in a language, in order."""
    document = Document.parse(str(readme), CodeBlockParser(language, lambda example: None))
    return [str(example.parsed) for example in document.examples()]


def required(name: str, extras: set[str]) -> set[str]:
    """Return the names of what a distribution requires with these extras, and of what that does, as far as it is installed."""
    found: set[str] = set()
    left = [(name, {"", *extras})]
    while left:
        name, extras = left.pop()
        try:
            requirements = map(Requirement, distribution(name).requires or ())
        except PackageNotFoundError:
            continue
        found.add(canonicalize_name(name))
        needed = [r for r in requirements if r.marker is None or any(r.marker.evaluate({"extra": x}) for x in extras)]
        left += [(r.name, {"", *r.extras}) for r in needed if canonicalize_name(r.name) not in found]
    return found


def link_installed(name: str, packages: Path) -> None:
    """Link the files of a distribution, with what was compiled of them, into another environment's site-packages."""
    files = [file for file in distribution(name).files or () if ".." not in file.parts]
    compiled = [Path(cache_from_source(str(file))) for file in files if file.suffix == ".py"]
    own = Path(str(distribution(name).locate_file("")))
    for file in {*map(Path, files), *compiled}:
        origin, target = own / file, packages / file
        if origin.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(origin, target)


def main() -> None:
    archive, folder = Path(sys.argv[1]), Path(sys.argv[2])
    shutil.unpack_archive(archive, folder)
    (source,) = folder.resolve().iterdir()
    commands = "".join(code_blocks(source / "README.md", "bash")).splitlines(keepends=True)
    script = "".join(line for line in commands if not line.startswith(LEFT_OUT))
    if len(script) == len("".join(commands)):
        raise SystemExit(f"README doesn't say {LEFT_OUT!r}: take its exception out of {__file__}")
    (source / "script.py").write_text(code_blocks(source / "README.md", "python")[0], encoding="utf-8")
    venv.create(source / ".venv", symlinks=True, with_pip=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(source / ".venv")}))
    extras = {extra for given in re.findall(r"install \"\.\[(.*?)\]\"", script) for extra in given.split(",")}
    # PyTorch requires setuptools, and a new environment may have its own.
    for name in required("parallel3d", extras) - {"parallel3d", "setuptools"}:
        link_installed(name, packages)
    left_out = {"PYTHONPATH", "MAKEFLAGS", "MAKELEVEL"}  # of a user there is no make around
    environment = {name: value for name, value in os.environ.items() if name not in left_out} | {
        "PATH": f"{source / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PIP_CONSTRAINT": str(source / "constraints.txt"),
        "PIP_COMPILE": "0",  # compiling all that comes with PyTorch takes as long as the rest of the installation
        "ARGS": "--steps 8 --eval_windows 64 --sample 8",
    }
    raise SystemExit(subprocess.run(["bash", "-exo", "pipefail", "-c", script], cwd=source, env=environment).returncode)


if __name__ == "__main__":
    main()
