"""Tables and lines that `cortex get` prints, as pure functions of the operator's JSON."""
