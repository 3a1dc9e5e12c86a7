"""Runs README's shell commands, one after the other, in a fresh virtual environment: python tools/readme.py SDIST FOLDER.

The sdist is unpacked into FOLDER, so that nothing but what it contains can be used. README's bash blocks are one script, which
stops at the first command that fails; its first Python block is script.py, as README says. `make test` is left out: CI runs it.
`make train` makes a few steps instead of all. What the package declares to require is linked from the environment that runs
this: pip finds it there, and need not unpack PyTorch a second time.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import distribution
from importlib.util import cache_from_source
from pathlib import Path

from packaging.requirements import Requirement
from sybil import Document
from sybil.parsers.markdown import CodeBlockParser

LEFT_OUT = "make test"


def code_blocks(readme: Path, language: str) -> list[str]:
    """Return the contents of README's fenced blocks in a language, in order."""
    document = Document.parse(str(readme), CodeBlockParser(language, lambda example: None))
    return [str(example.parsed) for example in document.examples()]


def required(name: str) -> set[str]:
    """Return the names of what a distribution requires without extras, and of what that does."""
    found: set[str] = set()
    left = [name]
    while left:
        requirements = map(Requirement, distribution(left.pop()).requires or ())
        needed = {r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})}
        left += needed - found
        found |= needed
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
    for name in required("parallel3d") - {"setuptools"}:  # PyTorch requires it, and a new environment may have its own
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
