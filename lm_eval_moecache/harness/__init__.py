"""What lm-eval sees: the model classes, their arguments, and the tasks."""
