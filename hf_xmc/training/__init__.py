"""What makes a model: label features, tree, ranker, trainer."""
