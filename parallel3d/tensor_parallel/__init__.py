"""Tensor parallelism: layers whose weights are sharded over the ranks of a group, and the boundaries of their regions."""

from parallel3d.parameters import Slicing, slicing_of
from parallel3d.tensor_parallel.dropout import SequenceDropout, SlicedDropout
from parallel3d.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, column_outputs
from parallel3d.tensor_parallel.parallelize import Column, Row, Vocabulary, Whole, parallelize
from parallel3d.tensor_parallel.regions import (
    enter_region,
    gather_sequence,
    reduce_scatter_sequence,
    scatter_sequence,
    slicing_group,
    sum_gradients_over,
)
from parallel3d.tensor_parallel.slicing import AttentionHeads
from parallel3d.tensor_parallel.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy
