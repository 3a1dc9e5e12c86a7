"""A pass over inductor's graphs: a backward that recomputes SwiGLU's result does so in the kernel of its gradient."""

from __future__ import annotations

from operator import getitem

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node


class RecomputedSwiGLU(CustomGraphPass):
    """Puts one operator in place of SwiGLU and its backward on the same tensor, unless the gradient needs the result."""

    def __call__(self, graph: Graph) -> None:
        """Replace the operators in a graph, and sort its nodes again."""
        operators = torch.ops.parallel3d
        for backward in graph.find_nodes(op="call_function", target=operators.swiglu_backward.default):
            again = next((node for node in backward.args[1].users if node.target is operators.swiglu.default), None)
            if again is None or _leads_to(again, backward):
                continue
            with graph.inserting_before(backward):
                both = graph.call_function(operators.swiglu_backward_and_result.default, backward.args)
                parts = [graph.call_function(getitem, (both, k)) for k in range(2)]
            both.meta["val"] = backward.meta["val"], again.meta["val"]
            for node, part in zip((backward, again), parts, strict=True):
                part.meta["val"] = node.meta["val"]
                node.replace_all_uses_with(part)
                graph.erase_node(node)
            stable_topological_sort(graph)

    def uuid(self) -> bytes:
        """Return what a cache of compiled graphs tells passes apart by."""
        return get_hash_for_files((__file__,))


def _leads_to(first: Node, last: Node) -> bool:
    """Return whether `last` is computed from `first`."""
    from_first = {first}
    for node in first.graph.nodes:
        if not from_first.isdisjoint(node.all_input_nodes):
            from_first.add(node)
    return last in from_first
