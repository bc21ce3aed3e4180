"""What a search costs and how good it is: evaluation, replay, calibration, timing, statistics."""
