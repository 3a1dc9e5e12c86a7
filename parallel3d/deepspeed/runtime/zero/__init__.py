"""`parallel3d.deepspeed.runtime.zero`, where DeepSpeed scripts look for names of ZeRO-3."""

from parallel3d.deepspeed.runtime.zero import offload_config, partition_parameters
from parallel3d.deepspeed.runtime.zero.partition_parameters import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    register_external_parameter,
    unregister_external_parameter,
)
