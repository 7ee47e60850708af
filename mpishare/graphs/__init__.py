"""Functions that are captured into a graph once and replayed: `mpishare.capture`."""
