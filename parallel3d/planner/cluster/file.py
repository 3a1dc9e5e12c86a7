"""Clusters from a user's description: a YAML file, a mapping, or "128x8xH100"."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import networkx as nx
from pydantic import ValidationError

from parallel3d.config.files import YAML_SUFFIXES, explain, read_mapping
from parallel3d.costs.devices import Catalogue, Device, WireSpec, presets
from parallel3d.errors import ConfigError, nearest
from parallel3d.planner.cluster.cluster import Cluster, Gpu, natural
from parallel3d.planner.cluster.schema import (
    MOST_GPUS,
    ClusterSpec,
    HostSpec,
    LinkSpec,
    NicSpec,
    SwitchSpec,
)

T = TypeVar("T")
_MOST_PAIRS = 2**20  # most pairs of nodes that links may join


@dataclass(frozen=True)
class _Host:
    """One host. devices: the devices of its GPUs, by index; spec: how they are wired."""

    name: str
    devices: tuple[Device, ...]
    spec: HostSpec

    @cached_property
    def islands(self) -> tuple[tuple[int, ...], ...]:
        """GPUs by index, as NVLink joins them; each is in one island. Raises ConfigError for impossible indices."""
        everyone = range(len(self.devices))
        if self.spec.nvlink is None:
            return tuple((k,) for k in everyone)
        given = self.spec.nvlink.islands or (tuple(everyone),)
        indices = [index for island in given for index in island]
        _check_indices(self, indices, "nvlink.islands")
        if twice := _twice(indices):
            raise ConfigError(f"host {self.name!r}: nvlink.islands name GPU {twice[0]} twice; name each in one island")
        return (*given, *((k,) for k in everyone if k not in indices))

    @cached_property
    def nics(self) -> tuple[tuple[NicSpec, tuple[int, ...]], ...]:
        """Each network card, with the GPUs that share a PCIe switch with it; no GPU if the card is on the host's PCIe."""
        cards = [card for spec in self.spec.nics or () for card in [spec] * spec.count]
        for card in cards:
            _check_indices(self, card.gpus or (), "nics.gpus")
        return tuple(
            (card, self._gpus_near(k, len(cards)) if card.gpus is None else card.gpus) for k, card in enumerate(cards)
        )

    def _gpus_near(self, card: int, cards: int) -> tuple[int, ...]:
        """Return the GPUs that are dealt out to a card, in order; none where NVLink doesn't join all of them."""
        count = len(self.devices)
        if len(self.islands) > 1:
            return ()
        if cards > count:
            return (card * count // cards,)
        return tuple(k for k in range(count) if k * cards // count == card)

    @property
    def nodes(self) -> list[str]:
        """The GPUs' names in the graph."""
        return [f"{self.name}/gpu{k}" for k in range(len(self.devices))]


def default_path() -> Path:
    """Return the path of this host's measured cluster: cluster.yaml in the user's cache. Raises ConfigError without a home."""
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(cache) if cache else Path.home() / ".cache") / "parallel3d" / "cluster.yaml"
    except RuntimeError as error:
        raise ConfigError(
            f"there is no path for the measured cluster: {error}; set XDG_CACHE_HOME to a directory"
        ) from None


def measured_name(device: str) -> str:
    """Return the name that a measured host's file gives a device. device: CUDA's name for it, or "cpu"."""
    return f"measured {device}"


def load_cluster(given: str | Path | Mapping[str, Any]) -> Cluster:
    """Return the cluster that a YAML file, a mapping with the same keys, or a short form describes.

    Short forms: "8xH100" or "dgx-h100", one host; "128x8xH100", 128 hosts with a network card near each GPU, on rails.
    The keys of a file: schema.py. Raises ConfigError, with the remedy, for unknown keys, impossible
    quantities, no GPUs, and GPUs that can't reach each other.
    """
    if isinstance(given, Mapping):
        return _read(given, "cluster")
    path, is_file = Path(given), False
    with suppress(OSError):  # a short form can be too long for a file's name
        is_file = path.is_file()
    if is_file or path.suffix.lower() in (*YAML_SUFFIXES, ".json"):
        return _read(read_mapping(path), str(path))
    return _short_form(str(given).strip())


def _short_form(text: str) -> Cluster:
    names = "|".join(map(re.escape, presets().machines))
    many = re.fullmatch(rf"(\d{{1,9}}) *x *(\d+ *x.+|{names})", text, re.IGNORECASE)
    hosts, kind = (int(many[1]), many[2]) if many else (1, text)
    if hosts == 0:
        raise ConfigError(f"{text!r} has no hosts, and so no GPUs; give one or more, such as 8xH100")
    counted = {} if hosts == 1 else {"count": hosts}
    return _read({"name": text, "hosts": [{"name": "host", "machine": kind, **counted}]}, text)


def _read(given: Mapping[str, Any], name: str) -> Cluster:
    try:
        spec = ClusterSpec.model_validate(given)
        catalogue = Catalogue(spec.devices)
        described = [_with_machine(host, catalogue) for host in spec.hosts]
        _check_size(described, spec.switches)
        return _build(name, [host for each in described for host in _hosts(each, catalogue)], spec)
    except (ConfigError, ValidationError) as error:
        raise ConfigError(f"{name}: {explain(error) if isinstance(error, ValidationError) else error}") from None


def _with_machine(spec: HostSpec, catalogue: Catalogue) -> HostSpec:
    """Return the description of a host with its machine's values for those that it leaves out."""
    if spec.machine is not None:
        said = {key: getattr(spec, key) for key in spec.model_fields_set - {"machine"}}
        spec = HostSpec.model_validate({**_machine(spec.machine, catalogue), **said})
    if spec.gpus is None:
        raise ConfigError(f"host {spec.name!r} says nothing of its GPUs; give `machine: 8xH100`, or `gpus`")
    return spec


def _machine(text: str, catalogue: Catalogue) -> dict[str, Any]:
    """Return the host that '8xH100' or a machine's name stands for, as in a cluster's YAML. Raises ConfigError."""
    machines = presets().machines
    match = re.fullmatch(r"(\d{1,9}) *x *(.+)", machines.get(text.lower(), text).strip())
    if match is None:
        names = [*machines, *(f"8x{name}" for name in catalogue.devices)]
        raise ConfigError(
            f"{text!r} is neither a machine nor a cluster's file; give the path of a YAML, GPUs such as 8xH100, hosts and GPUs "
            f"such as 16x8xH100, or a name of {', '.join(machines)}.{nearest(text, names)}"
        )
    count, device, wiring = int(match[1]), catalogue.device(match[2]), catalogue.wiring(match[2])
    if count > MOST_GPUS:
        raise ConfigError(f"{text!r} has more than {MOST_GPUS} GPUs; give fewer")
    if wiring is None:
        raise ConfigError(
            f"it isn't known how a machine of {device.name!r} is wired; give the host gpus, nvlink, pcie and nics instead of "
            "`machine`, or the device a `base`"
        )
    nics = [{**wiring.nic.given, "count": max(1, count // wiring.gpus_per_nic)}]
    host: dict[str, Any] = {"gpus": [{"device": device.name, "count": count}], "pcie": wiring.pcie, "nics": nics}
    if wiring.nvlink is not None and count > 1:
        host["nvlink"] = wiring.nvlink.given
        if size := wiring.island:
            host["nvlink"]["islands"] = [list(range(k, min(k + size, count))) for k in range(0, count, size)]
    return host


def _check_size(hosts: Sequence[HostSpec], switches: Sequence[SwitchSpec]) -> None:
    """Raise ConfigError for more GPUs, network cards, hosts or switches than MOST_GPUS, before any is made."""
    numbers = {
        "switches": sum(switch.count or 1 for switch in switches),
        "hosts": sum(host.count or 1 for host in hosts),
    }
    numbers["GPUs"] = sum(gpus.count * (host.count or 1) for host in hosts for gpus in host.gpus or ())
    numbers["network cards"] = sum(card.count * (host.count or 1) for host in hosts for card in host.nics or ())
    for what, number in numbers.items():
        if number > MOST_GPUS:
            raise ConfigError(f"there are {number} {what}; describe {MOST_GPUS} or fewer")


def _hosts(spec: HostSpec, catalogue: Catalogue) -> list[_Host]:
    """Return the hosts of a complete description."""
    devices: list[Device] = []
    for gpus in spec.gpus or ():
        device = catalogue.device(gpus.device)
        devices += [device.model_copy(update={"memory": gpus.memory or device.memory})] * gpus.count
    return [_Host(name, tuple(devices), spec) for name in spec.names]


def _build(name: str, hosts: Sequence[_Host], spec: ClusterSpec) -> Cluster:
    """Return the cluster of these hosts and of the switches and links of `spec`, the same in whatever order they come.

    name: used if `spec` has none. Raises ConfigError for no GPUs, names twice or unknown, and GPUs that can't reach each
    other.
    """
    if not any(host.devices for host in hosts):
        raise ConfigError("there are no GPUs; give hosts some, such as hosts: [{machine: 8xH100}]")
    if twice := _twice(host.name for host in hosts):
        raise ConfigError(f"two hosts are called {twice[0]!r}; give each a name of its own, or one of them a `count`")
    ordered = sorted(hosts, key=lambda host: natural(host.name))
    graph: nx.Graph = nx.Graph()
    for host in ordered:
        _add_host(graph, host)
    _add_network(graph, ordered, spec.switches)
    _add_links(graph, spec.links)
    gpus = _gpus(graph, ordered)
    _check_reach(graph, gpus)
    return Cluster(spec.name or name, gpus, graph, spec.overlap, spec.collective_seconds)


def _check_indices(host: _Host, indices: Iterable[int], key: str) -> None:
    size = len(host.devices)
    for index in indices:
        if not 0 <= index < size:
            raise ConfigError(f"host {host.name!r}: {key} name GPU {index} of {size}; the indices are 0 to {size - 1}")


def _twice(names: Iterable[T]) -> list[T]:
    return [name for name, count in Counter(names).items() if count > 1]


def _connect(graph: nx.Graph, a: str, b: str, kind: str, wire: WireSpec) -> None:
    measures = {"latency": presets().latency[kind], **wire.given}
    graph.add_edge(a, b, kind=kind, **{name: measures[name] for name in WireSpec.model_fields if name in measures})


def _add_host(graph: nx.Graph, host: _Host) -> None:
    gpus = host.nodes
    graph.add_nodes_from(gpus, role="gpu", host=host.name)
    spec, name = host.spec, host.name
    for k, island in enumerate(island for island in host.islands if len(island) > 1):
        assert spec.nvlink is not None
        graph.add_node(f"{name}/nvlink{k}", role="nvlink", host=name)
        for index in island:
            _connect(graph, gpus[index], f"{name}/nvlink{k}", "nvlink", spec.nvlink)
    root = f"{name}/pcie"
    if spec.pcie is None and not all(near for _, near in host.nics):
        raise ConfigError(
            f"host {name!r} has network cards that are near no GPU, and no pcie to reach them; give pcie: {{bandwidth: 50e9}}, "
            "or the cards `gpus`"
        )
    if spec.pcie is not None and (len(host.islands) > 1 or not all(near for _, near in host.nics)):
        graph.add_node(root, role="pcie", host=name)
        for gpu in gpus:
            _connect(graph, gpu, root, "pcie", spec.pcie)
    for k, (card, near) in enumerate(host.nics):
        graph.add_node(f"{name}/nic{k}", role="nic", host=name)
        # Without a description of PCIe, a card's lanes are as fast as the card.
        lanes = spec.pcie or WireSpec(bandwidth=card.bandwidth)
        for other in [gpus[index] for index in near] or [root]:
            _connect(graph, f"{name}/nic{k}", other, "pcie", lanes)


def _add_network(graph: nx.Graph, hosts: Sequence[_Host], described: Sequence[SwitchSpec]) -> None:
    """Plug cards into their switches; where none is described, the k-th of each host into rail k, and rails into a spine."""
    groups = {switch.name: switch.names for switch in described}
    switches = sorted((name for switch in described for name in switch.names), key=natural)
    if twice := [*_twice(switches), *(name for name in switches if name in graph)]:
        raise ConfigError(f"two switches or nodes are called {twice[0]!r}; give each switch a name of its own")
    graph.add_nodes_from(switches, role="switch", host=None)
    rails: dict[str, float] = defaultdict(float)
    for host in hosts:
        plugged: Counter[str] = Counter()
        for k, (card, _) in enumerate(host.nics):
            if not described and (card.switch or host.spec.switch) is None:
                if len(hosts) > 1:
                    rails[f"rail{k}"] += card.bandwidth
                    _connect(graph, f"{host.name}/nic{k}", f"rail{k}", "nic", card)
                continue
            name = _switch_of(host, card, groups)
            group = groups.get(name, [name])
            _connect(graph, f"{host.name}/nic{k}", group[plugged[name] % len(group)], "nic", card)
            plugged[name] += 1
    for rail, bandwidth in sorted(rails.items(), key=lambda item: natural(item[0])):
        graph.add_node(rail, role="switch", host=None)
        if len(rails) > 1:
            graph.add_node("spine", role="switch", host=None)
            _connect(graph, rail, "spine", "network", WireSpec(bandwidth=bandwidth))


def _switch_of(host: _Host, card: NicSpec, groups: dict[str, list[str]]) -> str:
    """Return the switch, or group of switches, that a card is plugged into."""
    known = [*groups, *(name for names in groups.values() for name in names)]
    name = card.switch or host.spec.switch
    if name is None and len(groups) == 1:
        return known[0]
    if name is None:
        raise ConfigError(
            f"host {host.name!r} doesn't say its cards' switch; give it `switch`, one of {', '.join(groups)}"
        )
    if name not in known:
        raise ConfigError(
            f"host {host.name!r} names the unknown switch {name!r};{nearest(name, known)} "
            + (f"Known are {', '.join(groups)}" if groups else "describe it under `switches`")
        )
    return name


def _add_links(graph: nx.Graph, links: Sequence[LinkSpec]) -> None:
    added: dict[tuple[str, str], dict[str, Any]] = {}
    pairs = 0
    for link in links:
        given = dict(link.given)
        starts, ends = (_matching(graph, pattern) for pattern in given.pop("between"))
        pairs += len(starts) * len(ends)
        if pairs > _MOST_PAIRS:
            raise ConfigError(
                f"links are between {pairs} pairs of nodes; describe {_MOST_PAIRS} or fewer by closer patterns"
            )
        for a, b in ((a, b) for a in starts for b in ends if a != b):
            if graph.has_edge(a, b):
                graph.edges[a, b].update(given)
            elif link.bandwidth is None:
                raise ConfigError(
                    f"links: there is none between {a!r} and {b!r} to change; give `bandwidth` to add it, or two nodes that "
                    f"are joined: {a!r} is with {', '.join(list(graph[a])[:4]) or 'none'}"
                )
            else:
                added[min(a, b), max(a, b)] = given
    # Sorted: paths that are equally good should not depend on the order in which links were given.
    for (a, b), given in sorted(added.items(), key=itemgetter(0)):
        kind = given.get("kind") or _kind({graph.nodes[a]["role"], graph.nodes[b]["role"]})
        graph.add_edge(a, b, **{"latency": presets().latency[kind], **given, "kind": kind})


def _matching(graph: nx.Graph, pattern: str) -> list[str]:
    found = [pattern] if pattern in graph else [node for node in graph if fnmatchcase(node, pattern)]
    if not found:
        raise ConfigError(
            f"links name {pattern!r}, which no node is called;{nearest(pattern, graph)} Nodes are "
            f"{', '.join(list(graph)[:4])}, ..., {list(graph)[-1]}"
        )
    return found


def _kind(roles: set[str]) -> str:
    """Return the kind of a link between nodes of these roles."""
    if roles == {"switch"}:
        return "network"
    if "nic" in roles:
        return "nic" if "switch" in roles else "pcie"
    return "pcie" if "pcie" in roles else "nvlink"


def _check_reach(graph: nx.Graph, gpus: Sequence[Gpu]) -> None:
    first = gpus[0]
    reached = nx.node_connected_component(graph, first.node)
    lost = next((gpu for gpu in gpus if gpu.node not in reached), None)
    if lost is None:
        return
    if lost.host == first.host:
        remedy = "give the host `pcie`, or `nvlink` for all of its GPUs"
    else:
        remedy = "give each host `nics` and plug them into one switch, or into switches that `links` join"
    raise ConfigError(f"{first.node!r} can't reach {lost.node!r}; {remedy}")


def _gpus(graph: nx.Graph, hosts: Sequence[_Host]) -> tuple[Gpu, ...]:
    """Return the GPUs in the order of hosts and indices. Paths of NVLink join an island; islands are numbered in that order."""
    fast: nx.Graph = nx.Graph()
    fast.add_nodes_from(node for host in hosts for node in host.nodes)
    fast.add_edges_from((a, b) for a, b, link in graph.edges(data=True) if link["kind"] == "nvlink")
    islands = {node: number for number, joined in enumerate(nx.connected_components(fast)) for node in joined}
    return tuple(
        Gpu(node, device, host.name, k, islands[node])
        for host in hosts
        for k, (node, device) in enumerate(zip(host.nodes, host.devices, strict=True))
    )
