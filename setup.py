"""Packaging. Tool settings live in pyproject.toml; constraints.txt pins what CI installs."""

import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
KERNELS = "parallel3d/kernels"


class BuildWithKernels(build_py):
    """The package with the CUDA sources, and with its kernels compiled where there is nvcc; never fails for want of them."""

    def run(self) -> None:
        """As build_py; what is installed in place finds its kernels in the user's cache."""
        super().run()
        carried = None
        if not self.editable_mode:
            carried = Path(self.build_lib) / KERNELS
            shutil.copytree(ROOT / "csrc", carried / "csrc", dirs_exist_ok=True)
        # The package without its __init__, which needs torch: that may not be here yet.
        if "parallel3d" not in sys.modules:
            sys.modules["parallel3d"] = package = ModuleType("parallel3d")
            package.__path__ = [str(ROOT / "parallel3d")]
        from parallel3d.errors import KernelError
        from parallel3d.kernels.cuda_library import build

        try:
            print(f"CUDA kernels: {build(carried)}")
        except KernelError as error:
            print(f"without CUDA kernels: {error}", file=sys.stderr)


class WheelOfItsPlatform(bdist_wheel):
    """A wheel for any platform, or with compiled kernels for this one; any Python 3 loads them."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, ABI and platform, after the build."""
        kernels = Path(self.get_finalized_command("build").build_lib) / KERNELS
        if not any(kernels.glob("*.so")):
            return "py3", "none", "any"
        self.root_is_pure = False
        return "py3", "none", super().get_tag()[2]


# An index page has no files beside it: pictures go, and links to files become their text.
README = re.sub(
    r"!?\[([^\]]*)\]\((?!https?://)[^)]*\)",
    lambda link: "" if link[0][0] == "!" else link[1],
    (ROOT / "README.md").read_text(),
)

MONITORS = {
    "tensorboard": ["tensorboard>=2.15"],
    "wandb": ["wandb>=0.19"],
    "comet": ["comet_ml>=3.47"],
    "mlflow": ["mlflow-skinny>=2.14"],
}
PLOT = ["matplotlib>=3.8"]  # of tools/bench/curves.py
EXAMPLES = ["scikit-learn>=1.5"]
RAY = ["ray[train]>=2.50"]
HUGGINGFACE = ["accelerate>=1.10", "peft>=0.17", "trl>=1.0", "datasets>=4"]
DOCS = ["mkdocs-material>=9.6", "mkdocstrings[python]>=0.30", "nbconvert>=7.16", "ipykernel>=6.29"]
TEST = [
    "pytest>=8",
    "pytest-xdist>=3.6",
    "allpairspy>=2.5",
    "hypothesis>=6.100",
    "ruff>=0.6",
    "mypy>=1.11",
    "import-linter>=2.0",
    "types-PyYAML",
    "types-networkx",
    "transformers>=5.24",
    "accelerate>=1.10",
    "peft>=0.17",
    "torchdata>=0.11",
    "selenium>=4.20",
    "sybil>=9",
    *MONITORS["tensorboard"],
    *MONITORS["wandb"],
    *MONITORS["mlflow"],
]

setup(
    name="parallel3d",
    version="0.1.0",
    description="Trains neural networks with pipeline, ZeRO data and tensor parallelism at once",
    long_description=README,
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["parallel3d", "parallel3d.*"]),
    package_data={
        "parallel3d": ["py.typed"],
        "parallel3d.config": ["known_keys.yaml"],
        "parallel3d.schedule": ["*.jinja"],
        "parallel3d.costs": ["devices.yaml"],
        "parallel3d.planner.search": ["models.yaml"],
        "parallel3d.planner.report": ["page/*"],
    },
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfItsPlatform},
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.11",
        "numpy>=1.26",
        "networkx>=3.2",
        "jinja2>=3.1",
        "pyyaml>=6",
        "pydantic>=2.7",
        "hjson>=3.1",
        "rich>=13",
        "safetensors>=0.4.3",
        "shtab>=1.7",
    ],
    extras_require={
        **MONITORS,
        "examples": EXAMPLES,
        "huggingface": HUGGINGFACE,
        "ray": RAY,
        "docs": DOCS,
        "test": TEST + PLOT + EXAMPLES,
    },
    entry_points={"console_scripts": ["parallel3d = parallel3d.launcher:main", "p3d = parallel3d.cli:command"]},
)
