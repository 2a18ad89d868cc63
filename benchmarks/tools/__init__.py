"""Load generators, peers, measurements and reports that the commands share."""
