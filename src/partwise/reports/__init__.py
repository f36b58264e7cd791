"""What can be said about a task without training it: parameters, settings, heat, costs of serving."""
