"""Pure scheduling: one instruction list that is built, lowered, validated, simulated and drawn here, and run by pipe/."""
