"""The sections of monitors, which write the curves of a training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, SecretStr

from parallel3d.config.section import NonEmpty, Positive, Section, key


class FilesConfig(Section):
    """Curves in files of the folder output_path/job_name; rank 0 waits for the device in every step."""

    enabled: bool = False
    output_path: str = key("", 'a folder; "" for the working directory')
    job_name: NonEmpty = key("DeepSpeedJobName", "the name of a folder in output_path")


class WandbConfig(Section):
    """Curves in Weights & Biases, in the run that the script has begun, or else in a new one."""

    enabled: bool = False
    group: str | None = key(None, "a group of runs, or null")
    team: str | None = key(None, "a team or user, or null")
    project: NonEmpty = key("deepspeed", "a project")


class CometConfig(Section):
    """Curves in Comet. What is null is taken from Comet's own settings."""

    enabled: bool = False
    samples_log_interval: Positive = key(100, "a whole number >= 1 of samples between two points of a curve")
    project: str | None = key(None, "a project, or null")
    workspace: str | None = key(None, "a workspace, or null")
    api_key: SecretStr | None = key(None, "a key of Comet's, or null", exclude=True)
    experiment_name: str | None = key(None, "a name for the experiment, or null")
    experiment_key: str | None = key(None, "the key of an experiment to continue, or null")
    online: bool | None = key(None, "true, false to write to a file, or null")
    mode: Literal["get", "create", "get_or_create"] | None = key(None, '"get", "create", "get_or_create" or null')


def _read_null(value: object) -> object:
    return {} if value is None else value


Files = Annotated[FilesConfig, BeforeValidator(_read_null, json_schema_input_type=FilesConfig | None)]
Wandb = Annotated[WandbConfig, BeforeValidator(_read_null, json_schema_input_type=WandbConfig | None)]
Comet = Annotated[CometConfig, BeforeValidator(_read_null, json_schema_input_type=CometConfig | None)]
