"""`p3d deepspeed`: puts a distribution named deepspeed into the environment, whose modules are this package's."""

from __future__ import annotations

import argparse
import base64
import hashlib
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

from parallel3d.deepspeed.aliases import VERSION
from parallel3d.errors import ConfigError

_INFO = f"deepspeed-{VERSION}.dist-info"
_FILES = {
    "deepspeed/__init__.py": (
        '"""DeepSpeed\'s names, of the package parallel3d; `p3d deepspeed remove` takes this out."""\n\n'
        "import sys\n\nfrom parallel3d.deepspeed.aliases import become_deepspeed\n\n"
        "become_deepspeed(sys.modules[__name__])\n"
    ),
    "deepspeed/env_report.py": (
        '"""Report of the environment: `p3d doctor`."""\n\nimport sys\n\nfrom parallel3d.cli import main as cli\n\n\n'
        'def main():\n    return cli(["doctor"])\n\n\nif __name__ == "__main__":\n    sys.exit(main())\n'
    ),
    f"{_INFO}/METADATA": (
        f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {VERSION}\nSummary: DeepSpeed's names, of parallel3d\n"
    ),
    f"{_INFO}/WHEEL": "Wheel-Version: 1.0\nGenerator: parallel3d\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{_INFO}/entry_points.txt": (
        "[console_scripts]\ndeepspeed = parallel3d.launcher.deepspeed:command\nds_report = deepspeed.env_report:main\n"
    ),
}


def installed() -> str | None:
    """Return the version of the installed distribution deepspeed, this package's or the original one; None if there is none."""
    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return None


def who_is_deepspeed() -> str:
    """Return whose modules `import deepspeed` gives in this environment."""
    present = installed()
    if present is None:
        return "none is installed; `p3d deepspeed install` lets libraries that need it use this package"
    return f"this package's ({VERSION})" if present == VERSION else f"the original one's ({present})"


def write_wheel(directory: Path) -> Path:
    """Write the distribution's wheel into a directory, and return its path."""
    path = directory / f"deepspeed-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        record = ""
        for name, text in _FILES.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record += f"{name},sha256={digest},{len(text.encode())}\n"
            wheel.writestr(name, text)
        wheel.writestr(f"{_INFO}/RECORD", f"{record}{_INFO}/RECORD,,\n")
    return path


def run(options: argparse.Namespace) -> int:
    """Run `p3d deepspeed`. Raises ConfigError where another DeepSpeed is installed."""
    present = installed()
    if present not in (None, VERSION):
        raise ConfigError(
            f"DeepSpeed {present} is installed in {sys.prefix}, and is not replaced; use another environment, or "
            f"`pip uninstall deepspeed` first"
        )
    if options.action == "install":
        with TemporaryDirectory() as directory:
            wheel = write_wheel(Path(directory))
            _pip("install", "--no-deps", "--no-index", "--force-reinstall", str(wheel))
        print(f"installed: deepspeed {VERSION}; imports of deepspeed give parallel3d's modules")
    elif present is None:
        print("there is no distribution deepspeed in this environment")
    else:
        _pip("uninstall", "--yes", "deepspeed")
        print(f"removed: deepspeed {VERSION}")
    return 0


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "-q", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (its own words)
    if ended.returncode:
        raise ConfigError(f"pip {' '.join(arguments)} failed: {(ended.stderr or ended.stdout).strip()[-500:]}")
