"""Batch arithmetic: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x dp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parallel3d.config.schema import Config
from parallel3d.errors import ConfigError

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


@dataclass(frozen=True)
class BatchSizes:
    """Samples of a step over all ranks, samples of a micro-batch, and micro-batches of a step of each replica."""

    train_batch_size: int
    micro_batch_size: int
    num_micro_batches: int


def resolve_batch(
    train_batch_size: int | None,
    micro_batch: int | None,
    accumulation: int | None,
    *,
    pipe: int,
    data: int,
    model: int,
) -> BatchSizes:
    """Fill in the sizes that are None by DeepSpeed's rules, for `model` x `pipe` x `data` ranks.

    With the train batch or the micro-batch alone, accumulation is 1. Raises ConfigError, with sizes that fit, when
    neither of the two is given or the three don't multiply up.
    """
    sizes = {TRAIN: train_batch_size, MICRO: micro_batch, ACCUMULATION: accumulation}
    _require_positive({name: value for name, value in sizes.items() if value is not None})
    _require_positive({"pipe": pipe, "data": data, "model": model})
    if train_batch_size is None:
        if micro_batch is None:
            raise ConfigError(_missing(accumulation, data))
        train_batch_size = micro_batch * (accumulation or 1) * data
    micro_batch_size = micro_batch or train_batch_size // ((accumulation or 1) * data)
    num_micro_batches = accumulation or train_batch_size // (max(micro_batch_size, 1) * data)
    if micro_batch_size * num_micro_batches * data != train_batch_size:
        world = f"world = tp x pp x dp = {model} x {pipe} x {data} = {model * pipe * data} ranks"
        raise ConfigError(f"{world}; {_mismatch(train_batch_size, micro_batch, accumulation, data)}")
    return BatchSizes(train_batch_size, micro_batch_size, num_micro_batches)


def batch_sizes(config: Config, *, pipe: int, data: int, model: int) -> BatchSizes:
    """Return the sizes of a configuration, as resolve_batch does; `elastic` leaves the accumulation to the replicas."""
    accumulation = None if config.elastic.enabled else config.gradient_accumulation_steps
    given = config.train_batch_size, config.train_micro_batch_size_per_gpu, accumulation
    return resolve_batch(*given, pipe=pipe, data=data, model=model)


def _require_positive(values: dict[str, int]) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} is {value!r}; give a whole number >= 1")


def _missing(accumulation: int | None, data: int) -> str:
    alone = "" if accumulation is None else f"; {ACCUMULATION} = {accumulation} alone leaves both open"
    return (
        f"no batch size: give {TRAIN} (samples an optimizer step, over all dp = {data} data-parallel ranks) or {MICRO} "
        f"(samples a micro-batch){alone}"
    )


def _mismatch(train: int, micro: int | None, accumulation: int | None, data: int) -> str:
    """Return the equation that failed, with its numbers, and the changes of one size that would mend it."""
    factors = [value for value in (micro, accumulation, data) if value is not None]
    unit = (micro or 1) * (accumulation or 1) * data
    product = " x ".join(map(str, factors)) + (f" = {unit}" if len(factors) > 1 else "")
    failed = f"{train} != {product}" if len(factors) == 3 else f"{train} is not a multiple of {product}"
    fixes = "; or ".join(_fixes(train, micro, accumulation, data))
    return f"{TRAIN} = {MICRO} x {ACCUMULATION} x dp does not hold: {failed}. Set {fixes}."


def _fixes(train: int, micro: int | None, accumulation: int | None, data: int) -> Iterator[str]:
    unit = (micro or 1) * (accumulation or 1) * data
    if micro and accumulation:
        yield f"{TRAIN} to {unit}"
    else:
        below = train // unit * unit
        yield f"{TRAIN} to " + " or ".join(str(size) for size in (below, below + unit) if size)
    if train % data:
        return
    per_rank = train // data
    for name, value, other in ((MICRO, micro, accumulation), (ACCUMULATION, accumulation, micro)):
        if value and other and per_rank % other == 0:
            yield f"{name} to {per_rank // other}"
        elif value and not other:
            yield f"{name} to {_divisor(per_rank, value)}"


def _divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` among the 100,000 whole numbers up to `limit`, or 1."""
    most = min(limit, number)
    return next((size for size in range(most, max(0, most - 100_000), -1) if number % size == 0), 1)
