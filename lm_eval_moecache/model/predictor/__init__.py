"""Predictors of the next router's logits: how they are applied, trained and judged."""
