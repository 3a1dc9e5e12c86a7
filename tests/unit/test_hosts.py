"""Hostfiles and filters by DeepSpeed's documented rules, and that nothing that a user writes runs as a command."""

from __future__ import annotations

import re
import shlex
import subprocess
from argparse import Namespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.errors import ConfigError, ExecutionError
from parallel3d.launcher import deepspeed
from parallel3d.launcher.hosts import parse_hostfile, parse_named, parse_range_list, parse_resource_filter
from parallel3d.launcher.nodes import starters
from parallel3d.launcher.rendezvous import check_clocks

NAMES = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,8}", fullmatch=True)
HOSTS = st.dictionaries(NAMES, st.integers(1, 5), min_size=1, max_size=5)
NOISE = st.sampled_from(["", "   ", "# worker-9 slots=4", "\t# a comment"])


@st.composite
def filters(draw: st.DrawFn) -> tuple[dict[str, list[int]], list[tuple[str, list[int]]]]:
    """Hosts with their slots, and words of a filter: a host and some of its slots, none for all."""
    hosts = {host: list(range(number)) for host, number in draw(HOSTS).items()}
    names = draw(st.lists(st.sampled_from(list(hosts)), min_size=1, max_size=4))
    return hosts, [(name, draw(st.lists(st.sampled_from(hosts[name]), max_size=3))) for name in names]


def written(words: list[tuple[str, list[int]]]) -> str:
    return "@".join(f"{host}:{','.join(map(str, slots))}" if slots else host for host, slots in words)


@given(HOSTS, st.data())
def test_a_hostfile_gives_its_hosts_in_order(hosts: dict[str, int], data: st.DataObject):
    lines = []
    for host, slots in hosts.items():
        lines += [data.draw(NOISE), f" {host}\t slots={slots}" + data.draw(st.sampled_from(["", "  # the small one"]))]
    assert list(parse_hostfile(lines).items()) == list(hosts.items())
    bad = data.draw(
        st.sampled_from([next(iter(hosts)) + " slots=1", "worker 4", "this is bad slots=1", "worker slots=x"])
    )
    lines.insert(data.draw(st.integers(0, len(lines))), bad)
    with pytest.raises(ConfigError, match="hostfile: "):
        parse_hostfile(lines)


@pytest.mark.parametrize("lines", [[], ["worker-0 slots=0", "worker-1 slots=0"]])
def test_a_hostfile_without_slots_is_refused(lines: list[str]):
    with pytest.raises(ConfigError, match="no host with slots is in it; write lines as: worker-0 slots=4"):
        parse_hostfile(lines)


@given(filters())
def test_a_filter_includes_what_it_excludes_otherwise(case: tuple[dict[str, list[int]], list[tuple[str, list[int]]]]):
    """A slot is named if a word names it, or its host alone; hosts stay in the hostfile's order, and those without slots go."""
    hosts, words = case
    named = {(host, slot) for host, slots in words for slot in slots or hosts[host]}
    for keyword, wanted in (("include_str", True), ("exclude_str", False)):
        expected = {h: [slot for slot in slots if ((h, slot) in named) == wanted] for h, slots in hosts.items()}
        found = parse_resource_filter(hosts, **{keyword: written(words)})
        assert list(found.items()) == [(host, slots) for host, slots in expected.items() if slots]
    assert parse_resource_filter(hosts) == hosts


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("worker-0", "worker-1"), "give one of them"),
        (("worker-2",), "no host 'worker-2'.* Did you mean 'worker-"),
        (("", "worker-2:0"), "no host 'worker-2'"),
        (("worker-1:5",), r"worker-1 has the slots \[0, 1\], and not \[5\]"),
        (("worker-0:a",), "'worker-0:a' is not a host with slots"),
        (("", "worker-1@worker-0:1@"), "'' is not a host with slots"),
        (("worker-0:1:2",), "'worker-0:1:2' is not a host with slots"),
    ],
)
def test_wrong_filters_are_named(words: tuple[str, ...], told: str):
    with pytest.raises(ConfigError, match=told):
        parse_resource_filter({"worker-0": [0, 1, 2, 3], "worker-1": [0, 1]}, *words)


@given(st.lists(st.integers(0, 40), min_size=1, unique=True))
def test_lists_of_cores(cores: list[int]):
    cores = sorted(cores)
    assert parse_range_list(",".join(map(str, cores))) == cores
    assert parse_range_list(f"{cores[0]}-{cores[-1]}") == list(range(cores[0], cores[-1] + 1))
    for wrong in (
        f"{cores[-1] + 1},{cores[0]}",
        f"{cores[0]},{cores[0]}",
        f"{cores[-1] + 1}-{cores[0]}",
        "x",
        "1,,2",
        "",
    ):
        with pytest.raises(ConfigError):
            parse_range_list(wrong)


@given(st.text(min_size=1) | st.sampled_from(["a;touch x", "$(id)", "-oProxyCommand=id", "a`id`", "a&b", "a|b", "é"]))
def test_no_host_is_more_than_a_name(text: str):
    """Not to ssh, whose options begin with -, nor to a shell."""
    for parse in (lambda: parse_hostfile([f"{text} slots=1"]), lambda: parse_named(text)):
        try:
            hosts = list(parse())
        except ConfigError:
            continue
        assert all(shlex.quote(host) == host and re.match(r"\w", host, re.ASCII) for host in hosts)


def test_hosts_whose_clocks_differ_are_named():
    check_clocks("abc", [100.0, 104.9, 100.5])
    with pytest.raises(ExecutionError, match=r"the clock of b is 34 s ahead of that of c: .* set them by NTP"):
        check_clocks("abc", [101.0, 134.2, 100.0])


VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20) | st.just("'; touch x; '")


@settings(max_examples=30)
@given(VALUES, st.lists(VALUES.filter(bool), min_size=1, max_size=3))
def test_a_host_gets_values_and_arguments_as_they_are(value: str, arguments: list[str]):
    """The script that ssh hands over, run up to the launcher."""
    options = deepspeed.parse_args(["--master_addr", "other.invalid", "--force_multi", "x.py"])
    command = Namespace(**{**vars(options), "command": ["x.py", *arguments]})
    *_, starter = starters(command, {"other.invalid": [0]}, {"VALUE": value})
    assert starter.command[-2:] == ["other.invalid", "sh -s"]
    script = starter.script.replace("\nexec ", '\nprintf "%s\\0" "$VALUE" ')
    done = subprocess.run(["sh", "-s"], input=script.encode(), capture_output=True, check=True)
    found = done.stdout.decode().split("\0")
    assert (found[0], found[-1 - len(arguments) : -1]) == (value, arguments)
