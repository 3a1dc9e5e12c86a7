"""The distribution `deepspeed` of `p3d deepspeed install`: its names are the package's, and it replaces nothing."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from warm import run_codes

from parallel3d import cli
from parallel3d.cli import deepspeed
from parallel3d.deepspeed.aliases import VERSION

IMPORTS = """
import sys
sys.path.insert(0, {site!r})
from importlib.metadata import version
import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.aio import AsyncIOBuilder
from deepspeed.runtime.zero import GatheredParameters, unwrap_model_for_generation
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.utils import ZeRORuntimeException
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.lr_schedules import CYCLE_MIN_LR, WARMUP_LR, WARMUP_MIN_LR
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.utils import logger, logging
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
import parallel3d, parallel3d.pipe, parallel3d.zero, torch
assert version("deepspeed") == deepspeed.__version__ == {version!r}
assert deepspeed.pipe is parallel3d.pipe and deepspeed.zero is parallel3d.zero and deepspeed.comm is parallel3d.comm
assert deepspeed.initialize is parallel3d.initialize and logging.logger is logger
assert parallel3d.pipe.__name__ == parallel3d.pipe.__spec__.name == "parallel3d.pipe"
assert "WarmupLR" in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
assert (CYCLE_MIN_LR, WARMUP_LR, WARMUP_MIN_LR) == ("cycle_min_lr", "WarmupLR", "warmup_min_lr")
assert checkpointing is parallel3d.checkpointing and DeepSpeedEngine is parallel3d.DeepSpeedEngine
assert PipeModelDataParallelTopology is deepspeed.pipe.PipeModelDataParallelTopology
assert get_accelerator().supported_dtypes() == [torch.float32, torch.bfloat16, torch.float16]
assert get_accelerator().random() is torch.random
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.runtime import config as runtime_config
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.runtime.utils import see_memory_usage
from deepspeed.utils.groups import _get_sequence_parallel_world_size
from deepspeed.utils.torch import required_torch_version
assert PipelineEngine is deepspeed.PipelineEngine and issubclass(PipelineEngine, DeepSpeedEngine)
assert (deepspeed.__version_major__, deepspeed.__version_minor__) == (0, 19)
assert required_torch_version(min_version=2.1) and not required_torch_version(max_version="2.10")
config = runtime_config.DeepSpeedConfig({{"train_batch_size": 8, "gradient_accumulation_steps": 2}})
assert (config.train_micro_batch_size_per_gpu, config.gradient_allreduce_op) == (4, "mean")
config.train_batch_size, config.gradient_accumulation_steps, config.zero_optimization = None, 3, {{"stage": 2}}
samples = torch.utils.data.TensorDataset(torch.ones(24, 2))
engine, _, loader, _ = deepspeed.initialize(model=torch.nn.Linear(2, 1), config=config, training_data=samples)
assert engine.get_batch_info() == (12, 4, 3) and engine.zero_optimization_stage() == 2
assert engine.training_dataloader is loader and engine._get_optimizer_ckpt_name("a", "b").startswith("a/b/")
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.utils.tensor_fragment import fragment_address, safe_get_full_grad
assert ZeroStageEnum(2) is ZeroStageEnum.gradients
from deepspeed.launcher import runner
assert runner.encode_world_info({{"a": [0, 1]}}) == "eyJhIjogWzAsIDFdfQ=="
assert callable(runner.parse_resource_filter) and callable(runner._parse_hostfile)
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
zero = DeepSpeedZeroConfig(stage3_gather_fp16_weights_on_model_save=True, cpu_offload=True, stage=3)
assert (zero.gather_16bit_weights_on_model_save, zero.overlap_comm, zero.offload_optimizer.device) == (True, True, "cpu")
config.zero_optimization = zero
import pickle
assert pickle.loads(pickle.dumps(DeepSpeedCPUAdam)) is DeepSpeedCPUAdam
from deepspeed import env_report
assert env_report.__file__.startswith(sys.path[0]) and env_report.main() == 0
with deepspeed.OnDevice(dtype=torch.bfloat16):
    layer = torch.nn.Linear(2, 2)
assert (layer.weight.device.type, layer.weight.dtype) == ("meta", torch.bfloat16)
assert torch.get_default_dtype() == torch.float32
groups = split_params_into_different_moe_groups_for_optimizer({{"params": [layer.weight]}})
assert groups == [{{"params": [layer.weight]}}]
assert deepspeed.ops.__compatible_ops__[AsyncIOBuilder.NAME], "offload to NVMe needs no operator"
assert DeepSpeedZeroOffloadOptimizerConfig(device=OffloadDeviceEnum.cpu).device == "cpu"
assert issubclass(ZeRORuntimeException, ValueError)
see_memory_usage("before", force=True)
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.profiling.flops_profiler import get_model_profile
from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler
from deepspeed.runtime.zero import GatheredParameters, register_external_parameter
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live as estimate
from deepspeed.utils import OnDevice, groups, instrument_w_nvtx, safe_get_local_grad, set_z3_leaf_modules_by_name
from deepspeed.zero import ZeroParamStatus as Status
assert GatheredParameters is parallel3d.zero.GatheredParameters and Status is ZeroParamStatus
assert OnDevice is deepspeed.OnDevice and deepspeed.tp_model_init is parallel3d.tp_model_init
assert instrument_w_nvtx(len)([1, 2]) == 2
deepspeed.comm.log_summary()
from deepspeed.runtime.lr_schedules import add_tuning_arguments
from deepspeed.utils.timer import SynchronizedWallClockTimer
assert deepspeed.add_tuning_arguments is add_tuning_arguments
told = SynchronizedWallClockTimer, add_tuning_arguments
for absent in (MoE, UlyssesSPAttentionHF, groups._get_data_parallel_group, estimate, *told):
    assert not isinstance(layer, absent)
    try:
        absent(4)
    except ValueError as error:
        assert f"DeepSpeed's {{absent.__name__}} has no counterpart: " in str(error), error
    else:
        raise AssertionError(absent)
row = torch.arange(6.0)[2:4]
[kept] = clone_tensors_for_torch_save([row])
assert kept.equal(row) and kept.untyped_storage().nbytes() == 8
import deepspeed.runtime.pipe.schedule as schedule
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.utils import partition_balanced, partition_uniform
assert deepspeed.runtime.engine.DeepSpeedEngine is DeepSpeedEngine
assert [len(step) for step in schedule.TrainSchedule(1, 1, 0)] == [2, 4]
assert partition_balanced([5, 1, 1, 1, 2], 2) == [0, 1, 5] and partition_balanced([2, 1], 3) == [0, 1, 2, 2]
assert partition_uniform(6, 3) == [0, 2, 4, 6] and partition_uniform(2, 3) == [0, 1, 2, 2]
try:
    deepspeed.initialize(model=None, config={{}}, dist_init_required=True)
except AssertionError as error:
    assert "model is a NoneType" in str(error), error
for wrong in ("import deepspeed.nowhere", "deepspeed.runtime.nowhere", "from deepspeed import nowhere", "deepspeed.nowhere"):
    try:
        exec(wrong)
    except (ImportError, AttributeError) as error:
        assert "nowhere" in str(error), error
    else:
        raise AssertionError(wrong)
"""


def test_all_imports_are_the_packages_own_modules(tmp_path: Path):
    with zipfile.ZipFile(deepspeed.write_wheel(tmp_path)) as wheel:
        wheel.extractall(tmp_path / "site")
        assert wheel.testzip() is None
    code = IMPORTS.format(site=str(tmp_path / "site"), version=VERSION)
    [ended] = run_codes(code, tmp_path / "run", [{"CUDA_VISIBLE_DEVICES": ""}])
    assert ended.returncode == 0, ended.stderr


FIRST_IMPORTS = """
import sys
import parallel3d
assert "torch" not in sys.modules
from parallel3d.ops.adam import FusedAdam
from parallel3d.utils import log_dist
from parallel3d.runtime.lr_schedules import WarmupLR
import parallel3d.arguments, parallel3d.utils.zero_to_fp32
import parallel3d.checkpointing, parallel3d.deepspeed.ops.adam as own
assert parallel3d.ops.adam is own and parallel3d.checkpointing is parallel3d.deepspeed.checkpointing
assert own.__name__ == own.__spec__.name == "parallel3d.deepspeed.ops"
from parallel3d.profiling.flops_profiler import FlopsProfiler
from parallel3d.profiling.flops_profiler.profiler import FlopsProfiler as same
assert FlopsProfiler is same is parallel3d.deepspeed.profiling.flops_profiler.FlopsProfiler
for name, refused in (("init_inference", parallel3d.init_inference), ("MoE", parallel3d.moe.MoE)):
    try:
        refused(None)
    except ValueError as error:
        assert f"DeepSpeed's {name} has no counterpart" in str(error), error
    else:
        raise AssertionError(name)
try:
    import parallel3d.nowhere
except ModuleNotFoundError as error:
    assert "parallel3d.nowhere" in str(error)
else:
    raise AssertionError("nowhere")
"""


def test_modules_by_deepspeeds_paths_are_found_before_anything_else_is_imported():
    ended = subprocess.run([sys.executable, "-c", FIRST_IMPORTS], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would change this environment."""
    called: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        called.append(command[1:])
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    monkeypatch.setattr(deepspeed.subprocess, "run", run)
    return called


def distribution(monkeypatch: pytest.MonkeyPatch, directory: Path, version: str) -> None:
    info = directory / f"deepspeed-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(directory))


def test_it_is_installed_and_removed_by_pip(
    pip: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["deepspeed", "remove"]) == 0
    assert "there is no distribution deepspeed" in capsys.readouterr().out
    assert cli.main(["deepspeed", "install"]) == 0
    assert pip[-1][:4] == ["-m", "pip", "-q", "install"]
    assert pip[-1][-1].endswith(f"deepspeed-{VERSION}-py3-none-any.whl")
    distribution(monkeypatch, tmp_path, VERSION)
    assert deepspeed.who_is_deepspeed() == f"this package's ({VERSION})"
    assert cli.main(["deepspeed", "remove"]) == 0
    assert pip[-1] == ["-m", "pip", "-q", "uninstall", "--yes", "deepspeed"]


@pytest.mark.parametrize("action", ["install", "remove"])
def test_an_installed_deepspeed_is_left_alone(
    pip: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    action: str,
):
    distribution(monkeypatch, tmp_path, "0.19.8")
    assert cli.main(["deepspeed", action]) == 2
    assert "DeepSpeed 0.19.8 is installed in" in capsys.readouterr().err
    assert pip == []
    assert deepspeed.who_is_deepspeed() == "the original one's (0.19.8)"


def test_a_module_of_such_a_name_alone_is_not_found():
    # Where DeepSpeed itself is installed, it asks for this one, and takes an ImportError for an answer.
    with pytest.raises(ModuleNotFoundError):
        import_module("accelerator")


def test_what_pip_says_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert cli.main(["deepspeed", "install"]) == 2
    assert "failed" in capsys.readouterr().err
