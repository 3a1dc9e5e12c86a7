"""Clusters from a user's description: a YAML file, a mapping, or "128x8xH100"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from parallel3d.config.files import YAML_SUFFIXES, read_mapping
from parallel3d.errors import ConfigError, nearest
from parallel3d.planner.cluster.cluster import Cluster, Device
from parallel3d.planner.cluster.graph import Host, build_cluster
from parallel3d.planner.cluster.presets import DEVICES, MACHINES, Catalogue
from parallel3d.planner.cluster.schema import HostSpec, read_spec


def load_cluster(given: str | Path | Mapping[str, Any]) -> Cluster:
    """Return the cluster that a YAML file, a mapping with the same keys, or a short form describes.

    Short forms: "8xH100" or "dgx-h100", one host; "128x8xH100", 128 hosts with a network card beside each GPU, on rails.
    The keys of a file: schema.py. Raises ConfigError, with the remedy, for unknown keys, impossible
    quantities, no GPUs, and GPUs that can't reach each other.
    """
    if isinstance(given, Mapping):
        return _read(given, "cluster")
    path = Path(given)
    if path.suffix.lower() in (*YAML_SUFFIXES, ".json") or path.is_file():
        return _read(read_mapping(path), str(path))
    return _short_form(str(given).strip())


def _short_form(text: str) -> Cluster:
    many = re.fullmatch(rf"(\d+) *x *(\d+ *x.+|{'|'.join(map(re.escape, MACHINES))})", text, re.IGNORECASE)
    hosts, kind = (int(many[1]), many[2]) if many else (1, text)
    if re.fullmatch(r"(\d+) *x.+", MACHINES.get(kind.lower(), kind)) is None:
        names = [*MACHINES, *(f"8x{name}" for name in DEVICES)]
        raise ConfigError(
            f"{text!r} is neither a cluster's file nor a machine; give the path of a YAML, GPUs such as 8xH100, hosts and GPUs "
            f"such as 16x8xH100, or a name of {', '.join(MACHINES)}.{nearest(text, names)}"
        )
    if hosts == 0:
        raise ConfigError(f"{text!r} has no hosts, and so no GPUs; give one or more, such as 8xH100")
    counted = {} if hosts == 1 else {"count": hosts}
    return _read({"name": text, "hosts": [{"name": "host", "machine": kind, **counted}]}, text)


def _read(given: Mapping[str, Any], name: str) -> Cluster:
    spec = read_spec(given, name)
    try:
        catalogue = Catalogue(spec.devices)
        return build_cluster(name, [host for described in spec.hosts for host in _hosts(described, catalogue)], spec)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _hosts(spec: HostSpec, catalogue: Catalogue) -> list[Host]:
    """Return the hosts of a description; its machine gives the values that it leaves out."""
    if spec.machine is not None:
        said = {key: getattr(spec, key) for key in spec.model_fields_set - {"machine"}}
        spec = HostSpec.model_validate({**catalogue.machine(spec.machine), **said})
    if spec.gpus is None:
        raise ConfigError(f"host {spec.name!r} says nothing of its GPUs; give `machine: 8xH100`, or `gpus`")
    devices: list[Device] = []
    for gpus in spec.gpus:
        device = catalogue.device(gpus.device)
        devices += [replace(device, memory=gpus.memory or device.memory)] * gpus.count
    return [Host(name, tuple(devices), spec) for name in spec.names]
