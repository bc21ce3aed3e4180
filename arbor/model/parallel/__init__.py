"""One model on several processes: each holds some heads, and all make the same decisions."""
