"""The sections of monitors, to which values of each step are written, of the FLOPs profiler and of the log of collectives."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, SecretStr

from parallel3d.config.section import NonEmpty, NonNegative, Positive, Section, key, keys_of, read_only

_FOLDER = 'a folder, or "" for the working directory'


class TensorboardConfig(Section):
    """Event files of TensorBoard in output_path/job_name."""

    enabled: bool = False
    output_path: str = key("", _FOLDER)
    job_name: NonEmpty = "DeepSpeedJobName"


class CsvMonitorConfig(Section):
    """A CSV file of each value in output_path/job_name."""

    enabled: bool = False
    output_path: str = key("", _FOLDER)
    job_name: NonEmpty = "DeepSpeedJobName"


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


class FlopsProfilerConfig(Section):
    """A count of the FLOPs of the first rank in one step: of a forward, or of a whole train_batch."""

    known_keys = keys_of("flops_profiler")

    enabled: bool = False
    profile_step: NonNegative = key(1, "a whole number >= 0 of steps before the one that is counted")
    module_depth: int = key(-1, "a whole number of levels of modules, or -1 for all", ge=-1)
    top_modules: Positive = key(1, "a whole number >= 1 of modules of each level")
    detailed: bool = True
    output_file: str | None = key(None, "a path, or null to print the counts")


class CommsLoggerConfig(Section):
    """A log of the collectives of each process, see comm.log_summary."""

    known_keys = keys_of("comms_logger")

    enabled: bool = False
    verbose: bool = key(False, "true or false, whether a line is logged for each collective")
    prof_all: bool = key(True, "true or false, whether all kinds are logged, or those of prof_ops")
    prof_ops: Annotated[tuple[str, ...], BeforeValidator(read_only)] = key(
        (), "a list of kinds: all_reduce, reduce_scatter, all_gather, broadcast"
    )
