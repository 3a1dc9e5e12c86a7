"""An unmodified Hugging Face model as a pipeline, whose micro-batches are those of Hugging Face's data loaders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from parallel3d.config import load_sections
from parallel3d.errors import DataError
from parallel3d.models.huggingface.adapters import PREFIX
from parallel3d.models.huggingface.wrap import wrap
from parallel3d.models.loss import CausalLMLoss, next_labels
from parallel3d.parameters import replace_tensors
from parallel3d.pipe.module import PipelineModule
from parallel3d.zero.gathered import GatheredParameters
from parallel3d.zero.weights import is_whole


class HuggingFacePipeline(PipelineModule):
    """A causal language model of transformers, split by the configuration's `pipeline` and `tensor_parallel` sections.

    - model: it keeps its own layers, see `wrap`. Parameters that this rank doesn't train lose their memory.
    - config: DeepSpeed's configuration as a mapping; keys of zero_optimization may still be "auto".

    A micro-batch is a mapping of the model's arguments, with `labels` or `shift_labels`. The loss is the mean over all tokens
    of a batch, whatever the micro-batch or replica they are in. Parameters have the model's names, so that a checkpoint fits
    every layout, and the model trained whole. Raises ConfigError for a model that can't be split.
    """

    def __init__(self, model: nn.Module, config: Mapping[str, Any]):
        gather_whole(model)
        layers = wrap(model)
        # The prefix of a part's parameters is its second argument, except for the last part, which holds whole names.
        outer = PREFIX if hasattr(model, "peft_config") else ""
        self._prefixes = [*(outer + layer.module_args[1] for layer in layers[:-1]), outer]
        zero = {k: value for k, value in config.get("zero_optimization", {}).items() if value != "auto"}
        stages = load_sections(config, "pipeline").pipeline.stages
        super().__init__(
            layers,
            num_stages=None if stages else 1,
            loss_fn=CausalLMLoss(per_token=True),
            dynamic_shape=True,  # whether there is a mask depends on its values
            config={**config, "zero_optimization": zero},
        )
        self.config = model.config
        # Without memory, a forward of the model with old weights is an error.
        kept = {*self.parameters(), *model.buffers()}
        replace_tensors(model, lambda t: t if t in kept else nn.Parameter(t.detach().to("meta"), t.requires_grad))

    def pair(self, micro_batch: Any) -> tuple[dict[str, Any], Tensor | None]:
        """Return a micro-batch without its labels, and for each position the label of the token after it, if there are any.

        Raises DataError for anything but a mapping.
        """
        if not isinstance(micro_batch, Mapping):
            raise DataError(
                f"a micro-batch must be a mapping of the model's arguments, not {type(micro_batch).__name__}"
            )
        inputs = dict(micro_batch)
        labels, shifted = inputs.pop("labels", None), inputs.pop("shift_labels", None)
        if shifted is None and labels is not None:
            shifted = next_labels(labels)
        return inputs, shifted

    def global_name(self, layer: int, name: str) -> str:
        """Return the model's own name of the parameter."""
        return self._prefixes[layer] + name.partition(".")[2]


def gather_whole(model: nn.Module) -> None:
    """Make weights whole again that transformers has sharded over all ranks while it built the model (ZeRO-3)."""
    replace_tensors(model, _whole)


def _whole(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter) or is_whole(tensor):
        return tensor
    with GatheredParameters(tensor):
        return nn.Parameter(tensor.detach().cpu().clone(), tensor.requires_grad)
