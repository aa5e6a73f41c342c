"""Whole experiments on top of the layers: corpora, models, training."""
