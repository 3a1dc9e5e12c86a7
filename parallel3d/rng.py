"""Random streams that depend on the seed and never on the layout."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import numpy
import torch
from torch.utils._python_dispatch import _disable_current_modes

# Called before a layer runs, with its index in the list.
EnterLayer = Callable[[int], None]
# numpy's legacy generator takes seeds of 32 bits.
_NUMPY_SEEDS = 2**32


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, numpy (by the seed's lower 32 bits) and torch on every device."""
    random.seed(seed)
    numpy.random.seed(seed % _NUMPY_SEEDS)
    torch.manual_seed(seed)


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return the states of the generators that a script draws from: torch's on the CPU and on `device`, numpy's, Python's."""
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": numpy.random.get_state(),
        "python": (version, numpy.array(words, dtype=numpy.uint32), gauss),
    }


def set_generator_states(states: Mapping[str, Any] | None, device: torch.device) -> None:
    """Restore the states that `generator_states` returned; None leaves the generators as they are."""
    if states is None:
        return
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"], device)
    numpy.random.set_state(states["numpy"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))


def _keep_states(device: torch.device) -> Callable[[], None]:
    """Return a function that gives torch's generators (CPU, and `device` if it is CUDA) the states back that they have now."""
    states = [(generator, generator.get_state()) for generator in _generators(device)]

    def restore() -> None:
        for generator, state in states:
            generator.set_state(state)

    return restore


@contextmanager
def _forked(device: torch.device) -> Iterator[None]:
    """Restore torch's generators (CPU, and `device` if it is CUDA) after the block."""
    restore = _keep_states(device)
    try:
        yield
    finally:
        restore()


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators (CPU, and `device` if it is CUDA) for the block, and restore their states after it."""
    with _forked(device):
        # torch.manual_seed formats a stack for each backend that is not in use yet, which takes a millisecond.
        for generator in _generators(device):
            generator.manual_seed(seed)
        yield


def layer_seed(base_seed: int, layer: int) -> int:
    """Return the seed of a layer's initial weights, which depends only on its index in the list."""
    return base_seed + layer


def stream_seed(*coordinates: int) -> int:
    """Return a seed of 63 bits for a stream with these coordinates; different coordinates give unrelated streams."""
    text = ",".join(map(str, coordinates))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _generators(device: torch.device) -> list[torch.Generator]:
    """Return the CPU's generator, and the device's if it is CUDA."""
    on_device = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
    return [torch.default_generator, *on_device]


def same_draws() -> AbstractContextManager[None]:
    """Return a context in which the generators of the CPU and the current GPU start from their states at this call.

    After the context they have the states that they had before it.
    """
    on_gpu = torch.cuda.is_initialized()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    rewind = _keep_states(device)

    @contextmanager
    def rewound() -> Iterator[None]:
        with _forked(device):
            rewind()
            yield

    return rewound()


class RandomStreams:
    """Random streams of layers in training, as for dropout masks: one for each (seed, step, micro-batch, layer).

    Micro-batches are numbered over all replicas, so that a mask doesn't depend on the layout.

    - seed: a tuple of integers, the same on all ranks.
    - device: device whose generator is seeded, in addition to the CPU's.
    - own_streams: those of this rank's shards, which restart in each layer.
    """

    def __init__(self, seed: tuple[int, ...], device: torch.device, own_streams: OwnStreams):
        self._seed, self._device, self._own_streams = seed, device, own_streams
        self._generators = _generators(device)

    def state_dict(self) -> dict[str, list[int]]:
        """Return the seed: a stream has no state between two layers."""
        return {"seed": list(self._seed)}

    def load_state_dict(self, state: Mapping[str, list[int]]) -> None:
        """Continue with the streams of a saved run, if it had any."""
        self._seed = tuple(state.get("seed", self._seed))

    def of(self, step: int, micro_batch: int, forward: int = 0) -> EnterLayer:
        """Return a function that begins the stream of each layer for a forward, counted from 0, of a step's micro-batch."""
        return partial(self._enter, (step, micro_batch), (forward,) if forward else ())

    def _enter(self, place: tuple[int, int], forward: tuple[int, ...], layer: int) -> None:
        self._own_streams.enter_layer()
        seed = stream_seed(*self._seed, *place, layer, *forward)
        for generator in self._generators:
            generator.manual_seed(seed)

    def kept(self) -> AbstractContextManager[None]:
        """Restore the generators after the block: a script's own random numbers don't depend on the layout."""
        return _forked(self._device)


class Capture(Protocol):
    """Random streams while a CUDA graph is captured, in which no generator can be seeded, nor its state be restored."""

    def begin_own(self, number: int, index: int) -> Callable[[], object]:
        """Draw from the layer's stream with this number for shard `index`, until the result is called."""

    def without_draws(self) -> AbstractContextManager[None]:
        """Raise for random numbers that are drawn in this context, by the first replay at the latest."""


class OwnStreams:
    """Random streams of this rank's shards of tensors, in the layer that runs. All groups of a model share one object.

    - most: the largest number of streams that a layer has begun.
    - capture: the current capture of a CUDA graph, or None.
    """

    def __init__(self) -> None:
        self.most = self._number = 0
        self.capture: Capture | None = None

    def __deepcopy__(self, memo: object) -> OwnStreams:
        """Return these streams: a copy of a layer draws on the same rank."""
        return self

    @contextmanager
    def captured(self, capture: Capture) -> Iterator[None]:
        """Let a capture begin the streams in this context."""
        self.capture = capture
        try:
            yield
        finally:
            self.capture = None

    def enter_layer(self) -> None:
        """Count the streams of another layer from now on."""
        self._number = 0

    def begin(self, index: int, device: torch.device) -> Callable[[], object]:
        """Draw the numbers of shard `index` from now on, until the result is called."""
        number = self._number
        self._number = number + 1
        if self.capture is not None:
            return self.capture.begin_own(number, index)
        self.most = max(self.most, self._number)
        seed, end = own_seed(index), _keep_states(device)
        for generator in _generators(device):
            generator.manual_seed(seed)
        return end

    @contextmanager
    def drawing(self, index: int, device: torch.device) -> Iterator[None]:
        """Draw the numbers of shard `index` in this context; see `begin`."""
        end = self.begin(index, device)
        try:
            yield
        finally:
            end()


def own_seed(index: int) -> int:
    """Return the seed of shard `index`'s next stream of its own."""
    # Drawn on the CPU: on CUDA the host would have to wait. While layers are traced, neither fake nor counted.
    with _disable_current_modes():
        return stream_seed(int(torch.randint(2**62, ())), index)


class OwnStream:
    """`OwnStreams.drawing` for shard `index`, begun and ended by forward hooks and pre-hooks of modules, in training.

    A begin without an end (a recomputation that stops early) has no effect afterwards.
    """

    def __init__(self, streams: OwnStreams, index: int):
        self._streams, self._index = streams, index
        self._end: Callable[[], object] | None = None

    def begin(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any = None) -> None:
        """Draw from the shard's own stream from now on."""
        if module.training:
            self._end = self._streams.begin(self._index, args[0].device)

    def end(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """Draw from the common stream again."""
        if self._end is not None:
            self._end()
        self._end = None


def same_stream(layer: int) -> None:
    """Do nothing: an EnterLayer for evaluation."""
