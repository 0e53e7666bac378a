"""Rollout engines under one command line; each runs as a process of its own.

    python -m benchmarks.engines.X --model DIR --work FILE --seconds S --out FILE

An action ends after the number of tokens in its script, whatever was sampled; what was
sampled is the model's input afterwards. Float32, temperature 1, the whole vocabulary.
After a warm-up the timed run begins, and is cut after `--seconds`. FILE gets

    engine           its name
    trajectories     finished ones
    tokens           of actions, those of unfinished trajectories too
    seconds          of the timed run
    row_steps        rows times decode steps, waste included
    compilations     during the timed run
    peak_memory_gib  of the process
    complete         whether every trajectory was finished
    detail           what else the engine counted; ours: occupancy (share of the rows
                     that hold a trajectory), decoded and kept (tokens), host_exposed
                     (share of the time in which the device waits for the host)
"""
