"""Presets beside measurements of the machines that they describe."""

from __future__ import annotations

import pytest

from parallel3d.planner.cluster.file import load_cluster
from parallel3d.planner.network.links import Network


@pytest.mark.parametrize(
    ("nbytes", "measured"), [(64 << 10, 31e-6), (512 << 10, 34e-6), (4 << 20, 58e-6), (33.5e6, 202e-6)]
)
def test_an_all_reduce_of_four_h200_takes_what_nccl_took(nbytes, measured):
    network = Network(load_cluster("4xH200"))
    assert network.each("all_reduce", [range(4)], nbytes).max() == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("kind", "nbytes", "bus_bandwidth"), [("reduce_scatter", 1 << 30, 325e9), ("all_gather", 512 << 20, 311e9)]
)
def test_buckets_of_four_h200_move_at_nccls_bus_bandwidth(kind, nbytes, bus_bandwidth):
    network = Network(load_cluster("4xH200"))
    assert network.each(kind, [range(4)], nbytes).max() == pytest.approx(nbytes * 3 / 4 / bus_bandwidth, rel=0.05)


def test_a_message_between_h200_takes_what_a_peer_copy_and_its_signal_took():
    assert Network(load_cluster("4xH200")).each("send", [(0, 1)], 32 << 20).max() == pytest.approx(108e-6, rel=0.05)


def test_an_all_reduce_of_eight_a100_moves_at_nccl_tests_bus_bandwidth():
    network = Network(load_cluster("8xA100"))
    moved = 2 * 7 / 8 * (1 << 30)
    assert network.each("all_reduce", [range(8)], 1 << 30).max() == pytest.approx(moved / 232e9, rel=0.05)


@pytest.mark.parametrize(
    ("machine", "device", "sheet"),
    [("8xB200", "B200", 900e9), ("72xGB200", "GB200", 900e9), ("8xMI300X", "MI300X", 7 * 64e9)],
)
def test_newer_machines_stay_below_their_data_sheets(machine, device, sheet):
    """Peaks of bf16 without sparsity, of memory and of links each way; those measured of Hopper are two thirds or more."""
    peaks = {"B200": (2250e12, 8e12), "GB200": (2500e12, 8e12), "MI300X": (1307e12, 5.3e12)}[device]
    cluster = load_cluster(machine)
    found = cluster.gpus[0].device
    ranks = range(len(cluster.gpus))
    moved = 2 * (len(ranks) - 1) / len(ranks) * (1 << 30)
    bus_bandwidth = moved / Network(cluster).each("all_reduce", [ranks], 1 << 30).max()
    assert (found.name, found.peak_flops) == (device, peaks[0])
    assert 0.45 * peaks[0] < found.gemm_flops < 0.8 * peaks[0]
    assert 0.75 * peaks[1] < found.memory_bandwidth < 0.9 * peaks[1]
    assert 0.6 * sheet < bus_bandwidth < 0.75 * sheet
