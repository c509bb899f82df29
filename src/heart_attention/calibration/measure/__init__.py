"""What a head's sparsity does to the velocity: trajectories, replays, probes, gradients."""
