"""Tables for the attention of all blocks on a rank: rotary angles and causal masks, each made once."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.models.config import DecoderConfig, Rope


def rotary_frequencies(rope: Rope, dim: int, max_positions: int, seq: int = 0) -> tuple[Tensor, float]:
    """Return (radians per position for each pair of a head's numbers, [dim / 2] in fp32; factor of cosines and sines).

    max_positions: of the model; seq: length of the sequence, only for kind "dynamic".
    """
    theta, factor = rope.theta, rope.factor
    if rope.kind == "dynamic":
        longer = factor * max(seq, max_positions) / max_positions - (factor - 1)
        theta *= longer ** (dim / (dim - 2))
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, device="cpu", dtype=torch.float32) / dim)
    original = rope.original_max_positions or max_positions
    if rope.kind == "linear":
        frequencies = frequencies / factor
    elif rope.kind == "llama3":
        frequencies = _llama3(rope, frequencies, original)
    elif rope.kind == "yarn":
        return _yarn(rope, frequencies, dim, original), _yarn_temperature(rope)
    return frequencies, 1.0


def _llama3(rope: Rope, frequencies: Tensor, original: int) -> Tensor:
    """Stretch wavelengths above original / low_freq_factor, and leave those below original / high_freq_factor."""
    turns = original * frequencies / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rope.factor)


def _yarn(rope: Rope, frequencies: Tensor, dim: int, original: int) -> Tensor:
    """Keep pairs that turn more than beta_fast times within the original context, and stretch those under beta_slow."""

    def pair_that_turns(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    pairs = torch.arange(dim // 2, device="cpu", dtype=torch.float32)
    stretched = ((pairs - low) / ((high - low) or 0.001)).clamp(0, 1)
    return frequencies * (1 - stretched) + frequencies / rope.factor * stretched


def _yarn_temperature(rope: Rope) -> float:
    def of(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return of(rope.mscale) / of(rope.mscale_all_dim)
    return of(1.0)


class Tables:
    """Tables shared by the blocks of one list of specs; they grow to the longest sequence seen, for each device.

    They are not buffers, because each block would have its own copy, rounded with the weights.
    """

    def __init__(self, config: DecoderConfig):
        self._config = config
        self._frequencies: dict[torch.device, tuple[Tensor, float]] = {}
        self._rotary: dict[tuple[torch.device, torch.dtype, int], tuple[Tensor, Tensor]] = {}
        self._masks: dict[tuple[torch.device, int | None], Tensor] = {}

    def rotary(
        self, seq: int, dtype: torch.dtype, device: torch.device, position_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), each [seq, head_dim / 2], or [batch, seq, head_dim / 2] by position_ids [batch or 1, seq].

        For positions 0, 1, ... without position_ids.
        """
        rope = self._config.rope
        assert rope is not None
        if position_ids is not None:
            # Only kind "dynamic" needs the largest position, for which the host waits for the device.
            longest = int(position_ids.max()) + 1 if rope.kind == "dynamic" else 0
            cos, sin = self._angles(position_ids, longest)
            return cos.to(dtype), sin.to(dtype)
        key = (device, dtype, seq if rope.kind == "dynamic" and seq > self._config.max_positions else 0)
        known = self._rotary.get(key)
        if known is None or known[0].shape[0] < seq:
            # Not an inference tensor, which a later training step could not use.
            with torch.inference_mode(False):
                cos, sin = self._angles(torch.arange(seq, device=device), seq)
                # Rounded once, not by every layer.
                known = self._rotary[key] = cos.to(dtype), sin.to(dtype)
        cos, sin = known
        return (cos, sin) if cos.shape[0] == seq else (cos[:seq], sin[:seq])

    def _angles(self, positions: Tensor, seq: int) -> tuple[Tensor, Tensor]:
        rope, device = self._config.rope, positions.device
        assert rope is not None
        if device not in self._frequencies or rope.kind == "dynamic":
            # Kept on the device: while they are copied there, the host waits for what runs on it.
            with torch.inference_mode(False):
                values = rotary_frequencies(rope, self._config.dim_of_head, self._config.max_positions, seq)
                self._frequencies[device] = values[0].to(device), values[1]
        frequencies, scale = self._frequencies[device]
        angles = positions[..., None].float() * frequencies
        return angles.cos() * scale, angles.sin() * scale

    def causal(
        self,
        seq: int,
        device: torch.device,
        window: int | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        seen: int = 0,
    ) -> Tensor | None:
        """Return the mask [seq, seen + seq] that `combined` needs besides an attention mask, or None.

        Without an attention mask, positions that don't go on by one begin another document, as in transformers: then the mask
        is [batch or 1, 1, seq, seq], and no position attends to another document.

        seen: number of positions of the same document before these.
        """
        if seen:
            all_seen = seq == 1 and attention_mask is None and (window is None or window > seen)
            return None if all_seen else _within(window, seen, seen + seq, device)
        window = None if window is None or window >= seq else window
        positions = position_ids if attention_mask is None else None
        if window is None and positions is None and (attention_mask is None or attention_mask.dim() != 2):
            return None
        known = self._masks.get((device, window))
        if known is None or known.shape[0] < seq:
            with torch.inference_mode(False):
                known = _within(window, 0, seq, device)
            self._masks[device, window] = known
        mask = known[:seq, :seq]
        if positions is None:
            return mask
        document = F.pad(positions.diff(dim=1) != 1, (1, 0)).cumsum(dim=1)
        return mask & (document[:, None, :, None] == document[:, None, None, :])


def _within(window: int | None, start: int, stop: int, device: torch.device) -> Tensor:
    """Return whether each position from `start` on attends to each one, [stop - start, stop]."""
    back = torch.arange(start, stop, device=device)[:, None] - torch.arange(stop, device=device)
    return (back >= 0) & (back < (stop if window is None else window))


def combined(causal: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
    """Return a mask, True where a position attends to another, as `causal` or [batch, 1, *causal.shape]; None for causal.

    - causal: the result of Tables.causal.
    - attention_mask: [batch, seq], 0 at padding; or [batch or 1, heads or 1, seq, seq], which replaces all but the window.

    A padding position attends to itself, so that no row is empty.
    """
    if attention_mask is None:
        return causal
    if attention_mask.dim() != 2:
        return attention_mask.bool() if causal is None else attention_mask.bool() & causal
    assert causal is not None
    places = torch.arange(causal.shape[1], device=causal.device)
    itself = places[-len(causal) :, None] == places
    return (causal & attention_mask[:, None, None, :].bool()) | itself
