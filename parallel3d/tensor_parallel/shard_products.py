"""Products of matrices whose rows are sharded over the ranks, multiplied while the shards travel.

An all-gather before a product, and a reduce-scatter after one (arXiv:2205.05198), can each be hidden by that very product: a
rank multiplies its own rows while those of the others arrive, and computes first the rows that it must send
(doi:10.1145/3567955.3567959). ShardMessages send them without occupying a multiprocessor.

Rows are a sequence's: [..., shard, features] on each rank, [..., shard * size, features] in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.autograd.products import Factors, Pair, multiply, rows_of
from parallel3d.comm.collectives import Group, ShardMessages
from parallel3d.comm.differentiable import Started

# A sample's shard as the messages that it takes: [samples * size][messages] of rows, [rows, features].
Blocks = Sequence[Sequence[Tensor]]


@dataclass(frozen=True)
class ShardProducts:
    """Products over a group whose ranks send each other shards. Every rank makes the same calls in the same order.

    Nothing here is followed by autograd.
    """

    group: Group
    copies: ShardMessages

    def start_gather(self, x: Tensor) -> Started:
        """[..., shard, features] -> [..., seq, features], every rank's."""
        rows = self._message_rows(x)
        shards, whole = _blocks(x.contiguous(), x.shape[-2], rows), self._whole(x, x.shape[-1])
        size, index = self.group.size, self.group.index
        blocks = _blocks(whole, x.shape[-2], rows)
        self._send(shards)
        works = [
            self.copies.receive(out, peer)
            for peer in self._sources()
            for sample in range(len(shards))
            for out in blocks[sample * size + peer]
        ]
        for sample, shard in enumerate(shards):
            for out, given in zip(blocks[sample * size + index], shard, strict=True):
                out.copy_(given)

        def finish() -> Tensor:
            for work in works:
                work.wait()
            return whole

        return finish

    def gather_kept(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gathered x [..., seq, in], and its product [..., seq, out] with weight [in, out]. x: [..., shard, in]."""
        kept = self._whole(x, x.shape[-1])
        (product,) = self.gather_products(x, [(weight.t(), None)], kept)
        return kept, product

    def gather_products(self, x: Tensor, pairs: Sequence[Pair], kept: Tensor | None = None) -> list[Tensor]:
        """Return F.linear of the gathered x by each weight and bias: [..., shard, in] -> [..., seq, out] of each.

        kept: [..., seq, in], the tensor to which the gathered x is written, if it is needed.
        """
        size, index = self.group.size, self.group.index
        shard, rows = x.shape[-2], self._message_rows(x)
        shards = _blocks(x.contiguous(), shard, rows)
        self._send(shards)
        outputs = [self._whole(x, len(weight)) for weight, _ in pairs]
        factors = [(weight.t(), bias) for weight, bias in pairs]
        targets = [_blocks(output, shard, rows) for output in outputs]
        keeping = None if kept is None else _blocks(kept, shard, rows)

        def multiply_rows(given: Tensor, block: int, message: int) -> None:
            if keeping is not None:
                keeping[block][message].copy_(given)
            for target, (right, bias) in zip(targets, factors, strict=True):
                if bias is None:
                    torch.mm(given, right, out=target[block][message])
                else:
                    torch.addmm(bias, given, right, out=target[block][message])

        for sample, messages in enumerate(shards):
            for message, given in enumerate(messages):
                multiply_rows(given, sample * size + index, message)
        for peer in self._sources():
            for sample, messages in enumerate(shards):
                for message, like in enumerate(messages):
                    with self.copies.taken(like.shape, x.dtype, peer) as given:
                        multiply_rows(given, sample * size + peer, message)
        return outputs

    def scatter_products(self, factors: Factors) -> Tensor:
        """Return this rank's shard of the sum of products over ranks: [..., seq, k] each -> [..., shard, features].

        The ranks' products are rounded, summed in fp32, and rounded once more.
        """
        size, index = self.group.size, self.group.index
        (left, right), *_ = factors
        *others, seq, _ = left.shape
        total = left.new_empty(*others, seq // size, right.shape[1])
        rows = self._message_rows(total)
        results = _blocks(total, seq // size, rows)
        parts = [(_blocks(left, seq // size, rows), right) for left, right in factors]

        def factors_of(block: int, message: int) -> Factors:
            return [(left[block][message], right) for left, right in parts]

        for peer in self._targets():
            for sample, messages in enumerate(results):
                for message in range(len(messages)):
                    self.copies.send(multiply(factors_of(sample * size + peer, message)), peer)
        for sample, messages in enumerate(results):
            for message, out in enumerate(messages):
                multiply(factors_of(sample * size + index, message), out=out)
                self._add_others(out)
        return total

    def _add_others(self, out: Tensor) -> None:
        """Add to `out` the next message of each other rank."""
        wide = out if self.group.size == 2 else out.to(torch.promote_types(out.dtype, torch.float32))
        for peer in self._sources():
            with self.copies.taken(out.shape, out.dtype, peer) as given:
                wide += given
        if wide is not out:
            out.copy_(wide)

    def _targets(self) -> list[int]:
        """Return the other ranks in the order of sending: each rank begins with a different one."""
        size, index = self.group.size, self.group.index
        return [(index + distance) % size for distance in range(1, size)]

    def _sources(self) -> list[int]:
        """Return the other ranks in the order in which their messages arrive."""
        size, index = self.group.size, self.group.index
        return [(index - distance) % size for distance in range(1, size)]

    def _message_rows(self, shard: Tensor) -> int:
        *_, rows, features = shard.shape
        return rows_of_message(rows, features * shard.element_size(), self.copies.most_bytes)

    def _send(self, shards: Blocks) -> None:
        for peer in self._targets():
            for messages in shards:
                for given in messages:
                    self.copies.send(given, peer)

    def _whole(self, x: Tensor, features: int) -> Tensor:
        *others, shard, _ = x.shape
        return x.new_empty(*others, shard * self.group.size, features)


def rows_of_message(rows: int, row_bytes: int, most_bytes: int) -> int:
    """Return the rows of each message of a shard, in as few and as equal messages of at most most_bytes as possible."""
    most = max(1, most_bytes // row_bytes)
    return -(-rows // -(-rows // most))


def _blocks(x: Tensor, shard: int, rows: int) -> Blocks:
    """Split [..., a multiple of shard, features] into shards, and each into messages of `rows` rows or, the last, fewer."""
    if shard % rows:
        return [block.split(rows) for block in rows_of(x).split(shard)]
    # reshape and unbind are the views that cost the host the least.
    messages, each = x.reshape(-1, rows, x.shape[-1]).unbind(), shard // rows
    return [messages[start : start + each] for start in range(0, len(messages), each)]
