"""The sections of monitors, to which values of each step are written, of the FLOPs profiler and of the log of collectives."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, SecretStr

from parallel3d.config.section import NonEmpty, NonNegative, Positive, Section, key, own_key, read_only


class FilesConfig(Section):
    """Files in output_path/job_name."""

    enabled: bool = False
    output_path: str = key("", 'a folder, or "" for the working directory')
    job_name: NonEmpty = key("DeepSpeedJobName", "the name of a folder in output_path")


class TensorboardConfig(FilesConfig):
    """Event files of TensorBoard in output_path/job_name."""


class CsvMonitorConfig(FilesConfig):
    """A CSV file of each value in output_path/job_name."""


class WandbConfig(Section):
    """A run of Weights & Biases: the one that has been begun when the first step ends, else a new one."""

    unset_by_auto = frozenset({"project", "group", "team"})

    enabled: bool = False
    project: NonEmpty = key("deepspeed", "the name of a project")
    group: NonEmpty | None = key(None, "the name of a group of runs, or null")
    team: NonEmpty | None = key(None, "the name of a team or user, or null")


class CometConfig(Section):
    """An experiment of Comet."""

    enabled: bool = False
    samples_log_interval: NonNegative = key(100, "a whole number of samples >= 0 between two values that are written")
    project: NonEmpty | None = key(None, "the name of a project, or null")
    workspace: NonEmpty | None = key(None, "the name of a workspace, or null")
    api_key: SecretStr | None = key(None, "a key, or null for the one that COMET_API_KEY gives")
    experiment_name: NonEmpty | None = key(None, "the name of the experiment, or null")
    experiment_key: NonEmpty | None = key(None, "the key of an experiment to go on with, or null")
    online: bool | None = key(None, "true or false, or null to leave it to Comet")
    mode: Literal["get", "create", "get_or_create"] | None = key(None, '"get", "create", "get_or_create" or null')


class MlflowConfig(Section):
    """A run of MLflow: the one that is active when the first step ends, else a new one."""

    enabled: bool = own_key(False, "true or false")
    tracking_uri: NonEmpty | None = own_key(None, "a server, database or folder, or null for MLflow's default")
    experiment_name: NonEmpty | None = own_key(None, "the name of an experiment, or null for MLflow's default")
    run_name: NonEmpty | None = own_key(None, "a name of the run, or null")


class MonitorConfig(Section):
    """The progress of steps on a terminal, and the peak for MFU."""

    progress: bool | Positive = own_key(
        False, "true for a bar on a terminal instead of the steps' lines, or the whole number of steps of the training"
    )
    peak_flops: float | None = own_key(
        None,
        "FLOP/s > 0 of a device, of which MFU is the used share, or null for the data sheet's where it is known",
        gt=0,
    )


class RunRecordConfig(Section):
    """A folder of a training's values and measurements, for `p3d report` and to correct the planner."""

    directory: NonEmpty | None = own_key(
        None, "a folder for metrics.jsonl, run_record.json and step_timeline.json, or null for none"
    )
    after_steps: Positive = own_key(10, "a whole number of steps >= 1, after which 4 are recorded")

    @property
    def enabled(self) -> bool:
        """Whether there is a folder."""
        return self.directory is not None


class FlopsProfilerConfig(Section, keys="flops_profiler"):
    """A count of the FLOPs of the first rank in one step: of a forward, or of a whole train_batch."""

    enabled: bool = False
    profile_step: NonNegative = key(1, "a whole number >= 0 of steps before the one that is counted")
    module_depth: int = key(-1, "a whole number of levels of modules, or -1 for all", ge=-1)
    top_modules: Positive = key(1, "a whole number >= 1 of modules of each level")
    detailed: bool = True
    output_file: str | None = key(None, "a path, or null to print the counts")


class CommsLoggerConfig(Section, keys="comms_logger"):
    """A log of the collectives of each process, see comm.log_summary."""

    enabled: bool = False
    verbose: bool = key(False, "true or false, whether a line is logged for each collective")
    prof_all: bool = key(True, "true or false, whether all kinds are logged, or those of prof_ops")
    prof_ops: Annotated[tuple[str, ...], BeforeValidator(read_only)] = key(
        (), "a list of kinds: all_reduce, reduce_scatter, all_gather, broadcast"
    )
