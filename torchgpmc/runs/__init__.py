"""What a method's options turn into: a target, starting points, and the run of a chain that ``run.py`` advances."""
