"""Packaging. Tool settings live in pyproject.toml; constraints.txt pins what CI installs."""

from setuptools import find_packages, setup

PLOT = ["matplotlib>=3.8"]
TEST = [
    "pytest>=8",
    "pytest-xdist>=3.6",
    "hypothesis>=6.100",
    "ruff>=0.6",
    "mypy>=1.11",
    "import-linter>=2.0",
    "types-PyYAML",
    "types-networkx",
    "transformers>=5",
    "selenium>=4.20",
]

setup(
    name="parallel3d",
    version="0.1.0",
    description="Trains neural networks across pipeline stages, ZeRO data parallelism and tensor slices at once",
    long_description=open("README.md", encoding="utf-8").read(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["parallel3d", "parallel3d.*"]),
    package_data={"parallel3d": ["py.typed"], "parallel3d.planner.report": ["page/*"]},
    python_requires=">=3.10",
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
    ],
    extras_require={"plot": PLOT, "test": TEST + PLOT},
    entry_points={"console_scripts": ["parallel3d = parallel3d.launcher:main", "p3d = parallel3d.cli:main"]},
)
