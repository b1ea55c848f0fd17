"""What runs on a rank: tasks, data, model, step, loop, evaluation, checkpoint. Started, not called, by launch."""
