"""Finding one's place in the world, by launcher."""

import pytest

from parallel3d.comm.environment import first_host, slurm_environment

SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08],login1",
}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[07-12,15],cpu1", "gpu07"),
        ("node1", "node1"),
        ("a-b-3,a-b-4", "a-b-3"),
        ("n[3,5]", "n3"),
        ("h.x.y", "h.x.y"),
    ],
)
def test_first_host_of_a_slurm_node_list(nodes: str, host: str):
    assert first_host(nodes) == host


def test_srun_gives_torchs_variables():
    variables = slurm_environment(SRUN)
    assert {k: variables[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")} == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu07",
    }


def test_two_jobs_and_two_steps_on_a_host_get_different_ports():
    ports = {
        slurm_environment({**SRUN, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step})["MASTER_PORT"]
        for job in ("4711", "4712")
        for step in ("0", "1")
    }
    assert len(ports) == 4
    assert all(1024 < int(port) < 32768 for port in ports)  # below the ports of outgoing connections
