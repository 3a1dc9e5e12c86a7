"""Time of transfers and collectives over the links of a cluster."""
