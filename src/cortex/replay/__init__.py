"""`cortex replay`: send the requests of a recording again, and compare the answers with the recorded ones."""
