"""The other arms: engines that Skotergy is measured against, and the simulated one that measures the harness."""
