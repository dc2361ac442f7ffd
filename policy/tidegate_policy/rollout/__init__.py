"""Does a new revision of the engines replace the old one? `side_by_side` compares the two, and `canary` goes from step to
step, or back."""
