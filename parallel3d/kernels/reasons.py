"""Why torch.compile breaks its graph at an operator; apart from them, since to mark a function is to import the compiler."""

NORM = "parallel3d normalizes and hands its input on in one function; compile without fullgraph"
