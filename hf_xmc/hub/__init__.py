"""Publishing: what a training leaves on record, model cards, self-contained copies, uploads."""
